"""Places of tokens in a text, in characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextPlace:
    """A place in a text, in characters, that moves on token by token.

    OpenAI's ``text_offset`` counts characters of the text, where a token may hold a part of a character.

    Args:
        token_bytes: `Engine.token_bytes`.
        prompt: the text, if it is known: special tokens that are not in it, as the first may be, do not move the place.
        offset: the place of the first token.
        skips_special: the text is without special tokens.
    """

    def __init__(
        self,
        token_bytes: Callable[..., list[bytes]],
        prompt: str | None = None,
        *,
        offset: int = 0,
        skips_special: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._prompt = prompt
        self._offset = offset
        self._skips_special = skips_special
        self._is_start = prompt is None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of a character that is not complete."""

    def move(self, token_id: int, shown: str) -> int:
        """Move past a token, which is shown as ``shown``; returns the token's place in the text.

        A token that continues a character has the place of that character.
        """
        (data,) = self._token_bytes([token_id], is_start=self._is_start, skip_special_tokens=self._skips_special)
        self._is_start = False
        is_open = bool(self._decoder.getstate()[0])
        if is_open and data and data[0] & 0xC0 != 0x80:  # nothing completes it, and the text has U+FFFD
            self._offset += len(self._decoder.decode(b"", True))
            is_open = False
        begin = self._offset
        if self._prompt is not None and not is_open:
            data = self._found(token_id, data, self._prompt)
        self._offset += len(self._decoder.decode(data))
        return begin + (data[:1] == b" " and bool(shown) and shown[0] != " ")  # some vocabularies show no space

    def _found(self, token_id: int, data: bytes, prompt: str) -> bytes:
        """A token's bytes as the prompt has them; none if it is a special token that is not there."""
        text = data.decode(errors="ignore")
        if prompt.startswith(text, self._offset):
            return data
        if text[:1] == " " and prompt.startswith(text[1:], self._offset):  # some tokenizers put it before a text
            return data[1:]
        return data if any(self._token_bytes([token_id], is_start=False, skip_special_tokens=True)) else b""
