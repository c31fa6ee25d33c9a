"""Token ids back into text, one token at a time, and stop strings in that text.

The text of a completion is the decode of its output ids alone; the prompt is never seen here. A detokenizer is fed each
id once and returns the text that this id settles, so that all its texts together, the one from ``flush`` included,
are exactly what the tokenizer's decoder makes of all the ids at once. Three things stand between a token and its text:

- Half a character. Byte-level vocabularies (GPT-2, Llama 3, Qwen) cut characters into tokens; the bytes wait until the
  character is whole or can no longer become one.
- A run of byte tokens. The ``ByteFallback`` decoder (Llama 2, Mistral 7B, Gemma) makes characters of a run of
  ``<0xNN>`` tokens only if the *whole* run is valid UTF-8 and otherwise one U+FFFD of each byte, so nothing of a run
  is known before a token that is not a byte ends it.
- The first token. ``Metaspace``, ``WordPiece`` and ``Strip`` treat the beginning of a text differently.

Nearly every token has none of these, and for it `PieceDetokenizer` costs one list lookup. It runs on the event loop for
every token of every sequence, which is why it is a table of ready strings and not a call into the tokenizer.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

REPLACEMENT = "\ufffd"


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
    """For tokenizers whose decoder is only known as a function: decode a few tokens again with each new one.

    Exact if the text at a token depends on no more than the `WindowDetokenizer.NUM_CONTEXT_TOKENS` tokens before it,
    and if what a later token can still change is at most three trailing U+FFFD (a character that may yet be completed)
    or lies after the last SETTLES token.

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


class Detokenizer(Protocol):
    """One sequence's way from output ids to text. Feed each id once, in order; flush once, at the end."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; from then on nothing is consumed and every text is empty."""

    @property
    def stop_token_index(self) -> int | None:
        """The index among the output ids (0 is the first one fed) of the token that completed ``stop_string``."""

    def feed_one(self, token_id: int) -> str:
        """Return the text that this id settles, often "" around characters of several tokens."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids settle: the same as feeding them one by one, stop strings included."""

    def flush(self) -> str:
        """Return the rest of the text: what was held back, bytes without their character as U+FFFD."""


def make_detokenizer(
    table: TokenTable | WindowTable,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    joined: Mapping[int, str] | None = None,
) -> Detokenizer:
    """Make one sequence's detokenizer; without stop strings nothing looks for them.

    Args:
        table: of all tokens, special ones included, where ``joined`` has some.
        stop: non-empty strings; see `StoppingDetokenizer` for which one is found.
        include_stop: end the text after the stop string instead of before it.
        min_tokens: the text of the first ``min_tokens`` tokens is no part of a match.
        joined: the contents of the special tokens, for a text without spaces between them; see `JoiningDetokenizer`.
    """
    plain = PieceDetokenizer(table) if isinstance(table, TokenTable) else WindowDetokenizer(table)
    detokenizer = JoiningDetokenizer(plain, joined) if joined else plain
    if not stop:
        return detokenizer
    return StoppingDetokenizer(detokenizer, stop, include_stop=include_stop, min_tokens=min_tokens)


class PieceDetokenizer:
    """Detokenize by table: one lookup for a token that is a text of its own, a short detour for the others."""

    __slots__ = ("_is_first", "_is_settled", "_lead_strip", "_pending", "_pieces", "_table")

    stop_string: None = None
    stop_token_index: None = None

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

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.feed_one, token_ids))

    def feed_special(self, token_id: int, content: str) -> str:
        """Feed an id that shows ``content`` instead of what the table has for it; not for the first one."""
        return self._feed_unsettled(token_id, content)

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        if self._table.byte_runs:
            return self._strip_lead(_decode_run(pending))
        return self._strip_lead(pending.decode("utf-8", "replace"))

    def _feed_unsettled(self, token_id: int, piece: str | bytes | None) -> str:
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._pending += piece
            text = "" if self._table.byte_runs else self._take_characters()
            self._is_first = False
        else:
            if self._is_first:
                self._is_first = False
                piece = self._table.first_pieces.get(token_id, piece)
            if not self._pending:
                text = piece
            elif self._table.byte_runs:
                text = _decode_run(self._pending) + piece
                self._pending = b""
            else:
                self._pending += piece.encode()
                text = self._take_characters()
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
        # A text that was cut away whole leaves the next one at the beginning.
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
    stop_token_index: None = None

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

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.feed_one, token_ids))

    def feed_special(self, token_id: int, content: str) -> str:
        """Feed an id that shows ``content`` instead of what the decoder makes of it; not for the first one."""
        text = self.flush()
        self.feed_one(token_id)
        self.flush()
        return text + content

    def flush(self) -> str:
        new_text = self._table.decode(self._ids)[self._num_shown :] if self._ids else ""
        self._num_shown += len(new_text)
        return new_text

    def _rebase(self, text: str) -> None:
        """Forget all but the last tokens, so that a token's cost does not grow with the text."""
        ids = self._ids[-self.NUM_CONTEXT_TOKENS :]
        context = self._table.decode(ids)
        hidden = text[self._num_shown :]
        # Where the kept tokens do not reach back before the hidden text they are no context for it: try again later.
        if len(context) > len(hidden) and context.endswith(hidden):
            self._ids = ids
            self._num_shown = len(context) - len(hidden)
        self._rebase_at = len(self._ids) + self.NUM_CONTEXT_TOKENS


