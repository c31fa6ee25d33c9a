"""The cache of all layers on a device, and one step's attention over it by the device's operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.attention_launches import choose_num_splits
from aioengine.kernels.operations import LayerAttention, Operations, PagedKV
from aioengine.kernels.torch.quantized import SCALE_BYTES
from aioengine.kernels.zeros import lazy_zeros
from aioengine.models.model import GivenEmbeddings, StateRows
from aioengine.scheduler.cache_layout import (
    AttentionSpec,
    CacheLayout,
    CachePool,
    CacheSpec,
    StateSpec,
    make_layout,
)


def layout_of(specs: tuple[CacheSpec, ...], block_size: int, dtype: torch.dtype) -> CacheLayout:
    """The layout of a cache whose keys and values are kept in ``dtype``; int8 has a scale for each head's."""
    scale_bytes = SCALE_BYTES if dtype == torch.int8 else 0
    return make_layout(specs, block_size, element_bytes=dtype.itemsize, scale_bytes=scale_bytes)


class PagedAttention:
    """The blocks of all pools, and the block tables of all groups.

    Args:
        num_blocks: of each pool.
        dtype: of keys and values.
        block_tables: int32 [groups, rows, blocks of the longest sequence], of all rows; ids count within their pools.

    Attributes:
        caches: tensors of all pools. Keys and values of one size share a tensor, [2 · layers a group, blocks,
            block_size, kv_heads, line size], with the keys of each layer, then its values; else they have one each.
            States are uint8 [layers a group, blocks, num_bytes].
        layers: for each of the model's layers its group, its keys and its values in ``caches``; for a state its states,
            twice.
        first_blocks: int32 [groups], the id of the first block in the group's pool; None: there is one pool.
        block_tables: of each group.
    """

    def __init__(
        self,
        operations: Operations,
        layout: CacheLayout,
        num_blocks: Sequence[int],
        *,
        block_size: int,
        dtype: torch.dtype,
        block_tables: Tensor,
        num_multiprocessors: int,
    ) -> None:
        self.operations = operations
        self.block_size = block_size
        self.block_tables = block_tables.unbind()
        self._num_multiprocessors = num_multiprocessors
        attention = [pool.spec.num_kv_heads for pool in layout.pools if isinstance(pool.spec, AttentionSpec)]
        self._num_kv_heads = max(attention, default=1)
        self._firsts = [0, *accumulate(num_blocks)]
        self._of_pools: list[list[Tensor]] = []
        views: list[tuple[Tensor, Tensor]] = []
        for pool, count in zip(layout.pools, num_blocks, strict=True):
            made = _make_caches(pool, count, block_size, dtype, block_tables.device)
            self._of_pools.append(made)
            is_shared = isinstance(pool.spec, AttentionSpec) and len(made) == 1
            views.append((made[0][::2], made[0][1::2]) if is_shared else (made[0], made[-1]))
        self.caches = [cache for of_pool in self._of_pools for cache in of_pool]
        self.layers: list[tuple[int, Tensor, Tensor]] = []
        for group, place in layout.places:
            keys, values = views[layout.groups[group].pool]
            self.layers.append((group, keys[place], values[place]))
        firsts = np.array([self._firsts[group.pool] for group in layout.groups], np.int32)
        self.first_blocks = firsts if len(self._of_pools) > 1 else None

    def copy_blocks(self, copied_from: Tensor, copied_to: Tensor) -> None:
        """Copy blocks of any pool, in all layers of their groups; as `Operations.copy_blocks`, with ids among all."""
        for caches, (first, end) in zip(self._of_pools, pairwise(self._firsts), strict=True):
            sources, targets = copied_from, copied_to
            if len(self._of_pools) > 1:
                is_here = (copied_from >= first) & (copied_from < end)
                sources, targets = (torch.where(is_here, ids - first, -1) for ids in (copied_from, copied_to))
            for cache in caches:
                if cache.dim() == 5:  # states are not copied: children begin at the end of a block
                    self.operations.copy_blocks(cache, sources, targets)

    def num_splits(self, num_rows: int, max_context: int) -> int:
        """For so many single query tokens."""
        return choose_num_splits(num_rows, self._num_kv_heads, max_context, self._num_multiprocessors)

    def begin(
        self,
        *,
        positions: Tensor,
        slots: Tensor,
        decodes: Tensor | None = None,
        tiles: Tensor | None = None,
        rows: Tensor | None = None,
        num_splits: int = 1,
        max_context: int = 1,
    ) -> StepAttention:
        """Begin a step; arguments as in `Operations`.

        Args:
            positions: int32 [T]. slots: int32 [groups, T].
            rows: int32 [b, 4], as `Operations.gather_tokens` takes them; None: nothing will ask for rows or states.
            decodes: int32 [m, 3]. tiles: int32 [m, 4].
            num_splits: of the contexts of ``decodes``, none of which is longer than ``max_context``.
        """
        return StepAttention(self, positions, slots.unbind(), decodes, tiles, num_splits, max_context, rows)


