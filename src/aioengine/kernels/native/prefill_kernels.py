"""Attention of tiles of query tokens, as products of small matrices (Dao, 2023, "FlashAttention-2", arXiv:2307.08691).

The keys and the values of a segment are packed as weights are, for all query heads of a group and all tokens of a tile:
keys as [words of a head][64 keys], values as [panels of 64 of a head][words of keys][64]. A row being a token and a
query head, six rows at a time then go through scores and softmax, and after all rows have, six at a time add weighted
values to their sums: so the keys, and then the values, are in the first-level cache for all rows but the first six.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from aioengine.kernels.native.attention_parts import SEGMENT, find_keys, shape, sink_of
from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.linear_kernels import KINDS, PANEL, TILE_ROWS, Start, make_panel
from aioengine.kernels.native.sizes import MAX_HEAD_DIM, MAX_ROWS
from aioengine.kernels.native.vector_functions import exp2
from aioengine.kernels.native.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    I16,
    I32,
    LANES,
    Memory,
    bits_of,
    get_f32,
    get_i32,
    get_i64,
    i32x16,
    instruction,
    is_above,
    load,
    load_lanes,
    load_some_int8,
    max_of,
    maximum,
    number,
    prefetch,
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
# SINKS: float32 [heads], or 0.
Q, K_CACHE, V_CACHE, BLOCK_TABLES, TABLE_WIDTH, TILES, OUT = range(0, 56, 8)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP, IS_INT8, LINE_BYTES = range(56, 128, 8)
SINKS = 128

# A chunk's memory, by offsets. Of the rows that are computed at once: queries; states, of each six rows the sums
# [panels of a head][6][64], and behind them of each row 16 parts of the weights' sum and the highest score; weights of
# a segment. Of a segment: packed keys and values; where its keys are, and where `LINES` are (int64 [SEGMENT]); the
# scales of keys and values, if they are int8 (float32 [2, SEGMENT]); `LINES` then: these keys or values in the queries'
# dtype. Of six rows: products of queries and keys. Last, 16 × 16 words to be transposed.
QUERIES = 0
STATES = QUERIES + 4 * MAX_NUMBERS
WEIGHTS = STATES + 4 * MAX_NUMBERS + 128 * MAX_ROWS
KEYS = WEIGHTS + 4 * SEGMENT * MAX_ROWS
VALUES = KEYS + 4 * SEGMENT * MAX_HEAD_DIM
OFFSETS = VALUES + 4 * SEGMENT * MAX_HEAD_DIM
PLACES = OFFSETS + 8 * SEGMENT
SCALES = PLACES + 8 * SEGMENT
LINES = SCALES + 2 * 4 * SEGMENT
SUMS = LINES + 4 * SEGMENT * MAX_HEAD_DIM
SQUARE = SUMS + 4 * PANEL * TILE_ROWS
ROOM_BYTES = SQUARE + 64 * LANES

read_f32, write_f32 = FLOAT32.load, FLOAT32.store
ONE = np.float32(1)
MARGIN = np.float32(12)
"""By so much may scores be higher than the one that weights are relative to."""


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
    low, high = load_lanes(b, x, I16, count), load_lanes(b, y, I16, count)
    lanes = [lane for nth in range(LANES) for lane in (nth, LANES + nth)]
    store(b, to, b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * LANES), lanes)), 64)


@inlined
def padded_head(args):
    return (get_i64(args + HEAD_DIM) + PANEL - 1) // PANEL * PANEL


def make_take(memory: Memory, work: Memory) -> Any:
    """A function of (x, count, to) that brings 16 numbers into another dtype, others than the first ``count`` as 0."""
    if memory is work:
        return memory.copy_some
    load_some, store = memory.load_some, work.store

    @inlined
    def take_some(x, count, to):
        store(to, load_some(x, count))

    return take_some


def make_pack(memory: Memory, work: Memory) -> Any:
    """A function of (args, k, v, room) that packs a segment's keys as [words of a head][SEGMENT keys], and its values
    as [panels of a head][words of keys][PANEL].
    """
    size, work_size = memory.size, work.size
    per_word = 4 // work_size
    load_some, store_whole, take_some = memory.load_some, memory.store, make_take(memory, work)

    @inlined
    def pack_keys(k, offsets, head_dim, room):
        for first_key in range(0, SEGMENT, LANES):
            for n in range(0, head_dim, LANES * per_word):
                for key in range(LANES):
                    at = k + get_i64(offsets + 8 * (first_key + key)) + n * size
                    to = room + SQUARE + 64 * key
                    for part in range(0, LANES * per_word, LANES):
                        take_some(at + part * size, head_dim - n - part, to + part * work_size)
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
        """Read lines of an int8 cache: exact values, and scales apart."""
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


@inlined
def sums_of(room, strip, padded_dim):
    """The sums of six rows, by the first one's place in the room."""
    return room + STATES + strip * (4 * padded_dim + 128)


