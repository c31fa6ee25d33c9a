"""Vectors for numba: types of 64 bytes, and what kernels do with them, as LLVM instructions.

A vector lives in a register; addresses are int64. Nothing here is checked: an address that is wrong ends the process.
All loads and stores may be unaligned. Where the processor lacks an instruction, LLVM makes it of others, `dot_bf16` and
`dot_int8` aside, which are made of others here.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
FEATURES = binding.get_host_cpu_features()
REGISTER_LANES = 16 if FEATURES.get("avx512f") else 8
"""float32 numbers of a register; there are twice as many registers. Vectors are two of them where there are but 8."""
IS_X86 = platform.machine() in ("x86_64", "AMD64")
HAS_MASKS = all(FEATURES.get(f"avx512{part}") for part in ("f", "bw", "vl"))
"""Whether there are loads and stores of some lanes of any size."""
HAS_DOT_BF16 = bool(FEATURES.get("avx512bf16"))
HAS_DOT_INT8 = bool(FEATURES.get("avx512vnni") or FEATURES.get("avxvnni"))

I1, I8, I16, I32, I64, F16, F32 = *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.HalfType(), ir.FloatType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


class Vector(types.Type):
    """A vector of ``lanes`` of an LLVM type."""

    def __init__(self, name: str, lane: ir.Type, lanes: int = LANES) -> None:
        self.llvm = ir.VectorType(lane, lanes)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


f32x16 = Vector("f32x16", F32)
i32x16 = Vector("i32x16", I32)
bool16 = Vector("bool16", I1)


def instruction(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """A numba function of these types that is the LLVM instructions which ``emit(builder, *values)`` makes."""

    def define(emit: Callable[..., Any]) -> Any:
        signature = result(*arguments)

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            made = emit(builder, *values)
            return context.get_dummy_value() if made is None or result is types.none else made

        names = ", ".join(f"a{n}" for n in range(len(arguments)))
        made: dict[str, Any] = {"signature": signature, "generate": generate}
        exec(f"def typed(typing{', ' if names else ''}{names}):\n    return signature, generate", made)
        return intrinsic(made["typed"])

    return define


def constant(vector: Vector, value: float) -> ir.Constant:
    return ir.Constant(vector.llvm, [value] * vector.llvm.count)


def number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def load(builder: Any, address: Any, what: ir.Type, align: int = 1) -> Any:
    loaded = builder.load(pointer(builder, address, what), typ=what)
    loaded.align = align
    return loaded


def store(builder: Any, address: Any, value: Any, align: int = 1) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = align


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an LLVM intrinsic or a function of the C library."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [value.type for value in values]), name
    )
    return builder.call(function, values)


def splatted(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def lanes_below(builder: Any, count: Any) -> Any:
    """True in the first lanes, by an int32."""
    return builder.icmp_signed("<", ir.Constant(i32x16.llvm, list(range(LANES))), splatted(builder, count, i32x16.llvm))


def look_up(builder: Any, table: Any, index: Any) -> Any:
    """Lanes of an i32x16 by the lower 4 bits of the index's lanes."""
    if FEATURES.get("avx512f"):
        return call(builder, "llvm.x86.avx512.permvar.si.512", i32x16.llvm, table, index)
    if FEATURES.get("avx2"):
        first, second = (ir.Constant(ir.VectorType(I32, 8), list(range(half, half + 8))) for half in (0, 8))
        found = []
        for half in (first, second):
            lanes = builder.shuffle_vector(index, index, half)
            low, high = (
                call(builder, "llvm.x86.avx2.permd", lanes.type, builder.shuffle_vector(table, table, part), lanes)
                for part in (first, second)
            )
            eight = ir.Constant(lanes.type, [8] * 8)
            is_high = builder.icmp_unsigned("!=", builder.and_(lanes, eight), ir.Constant(lanes.type, None))
            found.append(builder.select(is_high, high, low))
        return builder.shuffle_vector(*found, ir.Constant(i32x16.llvm, list(range(LANES))))
    found = ir.Constant(i32x16.llvm, ir.Undefined)
    for lane in range(LANES):
        at = ir.Constant(I32, lane)
        found = builder.insert_element(found, builder.extract_element(table, builder.extract_element(index, at)), at)
    return found


# Arithmetic: + - * / of f32x16, + and - of i32x16, comparisons as functions.


