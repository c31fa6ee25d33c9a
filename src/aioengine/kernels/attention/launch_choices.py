"""How the kernels of paged attention are launched: by what was measured (`aioengine.executor.tune`), else by default.

What may be chosen is the number of keys, and of rows of queries, that a program has at once, its warps, and its
pipeline's stages. Every choice computes the same but for rounding, over any tiles that the host packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

DECODE, DECODE_IN_SPLITS, PREFILL = "attend_decode", "attend_decode, in splits", "attend_prefill"
ATTENTION_KERNELS = (DECODE, DECODE_IN_SPLITS, PREFILL)

PREFILL_ROWS = 128
"""Query tokens times heads in a tile of `Operations.attend_prefill`: no choice has more in a program, and programs of
fewer share a tile. So tiles that are packed already stay right whatever is chosen."""


class AttentionShape(NamedTuple):
    """Sizes that the best choice depends on, beside the GPU.

    Attributes:
        group: query heads that share a KV head.
        element_size, cache_element_size: bytes of a value, of queries and of keys.
    """

    head_dim: int
    group: int
    num_kv_heads: int
    element_size: int
    cache_element_size: int
    block_size: int

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> AttentionShape:
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        group = q.shape[1] // num_kv_heads
        return cls(head_dim, group, num_kv_heads, q.element_size(), k_cache.element_size(), block_size)


class LaunchChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to launch a kernel.

    Attributes:
        num_warps, num_stages: as Triton means them.
        constants: the kernel's constants that may be chosen, such as (("N", 64),), by name.
    """

    num_warps: int = 4
    num_stages: int = 2
    constants: tuple[tuple[str, int], ...] = ()


TUNED: dict[tuple[str, int | None, AttentionShape], LaunchChoice] = {}
"""By kernel, GPU and shape. What is there stays: an engine that runs has compiled it."""


_trial: ContextVar[LaunchChoice | None] = ContextVar("_trial", default=None)
"""A thread's own."""


@contextmanager
def trying(choice: LaunchChoice) -> Iterator[None]:
    """Within it this thread's launches are by ``choice``; other threads may serve meanwhile."""
    token = _trial.set(choice)
    try:
        yield
    finally:
        _trial.reset(token)


def choice_of(kernel: str, device: torch.device, shape: AttentionShape) -> LaunchChoice:
    """How to launch a kernel now."""
    return _trial.get() or TUNED.get((kernel, device.index, shape)) or default_choice(kernel, shape)


def default_choice(kernel: str, shape: AttentionShape) -> LaunchChoice:
    return candidates(kernel, shape, 80)[0]


@cache
def candidates(kernel: str, shape: AttentionShape, capability: int) -> tuple[LaunchChoice, ...]:
    """The default, then others worth measuring: by Triton 3.9 none spills (``python -m benchmarks.gpu.compile``).
    Few, since each is compiled, for 0.1 to 2 s.

    The default has to do for any GPU from 8.0 on: those of 8.6, 8.9 and 12.0 have 99 KiB of shared memory a block, and
    it takes less. What is only measured may take more: where that is too much it is passed over.

    Args:
        capability: of the GPU, such as 90.
    """
    width = max(1 << (shape.head_dim - 1).bit_length(), 16)
    if kernel == PREFILL:
        return _prefill_candidates(width, shape.element_size, shape.cache_element_size, capability)
    return _decode_candidates(width, shape.group, shape.element_size, shape.cache_element_size)


def _decode_candidates(width: int, group: int, element_size: int, cache_element_size: int) -> tuple[LaunchChoice, ...]:
    # 8,192 values: two tiles of 16-bit keys and values are 64 KiB in shared memory, with 110 registers a thread, and
    # leave room for three programs a multiprocessor. Products of float32 keep whole operands in registers.
    n = min(max((2048 if element_size == 4 else 8192) // width, 16), 128)
    # float8 has half the bytes a tile: one more of them on the way. Converted to float32 it takes registers as well.
    stages = 4 if cache_element_size == 1 else 3
    if element_size == 4:
        found = [(n, 8 if group > 32 or cache_element_size == 1 else 4, stages)]
    elif group > 64 and width > 128:
        # The queries alone are 64 KiB.
        found = [(n // 2, 8, 2)]
    elif group > 32:
        found = [(n, 8, stages)]
        if cache_element_size > 1:
            found += [(n, 8, 2), (n // 2, 8, 3)]
            if width > 128:
                # 100 KiB with queries of 32.
                found = [(n, 8, 2), (n // 2, 8, 3), (n, 8, 3)]
    elif cache_element_size == 1:
        found = [(n, 4, 4), (n, 4, 3), (n, 8, 4), (2 * n, 8, 3), (2 * n, 8, 4), (n // 2, 4, 4)]
    else:
        found = [(n, 4, 3), (2 * n, 8, 3), (n // 2, 4, 3)]
        if group <= 16:
            found += [(n, 4, 4), (2 * n, 4, 2)]
        if width <= 128:
            found += [(n, 8, 3), (n // 2, 2, 4)]
    return _choices(("N",), found)


def _prefill_candidates(
    width: int, element_size: int, cache_element_size: int, capability: int
) -> tuple[LaunchChoice, ...]:
    # 64 rows a warp group; more of them in a program read each key fewer times from the L2 cache, which would be the
    # bound at 64 rows. Without Hopper's matrix units, which read shared memory, operands take registers.
    is_hopper = capability >= 90
    if element_size == 4:
        # Products of float32 keep whole operands in registers, those that are converted from float8 twice.
        found = [(16, 16, 4 if cache_element_size == 4 else 8, 2)]
    elif width > 128:
        found = [(64, 32, 8, 2), (64, 32, 8, 3)]
        if is_hopper:
            found += [(128, 32, 8, 2), (64, 64, 8, 2)] if cache_element_size > 1 else [(64, 16, 8, 3)]
    elif width > 64:
        found = [(128, 64, 8, 3), (128, 32, 8, 3)]
        if is_hopper:
            found += [(128, 64, 8, 2), (64, 64, 4, 2)]
            found += [(128, 128, 8, 2), (64, 64, 4, 3)] if cache_element_size > 1 else [(64, 64, 8, 3)]
    else:
        found = [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3)]
        if is_hopper:
            found.append((128, 128, 8, 2))
    return _choices(("M", "N"), found)


def _choices(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> tuple[LaunchChoice, ...]:
    """Make choices of rows: constants, then warps and stages."""
    return tuple(
        LaunchChoice(num_warps=row[-2], num_stages=row[-1], constants=tuple(zip(names, row[:-2], strict=True)))
        for row in rows
    )
