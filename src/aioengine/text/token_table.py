"""Tables of what each token id shows, made from a tokenizer's vocabulary and decoder.

The decoders of the ``tokenizers`` library are a closed set, described by JSON. What they do to a token is either local
(a function of the token and of its being the first one), or one of two ways to join bytes, or something rare. The local
part is computed by the library's own decoders, once for each token; for rare decoders, and for tokenizers that are not
from that library, the table holds the decode function itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.text.loading import MAX_TOKEN_IDS, failures_as

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# What ``ByteFallback`` takes for a byte: six bytes in all, and Rust's number syntax between, which admits a plus sign.
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder makes of each token id; built once for a tokenizer, shared by all its sequences.

    Attributes:
        pieces: by token id: its text; or bytes that are not a text of their own (they are joined to their neighbours);
            or None for an id that the decoder drops (special tokens that are skipped, holes in the vocabulary). Ids
            beyond the end are dropped too: models pad their vocabularies.
        first_pieces: the text of an id as the first kept token, where that is another one than ``pieces`` has.
        byte_runs: bytes decode by whole runs (``ByteFallback``); otherwise as one UTF-8 stream (``ByteLevel``).
        lead_strip: at most this many ``lead_strip_char`` are cut from the very beginning of the text.
        lead_strip_char: one character.
    """

    pieces: list[str | bytes | None]
    first_pieces: dict[int, str] = {}
    byte_runs: bool = False
    lead_strip: int = 0
    lead_strip_char: str = " "

    def to_bytes(self, token_ids: Iterable[int], *, is_start: bool) -> list[bytes]:
        """Return each id's part of the text's UTF-8: together they are the text, where that has whole characters.

        Bytes that are no character, which a text shows as U+FFFD, are here what they are. About 0.2 µs an id.

        Args:
            is_start: the text begins with these ids; else others came before them.
        """
        pieces, strip_char = self.pieces, self.lead_strip_char.encode()
        num_to_strip = self.lead_strip if is_start else 0
        parts = []
        for token_id in token_ids:
            piece = pieces[token_id] if token_id < len(pieces) else None
            if piece is None:
                parts.append(b"")
                continue
            if is_start:
                is_start = False
                piece = self.first_pieces.get(token_id, piece)
            part = piece if isinstance(piece, bytes) else piece.encode()
            while num_to_strip and part.startswith(strip_char):
                part = part[len(strip_char) :]
                num_to_strip -= 1
            if part:
                num_to_strip = 0
            parts.append(part)
        return parts


class WindowTable(msgspec.Struct, frozen=True, kw_only=True):
    """For tokenizers whose decoder is only known as a function: each new token is decoded with a few before it.

    Exact if the text at a token depends on the `WindowDetokenizer.NUM_CONTEXT_TOKENS` tokens before it alone, and if
    what a later token can still change is at most three trailing U+FFFD (a character that may yet be completed) or lies
    after the last SETTLES token.

    Attributes:
        decode: output ids to text, cheap for some dozens of ids.
        kinds: by token id, one of DROPPED (not part of the text), HOLDS (its text depends on what follows) and SETTLES.
            Ids beyond the end are dropped.
    """

    DROPPED = 0
    HOLDS = 1
    SETTLES = 2

    decode: Callable[[list[int]], str]
    kinds: bytes


class TokenTables(NamedTuple):
    """The two tables of a tokenizer; the first is that of ``decode(ids, skip_special_tokens=True)``."""

    without_special: TokenTable | WindowTable
    with_special: TokenTable | WindowTable


def build_token_tables(backend: Backend, *, max_ids: int = MAX_TOKEN_IDS) -> TokenTables:
    """Build the tables with which a detokenizer gives exactly ``backend.decode(ids, skip_special_tokens=...)``.

    Takes about 2 µs a vocabulary entry: call it off the event loop.

    Raises:
        ModelLoadError: the tokenizer's decoder strips the end of the text, or it has an id of ``max_ids`` or more.
    """
    num_ids = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    _check_ids(num_ids, max_ids)
    tokens: list[str | None] = [backend.id_to_token(token_id) for token_id in range(num_ids)]
    # The library skips special tokens by content, not by id.
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special_ids = [token_id for token_id, token in enumerate(tokens) if token in special]
    steps = [] if backend.decoder is None else _decoder_steps(backend.decoder)
    table = _table(tokens, backend.decoder, steps)
    if table is not None:
        pieces = table.pieces.copy()
        for token_id in special_ids:
            pieces[token_id] = None
        return TokenTables(msgspec.structs.replace(table, pieces=pieces), table)
    if any(step["type"] == "Strip" and step["stop"] for step in steps or ()):  # it panics at a text shorter than that
        raise ModelLoadError("the tokenizer's decoder strips the end of the text (Strip with stop > 0): not supported")
    byte_tokens_hold = steps is None or any(step["type"] == "ByteFallback" for step in steps)
    return _window_tables(backend.decode, tokens, special_ids, byte_tokens_hold=byte_tokens_hold)


