"""Attention on a CPU: where a step's tokens lie in the paged KV cache, and what an attention backend offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Built once a step, read by every layer. Row ``i`` brings the query tokens ``query_offsets[i:i + 2]``.

    A token at position ``p`` of row ``i`` lives in slot ``block_tables[i, p // block_size] * block_size +
    p % block_size`` of a cache that is seen as [blocks * block_size, kv_heads, head_dim].

    Attributes:
        query_offsets: int32 [rows + 1], on the host.
        starts: int32 [rows], position of the row's first query token, on the host.
        context_lens: int32 [rows], tokens that the row has with this step's, on the host.
        block_tables: int64 [rows, blocks of the longest row]; what lies behind a row's last block is meaningless.
        slot_mapping: int64 [tokens], the slot that each query token's k and v go to.
        block_size: tokens in one block.
    """

    query_offsets: NDArray[np.int32]
    starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The slots of positions.

        Args:
            rows: int64 [n].
            positions: int64 [n, m], each below its row's context length.
        Returns:
            int64 [n, m].
        """
        blocks = self.block_tables[rows].gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size


class StepAttention(Protocol):
    """Attention over the KV cache for one step; what a decoder's ``forward`` takes as ``attend``."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Write this step's k and v to the cache of ``layer``, then attend.

        Args:
            q: [tokens, heads, head_dim], rotated.
            k, v: [tokens, kv_heads, head_dim], rotated.
            window: the most positions that a query sees, itself included; None: all.
        Returns:
            [tokens, heads, head_dim], same dtype as ``q``, contiguous; scaled by ``head_dim ** -0.5``.
        """
        ...


class AttentionBackend(Protocol):
    """Owns the way to compute attention over one KV cache."""

    def begin_step(self, meta: AttentionMetadata) -> StepAttention:
        """Prepare what all layers of a step share. The result is valid until the next call."""
        ...

    def copy_blocks(self, copied_from: NDArray[np.int32], copied_to: NDArray[np.int32]) -> None:
        """Copy all KV of block ``copied_from[i]`` to ``copied_to[i]``, in every layer.

        It happens after what earlier steps have written, and before what the next one reads or writes.

        Args:
            copied_from, copied_to: int32 [c] each; no block is in both, and none twice in the second.
        """
        ...
