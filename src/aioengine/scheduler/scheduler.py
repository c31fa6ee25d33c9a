"""Who computes which tokens in the next step.

A running sequence has a row. For each row the columns count tokens *computed* (KV written, result applied), *scheduled*
(computed or in a launched step) and *expected* (known, or being sampled by a launched step). A step moves ``scheduled``
toward ``expected``; a row that gets there samples, so that ``expected`` moves on by one. Prefill chunks, decodes and
steps in flight are all the same thing: a distance.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from itertools import compress
from typing import TypeVar

import msgspec
import numpy as np

from aioengine.outputs import FinishReason
from aioengine.scheduler.budget import Claim, Work, join, out_of_blocks, share_budget
from aioengine.scheduler.kv_manager import KVManager, PrefixMatch
from aioengine.scheduler.plan import EMPTY, Int8, Int32, RowAdded, StepPlan, StepResult, int32
from aioengine.scheduler.row_table import Rows, RowTable
from aioengine.scheduler.sequence import Reason, Sequence, SequenceEvent, State
from aioengine.scheduler.steps import Bool, Float64, StepOutput, score_prompts
from aioengine.scheduler.stopping import finish_reason
from aioengine.scheduler.waiting_queue import WaitingQueue

Array = TypeVar("Array", Int32, Int8)


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


class _Launched(msgspec.Struct, frozen=True):
    plan: StepPlan
    rows: Rows
    ends: Int32
    sequences: list[Sequence]


class Scheduler:
    """By priority, then first come, first served, on one token budget; preempts the last by recomputation.

    Methods that take ``now`` put it on sequences as it is, in the caller's seconds.

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
        self.table = RowTable(max_num_seqs, kv.block_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting = WaitingQueue()
        self.blocked: dict[int, Sequence] = {}
        """WAITING with a reason, by order."""
        self.num_unstarted = 0
        """Sequences that were added and never had a row."""
        self.num_preemptions = 0
        self._started: list[Sequence] = []
        self._next_order = 0
        self._num_forks = 0
        """Sequences with children."""
        self._step = 0
        self._launched: deque[_Launched] = deque()
        self._leaving: list[Sequence] = []
        """RUNNING with a reason: they have a row until what is in flight is applied."""
        self._parked: dict[int, Sequence] = {}
        """WAITING, with or without a reason, and holding blocks; by order."""
        self._reserve = max(1, kv.pool.num_blocks // 100)

    # What callers do to sequences

    def add(self, sequence: Sequence, reason: Reason = Reason.NONE) -> None:
        """Take in a new sequence and its children, blocked if there is a ``reason``."""
        assert self.kv.blocks_for(sequence.limit - 1) <= self.kv.pool.num_blocks, f"{sequence} could never end"
        self._add_one(sequence, reason)
        self._num_forks += bool(sequence.children)
        for child in sequence.children:
            self._add_one(child, reason | Reason.FORK)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a sequence now, for a reason from outside (abort, a stop string, an error): it is in no later plan.

        Children that were to begin with what it computes end with it.

        Returns:
            False if it had ended already.
        """
        if sequence.state is State.FINISHED:
            return False
        if sequence.state is State.RUNNING:
            if not sequence.reasons:
                self.table.stop_later(sequence)
            self._free_row(sequence)
        elif self.blocked.pop(sequence.order, None) is None:
            self.waiting.discard(sequence)
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
                self.table.stop([sequence])
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
            self.table.run([sequence])
        else:
            del self.blocked[sequence.order]
            self.waiting.add(sequence)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; returns how many blocks had been kept for one."""
        return self.kv.reset_prefix_cache(self.sequences())

    def preempt_all(self) -> None:
        """Take the blocks of all sequences that hold some: they will compute their KV again."""
        holders = [sequence for sequence in self.sequences() if sequence.block_ids]
        # The last in order first, so that the queue takes them back in turn.
        for sequence in sorted(holders, key=_place, reverse=True):
            self._preempt(sequence)

    def take_started(self) -> list[Sequence]:
        """The sequences that have taken a row for the first time since this was last asked."""
        started, self._started = self._started, []
        return started

    # The step

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None if no row has a token to compute.

        After None something must be applied, unblocked, added or ended before there can be a step.
        """
        self.table.stop_gone()
        self._park_blocked()
        self._wake_waiters()
        self._yield_to_higher()
        claim = self._claim_of_higher()
        work = share_budget(self.table, self.max_num_batched_tokens, claim)
        growing = out_of_blocks(self.table, work)
        is_tight = len(growing) > self.kv.pool.num_free
        while len(growing) > self.kv.pool.num_free:
            self._preempt(self._victim())
            work = share_budget(self.table, self.max_num_batched_tokens, claim)
            growing = out_of_blocks(self.table, work)
        grown_blocks = self._grow(growing)
        admitted: list[Sequence] = []
        self._wake_waiters()
        if self.waiting and not (is_tight and len(work.rows)):
            admitted = self._admit(self.max_num_batched_tokens - int(work.num_tokens.sum()), now)
            if admitted:
                work = join(self.table, work, self.table.run(admitted), self.max_num_batched_tokens)
        if not len(work.rows):
            return None
        return self._launch(work, growing, grown_blocks, admitted)

    def apply(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> StepOutput:
        """Take in the result of the oldest launched step: append tokens, end what stops, mark full blocks READY."""
        assert result.step == plan.step, "the result is another step's"
        launched = self._take_launched(plan)
        rows, ends, sequences = launched.rows, launched.ends, launched.sequences
        places = result.offsets[:-1]
        counts = result.offsets[1:] - places
        is_alive = self.table.epoch[rows] == plan.epochs
        failed = self._end_failed(result, sequences, is_alive) if result.failures else []
        prompt_logprobs = score_prompts(result.prompt_logprobs, sequences, is_alive)
        if np.count_nonzero(is_alive) < len(rows):
            # Ended or preempted while the step ran: the late result finds nobody.
            rows, ends, places, counts = rows[is_alive], ends[is_alive], places[is_alive], counts[is_alive]
            sequences = list(compress(sequences, is_alive.tolist()))
        self.table.computed[rows] = ends
        self._mark_ready(rows, ends, sequences)
        has_token = counts > 0
        if np.count_nonzero(has_token) < len(rows):
            rows, ends, places, counts = rows[has_token], ends[has_token], places[has_token], counts[has_token]
            sequences = list(compress(sequences, has_token.tolist()))
        gaps_s, first = self._stamp(rows, sequences, now)
        token_ids = result.token_ids if len(rows) == len(result.token_ids) else result.token_ids[places]
        ids: list[int] = token_ids.tolist()
        for sequence, token_id in zip(sequences, ids, strict=True):
            sequence.output_ids.append(token_id)
        born, born_places = self._fork(sequences, places, counts) if self._num_forks else ([], [])
        self._stop(rows, ends, sequences, token_ids)
        if born:
            ids += self._begin(born, result.token_ids[born_places].tolist(), now)
            sequences = sequences + born  # not in place: launched steps hold the list
            places = np.concatenate([places, int32(born_places)])
        return StepOutput(
            sequences=sequences,
            token_ids=ids,
            places=places,
            logprobs=result.logprobs,
            gaps_s=gaps_s,
            first=first,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The oldest launched step brought an error: end the sequences that it held, and return them.

        DeferredResult launched steps that hold the same sequences bring tokens that find nobody.
        """
        launched = self._take_launched(plan)
        is_alive = self.table.epoch[launched.rows] == plan.epochs
        return self._end_running(list(compress(launched.sequences, is_alive.tolist())))

    # What callers ask

    @property
    def running(self) -> list[Sequence]:
        """Those with a row that may be scheduled, in order."""
        return self.table.running

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting, running or blocked."""
        self.table.stop_gone()
        return bool(self.waiting or self.running or self.blocked or self._leaving)

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        self.table.stop_gone()
        return len(self.running) + len(self._leaving)

    @property
    def num_idle(self) -> int:
        """Sequences without a row, blocked ones included."""
        return len(self.waiting) + len(self.blocked)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        self.table.stop_gone()
        return [*self.running, *self._leaving, *self.waiting, *self.blocked.values()]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self.num_running,
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

        Only without steps in flight: their tokens are known to the device alone. Rows freed since the last launch are
        not in it, although the next plan removes them.
        """
        assert not self._launched, "the device alone knows the tokens of launched steps"
        occupants = [sequence for sequence in self.table.occupants if sequence is not None]
        return StepPlan(
            step=self._step,
            removed=EMPTY,
            added=tuple(_introduce(sequence) for sequence in occupants),
            grown_rows=EMPTY,
            grown_blocks=EMPTY,
            rows=EMPTY,
            epochs=EMPTY,
            starts=EMPTY,
            num_tokens=EMPTY,
            wants=np.zeros(0, np.int8),
        )

    def check_integrity(self) -> None:
        """Each row has one occupant, each sequence is in one place, and each block is owned as often as it is counted.

        Raises:
            AssertionError: it is not so.
        """
        live = self.sequences()
        assert len({sequence.order for sequence in live}) == len(live), "a sequence is in two places"
        with_row = [*self.running, *self._leaving]
        assert {s.order for s in with_row} == {s.order for s in self.table.occupants if s is not None}
        assert all(sequence.state is State.RUNNING for sequence in with_row)
        assert all(sequence.reasons for sequence in [*self._leaving, *self.blocked.values()])
        assert not any(sequence.reasons for sequence in [*self.running, *self.waiting])
        assert sum(not sequence.has_run for sequence in live) == self.num_unstarted
        idle = [*self.waiting, *self.blocked.values()]
        assert all(sequence.state is State.WAITING and sequence.row == -1 for sequence in idle)
        assert {s.order for s in idle if s.block_ids} == self._parked.keys()
        assert self._num_forks == sum(bool(sequence.children) for sequence in live)
        unborn = {c.order for sequence in live for c in sequence.children if c.state is not State.FINISHED}
        assert unborn == {s.order for s in live if s.reasons & Reason.FORK}, (
            "a child waits for a parent that it has not"
        )
        self.table.check_integrity(is_caching=self.kv.is_caching)
        for sequence in with_row:
            self._check_in_flight(sequence)
        self.kv.check_integrity(live)

    def _check_in_flight(self, sequence: Sequence) -> None:
        row, table = sequence.row, self.table
        plans = [launched.plan for launched in self._launched]
        steps = [(plan, plan.rows.tolist().index(row)) for plan in plans if row in plan.rows]
        mine = [(plan, index) for plan, index in steps if plan.epochs[index] == table.epoch[row]]
        assert table.scheduled[row] - table.computed[row] == sum(int(plan.num_tokens[index]) for plan, index in mine)
        assert table.expected[row] - sequence.num_tokens == sum(int(plan.wants[index]) for plan, index in mine)

    # Sharing out a step

    def _grow(self, rows: Rows) -> Int32:
        """Give each a block; returns their ids."""
        if not len(rows):
            return EMPTY
        self.table.capacity[rows] += self.kv.block_size
        return int32(self.kv.grow(self.table.occupants_of(rows)))

    def _admit(self, budget: int, now: float) -> list[Sequence]:
        """Take sequences from the queue while rows, blocks and budget last; the first that does not fit ends it."""
        admitted: list[Sequence] = []
        while budget > 0 and self.table.free_rows and (sequence := self.waiting.peek()) is not None:
            match = self.kv.lookup(sequence)
            if match.pending is not None:
                self.kv.cache.wait(match.pending, sequence)
                self.block(sequence, Reason.PENDING_PREFIX)
                continue
            is_alone = not (self.running or admitted)
            if not self.kv.can_admit(match, 0 if is_alone else self._reserve):
                victim = self._parked_victim(sequence)
                if victim is None and is_alone and sequence.block_ids:
                    victim = sequence  # it stands in its own way: a tail to copy needs a block more than to compute it
                if victim is None:
                    break
                self._preempt(victim)
                continue
            self.waiting.pop()
            self.kv.admit(sequence, match)
            self._take_row(sequence, now)
            admitted.append(sequence)
            budget -= sequence.num_tokens - sequence.num_computed_tokens
        return admitted

    def _launch(self, work: Work, growing: Rows, grown_blocks: Int32, admitted: list[Sequence]) -> StepPlan:
        rows, table = work.rows, self.table
        expected = table.expected[rows]
        samples = work.ends == expected
        table.scheduled[rows] = work.ends
        table.expected[rows] = expected + samples
        copies = self.kv.take_copies()
        plan = StepPlan(
            step=self._step,
            removed=table.take_removed(),
            copied_from=int32([source for source, _ in copies]) if copies else EMPTY,
            copied_to=int32([target for _, target in copies]) if copies else EMPTY,
            added=tuple(_introduce(sequence) for sequence in admitted),
            grown_rows=_frozen(growing.astype(np.int32)) if len(growing) else EMPTY,
            grown_blocks=grown_blocks,
            rows=_frozen(rows.astype(np.int32)),
            epochs=_frozen(table.epoch[rows]),
            starts=_frozen(work.starts),
            num_tokens=_frozen(work.num_tokens),
            wants=_frozen(samples.view(np.int8)),  # True is Want.LOGITS
        )
        self._step += 1
        is_all = rows is table.running_rows or np.array_equal(rows, table.running_rows)
        sequences = table.running if is_all else table.occupants_of(rows)
        self._launched.append(_Launched(plan, rows, work.ends, sequences))
        return plan

    # Taking in a result

    def _take_launched(self, plan: StepPlan) -> _Launched:
        launched = self._launched.popleft()
        assert launched.plan is plan, "results are applied in the order of launches"
        return launched

    def _end_failed(
        self, result: StepResult, sequences: list[Sequence], is_alive: Bool
    ) -> list[tuple[Sequence, Exception]]:
        """End the living sequences whose rows failed, which live no more: what they computed is not to be reused."""
        errors = {sequences[failure.index].order: failure.error for failure in result.failures}
        indices = [failure.index for failure in result.failures if is_alive[failure.index]]
        is_alive[indices] = False
        ended: list[tuple[Sequence, Exception]] = []
        for index in indices:
            parent = sequences[index]
            ended += [(sequence, errors[parent.order]) for sequence in self._end_running([parent])]
        return ended

    def _end_running(self, sequences: list[Sequence]) -> list[Sequence]:
        """End these by an error; returns them and the children that end with them."""
        self.table.stop(sequences)
        ended = []
        for sequence in sequences:
            ended += [sequence, *(child for child in sequence.children if child.state is not State.FINISHED)]
            self._free_row(sequence)
            self._end(sequence, "error", None)
        return ended

    def _mark_ready(self, rows: Rows, ends: Int32, sequences: list[Sequence]) -> None:
        """Mark the blocks READY that this step filled: one row in ``block_size`` when decoding."""
        if not self.kv.is_caching:
            return
        size = self.kv.block_size
        filled = (ends >= self.table.next_block_boundary[rows]).nonzero()[0]
        for index, num_computed in zip(filled.tolist(), ends[filled].tolist(), strict=True):
            self.kv.mark_ready(sequences[index], num_computed)
        self.table.next_block_boundary[rows[filled]] = ends[filled] // size * size + size

    def _stamp(self, rows: Rows, sequences: list[Sequence], now: float) -> tuple[Float64, list[Sequence]]:
        """Note the time of these rows' tokens: the times since the tokens before, and those that have had none."""
        token_at = self.table.token_at
        before = token_at[rows]
        token_at[rows] = now
        first: list[Sequence] = []
        is_first = np.isnan(before)
        if np.count_nonzero(is_first):
            first = list(compress(sequences, is_first.tolist()))
            for sequence in first:
                sequence.first_token_at = now
            before = before[~is_first]
        return now - before, first

    def _fork(self, parents: list[Sequence], places: Int32, counts: Int32) -> tuple[list[Sequence], list[int]]:
        """Give children their share of the prompts whose first tokens have come; those, and where their tokens are."""
        born: list[Sequence] = []
        born_places: list[int] = []
        for index in (counts > 1).nonzero()[0].tolist():
            parent = parents[index]
            for nth, child in enumerate(parent.children, 1):
                if child.state is not State.FINISHED:
                    self.kv.fork(parent, child)
                    self._parked[child.order] = child
                    born.append(child)
                    born_places.append(int(places[index]) + nth)
            self._num_forks -= bool(parent.children)
            parent.children = ()
        return born, born_places

    def _begin(self, children: list[Sequence], token_ids: list[int], now: float) -> list[int]:
        """Let each go on behind its first token, if that does not end it; returns the tokens."""
        for child, token_id in zip(children, token_ids, strict=True):
            child.output_ids.append(token_id)
            child.first_token_at = child.last_token_at = now
            reason, stop_reason = finish_reason(child, token_id, self.eos_token_ids)
            if reason is not None:
                self.finish(child, reason, stop_reason)
            else:
                self.unblock(child, Reason.FORK)
        return token_ids

    def _stop(self, rows: Rows, ends: Int32, sequences: list[Sequence], token_ids: Int32) -> None:
        """End the sequences whose newest token ends them: a few candidates by columns, then each by the rules."""
        is_candidate = ends >= self.table.stop_search_start[rows]
        for eos in self.eos_token_ids:
            is_candidate |= token_ids == eos
        ended: list[tuple[Sequence, FinishReason, int | None]] = []
        for index in is_candidate.nonzero()[0].tolist():
            sequence = sequences[index]
            reason, stop_reason = finish_reason(sequence, sequence.output_ids[-1], self.eos_token_ids)
            if reason is not None:
                ended.append((sequence, reason, stop_reason))
        self.table.stop([sequence for sequence, _, _ in ended])
        for sequence, reason, stop_reason in ended:
            self._free_row(sequence)
            self._end(sequence, reason, stop_reason)

    # Rows and queues

    def _add_one(self, sequence: Sequence, reason: Reason) -> None:
        sequence.order = self._next_order
        self._next_order += 1
        self.num_unstarted += 1
        sequence.reasons = reason
        self._enqueue(sequence)

    def _take_row(self, sequence: Sequence, now: float) -> None:
        """Assign a row to an admitted sequence."""
        sequence.advance(SequenceEvent.ADMITTED)
        if not sequence.has_run:
            sequence.has_run = True
            sequence.admitted_at = now
            self.num_unstarted -= 1
            self._started.append(sequence)
        self._parked.pop(sequence.order, None)
        self.table.assign(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        self.table.free(sequence)
        if sequence in self._leaving:
            self._leaving.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence.advance(SequenceEvent.ENDED)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.has_run:
            self.num_unstarted -= 1
        self._release(sequence)
        for child in sequence.children:
            self.finish(child, reason)
        self._num_forks -= bool(sequence.children)
        sequence.children = ()

    def _release(self, sequence: Sequence) -> None:
        self._parked.pop(sequence.order, None)
        self.kv.release(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.reasons:
            self.blocked[sequence.order] = sequence
        else:
            self.waiting.add(sequence)

    def _wake_waiters(self) -> None:
        woken = self.kv.cache.woken
        while woken:
            sequence = woken.pop()
            assert isinstance(sequence, Sequence)
            self.unblock(sequence, Reason.PENDING_PREFIX)

    # Preemption and parking

    def _yield_to_higher(self) -> None:
        """Preempt running sequences of lower priority than the first in the queue, if that makes room for it."""
        head = self.waiting.peek() if self.running else None
        if head is None or head.place[0] >= self.running[-1].place[0]:
            return
        match = self.kv.lookup(head)
        lower = [sequence for sequence in self.running if sequence.place[0] > head.place[0]]
        num_reachable = self.kv.pool.num_free + sum(len(s.block_ids) for s in [*lower, *self._parked.values()])
        if match.pending is not None or match.num_missing + self._reserve > num_reachable:
            return
        while lower and not self._has_room(match):
            self._preempt(lower.pop())

    def _claim_of_higher(self) -> Claim | None:
        """What the first in the queue is going to take of the next step, before the prompts of lower ones."""
        head = self.waiting.peek() if self.running else None
        if head is None or head.place[0] >= self.running[-1].place[0]:
            return None
        match = self.kv.lookup(head)
        if match.pending is not None or not self._has_room(match):
            return None
        num_tokens = head.num_tokens - max(head.num_computed_tokens, len(match.block_ids) * self.kv.block_size)
        return Claim(num_tokens, bisect(self.running, head.place, key=_place))

    def _has_room(self, match: PrefixMatch) -> bool:
        is_roomy = self.kv.can_admit(match, self._reserve) or bool(self._parked)  # those go first, when it is admitted
        return bool(self.table.free_rows) and is_roomy

    def _victim(self) -> Sequence:
        """Who gives up its blocks first: a blocked sequence that holds some, else the last of all."""
        parked = self._parked_victim()
        if parked is not None and parked.reasons:
            return parked
        if self._leaving:
            return self._leaving[-1]
        running = self.running[-1]
        return running if parked is None or parked.place < running.place else parked

    def _parked_victim(self, besides: Sequence | None = None) -> Sequence | None:
        """Of the sequences that hold blocks without a row: a blocked one, else the last."""
        candidates = (sequence for sequence in self._parked.values() if sequence is not besides)
        return max(candidates, key=lambda sequence: (bool(sequence.reasons), sequence.place), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.state is State.RUNNING:
            self.table.stop([sequence])
            self._free_row(sequence)
            self._enqueue(sequence)
        sequence.advance(SequenceEvent.PREEMPTED)
        self._release(sequence)

    def _park_blocked(self) -> None:
        """Blocked sequences leave their rows once nothing of theirs is in flight."""
        table = self.table
        idle = [s for s in self._leaving if table.computed[s.row] == table.scheduled[s.row]]
        for sequence in idle:
            sequence.num_computed_tokens = int(table.computed[sequence.row])
            self._free_row(sequence)
            sequence.advance(SequenceEvent.PARKED)
            self.kv.cancel_pending(sequence)
            self.blocked[sequence.order] = self._parked[sequence.order] = sequence


def _place(sequence: Sequence) -> tuple[int, int]:
    return sequence.place


def _introduce(sequence: Sequence) -> RowAdded:
    sampling = sequence.sampling
    if sampling.prompt_logprobs >= 0 and not sequence.needs_prompt_logprobs:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    return RowAdded(
        row=sequence.row,
        token_ids=sequence.token_ids(),
        num_prompt_tokens=len(sequence.prompt),
        block_ids=int32(sequence.block_ids),
        sampling=sampling,
    )


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
