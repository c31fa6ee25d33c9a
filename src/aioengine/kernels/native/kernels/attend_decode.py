"""Attention of single query tokens, straight from the blocks of the KV cache (Dao et al., 2023, "Flash-Decoding").

The query heads of a group share each key and value that is loaded. Contexts are cut into parts of `PART` positions;
the states of the parts are put together in their order, in one chunk or by a second kernel: with the same result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from aioengine.kernels.native.kernels.attention import LOWEST, SEGMENT, ZERO, find_keys, make_read_int8, shape_scores
from aioengine.kernels.native.kernels.attention_sizes import MAX_GROUP, MAX_HEAD_DIM, MAX_STATES, PART
from aioengine.kernels.native.kernels.compiler import inlined, kernel
from aioengine.kernels.native.kernels.functions import exp
from aioengine.kernels.native.kernels.linear import DTYPES, KINDS, Kind
from aioengine.kernels.native.kernels.simd import (
    F16,
    F32,
    FLOAT32,
    I16,
    I32,
    I64,
    LANES,
    Memory,
    call,
    f32x16,
    get_f32,
    get_i32,
    get_i64,
    instruction,
    lane_bytes,
    load,
    pointer,
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


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def fetch(b: Any, address: Any) -> None:
    flags = (ir.Constant(I32, flag) for flag in (0, 2, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, ir.IntType(8).as_pointer()), *flags)


def summed(b: Any, vectors: list[Any]) -> Any:
    """16 vectors' sums in the lanes of one: the halves are added, then their halves, as `sum_of` adds them."""
    lanes = LANES
    while lanes > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        begins = range(0, 2 * LANES, lanes)
        low, high = (
            ir.Constant(ir.VectorType(I32, LANES), [at + half + n for at in begins for n in range(lanes // 2)])
            for half in (0, lanes // 2)
        )
        vectors = [b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs]
        lanes //= 2
    return vectors[0]


def make_products(kind: Kind, heads: int) -> Any:
    """A function that multiplies 1, 2 or 4 queries with 16 / heads keys each.

    Args:
        q: the queries' words, ``q_stride`` bytes apart.
        k, offsets: a key is at k + offsets[n].
        to: float32 [heads, SEGMENT], of which the first columns are written.
        ahead: what is at the same offsets from here is brought into the cache.
    """
    num_keys = LANES // heads
    vector, name = ir.VectorType(kind.scalar, LANES), {F32: "v16f32", I32: "v16i32", F16: "v16f16"}[kind.scalar]

    @instruction(types.none, *[types.int64] * 7)
    def products(b: Any, q: Any, q_stride: Any, k: Any, offsets: Any, num_words: Any, to: Any, ahead: Any) -> None:
        places = [(head, key) for head in range(heads) for key in range(num_keys)]
        held = {place: cgutils.alloca_once_value(b, ir.Constant(kind.sums.llvm, None)) for place in places}
        for place in places:
            b.store(ir.Constant(kind.sums.llvm, None), held[place])
        queries = [b.add(q, b.mul(q_stride, number(head))) for head in range(heads)]
        places_of_keys = [load(b, b.add(offsets, number(8 * key)), I64) for key in range(num_keys)]
        keys, later = ([b.add(base, place) for place in places_of_keys] for base in (k, ahead))

        def add(offset: Any, read: Any) -> None:
            words = [read(b.add(query, offset)) for query in queries]
            for key, start in enumerate(keys):
                of_key = read(b.add(start, offset))
                for head, of_query in enumerate(words):
                    b.store(kind.dot(b, b.load(held[head, key]), of_query, of_key), held[head, key])

        vector_bytes = number(kind.word_bytes * LANES)
        num_vectors = b.lshr(num_words, number(4))
        with cgutils.for_range(b, num_vectors, intp=I64) as loop:
            offset = b.mul(loop.index, vector_bytes)
            add(offset, lambda at: load(b, at, vector))
            for start in later:
                fetch(b, b.add(start, offset))
        left = b.and_(num_words, number(15))
        with b.if_then(b.icmp_signed(">", left, number(0))):
            lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
            some = b.icmp_signed("<", lanes, splatted(b, left, lanes.type))
            nothing, align = ir.Constant(vector, None), ir.Constant(I32, 1)

            def read_some(at: Any) -> Any:
                where = pointer(b, at, vector)
                return call(b, f"llvm.masked.load.{name}.p0", vector, where, align, some, nothing)

            add(b.mul(num_vectors, vector_bytes), read_some)
        sums = summed(b, [b.load(held[place]) for place in places])
        for head in range(heads):
            chosen = ir.Constant(ir.VectorType(I32, num_keys), list(range(head * num_keys, head * num_keys + num_keys)))
            store(b, b.add(to, number(4 * SEGMENT * head)), b.shuffle_vector(sums, sums, chosen), 4)

    return products


def make_weighted_sum(lane: ir.Type, heads: int, vectors: int) -> Any:
    """A function that makes sums · factor + Σ weight · value of sums.

    Args:
        weights: float32, of 1, 2 or 4 queries, `SEGMENT` apart.
        v, offsets: a value is at v + offsets[n].
        factors: float32, a query's in each line of 64 bytes.
        sums: float32, a query's ``sums_stride`` bytes apart; of each 1 or 4 vectors are changed.
        width: how many numbers there are in the last vector; what is behind is not read.
        ahead, later: what is at ahead + later[n] is brought into the cache.
    """
    narrow = ir.VectorType(lane, LANES)
    suffix = {I16: "i16", F16: "f16", F32: "f32"}[lane]

    @instruction(types.none, *[types.int64] * 10)
    def weighted_sum(
        b: Any,
        weights: Any,
        v: Any,
        offsets: Any,
        num_keys: Any,
        factors: Any,
        sums: Any,
        stride: Any,
        width: Any,
        ahead: Any,
        later: Any,
    ) -> None:
        places = [(head, nth) for head in range(heads) for nth in range(vectors)]
        at = {(head, nth): b.add(sums, b.add(b.mul(stride, number(head)), number(64 * nth))) for head, nth in places}
        held = {place: cgutils.alloca_once(b, f32x16.llvm) for place in places}
        for head in range(heads):
            factor = splatted(b, load(b, b.add(factors, number(64 * head)), F32), f32x16.llvm)
            for nth in range(vectors):
                b.store(b.fmul(factor, load(b, at[head, nth], f32x16.llvm)), held[head, nth])
        lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        some = b.icmp_signed("<", lanes, splatted(b, width, lanes.type))

        def read(where: Any) -> Any:
            if vectors > 1:
                found = load(b, where, narrow)
            else:
                there, align, nothing = pointer(b, where, narrow), ir.Constant(I32, 1), ir.Constant(narrow, None)
                found = call(b, f"llvm.masked.load.v16{suffix}.p0", narrow, there, align, some, nothing)
            return to_wide(b, found)

        with cgutils.for_range(b, num_keys, intp=I64) as loop:
            start = b.add(v, load(b, b.add(offsets, b.mul(loop.index, number(8))), I64))
            fetched = b.add(ahead, load(b, b.add(later, b.mul(loop.index, number(8))), I64))
            for line in range(0, lane_bytes(lane) * LANES * vectors, 64):
                fetch(b, b.add(fetched, number(line)))
            values = [read(b.add(start, number(lane_bytes(lane) * LANES * nth))) for nth in range(vectors)]
            for head in range(heads):
                place = b.add(weights, b.add(b.mul(loop.index, number(4)), number(4 * SEGMENT * head)))
                weight = splatted(b, load(b, place, F32), f32x16.llvm)
                for nth, value in enumerate(values):
                    total = call(b, "llvm.fma.v16f32", f32x16.llvm, weight, value, b.load(held[head, nth]))
                    b.store(total, held[head, nth])
        for place in places:
            store(b, at[place], b.load(held[place]), 64)

    return weighted_sum


# A state: the sums, padded to whole vectors, then a vector with the highest score, and one with the weights' sum.


@inlined
def clear_state(state, padded_dim):
    for n in range(0, padded_dim, LANES):
        write_f32(state + 4 * n, zeros())
    put_f32(state + 4 * padded_dim, LOWEST)
    put_f32(state + 4 * padded_dim + 64, ZERO)


@inlined
def merge_states(total, part, padded_dim):
    """Put a later part's state to the total."""
    at, weight_at = 4 * padded_dim, 4 * padded_dim + 64
    highest = max(get_f32(total + at), get_f32(part + at))
    old = exp(splat(get_f32(total + at) - highest))
    new = exp(splat(get_f32(part + at) - highest))
    for n in range(0, padded_dim, LANES):
        write_f32(total + 4 * n, read_f32(total + 4 * n) * old + read_f32(part + 4 * n) * new)
    weight = splat(get_f32(total + weight_at)) * old + splat(get_f32(part + weight_at)) * new
    write_f32(total + weight_at, weight)
    put_f32(total + at, highest)


def make_finish(memory: Memory) -> Any:
    store_some, size = memory.store_some, memory.size

    @inlined
    def finish(out, state, head_dim, padded_dim):
        """What a state of all keys gives: its sums by the weights' sum."""
        weight = splat(get_f32(state + 4 * padded_dim + 64))
        for n in range(0, head_dim, LANES):
            store_some(out + n * size, read_f32(state + 4 * n) / weight, head_dim - n)

    return finish


def make_attend_decode(kind: Kind, lane: ir.Type, memory: Memory) -> Any:
    """A chunk is a query token, some KV heads and, with ``num_splits`` above 1, every so many-th part of the context,
    whose states it leaves to `combine`.

    Arguments: q, k_cache, v_cache, block_tables, their width, decodes, out; heads, KV heads, head_dim, words of a head,
    block_size; scale, window, soft_cap (0: none); KV heads a chunk; splits, states (float32 [decodes, parts, heads,
    padded_dim + 32]), parts; whether the caches are int8, bytes of a KV head in them.
    """
    products_1, products_2, products_4 = (make_products(kind, heads) for heads in (1, 2, 4))
    wide_1, wide_2, wide_4 = (make_weighted_sum(lane, heads, 4) for heads in (1, 2, 4))
    narrow_1, narrow_2, narrow_4 = (make_weighted_sum(lane, heads, 1) for heads in (1, 2, 4))
    finish, size = make_finish(memory), memory.size
    room_for_offsets, room_for_scores, room_for_factors = (
        stack(16 * SEGMENT),
        stack(4 * SEGMENT * MAX_GROUP),
        stack(64 * MAX_GROUP),
    )
    room_for_total, room_for_part = stack(4 * MAX_STATES), stack(4 * MAX_STATES)
    read_int8, room_for_lines, room_for_places, room_for_scales = (
        make_read_int8(memory), stack(size * SEGMENT * MAX_HEAD_DIM), stack(8 * SEGMENT), stack(8 * SEGMENT),
    )  # fmt: skip

    @inlined
    def attend_segment(
        q, k, v, offsets, begin, end, ahead, later, scores, factors, state, stride,
        group, head_dim, num_words, scale, soft_cap, lines, places, scales,
    ):  # fmt: skip
        """A segment's keys and values for the query heads of a group.

        Args:
            scales: float32 [2, SEGMENT], room for keys' and values' of an int8 cache; 0: it is none.
            lines, places: room for what is read of it, and int64 [SEGMENT], where it is in there.
        """
        head, head_bytes, value_scales = 0, head_dim * size, scales + 4 * SEGMENT
        int8_values, int8_offsets = v, offsets
        if scales:
            read_int8(k, offsets, begin, end, head_dim, lines, scales, v, offsets)
            k, v, offsets = lines, lines, places
        while head < group:
            heads = 4 if group - head >= 4 else (2 if group - head >= 2 else 1)
            keys = LANES // heads
            queries, to = q + head * head_bytes, scores + 4 * SEGMENT * head
            for n in range(begin // keys * keys, end, keys):
                if heads == 4:
                    products_4(queries, head_bytes, k, offsets + 8 * n, num_words, to + 4 * n, v)
                elif heads == 2:
                    products_2(queries, head_bytes, k, offsets + 8 * n, num_words, to + 4 * n, v)
                else:
                    products_1(queries, head_bytes, k, offsets + 8 * n, num_words, to + 4 * n, v)
            head += heads
        if scales:
            read_int8(int8_values, int8_offsets, begin, end, head_dim, lines, value_scales, ahead, later)
            ahead, later = lines, places
        padded_dim = (head_dim + 15) // 16 * 16
        for head in range(group):
            row, of_head = scores + 4 * SEGMENT * head, state + head * stride + 4 * padded_dim
            before = get_f32(of_head)
            highest = max(before, shape_scores(row, scales, scale, soft_cap, begin, end))
            factor = exp(splat(before - highest))
            weights = zeros()
            for n in range(0, SEGMENT, LANES):
                weight = exp(read_f32(row + 4 * n) - splat(highest))
                weights = weights + weight
                if scales:
                    weight = weight * read_f32(value_scales + 4 * n)
                write_f32(row + 4 * n, weight)
            write_f32(factors + 64 * head, factor)
            put_f32(of_head, highest)
            write_f32(of_head + 64, splat(get_f32(of_head + 64)) * factor + splat(sum_of(weights)))
        head = 0
        first, offsets, later, num_keys = 4 * begin, offsets + 8 * begin, later + 8 * begin, end - begin
        while head < group:
            heads = 4 if group - head >= 4 else (2 if group - head >= 2 else 1)
            weights, by, to = scores + 4 * SEGMENT * head + first, factors + 64 * head, state + head * stride
            n = 0
            while n + 64 <= head_dim:
                if heads == 4:
                    wide_4(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, 16, ahead + n * size, later
                    )
                elif heads == 2:
                    wide_2(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, 16, ahead + n * size, later
                    )
                else:
                    wide_1(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, 16, ahead + n * size, later
                    )
                n += 64
            while n < head_dim:
                width = head_dim - n
                if heads == 4:
                    narrow_4(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, width, ahead + n * size, later
                    )
                elif heads == 2:
                    narrow_2(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, width, ahead + n * size, later
                    )
                else:
                    narrow_1(
                        weights, v + n * size, offsets, num_keys, by, to + 4 * n, stride, width, ahead + n * size, later
                    )
                n += 16
            head += heads

    def attend_decode(args, chunk, thread):
        num_heads, num_kv_heads, head_dim = get_i64(args + 56), get_i64(args + 64), get_i64(args + 72)
        num_words, block_size = get_i64(args + 80), get_i64(args + 88)
        scale, window, soft_cap = get_f32(args + 96), get_i64(args + 104), get_f32(args + 112)
        kv_heads_a_chunk, num_splits = get_i64(args + 120), get_i64(args + 128)
        num_slices = (num_kv_heads + kv_heads_a_chunk - 1) // kv_heads_a_chunk
        split, rest = chunk % num_splits, chunk // num_splits
        first_kv_head, nth = rest % num_slices * kv_heads_a_chunk, rest // num_slices
        end_kv_head = min(first_kv_head + kv_heads_a_chunk, num_kv_heads)
        decode = get_i64(args + 40) + 12 * nth
        row, token, context = get_i32(decode), get_i32(decode + 4), get_i32(decode + 8)
        group, head_bytes = num_heads // num_kv_heads, head_dim * size
        first_head, end_head = first_kv_head * group, end_kv_head * group
        q, out = get_i64(args) + token * num_heads * head_bytes, get_i64(args + 48) + token * num_heads * head_bytes
        padded_dim = (head_dim + 15) // 16 * 16
        stride = 4 * padded_dim + 128
        total, part_state = room_for_total(), room_for_part()
        for head in range(end_head - first_head):
            clear_state(total + head * stride, padded_dim)
        if row < 0:
            context = 0
            for head in range(end_head - first_head):
                put_f32(total + head * stride + 4 * padded_dim + 64, np.float32(1))
        table = get_i64(args + 24) + 4 * row * get_i64(args + 32)
        offsets, scores, factors = room_for_offsets(), room_for_scores(), room_for_factors()
        k_cache, v_cache, line_bytes = get_i64(args + 8), get_i64(args + 16), get_i64(args + 160)
        lines, places, scales = room_for_lines(), room_for_places(), 0
        if get_i64(args + 152):
            scales = room_for_scales()
            for n in range(SEGMENT):
                put_i64(places + 8 * n, n * padded_dim * size)
        first, num_segments = max(0, context - window), (context + SEGMENT - 1) // SEGMENT
        for part in range(first // PART, (context + PART - 1) // PART):
            if num_splits > 1:
                if part % num_splits != split:
                    continue
                part_state = (
                    get_i64(args + 136) + ((nth * get_i64(args + 144) + part) * num_heads + first_head) * stride
                )
            for head in range(end_head - first_head):
                clear_state(part_state + head * stride, padded_dim)
            first_segment = max(part * (PART // SEGMENT), first // SEGMENT)
            end_segment = min((part + 1) * (PART // SEGMENT), num_segments)
            for segment in range(first_segment, end_segment):
                begin, end = max(0, first - segment * SEGMENT), min(SEGMENT, context - segment * SEGMENT)
                here, later = offsets + segment % 2 * 8 * SEGMENT, offsets + (segment + 1) % 2 * 8 * SEGMENT
                if segment == first_segment:
                    find_keys(here, table, block_size, num_kv_heads * line_bytes, segment, begin, end)
                if segment + 1 < num_segments:
                    end_later = min(SEGMENT, context - (segment + 1) * SEGMENT)
                    find_keys(later, table, block_size, num_kv_heads * line_bytes, segment + 1, 0, end_later)
                else:
                    later = here
                for kv_head in range(first_kv_head, end_kv_head):
                    is_last = kv_head + 1 == end_kv_head
                    next_head, list_of_next = (first_kv_head, later) if is_last else (kv_head + 1, here)
                    attend_segment(
                        q + kv_head * group * head_bytes,
                        k_cache + kv_head * line_bytes, v_cache + kv_head * line_bytes, here, begin, end,
                        k_cache + next_head * line_bytes, list_of_next,
                        scores, factors, part_state + (kv_head - first_kv_head) * group * stride, stride,
                        group, head_dim, num_words, scale, soft_cap, lines, places, scales,
                    )  # fmt: skip
            if num_splits == 1:
                for head in range(end_head - first_head):
                    merge_states(total + head * stride, part_state + head * stride, padded_dim)
        if num_splits == 1:
            for head in range(first_head, end_head):
                finish(out + head * head_bytes, total + (head - first_head) * stride, head_dim, padded_dim)

    return attend_decode


def make_combine(memory: Memory) -> Any:
    """The states of a query token's parts together; a chunk is a token.

    Arguments: states, parts; decodes, out; heads, head_dim, window.
    """
    finish, size = make_finish(memory), memory.size
    room = stack(4 * MAX_STATES)

    def combine(args, chunk, thread):
        states, num_parts = get_i64(args), get_i64(args + 8)
        decode, num_heads, head_dim = get_i64(args + 16) + 12 * chunk, get_i64(args + 32), get_i64(args + 40)
        row, token, context = get_i32(decode), get_i32(decode + 4), get_i32(decode + 8)
        out = get_i64(args + 24) + token * num_heads * head_dim * size
        padded_dim = (head_dim + 15) // 16 * 16
        stride = 4 * padded_dim + 128
        total = room()
        first = max(0, context - get_i64(args + 48))
        if row < 0:
            context = 0
        for head in range(num_heads):
            clear_state(total, padded_dim)
            if row < 0:
                put_f32(total + 4 * padded_dim + 64, np.float32(1))
            for part in range(first // PART, (context + PART - 1) // PART):
                merge_states(total, states + ((chunk * num_parts + part) * num_heads + head) * stride, padded_dim)
            finish(out + head * head_dim * size, total, head_dim, padded_dim)

    return combine


for _name, _lane in (("float32", F32), ("bfloat16", I16), ("float16", F16)):
    kernel(name=f"attend_decode_{_name}")(make_attend_decode(KINDS[_name], _lane, DTYPES[_name]))
    kernel(name=f"combine_{_name}")(make_combine(DTYPES[_name]))
