"""The core under random orders of everything that can happen to it, checked after each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_integrity
from layouts import STATE, layout_of
from scheduler.harness import EOS, Core, expected_output

from aioengine.scheduler.plan import Float32, StepPlan
from aioengine.scheduler.policy import ByPriority, Fair, Policy
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Reason, Sequence
from aioengine.testing.fake_executor import hash_vector
from doubles.fake_executor import FakeExecutor

VOCAB = 12
"""So few that outputs soon repeat, and every twelfth token is EOS."""
INSIDE_REASONS = Reason.PENDING_PREFIX | Reason.FORK
OUTSIDE_REASONS = [Reason.BACKPRESSURE, Reason.PAUSED]
PREFIXES = [list(range(start, start + length)) for start in (0, 1, 2) for length in (4, 9, 16, 36)]

prompts = st.builds(
    lambda prefix, tail: (prefix + tail)[:40] or [0],
    st.sampled_from([[], *PREFIXES]),
    st.lists(st.integers(0, 2), max_size=12),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 30),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (), (3,), (EOS, 5)]),
        "reason": st.sampled_from([Reason.NONE, Reason.NONE, Reason.NONE, Reason.PAUSED]),
        "n": st.sampled_from([1, 1, 1, 2, 3, 7]),
        "priority": st.sampled_from([0, 0, 0, -1, 1, 2]),
        "cache_salt": st.sampled_from(["", "", "salt"]),
        "tenant": st.sampled_from(["", "red", "blue"]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "has_grammar": st.sampled_from([False, False, True]),
        "choice": st.sampled_from([None, None, None, 0, 1, 6]),
        "num_given": st.integers(0, 20),
        "product": st.sampled_from(["tokens", "tokens", "tokens", "vector"]),
    }
).map(lambda request: {**request, "choice": request["choice"] and request["choice"] % request["n"]})


class CoreMachine(RuleBasedStateMachine):
    """Sequences come, block, fail and leave in any order; what is left in the end runs to its end."""

    core: Core
    policy: type[Policy] = ByPriority

    @initialize(
        depth=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        block_size=st.sampled_from([1, 3, 4]),
        num_tokens=st.integers(44, 120),
        num_more_blocks=st.sampled_from([0, 0, 3, 12]),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([0, 0, 1, 2, 4, 8, 30]),
        max_mixed_prefill_tokens=st.integers(1, 30),
        kinds=st.sampled_from(
            [
                *((None,), (None,), (None, 5), (None, None, 3, 3), (6,), (9, 4, 1), (None, 17)),
                *((None, STATE), (None, 5, STATE, STATE), (STATE,)),
            ]
        ),
    )
    def start(
        self,
        depth: int,
        caching: bool,
        block_size: int,
        num_tokens: int,
        num_more_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_mixed_prefill_tokens: int,
        kinds: tuple[int | str | None, ...],
    ) -> None:
        layout = layout_of(*kinds)
        max_num_batched_tokens = max_num_seqs + budget
        held = layout.most_held_by_pool(
            num_tokens, block_size, max_in_flight=depth, max_step_tokens=max_num_batched_tokens
        )
        num_blocks, *more_blocks = [num_more_blocks + most for most in held]
        self.core = Core(
            num_blocks=num_blocks,
            more_blocks=tuple(more_blocks),
            block_size=block_size,
            max_model_len=num_tokens,
            layout=layout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            depth=depth,
            caching=caching,
            vocab_size=VOCAB,
            policy=self.policy(),
        )

    @rule(arriving=st.lists(requests, min_size=1, max_size=3))
    def add(self, arriving: list[dict[str, Any]]) -> None:
        for request in arriving:
            self.core.add(**request)

    @rule()
    def launch(self) -> None:
        if len(self.core.launched) < self.core.depth and self.core.launch() is None and not self.core.launched:
            self.check_that_all_wait_for_others()

    @precondition(lambda self: self.core.launched)
    @rule()
    def land(self) -> None:
        self.core.land()

    @rule(num_steps=st.integers(1, 12))
    def run_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.core.launch_all()
            if not self.core.launched:
                self.check_that_all_wait_for_others()
                return
            self.core.land()

    @precondition(lambda self: self.core.sequences)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, data: st.DataObject, reason: Any) -> None:
        sequence = data.draw(st.sampled_from(self.core.sequences))
        was_finished = sequence.has_ended
        assert self.core.scheduler.finish_sequence(sequence, reason) is not was_finished

    @precondition(lambda self: self.core.scheduler.sequences())
    @rule(data=st.data(), reason=st.sampled_from(OUTSIDE_REASONS))
    def block(self, data: st.DataObject, reason: Reason) -> None:
        self.core.scheduler.block_sequence(data.draw(st.sampled_from(self.core.scheduler.sequences())), reason)

    @precondition(lambda self: self.blocked_from_outside())
    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.blocked_from_outside()))
        self.core.scheduler.unblock_sequence(
            sequence, data.draw(st.sampled_from(list(sequence.reasons & ~INSIDE_REASONS)))
        )

    @rule(is_unlucky=st.sampled_from([False, False, False, False, True]))
    def fail_next_step(self, is_unlucky: bool) -> None:
        if is_unlucky:
            self.core.fail_next()

    @rule(data=st.data(), is_unlucky=st.sampled_from([False, False, True]))
    def fail_a_row_of_the_next_step(self, data: st.DataObject, is_unlucky: bool) -> None:
        running = self.core.scheduler.table.running
        if is_unlucky and running:
            row = data.draw(st.sampled_from(running)).row
            self.core.executor.make_row_fail(self.core.executor.stats.num_steps, row, RuntimeError("the row broke"))

    @rule(is_wanted=st.sampled_from([False, False, True]))
    def reset_prefix_cache(self, is_wanted: bool) -> None:
        if is_wanted:
            self.core.scheduler.reset_prefix_cache()

    @invariant()
    def blocks_and_rows_are_accounted_for(self) -> None:
        check_integrity(self.core.scheduler)

    @invariant()
    def there_is_a_step_while_anything_can_be_scheduled(self) -> None:
        """A sequence can be, if nothing outside holds it back, nor the one whose prompt it shares.

        What waits for a prefix counts, too: another sequence computes that, or it has to itself. While a step is in
        flight there need not be another one, since its result may be waited for.
        """
        scheduler = self.core.scheduler
        held_back = set(self.blocked_from_outside())
        held_back |= {child for sequence in held_back for child in sequence.children}
        if not self.core.launched and not held_back.issuperset(scheduler.sequences()):
            assert copy_of(scheduler).schedule_step() is not None, "a sequence can be scheduled, and there is no step"

    @invariant()
    def the_rows_are_what_the_deltas_add_up_to(self) -> None:
        if self.core.launched:
            return
        fresh = FakeExecutor(layout=self.core.kv.layout, more_blocks=self.core.executor.info.more_blocks)
        fresh.handles = self.core.executor.handles
        occupants = [sequence for sequence in self.core.scheduler.table.occupants if sequence is not None]
        fresh.apply(StepPlan(step=0, added=tuple(sequence.introduce() for sequence in occupants)))
        held = self.core.executor.rows()
        held_now = {number: row for number, row in held.items() if number in fresh.rows()}
        for number, (tokens, tables) in fresh.rows().items():
            assert held_now[number][0] == tokens
            for block_ids, of_device in zip(tables, held_now[number][1], strict=True):
                assert block_ids == [b if block_ids[place] >= 0 else -1 for place, b in enumerate(of_device)]
        leaving = held.keys() - fresh.rows().keys()
        assert leaving == set(self.core.scheduler.table._removed), "the next plan removes what has no row any more"

    def blocked_from_outside(self) -> list[Sequence]:
        return [s for s in self.core.scheduler.sequences() if s.reasons & ~INSIDE_REASONS]

    def check_that_all_wait_for_others(self) -> None:
        """Nothing is in flight and nothing was scheduled: only somebody outside can bring the rest on."""
        unborn = {child for sequence in self.core.scheduler.sequences() for child in sequence.children}
        forgotten = set(self.core.scheduler.sequences()) - set(self.blocked_from_outside()) - unborn
        assert not forgotten

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        for sequence in scheduler.sequences():
            scheduler.unblock_sequence(sequence, ~INSIDE_REASONS)
        self.core.run()
        assert not scheduler.sequences()
        assert scheduler.num_unstarted == 0
        assert all(pool.num_free == pool.num_blocks for pool in self.core.kv.pools)
        for sequence in self.core.sequences:
            if sequence.request.product == "vector":
                check_vector(sequence, self.core.vectors.get(sequence))
            else:
                check_output(sequence)


def copy_of(scheduler: Scheduler) -> Scheduler:
    """One that can be asked for a step without a trace in the first. What never changes is shared."""
    of_all = [member for sequence in scheduler.sequences() for member in (sequence, *sequence.children)]
    shared = [part for sequence in of_all for part in (sequence.request, sequence.sampling, sequence.prompt)]
    copied = copy.deepcopy(scheduler, {id(part): part for part in shared})
    copied.kv.cache.on_wake = lambda sequence: copied.unblock_sequence(sequence, Reason.PENDING_PREFIX)
    for pool in copied.kv.pools:
        pool._on_evict = copied.kv.cache.evict_blocks
    return copied


def check_output(sequence: Sequence) -> None:
    """It brought what it brings alone: all of that, or the beginning if it was ended from outside."""
    token_ids, finish_reason, stop_reason = expected_output(sequence, vocab_size=VOCAB)
    assert sequence.has_ended
    if sequence.finish_reason in ("abort", "error") or len(sequence.output_ids) < len(token_ids):
        assert sequence.output_ids == token_ids[: len(sequence.output_ids)]
        assert sequence.finish_reason in ("abort", "error", "stop")
        assert sequence.stop_reason is None
    else:
        assert (sequence.output_ids, sequence.finish_reason) == (token_ids, finish_reason)
        assert sequence.stop_reason == stop_reason


def check_vector(sequence: Sequence, vector: Float32 | None) -> None:
    """It brought the vector of its prompt, or none if it was ended from outside."""
    assert not sequence.output_ids
    if vector is None:
        assert sequence.finish_reason in ("abort", "error", "stop")
    else:
        assert vector.tolist() == hash_vector(sequence.prompt.tolist()).tolist()
        assert sequence.finish_reason == "stop"


DETERMINISTIC = settings(
    derandomize=True,
    deadline=None,
    stateful_step_count=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class TestCore(CoreMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=10)


class FirstComeMachine(CoreMachine):
    policy = Policy


class FairMachine(CoreMachine):
    policy = Fair


class TestFirstComeCore(FirstComeMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=10)


class TestFairCore(FairMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=10)


@pytest.mark.nightly
class TestFairCoreAtNight(FairMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=1000)


@pytest.mark.nightly
class TestCoreAtNight(CoreMachine.TestCase):
    settings = settings(DETERMINISTIC, max_examples=2000)
