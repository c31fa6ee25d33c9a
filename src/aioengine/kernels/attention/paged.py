"""Paged attention: the KV cache of all layers, in groups, and one step's attention over it by a device's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.operations import LayerAttention, Operations, PagedKV
from aioengine.kernels.torch.quantized import SCALE_BYTES
from aioengine.kernels.zeros import lazy_zeros

MAX_SPLITS = 64
SPLIT_KEYS = 64
"""A part is as long or longer: a tile of 16-bit keys of 128, below which the loads would be half empty."""

PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """What one block holds: in each layer [block_size, num_kv_heads, line_size] of keys, and as many values.

    Attributes:
        num_layers: of a group; a block belongs to one group at a time.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def line_size(self) -> int:
        """Numbers kept of a head's key or value."""
        return self.head_dim + (SCALE_BYTES if self.dtype == torch.int8 else 0)

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block, in all layers of a group."""
        elements = self.block_size * self.num_kv_heads * self.line_size
        return 2 * self.num_layers * elements * self.dtype.itemsize


class PagedAttention:
    """Keys and values in one tensor, of any group's layers where it has a block.

    Args:
        block_tables: int32 [groups, rows, blocks of the longest sequence], of all rows.
        places: of each of the model's layers, its group and its place in that.

    Attributes:
        cache: [2 · layers a group, blocks, block_size, kv_heads, line_size]; of each layer the keys, then the values.
        layers: of each of the model's layers its group, its keys and its values, in ``cache``.
        block_tables: of each group.
    """

    def __init__(
        self,
        operations: Operations,
        shape: KVCacheShape,
        num_blocks: int,
        *,
        block_tables: Tensor,
        places: tuple[tuple[int, int], ...],
        num_multiprocessors: int,
    ) -> None:
        size = (2 * shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.line_size)
        self.cache = lazy_zeros(*size, dtype=shape.dtype, device=block_tables.device)
        self.operations = operations
        self.layers = [(group, self.cache[2 * place], self.cache[2 * place + 1]) for group, place in places]
        self.block_tables = block_tables.unbind()
        self._num_kv_heads = shape.num_kv_heads
        self._num_multiprocessors = num_multiprocessors

    def copy_blocks(self, copied_from: Tensor, copied_to: Tensor) -> None:
        """As `Operations.copy_blocks`, in all layers of their groups."""
        self.operations.copy_blocks(self.cache, copied_from, copied_to)

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
            rows: int32 [b, 4], as `Operations.gather_tokens` takes them; None: nothing will ask for the tokens' rows.
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
    embeddings: Any = None
    _rows: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """As `aioengine.models.model.StepContext.rows`."""
        if self._rows is None:
            assert self.step_rows is not None
            num_rows, num_tokens = len(self.attention.block_tables[0]), self.positions.shape[-1]
            self._rows = self.attention.operations.rows_of_tokens(self.step_rows, num_rows, num_tokens)
        return self._rows

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
        kv = PagedKV(k_cache, v_cache, tables, layer.scale, layer.window, layer.soft_cap, layer.sinks, layer.slopes)
        if decodes is not None:
            operations.attend_decode(q, kv, decodes, out, num_splits=self.num_splits, max_context=self.max_context)
        if tiles is not None:
            operations.attend_prefill(q, kv, tiles, out)
        return out.flatten(1)


def choose_num_splits(num_rows: int, num_kv_heads: int, max_context: int, num_multiprocessors: int) -> int:
    """Into how many parts the contexts of single query tokens are best cut, by numbers that the host knows.

    Parts fill a GPU that rows and KV heads alone leave partly idle. When they fill it, 1: the second kernel would cost
    more than it brings.
    """
    programs = max(num_rows * num_kv_heads, 1)
    fitting = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs
    return max(1, min(fitting, -(-max_context // SPLIT_KEYS), MAX_SPLITS))
