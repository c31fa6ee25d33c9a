"""Products of activations and packed weights.

A weight [N, K] lies in panels of 64 outputs. The inputs of a panel come one after the other by *words*, and of each
word those of the 64 outputs side by side: [N / 64][words][64]. A word is one float32, two bfloat16, four int8 or one
float16, so that one load brings the words of 16 outputs, and one broadcast brings an activation's word to all of them.
Each output is summed in the order of its inputs, whatever the number of rows and
threads.

Where the processor has no product of words, both sides are widened first, the activations' once for a panel, and a
weight's once for all rows of a chunk where these are many. Where it has but 16 registers of 32 bytes, a block of a
panel is gone through 16 outputs at a time.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.vectors import (
    BF16,
    BFLOAT16,
    F16,
    F32,
    FEATURES,
    FLOAT16,
    FLOAT32,
    HAS_DOT_BF16,
    HAS_DOT_INT8,
    I16,
    I32,
    I64,
    IS_X86,
    LANES,
    REGISTER_LANES,
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
    load_lanes,
    max_of,
    maximum,
    number,
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
    zeros,
)

PANEL = 64
VECTORS = PANEL // LANES
TILE_ROWS = 6
"""Rows whose sums stay in registers, if there are 32 of 64 bytes: 6 × 4 of them, with 4 for weights and 1 for an
activation.
"""

HAS_FEW_REGISTERS = REGISTER_LANES < LANES
TILE_VECTORS = (4, 2, 1, 1, 1, 1) if HAS_FEW_REGISTERS else (VECTORS,) * TILE_ROWS
"""Vectors of a panel whose sums stay in registers, for 1 to 6 rows: there may be but 16 registers of 32 bytes."""

MOST_ROWS = 192

BLOCK_WORDS = 64
"""Words of a panel that stay in the first-level cache, where it is gone through more than once."""

WIDE_WORDS = 32
"""Words of a block of a panel that is widened once for all rows, and stays in the first-level cache."""
WIDE_ROWS = 4 * TILE_ROWS
"""From so many rows on it is. On a core of Zen 1, GFLOP/s at 12, 30 and 128 rows: of bfloat16 27, 29 and 29 without it,
24, 30 and 34 with it."""

GROUP_BYTES = 12
"""Bytes of a group of rows: int32 [3]: its matrix, its first row, and the row behind its last."""

AHEAD_BYTES = 4096
"""How far ahead few rows have a weight fetched. By it two cores of Zen 4 read 3 % more bfloat16 and 8 % more int8, and
those of Zen 1 11 % more bfloat16."""


def no_table(b: Any, address: Any) -> tuple[Any, ...]:
    return ()


class Kind(NamedTuple):
    """A kind of words. They are multiplied as they are, or part by part: a part has another type, and one number, or
    two of int16, for each word.

    Attributes:
        word_bytes: of one output of the weight. x_bytes: of an activation's word.
        sums: vector type of sums.
        scalar: LLVM type of an activation's word.
        words: LLVM type of 16 words of a weight.
        parts, x_parts: what emit each part of 16 words, of a weight and of activations.
        dot_parts: emits sums + part · part, of 16 words each.
        x_places: of parts of activations that are multiplied as they are: where in their word each begins, in bytes.
        table: emits the vectors that parts look up, from an address, for all that follows.
        wide_words: of a block of a panel that is widened at once.
        plane_bytes: from a part of a weight's words to the next, where they have been widened.
    """

    word_bytes: int
    x_bytes: int
    sums: Any
    scalar: Any
    words: ir.VectorType
    parts: tuple[Any, ...]
    x_parts: tuple[Any, ...]
    dot_parts: Any
    x_places: tuple[int, ...] = (0,)
    table: Any = no_table
    wide_words: int = WIDE_WORDS
    plane_bytes: int = 0

    @property
    def widened(self) -> Kind:
        """The kind of a block that `make_widen` has written."""
        parts, plane_bytes = _AS_THEY_ARE * len(self.parts), 4 * PANEL * self.wide_words
        return self._replace(word_bytes=4, words=self.sums.llvm, parts=parts, plane_bytes=plane_bytes)

    @property
    def is_split(self) -> bool:
        """Whether activations are multiplied part by part."""
        return self.x_parts is not _AS_THEY_ARE


def _as_it_is(b: Any, words: Any, *table: Any) -> Any:
    return words


def _as_float32(b: Any, words: Any) -> Any:
    return b.fpext(words, f32x16.llvm)


def _low_bfloat16(b: Any, words: Any) -> Any:
    return b.bitcast(b.shl(words, constant(i32x16, 16)), f32x16.llvm)


def _high_bfloat16(b: Any, words: Any) -> Any:
    return b.bitcast(b.and_(words, constant(i32x16, -65536)), f32x16.llvm)


I16X32 = ir.VectorType(I16, 2 * LANES)


def _bytes_as_int16(shift: str, is_even: bool) -> Any:
    """Bytes 0 and 2 of each word, or 1 and 3, widened by ``shift`` to the right."""

    def emit(b: Any, words: Any) -> Any:
        pairs, eight = b.bitcast(words, I16X32), ir.Constant(I16X32, [8] * I16X32.count)
        return getattr(b, shift)(b.shl(pairs, eight) if is_even else pairs, eight)

    return emit


def _dot_float32(b: Any, sums: Any, x: Any, w: Any) -> Any:
    return call(b, "llvm.fma.v16f32", f32x16.llvm, x, w, sums)


def _dot_bfloat16(b: Any, sums: Any, x: Any, w: Any) -> Any:
    """The pairs' products, and their sum."""
    pairs = ir.VectorType(BF16, 2 * LANES)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, sums, b.bitcast(x, pairs), b.bitcast(w, pairs))


