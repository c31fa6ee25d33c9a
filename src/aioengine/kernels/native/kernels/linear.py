"""Products of activations and packed weights.

A weight [N, K] lies in panels of 64 outputs. The inputs of a panel come one after the other by *words*, and of each
word those of the 64 outputs side by side: [N / 64][words][64]. A word is one float32, two bfloat16, four int8 or one
float16, so that one load brings the words of 16 outputs, and one broadcast brings an activation's word to all of them.
Each output is summed in the order of its inputs, whatever the number of rows and threads.

Of int4 a word is the byte of two inputs, the first in its lower half, each plus 8. It is looked up as two bfloat16; the
sums of a group of inputs are scaled and added to the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from aioengine.kernels.native.kernels.compiler import inlined, kernel
from aioengine.kernels.native.kernels.simd import (
    BF16,
    BFLOAT16,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    HAS_DOT_INT8,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Memory,
    absolute,
    call,
    constant,
    f32x16,
    fma,
    get_f32,
    get_i16,
    get_i32,
    get_i64,
    i32x16,
    instruction,
    load,
    load_i32,
    look_up,
    max_of,
    maximum,
    prefetch_line,
    put_f32,
    put_i16,
    put_i32,
    round_even,
    shift_left,
    splat,
    splat_i32,
    splatted,
    stack,
    store,
    store_bytes,
    sum_of,
    to_float,
    to_int,
    to_wide,
    zeros,
)

PANEL = 64
VECTORS = PANEL // LANES
TILE_ROWS = 6
"""Rows whose sums stay in registers: 6 × 4 of the 32, with 4 for weights and 1 for an activation."""


class Kind(NamedTuple):
    """What a word is.

    Attributes:
        word_bytes: of one output of the weight. x_bytes: of an activation's word.
        sums: vector type of sums.
        load: emits 16 words of a weight, of the LLVM type that ``dot`` takes.
        scalar: LLVM type of an activation's word.
        dot: emits sums + word · words.
    """

    word_bytes: int
    x_bytes: int
    sums: Any
    load: Any
    scalar: Any
    dot: Any


def _dot_float32(b: Any, sums: Any, x: Any, w: Any) -> Any:
    return call(b, "llvm.fma.v16f32", f32x16.llvm, x, w, sums)


def _dot_float16(b: Any, sums: Any, x: Any, w: Any) -> Any:
    return call(b, "llvm.fma.v16f32", f32x16.llvm, *(b.fpext(v, f32x16.llvm) for v in (x, w)), sums)


def _dot_bfloat16(b: Any, sums: Any, x: Any, w: Any) -> Any:
    """The pairs' products, and their sum, as ``vdpbf16ps`` adds them, or the second product after the first."""
    if HAS_DOT_BF16:
        pairs = ir.VectorType(BF16, 2 * LANES)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, sums, b.bitcast(x, pairs), b.bitcast(w, pairs))
    upper = constant(i32x16, -65536)
    sixteen = constant(i32x16, 16)
    for half in (lambda v: b.shl(v, sixteen), lambda v: b.and_(v, upper)):
        sums = _dot_float32(b, sums, *(b.bitcast(half(v), f32x16.llvm) for v in (x, w)))
    return sums


def _dot_int8(b: Any, sums: Any, x: Any, w: Any) -> Any:
    """Four products of an unsigned and a signed byte, and their exact sum."""
    if HAS_DOT_INT8:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, sums, x, w)
    for byte in range(4):
        left, down = constant(i32x16, 24 - 8 * byte), constant(i32x16, 24)
        sums = b.add(sums, b.mul(b.lshr(b.shl(x, left), down), b.ashr(b.shl(w, left), down)))
    return sums


def _loaded(vector: Any) -> Any:
    return lambda b, address: load(b, address, vector)


