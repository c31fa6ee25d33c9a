"""Mixtures of experts around their grouped products, which are those of `aioengine.kernels.native.linear_kernels`.

A token and one of its experts are a *pair*. Pairs are sorted by expert; the rows of an expert, or of a part of them,
are a *group*. What is read of the weights is therefore each chosen expert, once for some rows, and no other.
"""

from __future__ import annotations

import numpy as np

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.linear_kernels import GROUP_BYTES
from aioengine.kernels.native.row_kernels import copy_bytes
from aioengine.kernels.native.vector_functions import exp
from aioengine.kernels.native.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Memory,
    fma,
    get_f32,
    get_i32,
    get_i64,
    lane_of,
    put_f32,
    put_i32,
    splat,
    zeros,
)

ONE = np.float32(1)


@inlined
def exp_of(x):
    return lane_of(exp(splat(x)), 0)


@kernel()
def route(args, token, thread):
    """A token's experts, one after the other: the highest logit below the last chosen one's, or behind it if equal."""
    logits, width = get_i64(args), get_i64(args + 8)
    num_experts, num_chosen, is_normalised = get_i64(args + 16), get_i64(args + 24), get_i64(args + 32)
    has_shared = width - num_experts
    logits += 4 * token * width
    ids = get_i64(args + 40) + 4 * token * num_chosen
    weights = get_i64(args + 48) + 4 * token * (num_chosen + has_shared)
    for nth in range(num_chosen):
        best, highest = -1, np.float32(0)
        for expert in range(num_experts):
            logit, is_taken = get_f32(logits + 4 * expert), False
            for earlier in range(nth):
                is_taken = is_taken or get_i32(ids + 4 * earlier) == expert
            # A NaN is above all numbers, as in torch, and no expert is outside the range.
            if not is_taken and (best < 0 or logit > highest or (logit != logit and highest == highest)):
                best, highest = expert, logit
        put_i32(ids + 4 * nth, best)
    top = get_f32(logits + 4 * get_i32(ids))
    mass = np.float32(0)
    for nth in range(num_chosen if is_normalised else num_experts):
        mass += exp_of(get_f32(logits + 4 * (get_i32(ids + 4 * nth) if is_normalised else nth)) - top)
    for nth in range(num_chosen):
        put_f32(weights + 4 * nth, exp_of(get_f32(logits + 4 * get_i32(ids + 4 * nth)) - top) / mass)
    if has_shared:
        put_f32(weights + 4 * num_chosen, ONE / (ONE + exp_of(-get_f32(logits + 4 * num_experts))))


@kernel()
def group_pairs(args, chunk, thread):
    """Sort pairs by expert, in the order of tokens.

    Arguments: ids (int32 [pairs]), pairs; experts; the most rows of a group; ends (int32 [experts]), to work with;
    pairs by row, rows by pair (int32 [pairs]); groups (int32 [1 + any, 3]): their number first.
    """
    ids, num_pairs, num_experts, rows_a_group = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    ends, pair_of_row = get_i64(args + 32), get_i64(args + 40)
    row_of_pair, groups = get_i64(args + 48), get_i64(args + 56)
    for expert in range(num_experts):
        put_i32(ends + 4 * expert, 0)
    for pair in range(num_pairs):
        end = ends + 4 * get_i32(ids + 4 * pair)
        put_i32(end, get_i32(end) + 1)
    begin, num_groups = 0, 0
    for expert in range(num_experts):
        end = begin + get_i32(ends + 4 * expert)
        put_i32(ends + 4 * expert, begin)
        for first in range(begin, end, rows_a_group):
            num_groups += 1
            put_i32(groups + GROUP_BYTES * num_groups, expert)
            put_i32(groups + GROUP_BYTES * num_groups + 4, first)
            put_i32(groups + GROUP_BYTES * num_groups + 8, min(first + rows_a_group, end))
        begin = end
    put_i32(groups, num_groups)
    for pair in range(num_pairs):
        end = ends + 4 * get_i32(ids + 4 * pair)
        row = get_i32(end)
        put_i32(end, row + 1)
        put_i32(pair_of_row + 4 * row, pair)
        put_i32(row_of_pair + 4 * pair, row)


@kernel()
def gather_pairs(args, row, thread):
    """The activations of the pairs' tokens. Arguments: x, bytes of a row; experts a token; pairs by row; the result."""
    row_bytes = get_i64(args + 8)
    token = get_i32(get_i64(args + 24) + 4 * row) // get_i64(args + 16)
    copy_bytes(get_i64(args + 32) + row * row_bytes, get_i64(args) + token * row_bytes, row_bytes)


def make_combine(memory: Memory):
    """Σ weight · what the expert made, in the order of a token's choices; a chunk is a token.

    Arguments: what experts made (float32 [pairs, width]), rows by pair; experts a token; weights; what the shared
    expert made, or 0; the result; its width.
    """
    load_shared, store_some, size = memory.load_some, memory.store_some, memory.size
    load_made = FLOAT32.load_some

    def combine(args, token, thread):
        made, num_chosen, width = get_i64(args), get_i64(args + 16), get_i64(args + 48)
        rows = get_i64(args + 8) + 4 * token * num_chosen
        shared, out = get_i64(args + 32), get_i64(args + 40) + token * width * size
        weights = get_i64(args + 24) + 4 * token * (num_chosen + (1 if shared else 0))
        for n in range(0, width, 16):
            total = zeros()
            for nth in range(num_chosen):
                values = load_made(made + (get_i32(rows + 4 * nth) * width + n) * 4, width - n)
                total = fma(values, splat(get_f32(weights + 4 * nth)), total)
            if shared:
                values = load_shared(shared + (token * width + n) * size, width - n)
                total = fma(values, splat(get_f32(weights + 4 * num_chosen)), total)
            store_some(out + n * size, total, width - n)

    return combine


for _suffix, _memory in (("float32", FLOAT32), ("bfloat16", BFLOAT16), ("float16", FLOAT16)):
    kernel(name=f"combine_experts_{_suffix}")(make_combine(_memory))