def _define_operator(symbol: Callable[..., Any], vector: Vector, emit: Callable[..., Any]) -> None:
    class Typed(ConcreteTemplate):
        cases = (signature(vector, vector, vector),)

    infer_global(symbol)(Typed)

    @lower_builtin(symbol, vector, vector)
    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return emit(builder, *values)


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_symbol, f32x16, lambda builder, x, y, name=_name: getattr(builder, name)(x, y))
for _symbol, _name in ((operator.add, "add"), (operator.sub, "sub"), (operator.mul, "mul"), (operator.xor, "xor")):
    _define_operator(_symbol, i32x16, lambda builder, x, y, name=_name: getattr(builder, name)(x, y))
for _symbol, _name in ((operator.and_, "and_"), (operator.or_, "or_")):
    _define_operator(_symbol, bool16, lambda builder, x, y, name=_name: getattr(builder, name)(x, y))


zeros = instruction(f32x16)(lambda b: constant(f32x16, 0.0))
lane_numbers = instruction(i32x16)(lambda b: ir.Constant(i32x16.llvm, list(range(LANES))))
splat = instruction(f32x16, types.float32)(lambda b, x: splatted(b, x, f32x16.llvm))
splat_i32 = instruction(i32x16, types.int64)(lambda b, x: splatted(b, b.trunc(x, I32), i32x16.llvm))
fma = instruction(f32x16, f32x16, f32x16, f32x16)(lambda b, x, y, z: call(b, "llvm.fma.v16f32", x.type, x, y, z))
"""x · y + z, rounded once."""
maximum = instruction(f32x16, f32x16, f32x16)(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
"""The larger of each pair of lanes; the second argument where one is NaN."""
minimum = instruction(f32x16, f32x16, f32x16)(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))


@instruction(f32x16, f32x16, f32x16, types.boolean)
def every_other(b: Any, low: Any, high: Any, is_odd: Any) -> Any:
    """Those of 32 lanes, 16 and 16, with an even number, or an odd one."""
    evens, odds = (b.shuffle_vector(low, high, ir.Constant(i32x16.llvm, list(range(n, 32, 2)))) for n in (0, 1))
    return b.select(is_odd, odds, evens)


absolute = instruction(f32x16, f32x16)(lambda b, x: call(b, "llvm.fabs.v16f32", x.type, x))
round_even = instruction(f32x16, f32x16)(lambda b, x: call(b, "llvm.roundeven.v16f32", x.type, x))


