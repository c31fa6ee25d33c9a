"""Several choices of one prompt: computed once, shared, forked, and each on its own from then on."""

from __future__ import annotations

import numpy as np
import pytest
from integrity import check_integrity
from scheduler.harness import Core, assert_run_as_alone

from aioengine.scheduler.sequence import Reason, Sequence


def family_of(core: Core, first: Sequence) -> list[Sequence]:
    return [sequence for sequence in core.sequences if sequence.request is first.request]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("num_choices", [2, 5])
def test_the_prompt_is_computed_once_and_each_token_but_the_last_ones(
    depth: int, caching: bool, length: int, num_choices: int
) -> None:
    core = Core(depth=depth, caching=caching)
    family = family_of(core, core.add(range(100, 100 + length), n=num_choices, max_tokens=9, ignore_eos=True))
    core.run()
    assert len(family) == num_choices
    assert_run_as_alone(*family)
    assert len({tuple(sequence.output_ids) for sequence in family}) == num_choices, "each draws its own"
    num_outputs = sum(len(sequence.output_ids) for sequence in family)
    assert core.num_computed_tokens == length + num_outputs - num_choices
    assert core.kv.pools[0].num_free == core.kv.pools[0].num_blocks


@pytest.mark.parametrize(("length", "num_copies"), [(8, 0), (9, 3), (11, 3)])
def test_only_a_partial_block_is_copied_once_for_each_child(length: int, num_copies: int) -> None:
    core = Core(block_size=4)
    core.add(range(100, 100 + length), n=4, max_tokens=3, ignore_eos=True)
    core.step()
    assert core.kv.pools[0].num_free == core.kv.pools[0].num_blocks - 3 + (length == 8), (
        "the prompt's blocks are there once"
    )
    core.run()
    copied = [plan.copied_to.tolist() for plan in core.executor.plans]
    assert sum(map(len, copied)) == num_copies


def test_children_run_when_there_are_rows_for_them_in_the_order_of_their_index() -> None:
    core = Core(max_num_seqs=2)
    first = core.add(range(100, 110), n=5, max_tokens=4, ignore_eos=True)
    later = core.add(range(300, 310), max_tokens=4, ignore_eos=True)
    begun: list[Sequence] = []
    while core.scheduler.sequences():
        core.launch_all()
        begun += [sequence for sequence in core.scheduler.table.running if sequence not in begun]
        core.land()
    # While the prompt runs the other row is free, and who comes later takes it.
    assert [s for s in begun if s is not later] == family_of(core, first)
    assert_run_as_alone(*core.sequences)


def test_one_token_each_needs_no_row_but_the_first_ones() -> None:
    core = Core()
    family = family_of(core, core.add(range(100, 110), n=4, max_tokens=1, ignore_eos=True))
    output = core.step()
    assert output is not None
    assert output.sequences == family
    assert output.token_ids == [sequence.output_ids[0] for sequence in family]
    assert [sequence.finish_reason for sequence in family] == ["length"] * 4
    assert core.launch() is None


def test_ending_the_first_before_the_fork_ends_all_of_them() -> None:
    core = Core(max_num_batched_tokens=8)
    family = family_of(core, core.add(range(100, 120), n=3))
    core.step()
    core.scheduler.finish_sequence(family[0], "abort")
    check_integrity(core.scheduler)
    assert [sequence.finish_reason for sequence in family] == ["abort"] * 3
    assert core.launch() is None
    assert core.scheduler.num_unstarted == 0


@pytest.mark.parametrize("breaks", ["step", "row"])
def test_a_failure_before_the_fork_is_everybodys_and_after_it_ones_own(breaks: str) -> None:
    core = Core()
    early = family_of(core, core.add(range(100, 110), n=3))
    break_next(core, breaks, 0)
    core.step()
    assert [sequence.finish_reason for sequence in early] == ["error"] * 3
    late = family_of(core, core.add(range(100, 110), n=3, max_tokens=5, ignore_eos=True))
    core.step()
    core.scheduler.block_sequence(late[1], Reason.BACKPRESSURE)
    break_next(core, breaks, late[0].row)
    core.step()
    core.scheduler.unblock_sequence(late[1], Reason.BACKPRESSURE)
    core.run()
    assert late[0].finish_reason == "error"
    assert_run_as_alone(late[1])
    assert (late[2].finish_reason == "error") == (breaks == "step"), "it shared the step, and not the row"


def break_next(core: Core, what: str, row: int) -> None:
    if what == "step":
        core.fail_next()
    else:
        core.executor.make_row_fail(core.executor.stats.num_steps, row, RuntimeError("the row broke"))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_child_that_fills_the_whole_memory_is_not_stuck_before_its_own_tail(depth: int) -> None:
    """With its parent's tail it holds all blocks, and a copy of that would need one more."""
    core = Core(num_blocks=3, block_size=4, max_num_seqs=1, depth=depth)
    family = family_of(core, core.add(range(100, 109), n=2, max_tokens=4, ignore_eos=True))
    core.run()
    assert_run_as_alone(*family)


