"""The cache of a model, described once: what its layers keep of a sequence, which of them share blocks, and how many.

Each layer that keeps something has a spec: attention to all tokens, attention to a window of them, or a state of fixed
size. Layers with equal specs share block tables and form a group. Groups whose layers are alike, but for the window,
share a pool: each of its blocks belongs to one group at a time, so that blocks that a window has passed are free for
all (vLLM's hybrid KV cache manager; Zhang et al., Jenga, SOSP 2025, arXiv:2503.18292).

A block of a state's group holds the state after the last of its ``block_size`` tokens that is computed. A step reads
the state before its first token. It writes the state after its last token, and the one where the block of that token
begins, if it crosses into that block. So a state is like a window of two tokens: the next step needs the block of the
last token. Full blocks are never written again, so that other sequences can begin with them; a prefix is found again
as far as the last of its blocks that steps have ended in or before.

States have pools of their own. Padded to one size, blocks of attention would have hundreds of tokens, since a state is
as large as their keys and values, and prefixes are only found again in whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

FULL_WEIGHT = 8
"""Cost of a layer of padding in a group without a window, relative to one with a window: the first is padded for all
tokens of a sequence, the other for those in the window."""

STATE_REACH = 2
"""A token's own place, and that of the token before it, where the state is."""

BLOCKS_A_STEP = 2
"""Blocks of states that a step fills: that of its last token, and the one before it."""

MOST_BOUNDED_SHARE = 0.5
"""Largest share of the cache's bytes for pools whose blocks a sequence holds no more of when it gets longer."""


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """The keys and values of one layer.

    Attributes:
        key_size, value_size: numbers a head.
        window: how many of the last tokens a token sees, itself included; None: all.
    """

    num_kv_heads: int = 1
    key_size: int = 1
    value_size: int = 1
    window: int | None = None


