"""Products of activations and weights of codes.

A word is 32 bits: eight codes of 4 bits or four of 8, words and outputs in panels as `linear` has them. Codes of inputs
with even numbers lie in a word's lower half, those with odd ones in the upper half, each time the first in the lowest
bits, so that shifting a word brings the codes of the next two inputs to where a pair of bfloat16 has its numbers.
(Pairs of bfloat16 are what a processor multiplies at once.)

What codes stand for is looked up: 16-bit numbers for pairs, where the table is exact in bfloat16, activations are
bfloat16 and the processor multiplies that; else float32, activations too. The sums of a *step*, a group of inputs or a
part of one, begin at zero, are multiplied by the group's scale and added to the output's; so is the sum of the step's
activations, times the group's offset. That order is the same for any number of rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.linear_kernels import (
    AHEAD_BYTES,
    DTYPES,
    I16X32,
    KINDS,
    MOST_ROWS,
    PANEL,
    TILE_ROWS,
    Kind,
    Scaling,
    Start,
    make_chunk,
    make_panel,
    make_widen,
    no_table,
)
from aioengine.kernels.native.sizes import HAS_PAIRS, STEP_INPUTS
from aioengine.kernels.native.vectors import (
    F32,
    FLOAT32,
    I32,
    I64,
    LANES,
    call,
    constant,
    f32x16,
    get_f32,
    get_i32,
    get_i64,
    i32x16,
    lane_of,
    load,
    look_up,
    number,
    put_f32,
    put_i64,
    splat,
    stack,
    sum_of,
    zeros,
)

WIDE_ROWS = 2 * TILE_ROWS
"""From so many rows on a step is looked up once for all of them. On a core of Zen 1, GFLOP/s at 12, 30 and 128 rows of
codes of 4 bits: 21, 22 and 22 without it, and 28, 31 and 37 with it."""


def _shifted(b: Any, words: Any, bits: int) -> Any:
    return b.lshr(words, constant(i32x16, bits)) if bits else words


# Pairs of bfloat16. Tables have 32 numbers a vector, and lookups read the lowest bits of an index that they need.


def _table_of_pairs(num_vectors: int) -> Any:
    def emit(b: Any, address: Any) -> tuple[Any, ...]:
        base = load(b, address, I64)
        return tuple(load(b, b.add(base, number(64 * nth)), I16X32) for nth in range(num_vectors))

    return emit


def _pairs_of_4_bits(shift: int) -> Any:
    def emit(b: Any, words: Any, table: Any) -> Any:
        """The table is there twice: the fifth bit of an index is the next code's."""
        index = b.bitcast(_shifted(b, words, shift), I16X32)
        return call(b, "llvm.x86.avx512.permvar.hi.512", I16X32, table, index)

    return emit


def _pairs_of_8_bits(shift: int) -> Any:
    def emit(b: Any, words: Any, *table: Any) -> Any:
        """In each quarter of the table, and the one that the highest bits say."""
        index = b.bitcast(_shifted(b, words, shift), I16X32)
        found = [
            call(b, "llvm.x86.avx512.vpermi2var.hi.512", I16X32, first, index, second)
            for first, second in zip(table[::2], table[1::2], strict=True)
        ]

        def is_set(bit: int) -> Any:
            masked = b.and_(index, ir.Constant(I16X32, [1 << bit] * I16X32.count))
            return b.icmp_unsigned("!=", masked, ir.Constant(I16X32, None))

        low, high = b.select(is_set(6), found[1], found[0]), b.select(is_set(6), found[3], found[2])
        return b.select(is_set(7), high, low)

    return emit


def _linear_pairs_of_8_bits(shift: int) -> Any:
    def emit(b: Any, words: Any) -> Any:
        """The values of a linear table, code - 128, by float32, whose upper halves are bfloat16."""
        signed, eight = b.xor(words, constant(i32x16, -0x7F7F7F80)), constant(i32x16, 24)
        low, high = (
            b.bitcast(b.sitofp(b.ashr(b.shl(signed, constant(i32x16, left)), eight), f32x16.llvm), i32x16.llvm)
            for left in (24 - shift, 8 - shift)
        )
        return b.or_(b.lshr(low, constant(i32x16, 16)), high)

    return emit