@dataclass(slots=True)
class StepAttention:
    """A step as `aioengine.models.model.StepContext` describes it, over a `PagedAttention`'s cache.

    Attributes are the arguments of `PagedAttention.begin`; and:

    Attributes:
        embeddings: tokens and values of `aioengine.models.model.GivenEmbeddings`, or None.
    """

    attention: PagedAttention
    positions: Tensor
    slots: tuple[Tensor, ...]
    decodes: Tensor | None
    tiles: Tensor | None
    num_splits: int
    max_context: int
    step_rows: Tensor | None = None
    embeddings: GivenEmbeddings | None = None
    _rows: Tensor | None = None
    _state_rows: dict[int, StateRows] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """As `aioengine.models.model.StepContext.rows`."""
        if self._rows is None:
            assert self.step_rows is not None
            num_rows, num_tokens = len(self.attention.block_tables[0]), self.positions.shape[-1]
            self._rows = self.attention.operations.rows_of_tokens(self.step_rows, num_rows, num_tokens)
        return self._rows

    def find_states(self, index: int) -> tuple[Tensor, StateRows]:
        """As `aioengine.models.model.StepContext.find_states`."""
        group, states, _ = self.attention.layers[index]
        if group not in self._state_rows:
            assert self.step_rows is not None
            tables = self.attention.block_tables[group]
            self._state_rows[group] = _find_state_rows(self.step_rows, tables, self.attention.block_size)
        return states, self._state_rows[group]

    def attend(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        """Rotate, write this step's keys and values, then attend: [T, h · d] from [T, (h + 2 g) · d]."""
        attention, operations, decodes, tiles = self.attention, self.attention.operations, self.decodes, self.tiles
        group, k_cache, v_cache = attention.layers[layer.index]
        q = operations.rotate_and_write(
            qkv,
            self.positions,
            self.slots[group],
            layer.rope_table,
            layer.qk_weight,
            layer.eps,
            k_cache,
            v_cache,
            layer.qk_offset,
            is_qk_norm_wide=layer.is_qk_norm_wide,
        )
        out = operations.attention_output(q)
        tables = attention.block_tables[group]
        kv = PagedKV(k_cache, v_cache, tables, layer.scale, layer.window, layer.soft_cap, layer.sinks)
        if decodes is not None:
            operations.attend_decode(q, kv, decodes, out, num_splits=self.num_splits, max_context=self.max_context)
        if tiles is not None:
            operations.attend_prefill(q, kv, tiles, out)
        return out.flatten(1)


def _make_caches(
    pool: CachePool, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One tensor of zeros, or two where keys and values have two sizes."""
    spec, num_layers = pool.spec, pool.layers_a_group
    if isinstance(spec, StateSpec):
        return [lazy_zeros(num_layers, num_blocks, spec.num_bytes, dtype=torch.uint8, device=device)]
    scale_size = SCALE_BYTES if dtype == torch.int8 else 0
    sizes = Counter((spec.key_size + scale_size, spec.value_size + scale_size))
    return [
        lazy_zeros(count * num_layers, num_blocks, block_size, spec.num_kv_heads, size, dtype=dtype, device=device)
        for size, count in sizes.items()
    ]


def _find_state_rows(rows: Tensor, tables: Tensor, block_size: int) -> StateRows:
    """Find the blocks of a step's states in the block tables of their group."""
    row, starts, first_tokens, counts = rows.unbind(1)
    ends = starts + counts
    to_boundary = (ends - 1) // block_size * block_size - starts
    is_crossing = to_boundary > 0

    def block_of(position: Tensor, is_there: Tensor) -> Tensor:
        blocks = tables[row.clamp(min=0).long(), (position.clamp(min=0) // block_size).long()]
        return torch.where(is_there & (row >= 0), blocks, -1)

    return StateRows(
        first_tokens=first_tokens,
        num_tokens=counts,
        before=block_of(starts - 1, starts > 0),
        num_to_boundary=torch.where(is_crossing, to_boundary, 0),
        at_boundary=block_of(starts + to_boundary - 1, is_crossing),
        after=block_of(ends - 1, counts > 0),
    )
