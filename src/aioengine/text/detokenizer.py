"""Token ids back into text, one token at a time.

The text of a completion is the decode of its output ids alone, without the prompt. All texts of a detokenizer together
are exactly what the tokenizer's decoder makes of all the ids at once. Three things stand between a token and its text:

- Half a character. Byte-level vocabularies (GPT-2, Llama 3, Qwen) cut characters into tokens; the bytes wait until the
  character is whole or can no longer become one.
- A run of byte tokens. The ``ByteFallback`` decoder (Llama 2, Mistral 7B, Gemma) makes characters of a run of
  ``<0xNN>`` tokens only if the *whole* run is valid UTF-8 and otherwise one U+FFFD of each byte, so nothing of a run
  is known before a token that is not a byte ends it.
- The first token. ``Metaspace``, ``WordPiece`` and ``Strip`` treat the beginning of a text differently.

Nearly every token has none of these, and costs one list lookup: this runs on the event loop for every token of every
sequence.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Protocol

from aioengine.text.stop_strings import StopSearch
from aioengine.text.token_table import TokenTable, WindowTable

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence's way from output ids to text. Feed each id once, in order; flush once, at the end."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; from then on nothing is consumed and every text is empty."""

    def feed_one(self, token_id: int) -> str:
        """The text that this id settles, often "" around characters of several tokens."""

    def flush(self) -> str:
        """The rest of the text: what was held back, bytes without their character as U+FFFD."""


def make_detokenizer(
    table: TokenTable | WindowTable,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    joined: Mapping[int, str] | None = None,
) -> Detokenizer:
    """Make one sequence's detokenizer.

    Args:
        table: of all tokens, special ones included, where ``joined`` has some.
        stop: non-empty strings; see `StopSearch` for which one is found.
        include_stop: end the text after the stop string instead of before it.
        min_tokens: the text of the first ``min_tokens`` tokens is no part of a match.
        joined: the contents of the special tokens, for a text without spaces between them; see `JoiningDetokenizer`.
    """
    plain = PieceDetokenizer(table) if isinstance(table, TokenTable) else WindowDetokenizer(table)
    detokenizer = JoiningDetokenizer(plain, joined) if joined else plain
    if not stop:
        return detokenizer
    return StoppingDetokenizer(detokenizer, StopSearch(stop, include_stop=include_stop), min_tokens=min_tokens)


