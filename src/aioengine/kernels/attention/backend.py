"""What an attention backend offers: one object a model, one callable a step."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aioengine.kernels.attention.metadata import AttentionMetadata


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