# Numbers of float32: of input n of a word the code is in half n % 2.


def _table_of_float32(b: Any, address: Any) -> tuple[Any, ...]:
    return (load(b, load(b, address, I64), i32x16.llvm),)


def _float32_of_4_bits(shift: int) -> Any:
    def emit(b: Any, words: Any, table: Any) -> Any:
        index = b.and_(_shifted(b, words, shift), constant(i32x16, 15))
        return b.bitcast(look_up(b, table, index), f32x16.llvm)

    return emit


def _float32_of_8_bits(shift: int) -> Any:
    def emit(b: Any, words: Any) -> Any:
        """The values of a linear table: code - 128."""
        code = b.and_(_shifted(b, words, shift), constant(i32x16, 255))
        return b.sitofp(b.sub(code, constant(i32x16, 128)), f32x16.llvm)

    return emit


def _address_of_table(b: Any, address: Any) -> tuple[Any, ...]:
    return (load(b, address, I64),)


def _found_float32_of_8_bits(shift: int) -> Any:
    def emit(b: Any, words: Any, table: Any) -> Any:
        """The values of any table, number by number."""
        code, found = b.and_(_shifted(b, words, shift), constant(i32x16, 255)), ir.Constant(f32x16.llvm, ir.Undefined)
        for lane in (ir.Constant(I32, lane) for lane in range(LANES)):
            offset = b.shl(b.zext(b.extract_element(code, lane), I64), number(2))
            found = b.insert_element(found, load(b, b.add(table, offset), F32), lane)
        return found

    return emit


def _kind(bits: int, table: Any, part: Any, *, is_pairs: bool) -> Kind:
    """The kind of words of which each part is made by a shift, in the order of the inputs."""
    num_inputs = 32 // bits
    halves = (0,) if is_pairs else (0, 16)
    shifts = [shift + half for shift in range(0, 16, bits) for half in halves]
    of_x = KINDS["bfloat16" if is_pairs else "float32"]
    return of_x._replace(
        words=i32x16.llvm,
        x_bytes=num_inputs * (2 if is_pairs else 4),
        x_places=tuple(range(0, 4 * len(shifts), 4)),
        parts=tuple(map(part, shifts)),
        table=table,
        wide_words=STEP_INPUTS // num_inputs,
    )


CODED = {
    "4_float32": _kind(4, _table_of_float32, _float32_of_4_bits, is_pairs=False),
    "8_float32": _kind(8, no_table, _float32_of_8_bits, is_pairs=False),
    "8_table_float32": _kind(8, _address_of_table, _found_float32_of_8_bits, is_pairs=False),
}
if HAS_PAIRS:
    CODED["4_pairs"] = _kind(4, _table_of_pairs(1), _pairs_of_4_bits, is_pairs=True)
    CODED["8_pairs"] = _kind(8, no_table, _linear_pairs_of_8_bits, is_pairs=True)
    CODED["8_table_pairs"] = _kind(8, _table_of_pairs(8), _pairs_of_8_bits, is_pairs=True)

_load_float32, _load_bfloat16, _load_float16 = (each.load_some for each in DTYPES.values())
_store_float32, _store_bfloat16, _store_float16 = (each.store_some for each in DTYPES.values())
_load_vector, _store_vector = FLOAT32.load, FLOAT32.store


@inlined
def size_of(dtype: int) -> int:
    """Bytes of a number; a dtype is its place in `DTYPES`."""
    return 4 if dtype == 0 else 2


@inlined
def load_some(dtype: int, address: int, count: int) -> Any:
    """The first ``count`` of 16 numbers, as float32."""
    if dtype == 0:
        return _load_float32(address, count)
    if dtype == 1:
        return _load_bfloat16(address, count)
    return _load_float16(address, count)


@inlined
def store_some(dtype: int, address: int, x: Any, count: int) -> None:
    if dtype == 0:
        _store_float32(address, x, count)
    elif dtype == 1:
        _store_bfloat16(address, x, count)
    else:
        _store_float16(address, x, count)


