"""What the scheduler decides, one situation at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from integrity import check_integrity, check_pool
from scheduler.harness import EOS, Core, assert_run_as_alone

from aioengine.scheduler.plan import Purpose, RowSampling, StepPlan
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Reason, Sequence


def prompt(length: int, first: int = 100) -> list[int]:
    """A prompt of its own for each ``first``, far enough from the others."""
    return list(range(first, first + length))


def tokens_of(plan: StepPlan | None) -> dict[int, int]:
    """{row: tokens that it computes}."""
    assert plan is not None
    return dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))


def num_tokens_of(plan: StepPlan | None, *sequences: Sequence) -> list[int]:
    """Tokens that each of these computes in a plan that has just been launched."""
    by_row = tokens_of(plan)
    return [by_row.get(sequence.row, 0) for sequence in sequences]


def sample_nothing_special(token_ids: list[int], sampling: RowSampling) -> int:
    return 500 + len(token_ids)


# What comes from another engine


@pytest.mark.parametrize("num_given", [1, 7, 11, 12, 23])
@pytest.mark.parametrize("choice", [0, 2])
def test_a_choice_goes_on_behind_the_tokens_that_it_has(choice: int, num_given: int) -> None:
    core = Core(max_num_batched_tokens=10)
    sequence = core.add(prompt(9), max_tokens=24, n=3, choice=choice, num_given=num_given, ignore_eos=True)
    given = list(sequence.output_ids)
    assert len(given) == num_given
    core.run()
    assert sequence.output_ids[:num_given] == given
    assert_run_as_alone(sequence)
    assert core.num_computed_tokens == 9 + 24 - 1, "what it has is computed once more, and together"


def test_it_uses_a_prefix_that_is_here_up_to_what_it_has() -> None:
    core = Core()
    first = core.add(prompt(9), max_tokens=20, ignore_eos=True)
    core.run()
    before = core.num_computed_tokens
    moved = core.add(prompt(9), max_tokens=20, ignore_eos=True, choice=0, num_given=13)
    core.run()
    assert moved.output_ids == first.output_ids
    assert core.num_computed_tokens - before == 9 + 20 - 1 - 20, (
        "22 tokens are known, and 20 of them lie in full blocks"
    )


def test_it_goes_before_all_of_its_priority_and_never_before_a_higher_one() -> None:
    core = Core(max_num_seqs=1)
    running = core.add(prompt(4), max_tokens=9, ignore_eos=True)
    core.step()
    waiting, high = core.add(prompt(4, 200)), core.add(prompt(4, 300), priority=-1)
    moved, later = (core.add(prompt(4, first), choice=0, num_given=2) for first in (400, 500))
    core.run()
    served = [sequence for output in core.outputs[1:] for sequence in output.sequences]
    assert list(dict.fromkeys(served)) == [high, moved, later, running, waiting]


def test_the_log_probabilities_of_its_prompt_are_computed_if_it_has_no_token() -> None:
    core = Core()
    for num_given in (0, 3):
        core.add(prompt(9), max_tokens=6, ignore_eos=True, prompt_logprobs=1, choice=0, num_given=num_given)
    core.run()
    scored = [(s, piece.positions.tolist()) for output in core.outputs for s, piece in output.prompt_logprobs]
    assert scored == [(core.sequences[0], list(range(1, 9)))]


# Order and budget


def test_a_head_that_does_not_fit_lets_nobody_pass() -> None:
    core = Core(num_blocks=12)
    running = core.add(prompt(20), max_tokens=4, ignore_eos=True)
    core.step()
    big = core.add(prompt(30, 300))
    small = core.add(prompt(4, 500))
    core.launch()
    assert core.scheduler.table.running == [running]
    assert big.row == small.row == -1
    core.run()
    assert_run_as_alone(running, big, small)


def test_a_head_is_admitted_only_with_blocks_left_for_those_who_run() -> None:
    core = Core(num_blocks=11)
    core.add(prompt(20), max_tokens=20, ignore_eos=True)
    core.step()
    second = core.add(prompt(20, 300))
    core.launch()
    assert second.row == -1, "5 + 1 blocks are in use, 5 are free, and one of those is in reserve"


def test_decodes_come_first_and_prefills_share_the_rest_in_order() -> None:
    core = Core(max_num_seqs=4, max_num_batched_tokens=10)
    decoding = core.add(prompt(3), max_tokens=20, ignore_eos=True)
    core.step()
    first, second, third = (core.add(prompt(12, first)) for first in (300, 400, 500))
    assert num_tokens_of(core.launch(), decoding, first, second, third) == [1, 9, 0, 0]
    core.land()
    assert num_tokens_of(core.launch(), decoding, first, second, third) == [1, 3, 6, 0]
    core.land()
    assert num_tokens_of(core.launch(), decoding, first, second, third) == [1, 1, 6, 2]


def test_beside_decodes_prefills_get_no_more_than_a_chunk() -> None:
    core = Core(max_num_seqs=4, max_num_batched_tokens=40, max_mixed_prefill_tokens=5)
    long = core.add(prompt(30))
    assert num_tokens_of(core.launch(), long) == [30], "no row decodes yet"
    core.land()
    first, second = (core.add(prompt(8, first)) for first in (300, 400))
    assert num_tokens_of(core.launch(), long, first, second) == [1, 5, 0]
    core.land()
    assert num_tokens_of(core.launch(), long, first, second) == [1, 3, 2]
    core.land()
    assert num_tokens_of(core.launch(), long, first, second) == [1, 1, 5]
    core.scheduler.finish_sequence(long, "abort")
    core.scheduler.finish_sequence(first, "abort")
    core.land()
    assert num_tokens_of(core.launch(), second) == [1]


def test_prefills_that_run_already_are_cut_down_in_order_when_the_budget_is_short() -> None:
    core = Core(max_num_seqs=4, max_num_batched_tokens=10, depth=1)
    blocked = [core.add(prompt(9, first)) for first in (300, 400)]
    core.launch()
    for sequence in blocked:
        core.scheduler.block_sequence(sequence, Reason.BACKPRESSURE)
    core.land()
    late = core.add(prompt(15, 600))
    assert num_tokens_of(core.launch(), late) == [10]
    core.scheduler.unblock_sequence(blocked[1], Reason.BACKPRESSURE)
    core.land()
    assert num_tokens_of(core.launch(), late, blocked[1]) == [5, 5], "the older one was the later one to come back"
    core.land()
    assert num_tokens_of(core.launch(), blocked[1], late) == [3, 1]


# Late results


def test_a_late_result_matches_no_sequence_though_its_row_has_a_new_occupant() -> None:
    core = Core(depth=2, max_num_seqs=1)
    gone = core.add(prompt(5), ignore_eos=True)
    core.launch()
    row = gone.row
    assert core.scheduler.finish_sequence(gone, "abort")
    here = core.add(prompt(6, 300))
    plan = core.launch()
    assert plan is not None
    assert plan.removed.tolist() == [row]
    assert plan.rows.tolist() == [row] == [here.row]
    output = core.land()
    assert output is not None
    assert output.sequences == []
    assert gone.output_ids == here.output_ids == []
    core.run()
    assert_run_as_alone(here)


def test_log_probabilities_stay_with_their_tokens_when_others_drop_out() -> None:
    core = Core(depth=2, sampler=sample_nothing_special)
    asking, gone, quiet, last = (
        core.add(prompt(4 + i, 100 * i), ignore_eos=True, logprobs=logprobs)
        for i, logprobs in enumerate([1, 0, None, 2])
    )
    core.launch()
    core.scheduler.finish_sequence(gone, "abort")
    output = core.land()
    assert output is not None
    assert output.sequences == [asking, quiet, last]
    assert output.logprobs is not None
    line_of = {place: line for line, place in enumerate(output.logprobs.index.tolist())}
    lines = [line_of.get(index) for index in output.result_indices.tolist()]
    assert [line is None for line in lines] == [False, True, False]
    heads = [output.logprobs.top_ids[line, 0].item() for line in lines if line is not None]
    assert heads == [output.token_ids[0], output.token_ids[2]]


# Prefixes


def assert_waits(sequence: Sequence) -> None:
    assert sequence.reasons == Reason.PENDING_PREFIX
    assert sequence.row == -1


def test_a_prefix_in_the_making_is_waited_for_and_computed_once() -> None:
    core = Core(max_num_batched_tokens=20)
    shared = prompt(16)
    owner, follower = core.add([*shared, 1]), core.add([*shared, 2, 3])
    core.launch()
    assert_waits(follower)
    core.run()
    assert_run_as_alone(owner, follower)
    assert follower.num_cached_tokens == 16
    outputs = len(owner.output_ids) + len(follower.output_ids)
    assert core.num_computed_tokens == 17 + 2 + outputs - 2


def test_a_follower_waits_for_no_more_than_it_shares() -> None:
    core = Core(max_num_batched_tokens=20)
    core.add(prompt(30), ignore_eos=True)
    core.step()
    early, late = core.add([*prompt(8), *prompt(1, 300)]), core.add(prompt(29))
    core.launch()
    assert early.row >= 0
    assert early.num_cached_tokens == 8
    assert_waits(late)


def test_others_pass_one_who_waits_for_a_prefix() -> None:
    core = Core(max_num_batched_tokens=16)
    core.add(prompt(8))
    follower, other = core.add(prompt(9)), core.add(prompt(4, 300))
    core.launch()
    assert_waits(follower)
    assert other.row >= 0


def abort(core: Core, owner: Sequence) -> None:
    core.scheduler.finish_sequence(owner, "abort")
    core.land()


def preempt(core: Core, owner: Sequence) -> None:
    core.scheduler.preemption.preempt_sequence(owner)
    core.scheduler.block_sequence(owner, Reason.BACKPRESSURE)
    core.land()


def fail(core: Core, owner: Sequence) -> None:
    core.land()
    assert owner.finish_reason == "error"


@pytest.mark.parametrize("leave", [abort, preempt, fail])
def test_a_follower_takes_over_when_the_owner_is_gone(leave: Callable[[Core, Sequence], None]) -> None:
    core = Core()
    owner, follower, third = core.add(prompt(25)), core.add(prompt(26)), core.add(prompt(27))
    if leave is fail:
        core.fail_next()
    core.launch()
    assert_waits(follower)
    leave(core, owner)
    core.launch()
    assert follower.row >= 0
    assert follower.num_cached_tokens == 0, "nothing that the owner left in flight is used"
    assert_waits(third)
    core.run()
    assert_run_as_alone(follower, third)
    assert third.num_cached_tokens == 24


def test_nobody_waits_for_an_owner_that_is_parked_half_way() -> None:
    core = Core(max_num_batched_tokens=8)
    owner, follower = core.add(prompt(25)), core.add(prompt(26))
    core.launch()
    core.scheduler.block_sequence(owner, Reason.BACKPRESSURE)
    core.land()
    core.launch()
    assert follower.row >= 0
    assert follower.num_cached_tokens == 8, "what the owner has computed is used"
    core.land()
    core.scheduler.unblock_sequence(owner, Reason.BACKPRESSURE)
    core.run()
    assert_run_as_alone(owner, follower)
    assert owner.num_cached_tokens == 0
    outputs = len(owner.output_ids) + len(follower.output_ids)
    assert core.num_computed_tokens == 25 + (26 - 8) + outputs - 2, "the owner goes on with its own blocks"


def test_nobody_waits_without_a_prefix_cache() -> None:
    core = Core(caching=False)
    same = [core.add(prompt(9)) for _ in range(3)]
    core.launch()
    assert core.scheduler.table.running == same
    core.run()
    outputs = sum(len(sequence.output_ids) for sequence in same)
    assert core.num_computed_tokens == 3 * 9 + outputs - 3
    assert core.scheduler.stats().prefix_cache_queries == 3 * 9
    assert core.scheduler.stats().prefix_cache_hits == 0


def test_the_last_known_token_is_always_computed() -> None:
    core = Core()
    first = core.add(prompt(8), max_tokens=1)
    core.run()
    again = core.add(prompt(8), max_tokens=1)
    core.run()
    assert again.num_cached_tokens == 4, "of two full blocks the second holds the token that is sampled from"
    assert first.output_ids == again.output_ids


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("budget", [8, 11, 64])
def test_exactly_the_tokens_that_the_requests_need_are_computed(depth: int, budget: int) -> None:
    """Prompts in chunks, with hits of all lengths; nothing is computed twice where memory is no question."""
    core = Core(num_blocks=200, max_num_batched_tokens=budget, depth=depth, sampler=sample_nothing_special)
    shared = prompt(12)
    prompts = [[*shared[: 4 * hits], *prompt(7 + i, 200 + 50 * i)] for i, hits in enumerate([3, 0, 2, 3, 1, 0, 3])]
    sequences = [core.add(ids, max_tokens=6) for ids in prompts]
    core.run()
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 8, 12, 4, 0, 12]
    needed = sum(len(ids) - sequence.num_cached_tokens for ids, sequence in zip(prompts, sequences, strict=True))
    assert core.num_computed_tokens == needed + 7 * 5
    assert core.executor.stats.num_sampled_tokens == 7 * 6


def test_a_conversation_goes_on_from_the_blocks_of_its_last_answer() -> None:
    core = Core(sampler=sample_nothing_special)
    first = core.add(prompt(6), max_tokens=10)
    core.run()
    second = core.add([*prompt(6), *first.output_ids, 1, 2])
    core.run()
    assert second.num_cached_tokens == 12, "15 of its tokens were computed: three full blocks"


# Memory


def test_the_youngest_is_preempted() -> None:
    core = Core(num_blocks=10, sampler=sample_nothing_special)
    sequences = [core.add(prompt(8, 100 * i), max_tokens=20) for i in range(3)]
    while not core.scheduler.preemption.num_preemptions:
        core.step()
    assert [sequence.row >= 0 for sequence in sequences] == [True, True, False]
    assert sequences[2].block_ids == []


def test_a_preempted_sequence_finds_its_own_prefix_again() -> None:
    core = Core(num_blocks=10, sampler=sample_nothing_special)
    elder, younger = (core.add(prompt(9, first), max_tokens=15) for first in (100, 300))
    while True:
        core.launch()
        if core.scheduler.preemption.num_preemptions:
            break
        core.land()
    assert younger.num_tokens == 21, "20 computed in five blocks each"
    core.scheduler.finish_sequence(elder, "abort")
    core.land()
    assert num_tokens_of(core.launch(), younger) == [5], "of its five blocks the elder one took one, the last"
    core.run()
    assert younger.output_ids == [500 + n for n in range(9, 24)]
    assert younger.num_cached_tokens == 0, "hits of its own blocks are not reported as the prompt's"


def test_the_oldest_gets_on_however_short_memory_is() -> None:
    core = Core(num_blocks=6, max_num_seqs=6)
    sequences = [core.add(prompt(3, 50 * i), max_tokens=20, ignore_eos=True) for i in range(6)]
    ended: list[Sequence] = []
    for _ in range(1000):
        if not core.scheduler.sequences():
            break
        core.step()
        ended += [s for s in sequences if s.has_ended and s not in ended]
    assert ended == sequences
    assert_run_as_alone(*sequences)


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head() -> None:
    core = Core(num_blocks=10)
    for first in (100, 200, 300):
        core.add(prompt(13, first), max_tokens=1)
        core.run()
    core.add([*prompt(13, 100)], max_tokens=1)
    core.run()
    core.add(prompt(9, 400), max_tokens=1)
    core.run()
    hits = []
    for first in (300, 200, 100):
        check_pool(core.kv.pools[0], {}, core.kv.cache.hashes)
        sequence = core.add(prompt(13, first), max_tokens=1)
        hits.append(core.kv.find_prefix(sequence).num_blocks)
        core.scheduler.finish_sequence(sequence, "abort")
    assert hits == [3, 1, 3], "200 was used longest ago, and lost its tail"


def test_resetting_the_cache_forgets_what_is_used_too_and_what_its_users_compute_later() -> None:
    core = Core()
    core.add(prompt(9), max_tokens=1)
    core.run()
    running = core.add(prompt(9, 300), max_tokens=12, ignore_eos=True)
    core.step()
    assert core.scheduler.reset_prefix_cache() > 0
    assert core.scheduler.reset_prefix_cache() == 0
    check_integrity(core.scheduler)
    again, shared = core.add(prompt(10), max_tokens=1), core.add(prompt(10, 300), max_tokens=1)
    core.run()
    assert (again.num_cached_tokens, shared.num_cached_tokens) == (0, 0)
    later = core.add([*prompt(9, 300), *running.output_ids, 1, 2, 3], max_tokens=1)
    core.run()
    assert later.num_cached_tokens == 8, "what was computed on blocks from before is nobody's prefix"
    assert_run_as_alone(running, again, shared, later)


# Waiting for others


def test_a_blocked_sequence_leaves_its_row_and_keeps_its_blocks() -> None:
    core = Core(depth=2, max_num_seqs=1)
    slow = core.add(prompt(9), max_tokens=20, ignore_eos=True)
    core.launch_all()
    core.scheduler.block_sequence(slow, Reason.BACKPRESSURE)
    assert core.scheduler.schedule_step() is None
    core.land()
    core.land()
    assert len(slow.output_ids) == 2, "what was in flight still counts"
    other = core.add(prompt(5, 300))
    core.launch()
    assert slow.row == -1
    assert slow.num_blocks == 3
    assert other.row >= 0
    assert core.scheduler.stats().blocked == 1
    core.scheduler.unblock_sequence(slow, Reason.BACKPRESSURE)
    core.run()
    assert_run_as_alone(slow, other)
    assert core.num_computed_tokens == 9 + 19 + 5 + len(other.output_ids) - 1, "nothing of it is computed again"


def test_a_blocked_sequence_is_preempted_before_any_that_runs() -> None:
    core = Core(num_blocks=10, sampler=sample_nothing_special)
    elder, younger = core.add(prompt(16), max_tokens=20), core.add(prompt(8, 300), max_tokens=20)
    core.step()
    core.scheduler.block_sequence(elder, Reason.BACKPRESSURE)
    while not core.scheduler.preemption.num_preemptions:
        core.step()
    assert elder.block_ids == []
    assert elder in core.scheduler.blocked.values()
    assert younger.row >= 0
    core.scheduler.unblock_sequence(elder, Reason.BACKPRESSURE)
    core.run()
    assert elder.output_ids == [500 + n for n in range(16, 36)]
    assert younger.output_ids == [500 + n for n in range(8, 28)]


def test_a_blocked_sequence_is_preempted_even_while_it_is_in_flight() -> None:
    core = Core(num_blocks=6, depth=2)
    elder, younger = (core.add(prompt(8, first), max_tokens=12, ignore_eos=True) for first in (100, 300))
    while (plan := core.launch()) is None or plan.starts.tolist() != [11, 11]:
        core.land()
    core.scheduler.block_sequence(elder, Reason.BACKPRESSURE)
    if len(core.launched) == core.depth:
        core.land()
    assert num_tokens_of(core.launch(), younger) == [1]
    assert elder.block_ids == []
    core.scheduler.unblock_sequence(elder, Reason.BACKPRESSURE)
    core.run()
    assert_run_as_alone(elder, younger)


def test_one_that_waits_with_blocks_is_not_preempted_for_itself() -> None:
    core = Core(num_blocks=8, caching=False)
    core.add(prompt(16), max_tokens=4, ignore_eos=True)
    parked = core.add(prompt(8, 300), ignore_eos=True)
    core.step()
    core.scheduler.block_sequence(parked, Reason.BACKPRESSURE)
    core.step()
    core.scheduler.unblock_sequence(parked, Reason.BACKPRESSURE)
    core.launch()
    assert parked.row == -1, "a block is free, and that is in reserve"
    core.land()
    core.run()
    assert_run_as_alone(parked)
    assert core.num_computed_of(parked) == 8 + 7


def test_a_blocked_sequence_makes_room_for_the_head_of_the_queue() -> None:
    core = Core(num_blocks=10)
    slow = core.add(prompt(20), ignore_eos=True)
    core.step()
    core.scheduler.block_sequence(slow, Reason.BACKPRESSURE)
    head = core.add(prompt(30, 300), ignore_eos=True)
    core.launch()
    assert head.row >= 0
    assert slow.block_ids == []


@pytest.mark.parametrize("is_elder_parked", [False, True])
def test_blocks_of_one_who_waits_for_a_row_are_not_out_of_reach(is_elder_parked: bool) -> None:
    """Unblocked and queued, it holds blocks that it cannot use; with them the one that runs cannot go on."""
    core = Core(num_blocks=10, max_num_seqs=1)
    elder = core.add(prompt(12), max_tokens=25, ignore_eos=True, reason=Reason.PAUSED)
    younger = core.add(prompt(12, 300), max_tokens=25, ignore_eos=True, reason=Reason.PAUSED)
    parked, running = (elder, younger) if is_elder_parked else (younger, elder)
    core.scheduler.unblock_sequence(parked, Reason.PAUSED)
    core.step()
    core.scheduler.block_sequence(parked, Reason.BACKPRESSURE)
    core.scheduler.unblock_sequence(running, Reason.PAUSED)
    core.step()
    core.scheduler.unblock_sequence(parked, Reason.BACKPRESSURE)
    assert parked.block_ids
    core.run()
    assert_run_as_alone(parked, running)
    assert core.scheduler.preemption.num_preemptions == 1
    assert core.num_computed_of(elder) == 12 + 24, "the younger one is preempted, whichever waits"


def test_what_gives_way_to_a_higher_priority_gives_enough() -> None:
    """A parked reader's blocks are not enough for the head: the prompt that runs gives its own, in the same step."""
    core = Core(num_blocks=20, max_num_batched_tokens=8, caching=False, sampler=sample_nothing_special)
    slow = core.add(prompt(8), max_tokens=20)
    core.step()
    core.scheduler.block_sequence(slow, Reason.BACKPRESSURE)
    low = core.add(prompt(50, 300), priority=5)
    core.step()
    head = core.add(prompt(40, 600))
    assert num_tokens_of(core.launch(), head) == [8]
    assert (slow.num_blocks, low.num_blocks) == (0, 0)
    core.scheduler.unblock_sequence(slow, Reason.BACKPRESSURE)
    core.run()
    assert all(sequence.has_ended for sequence in core.sequences)


