"""Attention of single query tokens over the paged KV cache, long contexts in splits (Kwon et al., 2023,
arXiv:2309.06180; Dao et al., 2023, "Flash-Decoding").

out = softmax(q · kᵀ · scale) · v over the keys that the query sees, in float32 and base 2, one pass over the keys
(Milakov and Gimelshein, 2018, arXiv:1805.02867). Soft caps and sinks, as `PagedKV` has them, are variants of
the kernels. A sink is a key whose value is 0: its score is the highest before the first key is seen, with a sum of 1.

A program has one row, one KV head and one split of the row's context. The query heads that share the KV head are the
rows of its matrix products, padded to 16, so that each key and value is read once for all of them. A split's span
follows from the row's own context, in the kernel: a CUDA graph with a fixed number of splits serves any context. With
one split the result is written at once; else a second kernel weighs the splits by their share of the softmax's sum.

Bound: the bytes of the keys and values seen, at the memory's speed; tens of KiB are on the way in each program. With
few and short contexts the time of two launches (5 to 8 µs).

Stays if, at 64 rows of 2,048 tokens in bfloat16, it beats gathering the blocks and torch's
`scaled_dot_product_attention` by 2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.attention_launches import choose_decode_launch
from aioengine.kernels.launch_checks import check_attention, check_tensor
from aioengine.kernels.operations import Operations, PagedKV
from aioengine.kernels.triton import replaces

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 1 << 30
"""Longer than any context, and far enough from 2^31 that a position less this does not wrap around."""
_COMBINED_AT_ONCE = 32
_FLOAT8_CAPABILITY = (8, 9)
HEAD_DIMS = range(16, 257, 8)


@triton.jit
def load_blocks(table, positions, is_seen, BLOCK_SIZE: tl.constexpr):
    """The blocks of positions. Entries behind a row's last block, and before its window, mean nothing: not read."""
    return tl.load(table + positions // BLOCK_SIZE, is_seen, 0)


@triton.jit
def key_offsets(blocks, positions, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the keys of positions begin in the cache, with ``STRIDE`` elements from one token's to the next."""
    # 64 bits: a cache has more than 2^31 elements.
    return (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * STRIDE


@triton.jit
def base_2_scores(q, k, score_scale, soft_cap):
    """Scores · log2(e), which is in the scale; no soft cap: None."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (e²ˣ + 1)
        scores = soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap)) + 1.0))
    return scores


@triton.jit(
    do_not_specialize=["window", "table_width"],
    do_not_specialize_on_alignment=["table_ptr", "decodes_ptr", "sinks_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    decodes_ptr,
    out_ptr,
    parts_ptr,
    part_masses_ptr,
    sinks_ptr,
    score_scale,
    soft_cap,
    window,
    table_width,
    IS_SPLIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    kv_head, entry, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    row = tl.load(decodes_ptr + 3 * entry)
    token = tl.load(decodes_ptr + 3 * entry + 1).to(tl.int64)
    context = tl.load(decodes_ptr + 3 * entry + 2)

    heads = tl.arange(0, M)
    dims = tl.arange(0, D)
    is_dim = dims < HEAD_DIM
    is_query = (heads < GROUP)[:, None] & is_dim[None, :]
    first_query = (token * KV_HEADS + kv_head) * GROUP * HEAD_DIM
    query_offsets = first_query + heads[:, None] * HEAD_DIM + dims[None, :]
    if row < 0:
        if not IS_SPLIT:
            tl.store(out_ptr + query_offsets, tl.zeros([M, D], out_ptr.dtype.element_ty), is_query)
        return
    first_seen = tl.maximum(context - window, 0)
    first_tile = first_seen // N
    tiles_per_split = tl.cdiv(tl.cdiv(context, N) - first_tile, num_splits)
    tile = first_tile + split * tiles_per_split
    end_tile = tl.minimum(tile + tiles_per_split, tl.cdiv(context, N))
    if tile >= end_tile:
        return

    q = tl.load(q_ptr + query_offsets, is_query, 0.0)
    table = table_ptr + row.to(tl.int64) * table_width
    head_dims = kv_head * HEAD_DIM + dims
    keys = tl.arange(0, N)
    highest = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    if sinks_ptr is not None and not IS_SPLIT:
        highest = tl.load(sinks_ptr + kv_head * GROUP + heads, heads < GROUP, 0.0) * LOG2_E
        mass += 1.0
    total = tl.zeros([M, D], tl.float32)
    end = tl.minimum(end_tile * N, context)
    positions = tile * N + keys
    blocks = load_blocks(table, positions, (positions >= first_seen) & (positions < end), BLOCK_SIZE)
    for start in range(tile * N, end, N):
        positions = start + keys
        is_seen = (positions >= first_seen) & (positions < end)
        offsets = key_offsets(blocks, positions, KV_HEADS * HEAD_DIM, BLOCK_SIZE)[:, None] + head_dims[None, :]
        # A tile ahead, so that addresses never wait for the table, and the loop's loads can all be asynchronous.
        blocks = load_blocks(table, positions + N, positions + N < end, BLOCK_SIZE)
        is_loaded = is_seen[:, None] & is_dim[None, :]
        # What is not seen may hold anything, and 0 · NaN would be NaN.
        k = tl.load(k_ptr + offsets, is_loaded, 0.0)
        v = tl.load(v_ptr + offsets, is_loaded, 0.0)
        scores = base_2_scores(q, k, score_scale, soft_cap)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Each tile of a split has a key that is seen: the highest score is finite.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        highest = new_highest
        mass = mass * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(q.dtype), v.to(q.dtype), total * shrink[:, None], input_precision="ieee")

    result = total * (1.0 / mass)[:, None]
    if IS_SPLIT:
        part = ((entry * KV_HEADS + kv_head) * GROUP + heads).to(tl.int64) * num_splits + split
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], result, is_query)
        tl.store(part_masses_ptr + part, highest + tl.log2(mass), heads < GROUP)
    else:
        tl.store(out_ptr + query_offsets, result.to(out_ptr.dtype.element_ty), is_query)


@triton.jit(do_not_specialize=["window", "num_splits"], do_not_specialize_on_alignment=["decodes_ptr", "sinks_ptr"])
def _combine_kernel(
    parts_ptr,
    part_masses_ptr,
    decodes_ptr,
    out_ptr,
    sinks_ptr,
    window,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Σ mass · part / Σ mass over a head's splits that are not empty: ``N`` is that of the `_decode_kernel`."""
    head, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(decodes_ptr + 3 * entry)
    token = tl.load(decodes_ptr + 3 * entry + 1).to(tl.int64)
    context = tl.load(decodes_ptr + 3 * entry + 2)
    dims = tl.arange(0, D)
    is_dim = dims < HEAD_DIM
    out_offsets = (token * HEADS + head) * HEAD_DIM + dims
    if row < 0:
        tl.store(out_ptr + out_offsets, tl.zeros([D], out_ptr.dtype.element_ty), is_dim)
        return
    num_tiles = tl.cdiv(context, N) - tl.maximum(context - window, 0) // N
    num_filled = tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_splits))
    first_part = (entry * HEADS + head).to(tl.int64) * num_splits
    highest = -float("inf")
    mass = 0.0
    if sinks_ptr is not None:
        highest = tl.load(sinks_ptr + head) * LOG2_E
        mass = 1.0
    total = tl.zeros([D], tl.float32)
    for start in range(0, num_filled, PARTS):
        splits = start + tl.arange(0, PARTS)
        is_filled = splits < num_filled
        part_masses = tl.load(part_masses_ptr + first_part + splits, is_filled, float("-inf"))
        offsets = (first_part + splits)[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(parts_ptr + offsets, is_filled[:, None] & is_dim[None, :], 0.0)
        new_highest = tl.maximum(highest, tl.max(part_masses, 0))
        weights = tl.exp2(part_masses - new_highest)
        shrink = tl.exp2(highest - new_highest)
        highest = new_highest
        mass = mass * shrink + tl.sum(weights, 0)
        total = total * shrink + tl.sum(parts * weights[:, None], 0)
    tl.store(out_ptr + out_offsets, (total / mass).to(out_ptr.dtype.element_ty), is_dim)


@replaces(Operations.attend_decode)
def attend_decode(q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int) -> None:
    check_paged("attend_decode", q, kv, out)
    k_cache, v_cache, block_tables, scale, window, soft_cap, sinks = kv
    check_tensor("attend_decode: decodes", decodes, (None, 3), torch.int32, q.device)
    if num_splits < 1:
        raise InternalError(f"attend_decode: num_splits is {num_splits}; 1 or more is needed")
    num_entries, (_, num_heads, head_dim), num_kv_heads = len(decodes), q.shape, k_cache.shape[2]
    if not num_entries:
        return
    group = num_heads // num_kv_heads
    launch = choose_decode_launch(head_dim, group, q.element_size(), k_cache.element_size())
    # A part has a tile at least, and a graph's grid is as large as that of its longest context.
    num_splits = max(min(num_splits, triton.cdiv(max_context, launch.num_keys)), 1)
    is_split = num_splits > 1
    parts = part_masses = None
    if is_split:
        num_parts = num_entries * num_heads * num_splits
        parts = torch.empty(num_parts * head_dim, dtype=torch.float32, device=q.device)
        part_masses = torch.empty(num_parts, dtype=torch.float32, device=q.device)
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    _decode_kernel[(num_kv_heads, num_entries, num_splits)](
        q, k_cache, v_cache, block_tables, decodes, out, parts, part_masses, sinks,
        scale * LOG2_E.value, soft_cap, window, block_tables.shape[1],
        IS_SPLIT=is_split, KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
        M=max(triton.next_power_of_2(group), 16), D=triton.next_power_of_2(head_dim), N=launch.num_keys,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if is_split:
        _combine_kernel[(num_heads, num_entries)](
            parts, part_masses, decodes, out, sinks,
            window, num_splits,
            HEADS=num_heads, HEAD_DIM=head_dim, D=triton.next_power_of_2(head_dim), PARTS=_COMBINED_AT_ONCE,
            N=launch.num_keys, enable_fp_fusion=True,
        )  # fmt: skip


def check_paged(name: str, q: Tensor, kv: PagedKV, out: Tensor) -> None:
    """Refuse what the kernels of paged attention would misread.

    Raises:
        InternalError: says what is wrong.
    """
    head_dim = q.shape[-1]
    if head_dim not in HEAD_DIMS:
        raise InternalError(f"{name}: heads of {head_dim}; {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of 8 can be done")
    check_attention(name, q, kv, out, torch.float8_e4m3fn)
    if kv.k_cache.dtype == torch.float8_e4m3fn and (capability := _capability(q.device)) < _FLOAT8_CAPABILITY:
        raise InternalError(
            f"{name}: the caches are float8_e4m3fn, which a GPU of {capability} cannot read; 8.9 and up can"
        )


def _capability(device: torch.device) -> tuple[int, int]:
    """The capability of a GPU; the interpreter can do everything."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (99, 0)
