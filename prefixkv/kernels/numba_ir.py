"""Vectors, loops and raw memory for numba: what its loops do not reach, LLVM's own vector types do.

numba's auto-vectoriser stops at 256 bits and loses track of accumulators. The kernels beside this file therefore write
their inner loops as LLVM vector code, through these few words. The code is portable: no instruction of any one
processor is named, LLVM splits what is too wide and finds the fused forms (multiply-add, dot products of 16-bit pairs).

Addresses are plain 64-bit integers. Whoever calls a kernel keeps the memory alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "any_nan",
    "ask_for",
    "atomic_add",
    "bf16_bits",
    "call_vector",
    "columns_of",
    "copy_bytes",
    "dot_pairs",
    "float_bits",
    "fma",
    "fold",
    "greatest",
    "half_to_float",
    "int_bits",
    "load",
    "load_f32",
    "load_i8",
    "load_i16",
    "load_i32",
    "load_i64",
    "load_u8",
    "load_u16",
    "micro_kernel",
    "offset",
    "prefetch",
    "read_cycles",
    "reduce",
    "repeat",
    "shuffle",
    "splat",
    "store",
    "store_f32",
    "store_i8",
    "store_i16",
    "store_i32",
    "store_i64",
    "variable",
    "vector",
    "zero_bytes",
]

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""32-bit numbers per vector. Part of numba's own cache key through the processor's features."""

I8, I16, I32, I64, F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())


def vector(element: ir.Type, count: int = LANES) -> ir.VectorType:
    """Return a vector type."""
    return ir.VectorType(element, count)


def offset(b: ir.IRBuilder, base: Any, *terms: tuple[Any, Any]) -> Any:
    """Emit ``base + sum of products``; integers are taken as 64-bit constants."""
    total = base
    for left, right in terms:
        left, right = (I64(x) if isinstance(x, int) else x for x in (left, right))
        total = b.add(total, b.mul(left, right))
    return total


def load(b: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """Emit a load that assumes no alignment."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store(b: ir.IRBuilder, address: Any, value: Any) -> None:
    """Emit a store that assumes no alignment."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def shuffle(b: ir.IRBuilder, left: Any, right: Any, picks: list[int]) -> Any:
    """Emit a shuffle of two vectors by constant indices."""
    return b.shuffle_vector(left, right, ir.Constant(vector(I32, len(picks)), picks))


def splat(b: ir.IRBuilder, scalar: Any, count: int = LANES) -> Any:
    """Emit a vector of one number."""
    first = b.insert_element(ir.Constant(vector(scalar.type, count), ir.Undefined), scalar, I32(0))
    return shuffle(b, first, first, [0] * count)


def call_vector(b: ir.IRBuilder, name: str, *values: Any) -> Any:
    """Emit a call of an LLVM intrinsic on vectors of float32, such as ``llvm.rint``."""
    kind = values[0].type
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(kind, [kind] * len(values)), f"{name}.v{kind.count}f32"
    )
    return b.call(function, values)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """Emit ``x * y + z``, in one step where the processor can."""
    return call_vector(b, "llvm.fmuladd", x, y, z)


def any_nan(b: ir.IRBuilder, values: list[Any]) -> Any:
    """Emit whether a lane of some vectors is NaN, which maxima and integers lose."""
    found: Any = None
    for value in values:
        lanes = b.bitcast(b.fcmp_unordered("uno", value, value), ir.IntType(value.type.count))
        found = lanes if found is None else b.or_(found, lanes)
    return b.icmp_unsigned("!=", found, found.type(0))