@inlined
def state_of(sums, nth, padded_dim):
    """The state of one of six rows: 16 parts of the weights' sum, and behind these 64 bytes the score of weight 1."""
    return sums + 4 * TILE_ROWS * padded_dim + 128 * nth


@inlined
def raise_highest(state, sums, padded_dim, highest):
    """Bring what a row has summed to a higher score."""
    factor = exp2(splat(get_f32(state + 64) - highest))
    put_f32(state + 64, highest)
    write_f32(state, read_f32(state) * factor)
    for n in range(0, TILE_ROWS * padded_dim, TILE_ROWS * PANEL):
        for lane in range(n, n + PANEL, LANES):
            write_f32(sums + 4 * lane, read_f32(sums + 4 * lane) * factor)


def make_attend_strip(work: Memory) -> tuple[Any, Any]:
    """Two functions for six rows: one makes weights of their products with a segment's keys, and one adds the segment's
    weighted values to their sums.

    Args:
        work: of queries, keys, values and weights in products.
        first_head: the first query head of the KV head.
        strip: the first of the rows. begin_row: the first one in the room.
        seen: how many of the segment's positions the tile's first token sees; less than 0 or more than there are, too.
    """
    kind = KINDS["bfloat16" if work is BFLOAT16 else "float32"]
    score_panel, add_panel = make_panel(kind), make_panel(kind, Start.SUMS)
    work_size = work.size
    per_word, store_work = 4 // work_size, work.store

    @inlined
    def end_weights(s, highest, value_scales, to):
        """16 weights, of the shaped scores. Written are what the values are multiplied by."""
        weights = exp2(s - highest)
        if value_scales:
            store_work(to, weights * read_f32(value_scales))
        else:
            store_work(to, weights)
        return weights

    @inlined
    def weigh(args, scores, state, sums, padded_dim, weights, scales, end):
        """A row's weights of a segment's keys up to ``end``: 4 times 16 of them. What was summed before is brought to
        the highest score, if that is much higher than the one before.
        """
        scale, soft_cap = get_f32(args + SCALE), get_f32(args + SOFT_CAP)
        begin = max(0, end - get_i64(args + WINDOW))
        s0 = shape(scores, scales, scale, soft_cap, begin, end)
        s1 = shape(scores + 64, scales and scales + 64, scale, soft_cap, begin - 16, end - 16)
        s2 = shape(scores + 128, scales and scales + 128, scale, soft_cap, begin - 32, end - 32)
        s3 = shape(scores + 192, scales and scales + 192, scale, soft_cap, begin - 48, end - 48)
        highest = maximum(maximum(s0, s1), maximum(s2, s3))
        # Weights of 4,096 at most are as exact as those of 1, and sums are seldom brought to a higher score so.
        if bits_of(is_above(highest, splat(get_f32(state + 64) + MARGIN))):
            raise_highest(state, sums, padded_dim, max_of(highest))
        highest = splat(get_f32(state + 64))
        scales = scales and scales + 4 * SEGMENT
        total = read_f32(state) + end_weights(s0, highest, scales, weights)
        total = total + end_weights(s1, highest, scales and scales + 64, weights + 16 * work_size)
        total = total + end_weights(s2, highest, scales and scales + 128, weights + 32 * work_size)
        total = total + end_weights(s3, highest, scales and scales + 192, weights + 48 * work_size)
        write_f32(state, total)

    @inlined
    def weigh_strip(args, room, first_head, strip, rows, begin_row, seen):
        padded_dim, group = padded_head(args), get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS)
        num_words, query_bytes = (get_i64(args + HEAD_DIM) + per_word - 1) // per_word, padded_dim * work_size
        scores, scales = room + SUMS, room + SCALES if get_i64(args + IS_INT8) else 0
        sums = sums_of(room, strip - begin_row, padded_dim)
        weights = room + WEIGHTS + 4 * SEGMENT * (strip - begin_row)
        queries = room + QUERIES + (strip - begin_row) * query_bytes
        score_panel(queries, query_bytes, room + KEYS, num_words, scores, rows, 0, 0)
        for nth in range(rows):
            weigh(
                args, scores + 4 * PANEL * nth, state_of(sums, nth, padded_dim), sums + 4 * PANEL * nth, padded_dim,
                weights + nth * SEGMENT * work_size, scales, seen + (strip + nth) // group,
            )  # fmt: skip

    @inlined
    def add_strip(args, room, strip, rows, begin_row, seen):
        padded_dim, group = padded_head(args), get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS)
        num_words = (min(SEGMENT, seen + (strip + rows - 1) // group) + per_word - 1) // per_word
        sums = sums_of(room, strip - begin_row, padded_dim)
        weights = room + WEIGHTS + 4 * SEGMENT * (strip - begin_row)
        for n in range(0, padded_dim, PANEL):
            values = room + VALUES + n * (SEGMENT // per_word) * 4
            add_panel(
                weights, SEGMENT * work_size, values, num_words, sums + n * TILE_ROWS * 4, rows, 0, 0
            )  # fmt: skip

    return weigh_strip, add_strip


@inlined
def sees_some(strip, rows, group, window, seen):
    """Whether one of a strip's rows sees one of a segment's keys."""
    return seen + (strip + rows - 1) // group > 0 and seen + strip // group - window < SEGMENT


@inlined
def find_segment(args, room, row, segment, first_seen, end_seen):
    """Write where the keys of a segment are that a tile's rows see."""
    table = get_i64(args + BLOCK_TABLES) + 4 * row * get_i64(args + TABLE_WIDTH)
    line, start = get_i64(args + NUM_KV_HEADS) * get_i64(args + LINE_BYTES), segment * SEGMENT
    begin, end = max(0, first_seen - start), min(SEGMENT, end_seen - start)
    find_keys(room + OFFSETS, table, get_i64(args + BLOCK_SIZE), line, segment, begin, end)


@inlined
def fetch_some(args, k, v, room, begin, end):
    """Bring keys and values into the second-level cache."""
    for nth in range(begin, end):
        offset = get_i64(room + OFFSETS + 8 * nth)
        for byte in range(offset, offset + get_i64(args + LINE_BYTES), 64):
            prefetch(k + byte)
            prefetch(v + byte)


def make_attend_prefill(memory: Memory, work: Memory) -> Any:
    """A chunk is a tile and a KV head.

    Args:
        memory: of queries, keys, values and the result.
        work: of queries, keys, values and weights in products.
    """
    size, work_size = memory.size, work.size
    store_some, take_some = memory.store_some, make_take(memory, work)
    pack, room_of_chunk = make_pack(memory, work), stack(ROOM_BYTES)
    weigh_strip, add_strip = make_attend_strip(work)

    @inlined
    def place_of(args, row):
        """The offset of a row's head in queries and results, from the tile's first on."""
        num_heads = get_i64(args + NUM_HEADS)
        group = num_heads // get_i64(args + NUM_KV_HEADS)
        return (row // group * num_heads + row % group) * get_i64(args + HEAD_DIM) * size

    @inlined
    def begin_rows(args, q, first_head, begin_row, end_row, room):
        head_dim, padded_dim = get_i64(args + HEAD_DIM), padded_head(args)
        sinks, group = get_i64(args + SINKS), get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS)
        to = room + QUERIES
        for row in range(begin_row, end_row):
            at = q + place_of(args, row)
            for n in range(0, padded_dim, LANES):
                take_some(at + n * size, head_dim - n, to + n * work_size)
            to += padded_dim * work_size
        for strip in range(0, end_row - begin_row, TILE_ROWS):
            sums = sums_of(room, strip, padded_dim)
            for n in range(0, TILE_ROWS * padded_dim, LANES):
                write_f32(sums + 4 * n, zeros())
            for nth in range(TILE_ROWS):
                state, head = state_of(sums, nth, padded_dim), first_head + (begin_row + strip + nth) % group
                write_f32(state, zeros())
                if sinks:
                    put_f32(state, ONE)
                put_f32(state + 64, sink_of(sinks, head))

    @inlined
    def end_rows(args, out, begin_row, end_row, room):
        head_dim, padded_dim = get_i64(args + HEAD_DIM), padded_head(args)
        for row in range(begin_row, end_row):
            to, nth = out + place_of(args, row), (row - begin_row) % TILE_ROWS
            sums = sums_of(room, row - begin_row - nth, padded_dim)
            factor = splat(ONE / sum_of(read_f32(state_of(sums, nth, padded_dim))))
            for n in range(0, head_dim, LANES):
                at = sums + (n // PANEL * TILE_ROWS + nth) * PANEL * 4 + n % PANEL * 4
                store_some(to + n * size, read_f32(at) * factor, head_dim - n)

    def attend_prefill(args, chunk, thread):
        num_heads, num_kv_heads = get_i64(args + NUM_HEADS), get_i64(args + NUM_KV_HEADS)
        kv_head, tile = chunk % num_kv_heads, get_i64(args + TILES) + 16 * (chunk // num_kv_heads)
        row, first_token, position = get_i32(tile), get_i32(tile + 4), get_i32(tile + 12)
        if row < 0:
            return
        room, window, group = room_of_chunk(), get_i64(args + WINDOW), num_heads // num_kv_heads
        num_rows = get_i32(tile + 8) * group
        first_head = kv_head * group
        of_tile = (first_token * num_heads + first_head) * get_i64(args + HEAD_DIM) * size
        line_bytes = get_i64(args + LINE_BYTES)
        k, v = get_i64(args + K_CACHE) + kv_head * line_bytes, get_i64(args + V_CACHE) + kv_head * line_bytes
        rows_at_once = min(MAX_ROWS, MAX_NUMBERS // padded_head(args) // TILE_ROWS * TILE_ROWS)
        for begin_row in range(0, num_rows, rows_at_once):
            end_row = min(begin_row + rows_at_once, num_rows)
            first_seen = max(0, position + begin_row // group + 1 - window)
            end_seen = position + (end_row - 1) // group + 1
            first, end = first_seen // SEGMENT, (end_seen + SEGMENT - 1) // SEGMENT
            keys_a_strip = (SEGMENT * TILE_ROWS + end_row - begin_row - 1) // (end_row - begin_row)
            find_segment(args, room, row, first, first_seen, end_seen)
            fetch_some(args, k, v, room, 0, SEGMENT)
            begin_rows(args, get_i64(args + Q) + of_tile, first_head, begin_row, end_row, room)
            for segment in range(first, end):
                pack(args, k, v, room)
                fetched = SEGMENT
                if segment + 1 < end:
                    find_segment(args, room, row, segment + 1, first_seen, end_seen)
                    fetched = 0
                seen = position + 1 - segment * SEGMENT
                for strip in range(begin_row, end_row, TILE_ROWS):
                    rows = min(TILE_ROWS, end_row - strip)
                    if sees_some(strip, rows, group, window, seen):
                        weigh_strip(args, room, first_head, strip, rows, begin_row, seen)
                    fetch_some(args, k, v, room, fetched, min(SEGMENT, fetched + keys_a_strip))
                    fetched += keys_a_strip
                for strip in range(begin_row, end_row, TILE_ROWS):
                    rows = min(TILE_ROWS, end_row - strip)
                    if sees_some(strip, rows, group, window, seen):
                        add_strip(args, room, strip, rows, begin_row, seen)
            end_rows(args, get_i64(args + OUT) + of_tile, begin_row, end_row, room)

    return attend_prefill


kernel(name="attend_prefill_float32")(make_attend_prefill(FLOAT32, FLOAT32))
kernel(name="attend_prefill_float16")(make_attend_prefill(FLOAT16, FLOAT32))
kernel(name="attend_prefill_bfloat16")(make_attend_prefill(BFLOAT16, BFLOAT16 if HAS_DOT_BF16 else FLOAT32))
