"""Groups of layers with windows: blocks that are given up, who gets them, and what is found again."""

from __future__ import annotations

import pytest
from layouts import layout_of
from scheduler.harness import Core, assert_run_as_alone

from aioengine.scheduler.cache_layout import CacheLayout, attention_specs, make_layout
from aioengine.scheduler.sequence import Reason

GEMMA = make_layout(attention_specs((None if layer % 6 == 5 else 64 for layer in range(26)), 1, 1))
"""As Gemma 3 1B has its layers, with a window of 64."""


@pytest.mark.parametrize("depth", [1, 3])
def test_what_a_group_holds_of_a_sequence_does_not_grow_behind_its_window(depth: int) -> None:
    layout, budget = layout_of(None, 10, 3), 16
    most = layout.most_held(400, 4, max_in_flight=depth, max_step_tokens=budget)
    core = Core(num_blocks=sum(most), max_model_len=400, layout=layout, depth=depth, max_num_batched_tokens=budget)
    sequence = core.add(range(200), max_tokens=200, ignore_eos=True)
    decoding = layout.most_held(400, 4, max_in_flight=depth)
    core.launch()
    while not sequence.has_ended:
        computed = int(core.scheduler.table.computed[sequence.row])
        for group, window in enumerate((None, 10, 3)):
            num_held = len(sequence.block_ids[group]) - sequence.num_passed_blocks[group]
            if window is not None:
                assert sequence.num_passed_blocks[group] == max(computed + 1 - window, 0) // 4
                assert num_held <= (most if computed < 200 else decoding)[group]
        core.step()
    assert core.scheduler.stats().preemptions == 0
    assert_run_as_alone(*core.sequences)


def most_running(layout: CacheLayout, num_blocks: int) -> int:
    """How many of 40 sequences of 512 tokens run when the first one ends."""
    core = Core(num_blocks=num_blocks, block_size=16, max_model_len=512, layout=layout, max_num_seqs=40)
    for nth in range(40):
        core.add(range(nth, nth + 412), max_tokens=100, ignore_eos=True)
    while not core.sequences[0].has_ended:
        num_running = core.scheduler.num_running
        core.step()
    return num_running


def test_the_same_memory_holds_three_times_as_many_sequences_of_eight_windows() -> None:
    num_layers = 26 * 130  # of blocks: four sequences of full length, and what is kept back
    one_kind = most_running(layout_of(None), num_layers // 26)
    assert one_kind == 4
    assert most_running(GEMMA, num_layers // GEMMA.pools[0].layers_a_group) >= 3 * one_kind


def test_a_prefix_is_found_whose_beginning_the_windows_have_given_to_others() -> None:
    """All of a prompt but its last block, though the group with a window has lost the first ones."""
    core = Core(num_blocks=50 + 4 + 40, max_model_len=220, layout=layout_of(None, 12), max_num_batched_tokens=16)
    core.add(range(200), max_tokens=4, ignore_eos=True)
    core.run()
    core.add(range(300, 340), max_tokens=4, ignore_eos=True)  # takes what was free first
    core.run()
    of_full, of_window = core.kv.cache.ready
    first_hash = core.sequences[0].block_hashes[0]
    assert first_hash in of_full
    assert first_hash not in of_window
    again = core.add(range(200), max_tokens=4, ignore_eos=True)
    core.run()
    assert again.num_cached_tokens == 196
    assert_run_as_alone(*core.sequences)


def test_a_lost_block_of_a_window_moves_the_hit_before_it() -> None:
    core = Core(num_blocks=128, max_model_len=220, layout=layout_of(None, 9), max_num_batched_tokens=16)
    first = core.add(range(100), max_tokens=4, ignore_eos=True)
    core.run()
    lost = core.kv.cache.ready[1][first.block_hashes[20]]
    core.kv.cache.evict_blocks([lost])
    core.kv.pools[0]._cached.pop(lost)
    core.kv.pools[0]._blank.append(lost)
    lengths = (80, 84, 88, 92)
    again = [core.add([*range(length), 999], reason=Reason.PAUSED) for length in lengths]
    hits = [4 * core.kv.find_prefix(sequence).num_blocks for sequence in again]
    assert hits == [80, 80, 80, 92], "of nine tokens a token sees two blocks before its own"