def test_blocks_that_others_share_are_no_reason_to_give_way() -> None:
    """What a lower priority shares with one that stays is not free when it gives way, and it would do so in vain."""
    core = Core(num_blocks=20, sampler=sample_nothing_special)
    stays = core.add(prompt(40), max_tokens=20)
    core.step()
    low = core.add(prompt(42), max_tokens=20, priority=5)
    core.step()
    assert low.num_cached_tokens == 40
    head = core.add(prompt(48, 600), max_tokens=4)
    core.step()
    assert (low.num_preemptions, head.num_blocks) == (0, 0)
    core.run()
    assert all(sequence.has_ended for sequence in (stays, low, head))


def test_one_that_waits_with_blocks_makes_lower_priorities_give_way() -> None:
    """Its own blocks are no room for itself."""
    core = Core(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=8, caching=False, sampler=sample_nothing_special)
    high = core.add(prompt(24), max_tokens=20)
    for _ in range(3):
        core.step()
    core.scheduler.block_sequence(high, Reason.BACKPRESSURE)
    low = core.add(prompt(50, 300), priority=5)
    core.step()
    core.scheduler.unblock_sequence(high, Reason.BACKPRESSURE)
    assert num_tokens_of(core.launch(), high) == [1]
    core.run()
    assert core.num_computed_of(high) == 24 + 19, "nothing of it is computed again"
    assert low.has_ended


