"""Causal attention of tiles of consecutive query tokens over the paged KV cache (Kwon et al., 2023, arXiv:2309.06180;
Dao, 2023, "FlashAttention-2", arXiv:2307.08691).

out = softmax(q · kᵀ · scale) · v over the keys that each query sees, as in `paged_decode`.

The query tokens of a tile, times the heads that share a KV head, are the rows of the matrix products: what is read of
the keys serves them all. A program goes over the keys from the first that any of its queries sees to the last. Most are
seen by all of them, and need no mask: only the tiles at the window's start and at the diagonal do. Programs with most
keys start first, so that the short ones fill the GPU at the end.

Bound: 4 · h · d operations for each pair of a query and a key that it sees, at the rate of the matrix units; kernels of
this form are known to reach about half of that on an H100, since exp2 and the products take turns.

Stays if, for 2,048 tokens behind 2,048 cached ones in bfloat16, it beats gathering the blocks and torch's
`scaled_dot_product_attention` by 1.2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.attention_launches import PREFILL_ROWS, choose_prefill_launch
from aioengine.kernels.launch_checks import check_tensor
from aioengine.kernels.operations import Operations, PagedKV
from aioengine.kernels.triton import replaces
from aioengine.kernels.triton.attend_decode import (
    LOG2_E,
    NO_WINDOW,
    base_2_scores,
    check_paged,
    key_offsets,
    load_blocks,
)


@triton.jit
def _attend_keys(
    total,
    highest,
    mass,
    q,
    query_positions,
    k_ptr,
    v_ptr,
    table,
    first_tile,
    num_before,
    num_skipped,
    num_tiles,
    first_seen,
    end,
    window,
    score_scale,
    soft_cap,
    head_dims,
    is_dim,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):
    """Add tiles of keys to what the queries have: from ``first_tile`` on, passing over some after ``num_before``.

    Not masked: all queries see all keys of the tiles.
    """
    keys = tl.arange(0, N)
    tile = first_tile + tl.where(num_before > 0, 0, num_skipped)
    positions = tile * N + keys
    blocks = load_blocks(table, positions, (positions >= first_seen) & (positions < end), BLOCK_SIZE)
    for i in range(0, num_tiles):
        tile = first_tile + i + tl.where(i >= num_before, num_skipped, 0)
        positions = tile * N + keys
        offsets = key_offsets(blocks, positions, STRIDE, BLOCK_SIZE)[:, None] + head_dims[None, :]
        # A tile ahead, so that addresses never wait for the table, and the loop's loads can all be asynchronous.
        next_tile = first_tile + i + 1 + tl.where(i + 1 >= num_before, num_skipped, 0)
        next_positions = next_tile * N + keys
        blocks = load_blocks(table, next_positions, next_positions < end, BLOCK_SIZE)
        is_loaded = is_dim[None, :]
        if IS_MASKED:
            is_loaded &= ((positions >= first_seen) & (positions < end))[:, None]
        # What is not seen may hold anything, and 0 · NaN would be NaN.
        k = tl.load(k_ptr + offsets, is_loaded, 0.0)
        v = tl.load(v_ptr + offsets, is_loaded, 0.0)
        scores = base_2_scores(q, k, score_scale, soft_cap)
        if IS_MASKED:
            is_seen = positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                is_seen &= positions[None, :] > query_positions[:, None] - window
            # Not -inf: a query may see nothing of a tile before its window, and -inf less -inf is NaN. What such a tile
            # adds is multiplied by 0 at the first key that the query does see.
            scores = tl.where(is_seen, scores, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        highest = new_highest
        mass = mass * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(q.dtype), v.to(q.dtype), total * shrink[:, None], input_precision="ieee")
    return total, highest, mass


@triton.jit(
    do_not_specialize=["window", "table_width"],
    do_not_specialize_on_alignment=["table_ptr", "tiles_ptr", "sinks_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    tiles_ptr,
    out_ptr,
    sinks_ptr,
    score_scale,
    soft_cap,
    window,
    table_width,
    HAS_WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    part = program // KV_HEADS % PARTS
    # From the last: later tiles of a prompt see more keys.
    entry = (tl.num_programs(0) - 1 - program) // (KV_HEADS * PARTS)
    row = tl.load(tiles_ptr + 4 * entry)
    first_token = tl.load(tiles_ptr + 4 * entry + 1).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + 4 * entry + 2)
    first_position = tl.load(tiles_ptr + 4 * entry + 3)
    if (row < 0) | (part * M >= num_tokens * GROUP):
        return

    queries = part * M + tl.arange(0, M)
    tokens = queries // GROUP
    dims = tl.arange(0, D)
    is_dim = dims < HEAD_DIM
    is_query = (tokens < num_tokens)[:, None] & is_dim[None, :]
    heads = kv_head * GROUP + queries % GROUP
    query_offsets = ((first_token + tokens) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + query_offsets, is_query, 0.0)

    lowest_position = first_position + part * M // GROUP
    highest_position = first_position + tl.minimum((part * M + M - 1) // GROUP, num_tokens - 1)
    query_positions = first_position + tokens
    table = table_ptr + row.to(tl.int64) * table_width
    head_dims = kv_head * HEAD_DIM + dims
    total = tl.zeros([M, D], tl.float32)
    highest = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    if sinks_ptr is not None:
        highest = tl.load(sinks_ptr + heads) * LOG2_E
        mass += 1.0

    # Tiles of keys that some query sees: first_tile to end_tile; that all do: full_tile to full_end_tile.
    end = highest_position + 1
    end_tile = tl.cdiv(end, N)
    first_seen = 0
    full_tile = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(lowest_position - window + 1, 0)
        full_tile = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), N), end_tile)
    first_tile = first_seen // N
    full_end_tile = tl.maximum((lowest_position + 1) // N, full_tile)
    num_full = full_end_tile - full_tile
    num_before = full_tile - first_tile
    total, highest, mass = _attend_keys(
        total, highest, mass, q, query_positions, k_ptr, v_ptr, table,
        full_tile, 0, 0, num_full,
        first_seen, end, window, score_scale, soft_cap, head_dims, is_dim,
        False, HAS_WINDOW, KV_HEADS * HEAD_DIM, BLOCK_SIZE, N,
    )  # fmt: skip
    total, highest, mass = _attend_keys(
        total, highest, mass, q, query_positions, k_ptr, v_ptr, table,
        first_tile, num_before, num_full, num_before + end_tile - full_end_tile,
        first_seen, end, window, score_scale, soft_cap, head_dims, is_dim,
        True, HAS_WINDOW, KV_HEADS * HEAD_DIM, BLOCK_SIZE, N,
    )  # fmt: skip
    result = total * (1.0 / mass)[:, None]
    tl.store(out_ptr + query_offsets, result.to(out_ptr.dtype.element_ty), is_query)


@replaces(Operations.attend_prefill)
def attend_prefill(q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
    check_paged("attend_prefill", q, kv, out)
    k_cache, v_cache, block_tables, scale, window, soft_cap, sinks = kv
    check_tensor("attend_prefill: tiles", tiles, (None, 4), torch.int32, q.device)
    if not len(tiles):
        return
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    group = num_heads // num_kv_heads
    launch = choose_prefill_launch(head_dim, q.element_size(), k_cache.element_size())
    num_parts = triton.cdiv(prefill_tile(num_heads, num_kv_heads, head_dim) * group, launch.num_rows)
    _prefill_kernel[(len(tiles) * num_kv_heads * num_parts,)](
        q, k_cache, v_cache, block_tables, tiles, out, sinks,
        scale * LOG2_E.value, soft_cap, NO_WINDOW if window is None else min(window, NO_WINDOW), block_tables.shape[1],
        HAS_WINDOW=window is not None, KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        PARTS=num_parts, D=triton.next_power_of_2(head_dim), M=launch.num_rows, N=launch.num_keys,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


@replaces(Operations.prefill_tile)
def prefill_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    return max(PREFILL_ROWS * num_kv_heads // num_heads, 1)
