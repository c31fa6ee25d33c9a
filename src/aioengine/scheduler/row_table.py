"""The rows of running sequences, and the numbers about them that every step touches, as columns."""

from __future__ import annotations

from itertools import compress, pairwise

import numpy as np
from numpy.typing import NDArray

from aioengine.scheduler.plan import EMPTY, Int8, Int32, int32
from aioengine.scheduler.sequence import Sequence, by_precedence

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Rows = NDArray[np.intp]
"""Rows to index columns with: numpy gathers and scatters two to three times as fast with these as with int32."""


class RowTable:
    """``max_num_seqs`` rows, each free or assigned to one sequence, which keeps it until it leaves.

    Attributes:
        epoch: counts a row's occupants; results of launched steps are matched by it.
        computed: tokens whose KV is written and whose result is applied.
        scheduled: tokens computed or in a launched step.
        expected: tokens known, or being sampled by a launched step.
        last: the last token's position at most: it would be sampled and never computed.
        capacity: a column for each group of layers, tokens up to which it has blocks.
        next_block_boundary: computed tokens at which its next block is full.
        next_passed: computed tokens at which the window of a group passes its next block.
        stop_search_start: computed tokens from which on each sampled token may end it: ``last``, or 0 if it has stop
            tokens.
        purpose: a `Purpose`, of the step that computes the last known token.
        token_at: when its newest token was applied, in seconds; NaN before the first.
    """

    def __init__(self, max_num_seqs: int, block_size: int, num_groups: int = 1) -> None:
        self.occupants: list[Sequence | None] = [None] * max_num_seqs
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.block_size = block_size
        self._removed: list[int] = []
        self._running: list[Sequence] = []
        """Launched steps hold the list, and that of the rows: neither is changed in place."""
        self._running_rows: Rows = np.zeros(0, np.intp)
        self._stopped_rows: list[int] = []
        columns: list[Int32] = list(np.zeros((8, max_num_seqs), np.int32))
        self.epoch, self.computed, self.scheduled, self.expected = columns[:4]
        self.last, self.next_block_boundary, self.next_passed, self.stop_search_start = columns[4:]
        self.capacity: list[Int32] = list(np.zeros((num_groups, max_num_seqs), np.int32))
        self.purpose: Int8 = np.zeros(max_num_seqs, np.int8)
        self.token_at = np.full(max_num_seqs, np.nan)

    @property
    def running(self) -> list[Sequence]:
        """The sequences with a row that may be scheduled, by precedence."""
        self._drop_stopped()
        return self._running

    @property
    def running_rows(self) -> Rows:
        self._drop_stopped()
        return self._running_rows

    def assign_row(self, sequence: Sequence) -> None:
        """Give a sequence a free row; it has its blocks."""
        row = sequence.row = self.free_rows.pop()
        self.occupants[row] = sequence
        size = self.block_size
        self.computed[row] = self.scheduled[row] = sequence.num_computed_tokens
        self.expected[row] = sequence.num_tokens
        self.last[row] = sequence.limit - 1
        self.purpose[row] = sequence.purpose
        self.stop_search_start[row] = 0 if sequence.stop_token_ids else sequence.limit - 1
        for group, block_ids in enumerate(sequence.block_ids):
            self.capacity[group][row] = len(block_ids) * size
        self.next_passed[row] = 0
        self.next_block_boundary[row] = (sequence.num_ready_blocks + 1) * size
        self.token_at[row] = sequence.last_token_at

    def free_row(self, sequence: Sequence) -> None:
        """Take it off its row; by the new epoch, results of launched steps match no sequence."""
        self.remove_running(sequence)
        row = sequence.row
        sequence.row = -1
        sequence.last_token_at = float(self.token_at[row])
        self.epoch[row] += 1
        self.occupants[row] = None
        self._removed.append(row)
        self.free_rows.append(row)

    def take_removed(self) -> Int32:
        """The rows that became free since the last call."""
        if not self._removed:
            return EMPTY
        removed = int32(self._removed)
        self._removed.clear()
        return removed

    def occupants_of(self, rows: Rows) -> list[Sequence]:
        """The sequences in these rows, none of which is free."""
        occupants = self.occupants
        return [occupants[row] for row in rows.tolist()]

    def add_running(self, sequences: list[Sequence]) -> Rows:
        """Put these, which have rows, among ``running``; returns their rows."""
        new_rows = np.array([sequence.row for sequence in sequences], np.intp)
        running = self.running + sequences
        newest = running[-len(sequences) - 1 :]
        if any(one.precedence > next_one.precedence for one, next_one in pairwise(newest)):
            running.sort(key=by_precedence)
            self._running_rows = np.array([sequence.row for sequence in running], np.intp)
        else:
            self._running_rows = np.concatenate([self._running_rows, new_rows])
        self._running = running
        return new_rows

    def remove_running(self, sequence: Sequence) -> None:
        """Take it out of ``running``, if it is in it."""
        self._stopped_rows.append(sequence.row)

    def stamp_tokens(self, rows: Rows, now: float) -> tuple[Float64, Bool]:
        """Note the time of a token in each row; returns the seconds since the one before, and which rows had none."""
        before = self.token_at[rows]
        self.token_at[rows] = now
        is_first = np.isnan(before)
        return now - (before[~is_first] if np.count_nonzero(is_first) else before), is_first

    def _drop_stopped(self) -> None:
        """One pass for all since the last look: a pass each would hold the loop when many end at once."""
        if self._stopped_rows:
            stays = np.ones(len(self.occupants), np.bool_)
            stays[self._stopped_rows] = False
            stays = stays[self._running_rows]
            self._running = list(compress(self._running, stays.tolist()))
            self._running_rows = self._running_rows[stays]
            self._stopped_rows.clear()
