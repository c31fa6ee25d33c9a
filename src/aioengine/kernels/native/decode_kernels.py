"""Attention of single query tokens, straight from the blocks of the KV cache (Dao et al., 2023, "Flash-Decoding").

The query heads of a group share each key and value that is loaded. Where those of a position are many bytes, they are
gone through in the order in which they lie in memory, some positions at a time by all KV heads of a chunk: so one and
two cores of Zen 4 read 15 % more of Qwen3-0.6B's cache than one head after the other. Contexts are cut into parts of
`CONTEXT_PART` positions. The states of the parts are merged in their order, in one chunk or by a second kernel, with
the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from aioengine.kernels.native.attention_parts import (
    LOWEST,
    SEGMENT,
    ZERO,
    find_keys,
    shape_scores,
    sink_of,
)
from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.sizes import CONTEXT_PART, MAX_HEAD_DIM, MAX_HEADS, MAX_STATES
from aioengine.kernels.native.vector_functions import exp2
from aioengine.kernels.native.vectors import (
    BF16,
    BFLOAT16,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    I8,
    I16,
    I32,
    I64,
    LANES,
    REGISTER_LANES,
    Memory,
    call,
    f32x16,
    get_f32,
    get_i32,
    get_i64,
    instruction,
    lane_bytes,
    load,
    load_lanes,
    number,
    prefetch,
    prefetch_line,
    put_f32,
    put_i64,
    splat,
    splatted,
    stack,
    store,
    sum_of,
    to_wide,
    zeros,
)

read_f32, write_f32 = FLOAT32.load, FLOAT32.store
ONE = np.float32(1)

WIDE_BYTES = 2048
"""Least bytes of the keys of one position, half a page, for which `is_wide` holds."""

# The arguments of `attend_decode`, by their offsets. K_CACHE, V_CACHE: lines of `LINE_BYTES` a position and KV head.
# DECODES: int32 [decodes, 3]. SOFT_CAP: 0: none. STATES: float32 [decodes, NUM_PARTS, heads, a state]. SINKS:
# float32 [heads], or 0.
Q, K_CACHE, V_CACHE, BLOCK_TABLES, TABLE_WIDTH, DECODES, OUT = range(0, 56, 8)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP = range(56, 112, 8)
KV_HEADS_A_CHUNK, NUM_SPLITS, STATES, NUM_PARTS, IS_INT8, LINE_BYTES, SINKS = range(112, 168, 8)

# A chunk's memory, by offsets: where the keys of a segment and of the next one are, and where `LINES` are (int64 [3,
# SEGMENT]); the scales of a segment's keys and values, if they are int8 (float32 [2, SEGMENT]); scores, then weights
# (float32 [heads, SEGMENT]); factors of sums, a line a head; copies of keys or values whose size is no whole number of
# vectors, padded to that.
PLACES = 2 * 8 * SEGMENT
SCALES = PLACES + 8 * SEGMENT
SCORES = SCALES + 2 * 4 * SEGMENT
FACTORS = SCORES + 4 * SEGMENT * MAX_HEADS
LINES = FACTORS + 64 * MAX_HEADS
ROOM_BYTES = LINES + 4 * SEGMENT * MAX_HEAD_DIM

IS_SMALL = REGISTER_LANES < LANES
"""Whether registers are of 8 numbers: then 16 bfloat16 are taken apart as one, into those of even and of odd places."""


def shuffled(b: Any, x: Any, y: Any, lanes: Iterable[int]) -> Any:
    chosen = list(lanes)
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(chosen)), chosen))


def in_register_order(b: Any, x: Any, lane: ir.Type) -> Any:
    """16 float32 in the order in which `read_registers` gives numbers of a type."""
    return shuffled(b, x, x, (*range(0, LANES, 2), *range(1, LANES, 2))) if IS_SMALL and lane is I16 else x


def in_memory_order(b: Any, x: Any, lane: ir.Type) -> Any:
    return shuffled(b, x, x, (n // 2 + n % 2 * 8 for n in range(LANES))) if IS_SMALL and lane is I16 else x


def registers_of(b: Any, x: Any) -> list[Any]:
    """A vector of 16, cut into registers."""
    firsts = range(0, LANES, REGISTER_LANES)
    return [shuffled(b, x, x, range(first, first + REGISTER_LANES)) for first in firsts] if IS_SMALL else [x]


def read_registers(b: Any, address: Any, lane: ir.Type) -> list[Any]:
    """16 numbers as registers of float32."""
    if not (IS_SMALL and lane is I16):
        size, numbers = REGISTER_LANES * lane_bytes(lane), ir.VectorType(lane, REGISTER_LANES)
        ends = range(0, LANES * lane_bytes(lane), size)
        return [to_wide(b, load(b, b.add(address, number(end)), numbers)) for end in ends]
    words = ir.VectorType(I32, REGISTER_LANES)
    pairs, sixteen, upper = load(b, address, words), *(ir.Constant(words, [x] * words.count) for x in (16, -65536))
    return [b.bitcast(half, ir.VectorType(F32, words.count)) for half in (b.shl(pairs, sixteen), b.and_(pairs, upper))]


def summed(b: Any, vectors: list[Any]) -> Any:
    """The sums of as many vectors as they have lanes, in the lanes of one: halves are added, then their halves, as
    `sum_of` adds them."""
    count = lanes = len(vectors)
    while lanes > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        low = [at + n for at in range(0, 2 * count, lanes) for n in range(lanes // 2)]
        high = [lane + lanes // 2 for lane in low]
        vectors = [b.fadd(shuffled(b, x, y, low), shuffled(b, x, y, high)) for x, y in pairs]
        lanes //= 2
    return vectors[0]


def multiply_add(b: Any, sums: Any, x: Any, y: Any) -> Any:
    """sums + x · y, of float32, or of pairs of bfloat16 in words."""
    if x.type.element == F32:
        return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, sums)
    pairs = ir.VectorType(BF16, 2 * LANES)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, b.bitcast(x, pairs), b.bitcast(y, pairs))


HEADS_AT_ONCE = (4, 2, 1)
"""Query heads that share each key and value that is loaded, as many as there are."""


@inlined
def heads_at_once(num_heads):
    return 4 if num_heads >= 4 else 2 if num_heads >= 2 else 1


@inlined
def is_wide(group, position_bytes):
    """Whether the keys of a chunk's heads at one position are so many bytes that memory is better read in its order
    than a segment of one head after the other: unless so much is computed with each key that sums had better stay in
    registers.
    """
    return position_bytes >= WIDE_BYTES and group < 8


def make_products(lane: ir.Type) -> Any:
    """A function that multiplies 1, 2 or 4 queries with as many keys as make the sums a register each.

    Args:
        heads: how many queries.
        q: the queries, ``q_stride`` bytes apart: float32, or words like the keys', with zeros to whole vectors.
        k, offsets: a key is at k + offsets[n]: ``count`` numbers of a type, in whole vectors, or words of two bfloat16.
        to: float32 [heads, SEGMENT], of which the first columns are written.
    """
    sums = ir.VectorType(F32, REGISTER_LANES)
    words = ir.VectorType(I32 if lane is I32 else F32, REGISTER_LANES)

    def emit(b: Any, heads: int, q: Any, q_stride: Any, k: Any, offsets: Any, count: Any, to: Any) -> None:
        num_keys = REGISTER_LANES // heads
        places = [(head, key) for head in range(heads) for key in range(num_keys)]
        held = {place: cgutils.alloca_once(b, sums) for place in places}
        for place in places:
            b.store(ir.Constant(sums, None), held[place])
        queries = [b.add(q, b.mul(q_stride, number(head))) for head in range(heads)]
        keys = [b.add(k, load(b, b.add(offsets, number(8 * key)), I64)) for key in range(num_keys)]

        def add(first: Any, read: Callable[[Any], list[Any]]) -> None:
            """Products of 16 numbers or words from the first on; ``read`` gives those of a key."""
            at, at_key = b.mul(first, number(4)), b.mul(first, number(lane_bytes(lane)))
            of_keys = [read(b.add(start, at_key)) for start in keys]
            for nth, registers in enumerate(zip(*of_keys, strict=True)):
                offset = b.add(at, number(4 * REGISTER_LANES * nth))
                of_queries = [load(b, b.add(query, offset), words) for query in queries]
                for key, of_key in enumerate(registers):
                    for head, of_query in enumerate(of_queries):
                        b.store(multiply_add(b, b.load(held[head, key]), of_query, of_key), held[head, key])

        with cgutils.for_range(b, b.udiv(count, number(LANES)), intp=I64) as loop:
            add(b.mul(loop.index, number(LANES)), lambda of_key: read_registers(b, of_key, lane))
        if lane is I32:
            left = b.and_(count, number(LANES - 1))
            with b.if_then(b.icmp_signed(">", left, number(0))):
                add(b.sub(count, left), lambda of_key: [load_lanes(b, of_key, lane, left)])
        totals = summed(b, [b.load(held[place]) for place in places])
        for head in range(heads):
            of_head = shuffled(b, totals, totals, range(head * num_keys, (head + 1) * num_keys))
            store(b, b.add(to, number(4 * SEGMENT * head)), of_head, 4)

    @instruction(types.none, *[types.int64] * 7)
    def products(b: Any, heads: Any, *arguments: Any) -> None:
        for each in HEADS_AT_ONCE:
            with b.if_then(b.icmp_signed("==", heads, number(each))):
                emit(b, each, *arguments)

    return products


MOST_SUMS = 16 if REGISTER_LANES == LANES else 4
"""Vectors of 16 sums that stay in registers."""


def widest(heads: int) -> int:
    """Vectors of sums of so many heads that are changed together."""
    return min(4, MOST_SUMS // heads)


def make_weighted_sum(lane: ir.Type) -> Any:
    """A function that makes sums · factor + Σ weight · value of sums.

    Args:
        heads: 1, 2 or 4 queries.
        vectors: how many of each query's sums are changed, 1 or as many as `widest` says.
        weights: float32, of the queries, `SEGMENT` apart.
        v, offsets: a value is at v + offsets[n].
        factors: float32, a query's in each line of 64 bytes.
        sums: float32, a query's ``stride`` bytes apart.
        ahead, later: what is at ahead + later[n] is brought into the cache.
    """

    def emit(
        b: Any,
        heads: int,
        vectors: int,
        weights: Any,
        v: Any,
        offsets: Any,
        num_keys: Any,
        factors: Any,
        sums: Any,
        stride: Any,
        ahead: Any,
        later: Any,
    ) -> None:
        register = ir.VectorType(F32, REGISTER_LANES)
        per_vector = LANES // REGISTER_LANES
        places = [(head, nth) for head in range(heads) for nth in range(vectors)]
        at = {(head, nth): b.add(sums, b.add(b.mul(stride, number(head)), number(64 * nth))) for head, nth in places}
        held = {place: [cgutils.alloca_once(b, register) for _ in range(per_vector)] for place in places}
        for head, nth in places:
            factor = splatted(b, load(b, b.add(factors, number(64 * head)), F32), register)
            before = registers_of(b, in_register_order(b, load(b, at[head, nth], f32x16.llvm), lane))
            for sum_, x in zip(held[head, nth], before, strict=True):
                b.store(b.fmul(factor, x), sum_)
        vector_bytes = lane_bytes(lane) * LANES
        with cgutils.for_range(b, num_keys, intp=I64) as loop:
            start = b.add(v, load(b, b.add(offsets, b.mul(loop.index, number(8))), I64))
            fetched = b.add(ahead, load(b, b.add(later, b.mul(loop.index, number(8))), I64))
            for line in range(0, vector_bytes * vectors, 64):
                prefetch_line(b, b.add(fetched, number(line)))
            values = [read_registers(b, b.add(start, number(vector_bytes * nth)), lane) for nth in range(vectors)]
            for head in range(heads):
                place = b.add(weights, b.add(b.mul(loop.index, number(4)), number(4 * SEGMENT * head)))
                weight = splatted(b, load(b, place, F32), register)
                for nth in range(vectors):
                    for sum_, value in zip(held[head, nth], values[nth], strict=True):
                        b.store(multiply_add(b, b.load(sum_), weight, value), sum_)
        for place in places:
            registers = [b.load(sum_) for sum_ in held[place]]
            whole = shuffled(b, registers[0], registers[-1], range(LANES))
            store(b, at[place], in_memory_order(b, whole, lane), 64)

    @instruction(types.none, *[types.int64] * 11)
    def weighted_sum(b: Any, heads: Any, vectors: Any, *arguments: Any) -> None:
        for each in HEADS_AT_ONCE:
            with b.if_then(b.icmp_signed("==", heads, number(each))):
                for most in sorted({1, widest(each)}):
                    with b.if_then(b.icmp_signed("==", vectors, number(most))):
                        emit(b, each, most, *arguments)

    return weighted_sum


@cache
def make_find_vectors(lane: ir.Type) -> Any:
    """A function that says where lines are in whole vectors: (address, offsets), as they come or of copies."""

    @instruction(types.none, types.int64, types.int64, types.int64)
    def copy(b: Any, source: Any, to: Any, count: Any) -> None:
        store(b, to, load_lanes(b, source, lane, count))

    size = lane_bytes(lane)

    @inlined
    def find_vectors(room, x, offsets, num_lines, head_dim):
        if head_dim % LANES == 0:
            return x, offsets
        stride = padded(head_dim) * size
        for key in range(num_lines):
            line = x + get_i64(offsets + 8 * key)
            put_i64(room + PLACES + 8 * key, key * stride)
            for n in range(0, head_dim, LANES):
                copy(line + n * size, room + LINES + key * stride + n * size, head_dim - n)
        return room + LINES, room + PLACES

    return find_vectors


def make_copy_queries(memory: Memory, lane: ir.Type) -> Any:
    """A function that writes queries as they are multiplied with keys of a type, with zeros to whole vectors."""

    @instruction(types.none, types.int64, f32x16)
    def store_float32(b: Any, address: Any, x: Any) -> None:
        store(b, address, in_register_order(b, x, lane))

    store_query, size = (memory.store, 2) if lane is I32 else (store_float32, 4)
    load_some, memory_size = memory.load_some, memory.size

    @inlined
    def copy_queries(to, q, num_heads, head_dim, stride):
        for head in range(num_heads):
            for n in range(0, (head_dim + 31) // 32 * 32, LANES):
                x = load_some(q + (head * head_dim + n) * memory_size, head_dim - n)
                store_query(to + head * stride + n * size, x)

    return copy_queries


def make_score(lane: ir.Type) -> Any:
    """A function that writes the products of queries with a segment's keys; what comes next, of keys and then of
    values, comes into the cache meanwhile."""
    per_word = 2 if lane is I32 else 1
    find_vectors, products = make_find_vectors(I16 if lane is I32 else lane), make_products(lane)

    @inlined
    def score(args, room, q, q_stride, k, v, offsets, begin, end, num_kv_heads, positions):
        group, line_bytes = get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS), get_i64(args + LINE_BYTES)
        head_dim, n = get_i64(args + HEAD_DIM), begin & -positions
        count = padded(head_dim) // per_word
        while n < end:
            here, later, ahead = offsets + 8 * n, offsets + 8 * (n + positions), k
            num_seen = min(positions, end - n)
            if n + positions >= end:
                later, ahead = offsets + 8 * begin, v
            for kv_head in range(num_kv_heads):
                keys, places = find_vectors(room, k + kv_head * line_bytes, here, positions, head_dim)
                head, next_keys = kv_head * group, ahead + kv_head * line_bytes
                while head < (kv_head + 1) * group:
                    heads = heads_at_once((kv_head + 1) * group - head)
                    num_keys = REGISTER_LANES // heads
                    key = max(begin - n, 0) & -num_keys  # no range by a step that is not constant: numba divides
                    while key < num_seen:
                        to = room + SCORES + 4 * (SEGMENT * head + n + key)
                        products(heads, q + head * q_stride, q_stride, keys, places + 8 * key, count, to)
                        for nth in range(key, key + num_keys):
                            for at in range(0, line_bytes, 64):
                                prefetch(next_keys + get_i64(later + 8 * nth) + at)
                        key += num_keys
                    head += heads
            n += positions

    return score


def make_add_values(lane: ir.Type) -> Any:
    """A function that adds a segment's weighted values to states; what comes next, of values and then of the next
    segment's keys, comes into the cache meanwhile. Factors are 1 from the second block of positions on."""
    find_vectors, weighted_sum, size = make_find_vectors(lane), make_weighted_sum(lane), lane_bytes(lane)

    @inlined
    def add_values(args, room, v, offsets, k_later, offsets_later, begin, end, num_kv_heads, positions, state, stride):
        group, line_bytes = get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS), get_i64(args + LINE_BYTES)
        head_dim, n = get_i64(args + HEAD_DIM), begin
        while n < end:
            here, later, ahead = offsets + 8 * n, offsets + 8 * (n + positions), v
            num_values = min(positions, end - n)
            if n + positions >= end:
                later, ahead = offsets_later, k_later
            for kv_head in range(num_kv_heads):
                values, places = find_vectors(room, v + kv_head * line_bytes, here, num_values, head_dim)
                head, next_values = kv_head * group, ahead + kv_head * line_bytes
                while head < (kv_head + 1) * group:
                    heads, first = heads_at_once((kv_head + 1) * group - head), 0
                    weights, factors = room + SCORES + 4 * (SEGMENT * head + n), room + FACTORS + 64 * head
                    while first < head_dim:
                        vectors = min(4, MOST_SUMS // heads)
                        if first + LANES * vectors > head_dim:
                            vectors = 1
                        sums, at = state + head * stride + 4 * first, first * size
                        weighted_sum(
                            heads, vectors, weights, values + at, places, num_values, factors, sums, stride,
                            next_values + at, later,
                        )  # fmt: skip
                        first += LANES * vectors
                    for nth in range(heads):
                        put_f32(factors + 64 * nth, ONE)
                    head += heads
            n += positions

    return add_values


# A state: the sums, padded to whole vectors, then a vector with the highest score, and one with the weights' sum.


@inlined
def padded(head_dim):
    return (head_dim + LANES - 1) // LANES * LANES


@inlined
def clear_state(state, padded_dim, highest, weight):
    """Write the state of no key: the weights' sum is 0, or 1 for a sink, or for a result of zeros."""
    for n in range(0, padded_dim, LANES):
        write_f32(state + 4 * n, zeros())
    put_f32(state + 4 * padded_dim, highest)
    put_f32(state + 4 * padded_dim + 64, weight)


@inlined
def clear_total(total, padded_dim, row, sinks, head):
    """Write the state that parts are merged into. It has the sink, which so counts once; for padding, row -1, it is
    the result."""
    clear_state(total, padded_dim, sink_of(sinks, head), ONE if sinks or row < 0 else ZERO)


@inlined
def merge_states(total, part, padded_dim):
    """Put a later part's state to the total."""
    at, weight_at = 4 * padded_dim, 4 * padded_dim + 64
    highest = max(get_f32(total + at), get_f32(part + at))
    old = exp2(splat(get_f32(total + at) - highest))
    new = exp2(splat(get_f32(part + at) - highest))
    for n in range(0, padded_dim, LANES):
        write_f32(total + 4 * n, read_f32(total + 4 * n) * old + read_f32(part + 4 * n) * new)
    weight = splat(get_f32(total + weight_at)) * old + splat(get_f32(part + weight_at)) * new
    write_f32(total + weight_at, weight)
    put_f32(total + at, highest)


def make_finish(memory: Memory) -> Any:
    store_some, size = memory.store_some, memory.size

    @inlined
    def finish(out, state, head_dim, padded_dim):
        """Write a state's sums divided by the weights' sum."""
        weight = splat(get_f32(state + 4 * padded_dim + 64))
        for n in range(0, head_dim, LANES):
            store_some(out + n * size, read_f32(state + 4 * n) / weight, head_dim - n)

    return finish


@inlined
def weigh(args, room, first_head, num_heads, state, stride, begin, end):
    """Make scores of a segment weights, with the values' scales, and note by which factor to bring sums to the new
    highest scores."""
    scales = room + SCALES if get_i64(args + IS_INT8) else 0
    for head in range(first_head, first_head + num_heads):
        row, highest_at = room + SCORES + 4 * SEGMENT * head, state + (head + 1) * stride - 128
        before = get_f32(highest_at)
        highest = shape_scores(row, scales, get_f32(args + SCALE), get_f32(args + SOFT_CAP), begin, end)
        highest = max(before, highest)
        factor = exp2(splat(before - highest))
        total = zeros()
        for n in range(0, SEGMENT, LANES):
            weight = exp2(read_f32(row + 4 * n) - splat(highest))
            total = total + weight
            if scales:
                weight = weight * read_f32(scales + 4 * (SEGMENT + n))
            write_f32(row + 4 * n, weight)
        write_f32(room + FACTORS + 64 * head, factor)
        put_f32(highest_at, highest)
        write_f32(highest_at + 64, splat(get_f32(highest_at + 64)) * factor + splat(sum_of(total)))


@inlined
def read_scales(args, room, k, v, offsets):
    """The scales of a segment's int8 keys and values, which are behind these."""
    for n in range(SEGMENT):
        at = get_i64(offsets + 8 * n) + get_i64(args + HEAD_DIM)
        put_f32(room + SCALES + 4 * n, get_f32(k + at))
        put_f32(room + SCALES + 4 * (SEGMENT + n), get_f32(v + at))


def make_attend_segment(lane: ir.Type) -> Any:
    """A function that adds a segment's keys and values to the states of some KV heads."""
    score, add_values = make_score(lane), make_add_values(I16 if lane is I32 else lane)
    score_int8, add_values_int8 = make_score(I8), make_add_values(I8)

    @inlined
    def attend_segment(
        args, room, q, k, v, offsets, k_later, offsets_later, begin, end, num_kv_heads, positions, state, stride
    ):  # fmt: skip
        group, line_bytes = get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS), get_i64(args + LINE_BYTES)
        if get_i64(args + IS_INT8):
            score_int8(args, room, q, stride, k, v, offsets, begin, end, num_kv_heads, positions)
            for kv_head in range(num_kv_heads):
                read_scales(args, room, k + kv_head * line_bytes, v + kv_head * line_bytes, offsets)
                weigh(args, room, kv_head * group, group, state, stride, begin, end)
            add_values_int8(
                args, room, v, offsets, k_later, offsets_later, begin, end, num_kv_heads, positions, state, stride
            )
        else:
            score(args, room, q, stride, k, v, offsets, begin, end, num_kv_heads, positions)
            weigh(args, room, 0, group * num_kv_heads, state, stride, begin, end)
            add_values(
                args, room, v, offsets, k_later, offsets_later, begin, end, num_kv_heads, positions, state, stride
            )

    return attend_segment


