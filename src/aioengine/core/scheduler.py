"""Who computes which tokens in the next step.

A running sequence has a row. For each row the columns count tokens *computed* (KV written, result applied), *scheduled*
(computed or in a launched step) and *expected* (known, or being sampled by a launched step). A step moves ``scheduled``
toward ``expected``; a row that gets there samples, so that ``expected`` moves on by one. Prefill chunks, decodes and
steps in flight are all the same thing: a distance.
"""

from __future__ import annotations

from collections import deque
from itertools import compress
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.core.kv_manager import KVManager
from aioengine.core.plan import EMPTY, Int8, Int32, RowAdded, StepLogprobs, StepPlan, StepResult, int32
from aioengine.core.sequence import Event, FinishReason, Reason, Sequence, State
from aioengine.core.stopping import finish_reason
from aioengine.core.waiting import WaitingQueue

Rows = NDArray[np.intp]
"""Rows to index columns with: numpy gathers and scatters two to three times as fast with these as with int32."""
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


class StepOutput(msgspec.Struct, frozen=True):
    """What applying a result brought: ``token_ids[i]`` is the newest token of ``sequences[i]``.

    A sequence that ended with its token has its ``finish_reason`` set.

    Attributes:
        logprobs: about the tokens by their place in ``token_ids``.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: StepLogprobs | None = None


class _Work(msgspec.Struct, frozen=True, gc=False):
    """What a step computes: ``num_tokens[i]`` tokens of ``rows[i]``, from ``starts[i]`` up to ``ends[i]``."""

    rows: Rows
    starts: Int32
    num_tokens: Int32
    ends: Int32


class _Launched(msgspec.Struct, frozen=True):
    plan: StepPlan
    rows: Rows
    ends: Int32
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
        """WAITING with a reason, by order."""
        self.running: list[Sequence] = []
        """By order, and never changed in place: launched steps hold it."""
        self.num_unstarted = 0
        """Sequences that were added and never had a row."""
        self.num_preemptions = 0
        self._next_order = 0
        self._step = 0
        self._launched: deque[_Launched] = deque()
        self._removed: list[int] = []
        self._running_rows: Rows = np.zeros(0, np.intp)
        """The rows of ``running``; never changed in place."""
        self._gone_rows: list[int] = []
        """Rows in ``running`` whose sequences were ended from outside: taken out together, at the next look at it."""
        self._leaving: list[Sequence] = []
        """RUNNING with a reason: they have a row until what is in flight is applied."""
        self._parked: dict[int, Sequence] = {}
        """WAITING, with or without a reason, and holding blocks; by order."""
        self._tenants: list[Sequence | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._reserve = max(1, kv.pool.num_blocks // 100)

        def column() -> Int32:
            return np.zeros(max_num_seqs, np.int32)

        self._epoch = column()
        self._computed = column()
        self._scheduled = column()
        self._expected = column()
        self._last = column()
        """The last token's position at most: it would be sampled and never computed."""
        self._capacity = column()
        """Tokens that its blocks hold."""
        self._fills_at = column()
        """Computed tokens at which its next block is full."""
        self._looked_at_from = column()
        """Computed tokens from which on each sampled token may end it: ``_last``, or 0 if it has stop tokens."""

    # What callers do to sequences

    def add(self, sequence: Sequence, reason: Reason = Reason.NONE) -> None:
        """Take in a new sequence, blocked if there is a ``reason``."""
        assert self.kv.blocks_for(sequence.limit - 1) <= self.kv.pool.num_blocks, f"{sequence} could never end"
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
            if not sequence.reasons:
                self._gone_rows.append(sequence.row)
            self._vacate(sequence)
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
        """The next step, or None if no row has a token to compute.

        After None something must be applied, unblocked, added or ended before there can be a step.
        """
        self._drop_gone()
        self._park_blocked()
        work = self._share_budget()
        growing = self._out_of_blocks(work)
        is_tight = len(growing) > self.kv.pool.num_free
        while len(growing) > self.kv.pool.num_free:
            self._preempt(self._victim())
            work = self._share_budget()
            growing = self._out_of_blocks(work)
        grown_blocks = self._grow(growing)
        admitted: list[Sequence] = []
        self._wake_waiters()
        if self.waiting and not (is_tight and len(work.rows)):
            admitted = self._admit(self.max_num_batched_tokens - int(work.num_tokens.sum()))
            work = self._join(work, admitted)
        if not len(work.rows):
            return None
        return self._launch(work, growing, grown_blocks, admitted)

    def apply(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the result of the oldest launched step: append tokens, end what stops, settle prefixes."""
        assert result.step == plan.step, "the result is another step's"
        launched = self._take_launched(plan)
        rows, ends, sequences = launched.rows, launched.ends, launched.sequences
        places = result.offsets[:-1]
        has_token = result.offsets[1:] > places
        is_alive = self._epoch[rows] == plan.epochs
        if np.count_nonzero(is_alive) < len(rows):
            # Ended or preempted while the step ran: the late result finds nobody.
            rows, ends, places, has_token = rows[is_alive], ends[is_alive], places[is_alive], has_token[is_alive]
            sequences = list(compress(sequences, is_alive.tolist()))
        self._computed[rows] = ends
        self._settle(rows, ends, sequences)
        if np.count_nonzero(has_token) < len(rows):
            rows, ends, places = rows[has_token], ends[has_token], places[has_token]
            sequences = list(compress(sequences, has_token.tolist()))
        token_ids, logprobs = result.token_ids, result.logprobs
        if len(rows) < len(token_ids):
            token_ids, logprobs = token_ids[places], _pick(logprobs, places)
        ids: list[int] = token_ids.tolist()
        for sequence, token_id in zip(sequences, ids, strict=True):
            sequence.output_ids.append(token_id)
        self._stop(rows, ends, sequences, token_ids)
        return StepOutput(sequences, ids, logprobs)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The oldest launched step brought an error: end the sequences that it held, and return them.

        Later launched steps that hold the same sequences bring tokens that find nobody.
        """
        launched = self._take_launched(plan)
        is_alive = self._epoch[launched.rows] == plan.epochs
        failed = list(compress(launched.sequences, is_alive.tolist()))
        self._drop_running(failed)
        for sequence in failed:
            self._vacate(sequence)
            self._end(sequence, "error", None)
        return failed

    # What callers ask

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting, running or blocked."""
        self._drop_gone()
        return bool(self.waiting or self.running or self.blocked or self._leaving)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        self._drop_gone()
        return [*self.running, *self._leaving, *self.waiting, *self.blocked.values()]

    def stats(self) -> SchedulerStats:
        self._drop_gone()
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

        Only without steps in flight: their tokens are known to the device alone. Rows vacated since the last launch are
        not in it, although the next plan removes them.
        """
        assert not self._launched, "the device alone knows the tokens of launched steps"
        tenants = [sequence for sequence in self._tenants if sequence is not None]
        return StepPlan(
            step=self._step,
            removed=EMPTY,
            added=tuple(_introduce(sequence) for sequence in tenants),
            grown_rows=EMPTY,
            grown_blocks=EMPTY,
            rows=EMPTY,
            epochs=EMPTY,
            starts=EMPTY,
            num_tokens=EMPTY,
            wants=np.zeros(0, np.int8),
        )

    def check_integrity(self) -> None:
        """Each row has one tenant, each sequence is in one place, and each block is owned as often as it is counted.

        Raises:
            AssertionError: it is not so.
        """
        live = self.sequences()
        assert len({sequence.order for sequence in live}) == len(live), "a sequence is in two places"
        with_row = [*self.running, *self._leaving]
        assert all(sequence.state is State.RUNNING and self._tenants[sequence.row] is sequence for sequence in with_row)
        assert sorted(self._free_rows + [sequence.row for sequence in with_row]) == list(range(len(self._tenants)))
        assert [sequence.row for sequence in self.running] == self._running_rows.tolist()
        assert [s.order for s in self.running] == sorted(s.order for s in self.running)
        assert all(sequence.reasons for sequence in [*self._leaving, *self.blocked.values()])
        assert not any(sequence.reasons for sequence in [*self.running, *self.waiting])
        assert sum(not sequence.has_run for sequence in live) == self.num_unstarted
        idle = [*self.waiting, *self.blocked.values()]
        assert all(sequence.state is State.WAITING and sequence.row == -1 for sequence in idle)
        assert {s.order for s in idle if s.block_ids} == self._parked.keys()
        for sequence in with_row:
            self._check_columns(sequence)
        self.kv.check_integrity(live)

    def _check_columns(self, sequence: Sequence) -> None:
        row = sequence.row
        plans = [launched.plan for launched in self._launched]
        steps = [(plan, plan.rows.tolist().index(row)) for plan in plans if row in plan.rows]
        mine = [(plan, index) for plan, index in steps if plan.epochs[index] == self._epoch[row]]
        assert self._scheduled[row] - self._computed[row] == sum(int(plan.num_tokens[index]) for plan, index in mine)
        assert self._expected[row] - sequence.num_tokens == sum(int(plan.wants[index]) for plan, index in mine)
        assert self._computed[row] <= self._scheduled[row] <= self._expected[row] <= self._last[row] + 1
        assert self._scheduled[row] <= self._last[row] == sequence.limit - 1
        assert self._capacity[row] == len(sequence.block_ids) * self.kv.block_size
        assert self._scheduled[row] <= self._capacity[row]
        if self.kv.is_caching:
            assert sequence.num_settled_blocks == self._computed[row] // self.kv.block_size
            assert self._fills_at[row] == (sequence.num_settled_blocks + 1) * self.kv.block_size

    # Sharing out a step

    def _share_budget(self) -> _Work:
        """Rows with tokens to compute, and how many each: decodes first, then prefills in order as far as it goes."""
        rows = self._running_rows
        starts = self._scheduled[rows]
        num_tokens = np.minimum(self._expected[rows], self._last[rows]) - starts
        if int(num_tokens.sum()) > self.max_num_batched_tokens:
            num_tokens = self._ration(num_tokens)
        if np.count_nonzero(num_tokens) < len(rows):
            has_some = num_tokens > 0
            rows, starts, num_tokens = rows[has_some], starts[has_some], num_tokens[has_some]
        return _Work(rows, starts, num_tokens, starts + num_tokens)

    def _ration(self, num_tokens: Int32) -> Int32:
        """Cut down what rows want to one step's budget, which is at least one token for each of them."""
        is_decode = num_tokens == 1
        prefills = np.where(is_decode, 0, num_tokens)
        left = self.max_num_batched_tokens - np.count_nonzero(is_decode)
        shares = np.clip(left - (np.cumsum(prefills) - prefills), 0, prefills)
        return np.where(is_decode, 1, shares).astype(np.int32)

    def _out_of_blocks(self, work: _Work) -> Rows:
        """The rows that need a block: one each, since a prompt has all of its own and a decode is one token."""
        return work.rows[work.ends > self._capacity[work.rows]]

    def _grow(self, rows: Rows) -> Int32:
        """Give each a block; returns their ids."""
        if not len(rows):
            return EMPTY
        self._capacity[rows] += self.kv.block_size
        return int32(self.kv.grow(self._tenants_of(rows)))

    def _admit(self, budget: int) -> list[Sequence]:
        """Take sequences from the queue while rows, blocks and budget last; the first that does not fit ends it."""
        admitted: list[Sequence] = []
        while budget > 0 and self._free_rows and (sequence := self.waiting.peek()) is not None:
            hit = self.kv.lookup(sequence)
            if hit.pending is not None:
                self.kv.cache.wait(hit.pending, sequence)
                self.block(sequence, Reason.PENDING_PREFIX)
                continue
            reserve = self._reserve if self.running or admitted else 0
            if not self.kv.can_admit(hit, reserve):
                victim = self._parked_victim(sequence)
                if victim is None:
                    break
                self._preempt(victim)
                continue
            self.waiting.pop()
            self.kv.admit(sequence, hit)
            self._take_row(sequence)
            admitted.append(sequence)
            budget -= sequence.num_tokens - sequence.num_computed_tokens
        return admitted

    def _join(self, work: _Work, admitted: list[Sequence]) -> _Work:
        """Append the first chunks of the admitted sequences; the last one may have to share its prompt out."""
        if not admitted:
            return work
        new_rows = self._add_running(admitted)
        rows = np.concatenate([work.rows, new_rows])
        starts = self._scheduled[rows]
        num_tokens = np.concatenate([work.num_tokens, self._expected[new_rows] - self._scheduled[new_rows]])
        num_tokens[-1] -= max(int(num_tokens.sum()) - self.max_num_batched_tokens, 0)
        return _Work(rows, starts, num_tokens, starts + num_tokens)

    def _launch(self, work: _Work, growing: Rows, grown_blocks: Int32, admitted: list[Sequence]) -> StepPlan:
        rows = work.rows
        expected = self._expected[rows]
        samples = work.ends == expected
        self._scheduled[rows] = work.ends
        self._expected[rows] = expected + samples
        plan = StepPlan(
            step=self._step,
            removed=int32(self._removed) if self._removed else EMPTY,
            added=tuple(_introduce(sequence) for sequence in admitted),
            grown_rows=_frozen(growing.astype(np.int32)) if len(growing) else EMPTY,
            grown_blocks=grown_blocks,
            rows=_frozen(rows.astype(np.int32)),
            epochs=_frozen(self._epoch[rows]),
            starts=_frozen(work.starts),
            num_tokens=_frozen(work.num_tokens),
            wants=_frozen(samples.view(np.int8)),  # True is Want.LOGITS
        )
        self._step += 1
        self._removed.clear()
        is_all = rows is self._running_rows or np.array_equal(rows, self._running_rows)
        sequences = self.running if is_all else self._tenants_of(rows)
        self._launched.append(_Launched(plan, rows, work.ends, sequences))
        return plan

    # Taking in a result

    def _take_launched(self, plan: StepPlan) -> _Launched:
        launched = self._launched.popleft()
        assert launched.plan is plan, "results are applied in the order of launches"
        return launched

    def _settle(self, rows: Rows, ends: Int32, sequences: list[Sequence]) -> None:
        """Name the blocks that this step filled: one row in ``block_size`` when decoding."""
        if not self.kv.is_caching:
            return
        size = self.kv.block_size
        filled = (ends >= self._fills_at[rows]).nonzero()[0]
        for index, num_computed in zip(filled.tolist(), ends[filled].tolist(), strict=True):
            self.kv.settle(sequences[index], num_computed)
        self._fills_at[rows[filled]] = ends[filled] // size * size + size

    def _stop(self, rows: Rows, ends: Int32, sequences: list[Sequence], token_ids: Int32) -> None:
        """End the sequences whose newest token ends them: a few candidates by columns, then each by the rules."""
        is_candidate = ends >= self._looked_at_from[rows]
        for eos in self.eos_token_ids:
            is_candidate |= token_ids == eos
        ended: list[tuple[Sequence, FinishReason, int | None]] = []
        for index in is_candidate.nonzero()[0].tolist():
            sequence = sequences[index]
            reason, stop_reason = finish_reason(sequence, sequence.output_ids[-1], self.eos_token_ids)
            if reason is not None:
                ended.append((sequence, reason, stop_reason))
        self._drop_running([sequence for sequence, _, _ in ended])
        for sequence, reason, stop_reason in ended:
            self._vacate(sequence)
            self._end(sequence, reason, stop_reason)

    # Rows and queues

    def _tenants_of(self, rows: Rows) -> list[Sequence]:
        tenants = self._tenants
        return [tenants[row] for row in rows.tolist()]  # a row in use has a tenant

    def _add_running(self, sequences: list[Sequence]) -> Rows:
        """Put these among ``running``; returns their rows."""
        new_rows = np.array([sequence.row for sequence in sequences], np.intp)
        running = self.running + sequences
        if self.running and self.running[-1].order > sequences[0].order:
            running.sort(key=_by_order)
            self._running_rows = np.array([sequence.row for sequence in running], np.intp)
        else:
            self._running_rows = np.concatenate([self._running_rows, new_rows])
        self.running = running
        return new_rows

    def _drop_running(self, sequences: list[Sequence]) -> None:
        """Take these out of ``running``, those that are in it."""
        if sequences:
            self._drop_rows([sequence.row for sequence in sequences])

    def _drop_rows(self, rows: list[int]) -> None:
        stays = np.ones(len(self._tenants), np.bool_)
        stays[rows] = False
        stays = stays[self._running_rows]
        self.running = list(compress(self.running, stays.tolist()))
        self._running_rows = self._running_rows[stays]

    def _drop_gone(self) -> None:
        """One pass for all that were ended since the last: a pass each would hold the loop when many end at once."""
        if self._gone_rows:
            self._drop_rows(self._gone_rows)
            self._gone_rows = []

    def _take_row(self, sequence: Sequence) -> None:
        """Seat an admitted sequence."""
        row = sequence.row = self._free_rows.pop()
        self._tenants[row] = sequence
        sequence.advance(Event.ADMITTED)
        if not sequence.has_run:
            sequence.has_run = True
            self.num_unstarted -= 1
        self._parked.pop(sequence.order, None)
        size = self.kv.block_size
        self._computed[row] = self._scheduled[row] = sequence.num_computed_tokens
        self._expected[row] = sequence.num_tokens
        self._last[row] = sequence.limit - 1
        self._looked_at_from[row] = 0 if sequence.stop_token_ids else sequence.limit - 1
        self._capacity[row] = len(sequence.block_ids) * size
        self._fills_at[row] = (sequence.num_settled_blocks + 1) * size

    def _vacate(self, sequence: Sequence) -> None:
        """Free its row; the new epoch makes results of launched steps find nobody."""
        row = sequence.row
        sequence.row = -1
        self._epoch[row] += 1
        self._tenants[row] = None
        self._removed.append(row)
        self._free_rows.append(row)
        if sequence in self._leaving:
            self._leaving.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence.advance(Event.ENDED)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.has_run:
            self.num_unstarted -= 1
        self._release(sequence)

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

    def _victim(self) -> Sequence:
        """Who gives up its blocks first: a blocked sequence that holds some, else the youngest of all."""
        parked = self._parked_victim()
        if parked is not None and parked.reasons:
            return parked
        if self._leaving:
            return self._leaving[-1]
        running = self.running[-1]
        return running if parked is None or parked.order < running.order else parked

    def _parked_victim(self, besides: Sequence | None = None) -> Sequence | None:
        """Of the sequences that hold blocks without a row: a blocked one, else the youngest."""
        candidates = (sequence for sequence in self._parked.values() if sequence is not besides)
        return max(candidates, key=lambda sequence: (bool(sequence.reasons), sequence.order), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        if sequence.state is State.RUNNING:
            self._drop_running([sequence])
            self._vacate(sequence)
            self._enqueue(sequence)
        sequence.advance(Event.PREEMPTED)
        self._release(sequence)

    def _park_blocked(self) -> None:
        """Blocked sequences leave their rows once nothing of theirs is in flight."""
        idle = [s for s in self._leaving if self._computed[s.row] == self._scheduled[s.row]]
        for sequence in idle:
            sequence.num_computed_tokens = int(self._computed[sequence.row])
            self._vacate(sequence)
            sequence.advance(Event.PARKED)
            self.kv.withdraw(sequence)
            self.blocked[sequence.order] = self._parked[sequence.order] = sequence


def _introduce(sequence: Sequence) -> RowAdded:
    return RowAdded(
        row=sequence.row,
        token_ids=sequence.token_ids(),
        num_prompt_tokens=len(sequence.prompt),
        block_ids=int32(sequence.block_ids),
        sampling=sequence.sampling,
    )


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


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