def _reduce(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """The lanes joined to one: halves with halves."""
    for half in (8, 4, 2, 1):
        lanes = ir.VectorType(I32, half)
        low, high = (ir.Constant(lanes, list(range(first, first + half))) for first in (0, half))
        x = join(b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
    return b.extract_element(x, ir.Constant(I32, 0))


sum_of = instruction(types.float32, f32x16)(lambda b, x: b.fadd(_reduce(b, x, b.fadd), ir.Constant(F32, 0.0)))
"""The lanes' sum, in one order."""


@instruction(types.float32, f32x16)
def max_of(b: Any, x: Any) -> Any:
    """The highest of lanes that are numbers. LLVM's reduction goes from lane to lane, since one might be none."""
    return _reduce(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


to_int = instruction(i32x16, f32x16)(lambda b, x: b.fptosi(x, i32x16.llvm))
to_float = instruction(f32x16, i32x16)(lambda b, x: b.sitofp(x, f32x16.llvm))
bits_to_float = instruction(f32x16, i32x16)(lambda b, x: b.bitcast(x, f32x16.llvm))
float_to_bits = instruction(i32x16, f32x16)(lambda b, x: b.bitcast(x, i32x16.llvm))


@instruction(i32x16, i32x16, types.int64)
def shift_left(b: Any, x: Any, bits: Any) -> Any:
    return b.shl(x, splatted(b, b.trunc(bits, I32), x.type))


@instruction(i32x16, i32x16, types.int64)
def shift_right(b: Any, x: Any, bits: Any) -> Any:
    """Zeros come in from the left."""
    return b.lshr(x, splatted(b, b.trunc(bits, I32), x.type))


is_above = instruction(bool16, f32x16, f32x16)(lambda b, x, y: b.fcmp_ordered(">", x, y))
is_at_least = instruction(bool16, f32x16, f32x16)(lambda b, x, y: b.fcmp_ordered(">=", x, y))
is_equal = instruction(bool16, f32x16, f32x16)(lambda b, x, y: b.fcmp_ordered("==", x, y))
is_nan = instruction(bool16, f32x16)(lambda b, x: b.fcmp_unordered("uno", x, x))
first_lanes = instruction(bool16, types.int64)(lambda b, count: lanes_below(b, b.trunc(count, I32)))
"""True in the first ``count`` lanes, a number of 32 bits: 0 and less is none, 16 and more all."""
select = instruction(f32x16, bool16, f32x16, f32x16)(lambda b, condition, x, y: b.select(condition, x, y))
bits_of = instruction(types.int64, bool16)(lambda b, condition: b.zext(b.bitcast(condition, I16), I64))
"""Bit n of the result is lane n."""
lanes_of = instruction(bool16, types.int64)(lambda b, bits: b.bitcast(b.trunc(bits, I16), bool16.llvm))
"""Lane n is bit n."""
lowest_bit = instruction(types.int64, types.int64)(lambda b, bits: b.cttz(bits, ir.Constant(I1, 1)))
"""Which of its bits, not all 0, is the lowest that is 1."""
lane_of = instruction(types.float32, f32x16, types.int64)(lambda b, x, lane: b.extract_element(x, lane))
lane_of_i32 = instruction(types.int64, i32x16, types.int64)(lambda b, x, lane: b.sext(b.extract_element(x, lane), I64))


# Memory


def to_narrow(b: Any, x: Any, lane: ir.Type) -> Any:
    """float32 as 16 numbers of a type, the bits of bfloat16 being I16; rounded to the nearest, of two to the even one.

    LLVM makes nothing of bfloat16 where the processor has no instruction for it: a call of a function that few systems
    have.
    """
    narrow = ir.VectorType(lane, LANES)
    if lane is not I16:
        return x if lane is F32 else b.fptrunc(x, narrow)
    if HAS_DOT_BF16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(BF16, LANES)), narrow)
    bits = b.bitcast(x, i32x16.llvm)
    is_odd = b.and_(b.lshr(bits, constant(i32x16, 16)), constant(i32x16, 1))
    rounded = b.lshr(b.add(bits, b.add(is_odd, constant(i32x16, 0x7FFF))), constant(i32x16, 16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), constant(i32x16, 0x7FC0), rounded), narrow)


def to_wide(b: Any, x: Any) -> Any:
    """Numbers as float32; I16 are the bits of bfloat16, I8 integers, and words stay."""
    lane, wide, words = x.type.element, ir.VectorType(F32, x.type.count), ir.VectorType(I32, x.type.count)
    if lane == I8:
        return b.sitofp(x, wide)
    if lane == I16:
        return b.bitcast(b.shl(b.zext(x, words), ir.Constant(words, [16] * words.count)), wide)
    return b.fpext(x, wide) if lane == F16 else x


def _copy_lanes(b: Any, to: Any, source: Any, count: Any, size: int) -> None:
    """Copy the first ``count`` of 16 lanes of so many bytes, fewer than 16; none, if that is below 0.

    By a function, since it is seldom needed and LLVM would bring much of it before the branch to it.
    """
    name = f"copy_lanes_of_{size}"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), [I64] * 3), name)
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block())
        to_, source_, count_ = function.args
        with inner.if_then(inner.icmp_signed(">", count_, number(0))):
            for lanes in (8, 4, 2, 1):
                with inner.if_then(inner.icmp_signed("!=", inner.and_(count_, number(lanes)), number(0))):
                    at = inner.mul(inner.and_(count_, number(-2 * lanes)), number(size))
                    what = ir.VectorType(I8, lanes * size)
                    store(inner, inner.add(to_, at), load(inner, inner.add(source_, at), what))
        inner.ret_void()
    b.call(function, (to, source, count))


def lane_bytes(lane: ir.Type) -> int:
    return {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4}[lane]


def _has_masked(lane: ir.Type) -> bool:
    """Whether there are masked instructions, in place of which LLVM makes sixteen branches."""
    return HAS_MASKS or lane_bytes(lane) == 4


def _masked(kind: str, lane: ir.Type) -> str:
    return f"llvm.masked.{kind}.v16{ {I8: 'i8', I16: 'i16', F16: 'f16', I32: 'i32', F32: 'f32'}[lane] }.p0"


