"""Attention of tiles of query tokens, as products of small matrices (Dao, 2023, "FlashAttention-2", arXiv:2307.08691).

The keys and the values of a segment are packed as weights are, for all query heads of a group and all tokens of a tile:
keys as [words of a head][64 keys], values as [panels of 64 of a head][words of keys][64]. Six rows at a time, a row
being a token and a query head, then go through scores, softmax and weighted values while these are in the cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from aioengine.kernels.native.kernels.attention import LOWEST, SEGMENT, find_keys, make_read_int8, shape_scores
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
    I64,
    LANES,
    Memory,
    bool16,
    call,
    first_lanes,
    fma,
    get_f32,
    get_i32,
    get_i64,
    i32x16,
    instruction,
    pointer,
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

read_f32, write_f32 = FLOAT32.load, FLOAT32.store


def number(value: int) -> Any:
    return ir.Constant(I64, value)


@instruction(types.none, types.int64, types.int64)
def transpose(b: Any, x: Any, to: Any) -> None:
    """Transpose 16 × 16 words: from 16 vectors at ``x`` to lines of `SEGMENT` words at ``to``.

    Blocks of 8 × 8 change places across the diagonal, then those of 4 × 4 within them, and so on.
    """
    rows = [b.load(pointer(b, b.add(x, number(64 * n)), i32x16.llvm), typ=i32x16.llvm) for n in range(LANES)]
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


@instruction(types.none, types.int64, types.int64, bool16, types.int64)
def store_pairs(b: Any, x: Any, y: Any, lanes: Any, to: Any) -> None:
    """Interleave numbers of 16 bits as words, those at ``x`` in the lower halves; 0 in lanes that are not set."""
    narrow, align = ir.VectorType(I16, LANES), ir.Constant(I32, 1)
    low, high = (
        call(b, "llvm.masked.load.v16i16.p0", narrow, pointer(b, at, narrow), align, lanes, ir.Constant(narrow, None))
        for at in (x, y)
    )
    sixteen = ir.Constant(i32x16.llvm, [16] * LANES)
    words = b.or_(b.zext(low, i32x16.llvm), b.shl(b.zext(high, i32x16.llvm), sixteen))
    store(b, to, words, 64)


def make_attend_prefill(memory: Memory, work: Memory, panel_of: Any) -> Any:
    """A chunk is a tile and a KV head.

    Arguments: q, k_cache, v_cache, block_tables, their width, tiles, out; heads, KV heads, head_dim, block_size; scale,
    window, soft_cap (0: none); whether the caches are int8, bytes of a KV head in them.

    Args:
        memory: of queries, keys, values and the result.
        work: of queries, keys, values and weights in products.
        panel_of: as `make_panel` makes it, for ``work``.
    """
    size, work_size = memory.size, work.size
    per_word = 4 // work_size
    load_some, store_some = memory.load_some, memory.store_some
    store_work = work.store
    room_for_queries, room_for_states = stack(4 * MAX_NUMBERS), stack(4 * MAX_NUMBERS + 128 * MAX_ROWS)
    room_for_keys, room_for_values = stack(4 * SEGMENT * MAX_HEAD_DIM), stack(4 * SEGMENT * MAX_HEAD_DIM)
    room_for_offsets, room_for_sums, room_for_weights = (
        stack(8 * SEGMENT), stack(4 * PANEL * TILE_ROWS), stack(4 * PANEL * TILE_ROWS),
    )  # fmt: skip
    room_for_factors, room_for_square = stack(64 * TILE_ROWS), stack(64 * LANES)
    read_int8, room_for_lines, room_for_places, room_for_scales = (
        make_read_int8(memory), stack(size * SEGMENT * MAX_HEAD_DIM), stack(8 * SEGMENT), stack(8 * SEGMENT),
    )  # fmt: skip

    @inlined
    def pack_keys(keys, k, offsets, head_dim, square):
        """[words of a head][SEGMENT keys]"""
        for first_key in range(0, SEGMENT, LANES):
            for n in range(0, head_dim, LANES * per_word):
                for key in range(LANES):
                    at = k + get_i64(offsets + 8 * (first_key + key)) + n * size
                    for part in range(per_word):
                        values = load_some(at + part * LANES * size, head_dim - n - part * LANES)
                        store_work(square + 64 * key + part * LANES * work_size, values)
                transpose(square, keys + (n // per_word * SEGMENT + first_key) * 4)

    @inlined
    def pack_values(values, v, offsets, head_dim):
        """[panels of a head][words of keys][PANEL]"""
        for n in range(0, head_dim, LANES):
            lanes = first_lanes(head_dim - n)
            to = values + (n // PANEL * SEGMENT // per_word * PANEL + n % PANEL) * 4
            for key in range(0, SEGMENT, per_word):
                at = v + get_i64(offsets + 8 * key) + n * size
                if per_word == 2:
                    store_pairs(at, v + get_i64(offsets + 8 * key + 8) + n * size, lanes, to + key // 2 * PANEL * 4)
                else:
                    write_f32(to + key * PANEL * 4, load_some(at, head_dim - n))

    @inlined
    def weigh(scores, state, weights, factors, scales, scale, soft_cap, begin, end):
        """A row's weights of a segment's keys, and the factor of what was summed before."""
        before = get_f32(state + 64)
        highest = max(before, shape_scores(scores, scales, scale, soft_cap, begin, end))
        factor = splat(types.float32(1))
        if highest > before:
            factor = exp(splat(before - highest))
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

    def attend_prefill(args, chunk, thread):
        num_heads, num_kv_heads, head_dim = get_i64(args + 56), get_i64(args + 64), get_i64(args + 72)
        block_size, scale, window = get_i64(args + 80), get_f32(args + 88), get_i64(args + 96)
        soft_cap = get_f32(args + 104)
        kv_head, tile = chunk % num_kv_heads, get_i64(args + 40) + 16 * (chunk // num_kv_heads)
        row, first_token, position = get_i32(tile), get_i32(tile + 4), get_i32(tile + 12)
        if row < 0:
            return
        group, head_bytes = num_heads // num_kv_heads, head_dim * size
        num_rows = get_i32(tile + 8) * group
        first_head = (first_token * num_heads + kv_head * group) * head_bytes
        q, out = get_i64(args) + first_head, get_i64(args + 48) + first_head
        is_int8, line_bytes = get_i64(args + 112), get_i64(args + 120)
        k, v = get_i64(args + 8) + kv_head * line_bytes, get_i64(args + 16) + kv_head * line_bytes
        table = get_i64(args + 24) + 4 * row * get_i64(args + 32)
        num_words = (head_dim + per_word - 1) // per_word
        padded_dim = (head_dim + PANEL - 1) // PANEL * PANEL
        query_bytes, state_bytes = padded_dim * work_size, 4 * padded_dim + 128
        queries, states, keys, values = room_for_queries(), room_for_states(), room_for_keys(), room_for_values()
        offsets, sums, weights = room_for_offsets(), room_for_sums(), room_for_weights()
        factors, square = room_for_factors(), room_for_square()
        lines, places, scales = room_for_lines(), room_for_places(), 0
        if is_int8:
            scales = room_for_scales()
            for n in range(SEGMENT):
                put_i64(places + 8 * n, n * ((head_dim + 15) // 16 * 16) * size)
        rows_at_once = min(MAX_ROWS, MAX_NUMBERS // padded_dim // TILE_ROWS * TILE_ROWS)
        for begin_row in range(0, num_rows, rows_at_once):
            end_row = min(begin_row + rows_at_once, num_rows)
            for nth in range(begin_row, end_row):
                at = q + (nth // group * num_heads + nth % group) * head_bytes
                to, state = queries + (nth - begin_row) * query_bytes, states + (nth - begin_row) * state_bytes
                for n in range(0, padded_dim, LANES):
                    store_work(to + n * work_size, load_some(at + n * size, head_dim - n))
                    write_f32(state + 4 * n, zeros())
                write_f32(state + 4 * padded_dim, zeros())
                put_f32(state + 4 * padded_dim + 64, LOWEST)
            first_seen = max(0, position + begin_row // group + 1 - window)
            end_seen = position + (end_row - 1) // group + 1
            for segment in range(first_seen // SEGMENT, (end_seen + SEGMENT - 1) // SEGMENT):
                start = segment * SEGMENT
                begin, end = max(0, first_seen - start), min(SEGMENT, end_seen - start)
                find_keys(offsets, table, block_size, num_kv_heads * line_bytes, segment, begin, end)
                if scales:
                    read_int8(k, offsets, 0, SEGMENT, head_dim, lines, scales, v, offsets)
                    pack_keys(keys, lines, places, head_dim, square)
                    read_int8(v, offsets, 0, SEGMENT, head_dim, lines, scales + 4 * SEGMENT, v, offsets)
                    pack_values(values, lines, places, head_dim)
                else:
                    pack_keys(keys, k, offsets, head_dim, square)
                    pack_values(values, v, offsets, head_dim)
                for strip in range(begin_row, end_row, TILE_ROWS):
                    rows = min(TILE_ROWS, end_row - strip)
                    last_end = position + (strip + rows - 1) // group + 1 - start
                    if last_end <= 0 or position + strip // group + 1 - window >= start + SEGMENT:
                        continue
                    panel_of(
                        queries + (strip - begin_row) * query_bytes, query_bytes, keys, num_words, sums, rows, 0, 0
                    )
                    state = states + (strip - begin_row) * state_bytes
                    for nth in range(rows):
                        end_of_row = position + (strip + nth) // group + 1 - start
                        weigh(
                            sums + 4 * PANEL * nth, state + nth * state_bytes + 4 * padded_dim,
                            weights + nth * SEGMENT * work_size, factors + 64 * nth, scales,
                            scale, soft_cap, max(0, end_of_row - window), min(SEGMENT, end_of_row),
                        )  # fmt: skip
                    for n in range(0, padded_dim, PANEL):
                        of_panel = values + n * (SEGMENT // per_word) * 4
                        panel_of(weights, SEGMENT * work_size, of_panel, SEGMENT // per_word, sums, rows, 0, 0)
                        for nth in range(rows):
                            factor, at = read_f32(factors + 64 * nth), state + nth * state_bytes + 4 * n
                            for lane in range(0, 4 * PANEL, 64):
                                added = read_f32(sums + 4 * PANEL * nth + lane)
                                write_f32(at + lane, fma(read_f32(at + lane), factor, added))
            for nth in range(begin_row, end_row):
                to = out + (nth // group * num_heads + nth % group) * head_bytes
                state = states + (nth - begin_row) * state_bytes
                total = splat(sum_of(read_f32(state + 4 * padded_dim)))
                for n in range(0, head_dim, LANES):
                    store_some(to + n * size, read_f32(state + 4 * n) / total, head_dim - n)

    return attend_prefill


_panel_of_float32 = make_panel(KINDS["float32"])
kernel(name="attend_prefill_float32")(make_attend_prefill(FLOAT32, FLOAT32, _panel_of_float32))
kernel(name="attend_prefill_float16")(make_attend_prefill(FLOAT16, FLOAT32, _panel_of_float32))
if HAS_DOT_BF16:
    kernel(name="attend_prefill_bfloat16")(make_attend_prefill(BFLOAT16, BFLOAT16, make_panel(KINDS["bfloat16"])))
else:
    kernel(name="attend_prefill_bfloat16")(make_attend_prefill(BFLOAT16, FLOAT32, _panel_of_float32))
