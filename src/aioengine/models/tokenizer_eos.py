"""The token that a folder's tokenizer calls its EOS, found in its files without the tokenizer's library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
T = TypeVar("T")


class _Token(msgspec.Struct):
    content: str = ""
    id: TokenId = 0


class _Settings(msgspec.Struct):
    """The part of tokenizer_config.json and special_tokens_map.json that is read."""

    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[TokenId, _Token] = {}


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that is read."""

    added_tokens: list[_Token] = []


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of ``eos_token`` in tokenizer_config.json; None if the files name none, or it is no added token of theirs.

    Damaged files count as missing: the tokenizer that is loaded from them reports what is wrong. Takes some 0.1 s for a
    tokenizer.json of 30 MB.
    """
    settings = _read(folder / "tokenizer_config.json", _Settings())
    token = settings.eos_token or _read(folder / "special_tokens_map.json", _Settings()).eos_token
    content = token.content if isinstance(token, _Token) else token
    ids = {token.content: token.id for token in _read(folder / "tokenizer.json", _Tokenizer()).added_tokens}
    ids |= {token.content: token_id for token_id, token in settings.added_tokens_decoder.items()}
    return ids.get(content) if content else None


def _read(path: Path, default: T) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type(default))
    except (OSError, ValueError, RecursionError):
        return default