def test_tokens_that_nothing_comes_to_take_are_for_those_that_run() -> None:
    """The head's blocks go to rows that grow in the same step, so that the tokens it was to have are left over."""
    core = Core(num_blocks=42, max_num_batched_tokens=32, caching=False, sampler=sample_nothing_special)
    elders = [core.add(prompt(7, first), max_tokens=20, priority=-1) for first in (100, 200, 300)]
    core.step()
    low = core.add(prompt(100, 400), priority=5)
    core.step()
    head = core.add(prompt(40, 600))
    assert num_tokens_of(core.launch(), *elders, low, head) == [1, 1, 1, 29, 0]
    core.run()
    assert all(sequence.has_ended for sequence in core.sequences)


# What callers ask


def test_the_statistics_count_everybody_once() -> None:
    core = Core(max_num_seqs=1)
    core.add(prompt(5), ignore_eos=True)
    core.add(prompt(5, 300))
    core.add(prompt(5, 400), reason=Reason.PAUSED)
    core.step()
    stats = core.scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocked, stats.steps) == (1, 1, 1, 1)
    assert stats.free_blocks == stats.num_blocks - 2
    assert core.scheduler.num_unstarted == 2
    assert len(core.scheduler.sequences()) == 3


def test_a_steady_step_carries_no_tokens_and_only_new_blocks() -> None:
    core = Core(sampler=sample_nothing_special)
    for i in range(3):
        core.add(prompt(6 + i, 100 * i), max_tokens=20)
    core.step()
    for _ in range(12):
        plan = core.launch()
        assert plan is not None
        assert len(plan.removed) == len(plan.added) == 0
        assert plan.num_tokens.tolist() == [1, 1, 1]
        assert plan.purposes.tolist() == [Purpose.SAMPLE] * 3
        assert plan.grown_rows.tolist() == plan.rows[plan.starts % 4 == 0].tolist()
        core.land()