def build_slow_token_tables(tokenizer: Any, *, max_ids: int = MAX_TOKEN_IDS) -> TokenTables:
    """Build the tables of a transformers tokenizer that does its own decoding, in Python.

    Without a description of its decoder this is as exact as `WindowTable` says.
    """
    _check_ids(len(tokenizer), max_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return _window_tables(decode, tokens, tokenizer.all_special_ids, byte_tokens_hold=True)


def decoding(decode: Callable[..., str]) -> Callable[..., str]:
    """A library's decode as one that raises InvalidRequest where the library fails."""

    def refused(problem: str) -> InvalidRequest:
        return InvalidRequest(f"the model's tokenizer cannot decode these tokens: {problem}", param="token_ids")

    def run(token_ids: list[int], **options: bool) -> str:
        with failures_as(refused):
            return decode(token_ids, **options)

    return run


def _check_ids(num_ids: int, max_ids: int) -> None:
    if num_ids > max_ids:
        raise ModelLoadError(
            f"the tokenizer has the token id {num_ids - 1}, far beyond the model's (vocab_size in config.json): "
            f"less than {max_ids} is needed"
        )


def _window_tables(
    decode: Callable[..., str], tokens: list[str | None], special_ids: list[int], *, byte_tokens_hold: bool
) -> TokenTables:
    def kind(token: str | None) -> int:
        if token is None:
            return WindowTable.DROPPED
        return WindowTable.HOLDS if byte_tokens_hold and _BYTE_TOKEN.fullmatch(token) else WindowTable.SETTLES

    def table(*, skip_special_tokens: bool) -> WindowTable:
        run = partial(decoding(decode), skip_special_tokens=skip_special_tokens)
        return WindowTable(decode=run, kinds=bytes(kinds))

    kinds = bytearray(map(kind, tokens))
    with_special = table(skip_special_tokens=False)
    for token_id in special_ids:
        kinds[token_id] = WindowTable.DROPPED
    return TokenTables(table(skip_special_tokens=True), with_special)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]] | None:
    """The decoder as a flat list of its steps' descriptions; None if it cannot be described."""
    try:
        steps = [json.loads(decoder.__getstate__())]
    except Exception:  # the library raises a bare Exception for a decoder that is a Python object
        return None
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    return steps


def _table(tokens: list[str | None], decoder: Any, steps: list[dict[str, Any]] | None) -> TokenTable | None:
    """The table of a decoder that nearly all models have: GPT-2's, Llama 2's, Gemma's, T5's, BERT's, or none."""
    match steps:
        case []:
            return _positional_table(tokens, " ".join)
        case [{"type": "ByteLevel"}]:
            byte_of_char = _byte_of_char()
            return TokenTable(pieces=[token and _byte_level_piece(token, byte_of_char) for token in tokens])
        case [
            {"type": "Replace", "pattern": {"String": old}, "content": new}, {"type": "ByteFallback"}, {"type": "Fuse"}
        ] if old:  # fmt: skip
            return TokenTable(
                pieces=[token and _piece_or_byte(token.replace(old, new)) for token in tokens], byte_runs=True
            )
        case [*others, {"type": "Fuse"}, {"type": "Strip", "content": char, "start": start, "stop": 0}]:
            table = _table(tokens, decoder, [*others, {"type": "Fuse"}])
            return table and msgspec.structs.replace(table, lead_strip=start, lead_strip_char=char)
        case [{"type": "Metaspace" | "WordPiece"}]:
            return _positional_table(tokens, decoder.decode)
    return None


def _byte_level_piece(token: str, byte_of_char: dict[str, int]) -> str | bytes:
    """The text of a token whose characters are bytes, or the bytes if they are none of their own."""
    try:
        raw = bytes(map(byte_of_char.__getitem__, token))
    except KeyError:  # one foreign character, and the library takes the whole token as it is
        return token
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _piece_or_byte(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes((int(match[1], 16),)) if match else token


def _positional_table(tokens: list[str | None], decode: Callable[[list[str]], str]) -> TokenTable:
    """A table of two texts a token: as the first one, and as one after another ("a")."""
    num_before = len(decode(["a"]))
    pieces = [None if token is None else decode(["a", token])[num_before:] for token in tokens]
    firsts = {token_id: decode([token]) for token_id, token in enumerate(tokens) if token is not None}
    first_pieces = {token_id: first for token_id, first in firsts.items() if first != pieces[token_id]}
    return TokenTable(pieces=list(pieces), first_pieces=first_pieces)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's map of printable characters to the bytes that they stand for.

    Printable Latin-1 stands for itself; the 68 other bytes, in order, have the characters from U+0100 on.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
