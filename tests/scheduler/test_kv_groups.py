"""Layers in groups of one window each, and what a sequence needs in them."""

import pytest

from aioengine.scheduler.kv_groups import kv_groups, most_blocks


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
    groups = kv_groups(windows)
    assert groups.layers_a_group == layers_a_group
    assert [window is None for window in groups.windows] == [True] * num_full + [False] * num_sliding
    assert sorted(layer for layers in groups.layers for layer in layers) == list(range(len(windows)))
    for layer, (group, index) in enumerate(groups.places):
        assert groups.windows[group] == windows[layer]
        assert groups.layers[group][index] == layer
        assert index < layers_a_group


def test_layers_of_several_windows_are_in_groups_of_their_own() -> None:
    assert kv_groups((16, None, 8, 16, None, 8)).windows == (None, 8, 16)


def test_a_group_with_a_window_needs_no_more_than_that_and_what_is_in_flight() -> None:
    assert most_blocks((None, 9), 1000, 4, 1) == [250, 3]
    assert most_blocks((None, 9), 1000, 4, 16) == [250, 7]
    assert most_blocks((None, 9), 10, 4, 16) == [3, 3]