def load_lanes(b: Any, address: Any, lane: ir.Type, count: Any) -> Any:
    """The first ``count`` of 16 lanes: 16 and more is all, less than 0 none. Others are 0, and not read."""
    vector = ir.VectorType(lane, LANES)
    with b.if_else(b.icmp_signed(">=", count, number(LANES)), likely=True) as (is_all, is_some):
        with is_all:
            whole, end_of_all = load(b, address, vector), b.block
        with is_some:
            zeros = ir.Constant(vector, None)
            if _has_masked(lane):
                some = call(
                    b, _masked("load", lane), vector, pointer(b, address, vector), ir.Constant(I32, 1),
                    lanes_below(b, b.trunc(count, I32)), zeros,
                )  # fmt: skip
            else:
                room = _vector_on_stack(b, vector)
                b.store(zeros, room)
                _copy_lanes(b, b.ptrtoint(room, I64), address, count, lane_bytes(lane))
                some = b.load(room, typ=vector)
            end_of_some = b.block
    loaded = b.phi(vector)
    loaded.add_incoming(whole, end_of_all)
    loaded.add_incoming(some, end_of_some)
    return loaded


def store_lanes(b: Any, address: Any, x: Any, count: Any) -> None:
    """The first ``count`` of 16 lanes: 16 and more is all, less than 0 none."""
    lane = x.type.element
    with b.if_else(b.icmp_signed(">=", count, number(LANES)), likely=True) as (is_all, is_some):
        with is_all:
            store(b, address, x)
        with is_some:
            if _has_masked(lane):
                call(
                    b, _masked("store", lane), ir.VoidType(), x, pointer(b, address, x.type), ir.Constant(I32, 1),
                    lanes_below(b, b.trunc(count, I32)),
                )  # fmt: skip
            else:
                room = _vector_on_stack(b, x.type)
                b.store(x, room)
                _copy_lanes(b, address, b.ptrtoint(room, I64), count, lane_bytes(lane))


def _vector_on_stack(b: Any, vector: ir.VectorType) -> Any:
    with b.goto_entry_block():
        return b.alloca(vector)


def _loads(lane: ir.Type) -> tuple[Any, Any, Any, Any, Any]:
    """The functions of a `Memory`. A ``count`` may be more than 16 or less than 0."""
    narrow = ir.VectorType(lane, LANES)

    @instruction(f32x16, types.int64)
    def load_16(b: Any, address: Any) -> Any:
        return to_wide(b, load(b, address, narrow))

    @instruction(f32x16, types.int64, types.int64)
    def load_some(b: Any, address: Any, count: Any) -> Any:
        return to_wide(b, load_lanes(b, address, lane, count))

    @instruction(types.none, types.int64, f32x16)
    def store_16(b: Any, address: Any, x: Any) -> None:
        store(b, address, to_narrow(b, x, lane))

    @instruction(types.none, types.int64, f32x16, types.int64)
    def store_some(b: Any, address: Any, x: Any, count: Any) -> None:
        store_lanes(b, address, to_narrow(b, x, lane), count)

    @instruction(types.none, *[types.int64] * 3)
    def copy_some(b: Any, address: Any, count: Any, to: Any) -> None:
        store(b, to, load_lanes(b, address, lane, count))

    return load_16, load_some, store_16, store_some, copy_some


@instruction(f32x16, types.int64, types.int64)
def load_some_int8(b: Any, address: Any, count: Any) -> Any:
    return to_wide(b, load_lanes(b, address, I8, count))


@instruction(types.none, types.int64, i32x16, types.int64)
def store_some_int8(b: Any, address: Any, x: Any, count: Any) -> None:
    """The lowest byte of each lane."""
    store_lanes(b, address, b.trunc(x, ir.VectorType(I8, LANES)), count)


@instruction(f32x16, types.int64, bool16)
def load_where(b: Any, address: Any, lanes: Any) -> Any:
    """float32 in the lanes that are set; 0 in others, which are not read."""
    where = pointer(b, address, f32x16.llvm)
    return call(b, _masked("load", F32), f32x16.llvm, where, ir.Constant(I32, 1), lanes, constant(f32x16, 0.0))


