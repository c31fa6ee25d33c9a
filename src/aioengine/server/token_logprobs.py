"""Log-probabilities of tokens as JSON, in the layouts of chats, of completions and of vLLM's prompts."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from aioengine.outputs import CompletionDelta, Logprob, TokenLogprobs

encode = msgspec.json.Encoder().encode

TokenBytes = Callable[..., list[bytes]]
"""`Engine.token_bytes`."""

ENTRIES_A_SLICE = 500
"""Log-probabilities that are encoded before other tasks run."""


class PositionWriter:
    """Writes log-probabilities of tokens in the chats' layout.

    Args:
        top_logprobs: likeliest tokens to report at each position.
        is_by_ids: tokens are named by their ids.
    """

    def __init__(self, token_bytes: TokenBytes, top_logprobs: int, *, is_by_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self._is_by_ids = is_by_ids
        self._begun: set[int] = set()
        """Choices of which some positions have been written."""

    def encode(self, choice: int, position: TokenLogprobs) -> bytes:
        """JSON of a choice's next token, and of the ``top_logprobs`` likeliest ones, by rank."""
        is_start = choice not in self._begun
        self._begun.add(choice)
        entries = {}
        for token_id, entry in position.items():
            # One at a time: they are alternatives, and do not follow each other.
            (data,) = self._token_bytes([token_id], is_start=is_start, skip_special_tokens=False)
            name = _name_of(token_id, _text_of(entry), is_by_ids=self._is_by_ids)
            entries[token_id] = {"token": name, "logprob": _finite(entry.logprob), "bytes": list(data)}
        ranked = sorted((entry.rank, token_id) for token_id, entry in position.items())
        top = [entries[token_id] for rank, token_id in ranked if rank <= self._top_logprobs]
        return encode({**entries[next(iter(position))], "top_logprobs": top})


def positions_a_slice(top_logprobs: int | None) -> int:
    """`Answer.max_positions` for so many likeliest tokens at each position."""
    return max(1, ENTRIES_A_SLICE // ((top_logprobs or 0) + 1))


class TextPlace:
    """A place in a text, in characters, that moves on token by token.

    Args:
        prompt: the text, if it is known: special tokens that are not in it, as the first may be, do not move the place.
        offset: the place of the first token.
        skips_special: the text is without special tokens.
    """

    def __init__(
        self, token_bytes: TokenBytes, prompt: str | None = None, *, offset: int = 0, skips_special: bool = False
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


class Columns:
    """Tokens with their log-probabilities in the completions' layout, as JSON: four lists of the same length.

    Args:
        place: the first token's.
        num_top: likeliest tokens to report. is_by_ids: tokens are named by their ids.
    """

    def __init__(self, place: TextPlace, num_top: int, *, is_by_ids: bool) -> None:
        self.place = place
        self._num_top = num_top
        self._is_by_ids = is_by_ids
        self._rows: list[tuple[bytes, bytes, bytes, bytes]] = []

    def add(self, position: TokenLogprobs) -> None:
        """Add a sampled token, and the likeliest ones by their names, the sampled one among them."""
        top: dict[str, float] = {}
        for token_id, entry in _likeliest(position, self._num_top).items():
            name = _name_of(token_id, _text_of(entry), is_by_ids=self._is_by_ids)
            top.setdefault(name, _finite(entry.logprob))  # several half characters have the same text
        sampled_id, sampled = next(iter(position.items()))
        self.add_token(sampled_id, _text_of(sampled), _finite(sampled.logprob), top)

    def add_token(self, token_id: int, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        name = _name_of(token_id, text, is_by_ids=self._is_by_ids)
        self._rows.append((encode(name), encode(logprob), encode(top), b"%d" % self.place.move(token_id, text)))

    def encoded(self) -> bytes:
        columns = [b",".join(column) for column in zip(*self._rows, strict=True)] or [b""] * 4
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(columns)


def split_delta(delta: CompletionDelta, max_positions: int) -> Iterator[CompletionDelta]:
    """Split a long merged delta into several with at most ``max_positions`` each; the last has its text."""
    positions = delta.logprobs or []
    last = max(0, len(positions) - 1) // max_positions * max_positions
    for first in range(0, last, max_positions):
        end = first + max_positions
        ids, part = delta.token_ids[first:end], positions[first:end]
        yield CompletionDelta(index=delta.index, text="", token_ids=ids, logprobs=part)
    yield msgspec.structs.replace(delta, token_ids=delta.token_ids[last:], logprobs=positions[last:])


def _likeliest(position: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """A position's own token and the likeliest ``num_top``: more may have been computed, for another field."""
    own = next(iter(position))
    return {token_id: entry for token_id, entry in position.items() if token_id == own or entry.rank <= num_top}


def plain_position(position: TokenLogprobs, num_top: int) -> dict[int, dict[str, Any]]:
    """A position of a prompt in vLLM's format."""
    return {
        token_id: {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in _likeliest(position, num_top).items()
    }


def _name_of(token_id: int, text: str, *, is_by_ids: bool) -> str:
    """A token's name: its text, or ``token_id:`` and its id, as in vLLM."""
    return f"token_id:{token_id}" if is_by_ids else text


def _text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(logprob: float) -> float:
    """A log-probability of at least -9999, vLLM's floor: JSON has no infinities."""
    return max(logprob, -9999.0)