def _by_halves(b: Any, emit: Any, *vectors: Any) -> Any:
    """Apply ``emit``, which takes vectors of 8 words, to vectors of 16."""
    lanes = [ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8))) for first in (0, 8)]
    low, high = (emit(*(b.shuffle_vector(vector, vector, half) for vector in vectors)) for half in lanes)
    return b.shuffle_vector(low, high, ir.Constant(i32x16.llvm, list(range(LANES))))


def _dot_int8(b: Any, sums: Any, x: Any, w: Any) -> Any:
    """Four products of an unsigned and a signed byte, and their exact sum."""
    if FEATURES.get("avx512vnni"):
        return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, sums, x, w)
    return _by_halves(b, lambda *halves: call(b, "llvm.x86.avx512.vpdpbusd.256", halves[0].type, *halves), sums, x, w)


def _dot_int16(b: Any, sums: Any, x: Any, w: Any) -> Any:
    """Two products of int16, and their exact sum: one instruction (``vpmaddwd``) where there is that."""
    wide = ir.VectorType(I32, 2 * LANES)
    products = b.mul(b.sext(b.bitcast(x, I16X32), wide), b.sext(w, wide))
    firsts, seconds = (
        b.shuffle_vector(products, products, ir.Constant(i32x16.llvm, list(range(first, 2 * LANES, 2))))
        for first in (0, 1)
    )
    return _kept_in_order(b, b.add(sums, b.add(firsts, seconds)))


def _kept_in_order(b: Any, sums: Any) -> Any:
    """The same, by an instruction that is none: LLVM would put sums of integers into an order that needs more registers
    than there are.
    """
    if not IS_X86:
        return sums

    def emit(x: Any) -> Any:
        return b.asm(ir.FunctionType(x.type, [x.type]), "", "=v,0", [x], False)

    return _by_halves(b, emit, sums) if HAS_FEW_REGISTERS else emit(sums)


_AS_THEY_ARE = (_as_it_is,)
_FLOAT32, _BFLOAT16 = (_as_float32,), (_low_bfloat16, _high_bfloat16)
_BYTES, _UNSIGNED_BYTES = (
    tuple(_bytes_as_int16(shift, is_even) for is_even in (True, False)) for shift in ("ashr", "lshr")
)
_of_bfloat16 = (_AS_THEY_ARE, _AS_THEY_ARE, _dot_bfloat16) if HAS_DOT_BF16 else (_BFLOAT16, _BFLOAT16, _dot_float32)
_of_int8 = (_AS_THEY_ARE, _AS_THEY_ARE, _dot_int8) if HAS_DOT_INT8 else (_BYTES, _UNSIGNED_BYTES, _dot_int16)

