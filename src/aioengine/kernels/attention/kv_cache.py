"""The KV cache: per layer, blocks of keys and of values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.kernels.zeros import lazy_zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """What one block holds: in each layer [block_size, num_kv_heads, head_dim] of keys, and as many values."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block in all layers."""
        elements = self.block_size * self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
        k, v: one tensor a layer, [num_blocks, block_size, num_kv_heads, head_dim].
    """

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def allocate(cls, shape: KVCacheShape, num_blocks: int) -> KVCache:
        """Zeros, in pages that the system hands out when they are first written."""
        return cls(
            k=[_lazy_zeros(shape, num_blocks) for _ in range(shape.num_layers)],
            v=[_lazy_zeros(shape, num_blocks) for _ in range(shape.num_layers)],
        )

    def copy_blocks(self, copied_from: NDArray[np.int32], copied_to: NDArray[np.int32]) -> None:
        """Copy all KV of block ``copied_from[i]`` to ``copied_to[i]``, in every layer.

        Args:
            copied_from, copied_to: int32 [c] each; no block is in both, and none twice in the second.
        Raises:
            IndexError: there is no such block.
        """
        sources, targets = (torch.from_numpy(blocks.astype(np.int64)) for blocks in (copied_from, copied_to))
        for cache in (*self.k, *self.v):
            cache.index_copy_(0, targets, cache[sources])


def _lazy_zeros(shape: KVCacheShape, num_blocks: int) -> Tensor:
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return lazy_zeros(*size, dtype=shape.dtype, device=torch.device("cpu"))
