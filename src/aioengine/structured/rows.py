"""The rows of a device that have grammars: the tokens that each may sample next, and those that it is forced to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from aioengine.structured.grammar import TOO_LARGE, CompiledGrammar, Mask, keep_going, set_only

MAX_FORCED = 4096
"""The most forced tokens after one token."""


MIN_JUMP = 4
"""Fewer forced tokens are sampled one by one, unless the last one ends the output: a step that computes several tokens
of a row cannot be a graph, and costs more."""


class GrammarRow:
    """A sequence's position in its grammar, in step with a device that may be some tokens ahead of the host.

    Tokens that the grammar forces are known before the device samples them. A row that *jumps* skips sampling them:
    `GrammarRows.learn` returns them, the scheduler appends them, and they are computed together. Steps that were
    launched before sample them, too, under a mask of one token, so that the result is the same. A row that does not
    jump, since it reports log-probabilities of each token, samples all of them in this way. Both get the same tokens.

    Args:
        num_prompt_tokens: the position of the first output token.
        jumps: as above.
        is_forcing: no rule of the request forbids tokens; with such rules it samples what mask and rules leave.
        ignores_end: tokens that end the output are masked wherever others are left.
        late_ids: masked wherever others are left, among the first ``num_late`` output tokens.
        allowed: mask of the only tokens that the request's rules admit; None: any.

    Attributes:
        num_tokens: of prompt and output, including forced ones that the device has not sampled.
        unsent: (position, tokens) to be put into the device's history.
        problem: why no further token can come; empty if one can.
        slot: its row of the table of masks.
        is_masked: its mask in the table is that of the token at ``num_tokens``.
        has_rules: its mask is changed by rules of the request's own.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        num_prompt_tokens: int,
        *,
        jumps: bool = True,
        is_forcing: bool = True,
        ignores_end: bool = False,
        late_ids: Sequence[int] = (),
        num_late: int = 0,
        allowed: Mask | None = None,
    ) -> None:
        self.matcher = grammar.matcher()
        self.num_tokens = num_prompt_tokens
        self.unsent: deque[tuple[int, list[int]]] = deque()
        self.problem = ""
        self.slot = -1
        self.is_masked = False
        self.has_rules = ignores_end or num_late > 0 or allowed is not None
        self._is_forcing = is_forcing
        self._ignores_end = ignores_end
        self._late_ids, self._late_until = late_ids, num_prompt_tokens + num_late
        self._allowed = allowed
        self._jumps = jumps and is_forcing
        self._forced: list[int] = []
        """The last tokens up to ``num_tokens``, if they were forced."""
        self._num_returned = num_prompt_tokens
        """Tokens that the caller has given or that were returned to it."""

    @property
    def is_too_large(self) -> bool:
        """Whether its problem is the constraint's size, for which the request is at fault."""
        return self.problem.startswith(TOO_LARGE)

    def takes(self, position: int) -> bool:
        """Note that the device has sampled the token at this position; return whether the matcher must consume it."""
        self._num_returned = max(self._num_returned, position + 1)
        if position != self.num_tokens:  # behind it: a step before has failed, and the row with it
            return False
        self.num_tokens = position + 1
        self._forced = []
        self.is_masked = False
        return not self.problem

    def force(self) -> None:
        """Append the tokens that follow without a choice, at most about `MAX_FORCED`, and consume them."""
        while self._is_forcing and len(self._forced) < MAX_FORCED and (forced := self.matcher.forced()):
            self._forced += forced
            self.num_tokens += len(forced)
            self.matcher.consume(forced)

    def restrict(self, mask: Mask) -> None:
        """Remove the tokens that the request's own rules forbid."""
        if self._allowed is not None:
            mask &= self._allowed
        if self._ignores_end:
            keep_going(mask, self.matcher.ending_ids)
        if self.num_tokens < self._late_until:
            keep_going(mask, self._late_ids)

    def take_forced(self) -> list[int]:
        """The forced tokens that were not returned to the caller before, if the row jumps over them."""
        if not self._jumps or self._num_returned >= self.num_tokens:
            return []
        forced = self._forced[self._num_returned - self.num_tokens :]
        if len(forced) < MIN_JUMP and forced[-1] not in self.matcher.ending_ids:
            return []
        self.unsent.append((self._num_returned, forced))
        self._num_returned = self.num_tokens
        return forced

    def forced_at(self, position: int) -> int:
        """The token at a position before ``num_tokens`` that the device has not sampled."""
        return self._forced[position - self.num_tokens]