KINDS = {
    "float32": Kind(4, 4, f32x16, F32, f32x16.llvm, _AS_THEY_ARE, _AS_THEY_ARE, _dot_float32),
    "bfloat16": Kind(4, 4, f32x16, I32, i32x16.llvm, *_of_bfloat16),
    "float16": Kind(2, 2, f32x16, F16, ir.VectorType(F16, LANES), _FLOAT32, _FLOAT32, _dot_float32),
    "int8": Kind(4, 4, i32x16, I32, i32x16.llvm, *_of_int8),
}


class Start(Enum):
    """Where a tile's sums begin: from zero, from what is in memory, or from zero, and then they are
    scaled and added to what is in memory, as `Scaling` says.
    """

    ZERO = 0
    SUMS = 1
    SCALED = 2


class Scaling(IntEnum):
    """Places in the memory, in bytes, that says how a tile's sums are scaled.

    Attributes:
        SCALES, OFFSETS: float32 [64] each, of the panel's outputs.
        TABLE: the address that `Kind.table` reads.
        X_SUMS, X_SUMS_STRIDE: the address of the sum of a row's activations, float32, by which offsets are multiplied,
            and from there to the next row's; 0: there are no offsets.
        BYTES: of all.
    """

    SCALES = 0
    OFFSETS = 4 * PANEL
    TABLE = 8 * PANEL
    X_SUMS = 8 * PANEL + 8
    X_SUMS_STRIDE = 8 * PANEL + 16
    BYTES = 8 * PANEL + 64


PART_BYTES = 4 * BLOCK_WORDS
"""Bytes of a row of a part of activations, for a block."""


def make_tile(kind: Kind, rows: int, start: Start) -> Any:
    """A function of (x, x_stride, w, num_words, sums, scaling, ahead) that sets sums [rows, 64] to a panel's products,
    as many vectors of it at a time as `TILE_VECTORS` says.

    x is the activations' words, or the parts of them, each `PART_BYTES` behind the one before. ``scaling`` is the
    address of a `Scaling`, of kinds that have a table or sums that are scaled. As much as it reads of the weight it
    brings from the address ``ahead``, unless that is 0, into the second-level cache.
    """
    vector_bytes, num_vectors = kind.word_bytes * LANES, TILE_VECTORS[rows - 1]
    x_bytes, one = (4, kind.sums.llvm.element) if kind.is_split else (kind.x_bytes, kind.scalar)
    x_places = [nth * PART_BYTES for nth in range(len(kind.parts))] if kind.is_split else kind.x_places
    places = [(row, v) for row in range(rows) for v in range(num_vectors)]

    @instruction(types.none, *[types.int64] * 7)
    def tile(b: Any, x: Any, x_stride: Any, w: Any, num_words: Any, sums: Any, scaling: Any, ahead: Any) -> None:
        held = {place: cgutils.alloca_once(b, kind.sums.llvm) for place in places}
        starts = [b.add(x, b.mul(x_stride, number(row))) for row in range(rows)]
        table = kind.table(b, b.add(scaling, number(Scaling.TABLE)))
        with cgutils.for_range_slice(b, number(0), number(VECTORS), number(num_vectors), intp=I64) as (first, _):
            first_byte = b.mul(first, number(vector_bytes))
            sums_of = {
                (row, v): b.add(sums, b.mul(number(4 * LANES), b.add(first, number(row * VECTORS + v))))
                for row, v in places
            }
            for place in places:
                zero = ir.Constant(kind.sums.llvm, None)
                b.store(load(b, sums_of[place], kind.sums.llvm, 64) if start is Start.SUMS else zero, held[place])
            with cgutils.for_range(b, num_words, intp=I64) as loop:
                offset = b.add(first_byte, b.mul(loop.index, number(vector_bytes * VECTORS)))
                with b.if_then(b.icmp_signed("!=", ahead, number(0))):
                    for line in range(0, vector_bytes * num_vectors, 64):
                        prefetch_line(b, b.add(b.add(ahead, offset), number(line)))
                for nth, (part, x_place) in enumerate(zip(kind.parts, x_places, strict=True)):
                    if nth and (rows > 1 or kind.is_split):  # one row needs few registers
                        forget_loads(b)
                    w_at = b.add(b.add(w, offset), number(nth * kind.plane_bytes))
                    weights = [
                        part(b, load(b, b.add(w_at, number(vector_bytes * v)), kind.words), *table)
                        for v in range(num_vectors)
                    ]
                    for row in range(rows):
                        x_at = b.add(starts[row], b.add(b.mul(loop.index, number(x_bytes)), number(x_place)))
                        every = splatted(b, load(b, x_at, one), ir.VectorType(one, LANES))
                        for v, weight in enumerate(weights):
                            b.store(kind.dot_parts(b, b.load(held[row, v]), every, weight), held[row, v])
            for row, v in places:
                if start is not Start.SCALED:
                    store(b, sums_of[row, v], b.load(held[row, v]), 64)
            if start is Start.SCALED:
                _add_scaled(b, scaling, first, {place: (b.load(held[place]), sums_of[place]) for place in places})

    return tile