def _load_int4(b: Any, address: Any) -> Any:
    """The pairs of bytes' halves as pairs of bfloat16."""
    pairs = b.zext(load(b, address, ir.VectorType(I8, LANES)), i32x16.llvm)
    words = None
    for half, shift in ((pairs, 0), (b.lshr(pairs, constant(i32x16, 4)), 16)):
        bits = [int(np.float32(value - 8).view(np.uint32)) >> 16 << shift for value in range(16)]
        index = b.and_(half, constant(i32x16, 15))
        found = look_up(b, ir.Constant(i32x16.llvm, bits), index)
        words = found if words is None else b.or_(words, found)
    return words


KINDS = {
    "float32": Kind(4, 4, f32x16, _loaded(f32x16.llvm), F32, _dot_float32),
    "bfloat16": Kind(4, 4, f32x16, _loaded(i32x16.llvm), I32, _dot_bfloat16),
    "float16": Kind(2, 2, f32x16, _loaded(ir.VectorType(F16, LANES)), F16, _dot_float16),
    "int8": Kind(4, 4, i32x16, _loaded(i32x16.llvm), I32, _dot_int8),
    "int4": Kind(1, 4, f32x16, _load_int4, I32, _dot_bfloat16),
}
INT4_GROUP_WORDS = 32
AHEAD_BYTES = 8192


def make_tile(kind: Kind, rows: int) -> Any:
    """A function of (x, x_stride, w, num_words, sums, scales, ahead) that sets sums [rows, 64] to a panel's
    products.

    With scales, bfloat16 [64] at an address, it adds the scaled products to the sums instead. As much as it reads of
    the weight it brings from the address ``ahead``, unless that is 0, into the second-level cache.
    """
    word = kind.word_bytes

    @instruction(types.none, *[types.int64] * 7)
    def tile(b: Any, x: Any, x_stride: Any, w: Any, num_words: Any, sums: Any, scales: Any, ahead: Any) -> None:
        def number(value: int) -> Any:
            return ir.Constant(I64, value)

        places = [(row, v) for row in range(rows) for v in range(VECTORS)]
        held = {place: cgutils.alloca_once(b, kind.sums.llvm) for place in places}
        for place in places:
            b.store(ir.Constant(kind.sums.llvm, None), held[place])
        starts = [b.add(x, b.mul(x_stride, number(row))) for row in range(rows)]
        with cgutils.for_range(b, num_words, intp=I64) as loop:
            offset = b.mul(loop.index, number(word * PANEL))
            at = b.add(w, offset)
            if rows > 1:  # one row's loads are far enough ahead of its few products
                with b.if_then(b.icmp_signed("!=", ahead, number(0))):
                    for line in range(0, word * PANEL, 64):
                        prefetch_line(b, b.add(b.add(ahead, offset), number(line)))
            weights = [kind.load(b, b.add(at, number(word * LANES * v))) for v in range(VECTORS)]
            for row in range(rows):
                one = load(b, b.add(starts[row], b.mul(loop.index, number(kind.x_bytes))), kind.scalar)
                every = splatted(b, one, ir.VectorType(kind.scalar, LANES))
                for v, weight in enumerate(weights):
                    b.store(kind.dot(b, b.load(held[row, v]), every, weight), held[row, v])
        for row, v in places:
            at, found = b.add(sums, number(4 * (PANEL * row + LANES * v))), b.load(held[row, v])
            if kind.word_bytes == 1:
                scale = load(b, b.add(scales, number(2 * LANES * v)), ir.VectorType(I16, LANES))
                before = load(b, at, f32x16.llvm, 64)
                found = _dot_float32(b, before, found, to_wide(b, scale))
            store(b, at, found, 64)

    return tile


def make_panel(kind: Kind) -> Any:
    """A function of (x, x_stride, w, num_words, sums, rows, scales, ahead): the tile of 1 to 6 rows."""
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (make_tile(kind, rows) for rows in range(1, TILE_ROWS + 1))

    @inlined
    def panel(x: int, x_stride: int, w: int, num_words: int, sums: int, rows: int, scales: int, ahead: int) -> None:
        if rows == 6:
            tile_6(x, x_stride, w, num_words, sums, scales, ahead)
        elif rows == 5:
            tile_5(x, x_stride, w, num_words, sums, scales, ahead)
        elif rows == 4:
            tile_4(x, x_stride, w, num_words, sums, scales, ahead)
        elif rows == 3:
            tile_3(x, x_stride, w, num_words, sums, scales, ahead)
        elif rows == 2:
            tile_2(x, x_stride, w, num_words, sums, scales, ahead)
        else:
            tile_1(x, x_stride, w, num_words, sums, scales, ahead)

    return panel