def make_attend_part(lane: ir.Type) -> Any:
    """A function that makes the states of a part, of some KV heads: segment by segment, where the next one's keys lie
    found before, and in a segment one head after the other, or all together where that `is_wide`.

    Args:
        first: the first position that is seen.
        states: float32, of the query heads of the KV heads.
    """
    attend_segment = make_attend_segment(lane)

    @inlined
    def attend_part(args, room, q, table, context, first, part, first_kv_head, end_kv_head, states):
        group, num_kv_heads = get_i64(args + NUM_HEADS) // get_i64(args + NUM_KV_HEADS), get_i64(args + NUM_KV_HEADS)
        block_size, line_bytes = get_i64(args + BLOCK_SIZE), get_i64(args + LINE_BYTES)
        k_cache, v_cache = get_i64(args + K_CACHE), get_i64(args + V_CACHE)
        padded_dim = padded(get_i64(args + HEAD_DIM))
        stride = 4 * padded_dim + 128
        for nth in range((end_kv_head - first_kv_head) * group):
            clear_state(states + nth * stride, padded_dim, LOWEST, ZERO)
        heads_together, positions = 1, SEGMENT
        if is_wide(group, (end_kv_head - first_kv_head) * line_bytes):
            # As many positions as a product takes of one query, or of two.
            heads_together, positions = end_kv_head - first_kv_head, REGISTER_LANES if group % 2 else 8
        num_segments = (context + SEGMENT - 1) // SEGMENT
        first_segment = max(part * (CONTEXT_PART // SEGMENT), first // SEGMENT)
        for segment in range(first_segment, min((part + 1) * (CONTEXT_PART // SEGMENT), num_segments)):
            begin, end = max(0, first - segment * SEGMENT), min(SEGMENT, context - segment * SEGMENT)
            here, later = room + segment % 2 * 8 * SEGMENT, room + (segment + 1) % 2 * 8 * SEGMENT
            if segment == first_segment:
                find_keys(here, table, block_size, num_kv_heads * line_bytes, segment, begin, end)
            if segment + 1 < num_segments:
                end_later = min(SEGMENT, context - (segment + 1) * SEGMENT)
                find_keys(later, table, block_size, num_kv_heads * line_bytes, segment + 1, 0, end_later)
            else:
                later = here
            kv_head = first_kv_head
            while kv_head < end_kv_head:
                nth, next_head, list_of_next = (kv_head - first_kv_head) * group, kv_head + heads_together, here
                if next_head == end_kv_head:
                    next_head, list_of_next = first_kv_head, later
                attend_segment(
                    args, room, q + nth * stride, k_cache + kv_head * line_bytes, v_cache + kv_head * line_bytes, here,
                    k_cache + next_head * line_bytes, list_of_next, begin, end, heads_together, positions,
                    states + nth * stride, stride,
                )  # fmt: skip
                kv_head += heads_together

    return attend_part


def make_attend_decode(memory: Memory, lane: ir.Type) -> Any:
    """A chunk is a query token, some KV heads and, with `NUM_SPLITS` above 1, every so many-th part of the context,
    whose states it leaves to `combine`.

    Args:
        memory: of queries, of the result, and of keys and values, unless these are int8.
        lane: as which keys are read, of bfloat16 words of two where these can be multiplied.
    """
    copy_queries, copy_queries_int8 = make_copy_queries(memory, lane), make_copy_queries(memory, I8)
    attend_part, finish, size = make_attend_part(lane), make_finish(memory), memory.size
    room_for_queries, room_for_total, room_for_part = (stack(4 * MAX_STATES) for _ in range(3))
    room_for_segment = stack(ROOM_BYTES)

    def attend_decode(args, chunk, thread):
        num_heads, num_kv_heads = get_i64(args + NUM_HEADS), get_i64(args + NUM_KV_HEADS)
        head_dim = get_i64(args + HEAD_DIM)
        kv_heads_a_chunk, num_splits = get_i64(args + KV_HEADS_A_CHUNK), get_i64(args + NUM_SPLITS)
        num_slices = (num_kv_heads + kv_heads_a_chunk - 1) // kv_heads_a_chunk
        split, rest = chunk % num_splits, chunk // num_splits
        first_kv_head, nth = rest % num_slices * kv_heads_a_chunk, rest // num_slices
        end_kv_head = min(first_kv_head + kv_heads_a_chunk, num_kv_heads)
        decode = get_i64(args + DECODES) + 12 * nth
        row, token, context = get_i32(decode), get_i32(decode + 4), get_i32(decode + 8)
        if row < 0:
            context = 0
        group, stride = num_heads // num_kv_heads, 4 * padded(head_dim) + 128
        first_head, count = first_kv_head * group, (end_kv_head - first_kv_head) * group
        of_token = (token * num_heads + first_head) * head_dim * size
        queries, total, of_part, room = room_for_queries(), room_for_total(), room_for_part(), room_for_segment()
        if get_i64(args + IS_INT8):
            copy_queries_int8(queries, get_i64(args + Q) + of_token, count, head_dim, stride)
        else:
            copy_queries(queries, get_i64(args + Q) + of_token, count, head_dim, stride)
        for head in range(count):
            clear_total(total + head * stride, padded(head_dim), row, get_i64(args + SINKS), first_head + head)
        table = get_i64(args + BLOCK_TABLES) + 4 * row * get_i64(args + TABLE_WIDTH)
        first = max(0, context - get_i64(args + WINDOW))
        for part in range(first // CONTEXT_PART, (context + CONTEXT_PART - 1) // CONTEXT_PART):
            if part % num_splits != split:
                continue
            if num_splits > 1:
                nth_part = nth * get_i64(args + NUM_PARTS) + part
                of_part = get_i64(args + STATES) + (nth_part * num_heads + first_head) * stride
            attend_part(args, room, queries, table, context, first, part, first_kv_head, end_kv_head, of_part)
            if num_splits == 1:
                for head in range(count):
                    merge_states(total + head * stride, of_part + head * stride, padded(head_dim))
        if num_splits == 1:
            for head in range(count):
                to = get_i64(args + OUT) + of_token + head * head_dim * size
                finish(to, total + head * stride, head_dim, padded(head_dim))

    return attend_decode


def make_combine(memory: Memory) -> Any:
    """The states of a query token's parts together; a chunk is a token.

    Arguments: states, parts; decodes, out; heads, head_dim, window; sinks.
    """
    finish, size = make_finish(memory), memory.size
    room = stack(4 * MAX_STATES)

    def combine(args, chunk, thread):
        states, num_parts = get_i64(args), get_i64(args + 8)
        decode, num_heads, head_dim = get_i64(args + 16) + 12 * chunk, get_i64(args + 32), get_i64(args + 40)
        row, token, context = get_i32(decode), get_i32(decode + 4), get_i32(decode + 8)
        out = get_i64(args + 24) + token * num_heads * head_dim * size
        padded_dim, stride = padded(head_dim), 4 * padded(head_dim) + 128
        total = room()
        first = max(0, context - get_i64(args + 48))
        if row < 0:
            context = 0
        for head in range(num_heads):
            clear_total(total, padded_dim, row, get_i64(args + 56), head)
            for part in range(first // CONTEXT_PART, (context + CONTEXT_PART - 1) // CONTEXT_PART):
                merge_states(total, states + ((chunk * num_parts + part) * num_heads + head) * stride, padded_dim)
            finish(out + head * head_dim * size, total, head_dim, padded_dim)

    return combine


for _name, _memory, _lane in (
    ("float32", FLOAT32, F32),
    ("bfloat16", BFLOAT16, I32 if HAS_DOT_BF16 else I16),
    ("float16", FLOAT16, F16),
):
    kernel(name=f"attend_decode_{_name}")(make_attend_decode(_memory, _lane))
    kernel(name=f"combine_{_name}")(make_combine(_memory))
