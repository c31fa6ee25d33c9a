"""Preemption: the choice of sequences that give up rows or blocks when these run short.

A blocked sequence (`Sequence.reasons`) leaves its row once it has no step in flight, and keeps its blocks. A sequence
that holds blocks without a row is *parked*. When blocks run out, victims are chosen in this order: a parked sequence
that is blocked, a blocked one that has a row still, then the one with the largest `WaitingQueue.eviction_key`. A
victim loses its blocks, and computes their KV again.
"""

from __future__ import annotations

from bisect import bisect

from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.policy import TenantQueues, WaitingQueue
from aioengine.scheduler.row_table import RowTable
from aioengine.scheduler.sequence import Sequence, by_precedence
from aioengine.scheduler.steps import Claim


class Preemption:
    """Takes rows and blocks from sequences, and puts these sequences back into their queues.

    Attributes:
        leaving: blocked sequences that keep a row until their steps in flight are applied.
        parked: sequences that hold blocks without a row, blocked or not; by order.
        reserve: by pool, blocks that are kept back from newcomers while others run: a prompt half admitted would only
            be preempted again.
        num_preemptions: since the start.
    """

    def __init__(
        self, kv: KVManager, table: RowTable, waiting: WaitingQueue | TenantQueues, blocked: dict[int, Sequence]
    ) -> None:
        self._kv = kv
        self._table = table
        self._waiting = waiting
        self._blocked = blocked
        self.leaving: list[Sequence] = []
        self.parked: dict[int, Sequence] = {}
        self.reserve = [max(1, pool.num_blocks // 100) for pool in kv.pools]
        self.num_preemptions = 0

    def queue_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence without a row: among the blocked ones if it has a reason."""
        if sequence.reasons:
            self._blocked[sequence.order] = sequence
        else:
            self._waiting.add(sequence)

    def free_row(self, sequence: Sequence) -> None:
        self._table.free_row(sequence)
        if sequence in self.leaving:
            self.leaving.remove(sequence)

    def release_sequence(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back, parked or not."""
        self.parked.pop(sequence.order, None)
        self._kv.release_sequence(sequence)

    def yield_to_higher(self) -> Claim | None:
        """Preempt running sequences of a larger level than the first in the queue, if that makes room for it.

        Returns:
            the share of the next step that it takes before the prompts of lower levels.
        """
        running = self._table.running
        head = self._waiting.peek() if running else None
        if head is None or head.precedence[0] >= running[-1].precedence[0]:
            return None
        match = self._kv.find_prefix(head)
        lower = [sequence for sequence in running if sequence.precedence[0] > head.precedence[0]]
        others = [sequence for sequence in self.parked.values() if sequence is not head]
        if match.pending is not None or not self._kv.can_admit(match, self.reserve, [*lower, *others]):
            return None
        while not (is_roomy := self._kv.can_admit(match, self.reserve)) or not self._table.free_rows:
            self.preempt_sequence((None if is_roomy else self._parked_victim(head)) or lower.pop())
        num_tokens = head.num_tokens - max(head.num_computed_tokens, match.num_blocks * self._kv.block_size)
        return Claim(num_tokens, bisect(self._table.running, head.precedence, key=by_precedence))

    def choose_victim(self) -> Sequence:
        """The sequence that gives up its blocks first: a blocked one that holds some, else the last of all."""
        parked = self._parked_victim()
        if parked is not None and parked.reasons:
            return parked
        if self.leaving:
            return self.leaving[-1]
        candidates = self._table.running if parked is None else [*self._table.running, parked]
        return max(candidates, key=self._waiting.eviction_key)

    def choose_victim_for(self, newcomer: Sequence, *, is_alone: bool) -> Sequence | None:
        """A sequence without a row that gives its blocks to ``newcomer``, the first in the queue, if there is one.

        Args:
            is_alone: nothing runs. Then the newcomer may preempt itself: copying its shared last block takes one block
                more than computing it again.
        """
        return self._parked_victim(newcomer) or (newcomer if is_alone and newcomer.block_ids else None)

    def _parked_victim(self, besides: Sequence | None = None) -> Sequence | None:
        """A blocked sequence among those that hold blocks without a row, else the last of these."""
        candidates = (sequence for sequence in self.parked.values() if sequence is not besides)
        eviction_key = self._waiting.eviction_key
        return max(candidates, key=lambda sequence: (bool(sequence.reasons), eviction_key(sequence)), default=None)

    def preempt_sequence(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.row >= 0:
            self.free_row(sequence)
            self.queue_sequence(sequence)
        self.release_sequence(sequence)

    def park_blocked(self) -> None:
        """Take the rows of blocked sequences that have no step in flight."""
        table = self._table
        idle = [s for s in self.leaving if table.computed[s.row] == table.scheduled[s.row]]
        for sequence in idle:
            sequence.num_computed_tokens = int(table.computed[sequence.row])
            self.free_row(sequence)
            self._kv.cancel_pending(sequence)
            self._blocked[sequence.order] = self.parked[sequence.order] = sequence
