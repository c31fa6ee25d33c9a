"""The choice of the sequences and tokens that the next step computes.

A running sequence has a row. For each row the columns count tokens *computed* (KV written, result applied), *scheduled*
(computed or in a launched step) and *expected* (known, or being sampled by a launched step). A step moves ``scheduled``
toward ``expected``; a row that gets there samples, so that ``expected`` moves on by one. Prefill chunks, decodes and
steps in flight are all the same thing: a distance.
"""

from __future__ import annotations

import itertools
from itertools import chain, compress

import msgspec
import numpy as np

from aioengine.outputs import FinishReason
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import Int32, StepPlan, StepResult, int32
from aioengine.scheduler.policy import ByPriority, Incoming, Order, Policy, TenantQueues, order_of
from aioengine.scheduler.preemption import Preemption
from aioengine.scheduler.row_table import Bool, Rows, RowTable
from aioengine.scheduler.sequence import Reason, Sequence, by_precedence
from aioengine.scheduler.steps import (
    Budget,
    Claim,
    StepOutput,
    StepsInFlight,
    Work,
    join,
    out_of_blocks,
    share_budget,
    split_prompt_logprobs,
)


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The state of the scheduler now, and its counts since the start."""

    running: int
    waiting: int
    blocked: int
    free_blocks: int
    num_blocks: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    steps: int


class Scheduler:
    """Shares out rows, blocks and one token budget a step, in the order of a policy.

    Methods that take ``now`` put it on sequences as it is, in the caller's seconds.

    Args:
        kv: the blocks.
        max_num_seqs: rows.
        budget: tokens a step.
        eos_token_ids: tokens that end a sequence which does not ignore them.
        policy: absent: by priority, then first come, first served.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        budget: Budget,
        eos_token_ids: tuple[int, ...] = (),
        policy: Policy | None = None,
    ) -> None:
        assert budget.max_tokens >= max_num_seqs, "each row needs a token a step"
        self.kv = kv
        self.table = RowTable(max_num_seqs, kv.block_size, len(kv.layout.groups))
        self.budget = budget
        self.eos_token_ids = frozenset(eos_token_ids)
        self.policy = policy or ByPriority()
        self.waiting = self.policy._make_queue()
        self._accounts = self.waiting if isinstance(self.waiting, TenantQueues) else None
        self.blocked: dict[int, Sequence] = {}
        """Without a row, and with a reason; by order."""
        self.num_unstarted = 0
        """Sequences that were added and never had a row."""
        self._started: list[Sequence] = []
        # What comes from another engine goes before all that came here first.
        self._orders, self._moved_orders = itertools.count(), itertools.count(-(2**62))
        self._num_forks = 0
        """Sequences with children."""
        self._known_until = 0
        """Steps before this one may bring tokens that a grammar has forced meanwhile."""
        self._steps = StepsInFlight(self.table)
        kv.cache.on_wake = lambda sequence: self.unblock_sequence(sequence, Reason.PENDING_PREFIX)
        self.preemption = Preemption(kv, self.table, self.waiting, self.blocked)

    # What callers do to sequences

    def add_sequence(self, sequence: Sequence, reason: Reason = Reason.NONE, *, order: Order | None = None) -> None:
        """Take in a new sequence and its children, blocked if there is a ``reason``.

        What comes from another engine, with or without tokens, is as a preempted one: of its level and rank the oldest.

        Args:
            order: absent: the policy is asked for it.
        """
        assert self.kv.fits_alone(sequence.limit - 1), f"{sequence} could never end"
        order = order or order_of(self.policy, Incoming.of(sequence.request))
        self._num_forks += bool(sequence.children)
        for member in (sequence, *sequence.children):
            member.order = next(self._moved_orders if sequence.is_moved else self._orders)
            member.precedence = order.level, order.rank, member.order
            member.tenant, member.weight = order.tenant, order.weight
            member.reasons = reason if member is sequence else reason | Reason.FORK
            self.num_unstarted += 1
            self.preemption.queue_sequence(member)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a sequence now, for a reason from outside (abort, a stop string, an error): it is in no later plan.

        Children that were to begin with what it computes end with it.

        Returns:
            False if it had ended already.
        """
        if sequence.has_ended:
            return False
        if sequence.row >= 0:
            self.preemption.free_row(sequence)
        elif self.blocked.pop(sequence.order, None) is None:
            self.waiting.discard(sequence)
        self._end(sequence, reason, stop_reason)
        return True

    def block_sequence(self, sequence: Sequence, reason: Reason) -> None:
        """Schedule no more of it until `unblock_sequence`; what is in flight still counts. It then leaves its row."""
        if sequence.has_ended:
            return
        was_free = not sequence.reasons
        sequence.reasons |= reason
        if was_free and sequence.row >= 0:
            self.table.remove_running(sequence)
            self.preemption.leaving.append(sequence)
        elif was_free:
            self.waiting.discard(sequence)
            self.blocked[sequence.order] = sequence

    def unblock_sequence(self, sequence: Sequence, reason: Reason) -> None:
        """Take a reason away; without any it can be scheduled again."""
        if sequence.has_ended or not sequence.reasons & reason:
            return
        sequence.reasons &= ~reason
        if sequence.reasons:
            return
        if sequence.row >= 0:
            self.preemption.leaving.remove(sequence)
            self.table.add_running([sequence])
        else:
            del self.blocked[sequence.order]
            self.waiting.add(sequence)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; returns how many blocks had been kept for one."""
        return self.kv.reset_prefix_cache(self.sequences())

    def preempt_all(self) -> None:
        """Take the blocks of all sequences that hold some: they will compute their KV again."""
        for sequence in sorted(self.sequences(), key=by_precedence, reverse=True):
            if sequence.block_ids:
                self.preemption.preempt_sequence(sequence)

    def take_started(self) -> list[Sequence]:
        """The sequences that have taken a row for the first time since this was last asked."""
        started, self._started = self._started, []
        return started

    # The step

    def schedule_step(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None if no row has a token to compute.

        After None something must be applied, unblocked, added or ended before there can be a step.
        """
        self.preemption.park_blocked()
        claim = self.preemption.yield_to_higher()
        while True:
            work, growing, num_growing, is_tight = self._share(claim)
            admitted: list[Sequence] = []
            if self.waiting and not (is_tight and len(work.rows)):
                admitted = self._admit(work.num_left, num_growing, now)
            if admitted or claim is None:
                break
            claim = None  # nothing came to take it: the tokens are for those that run
        grown_blocks: list[int] = []
        for group, rows in enumerate(growing):
            if len(rows):
                sequences = self.table.occupants_of(rows)
                grown_blocks += self.kv.grow_tables(group, sequences)
                num_blocks = [len(sequence.block_ids[group]) for sequence in sequences]
                self.table.capacity[group][rows] = int32(num_blocks) * self.kv.block_size
        if admitted:
            work = join(self.table, work, self.table.add_running(admitted))
        if not len(work.rows):
            return None
        return self._steps.make_plan(work, growing, grown_blocks, self.kv.take_copies(), admitted)

    def apply_result(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> StepOutput:
        """Take in the result of the oldest launched step: append tokens, end what stops, mark full blocks READY."""
        assert result.step == plan.step, "the result is another step's"
        launched = self._steps.take_oldest(plan)
        rows, ends, sequences = launched.rows, launched.ends, launched.sequences
        indices = result.offsets[:-1]
        counts = result.offsets[1:] - indices
        is_alive = self.table.epoch[rows] == plan.epochs
        failed = self._end_failed(result, sequences, is_alive) if result.failures else []
        prompt_logprobs = split_prompt_logprobs(result.prompt_logprobs, sequences, is_alive)
        vectors = []
        if result.vectors:
            vectors = [(sequences[index], vector) for index, vector in result.vectors.items() if is_alive[index]]
        if np.count_nonzero(is_alive) < len(rows):
            # Ended or preempted while the step ran: their results are dropped.
            rows, ends, indices, counts = rows[is_alive], ends[is_alive], indices[is_alive], counts[is_alive]
            sequences = list(compress(sequences, is_alive.tolist()))
        self.table.computed[rows] = ends
        self._mark_ready(rows, ends, sequences)
        if self.kv.has_windows:
            # Free the blocks that a window has passed in this step: of one row in ``block_size`` when decoding.
            passed = (ends >= self.table.next_passed[rows]).nonzero()[0]
            for index, num_computed in zip(passed.tolist(), ends[passed].tolist(), strict=True):
                self.table.next_passed[rows[index]] = self.kv.give_up_passed(sequences[index], num_computed)
        for sequence, _ in vectors:
            self.preemption.free_row(sequence)
            self._end(sequence, "stop", None)
        has_token = counts > 0
        if plan.step < self._known_until:
            num_known = np.fromiter((sequence.num_tokens for sequence in sequences), np.int32, len(sequences))
            has_token &= num_known <= ends
        if np.count_nonzero(has_token) < len(rows):
            rows, ends, indices, counts = rows[has_token], ends[has_token], indices[has_token], counts[has_token]
            sequences = list(compress(sequences, has_token.tolist()))
        gaps_s, is_first = self.table.stamp_tokens(rows, now)
        first = list(compress(sequences, is_first.tolist())) if len(gaps_s) < len(rows) else []
        for sequence in first:
            sequence.first_token_at = now
        token_ids = result.token_ids if len(rows) == len(result.token_ids) else result.token_ids[indices]
        ids: list[int] = token_ids.tolist()
        for sequence, token_id in zip(sequences, ids, strict=True):
            sequence.output_ids.append(token_id)
        born, born_indices = self._fork(sequences, result, indices, counts, now) if self._num_forks else ([], [])
        if self._accounts is not None:
            self._accounts.charge_outputs(chain(sequences, born))
        forced = self._force(sequences, result, indices) if result.forced else {}
        self._stop(rows, ends, sequences, token_ids, forced)
        if born:
            ids += result.token_ids[born_indices].tolist()
            sequences = sequences + born  # not in place: launched steps hold the list
            indices = np.concatenate([indices, int32(born_indices)])
        return StepOutput(
            sequences=sequences,
            token_ids=ids,
            result_indices=indices,
            logprobs=result.logprobs,
            gaps_s=gaps_s,
            first=first,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            forced=forced,
            vectors=vectors,
        )

    def fail_step(self, plan: StepPlan) -> list[Sequence]:
        """The oldest launched step brought an error: end the sequences that it held, and return them.

        The tokens that later launched steps bring for these sequences are dropped.
        """
        launched = self._steps.take_oldest(plan)
        is_alive = self.table.epoch[launched.rows] == plan.epochs
        return self._end_running(list(compress(launched.sequences, is_alive.tolist())))

    # What callers ask

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self.table.running) + len(self.preemption.leaving)

    @property
    def num_without_row(self) -> int:
        """Sequences without a row, blocked ones included."""
        return len(self.waiting) + len(self.blocked)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs, or waits for nothing but a row and blocks."""
        return bool(self.table.running or self.waiting)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.table.running, *self.preemption.leaving, *self.waiting, *self.blocked.values()]

    def stats(self) -> SchedulerStats:
        pool = self.kv.tightest_pool
        return SchedulerStats(
            running=self.num_running,
            waiting=len(self.waiting),
            blocked=len(self.blocked),
            free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            preemptions=self.preemption.num_preemptions,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            steps=self._steps.num_planned,
        )

    # Sharing out a step

    def _share(self, claim: Claim | None) -> tuple[Work, list[Rows], list[int], bool]:
        """Share the budget among the rows, and preempt until there are blocks for what they compute.

        Returns:
            the step so far; by group, the rows that need a block more; by pool, how many blocks these are; whether any
            sequence was preempted.
        """
        is_tight = False
        while True:
            work = share_budget(self.table, self.budget, claim)
            growing = out_of_blocks(self.table, work)
            num_growing = self.kv.count_growth(growing)
            if num_growing is not None:
                return work, growing, num_growing, is_tight
            is_tight = True
            self.preemption.preempt_sequence(self.preemption.choose_victim())

    def _admit(self, num_left: int, num_growing: list[int], now: float) -> list[Sequence]:
        """Take sequences from the queue while rows, blocks and tokens last; the first that does not fit ends it.

        Args:
            num_growing: by pool, blocks that are kept for the rows.
        """
        admitted: list[Sequence] = []
        reserve = [sum(counts) for counts in zip(num_growing, self.preemption.reserve, strict=True)]
        while num_left > 0 and self.table.free_rows and (sequence := self.waiting.peek()) is not None:
            match = self.kv.find_prefix(sequence)
            if match.pending is not None:
                self.kv.cache.wait_for(match.pending, sequence)
                self.block_sequence(sequence, Reason.PENDING_PREFIX)
                continue
            is_alone = not (admitted or self.table.running)
            if not self.kv.can_admit(match, None if is_alone else reserve):
                victim = self.preemption.choose_victim_for(sequence, is_alone=is_alone)
                if victim is None:
                    break
                self.preemption.preempt_sequence(victim)
                continue
            self.waiting.pop()
            self.kv.admit_sequence(sequence, match, num_left)
            self.preemption.parked.pop(sequence.order, None)
            if not sequence.has_run:
                sequence.has_run = True
                sequence.admitted_at = now
                self.num_unstarted -= 1
                self._started.append(sequence)
                if self._accounts is not None:
                    self._accounts.charge_prompt(sequence)
            self.table.assign_row(sequence)
            admitted.append(sequence)
            num_left -= sequence.num_tokens - sequence.num_computed_tokens
        return admitted

    # Taking in a result

    def _end_failed(
        self, result: StepResult, sequences: list[Sequence], is_alive: Bool
    ) -> list[tuple[Sequence, Exception]]:
        """End the living sequences whose rows failed and clear their ``is_alive``: what they computed is not reused."""
        errors = {sequences[failure.index].order: failure.error for failure in result.failures}
        indices = [failure.index for failure in result.failures if is_alive[failure.index]]
        is_alive[indices] = False
        parents = [sequences[index] for index in indices]
        return [(ended, errors[parent.order]) for parent in parents for ended in self._end_running([parent])]

    def _end_running(self, sequences: list[Sequence]) -> list[Sequence]:
        """End these by an error; returns them and the children that end with them."""
        ended = []
        for sequence in sequences:
            ended += [sequence, *(child for child in sequence.children if not child.has_ended)]
            self.preemption.free_row(sequence)
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

    def _fork(
        self, parents: list[Sequence], result: StepResult, indices: Int32, counts: Int32, now: float
    ) -> tuple[list[Sequence], list[int]]:
        """Let children go on behind their first tokens, unless these end them, with the blocks of their prompts.

        Returns:
            the children, and the indices of their tokens in the result.
        """
        born: list[Sequence] = []
        born_indices: list[int] = []
        for index in (counts > 1).nonzero()[0].tolist():
            parent = parents[index]
            for nth, child in enumerate(parent.children, 1):
                if child.has_ended:
                    continue
                self.kv.fork_sequence(parent, child)
                if child.block_ids:
                    self.preemption.parked[child.order] = child
                born.append(child)
                born_indices.append(int(indices[index]) + nth)
                token_id = int(result.token_ids[born_indices[-1]])
                child.output_ids.append(token_id)
                child.first_token_at = child.last_token_at = now
                reason, stop_reason = child.check_stop(token_id, self.eos_token_ids)
                if reason is not None:
                    self.finish_sequence(child, reason, stop_reason)
                else:
                    self.unblock_sequence(child, Reason.FORK)
            self._num_forks -= bool(parent.children)
            parent.children = ()
        return born, born_indices

    def _force(self, sequences: list[Sequence], result: StepResult, indices: Int32) -> dict[int, list[int]]:
        """Append the tokens that grammars force behind the new ones, each up to the one that ends its sequence.

        Returns:
            them, by the index of the token before them.
        """
        forced: dict[int, list[int]] = {}
        for index, result_index in enumerate(indices.tolist()):
            sequence, token_ids = sequences[index], list(result.forced.get(result_index, ()))
            taken = 0
            while taken < len(token_ids) and not self._is_over(sequence):
                sequence.output_ids.append(token_ids[taken])
                taken += 1
            if taken:
                forced[index] = token_ids[:taken]
                row = sequence.row
                self.table.expected[row] = max(int(self.table.expected[row]), sequence.num_tokens)
        if forced:
            self._known_until = self._steps.num_planned
        return forced

    def _is_over(self, sequence: Sequence) -> bool:
        return sequence.check_stop(sequence.output_ids[-1], self.eos_token_ids)[0] is not None

    def _stop(
        self, rows: Rows, ends: Int32, sequences: list[Sequence], token_ids: Int32, forced: dict[int, list[int]]
    ) -> None:
        """End the sequences whose newest token ends them: a few candidates by columns, then each by the rules."""
        is_candidate = ends >= self.table.stop_search_start[rows]
        for eos in self.eos_token_ids:
            is_candidate |= token_ids == eos
        is_candidate[list(forced)] = True
        for index in is_candidate.nonzero()[0].tolist():
            sequence = sequences[index]
            reason, stop_reason = sequence.check_stop(sequence.output_ids[-1], self.eos_token_ids)
            if reason is not None:
                self.preemption.free_row(sequence)
                self._end(sequence, reason, stop_reason)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        assert not sequence.has_ended, f"{sequence} ends twice"
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.has_run:
            self.num_unstarted -= 1
        self.preemption.release_sequence(sequence)
        for child in sequence.children:
            self.finish_sequence(child, reason)
        self._num_forks -= bool(sequence.children)
        sequence.children = ()