def test_a_parent_that_is_preempted_before_its_first_token_still_has_a_family() -> None:
    core = Core(num_blocks=8, max_num_batched_tokens=16)
    elder = core.add(range(300, 312), max_tokens=12, ignore_eos=True)
    family = family_of(core, core.add(range(100, 112), n=3, max_tokens=4, ignore_eos=True))
    core.launch()
    core.scheduler.preemption.preempt_sequence(family[0])
    core.land()
    assert family[0].output_ids == []
    core.run()
    assert_run_as_alone(elder, *family)


def test_a_familys_blocks_are_a_prefix_for_others() -> None:
    core = Core()
    core.add(range(100, 111), n=3, max_tokens=6, ignore_eos=True)
    core.run()
    again = core.add(range(100, 111), max_tokens=2, ignore_eos=True)
    core.run()
    assert again.num_cached_tokens == 8


# Salts


def test_prefixes_are_shared_under_one_salt_and_not_across_two() -> None:
    core = Core()
    hits = []
    for salt in ("", "a", "b", "a", ""):
        sequence = core.add(range(100, 111), cache_salt=salt, max_tokens=2, ignore_eos=True)
        core.run()
        hits.append(sequence.num_cached_tokens)
    assert hits == [0, 0, 0, 8, 8]


# Priority


def test_nobody_is_thrown_out_for_one_that_would_not_fit_all_the_same() -> None:
    core = Core(num_blocks=10)
    equal = core.add(range(100, 124), max_tokens=8, ignore_eos=True, priority=0)
    lower = core.add(range(300, 304), max_tokens=8, ignore_eos=True, priority=1)
    core.step()
    waiting = core.add(range(500, 524), max_tokens=2, ignore_eos=True, priority=0)
    core.step()
    assert lower.num_preemptions == 0
    core.run()
    assert_run_as_alone(equal, lower, waiting)


# Log-probabilities of prompts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 8, 9])
def test_each_prompt_token_but_the_first_is_scored_once_and_no_prefix_is_read(depth: int, budget: int) -> None:
    core = Core(depth=depth, max_num_batched_tokens=budget)
    core.add(range(100, 120), max_tokens=1)
    core.run()
    asking = core.add(range(100, 120), max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    core.run()
    pieces = [piece for output in core.outputs for sequence, piece in output.prompt_logprobs if sequence is asking]
    positions = np.concatenate([piece.positions for piece in pieces])
    assert positions.tolist() == list(range(1, 20))
    assert all(piece.top_ids.shape == (len(piece.positions), 2) for piece in pieces)
    assert asking.num_cached_tokens == 0
    assert not asking.needs_prompt_logprobs
    assert_run_as_alone(asking)


def test_a_prompt_is_scored_again_only_if_it_was_not_finished() -> None:
    core = Core(max_num_batched_tokens=8)
    asking = core.add(range(100, 120), max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    core.step()
    core.scheduler.preemption.preempt_sequence(asking)
    while not asking.output_ids:
        core.step()
    num_scored = sum(len(piece.positions) for output in core.outputs for _, piece in output.prompt_logprobs)
    assert num_scored == 8 + 19
    core.scheduler.preemption.preempt_sequence(asking)
    core.run()
    assert num_scored == sum(len(p.positions) for output in core.outputs for _, p in output.prompt_logprobs)
    assert_run_as_alone(asking)


# Rows that fail


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_row_that_fails_takes_nobody_with_it_and_leaves_no_prefix(depth: int) -> None:
    core = Core(depth=depth)
    failing, other = (core.add(range(i, i + 9), max_tokens=6, ignore_eos=True) for i in (100, 300))
    cause = RuntimeError("the row broke")
    core.executor.make_row_fail(0, 0, cause)
    core.run()
    assert [(sequence, error) for output in core.outputs for sequence, error in output.failed] == [(failing, cause)]
    assert failing.finish_reason == "error"
    assert failing.output_ids == []
    assert_run_as_alone(other)
    again = core.add(range(100, 109), max_tokens=6, ignore_eos=True)
    core.run()
    assert again.num_cached_tokens == 0
    assert_run_as_alone(again)


# Times


def test_times_are_noted_as_they_are_told() -> None:
    core = Core()
    sequence = core.add(range(100, 110), max_tokens=4, ignore_eos=True)
    gaps = []
    for now in (1.0, 2.0, 4.0, 8.0):
        plan = core.scheduler.schedule_step(now)
        assert plan is not None
        step = core.executor.launch(plan)
        step.complete()
        core.executor.unfinished.remove(step)
        output = core.scheduler.apply_result(plan, step._outcome, now + 0.5)  # type: ignore[arg-type]
        gaps.append(output.gaps_s.tolist())
    assert (sequence.admitted_at, sequence.first_token_at, sequence.last_token_at) == (1.0, 1.5, 8.5)
    assert gaps == [[], [1.0], [2.0], [4.0]]


def test_a_child_that_must_compute_the_prompt_again_does_not_score_it_again() -> None:
    core = Core(num_blocks=24)
    family = family_of(core, core.add(range(100, 110), n=4, max_tokens=10, ignore_eos=True, prompt_logprobs=1))
    core.step()
    core.step()
    core.scheduler.preemption.preempt_sequence(family[2])
    core.run()
    lines = [piece for output in core.outputs for _, piece in output.prompt_logprobs]
    assert sum(len(piece.positions) for piece in lines) == 9
    assert all(sequence is family[0] for output in core.outputs for sequence, _ in output.prompt_logprobs)
    assert_run_as_alone(*family)
