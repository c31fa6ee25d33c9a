"""Norm, rotation and cache write, between the product that gives queries, keys and values and attention, in one pass.

For each head's query and key: x / √(mean(x²) + ε) · (w + offset), where the model has such a norm, of each head or of
all heads as one; then, where the layer rotates, with the halves a and b of that, (a · cos - b · sin, b · cos + a · sin)
(Su et al., 2021, arXiv:2104.09864). Keys and values go to the cache. All in float32, rounded once, at the end.

A program does several heads of a token, as two tiles of half heads, so that what is rotated into each other lies in
one thread. Bound: (h + 2 g) · d values read and written for each token, at the memory's speed; with few tokens the time
of a launch (2 to 3 µs).

Stays if, at 64 and at 2,048 tokens of Llama-3.1-8B's heads, it beats plain torch, some ten launches, by 2; not
measured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import check_rotation
from aioengine.kernels.operations import Operations
from aioengine.kernels.triton import replaces

MAX_FLOAT8 = tl.constexpr(448.0)
"""The largest number of e4m3fn."""

MAX_HEAD_DIM = 1 << 11
NUM_WARPS = 4
TILE = 1024
"""Values in a tile of half heads: of 16-bit ones a load of 128 bits for each thread of 4 warps."""


@triton.jit
def _normalised(low, high, mean, weights_ptr, columns, is_inside, eps, offset, HEAD_DIM: tl.constexpr):
    weights_low = tl.load(weights_ptr + columns, is_inside, 0.0).to(tl.float32) + offset
    weights_high = tl.load(weights_ptr + HEAD_DIM // 2 + columns, is_inside, 0.0).to(tl.float32) + offset
    scale = tl.rsqrt(mean + eps)
    return low * scale * weights_low, high * scale * weights_high


@triton.jit
def _mean_square(x_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, columns < WIDTH, 0.0).to(tl.float32)
    return tl.sum(x * x, 0) / WIDTH


@triton.jit
def _to_cache(x, TYPE: tl.constexpr):
    if tl.float8e4nv == TYPE:
        # Beyond its range float8 has nothing but NaN. What is NaN stays so: it passes neither comparison.
        x = tl.where(x > MAX_FLOAT8, MAX_FLOAT8, tl.where(x < -MAX_FLOAT8, -MAX_FLOAT8, x))
    return x.to(TYPE)


# Positions and slots may begin anywhere in a larger tensor: their alignment must not make it compile again.
@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _rotate_and_write_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    rope_ptr,
    weights_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    offset,
    IS_WIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    CACHE_TYPE: tl.constexpr = k_cache_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS

    first = tl.program_id(1) * HEADS_AT_ONCE
    heads = first + tl.arange(0, HEADS_AT_ONCE)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    is_column = columns < HALF
    offsets = heads * HEAD_DIM + columns
    is_inside = (heads < NUM_ALL) & is_column
    heads_ptr = qkv_ptr + token * (NUM_ALL * HEAD_DIM) + offsets
    low = tl.load(heads_ptr, is_inside, 0.0).to(tl.float32)
    high = tl.load(heads_ptr + HALF, is_inside, 0.0).to(tl.float32)

    if first < NUM_ROTATED:
        x_low, x_high = low, high
        if weights_ptr is not None:
            if IS_WIDE:
                # Each program reads all of the token's queries and keys, which are in the cache: none waits for others.
                row_ptr = qkv_ptr + token * (NUM_ALL * HEAD_DIM)
                of_queries = _mean_square(row_ptr, NUM_HEADS * HEAD_DIM, WIDE_BLOCK)
                of_keys = _mean_square(row_ptr + NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, WIDE_BLOCK)
                mean = tl.where(heads < NUM_HEADS, of_queries, of_keys)
            else:
                mean = tl.sum(low * low + high * high, 1, keep_dims=True) / HEAD_DIM
            is_weight = (heads < NUM_ROTATED) & is_column
            weights_of_heads_ptr = weights_ptr + heads * HEAD_DIM
            x_low, x_high = _normalised(
                low, high, mean, weights_of_heads_ptr, columns, is_weight, eps, offset, HEAD_DIM
            )
        rotated_low, rotated_high = x_low, x_high
        if rope_ptr is not None:
            # The halves of the table say the same twice: cos and cos, -sin and sin.
            position = tl.load(positions_ptr + token).to(tl.int64)
            rope_row_ptr = rope_ptr + position * (2 * HEAD_DIM) + columns
            cos = tl.load(rope_row_ptr, is_column, 0.0).to(tl.float32)
            sin = tl.load(rope_row_ptr + HEAD_DIM + HALF, is_column, 0.0).to(tl.float32)
            rotated_low = x_low * cos - x_high * sin
            rotated_high = x_high * cos + x_low * sin

        if first < NUM_HEADS:
            is_query = (heads < NUM_HEADS) & is_column
            queries_ptr = q_ptr + token * (NUM_HEADS * HEAD_DIM) + offsets
            tl.store(queries_ptr, rotated_low.to(q_ptr.dtype.element_ty), is_query)
            tl.store(queries_ptr + HALF, rotated_high.to(q_ptr.dtype.element_ty), is_query)
        if (first + HEADS_AT_ONCE > NUM_HEADS) & (slot >= 0):
            is_key = (heads >= NUM_HEADS) & (heads < NUM_ROTATED) & is_column
            keys_ptr = k_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) + (offsets - NUM_HEADS * HEAD_DIM)
            tl.store(keys_ptr, _to_cache(rotated_low, CACHE_TYPE), is_key)
            tl.store(keys_ptr + HALF, _to_cache(rotated_high, CACHE_TYPE), is_key)
    if (first + HEADS_AT_ONCE > NUM_ROTATED) & (slot >= 0):
        is_value = (heads >= NUM_ROTATED) & is_inside
        values_ptr = v_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) + (offsets - NUM_ROTATED * HEAD_DIM)
        tl.store(values_ptr, _to_cache(low, CACHE_TYPE), is_value)
        tl.store(values_ptr + HALF, _to_cache(high, CACHE_TYPE), is_value)


@replaces(Operations.rotate_and_write)
def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope_table: Tensor | None,
    qk_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    qk_offset: float = 0.0,
    *,
    is_qk_norm_wide: bool = False,
) -> Tensor:
    arguments = qkv, positions, slots, rope_table, qk_weight, k_cache, v_cache
    num_heads, num_kv_heads, head_dim = check_rotation(*arguments, torch.float8_e4m3fn)
    if head_dim > MAX_HEAD_DIM:
        raise InternalError(f"rotate_and_write: heads of {head_dim} values; {MAX_HEAD_DIM} can be done at most")
    num_tokens = len(qkv)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        constants = _constants(num_heads, num_kv_heads, head_dim)
        grid = (num_tokens, -(-(num_heads + 2 * num_kv_heads) // constants["HEADS_AT_ONCE"]))
        _rotate_and_write_kernel[grid](
            qkv, positions, slots, rope_table, qk_weight, q, k_cache, v_cache, float(eps), float(qk_offset),
            IS_WIDE=is_qk_norm_wide, **constants, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return q


@cache
def _constants(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    half_block = triton.next_power_of_2(head_dim // 2)
    of_all = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEADS_AT_ONCE": min(max(TILE // half_block, 1), of_all),
        "HALF_BLOCK": half_block,
        "WIDE_BLOCK": triton.next_power_of_2(num_heads * head_dim),
    }