class PieceDetokenizer:
    """Detokenize by table: one lookup for a token that is a text of its own, a short detour for the others."""

    __slots__ = ("_is_first", "_is_settled", "_lead_strip", "_pending", "_pieces", "_table")

    stop_string: None = None

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._pieces = table.pieces
        self._pending = b""
        self._is_first = bool(table.first_pieces)
        self._lead_strip = table.lead_strip
        # True while the next whole piece is its own text, whatever came before it.
        self._is_settled = not (self._is_first or self._lead_strip)

    def feed_one(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:
            return ""
        if self._is_settled and piece.__class__ is str:  # 30 ns less than isinstance
            return piece
        return self._feed_unsettled(token_id, piece)

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        text = _decode_run(pending) if self._table.byte_runs else pending.decode("utf-8", "replace")
        return self._strip_lead(text)

    def _feed_unsettled(self, token_id: int, piece: str | bytes | None) -> str:
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._pending += piece
            text = "" if self._table.byte_runs else self._take_characters()
        else:
            if self._is_first:
                piece = self._table.first_pieces.get(token_id, piece)
            if not self._pending:
                text = piece
            elif self._table.byte_runs:
                text = _decode_run(self._pending) + piece
                self._pending = b""
            else:
                self._pending += piece.encode()
                text = self._take_characters()
        self._is_first = False
        text = self._strip_lead(text)
        self._is_settled = not (self._pending or self._is_first or self._lead_strip)
        return text

    def _take_characters(self) -> str:
        """Take what is decided from the pending bytes: whole characters, and U+FFFD for what can never be one."""
        text, num_decided_bytes = utf_8_decode(self._pending, "replace", False)
        self._pending = self._pending[num_decided_bytes:]
        return text

    def _strip_lead(self, text: str) -> str:
        if not self._lead_strip or not text:
            return text
        num_leading = len(text) - len(text.lstrip(self._table.lead_strip_char))
        num_cut = min(num_leading, self._lead_strip)
        # The next text is at the beginning still, if this one was cut away whole.
        self._lead_strip = self._lead_strip - num_cut if num_cut == len(text) else 0
        return text[num_cut:]


def _decode_run(run: bytes) -> str:
    """Decode a run of byte tokens as ``ByteFallback`` does: all of it, or one U+FFFD a byte."""
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


class WindowDetokenizer:
    """Detokenize through a decode function: the last few ids are decoded again, and what is new at the end is shown."""

    __slots__ = ("_ids", "_num_shown", "_rebase_at", "_table")

    NUM_CONTEXT_TOKENS = 16
    # One character has at most three bytes before its last one, and each may show as a U+FFFD of its own.
    MAX_UNDECIDED_CHARS = 3

    stop_string: None = None

    def __init__(self, table: WindowTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._num_shown = 0
        self._rebase_at = 2 * self.NUM_CONTEXT_TOKENS

    def feed_one(self, token_id: int) -> str:
        kinds = self._table.kinds
        kind = kinds[token_id] if token_id < len(kinds) else WindowTable.DROPPED
        if kind == WindowTable.DROPPED:
            return ""
        self._ids.append(token_id)
        if kind == WindowTable.HOLDS:
            return ""
        text = self._table.decode(self._ids)
        num_undecided = len(text) - len(text.rstrip(REPLACEMENT))
        end = len(text) - min(num_undecided, self.MAX_UNDECIDED_CHARS)
        new_text = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if len(self._ids) >= self._rebase_at:
            self._rebase(text)
        return new_text

    def flush(self) -> str:
        new_text = self._table.decode(self._ids)[self._num_shown :] if self._ids else ""
        self._num_shown += len(new_text)
        return new_text

    def _rebase(self, text: str) -> None:
        """Forget all but the last tokens, so that a token's cost does not grow with the text."""
        ids = self._ids[-self.NUM_CONTEXT_TOKENS :]
        context = self._table.decode(ids)
        hidden = text[self._num_shown :]
        # Kept tokens that do not reach back before the hidden text are no context for it: try again later.
        if len(context) > len(hidden) and context.endswith(hidden):
            self._ids = ids
            self._num_shown = len(context) - len(hidden)
        self._rebase_at = len(self._ids) + self.NUM_CONTEXT_TOKENS


class JoiningDetokenizer:
    """Put nothing between special tokens: one directly after another shows its content as it is (vLLM's rule).

    Some decoders put a space before each token, special ones too. The spaces before the first of several special tokens
    and after the last one stay.

    Args:
        contents: of every special token, by id.
    """

    __slots__ = ("_contents", "_detokenizer", "_was_special")

    stop_string: None = None

    def __init__(self, detokenizer: Detokenizer, contents: Mapping[int, str]) -> None:
        self._contents = contents
        self._detokenizer = detokenizer
        self._was_special = False

    def feed_one(self, token_id: int) -> str:
        content = self._contents.get(token_id)
        was_special, self._was_special = self._was_special, content is not None
        if content is None or not was_special:
            return self._detokenizer.feed_one(token_id)
        text = self._detokenizer.flush()
        self._detokenizer.feed_one(token_id)  # what follows it depends on it
        self._detokenizer.flush()
        return text + content

    def flush(self) -> str:
        return self._detokenizer.flush()


class StoppingDetokenizer:
    """Show a detokenizer's text up to the stop string that `StopSearch` finds in it; its last token's rest is dropped.

    Text that the first ``min_tokens`` tokens settle is shown at once and is no part of a match. The text of ``flush``
    is searched too, so that the whole text is cut wherever a search in the full decode would cut it.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_search", "stop_string")

    def __init__(self, detokenizer: Detokenizer, search: StopSearch, *, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._search = search
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stop_string: str | None = None

    def feed_one(self, token_id: int) -> str:
        if self.stop_string is not None:
            return ""
        self._num_tokens += 1
        return self._searched(self._detokenizer.feed_one(token_id))

    def flush(self) -> str:
        if self.stop_string is not None:
            return ""
        return self._searched(self._detokenizer.flush()) + self._search.flush()

    def _searched(self, text: str) -> str:
        if text and self._num_tokens > self._min_tokens:
            text = self._search.feed(text)
            self.stop_string = self._search.found
        return text
