"""Layers of several kinds in one pool of KV blocks: groups of equally many layers, each of one window.

A block holds the keys and values of one group's layers for ``block_size`` tokens, and belongs to one group at a time.
All blocks have one size, so that any group may take any of them; what the window of a group has passed is free for
all (vLLM's hybrid KV cache manager; Zhang et al., Jenga, SOSP 2025, arXiv:2503.18292).
"""

from __future__ import annotations

from collections import Counter

import msgspec

FULL_WEIGHT = 8
"""What a layer of padding in a group without a window costs, in layers of a window's: it is padded for all tokens of a
sequence, the other for those in the window."""


class KVGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers share blocks.

    Attributes:
        windows: of each group, how many of the last keys its layers see; None for all. Groups without one come first.
        layers: of each group, the model's layers that it has, ascending: ``layers_a_group`` of them, fewer in the last
            one of a kind.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, ...], ...]
    layers_a_group: int

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each of the model's layers, its group and its place in that."""
        places = {
            layer: (group, index) for group, layers in enumerate(self.layers) for index, layer in enumerate(layers)
        }
        return tuple(places[layer] for layer in range(len(places)))


def kv_groups(windows: tuple[int | None, ...]) -> KVGroups:
    """Group the layers of a model by their windows, all alike in one group.

    The number of layers a group is the one with the least padding, weighed by `FULL_WEIGHT`, where a group more costs
    as much as a layer of padding: it has a block table of its own.

    Args:
        windows: of each layer, how many of the last keys it sees; None for all.
    """
    counts = Counter(windows)

    def cost(size: int) -> int:
        padding = {window: -count % size for window, count in counts.items()}
        num_groups = sum(-(-count // size) for count in counts.values())
        return num_groups + sum(n * (FULL_WEIGHT if window is None else 1) for window, n in padding.items())

    size = min(range(max(counts.values()), 0, -1), key=cost)
    groups: list[tuple[int | None, tuple[int, ...]]] = []
    for window in sorted(counts, key=lambda window: window or 0):
        layers = [layer for layer, of_layer in enumerate(windows) if of_layer == window]
        groups += [(window, tuple(layers[first : first + size])) for first in range(0, len(layers), size)]
    return KVGroups(
        windows=tuple(window for window, _ in groups),
        layers=tuple(layers for _, layers in groups),
        layers_a_group=size,
    )


def most_blocks(
    windows: tuple[int | None, ...], num_tokens: int, block_size: int, max_tokens_in_flight: int
) -> list[int]:
    """How many blocks a sequence holds at the most in each group, on its way to ``num_tokens`` tokens with KV.

    Args:
        windows: of each group.
        max_tokens_in_flight: of the sequence, computed by steps whose results are not applied.
    """
    all_blocks = -(-num_tokens // block_size)
    return [
        all_blocks if window is None else min(all_blocks, -(-(window - 2 + max_tokens_in_flight) // block_size) + 1)
        for window in windows
    ]  # the first and the last block of those window - 1 + max_tokens_in_flight tokens may have one of them each
