"""Attention of tiles of query tokens, as products of small matrices (Dao, 2023, "FlashAttention-2", arXiv:2307.08691).

The keys and the values of a segment are packed as weights are, for all query heads of a group and all tokens of a tile:
keys as [words of a head][64 keys], values as [panels of 64 of a head][words of keys][64]. Six rows at a time, a row
being a token and a query head, then go through scores, softmax and weighted values while these are in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from aioengine.kernels.native.kernels.attention import LOWEST, SEGMENT, find_keys, shape_scores
from aioengine.kernels.native.kernels.attention_sizes import MAX_HEAD_DIM, MAX_ROWS
from aioengine.kernels.native.kernels.compiler import inlined, kernel
from aioengine.kernels.native.kernels.functions import exp
from aioengine.kernels.native.kernels.linear import KINDS, PANEL, TILE_ROWS, make_panel
from aioengine.kernels.native.kernels.simd import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    I16,
    I32,
    LANES,
    Memory,
    constant,
    fma,
    get_f32,
    get_i32,
    get_i64,
    i32x16,
    instruction,
    load,
    load_lanes,
    load_some_int8,
    number,
    put_f32,
    put_i64,
    splat,
    stack,
    store,
    sum_of,
    zeros,
)

MAX_NUMBERS = MAX_ROWS * 256
"""The most rows times head_dim in a tile that are computed at once."""

# The arguments, by their offsets. K_CACHE, V_CACHE: lines of `LINE_BYTES` a position and KV head. SOFT_CAP: 0: none.
Q, K_CACHE, V_CACHE, BLOCK_TABLES, TABLE_WIDTH, TILES, OUT = range(0, 56, 8)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP, IS_INT8, LINE_BYTES = range(56, 128, 8)

# A chunk's memory, by offsets. Of the rows that are computed at once: queries, and states, each the sums [padded
# head_dim], 16 parts of the weights' sum, and the highest score. Of a segment: packed keys and values; where its keys
# are, and where `LINES` are (int64 [SEGMENT]); the scales of keys and values, if they are int8 (float32 [2, SEGMENT]);
# `LINES` then: these keys or values in the queries' dtype. Of six rows: products, weights, and factors of sums, a line
# each. Last, 16 × 16 words to be transposed.
QUERIES = 0
STATES = QUERIES + 4 * MAX_NUMBERS
KEYS = STATES + 4 * MAX_NUMBERS + 128 * MAX_ROWS
VALUES = KEYS + 4 * SEGMENT * MAX_HEAD_DIM
OFFSETS = VALUES + 4 * SEGMENT * MAX_HEAD_DIM
PLACES = OFFSETS + 8 * SEGMENT
SCALES = PLACES + 8 * SEGMENT
LINES = SCALES + 2 * 4 * SEGMENT
SUMS = LINES + 4 * SEGMENT * MAX_HEAD_DIM
WEIGHTS = SUMS + 4 * PANEL * TILE_ROWS
FACTORS = WEIGHTS + 4 * PANEL * TILE_ROWS
SQUARE = FACTORS + 64 * TILE_ROWS
ROOM_BYTES = SQUARE + 64 * LANES

read_f32, write_f32 = FLOAT32.load, FLOAT32.store
ONE = np.float32(1)


@instruction(types.none, types.int64, types.int64)
def transpose(b: Any, x: Any, to: Any) -> None:
    """Transpose 16 × 16 words: from 16 vectors at ``x`` to lines of `SEGMENT` words at ``to``.

    Blocks of 8 × 8 change places across the diagonal, then those of 4 × 4 within them, and so on.
    """
    rows = [load(b, b.add(x, number(64 * n)), i32x16.llvm, 64) for n in range(LANES)]
    for size in (8, 4, 2, 1):
        upper = [n if not n & size else LANES + n - size for n in range(LANES)]
        lower = [n + size if not n & size else LANES + n for n in range(LANES)]
        upper, lower = (ir.Constant(ir.VectorType(I32, LANES), lanes) for lanes in (upper, lower))
        for n in range(LANES):
            if not n & size:
                x, y = rows[n], rows[n + size]
                rows[n], rows[n + size] = b.shuffle_vector(x, y, upper), b.shuffle_vector(x, y, lower)
    for n, row in enumerate(rows):
        store(b, b.add(to, number(4 * SEGMENT * n)), row, 64)


@instruction(types.none, *[types.int64] * 4)
def store_pairs(b: Any, x: Any, y: Any, count: Any, to: Any) -> None:
    """Interleave numbers of 16 bits as words, those at ``x`` in the lower halves; 0 in lanes from ``count`` on."""
    low, high = (b.zext(load_lanes(b, at, I16, count), i32x16.llvm) for at in (x, y))
    store(b, to, b.or_(low, b.shl(high, constant(i32x16, 16))), 64)


@inlined
def padded_head(args):
    return (get_i64(args + HEAD_DIM) + PANEL - 1) // PANEL * PANEL


def make_pack(memory: Memory, work: Memory) -> Any:
    """A function of (args, k, v, room) that packs a segment's keys as [words of a head][SEGMENT keys], and its values
    as [panels of a head][words of keys][PANEL].
    """
    size, work_size = memory.size, work.size
    per_word = 4 // work_size
    load_some, store_whole, store_work = memory.load_some, memory.store, work.store

    @inlined
    def pack_keys(k, offsets, head_dim, room):
        for first_key in range(0, SEGMENT, LANES):
            for n in range(0, head_dim, LANES * per_word):
                for key in range(LANES):
                    at = k + get_i64(offsets + 8 * (first_key + key)) + n * size
                    for part in range(per_word):
                        values = load_some(at + part * LANES * size, head_dim - n - part * LANES)
                        store_work(room + SQUARE + 64 * key + part * LANES * work_size, values)
                transpose(room + SQUARE, room + KEYS + (n // per_word * SEGMENT + first_key) * 4)

    @inlined
    def pack_values(v, offsets, head_dim, room):
        for n in range(0, head_dim, LANES):
            to = room + VALUES + (n // PANEL * SEGMENT // per_word * PANEL + n % PANEL) * 4
            for key in range(0, SEGMENT, per_word):
                at = v + get_i64(offsets + 8 * key) + n * size
                if per_word == 2:
                    after = v + get_i64(offsets + 8 * key + 8) + n * size
                    store_pairs(at, after, head_dim - n, to + key // 2 * PANEL * 4)
                else:
                    write_f32(to + key * PANEL * 4, load_some(at, head_dim - n))

    @inlined
    def read_int8(x, head_dim, scales, room):
        """Of lines of an int8 cache the values, exact, and the scales apart."""
        stride = (head_dim + LANES - 1) // LANES * LANES * size
        for nth in range(SEGMENT):
            line, to = x + get_i64(room + OFFSETS + 8 * nth), room + LINES + nth * stride
            put_i64(room + PLACES + 8 * nth, nth * stride)
            for n in range(0, head_dim, LANES):
                store_whole(to + n * size, load_some_int8(line + n, head_dim - n))
            put_f32(scales + 4 * nth, get_f32(line + head_dim))

    @inlined
    def pack(args, k, v, room):
        head_dim = get_i64(args + HEAD_DIM)
        if get_i64(args + IS_INT8):
            read_int8(k, head_dim, room + SCALES, room)
            pack_keys(room + LINES, room + PLACES, head_dim, room)
            read_int8(v, head_dim, room + SCALES + 4 * SEGMENT, room)
            pack_values(room + LINES, room + PLACES, head_dim, room)
        else:
            pack_keys(k, room + OFFSETS, head_dim, room)
            pack_values(v, room + OFFSETS, head_dim, room)

    return pack


def make_attend_strip(work: Memory, panel_of: Any) -> Any:
    """A function of (args, room, strip, rows, begin_row, seen) that adds a segment's values to the states of six rows.

    Args:
        strip: the first row. begin_row: the first one in the room.
        seen: how many of the segment's positions the tile's first token sees; less than 0 or more than there are, too.
    """
    work_size = work.size
    per_word, store_work = 4 // work_size, work.store

    @inlined
    def weigh(args, scores, state, weights, factors, scales, end):
        """A row's weights of a segment's keys up to ``end``, and the factor of what was summed before."""
        before = get_f32(state + 64)
        begin, end = max(0, end - get_i64(args + WINDOW)), min(SEGMENT, end)
        highest = shape_scores(scores, scales, get_f32(args + SCALE), get_f32(args + SOFT_CAP), begin, end)
        factor = splat(ONE)
        if highest > before:
            factor = exp(splat(before - highest))
        else:
            highest = before
        total = read_f32(state) * factor
        for n in range(0, SEGMENT, LANES):
            weight = exp(read_f32(scores + 4 * n) - splat(highest))
            total = total + weight
            if scales:
                weight = weight * read_f32(scales + 4 * (SEGMENT + n))
            store_work(weights + n * work_size, weight)
        write_f32(state, total)
        put_f32(state + 64, highest)
        write_f32(factors, factor)

    @inlined
    def attend_strip(args, room, strip, rows, begin_row, seen):
        padded_dim, group = padded_head(args), get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS)
        num_words = (get_i64(args + HEAD_DIM) + per_word - 1) // per_word
        query_bytes, state_bytes = padded_dim * work_size, 4 * padded_dim + 128
        sums, weights, scales = room + SUMS, room + WEIGHTS, room + SCALES if get_i64(args + IS_INT8) else 0
        queries = room + QUERIES + (strip - begin_row) * query_bytes
        states = room + STATES + (strip - begin_row) * state_bytes
        panel_of(queries, query_bytes, room + KEYS, num_words, sums, rows, 0, 0)
        for nth in range(rows):
            weigh(
                args, sums + 4 * PANEL * nth, states + nth * state_bytes + 4 * padded_dim,
                weights + nth * SEGMENT * work_size, room + FACTORS + 64 * nth, scales, seen + (strip + nth) // group,
            )  # fmt: skip
        for n in range(0, padded_dim, PANEL):
            of_panel = room + VALUES + n * (SEGMENT // per_word) * 4
            panel_of(weights, SEGMENT * work_size, of_panel, SEGMENT // per_word, sums, rows, 0, 0)
            for nth in range(rows):
                factor, at = read_f32(room + FACTORS + 64 * nth), states + nth * state_bytes + 4 * n
                for lane in range(0, 4 * PANEL, 64):
                    added = read_f32(sums + 4 * PANEL * nth + lane)
                    write_f32(at + lane, fma(read_f32(at + lane), factor, added))

    return attend_strip


def make_attend_prefill(memory: Memory, work: Memory, panel_of: Any) -> Any:
    """A chunk is a tile and a KV head.

    Args:
        memory: of queries, keys, values and the result.
        work: of queries, keys, values and weights in products.
        panel_of: as `make_panel` makes it, for ``work``.
    """
    size, work_size = memory.size, work.size
    load_some, store_some, store_work = memory.load_some, memory.store_some, work.store
    pack, attend_strip, room_of_chunk = make_pack(memory, work), make_attend_strip(work, panel_of), stack(ROOM_BYTES)

    @inlined
    def place_of(args, row):
        """Of a row's head in queries and results, from the tile's first on."""
        num_heads = get_i64(args + NUM_HEADS)
        group = num_heads // get_i64(args + NUM_KV_HEADS)
        return (row // group * num_heads + row % group) * get_i64(args + HEAD_DIM) * size

    @inlined
    def begin_rows(args, q, begin_row, end_row, room):
        head_dim, padded_dim = get_i64(args + HEAD_DIM), padded_head(args)
        to, state = room + QUERIES, room + STATES
        for row in range(begin_row, end_row):
            at = q + place_of(args, row)
            for n in range(0, padded_dim, LANES):
                store_work(to + n * work_size, load_some(at + n * size, head_dim - n))
                write_f32(state + 4 * n, zeros())
            write_f32(state + 4 * padded_dim, zeros())
            put_f32(state + 4 * padded_dim + 64, LOWEST)
            to += padded_dim * work_size
            state += 4 * padded_dim + 128

    @inlined
    def end_rows(args, out, begin_row, end_row, room):
        head_dim, padded_dim, state = get_i64(args + HEAD_DIM), padded_head(args), room + STATES
        for row in range(begin_row, end_row):
            to = out + place_of(args, row)
            total = splat(sum_of(read_f32(state + 4 * padded_dim)))
            for n in range(0, head_dim, LANES):
                store_some(to + n * size, read_f32(state + 4 * n) / total, head_dim - n)
            state += 4 * padded_dim + 128

    def attend_prefill(args, chunk, thread):
        num_heads, num_kv_heads = get_i64(args + NUM_HEADS), get_i64(args + NUM_KV_HEADS)
        kv_head, tile = chunk % num_kv_heads, get_i64(args + TILES) + 16 * (chunk // num_kv_heads)
        row, first_token, position = get_i32(tile), get_i32(tile + 4), get_i32(tile + 12)
        if row < 0:
            return
        room, window, group = room_of_chunk(), get_i64(args + WINDOW), num_heads // num_kv_heads
        num_rows = get_i32(tile + 8) * group
        first_head = (first_token * num_heads + kv_head * group) * get_i64(args + HEAD_DIM) * size
        line_bytes, table = (
            get_i64(args + LINE_BYTES),
            get_i64(args + BLOCK_TABLES) + 4 * row * get_i64(args + TABLE_WIDTH),
        )
        k, v = get_i64(args + K_CACHE) + kv_head * line_bytes, get_i64(args + V_CACHE) + kv_head * line_bytes
        rows_at_once = min(MAX_ROWS, MAX_NUMBERS // padded_head(args) // TILE_ROWS * TILE_ROWS)
        for begin_row in range(0, num_rows, rows_at_once):
            end_row = min(begin_row + rows_at_once, num_rows)
            begin_rows(args, get_i64(args + Q) + first_head, begin_row, end_row, room)
            first_seen = max(0, position + begin_row // group + 1 - window)
            end_seen = position + (end_row - 1) // group + 1
            for segment in range(first_seen // SEGMENT, (end_seen + SEGMENT - 1) // SEGMENT):
                start = segment * SEGMENT
                begin, end = max(0, first_seen - start), min(SEGMENT, end_seen - start)
                find_keys(
                    room + OFFSETS, table, get_i64(args + BLOCK_SIZE), num_kv_heads * line_bytes, segment, begin, end
                )
                pack(args, k, v, room)
                seen = position + 1 - start
                for strip in range(begin_row, end_row, TILE_ROWS):
                    rows = min(TILE_ROWS, end_row - strip)
                    if seen + (strip + rows - 1) // group > 0 and seen + strip // group - window < SEGMENT:
                        attend_strip(args, room, strip, rows, begin_row, seen)
            end_rows(args, get_i64(args + OUT) + first_head, begin_row, end_row, room)

    return attend_prefill


_panel_of_float32 = make_panel(KINDS["float32"])
kernel(name="attend_prefill_float32")(make_attend_prefill(FLOAT32, FLOAT32, _panel_of_float32))
kernel(name="attend_prefill_float16")(make_attend_prefill(FLOAT16, FLOAT32, _panel_of_float32))
if HAS_DOT_BF16:
    kernel(name="attend_prefill_bfloat16")(make_attend_prefill(BFLOAT16, BFLOAT16, make_panel(KINDS["bfloat16"])))
else:
    kernel(name="attend_prefill_bfloat16")(make_attend_prefill(BFLOAT16, FLOAT32, _panel_of_float32))