def _add_scaled(b: Any, scaling: Any, first: Any, found: dict[tuple[int, int], tuple[Any, Any]]) -> None:
    """Add what a tile has found, times the outputs' scales, and the offsets times the rows' sums.

    Args:
        first: vector of the panel.
        found: of rows and of vectors behind the first: the vector, and the address of what it is added to.
    """

    def of_outputs(place: Scaling, v: int) -> Any:
        at = b.add(scaling, b.mul(number(4 * LANES), b.add(first, number(v))))
        return load(b, b.add(at, number(place)), f32x16.llvm, 64)

    for (_, v), (vector, at) in found.items():
        store(b, at, _dot_float32(b, load(b, at, f32x16.llvm, 64), vector, of_outputs(Scaling.SCALES, v)), 64)
    x_sums = load(b, b.add(scaling, number(Scaling.X_SUMS)), I64)
    stride = load(b, b.add(scaling, number(Scaling.X_SUMS_STRIDE)), I64)
    with b.if_then(b.icmp_signed("!=", x_sums, number(0))):
        for (row, v), (_, at) in found.items():
            x_sum = splatted(b, load(b, b.add(x_sums, b.mul(stride, number(row))), F32), f32x16.llvm)
            store(b, at, _dot_float32(b, load(b, at, f32x16.llvm, 64), x_sum, of_outputs(Scaling.OFFSETS, v)), 64)


def forget_loads(b: Any) -> None:
    """Nothing: but what is loaded before is not kept in registers for what comes after."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def make_split(kind: Kind) -> Any:
    """A function of (x, count, to) that writes the parts of 16 words, of which ``count`` are read, each `PART_BYTES`
    behind the one before.
    """

    @instruction(types.none, *[types.int64] * 3)
    def split(b: Any, x: Any, count: Any, to: Any) -> None:
        words = load_lanes(b, x, kind.scalar, count)
        for nth, part in enumerate(kind.x_parts):
            store(b, b.add(to, number(nth * PART_BYTES)), part(b, words), 64)

    return split


def make_widen(kind: Kind) -> Any:
    """A function of (w, num_words, to, scaling) that writes the parts of a block's words as `Kind.widened` has them."""
    plane_bytes = kind.widened.plane_bytes

    @instruction(types.none, *[types.int64] * 4)
    def widen(b: Any, w: Any, num_words: Any, to: Any, scaling: Any) -> None:
        num_vectors, table = b.mul(num_words, number(VECTORS)), kind.table(b, b.add(scaling, number(Scaling.TABLE)))
        with cgutils.for_range(b, num_vectors, intp=I64) as loop:
            words = load(b, b.add(w, b.mul(loop.index, number(kind.word_bytes * LANES))), kind.words)
            for nth, part in enumerate(kind.parts):
                at = b.add(to, b.add(b.mul(loop.index, number(4 * LANES)), number(nth * plane_bytes)))
                store(b, at, part(b, words, *table), 64)

    return widen


