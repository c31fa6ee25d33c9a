"""The token that a folder's tokenizer calls its EOS, found in its files without the tokenizer's library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

MAX_DIGITS = 10
"""Of a token's id."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Token(msgspec.Struct):
    content: str
    id: TokenId


class _Model(msgspec.Struct):
    vocab: dict[str, TokenId] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """What is read of tokenizer.json."""

    added_tokens: list[_Token] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of ``eos_token`` in tokenizer_config.json; None if the files name none, or do not give its id.

    Damaged files count as missing: the tokenizer that is loaded from them reports what is wrong. Takes up to
    0.1 s for a tokenizer.json of 30 MB.
    """
    settings = _read(folder / "tokenizer_config.json", dict[str, Any], {})
    token = settings.get("eos_token") or _read(folder / "special_tokens_map.json", dict[str, Any], {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    declared = settings.get("added_tokens_decoder")
    for key, declared_token in declared.items() if isinstance(declared, dict) else ():
        if isinstance(declared_token, dict) and declared_token.get("content") == content and len(key) < MAX_DIGITS:
            return int(key) if key.isdecimal() else None
    tokenizer = _read(folder / "tokenizer.json", _Tokenizer, _Tokenizer())
    added: dict[str, int] = {token.content: token.id for token in tokenizer.added_tokens}
    if content in added:
        return added[content]
    vocab = _decode(tokenizer.model, _Model, _Model()).vocab or _read(folder / "vocab.json", dict[str, TokenId], {})
    if not isinstance(vocab, dict):
        vocab = {piece: token_id for token_id, (piece, _) in enumerate(vocab)}
    found: int | None = vocab.get(content)
    return found


def _read(path: Path, kind: Any, default: Any) -> Any:
    try:
        return _decode(path.read_bytes(), kind, default)
    except OSError:
        return default


def _decode(content: bytes | msgspec.Raw, kind: Any, default: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError):
        return default