def greatest(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Emit the larger of two floats or vectors; ``y`` where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def fold(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Return the values combined one after the other."""
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def reduce(b: ir.IRBuilder, combine: Callable[[Any, Any], Any], value: Any) -> Any:
    """Emit the reduction of a vector to a scalar, in a fixed order."""
    width = value.type.count
    while width > 1:
        width //= 2
        low, high = (shuffle(b, value, value, list(range(at, at + width))) for at in (0, width))
        value = combine(low, high)
    return b.extract_element(value, I32(0))


def dot_pairs(b: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    """Emit ``total + x.low * y.low + x.high * y.high`` for vectors of pairs of int16, as one pmaddwd or vpdpwssd."""
    count = total.type.count
    wide = [b.sext(b.bitcast(v, vector(I16, 2 * count)), vector(I32, 2 * count)) for v in (x, y)]
    product = b.mul(*wide)
    low, high = (shuffle(b, product, product, list(range(at, 2 * count, 2))) for at in (0, 1))
    return b.add(total, b.add(low, high))


def half_to_float(b: ir.IRBuilder, half: Any) -> Any:
    """Emit float32 from the bits of float16 in the low halves of int32; needs no float16 hardware."""

    def const(value: int) -> Any:
        return splat(b, I32(value))

    size = b.and_(half, const(0x7FFF))
    shifted = b.shl(size, const(13))
    scaled = b.bitcast(b.fmul(b.bitcast(shifted, vector(F32)), splat(b, F32(2.0**112))), vector(I32))
    scaled = b.select(b.icmp_signed(">", size, const(0x7BFF)), b.or_(shifted, const(0x7F800000)), scaled)
    return b.bitcast(b.or_(scaled, b.shl(b.and_(half, const(0x8000)), const(16))), vector(F32))


def bf16_bits(b: ir.IRBuilder, x: Any) -> Any:
    """Emit int32 whose low halves are the bits of bfloat16, rounded half to even; NaN stays NaN."""

    def const(value: int) -> Any:
        return splat(b, I32(value), x.type.count)

    bits = b.bitcast(x, vector(I32, x.type.count))
    odd = b.and_(b.lshr(bits, const(16)), const(1))
    rounded = b.lshr(b.add(bits, b.add(odd, const(0x7FFF))), const(16))
    return b.select(b.fcmp_unordered("uno", x, x), const(0x7FC0), rounded)


def columns_of(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Emit the columns of 16 vectors of 16 dwords."""

    def lanes(*picks: int) -> list[int]:
        return [4 * pick + i for pick in picks for i in range(4)]

    def inside(picks: tuple[int, ...]) -> list[int]:
        """The same picks in each lane of 128 bits; 4 and more come from the second vector."""
        return [4 * lane + pick if pick < 4 else 16 + 4 * lane + pick - 4 for lane in range(4) for pick in picks]

    fours = []  # [g][j]: lane L holds column 4L + j of rows 4g to 4g + 3
    for g in range(0, 16, 4):
        low = [shuffle(b, rows[g + i], rows[g + i + 1], inside((0, 4, 1, 5))) for i in (0, 2)]
        high = [shuffle(b, rows[g + i], rows[g + i + 1], inside((2, 6, 3, 7))) for i in (0, 2)]
        fours.append([shuffle(b, x, y, inside(p)) for x, y in (low, high) for p in ((0, 1, 4, 5), (2, 3, 6, 7))])
    columns: list[Any] = [None] * 16
    for j in range(4):
        g0, g1, g2, g3 = (four[j] for four in fours)
        for odd in range(2):
            x, y = (shuffle(b, u, v, lanes(odd, 2 + odd, 4 + odd, 6 + odd)) for u, v in ((g0, g1), (g2, g3)))
            columns[4 * odd + j] = shuffle(b, x, y, lanes(0, 2, 4, 6))
            columns[4 * (odd + 2) + j] = shuffle(b, x, y, lanes(1, 3, 5, 7))
    return columns


def variable(b: ir.IRBuilder, value: Any) -> Any:
    """Emit a local variable that LLVM will keep in a register."""
    place = cgutils.alloca_once(b, value.type)
    b.store(value, place)
    return place


@contextmanager
def repeat(b: ir.IRBuilder, count: Any) -> Iterator[Any]:
    """Emit a loop from 0 to ``count``; yields the index."""
    with cgutils.for_range(b, I64(count) if isinstance(count, int) else count, intp=I64) as loop:
        yield loop.index


def micro_kernel(name: str, num_args: int, emit: Callable[..., None]) -> Any:
    """Return a function for compiled code that takes addresses and integers and runs what ``emit(b, *args)`` emits.

    It stays a function of its own in LLVM: inlined into everything that calls it, it would be optimised over and over.
    """
    integers = (types.int64,) * num_args

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [I64] * num_args), f"prefixkv_{name}"
        )
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            body = ir.IRBuilder(function.append_basic_block())
            emit(body, *function.args)
            body.ret_void()
        builder.call(function, args)
        return context.get_dummy_value()

    def typed(typing_context: Any, *args: Any) -> Any:
        return types.void(*integers), generate

    # numba reads the number of arguments off the signature.
    names = ["typing_context", *(f"a{i}" for i in range(num_args))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _scalar_load(kind: ir.Type, result: Any, signed: bool = True) -> Any:
    @intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = load(b, args[0], kind)
            if isinstance(kind, ir.IntType) and kind.width < 32:
                value = b.sext(value, I32) if signed else b.zext(value, I32)
            return value

        return result(types.int64), generate

    return read


def _scalar_store(kind: ir.Type, value_type: Any) -> Any:
    @intrinsic
    def write(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = args[1]
            store(b, args[0], b.trunc(value, kind) if value.type != kind else value)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return write


load_f32 = _scalar_load(F32, types.float32)
load_i32 = _scalar_load(I32, types.int32)
load_i64 = _scalar_load(I64, types.int64)
load_i16 = _scalar_load(I16, types.int32)
load_u16 = _scalar_load(I16, types.int32, signed=False)
load_i8 = _scalar_load(I8, types.int32)
load_u8 = _scalar_load(I8, types.int32, signed=False)
store_f32 = _scalar_store(F32, types.float32)
store_i32 = _scalar_store(I32, types.int32)
store_i64 = _scalar_store(I64, types.int64)
store_i16 = _scalar_store(I16, types.int32)
store_i8 = _scalar_store(I8, types.int32)


@intrinsic
def int_bits(typing_context: Any, x: Any) -> Any:
    """Return the bits of a float32 as int32."""
    return types.int32(types.float32), lambda context, b, signature, args: b.bitcast(args[0], I32)


@intrinsic
def float_bits(typing_context: Any, x: Any) -> Any:
    """Return the float32 that has these int32 bits."""
    return types.float32(types.int32), lambda context, b, signature, args: b.bitcast(args[0], F32)


@intrinsic
def read_cycles(typing_context: Any) -> Any:
    """Return the processor's clock, in cycles of its own; 0 where it has none that programs may read."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, []), "llvm.readcyclecounter"), [])

    return types.int64(), emit


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that all threads see; returns what it was before."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _emit_copy(b: ir.IRBuilder, dst: Any, src: Any, count: Any) -> None:
    dst, src = (b.inttoptr(address, I8.as_pointer()) for address in (dst, src))
    cgutils.raw_memcpy(b, dst, src, count, I64(1))


def _emit_zero(b: ir.IRBuilder, dst: Any, count: Any) -> None:
    cgutils.memset(b, b.inttoptr(dst, I8.as_pointer()), count, 0)


def ask_for(b: ir.IRBuilder, address: Any, near: int = 2) -> None:
    """Ask the memory for a line; harmless wherever it lies. ``near``: 3 the first cache, 2 the second."""
    pointer = I8.as_pointer()
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32]), "llvm.prefetch.p0"
    )
    b.call(function, [b.inttoptr(address, pointer), I32(0), I32(near), I32(1)])


def _emit_prefetch(b: ir.IRBuilder, start: Any, count: Any) -> None:
    """Ask for ``count`` bytes, line by line."""
    with repeat(b, b.udiv(b.add(count, count.type(63)), count.type(64))) as line:
        ask_for(b, offset(b, start, (line, 64)), 3)


copy_bytes = micro_kernel("copy_bytes", 3, _emit_copy)
prefetch = micro_kernel("prefetch", 2, _emit_prefetch)
zero_bytes = micro_kernel("zero_bytes", 2, _emit_zero)
