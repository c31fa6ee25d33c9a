"""How paged attention is launched: parameters by shape, and into how many parts contexts are cut."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

PREFILL_ROWS = 128
"""Query tokens times heads in a tile of `Operations.attend_prefill`; programs of fewer rows share a tile."""

MAX_SPLITS = 64
SPLIT_KEYS = 64
"""A part is as long or longer: a tile of 16-bit keys of 128, below which the loads would be half empty."""

PROGRAMS_PER_MULTIPROCESSOR = 2


class AttentionLaunch(NamedTuple):
    """Launch parameters of a kernel of attention.

    None spills by Triton 3.9 (``python -m benchmarks.gpu.compile``). Each fits into 99 KiB of shared memory a block,
    which GPUs of capability 8.6, 8.9 and 12.0 have.

    Attributes:
        num_keys, num_rows: keys, and query tokens times heads, that a program has at once; powers of two. The rows of
            a decode follow from the model's heads.
        num_warps, num_stages: as Triton means them.
    """

    num_keys: int
    num_warps: int
    num_stages: int
    num_rows: int = PREFILL_ROWS


@cache
def choose_decode_launch(head_dim: int, group: int, element_size: int, cache_element_size: int) -> AttentionLaunch:
    """Choose the launch of single query tokens.

    Args:
        group: query heads that share a KV head.
        element_size, cache_element_size: bytes of a value, of queries and of keys.
    """
    width = max(1 << (head_dim - 1).bit_length(), 16)
    # 8,192 values: two tiles of 16-bit keys and values are 64 KiB in shared memory, with 110 registers a thread, and
    # leave room for three programs a multiprocessor. Products of float32 keep whole operands in registers.
    num_keys = min(max((2048 if element_size == 4 else 8192) // width, 16), 128)
    num_warps = 8 if group > 32 or (element_size == 4 and cache_element_size == 1) else 4
    # float8 has half the bytes a tile: one more of them on the way.
    num_stages = 4 if cache_element_size == 1 else 3
    if element_size == 2 and width > 128:
        if group > 64:  # the queries alone are 64 KiB
            return AttentionLaunch(num_keys // 2, num_warps, 2)
        if group > 32 and cache_element_size == 2:
            num_stages = 2
    return AttentionLaunch(num_keys, num_warps, num_stages)


@cache
def choose_prefill_launch(head_dim: int, element_size: int, cache_element_size: int) -> AttentionLaunch:
    """Choose the launch of tiles of query tokens; arguments as in `choose_decode_launch`."""
    if element_size == 4:
        # Products of float32 keep whole operands in registers, those that are converted from float8 twice.
        return AttentionLaunch(16, 4 if cache_element_size == 4 else 8, 2, num_rows=16)
    # 64 rows a warp group; more of them in a program read each key fewer times from the L2 cache, which would be the
    # bound at 64 rows.
    return AttentionLaunch(32, 8, 2, num_rows=64) if head_dim > 128 else AttentionLaunch(64, 8, 3)


def choose_num_splits(num_rows: int, num_kv_heads: int, max_context: int, num_multiprocessors: int) -> int:
    """Into how many parts the contexts of single query tokens are best cut, by numbers that the host knows.

    Parts fill a GPU that rows and KV heads alone leave partly idle. When they fill it, 1: the second kernel would cost
    more than it brings.
    """
    programs = max(num_rows * num_kv_heads, 1)
    fitting = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs
    return max(1, min(fitting, -(-max_context // SPLIT_KEYS), MAX_SPLITS))