def make_linear(kind: Kind) -> Any:
    """A product; a chunk is as `make_chunk` says.

    Arguments: x, its rows' stride in bytes; the weight, its words; the result, its rows' stride in bytes; the bias or
    0; rows, outputs, rows a chunk, panels; scales [panels, groups, 64], offsets like them or 0, groups; in how many
    panels the thread probably has its next one; groups of rows or 0, chunks; dtype of scales; words of a step, steps of
    a group; the table; sums of activations (float32 [rows, steps]), or 0 if there are no offsets, and their rows'
    stride in bytes; dtypes of bias and result.
    """
    panel_of, wide_panel = make_panel(kind, Start.SCALED), make_panel(kind.widened, Start.SCALED)
    widen, wide_room = make_widen(kind), stack(kind.widened.plane_bytes * len(kind.parts))
    room, scaling_room = stack(4 * PANEL * MOST_ROWS), stack(Scaling.BYTES)
    x_word = kind.x_bytes
    offsets_at, table_at = int(Scaling.OFFSETS), int(Scaling.TABLE)
    x_sums_at, x_sums_stride_at = int(Scaling.X_SUMS), int(Scaling.X_SUMS_STRIDE)

    @inlined
    def load_scales(args: int, place: int, scaling: int) -> None:
        """Load the scales of 64 outputs from output ``place`` on."""
        dtype, offsets = get_i64(args + 136), get_i64(args + 96)
        for at in range(0, PANEL, LANES):
            from_first = (place + at) * size_of(dtype)
            _store_vector(scaling + at * 4, load_some(dtype, get_i64(args + 88) + from_first, LANES))
            if offsets:
                _store_vector(scaling + offsets_at + at * 4, load_some(dtype, offsets + from_first, LANES))

    @inlined
    def write_rows(args: int, matrix: int, panel: int, begin: int, end: int, sums: int) -> None:
        """Write the results of some rows and a panel's outputs; the matrix begins at the weight's panel ``matrix``."""
        bias, num_outputs, first = get_i64(args + 48), get_i64(args + 64), matrix * PANEL
        of_bias, dtype = get_i64(args + 184), get_i64(args + 192)
        for row in range(begin, end):
            to = get_i64(args + 32) + row * get_i64(args + 40)
            for at in range(panel * PANEL, panel * PANEL + PANEL, LANES):
                y = _load_vector(sums)
                if bias:
                    y = y + load_some(of_bias, bias + (first + at) * size_of(of_bias), num_outputs - at)
                store_some(dtype, to + at * size_of(dtype), y, num_outputs - at)
                sums += 4 * LANES

    @inlined
    def multiply(args: int, matrix: int, panel: int, first_row: int, end_row: int) -> None:
        """Some rows and a panel of a matrix, which begins at the weight's panel ``matrix``."""
        x, x_stride, num_words = get_i64(args), get_i64(args + 8), get_i64(args + 24)
        num_groups, step_words, group_steps = get_i64(args + 104), get_i64(args + 144), get_i64(args + 152)
        x_sums, x_sums_stride = get_i64(args + 168), get_i64(args + 176)
        panel_bytes = num_words * PANEL * 4
        w = get_i64(args + 16) + (matrix + panel) * panel_bytes
        next_w = w + (AHEAD_BYTES if end_row - first_row <= TILE_ROWS else get_i64(args + 112) * panel_bytes)
        sums, wide, scaling = room(), wide_room(), scaling_room()
        put_i64(scaling + table_at, get_i64(args + 160))
        put_i64(scaling + x_sums_at, 0)
        put_i64(scaling + x_sums_stride_at, x_sums_stride)
        for begin in range(first_row, end_row, MOST_ROWS):
            end = min(begin + MOST_ROWS, end_row)
            is_wide = end - begin >= WIDE_ROWS
            for at in range(0, (end - begin) * PANEL, LANES):
                _store_vector(sums + at * 4, zeros())
            for step in range((num_words + step_words - 1) // step_words):
                at = step * step_words
                words, here = min(step_words, num_words - at), w + at * PANEL * 4
                if step % group_steps == 0:
                    load_scales(args, ((matrix + panel) * num_groups + step // group_steps) * PANEL, scaling)
                if is_wide:
                    widen(here, words, wide, scaling)
                for row in range(begin, end, TILE_ROWS):
                    x_here, to = x + row * x_stride + at * x_word, sums + (row - begin) * PANEL * 4
                    if x_sums:
                        put_i64(scaling + x_sums_at, x_sums + row * x_sums_stride + step * 4)
                    if is_wide:
                        wide_panel(x_here, x_stride, wide, words, to, min(TILE_ROWS, end - row), scaling, 0)
                    else:
                        ahead = next_w + at * PANEL * 4 if row == first_row else 0
                        panel_of(x_here, x_stride, here, words, to, min(TILE_ROWS, end - row), scaling, ahead)
            write_rows(args, matrix, panel, begin, end, sums)

    return make_chunk(multiply)


for _name, _kind_of_codes in CODED.items():
    kernel(name=f"linear_coded_{_name}")(make_linear(_kind_of_codes))


@kernel(name="prepare_coded")
def prepare(args: int, chunk: int, thread: int) -> None:
    """Prepare activations for products; a chunk is a row.

    Arguments: x, its rows' stride in bytes, its dtype; numbers of a row, and of a step; float32 rows of the same
    numbers, or 0; sums of steps (float32), or 0, and their rows' stride in bytes.
    """
    dtype, width, step_width = get_i64(args + 16), get_i64(args + 24), get_i64(args + 32)
    x, wide, sums = get_i64(args) + chunk * get_i64(args + 8), get_i64(args + 40), get_i64(args + 48)
    wide += chunk * width * 4 if wide else 0
    sums += chunk * get_i64(args + 56) if sums else 0
    for begin in range(0, width, step_width):
        end, total = min(begin + step_width, width), zeros()
        for at in range(begin, end, LANES):
            x_here = load_some(dtype, x + at * size_of(dtype), end - at)
            total = total + x_here
            if wide:
                store_some(0, wide + at * 4, x_here, end - at)
        if sums:
            put_f32(sums + begin // step_width * 4, sum_of(total))


_room_for_numbers = stack(LANES * 4)


@kernel(name="embed_coded")
def embed(args: int, chunk: int, thread: int) -> None:
    """Rows of a weight of codes; a chunk is one.

    Arguments: ids (int32); the weight, its words, bits of a code; scales [panels, groups, 64], offsets like them or 0;
    groups, dtype of scales; inputs, and those of a group; the table, float32; the result, its dtype.
    """
    output, num_words, bits = get_i32(get_i64(args) + chunk * 4), get_i64(args + 16), get_i64(args + 24)
    offsets, num_groups, of_scales = get_i64(args + 40), get_i64(args + 48), get_i64(args + 56)
    num_inputs, group, table = get_i64(args + 64), get_i64(args + 72), get_i64(args + 80)
    dtype, numbers, num_codes = get_i64(args + 96), _room_for_numbers(), 32 // bits
    to = get_i64(args + 88) + chunk * num_inputs * size_of(dtype)
    panel, place = output // PANEL, output % PANEL
    w = get_i64(args + 8) + (panel * num_words * PANEL + place) * 4
    for begin in range(0, num_inputs, LANES):
        for nth in range(min(LANES, num_inputs - begin)):
            word, n = (begin + nth) // num_codes, (begin + nth) % num_codes
            code = get_i32(w + word * PANEL * 4) >> (bits * (n // 2) + 16 * (n % 2)) & ((1 << bits) - 1)
            put_f32(numbers + nth * 4, get_f32(table + code * 4))
        scale = ((panel * num_groups + begin // group) * PANEL + place) * size_of(of_scales)
        y = _load_vector(numbers) * splat(lane_of(load_some(of_scales, get_i64(args + 32) + scale, 1), 0))
        if offsets:
            y = y + splat(lane_of(load_some(of_scales, offsets + scale, 1), 0))
        store_some(dtype, to + begin * size_of(dtype), y, num_inputs - begin)