class JoiningDetokenizer:
    """Put nothing between special tokens: one directly after another shows its content as it is (vLLM's rule).

    Some decoders put a space before each token, special ones too. What they make of the first one of several special
    tokens stays, and so does what they make of the token after the last one.

    Args:
        contents: of every special token, by id.
    """

    __slots__ = ("_contents", "_detokenizer", "_was_special")

    stop_string: None = None
    stop_token_index: None = None

    def __init__(self, detokenizer: PieceDetokenizer | WindowDetokenizer, contents: Mapping[int, str]) -> None:
        self._contents = contents
        self._detokenizer = detokenizer
        self._was_special = False

    def feed_one(self, token_id: int) -> str:
        content = self._contents.get(token_id)
        was_special, self._was_special = self._was_special, content is not None
        if content is not None and was_special:
            return self._detokenizer.feed_special(token_id, content)
        return self._detokenizer.feed_one(token_id)

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.feed_one, token_ids))

    def flush(self) -> str:
        return self._detokenizer.flush()


class StoppingDetokenizer:
    """Search a detokenizer's text for stop strings, holding back what may be the beginning of one.

    The stop string found is the one that *ends* first in the text, and of those ending there the longest (of equal
    ones, the first listed). That is a property of the text alone: it does not depend on where tokens or feeds are cut,
    and it is known as soon as the last character is there. The text is cut before the stop string, or after it with
    ``include_stop``; what its last token brought beyond it is dropped.

    Text that the first ``min_tokens`` tokens settle is shown at once and is no part of a match. The text of ``flush``
    is searched too, so that the whole text is cut wherever a search in the full decode would cut it.

    One character costs one dict lookup, or next to nothing where no stop string can begin.
    """

    __slots__ = (
        "_automaton",
        "_detokenizer",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_num_tokens",
        "_state",
        "stop_string",
        "stop_token_index",
    )

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._automaton = StopAutomaton(stop)
        self._detokenizer = detokenizer
        self._held = ""
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._state = self._automaton.root
        self.stop_string: str | None = None
        self.stop_token_index: int | None = None

    def feed_one(self, token_id: int) -> str:
        if self.stop_string is not None:
            return ""
        self._num_tokens += 1
        text = self._detokenizer.feed_one(token_id)
        return self._search(text)

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.feed_one, token_ids))

    def flush(self) -> str:
        if self.stop_string is not None:
            return ""
        text = self._search(self._detokenizer.flush())
        held, self._held = self._held, ""
        return text + held

    def _search(self, text: str) -> str:
        """Return what may be shown of the held text and this new one."""
        automaton = self._automaton
        state = self._state
        if not text or self._num_tokens <= self._min_tokens:
            return text
        if state is automaton.root and automaton.first_chars.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            state = state.following.get(char) or automaton.extend(state, char)
            if state.match is not None:
                return self._stop_at(self._held + text[: position + 1], automaton.stop[state.match])
        self._state = state
        text = self._held + text
        num_shown = len(text) - state.depth
        self._held = text[num_shown:]
        return text[:num_shown]

    def _stop_at(self, text: str, stop_string: str) -> str:
        self._held = ""
        self.stop_string = stop_string
        self.stop_token_index = self._num_tokens - 1
        return text if self._include_stop else text[: -len(stop_string)]


class _State:
    """A beginning of one or more stop strings: the longest one that the text ends with."""

    __slots__ = ("depth", "fallback", "following", "match", "sharing")

    def __init__(self, depth: int, sharing: list[int], fallback: _State | None, match: int | None) -> None:
        self.depth = depth
        self.sharing = sharing
        self.fallback = fallback
        self.following: dict[str, _State] = {}
        self.match = match


class StopAutomaton:
    """Aho and Corasick's automaton (1975, doi:10.1145/360825.360855), built only as far as the text walks into it.

    Building it whole takes about a microsecond a character, which for 64 stop strings of 1 KB would hold the event
    loop for tens of milliseconds, and most texts never come past a stop string's first characters. Built on the way,
    it costs each character of the text a constant on average, however the stop strings are chosen.
    """

    __slots__ = ("first_chars", "root", "stop")

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string matches everywhere"
        self.stop = stop
        self.first_chars = frozenset(string[0] for string in stop)
        self.root = _State(0, list(range(len(stop))), None, None)

    def extend(self, state: _State, char: str) -> _State:
        """Return the state after ``char``, making it and the shorter ones it falls back on where they are missing."""
        missing = []
        at: _State | None = state
        target: _State | None = None
        while at is not None and target is None:
            target = at.following.get(char)
            if target is None:
                missing.append(at)
                at = at.fallback
        if target is None:
            target = self.root
        # From the shortest to the longest: each one's result is the fallback of the next one's.
        for at in reversed(missing):
            target = at.following[char] = self._grow(at, char, target)
        return target

    def _grow(self, state: _State, char: str, fallback: _State) -> _State:
        stop, depth = self.stop, state.depth
        sharing = [index for index in state.sharing if len(stop[index]) > depth and stop[index][depth] == char]
        if not sharing:
            return fallback
        whole = (index for index in sharing if len(stop[index]) == depth + 1)
        return _State(depth + 1, sharing, fallback, next(whole, fallback.match))