class GrammarRows:
    """All rows with grammars of a device. Their masks are made together, in a table. Two threads may use it.

    Args:
        num_words: words of a mask.
    """

    def __init__(self, num_words: int) -> None:
        self._masks = np.zeros((0, num_words), np.int32)
        self._free_slots: list[int] = []
        self._lock = threading.Lock()

    def add(self, row: GrammarRow, output_ids: Sequence[int]) -> GrammarRow:
        """Add a row, advanced by the tokens of its output that are known."""
        with self._lock:
            if not self._free_slots:
                size = len(self._masks)
                self._masks = np.concatenate([self._masks, np.zeros((max(size, 16), self._masks.shape[1]), np.int32)])
                self._free_slots = list(range(size, len(self._masks)))
            row.slot = self._free_slots.pop()
            self._replay(row, output_ids)
        return row

    def remove(self, row: GrammarRow) -> None:
        """Free the slot of a sequence that has left its row of the device."""
        with self._lock:
            self._free_slots.append(row.slot)
            row.slot = -1

    def learn(self, sampled: Sequence[tuple[GrammarRow, int, int]]) -> list[list[int]]:
        """Advance rows by the tokens that the device has sampled: (row, position, token) each, at most one a row.

        Returns:
            for each, the tokens that follow without a choice, if the row jumps.
        """
        with self._lock:
            news: dict[GrammarRow, int] = {}
            for row, position, token_id in sampled:
                if row.slot >= 0 and row.takes(position):
                    news[row] = token_id
            for rows in _by_class(news):
                matchers = [row.matcher for row in rows]
                matchers[0].consume_all(matchers, [news[row] for row in rows])
            self._mask(list(news))
            return [row.take_forced() for row, _, _ in sampled]

    def fill(self, wanted: Sequence[tuple[GrammarRow, int]], masks: Mask) -> None:
        """Write the mask of each (row, position), ``wanted[i]``, into ``masks[i]``.

        Args:
            masks: int32 [rows, ⌈vocab / 32⌉].
        """
        with self._lock:
            self._mask([row for row, position in wanted if not row.is_masked and position == row.num_tokens])
            np.take(self._masks, [row.slot for row, _ in wanted], axis=0, out=masks)
            single: list[tuple[int, int]] = []
            for index, (row, position) in enumerate(wanted):
                if position < row.num_tokens:
                    single.append((index, row.forced_at(position)))
                elif position > row.num_tokens:  # a step before has failed, and the row with it
                    masks[index] = -1
                elif row.problem:
                    masks[index] = 0
            if single:
                set_only(masks, single)

    def _replay(self, row: GrammarRow, output_ids: Sequence[int]) -> None:
        """Advance a row by tokens that are known, without masks.

        Forced tokens are searched for only where they were at first: after each sampled token. Within a forced text
        the library may find less of it, or split it into other tokens.
        """
        for position, token_id in enumerate(output_ids, row.num_tokens):
            if position == row.num_tokens:
                row.force()
            if row.takes(position):
                row.matcher.consume([token_id])

    def _mask(self, rows: list[GrammarRow]) -> None:
        """Make the masks of the next tokens of these rows, after their forced ones."""
        for row in rows:
            row.force()
        for alike in _by_class(rows):
            matchers = [row.matcher for row in alike]
            matchers[0].fill_all(matchers, [row.slot for row in alike], self._masks)
        for row in rows:
            row.is_masked = True
            row.problem = row.matcher.problem
            while row.problem and row.matcher.renew():
                row.force()
                row.matcher.fill(self._masks[row.slot])
                row.problem = row.matcher.problem
            if row.has_rules:
                row.restrict(self._masks[row.slot])


def _by_class(rows: Iterable[GrammarRow]) -> Iterable[list[GrammarRow]]:
    """The rows in groups whose matchers are of one class, and can be called together."""
    by_class: dict[type, list[GrammarRow]] = {}
    for row in rows:
        by_class.setdefault(type(row.matcher), []).append(row)
    return by_class.values()