class StateSpec(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """A state of fixed size that one layer keeps of all tokens before, such as that of a recurrence or a convolution.

    Attributes:
        num_bytes: of the state of one sequence.
    """

    num_bytes: int


CacheSpec = AttentionSpec | StateSpec


def attention_specs(
    windows: Iterable[int | None], num_kv_heads: int, key_size: int, value_size: int | None = None
) -> tuple[CacheSpec, ...]:
    """Specs of layers that differ in their windows alone; values are as large as keys unless their size is given."""
    size = key_size if value_size is None else value_size
    return tuple(
        AttentionSpec(num_kv_heads=num_kv_heads, key_size=key_size, value_size=size, window=window)
        for window in windows
    )


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share block tables.

    Attributes:
        layers: the model's layers in the group, ascending: ``layers_a_group`` of its pool, fewer in the last group of a
            kind.
        reach: how many of the last places in its block table a token needs, its own included; None: all.
        is_state: whether its layers keep states.
        pool: the index of the pool that its blocks come from.
    """

    layers: tuple[int, ...] = (0,)
    reach: int | None = None
    is_state: bool = False
    pool: int = 0


class CachePool(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one size.

    Attributes:
        spec: of each layer in a block, its window aside.
        layers_a_group: how many such layers a block has.
        block_bytes: of one block, in all of its layers.
    """

    spec: CacheSpec = AttentionSpec()
    layers_a_group: int = 1
    block_bytes: int = 0


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Groups and pools; by default one group of one layer that attends to all tokens.

    Attributes:
        groups: those without a window first, then those with windows, then states.
        pools: in the order in which groups take from them.
    """

    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    pools: tuple[CachePool, ...] = (CachePool(),)

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The group of each of the model's layers, and its place in that."""
        places = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    def most_held(
        self, num_tokens: int, block_size: int, *, max_in_flight: int = 1, max_step_tokens: int = 1
    ) -> list[int]:
        """The most blocks that a sequence holds in each group at once, on its way to ``num_tokens`` tokens.

        Args:
            max_in_flight: steps that are launched and not applied, each of ``max_step_tokens`` tokens at the most.
        """
        all_blocks = -(-num_tokens // block_size)
        most = []
        for group in self.groups:
            if group.reach is None:
                most.append(all_blocks)
                continue
            # The first and the last block of those reach - 1 tokens and of those in flight may have one of them each.
            # With states a block more is kept where children begin, which is before the end of the prompt.
            seen = -(-(group.reach - 2 + max_in_flight * max_step_tokens) // block_size) + 1 + self.has_states
            if group.is_state:
                seen = min(seen, BLOCKS_A_STEP * (max_in_flight + 1))
            most.append(min(all_blocks, seen))
        return most

    def most_held_by_pool(
        self, num_tokens: int, block_size: int, *, max_in_flight: int = 1, max_step_tokens: int = 1
    ) -> list[int]:
        """As `most_held`, by pool."""
        held = self.most_held(num_tokens, block_size, max_in_flight=max_in_flight, max_step_tokens=max_step_tokens)
        return self.sum_by_pool(held)

    def sum_by_pool(self, counts: Iterable[int]) -> list[int]:
        """Sums of numbers of groups, by pool."""
        sums = [0] * len(self.pools)
        for group, count in zip(self.groups, counts, strict=True):
            sums[group.pool] += count
        return sums

    def count_bytes(self, blocks: Iterable[int]) -> int:
        """Bytes of so many blocks, given by pool."""
        return sum(count * pool.block_bytes for count, pool in zip(blocks, self.pools, strict=True))

    def share_bytes(self, num_bytes: int, held: list[int], max_num_seqs: int) -> list[int]:
        """Blocks of each pool, out of so many bytes, which are enough for one sequence.

        Pools without a group that attends to all tokens need no more for longer sequences. They get what
        ``max_num_seqs`` sequences hold, up to `MOST_BOUNDED_SHARE` of the bytes; the other pools share the rest.

        Args:
            held: by pool, the most blocks of one sequence of the greatest length.
        """
        growing = sorted({group.pool for group in self.groups if group.reach is None}) or range(len(held))
        bounded = [pool for pool in range(len(held)) if pool not in growing]
        blocks = [0] * len(held)

        def bytes_held(pools: Iterable[int]) -> int:
            return sum(held[pool] * self.pools[pool].block_bytes for pool in pools)

        def split(pools: Iterable[int], available: int) -> None:
            for pool in pools:
                share = max(available, 0) * held[pool] // bytes_held(pools)
                blocks[pool] = min(share, max_num_seqs * held[pool])

        most_bounded = max(bytes_held(bounded), int(MOST_BOUNDED_SHARE * num_bytes))
        split(bounded, min(most_bounded, num_bytes - bytes_held(growing)))
        split(growing, num_bytes - self.count_bytes(blocks))
        return blocks


FULL_ATTENTION = CacheLayout()
"""One layer that attends to all tokens, of unknown size."""


def make_layout(
    specs: Iterable[CacheSpec], block_size: int = 1, *, element_bytes: int = 1, scale_bytes: int = 0
) -> CacheLayout:
    """Group the layers of a model by what they keep.

    Args:
        specs: of each layer that keeps something, by the index that it has in the cache.
        element_bytes: of a number of a key or a value. scale_bytes: of each head's key or value, beside its numbers.
    """
    of_kind: dict[CacheSpec, list[tuple[int, int | None]]] = {}
    for layer, spec in enumerate(specs):
        window = spec.window if isinstance(spec, AttentionSpec) else None
        kind = msgspec.structs.replace(spec, window=None) if isinstance(spec, AttentionSpec) else spec
        of_kind.setdefault(kind, []).append((layer, window))
    found: list[tuple[CacheSpec, CacheGroup]] = []
    sizes: dict[CacheSpec, int] = {}
    for kind, members in of_kind.items():
        is_state = isinstance(kind, StateSpec)
        size = sizes[kind] = len(members) if is_state else _layers_a_group(Counter(window for _, window in members))
        for window in dict.fromkeys(window for _, window in members):
            layers = [layer for layer, of_layer in members if of_layer == window]
            for first in range(0, len(layers), size):
                reach = STATE_REACH if is_state else window
                group = CacheGroup(layers=tuple(layers[first : first + size]), reach=reach, is_state=is_state)
                found.append((kind, group))
    found.sort(key=lambda one: (one[1].is_state, one[1].reach or 0))
    kinds = list(dict.fromkeys(kind for kind, _ in found))

    def block_bytes(kind: CacheSpec) -> int:
        if isinstance(kind, StateSpec):
            return sizes[kind] * kind.num_bytes
        token_bytes = (kind.key_size + kind.value_size) * element_bytes + 2 * scale_bytes
        return sizes[kind] * block_size * kind.num_kv_heads * token_bytes

    return CacheLayout(
        groups=tuple(msgspec.structs.replace(group, pool=kinds.index(kind)) for kind, group in found),
        pools=tuple(CachePool(spec=kind, layers_a_group=sizes[kind], block_bytes=block_bytes(kind)) for kind in kinds),
    )


def _layers_a_group(counts: Counter[int | None]) -> int:
    """The number of layers a group with the least padding, where a group more costs as much as a layer of padding.

    A group has a block table of its own. Padding is weighed by `FULL_WEIGHT`.

    Args:
        counts: numbers of layers, by window.
    """

    def cost(size: int) -> int:
        padding = {window: -count % size for window, count in counts.items()}
        num_groups = sum(-(-count // size) for count in counts.values())
        return num_groups + sum(n * (FULL_WEIGHT if window is None else 1) for window, n in padding.items())

    return min(range(max(counts.values()), 0, -1), key=cost)
