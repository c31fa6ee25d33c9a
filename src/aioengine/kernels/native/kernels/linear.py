"""Products of activations and packed weights.

A weight [N, K] lies in panels of 64 outputs. In a panel the inputs come one after the other by *words* of 4 bytes (one
float32, two bfloat16 or four int8), and of each word those of the 64 outputs side by side: [N / 64][words][64], so that
one load brings the words of 16 outputs and one broadcast an activation's word for all. Each output is summed in the
order of its inputs, however many rows and threads there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from aioengine.kernels.native.kernels.compiler import kernel
from aioengine.kernels.native.kernels.simd import (
    BF16,
    BFLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    I32,
    I64,
    LANES,
    Memory,
    call,
    constant,
    f32x16,
    first_lanes,
    get_i64,
    i32x16,
    instruction,
    load,
    splatted,
    stack,
    store,
    zeros,
)

PANEL = 64
TILE_ROWS = 6
"""Rows whose sums stay in registers: 6 × 4 vectors of 16."""


def dot_words(b: Any, kind: str, sums: Any, x: Any, w: Any) -> Any:
    """``sums`` plus the products of the words of ``x`` and ``w``, i32x16 each, by lane."""
    if kind == "float32":
        return call(b, "llvm.fma.v16f32", f32x16.llvm, b.bitcast(x, f32x16.llvm), b.bitcast(w, f32x16.llvm), sums)
    if kind == "bfloat16":
        if HAS_DOT_BF16:
            pairs = ir.VectorType(BF16, 2 * LANES)
            return call(
                b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, sums, b.bitcast(x, pairs), b.bitcast(w, pairs)
            )
        sixteen, mask = (constant(i32x16, value) for value in (16, -65536))
        for half in (lambda v: b.shl(v, sixteen), lambda v: b.and_(v, mask)):
            high, low = (b.bitcast(half(v), f32x16.llvm) for v in (x, w))
            sums = call(b, "llvm.fma.v16f32", f32x16.llvm, high, low, sums)
        return sums
    return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, sums, x, w)


def make_tile(kind: str, rows: int) -> Any:
    """tile(x, x_stride, w, num_words, sums): add to sums [rows, 64] the products of a panel's words."""
    vector = i32x16.llvm if kind == "int8" else f32x16.llvm
    size = i32x16.llvm

    @instruction(types.none, *[types.int64] * 5)
    def tile(b: Any, x: Any, x_stride: Any, w: Any, num_words: Any, sums: Any) -> None:
        def int64(value: int) -> ir.Constant:
            return ir.Constant(I64, value)

        places = [(row, v) for row in range(rows) for v in range(PANEL // LANES)]
        where = {p: b.add(sums, int64(4 * (PANEL * p[0] + LANES * p[1]))) for p in places}
        held = {p: cgutils.alloca_once(b, vector) for p in places}
        for p in places:
            b.store(load(b, where[p], vector, 64), held[p])
        starts = [b.add(x, b.mul(x_stride, int64(row))) for row in range(rows)]
        with cgutils.for_range(b, num_words, intp=I64) as loop:
            at = b.add(w, b.mul(loop.index, int64(4 * PANEL)))
            weights = [load(b, b.add(at, int64(64 * v)), size) for v in range(PANEL // LANES)]
            for row in range(rows):
                word = load(b, b.add(starts[row], b.mul(loop.index, int64(4))), I32)
                word = splatted(b, word, i32x16.llvm)
                for v, weight in enumerate(weights):
                    b.store(dot_words(b, kind, b.load(held[row, v]), word, weight), held[row, v])
        for p in places:
            store(b, where[p], b.load(held[p]), 64)

    return tile


def make_linear(kind: str, memory: Memory) -> Any:
    t1, t2, t3, t4, t5, t6 = (make_tile(kind, rows) for rows in range(1, TILE_ROWS + 1))
    room = stack(4 * PANEL * TILE_ROWS)
    store_some, size = memory.store_some, memory.size
    load_f, load_s = FLOAT32.load, FLOAT32.store
    load_m = memory.load_some

    def linear(args, chunk, thread):
        x, x_stride = get_i64(args), get_i64(args + 8)
        w, num_words = get_i64(args + 16), get_i64(args + 24)
        out, out_stride = get_i64(args + 32), get_i64(args + 40)
        bias = get_i64(args + 48)
        num_rows, num_outputs = get_i64(args + 56), get_i64(args + 64)
        rows_a_chunk, num_panels = get_i64(args + 72), get_i64(args + 80)
        panel = chunk % num_panels
        first = chunk // num_panels * rows_a_chunk
        end = min(first + rows_a_chunk, num_rows)
        w += panel * num_words * 256
        sums = room()
        for row in range(first, end, 6):
            rows = min(6, end - row)
            for place in range(rows * 4):
                load_s(sums + place * 64, zeros())
            at = x + row * x_stride
            if rows == 6:
                t6(at, x_stride, w, num_words, sums)
            elif rows == 5:
                t5(at, x_stride, w, num_words, sums)
            elif rows == 4:
                t4(at, x_stride, w, num_words, sums)
            elif rows == 3:
                t3(at, x_stride, w, num_words, sums)
            elif rows == 2:
                t2(at, x_stride, w, num_words, sums)
            else:
                t1(at, x_stride, w, num_words, sums)
            for r in range(rows):
                to = out + (row + r) * out_stride + panel * 64 * size
                for v in range(4):
                    lanes = first_lanes(num_outputs - panel * 64 - v * 16)
                    y = load_f(sums + (r * 4 + v) * 64)
                    if bias:
                        y = y + load_m(bias + (panel * 64 + v * 16) * size, lanes)
                    store_some(to + v * 16 * size, y, lanes)

    return linear


kernel(name="linear_bf16")(make_linear("bfloat16", BFLOAT16))
