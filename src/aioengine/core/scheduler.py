"""Who computes which tokens in the next step.

A running sequence has a row. For each row the columns count tokens *computed* (KV written, result applied), *scheduled*
(computed or in a launched step) and *expected* (known, or being sampled by a launched step). A step moves ``scheduled``
toward ``expected``; a row that gets there samples, so that ``expected`` moves on by one. Prefill chunks, decodes and
steps in flight are all the same thing: a distance.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.core.kv_manager import Hit, KVManager
from aioengine.core.plan import EMPTY, Int32, RowAdded, StepLogprobs, StepPlan, StepResult, Want, int32
from aioengine.core.sequence import Event, FinishReason, Reason, Sequence, State
from aioengine.core.stopping import finish_reason
from aioengine.core.waiting import WaitingQueue

Bools = NDArray[np.bool_]


class SchedulerStats(msgspec.Struct, kw_only=True):
    """What the scheduler holds now, and has done since the start."""

    running: int
    waiting: int
    blocked: int
    free_blocks: int
    num_blocks: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    steps: int


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """What applying a result brought: ``token_ids[i]`` is the newest token of ``sequences[i]``.

    A sequence that ended with its token has its ``finish_reason`` set.

    Attributes:
        logprobs: about the tokens by their place in ``token_ids``.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: StepLogprobs | None = None


class _Launched(msgspec.Struct, frozen=True, gc=False):
    plan: StepPlan
    sequences: list[Sequence]