class Memory(NamedTuple):
    """How numbers of a dtype are read and written, as float32: whole vectors, and the first lanes of vectors.

    Attributes:
        size: bytes of a number.
        copy_some: of (address, count, to): 16 numbers as they are, others than the first ``count`` as 0.
    """

    size: int
    load: Any
    load_some: Any
    store: Any
    store_some: Any
    copy_some: Any


FLOAT32 = Memory(4, *_loads(F32))
BFLOAT16 = Memory(2, *_loads(I16))
FLOAT16 = Memory(2, *_loads(F16))


def _word(kind: types.Type, llvm: ir.Type, wide: ir.Type | None = None) -> tuple[Any, Any]:
    @instruction(kind, types.int64)
    def get(b: Any, address: Any) -> Any:
        loaded = load(b, address, llvm)
        return loaded if wide is None else b.sext(loaded, wide)

    @instruction(types.none, types.int64, kind)
    def put(b: Any, address: Any, value: Any) -> None:
        store(b, address, value if wide is None else b.trunc(value, llvm))

    return get, put


get_i64, put_i64 = _word(types.int64, I64)
get_i32, put_i32 = _word(types.int64, I32, I64)
get_i16, put_i16 = _word(types.int64, I16, I64)
get_i8, put_i8 = _word(types.int64, I8, I64)
get_f32, put_f32 = _word(types.float32, F32)


load_i32 = instruction(i32x16, types.int64)(lambda b, address: load(b, address, i32x16.llvm))
store_i32 = instruction(types.none, types.int64, i32x16)(lambda b, address, x: store(b, address, x))


@instruction(types.none, types.int64, i32x16)
def store_bytes(b: Any, address: Any, x: Any) -> None:
    """The lowest byte of each lane."""
    store(b, address, b.trunc(x, ir.VectorType(I8, LANES)))


def prefetch_line(b: Any, address: Any) -> None:
    """Bring a line into the second-level cache."""
    flags = (ir.Constant(I32, flag) for flag in (0, 2, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, I8), *flags)


prefetch = instruction(types.none, types.int64)(prefetch_line)


# Threads


@instruction(types.int64, types.int64, types.int64)
def fetch_add(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", pointer(b, address, I64), value, "seq_cst")


@instruction(types.int64, types.int64, types.int64)
def exchange(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("xchg", pointer(b, address, I64), value, "seq_cst")


@instruction(types.int64, types.int64)
def atomic_get(b: Any, address: Any) -> Any:
    return b.load_atomic(pointer(b, address, I64), "seq_cst", 8)


@instruction(types.none, types.int64, types.int64)
def atomic_put(b: Any, address: Any, value: Any) -> None:
    b.store_atomic(value, pointer(b, address, I64), "seq_cst", 8)


@instruction(types.none)
def pause(b: Any) -> None:
    """Tell the processor that a loop waits."""
    if IS_X86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


sched_yield = instruction(types.none)(lambda b: call(b, "sched_yield", I32))


@instruction(types.none, types.int64)
def sem_wait(b: Any, semaphore: Any) -> None:
    call(b, "sem_wait", I32, pointer(b, semaphore, I8))


@instruction(types.none, types.int64)
def sem_post(b: Any, semaphore: Any) -> None:
    call(b, "sem_post", I32, pointer(b, semaphore, I8))


@instruction(types.none, types.int64, types.int64, types.int64, types.int64)
def call_kernel(b: Any, function: Any, arguments: Any, chunk: Any, thread: Any) -> None:
    """Call a compiled kernel, by numba's convention: room for a result and for an error come first."""
    nothing = I8.as_pointer()
    kind = ir.FunctionType(I32, [nothing, nothing, I64, I64, I64])
    room = cgutils.alloca_once(b, I64)
    result = b.bitcast(room, nothing)
    b.call(pointer(b, function, kind), [result, result, arguments, chunk, thread])


def stack(num_bytes: int) -> Any:
    """A function that gives the address of so much memory of the caller's stack, aligned to 64 bytes."""

    @instruction(types.int64)
    def on_stack(b: Any) -> Any:
        # numba's alloca_once writes zeros, byte by byte as LLVM sees it: too slow, and far too slow to compile.
        with b.goto_entry_block():
            room = b.alloca(ir.ArrayType(I8, num_bytes))
        room.align = 64
        return b.ptrtoint(room, I64)

    return on_stack
