"""The rows of a device that have grammars: which tokens each may sample next, and which follow without a choice."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from aioengine.structured.grammar import TOO_LARGE, CompiledGrammar, Mask, keep_going, set_only

MAX_FORCED = 4096
"""Tokens that one token may bring along."""


MIN_JUMP = 4
"""Fewer tokens are sampled one by one, unless the last one ends the output: a step that computes several tokens of a
row is no graph, and costs more."""


class GrammarRow:
    """A sequence's way through its grammar, in step with a device that may be some tokens ahead of the host.

    Tokens that the grammar forces are known before the device samples them. A row that *jumps* takes them over at once:
    `GrammarRows.learn` gives them, the scheduler appends them, and they are computed together. Steps that were launched
    before that sample them, too, under a mask of that one token, so that nothing else can come of it. A row that does
    not jump, since it wants log-probabilities of each token, samples all of them so. Both have the same tokens.

    Args:
        num_prompt_tokens: the position of the first output token.
        jumps: as above.
        is_forcing: no rule of the request forbids tokens; with such rules it samples what mask and rules leave.
        ignores_end: what ends the output comes only where nothing else can.
        late_ids: these come only where nothing else can among the first ``num_late`` output tokens.
        allowed: the only tokens that may come, besides what the grammar says; None: any.

    Attributes:
        num_tokens: of prompt and output, forced ones that the device has not sampled included.
        unsent: (position, tokens) that are to be put into the device's history.
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
        self._num_told = num_prompt_tokens
        """Tokens that the caller has given or was told."""

    @property
    def is_too_large(self) -> bool:
        """Whether its problem is the constraint's size, and so the constraint's own."""
        return self.problem.startswith(TOO_LARGE)

    def takes(self, position: int) -> bool:
        """The device has sampled the token at this position: whether that is news, and not a forced one."""
        self._num_told = max(self._num_told, position + 1)
        if position != self.num_tokens:  # behind it: a step before has failed, and the row with it
            return False
        self.num_tokens = position + 1
        self._forced = []
        self.is_masked = False
        return not self.problem

    def force(self) -> None:
        """Take over the tokens that follow without a choice."""
        while self._is_forcing and len(self._forced) < MAX_FORCED and (forced := self.matcher.forced()):
            self._forced += forced
            self.num_tokens += len(forced)
            self.matcher.consume(forced)

    def restrict(self, mask: Mask) -> None:
        """Take out what the request's own rules forbid."""
        if self._allowed is not None:
            mask &= self._allowed
        if self._ignores_end:
            keep_going(mask, self.matcher.ending_ids)
        if self.num_tokens < self._late_until:
            keep_going(mask, self._late_ids)

    def tell(self) -> list[int]:
        """The forced tokens that the caller was not told of, if the row jumps over them."""
        if not self._jumps or self._num_told >= self.num_tokens:
            return []
        forced = self._forced[self._num_told - self.num_tokens :]
        if len(forced) < MIN_JUMP and forced[-1] not in self.matcher.ending_ids:
            return []
        self.unsent.append((self._num_told, forced))
        self._num_told = self.num_tokens
        return forced

    def forced_at(self, position: int) -> int:
        """The token at a position before ``num_tokens`` that the device has not sampled."""
        return self._forced[position - self.num_tokens]


class GrammarRows:
    """All such rows of a device, whose masks are made side by side, in a table. Two threads may use it.

    Args:
        num_words: of a mask.
    """

    def __init__(self, num_words: int) -> None:
        self._masks = np.zeros((0, num_words), np.int32)
        self._free_slots: list[int] = []
        self._lock = threading.Lock()

    def add(self, row: GrammarRow, output_ids: Sequence[int]) -> GrammarRow:
        """Take in a row, behind the tokens of its output that are known."""
        with self._lock:
            if not self._free_slots:
                size = len(self._masks)
                self._masks = np.concatenate([self._masks, np.zeros((max(size, 16), self._masks.shape[1]), np.int32)])
                self._free_slots = list(range(size, len(self._masks)))
            row.slot = self._free_slots.pop()
            self._replay(row, output_ids)
        return row

    def remove(self, row: GrammarRow) -> None:
        """It has left its row of the device."""
        with self._lock:
            self._free_slots.append(row.slot)
            row.slot = -1

    def learn(self, sampled: Sequence[tuple[GrammarRow, int, int]]) -> list[list[int]]:
        """The device has sampled these: (row, position, token) each, at most one of a row.

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
            return [row.tell() for row, _, _ in sampled]

    def fill(self, wanted: Sequence[tuple[GrammarRow, int]], masks: Mask) -> None:
        """Write which tokens each row may sample at its position, ``wanted[i]`` into ``masks[i]``.

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
        """Bring a row behind tokens that are known, without masks.

        What is forced is asked for where it was at first: behind each token that was sampled, and there alone. Asked
        for amid a forced text the library may find less of it, or cut it into other tokens.
        """
        for position, token_id in enumerate(output_ids, row.num_tokens):
            if position == row.num_tokens:
                row.force()
            if row.takes(position):
                row.matcher.consume([token_id])

    def _mask(self, rows: list[GrammarRow]) -> None:
        """Make the masks of the tokens behind all that is known of these rows, the forced ones included."""
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
    """The rows whose matchers are of one class, and can be asked together."""
    by_class: dict[type, list[GrammarRow]] = {}
    for row in rows:
        by_class.setdefault(type(row.matcher), []).append(row)
    return by_class.values()