class Scheduler:
    """First come, first served, on one token budget; preempts the youngest by recomputation.

    Args:
        kv: the blocks.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step; at least one a row.
        eos_token_ids: tokens that end a sequence which does not ignore them.
    """

    def __init__(
        self, kv: KVManager, *, max_num_seqs: int, max_num_batched_tokens: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "each row needs a token a step"
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting = WaitingQueue()
        self.blocked: dict[int, Sequence] = {}
        """WAITING with a reason, by order; those that hold blocks are the first victims of preemption."""
        self.running: list[Sequence] = []
        """By order, and never changed in place: launched steps hold it."""
        self.num_unstarted = 0
        """Sequences that were added and never had a row."""
        self.num_preemptions = 0
        self._next_order = 0
        self._step = 0
        self._launched: deque[_Launched] = deque()
        self._removed: list[int] = []
        self._leaving: list[Sequence] = []
        self._tenants: list[Sequence | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._running_rows: Int32 | None = EMPTY
        self._reserve = max(1, kv.pool.num_blocks // 100)

        def column() -> Int32:
            return np.zeros(max_num_seqs, np.int32)

        self._epoch = column()
        self._in_flight = column()
        self._computed = column()
        self._scheduled = column()
        self._expected = column()
        self._known = column()
        self._limit = column()
        self._num_blocks = column()
        self._settled = column()
        self._minds_eos = np.zeros(max_num_seqs, np.bool_)
        self._has_stop_ids = np.zeros(max_num_seqs, np.bool_)

    # What callers do to sequences

    def add(self, sequence: Sequence, reason: Reason = Reason.NONE) -> None:
        """Take in a new sequence, blocked if there is a ``reason``."""
        sequence.order = self._next_order
        self._next_order += 1
        self.num_unstarted += 1
        sequence.reasons = reason
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a sequence now, for a reason from outside (abort, a stop string, an error): it is in no later plan.

        Returns:
            False if it had ended already.
        """
        if sequence.state is State.FINISHED:
            return False
        if sequence.state is State.RUNNING:
            self._drop_running([sequence])
            self._vacate(sequence)
        else:
            self._dequeue(sequence)
        self._end(sequence, reason, stop_reason)
        return True

    def block(self, sequence: Sequence, reason: Reason) -> None:
        """Schedule no more of it until `unblock`; what is in flight still counts. It then leaves its row."""
        if sequence.state is State.FINISHED:
            return
        was_free = not sequence.reasons
        sequence.reasons |= reason
        if sequence.state is State.RUNNING:
            if was_free:
                self._drop_running([sequence])
                self._leaving.append(sequence)
        elif was_free:
            self.waiting.discard(sequence)
            self.blocked[sequence.order] = sequence

    def unblock(self, sequence: Sequence, reason: Reason) -> None:
        """Take a reason away; without any it can be scheduled again."""
        if sequence.state is State.FINISHED or not sequence.reasons & reason:
            return
        sequence.reasons &= ~reason
        if sequence.reasons:
            return
        if sequence.state is State.RUNNING:
            self._leaving.remove(sequence)
            self._add_running([sequence])
        else:
            del self.blocked[sequence.order]
            self.waiting.add(sequence)

    # The step

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no row has a token to compute (some may be waiting for launched steps)."""
        self._park_blocked()
        self._wake_waiters()
        rows, num_tokens = self._share_budget()
        was_room = self._make_room(rows, num_tokens)
        if not was_room:  # someone was preempted, so that the shares have changed
            rows, num_tokens = self._share_budget()
        grown_rows, grown_blocks = self._grow(rows, num_tokens)
        admitted = self._admit(self.max_num_batched_tokens - int(num_tokens.sum())) if was_room else []
        if admitted:
            rows, num_tokens = self._join(admitted, rows, num_tokens)
        if not len(rows):
            return None
        return self._launch(rows, num_tokens, grown_rows, grown_blocks, admitted)

    def apply(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the result of the oldest launched step: append tokens, end what stops, settle prefixes."""
        launched = self._launched.popleft()
        assert launched.plan is plan, "results are applied in the order of launches"
        assert result.step == plan.step, "the result is another step's"
        rows, sequences = plan.rows, launched.sequences
        counts = result.offsets[1:] - result.offsets[:-1]
        sampled = counts > 0
        alive = self._epoch[rows] == plan.epochs
        if not alive.all():  # ended, preempted or aborted while the step ran: the late result finds nobody
            sampled = sampled & alive
            self._count_computed(rows[alive], (plan.starts + plan.num_tokens)[alive])
        else:
            self._count_computed(rows, plan.starts + plan.num_tokens)
        token_ids, logprobs = result.token_ids, result.logprobs
        if not sampled.all():
            places = result.offsets[:-1][sampled]
            rows, token_ids, logprobs = rows[sampled], token_ids[places], _pick(logprobs, places)
            sequences = [sequence for sequence, kept in zip(sequences, sampled.tolist(), strict=True) if kept]
        ids: list[int] = token_ids.tolist()
        for sequence, token_id in zip(sequences, ids, strict=True):
            sequence.output_ids.append(token_id)
        self._known[rows] += 1
        self._settle(plan, alive)
        self._stop(rows, sequences, token_ids)
        return StepOutput(sequences, ids, logprobs)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The oldest launched step brought an error: end the sequences that it held, and return them.

        Later launched steps that hold the same sequences bring tokens that find nobody.
        """
        launched = self._launched.popleft()
        assert launched.plan is plan, "results are applied in the order of launches"
        alive = (self._epoch[plan.rows] == plan.epochs).tolist()
        failed = [sequence for sequence, is_alive in zip(launched.sequences, alive, strict=True) if is_alive]
        for sequence in failed:
            self.finish(sequence, "error")
        return failed

    # What callers ask

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting, running or blocked."""
        return bool(self.waiting or self.running or self.blocked or self._leaving)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.running, *self._leaving, *self.waiting, *self.blocked.values()]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running) + len(self._leaving),
            waiting=len(self.waiting),
            blocked=len(self.blocked),
            free_blocks=self.kv.pool.num_free,
            num_blocks=self.kv.pool.num_blocks,
            preemptions=self.num_preemptions,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            steps=self._step,
        )

    def snapshot(self) -> StepPlan:
        """The rows as one plan that computes nothing: it brings an empty executor to where the launched plans lead.

        Only without steps in flight: their tokens are known to the device alone.
        """
        assert not self._launched, "the device alone knows the tokens of launched steps"
        tenants = [sequence for sequence in self._tenants if sequence is not None]
        return self._plan(removed=EMPTY, added=tuple(self._introduce(sequence) for sequence in tenants))

    def check_integrity(self) -> None:
        """Each row has one tenant, each sequence is in one place, and each block is owned as often as it is counted.

        Raises:
            AssertionError: it is not so.
        """
        live = self.sequences()
        assert len({sequence.order for sequence in live}) == len(live), "a sequence is in two places"
        with_row = [sequence for sequence in live if sequence.state is State.RUNNING]
        assert all(self._tenants[sequence.row] is sequence for sequence in with_row)
        assert sorted(self._free_rows + [sequence.row for sequence in with_row]) == list(range(len(self._tenants)))
        assert [s.order for s in self.running] == sorted(s.order for s in self.running)
        assert sum(not sequence.has_run for sequence in live) == self.num_unstarted
        for sequence in with_row:
            row = sequence.row
            assert self._num_blocks[row] == len(sequence.block_ids)
            assert self._known[row] == sequence.num_tokens
            assert self._computed[row] <= self._scheduled[row] <= self._expected[row] <= self._limit[row]
            assert self._scheduled[row] <= len(sequence.block_ids) * self.kv.block_size
        self.kv.check_integrity(live)

    # Sharing out a step

    def _share_budget(self) -> tuple[Int32, Int32]:
        """Rows with tokens to compute, and how many each: decodes first, then prefills in order as far as it goes.

        The last token of all is sampled and never computed: ``limit - 1`` is where a row ends.
        """
        rows = self._rows()
        need = np.minimum(self._expected[rows], self._limit[rows] - 1) - self._scheduled[rows]
        total = int(need.sum())
        if total > self.max_num_batched_tokens:
            decodes = need == 1
            rest = np.where(decodes, 0, need)
            left = self.max_num_batched_tokens - int(np.count_nonzero(decodes))
            need = np.where(decodes, 1, np.clip(left - (np.cumsum(rest) - rest), 0, rest)).astype(np.int32)
        has_need = need > 0
        if not has_need.all():
            return rows[has_need], need[has_need]
        return rows, need

    def _missing_blocks(self, rows: Int32, num_tokens: Int32) -> Int32:
        size = self.kv.block_size
        blocks: Int32 = (self._scheduled[rows] + num_tokens + (size - 1)) // size - self._num_blocks[rows]
        return blocks

    def _make_room(self, rows: Int32, num_tokens: Int32) -> bool:
        """Preempt until what these rows want fits; True if it did at once."""
        was_room = True
        while len(rows):
            missing = self._missing_blocks(rows, num_tokens)
            if int(missing[missing > 0].sum()) <= self.kv.pool.num_free:
                break
            self._preempt(self._victim())
            was_room = False
            rows, num_tokens = self._share_budget()
        return was_room

    def _grow(self, rows: Int32, num_tokens: Int32) -> tuple[Int32, Int32]:
        missing = self._missing_blocks(rows, num_tokens)
        short = missing > 0
        if not short.any():
            return EMPTY, EMPTY
        grown_rows = np.repeat(rows[short], missing[short])
        self._num_blocks[rows[short]] += missing[short]
        block_ids = self.kv.grow(self._tenants_of(grown_rows))
        return grown_rows, int32(block_ids)

    def _admit(self, budget: int) -> list[Sequence]:
        """Take sequences from the queue while rows, blocks and budget last; the first that does not fit ends it."""
        admitted: list[Sequence] = []
        while budget > 0 and self._free_rows and (sequence := self.waiting.peek()) is not None:
            hit = self.kv.lookup(sequence) if not sequence.block_ids else Hit(sequence.block_ids)
            if hit.pending is not None:
                hit.pending.waiters.append(sequence)
                self.block(sequence, Reason.PENDING_PREFIX)
                continue
            reserve = self._reserve if self.running or admitted else 0
            if not self.kv.can_admit(sequence, hit, reserve):
                parked = self._parked()
                if parked is None:
                    break
                self._preempt(parked)
                continue
            self.waiting.pop()
            self.kv.admit(sequence, hit)
            self._take_row(sequence)
            admitted.append(sequence)
            budget -= sequence.num_tokens - sequence.num_computed_tokens
        return admitted

    def _join(self, admitted: list[Sequence], rows: Int32, num_tokens: Int32) -> tuple[Int32, Int32]:
        """Fill in the admitted sequences' columns, and append their first chunks."""
        new_rows = int32([sequence.row for sequence in admitted])
        known = int32([sequence.num_tokens for sequence in admitted])
        computed = int32([sequence.num_computed_tokens for sequence in admitted])
        self._in_flight[new_rows] = 0
        self._computed[new_rows] = self._scheduled[new_rows] = computed
        self._expected[new_rows] = self._known[new_rows] = known
        self._limit[new_rows] = [sequence.limit for sequence in admitted]
        self._num_blocks[new_rows] = [len(sequence.block_ids) for sequence in admitted]
        self._settled[new_rows] = [sequence.num_settled_blocks for sequence in admitted]
        self._minds_eos[new_rows] = [not sequence.request.params.ignore_eos for sequence in admitted]
        self._has_stop_ids[new_rows] = [bool(sequence.stop_token_ids) for sequence in admitted]
        self._add_running(admitted)
        chunk = known - computed
        chunk[-1] = min(chunk[-1], self.max_num_batched_tokens - int(num_tokens.sum()) - int(chunk[:-1].sum()))
        return np.concatenate([rows, new_rows]), np.concatenate([num_tokens, chunk])

    def _launch(
        self, rows: Int32, num_tokens: Int32, grown_rows: Int32, grown_blocks: Int32, admitted: list[Sequence]
    ) -> StepPlan:
        starts = self._scheduled[rows]
        ends = starts + num_tokens
        samples = ends == self._expected[rows]
        self._scheduled[rows] = ends
        self._expected[rows] += samples
        self._in_flight[rows] += 1
        plan = self._plan(
            removed=int32(self._removed) if self._removed else EMPTY,
            added=tuple(self._introduce(sequence) for sequence in admitted),
            grown_rows=grown_rows,
            grown_blocks=grown_blocks,
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            wants=samples.astype(np.int8) * Want.LOGITS,
        )
        self._step += 1
        self._removed.clear()
        is_steady = len(rows) == len(self.running) and not admitted
        sequences = self.running if is_steady else self._tenants_of(rows)
        self._launched.append(_Launched(plan, sequences))
        return plan

    def _plan(
        self,
        *,
        removed: Int32,
        added: tuple[RowAdded, ...],
        grown_rows: Int32 = EMPTY,
        grown_blocks: Int32 = EMPTY,
        rows: Int32 = EMPTY,
        starts: Int32 = EMPTY,
        num_tokens: Int32 = EMPTY,
        wants: NDArray[np.int8] | None = None,
    ) -> StepPlan:
        wants = np.zeros(0, np.int8) if wants is None else wants
        epochs = self._epoch[rows]
        for array in (grown_rows, grown_blocks, rows, epochs, starts, num_tokens, wants):
            array.flags.writeable = False
        return StepPlan(
            step=self._step,
            removed=removed,
            added=added,
            grown_rows=grown_rows,
            grown_blocks=grown_blocks,
            rows=rows,
            epochs=epochs,
            starts=starts,
            num_tokens=num_tokens,
            wants=wants,
        )

    def _introduce(self, sequence: Sequence) -> RowAdded:
        return RowAdded(
            row=sequence.row,
            token_ids=sequence.token_ids(),
            num_prompt_tokens=len(sequence.prompt),
            block_ids=int32(sequence.block_ids),
            sampling=sequence.sampling,
        )

    # Taking in a result

    def _count_computed(self, rows: Int32, ends: Int32) -> None:
        self._computed[rows] = ends
        self._in_flight[rows] -= 1

    def _settle(self, plan: StepPlan, alive: Bools) -> None:
        """Name the blocks that this step filled: one row in ``block_size`` when decoding."""
        if not self.kv.is_caching:
            return
        rows = plan.rows
        full = self._computed[rows] // self.kv.block_size
        for row in rows[(full > self._settled[rows]) & alive].tolist():
            sequence = self._tenants[row]
            assert sequence is not None
            self.kv.settle(sequence, int(self._computed[row]))
            self._settled[row] = sequence.num_settled_blocks

    def _stop(self, rows: Int32, sequences: list[Sequence], token_ids: Int32) -> None:
        """End the sequences whose newest token ends them: a few candidates by columns, then each by the rules."""
        candidates = self._known[rows] >= self._limit[rows]
        minds_eos = self._minds_eos[rows]
        for eos in self.eos_token_ids:
            candidates |= (token_ids == eos) & minds_eos
        candidates |= self._has_stop_ids[rows]
        if not candidates.any():
            return
        ended: list[Sequence] = []
        for index in np.flatnonzero(candidates).tolist():
            sequence = sequences[index]
            reason, stop_reason = finish_reason(sequence, sequence.output_ids[-1], self.eos_token_ids)
            if reason is not None:
                self._vacate(sequence)
                self._end(sequence, reason, stop_reason)
                ended.append(sequence)
        self._drop_running(ended)

    # Rows and queues

    def _rows(self) -> Int32:
        if self._running_rows is None:
            self._running_rows = int32([sequence.row for sequence in self.running])
        return self._running_rows

    def _tenants_of(self, rows: Int32) -> list[Sequence]:
        tenants = self._tenants
        return [tenants[row] for row in rows.tolist()]  # a row in use has a tenant

    def _add_running(self, sequences: list[Sequence]) -> None:
        running = self.running
        if not running or running[-1].order < sequences[0].order:
            self.running = running + sequences
        else:
            self.running = list(running)
            for sequence in sequences:
                insort(self.running, sequence, key=_by_order)
        self._running_rows = None

    def _drop_running(self, sequences: list[Sequence]) -> None:
        if sequences:
            gone = {sequence.order for sequence in sequences}
            self.running = [sequence for sequence in self.running if sequence.order not in gone]
            self._running_rows = None

    def _take_row(self, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()
        self._tenants[sequence.row] = sequence
        sequence.advance(Event.ADMITTED)
        if not sequence.has_run:
            sequence.has_run = True
            self.num_unstarted -= 1

    def _vacate(self, sequence: Sequence) -> None:
        """Free its row; the new epoch makes results of launched steps find nobody."""
        row = sequence.row
        sequence.num_computed_tokens = int(self._computed[row])
        sequence.row = -1
        self._epoch[row] += 1
        self._tenants[row] = None
        self._removed.append(row)
        self._free_rows.append(row)
        if self._leaving and sequence in self._leaving:
            self._leaving.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence.advance(Event.ENDED)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.has_run:
            self.num_unstarted -= 1
        self.kv.release(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.reasons:
            self.blocked[sequence.order] = sequence
        else:
            self.waiting.add(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        if self.blocked.pop(sequence.order, None) is None:
            self.waiting.discard(sequence)

    def _wake_waiters(self) -> None:
        woken = self.kv.cache.woken
        while woken:
            sequence = woken.pop()
            assert isinstance(sequence, Sequence)
            self.unblock(sequence, Reason.PENDING_PREFIX)

    # Preemption and parking

    def _victim(self) -> Sequence:
        """Who gives up its blocks first: a blocked sequence that holds some, else the youngest that runs."""
        return self._parked() or (self._leaving or self.running)[-1]

    def _parked(self) -> Sequence | None:
        return next((sequence for sequence in self.blocked.values() if sequence.block_ids), None)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        if sequence.state is State.RUNNING:
            self._drop_running([sequence])
            self._vacate(sequence)
            self._enqueue(sequence)
        sequence.advance(Event.PREEMPTED)
        self.kv.release(sequence)

    def _park_blocked(self) -> None:
        """Blocked sequences leave their rows once nothing of theirs is in flight."""
        for sequence in [s for s in self._leaving if not self._in_flight[s.row]]:
            self._vacate(sequence)
            sequence.advance(Event.PARKED)
            self.kv.withdraw(sequence)
            self.blocked[sequence.order] = sequence


def _by_order(sequence: Sequence) -> int:
    return sequence.order


def _pick(logprobs: StepLogprobs | None, places: Int32) -> StepLogprobs | None:
    """The lines about the tokens at ``places`` (ascending), renumbered to count among those."""
    if logprobs is None:
        return None
    kept = np.isin(logprobs.index, places)
    return StepLogprobs(
        index=np.searchsorted(places, logprobs.index[kept]).astype(np.int32),
        logprobs=logprobs.logprobs[kept],
        ranks=logprobs.ranks[kept],
        top_ids=logprobs.top_ids[kept],
        top_logprobs=logprobs.top_logprobs[kept],
    )