def test_the_sampler_is_told_what_was_asked_for() -> None:
    core = Core()
    asked = core.add([1], temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, logprobs=2, seed=3).sampling
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0.5, 0, 0.9, 0.1)
    assert (asked.seed, asked.logprobs, core.add([1]).sampling.logprobs) == (3, 2, -1)


@pytest.mark.parametrize(
    ("params", "stop_ids"),
    [({}, ()), ({"min_tokens": 2}, (EOS, 9)), ({"min_tokens": 2, "ignore_eos": True}, (9,))],
)
def test_tokens_that_end_it_are_masked_until_min_tokens(params: dict[str, Any], stop_ids: tuple[int, ...]) -> None:
    assert Core().add([1], stop_token_ids=(9,), **params).sampling.stop_ids == stop_ids


def corrupt(name: str, change: Callable[[Any], Any]) -> Callable[[Scheduler], None]:
    def apply(scheduler: Scheduler) -> None:
        owner = scheduler.table if hasattr(scheduler.table, name) else scheduler
        setattr(owner, name, change(getattr(owner, name)))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        corrupt("free_rows", lambda rows: rows[:-1]),
        corrupt("_running", lambda running: running[::-1]),
        corrupt("_running_rows", lambda rows: rows[::-1]),
        corrupt("num_unstarted", lambda count: count + 1),
        corrupt("scheduled", lambda column: column + 1),
        corrupt("capacity", lambda column: np.zeros_like(column)),
        lambda scheduler: scheduler.table.running[0].block_ids[0].pop(),
        lambda scheduler: scheduler.kv.pools[0].allocate(1),
        lambda scheduler: scheduler.kv.pools[0].release(
            scheduler.table.running[0].block_ids[0][:1], scheduler.kv.cache.hashes
        ),
        lambda scheduler: scheduler.kv.cache.pending.update({b"x": None}),
    ],
)
def test_the_integrity_check_sees_damage(damage: Callable[[Scheduler], object]) -> None:
    core = Core()
    for i in range(2):
        core.add(prompt(9, 100 * i), ignore_eos=True)
    core.step()
    check_integrity(core.scheduler)
    damage(core.scheduler)
    with pytest.raises(AssertionError):
        check_integrity(core.scheduler)