@inlined
def num_groups_of(num_words: int) -> int:
    """Groups of an int4 output."""
    return (num_words + INT4_GROUP_WORDS - 1) // INT4_GROUP_WORDS


def make_linear(kind: Kind, memory: Memory, of_bias: Memory) -> Any:
    """A product; a chunk is a panel and a block of rows, panels first, so that a block of activations stays in cache.

    Arguments: x, its rows' stride in bytes; the weight, its words; the result, its rows' stride in bytes; the bias or
    0; rows, outputs, rows a chunk, panels; of int8: scales of rows (float32 [rows]), scales of outputs, and sums of
    the outputs' weights (float32, int32 [panels · 64]); of int4: scales (bfloat16 [panels, groups, 64]) in place of
    those of rows; last, in how many panels the thread probably has its next one.
    """
    panel_of, word = make_panel(kind), kind.word_bytes
    room = stack(4 * PANEL * TILE_ROWS)
    load_bias, bias_size = of_bias.load_some, of_bias.size
    store_some, size = memory.store_some, memory.size
    load_sums = FLOAT32.load
    store_sums = FLOAT32.store
    is_int8, is_int4 = kind is KINDS["int8"], kind is KINDS["int4"]

    def linear(args: int, chunk: int, thread: int) -> None:
        x, x_stride = get_i64(args), get_i64(args + 8)
        num_words = get_i64(args + 24)
        out_stride = get_i64(args + 40)
        bias = get_i64(args + 48)
        num_rows, num_outputs = get_i64(args + 56), get_i64(args + 64)
        rows_a_chunk, num_panels = get_i64(args + 72), get_i64(args + 80)
        panel, first_row = chunk % num_panels, chunk // num_panels * rows_a_chunk
        end_row = min(first_row + rows_a_chunk, num_rows)
        first = panel * PANEL
        w = get_i64(args + 16) + first * num_words * word
        # A single tile waits for memory: it asks for what it reads soon. Others have time to ask for the next panel.
        is_single = end_row - first_row <= TILE_ROWS
        ahead = w + (AHEAD_BYTES if is_single else get_i64(args + 112) * PANEL * num_words * word)
        scales = get_i64(args + 88) + first * num_groups_of(num_words) * 2
        sums = room()
        for row in range(first_row, end_row, TILE_ROWS):
            rows = min(TILE_ROWS, end_row - row)
            if is_int4:
                for vector in range(rows * VECTORS):
                    store_sums(sums + vector * LANES * 4, zeros())
                for group in range(num_groups_of(num_words)):
                    word_at = group * INT4_GROUP_WORDS
                    panel_of(
                        x + row * x_stride + word_at * 4,
                        x_stride,
                        w + word_at * PANEL,
                        min(INT4_GROUP_WORDS, num_words - word_at),
                        sums,
                        rows,
                        scales + group * PANEL * 2,
                        ahead + word_at * PANEL,
                    )
            else:
                panel_of(x + row * x_stride, x_stride, w, num_words, sums, rows, 0, ahead)
            for nth in range(rows):
                to = get_i64(args + 32) + (row + nth) * out_stride + first * size
                for v in range(VECTORS):
                    count = num_outputs - first - v * LANES
                    at = first + v * LANES
                    if is_int8:
                        wholes = load_i32(sums + (nth * PANEL + v * LANES) * 4)
                        wholes = wholes - shift_left(load_i32(get_i64(args + 104) + at * 4), 7)
                        scale = splat(get_f32(get_i64(args + 88) + (row + nth) * 4))
                        y = to_float(wholes) * scale * load_sums(get_i64(args + 96) + at * 4)
                    else:
                        y = load_sums(sums + (nth * PANEL + v * LANES) * 4)
                    if bias:
                        y = y + load_bias(bias + at * bias_size, count)
                    store_some(to + v * LANES * size, y, count)

    return linear


DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

for _name, _memory in DTYPES.items():
    for _out in sorted({_name, "float32"}):
        kernel(name=f"linear_{_name}_{_out}")(make_linear(KINDS[_name], DTYPES[_out], _memory))
        kernel(name=f"linear_int8_{_name}_{_out}")(make_linear(KINDS["int8"], DTYPES[_out], _memory))
for _out in ("bfloat16", "float32"):
    kernel(name=f"linear_int4_bfloat16_{_out}")(make_linear(KINDS["int4"], DTYPES[_out], BFLOAT16))


def make_embed(word: int) -> Any:
    """Rows of a packed weight: a chunk is one. Arguments: ids (int32); the weight, its words; the result."""
    get, put = (get_i32, put_i32) if word == 4 else (get_i16, put_i16)

    def embed(args: int, chunk: int, thread: int) -> None:
        output, num_words = get_i32(get_i64(args) + chunk * 4), get_i64(args + 16)
        panel, place = output // PANEL, output % PANEL
        at = get_i64(args + 8) + (panel * num_words * PANEL + place) * word
        to = get_i64(args + 24) + chunk * num_words * word
        for nth in range(num_words):
            put(to + nth * word, get(at + nth * PANEL * word))

    return embed


kernel(name="embed_4")(make_embed(4))
kernel(name="embed_2")(make_embed(2))


def make_embed_int8(memory: Memory) -> Any:
    """Rows of an int8 weight, times their scales: a chunk is one. Arguments: ids (int32); the weight, its words; scales
    (float32); the result.
    """
    store_some, size = memory.store_some, memory.size
    room = stack(LANES * 4)

    def embed(args: int, chunk: int, thread: int) -> None:
        output, num_words = get_i32(get_i64(args) + chunk * 4), get_i64(args + 16)
        panel, place = output // PANEL, output % PANEL
        at = get_i64(args + 8) + (panel * num_words * PANEL + place) * 4
        scale = splat(get_f32(get_i64(args + 24) + output * 4))
        to, numbers = get_i64(args + 32) + chunk * num_words * 4 * size, room()
        for first in range(0, num_words, LANES // 4):
            for nth in range(min(LANES // 4, num_words - first)):
                word = get_i32(at + (first + nth) * PANEL * 4)
                for byte in range(4):
                    put_i32(numbers + (nth * 4 + byte) * 4, ((word >> (8 * byte) & 255) ^ 128) - 128)
            store_some(to + first * 4 * size, to_float(load_i32(numbers)) * scale, (num_words - first) * 4)

    return embed


def make_quantize(memory: Memory) -> Any:
    """Rows to unsigned bytes, round(x / scale) + 128 with scale = max|x| / 127; a chunk is a row.

    Arguments: x, its rows' stride in bytes; numbers a row; bytes, their rows' stride; scales (float32).
    """
    load_some, size = memory.load_some, memory.size

    def quantize(args: int, chunk: int, thread: int) -> None:
        x, width = get_i64(args) + chunk * get_i64(args + 8), get_i64(args + 16)
        to = get_i64(args + 24) + chunk * get_i64(args + 32)
        largest, nothing = zeros(), zeros()
        for at in range(0, width, LANES):
            x_here = load_some(x + at * size, width - at)
            largest = maximum(largest, absolute(x_here))
            nothing = fma(x_here, zeros(), nothing)  # NaN, if a number is NaN or infinite: maxima pass over NaN
        highest = max_of(largest)
        put_f32(get_i64(args + 40) + chunk * 4, highest / types.float32(127) + sum_of(nothing))
        factor = splat(types.float32(127) / highest if highest > types.float32(0) else types.float32(0))
        for at in range(0, width, LANES):
            y = round_even(load_some(x + at * size, width - at) * factor)
            store_bytes(to + at, to_int(y) + splat_i32(128))

    return quantize


for _name, _memory in DTYPES.items():
    kernel(name=f"quantize_{_name}")(make_quantize(_memory))
    kernel(name=f"embed_int8_{_name}")(make_embed_int8(_memory))