def make_panel(kind: Kind, start: Start = Start.ZERO) -> Any:
    """A function of (x, x_stride, w, num_words, sums, rows, scaling, ahead): the tiles of 1 to 6 rows and a panel.

    Of kinds whose activations have parts, and of those that start from sums, at most `BLOCK_WORDS` words.
    """
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (make_tile(kind, rows, start) for rows in range(1, TILE_ROWS + 1))

    @inlined
    def panel(x: int, x_stride: int, w: int, num_words: int, sums: int, rows: int, scaling: int, ahead: int) -> None:
        if rows == 6:
            tile_6(x, x_stride, w, num_words, sums, scaling, ahead)
        elif rows == 5:
            tile_5(x, x_stride, w, num_words, sums, scaling, ahead)
        elif rows == 4:
            tile_4(x, x_stride, w, num_words, sums, scaling, ahead)
        elif rows == 3:
            tile_3(x, x_stride, w, num_words, sums, scaling, ahead)
        elif rows == 2:
            tile_2(x, x_stride, w, num_words, sums, scaling, ahead)
        else:
            tile_1(x, x_stride, w, num_words, sums, scaling, ahead)

    if not kind.is_split:
        return panel
    room, split, x_bytes = stack(2 * PART_BYTES * TILE_ROWS), make_split(kind), kind.x_bytes

    @inlined
    def panel_of_parts(
        x: int, x_stride: int, w: int, num_words: int, sums: int, rows: int, scaling: int, ahead: int
    ) -> None:
        parts = room()
        for row in range(rows):
            words, to = x + row * x_stride, parts + row * 2 * PART_BYTES
            for nth in range(0, num_words, LANES):
                split(words + nth * x_bytes, num_words - nth, to + nth * 4)
        panel(parts, 2 * PART_BYTES, w, num_words, sums, rows, scaling, ahead)

    return panel_of_parts


