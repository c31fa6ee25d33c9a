"""The token that a folder's tokenizer calls its EOS, found in its files without the tokenizer's library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Vocab = dict[str, TokenId]
T = TypeVar("T")


class _Token(msgspec.Struct):
    content: str = ""
    id: TokenId = 0


class _Settings(msgspec.Struct):
    """What is read of tokenizer_config.json and special_tokens_map.json."""

    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[TokenId, _Token] = {}


class _Model(msgspec.Struct, frozen=True):
    vocab: Vocab | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """What is read of tokenizer.json."""

    added_tokens: list[_Token] = []
    model: _Model = _Model()


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of ``eos_token`` in tokenizer_config.json; None if the files name none, or do not give its id.

    Damaged files count as missing: the tokenizer that is loaded from them reports what is wrong. Takes some 0.1 s for a
    tokenizer.json of 30 MB.
    """
    settings = _read(folder / "tokenizer_config.json", _Settings())
    token = settings.eos_token or _read(folder / "special_tokens_map.json", _Settings()).eos_token
    content = token.content if isinstance(token, _Token) else token
    if not content:
        return None
    declared = {token.content: token_id for token_id, token in settings.added_tokens_decoder.items()}
    if content in declared:
        return declared[content]
    tokenizer = _read(folder / "tokenizer.json", _Tokenizer())
    vocab = tokenizer.model.vocab or _read(folder / "vocab.json", {}, Vocab)
    if not isinstance(vocab, dict):
        vocab = {piece: token_id for token_id, (piece, _) in enumerate(vocab)}
    return {**vocab, **{token.content: token.id for token in tokenizer.added_tokens}}.get(content)


def _read(path: Path, default: T, kind: Any = None) -> T:
    try:
        found: T = msgspec.json.decode(path.read_bytes(), type=kind or type(default))
        return found
    except (OSError, ValueError, RecursionError):
        return default
