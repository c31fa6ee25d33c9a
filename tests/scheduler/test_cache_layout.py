"""The cache of a model: layers in groups, groups in pools, and what a sequence needs in them."""

import pytest
from layouts import STATE, layout_of

from aioengine.scheduler.cache_layout import AttentionSpec, CacheSpec, StateSpec, attention_specs, make_layout


def alternating(num_layers: int, *, full_every: int, window: int = 1024) -> tuple[int | None, ...]:
    return tuple(None if layer % full_every == full_every - 1 else window for layer in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "num_full", "num_sliding", "layers_a_group"),
    [
        ((None,) * 28, 1, 0, 28),
        ((4096,) * 32, 0, 1, 32),
        (alternating(24, full_every=2, window=128), 1, 1, 12),  # gpt-oss-20b
        (alternating(26, full_every=6), 1, 6, 4),  # Gemma 3 1B
        (alternating(34, full_every=6), 1, 6, 5),  # Gemma 3 4B
        (alternating(62, full_every=6), 1, 6, 10),  # Gemma 3 27B
        (alternating(32, full_every=4), 1, 3, 8),  # OLMo 3 7B
        ((None, 8, 8), 1, 2, 1),
        ((None,) * 12 + (128,) * 13, 1, 1, 13),
    ],
)
def test_groups_have_equally_many_layers_and_little_padding(
    windows: tuple[int | None, ...], num_full: int, num_sliding: int, layers_a_group: int
) -> None:
    layout = make_layout(attention_specs(windows, 1, 1))
    assert [pool.layers_a_group for pool in layout.pools] == [layers_a_group]
    assert [group.reach is None for group in layout.groups] == [True] * num_full + [False] * num_sliding
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(windows)))
    for layer, (number, place) in enumerate(layout.places):
        group = layout.groups[number]
        assert group.reach == windows[layer]
        assert group.layers[place] == layer
        assert place < layers_a_group


def test_layers_of_several_windows_are_in_groups_of_their_own() -> None:
    layout = make_layout(attention_specs((16, None, 8, 16, None, 8), 1, 1))
    assert [group.reach for group in layout.groups] == [None, 8, 16]


def test_layers_of_other_sizes_and_states_have_pools_of_their_own() -> None:
    latent = AttentionSpec(num_kv_heads=1, key_size=576, value_size=512)
    heads = AttentionSpec(num_kv_heads=4, key_size=64, value_size=64)
    specs: list[CacheSpec] = [StateSpec(num_bytes=10**6), latent, heads, StateSpec(num_bytes=10**6), latent]
    layout = make_layout(specs, 16, element_bytes=2, scale_bytes=4)
    assert [(group.layers, group.is_state, group.pool) for group in layout.groups] == [
        ((1, 4), False, 0),
        ((2,), False, 1),
        ((0, 3), True, 2),
    ]
    sizes = [2 * 16 * ((576 + 512) * 2 + 2 * 4), 16 * 4 * (2 * 64 * 2 + 2 * 4), 2 * 10**6]
    assert [pool.block_bytes for pool in layout.pools] == sizes


def test_a_group_needs_no_more_than_its_window_or_its_states_and_what_is_in_flight() -> None:
    layout = layout_of(None, 9, STATE)
    assert layout.most_held(1000, 4) == [250, 4, 3]
    assert layout.most_held(1000, 4, max_step_tokens=16) == [250, 8, 4]
    assert layout.most_held(1000, 4, max_in_flight=2, max_step_tokens=16) == [250, 12, 6]
    assert layout.most_held(10, 4, max_step_tokens=16) == [3, 3, 3]


def test_pools_that_do_not_grow_with_length_get_what_all_sequences_hold_up_to_half() -> None:
    layout = make_layout([AttentionSpec(), StateSpec(num_bytes=100)], 5)
    assert [pool.block_bytes for pool in layout.pools] == [10, 100]
    assert layout.share_bytes(10_000, [10, 4], max_num_seqs=8) == [80, 32]
    assert layout.share_bytes(10_000, [100, 4], max_num_seqs=8) == [680, 32]
    assert layout.share_bytes(10_000, [100, 4], max_num_seqs=100) == [500, 50]
    assert layout.share_bytes(1_400, [100, 4], max_num_seqs=100) == [100, 4]