def make_chunk(multiply: Any) -> Any:
    """The kernel of a product, by a function of (args, matrix, panel, first_row, end_row), see there.

    Arguments, beside its own: from 56 rows, outputs, rows a chunk, panels; from 120 groups of rows as
    `aioengine.kernels.native.expert_kernels` makes them, and the number of chunks, or 0: there are none. Where there
    are, the weight is that of several matrices of so many panels, each group has its own, and a chunk is an equal share
    of the groups' panels.
    """

    def linear(args: int, chunk: int, thread: int) -> None:
        num_panels, groups = get_i64(args + 80), get_i64(args + 120)
        if groups:
            num_items, num_chunks = get_i32(groups) * num_panels, get_i64(args + 128)
            for item in range(num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks):
                group = groups + GROUP_BYTES * (1 + item // num_panels)
                matrix = get_i32(group) * num_panels
                multiply(args, matrix, item % num_panels, get_i32(group + 4), get_i32(group + 8))
            return
        num_rows, rows_a_chunk = get_i64(args + 56), get_i64(args + 72)
        first_row = chunk // num_panels * rows_a_chunk
        multiply(args, 0, chunk % num_panels, first_row, min(first_row + rows_a_chunk, num_rows))

    return linear


def make_linear(kind: Kind, memory: Memory, of_bias: Memory) -> Any:
    """A product; a chunk is a panel and a block of rows, panels first, so that a block of activations stays in cache.

    Arguments: x, its rows' stride in bytes; the weight, its words; the result, its rows' stride in bytes; the bias or
    0; rows, outputs, rows a chunk, panels; of int8: scales of rows (float32 [rows]), scales of outputs, and sums of
    the outputs' weights (float32, int32 [panels · 64]); then in how many panels the thread probably has its next one;
    last, see `make_chunk`, groups of rows or 0, and the number of chunks.
    """
    is_int8 = kind is KINDS["int8"]
    # A panel is gone through block by block, each by all rows, if it is not in registers for a tile from end to end.
    in_blocks = HAS_FEW_REGISTERS or kind.is_split
    start = Start.SUMS if in_blocks else Start.ZERO
    most_words = BLOCK_WORDS if in_blocks else 1 << 40
    most_rows = MOST_ROWS if in_blocks else TILE_ROWS
    panel_of, word, x_word = make_panel(kind, start), kind.word_bytes, kind.x_bytes
    widens = kind.is_split and kind.sums is f32x16
    wide_panel = make_panel(kind.widened, start) if widens else panel_of
    widen, wide_room = make_widen(kind), stack(kind.widened.plane_bytes * len(kind.parts))
    room = stack(4 * PANEL * most_rows)
    load_bias, bias_size = of_bias.load_some, of_bias.size
    store_some, size = memory.store_some, memory.size
    load_sums, store_sums = FLOAT32.load, FLOAT32.store

    @inlined
    def write_rows(args: int, matrix: int, panel: int, begin: int, end: int, sums: int) -> None:
        """Write the results of some rows and a panel's outputs; the matrix begins at the weight's panel ``matrix``."""
        bias, num_outputs, first = get_i64(args + 48), get_i64(args + 64), matrix * PANEL
        for row in range(begin, end):
            to = get_i64(args + 32) + row * get_i64(args + 40)
            for at in range(panel * PANEL, panel * PANEL + PANEL, LANES):
                if is_int8:
                    wholes = load_i32(sums) - shift_left(load_i32(get_i64(args + 104) + (first + at) * 4), 7)
                    scale = splat(get_f32(get_i64(args + 88) + row * 4))
                    y = to_float(wholes) * scale * load_sums(get_i64(args + 96) + (first + at) * 4)
                else:
                    y = load_sums(sums)
                if bias:
                    y = y + load_bias(bias + (first + at) * bias_size, num_outputs - at)
                store_some(to + at * size, y, num_outputs - at)
                sums += 4 * LANES

    @inlined
    def multiply(args: int, matrix: int, panel: int, first_row: int, end_row: int) -> None:
        """Some rows and a panel of a matrix, which begins at the weight's panel ``matrix``."""
        x, x_stride, num_words = get_i64(args), get_i64(args + 8), get_i64(args + 24)
        panel_bytes = PANEL * num_words * word
        w = get_i64(args + 16) + (matrix + panel) * panel_bytes
        next_w = w + get_i64(args + 112) * panel_bytes
        is_single = end_row - first_row <= TILE_ROWS
        sums, wide = room(), wide_room()
        for begin in range(first_row, end_row, most_rows):
            end = min(begin + most_rows, end_row)
            is_wide = widens and end - begin >= WIDE_ROWS
            words_a_block = WIDE_WORDS if is_wide else most_words
            if in_blocks:
                for vector in range((end - begin) * VECTORS):
                    store_sums(sums + vector * LANES * 4, zeros())
            for at in range(0, num_words, words_a_block):
                words, here = min(words_a_block, num_words - at), w + at * PANEL * word
                if is_wide:
                    widen(here, words, wide, 0)
                for row in range(begin, end, TILE_ROWS):
                    rows = min(TILE_ROWS, end - row)
                    if is_wide:
                        wide_panel(
                            x + row * x_stride + at * x_word, x_stride, wide, words,
                            sums + (row - begin) * PANEL * 4, rows, 0, 0,
                        )  # fmt: skip
                        continue
                    if in_blocks:
                        ahead = here + words * PANEL * word if at + words < num_words else next_w
                        ahead = ahead if row == begin else 0
                    else:
                        ahead = (w + AHEAD_BYTES if is_single else next_w) + at * PANEL * word
                    panel_of(
                        x + row * x_stride + at * x_word, x_stride, here, words,
                        sums + (row - begin) * PANEL * 4, rows, 0, ahead,
                    )  # fmt: skip
            write_rows(args, matrix, panel, begin, end, sums)

    return make_chunk(multiply)


DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

for _name, _memory in DTYPES.items():
    for _out in sorted({_name, "float32"}):
        kernel(name=f"linear_{_name}_{_out}")(make_linear(KINDS[_name], DTYPES[_out], _memory))
        kernel(name=f"linear_int8_{_name}_{_out}")(make_linear(KINDS["int8"], DTYPES[_out], _memory))


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
