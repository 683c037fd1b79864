"""Queries on their way into the dot products: widened, scaled, turned by a Hadamard matrix, packed as int16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit

from prefixkv.kernels.numba_dots import woven
from prefixkv.kernels.numba_halves import load_number
from prefixkv.kernels.numba_ir import (
    F32,
    I16,
    I32,
    LANES,
    any_nan,
    call_vector,
    greatest,
    half_to_float,
    int_bits,
    load,
    micro_kernel,
    offset,
    reduce,
    repeat,
    shuffle,
    splat,
    store,
    store_f32,
    variable,
    vector,
)
from prefixkv.kernels.numba_layout import BF16
from prefixkv.kernels.numba_layout import F32 as FLOAT32

__all__ = ["pack_query", "read_query", "turn_row"]


def _scaled(name: str, kind: ir.Type, convert: Callable[[ir.IRBuilder, Any], Any]) -> Any:
    """Return ``scale(src, vectors, factor, dst)``: numbers times a factor, given by its bits, to float32."""
    size = 4 if kind == F32 else 2

    def emit(b: ir.IRBuilder, src: Any, vectors: Any, factor: Any, dst: Any) -> None:
        scale = splat(b, b.bitcast(b.trunc(factor, I32), F32))
        with repeat(b, vectors) as i:
            value = convert(b, load(b, offset(b, src, (i, LANES * size)), vector(kind)))
            store(b, offset(b, dst, (i, LANES * 4)), b.fmul(b.bitcast(value, vector(F32)), scale))

    return micro_kernel(f"scaled_{name}", 4, emit)


_scaled_f32 = _scaled("f32", F32, lambda b, x: x)
_scaled_bf16 = _scaled("bf16", I16, lambda b, x: b.shl(b.zext(x, vector(I32)), splat(b, I32(16))))
_scaled_f16 = _scaled("f16", I16, lambda b, x: half_to_float(b, b.zext(x, vector(I32))))


@njit(nogil=True)
def read_query(mode: Any, src: Any, dim: Any, factor: Any, turn: Any, dst: Any) -> None:
    """Write ``dim`` numbers times ``factor`` to ``dst`` as float32, and zeros up to a whole vector."""
    vectors = dim // LANES
    bits = int_bits(factor)
    if mode == FLOAT32:
        _scaled_f32(src, vectors, bits, dst)
    elif mode == BF16:
        _scaled_bf16(src, vectors, bits, dst)
    else:
        _scaled_f16(src, vectors, bits, dst)
    for i in range(vectors * LANES, -(-dim // LANES) * LANES):
        value = 0.0
        if i < dim:
            value = load_number(mode, src, i) * factor
        store_f32(dst + 4 * i, value)
    if turn > 1:
        turn_row(dst, dim, turn)


def _emit_turn(b: ir.IRBuilder, row: Any, dim: Any, turn: Any) -> None:
    """Multiply a row by the Hadamard matrix of ``turn`` numbers, block by block, without its factor."""
    step = 1
    while step < 512:
        with b.if_then(b.icmp_unsigned(">", turn, turn.type(step))):
            if step < LANES:
                _turn_inside(b, row, dim, step)
            else:
                _turn_across(b, row, dim, step)
        step *= 2


def _turn_inside(b: ir.IRBuilder, row: Any, dim: Any, step: int) -> None:
    signs = ir.Constant(vector(F32), [-1.0 if lane & step else 1.0 for lane in range(LANES)])
    vectors = b.udiv(b.add(dim, dim.type(LANES - 1)), dim.type(LANES))
    with repeat(b, vectors) as i:
        at = offset(b, row, (i, LANES * 4))
        x = load(b, at, vector(F32))
        partner = shuffle(b, x, x, [lane ^ step for lane in range(LANES)])
        store(b, at, b.fadd(partner, b.fmul(x, signs)))


def _turn_across(b: ir.IRBuilder, row: Any, dim: Any, step: int) -> None:
    with repeat(b, b.udiv(dim, dim.type(2 * step))) as block, repeat(b, step // LANES) as i:
        low = offset(b, row, (block, 8 * step), (i, LANES * 4))
        high = offset(b, low, (4, step))
        x, y = load(b, low, vector(F32)), load(b, high, vector(F32))
        store(b, low, b.fadd(x, y))
        store(b, high, b.fsub(x, y))


turn_row = micro_kernel("turn_row", 3, _emit_turn)


def _emit_pack(b: ir.IRBuilder, src: Any, units: Any, dst: Any, scale: Any) -> None:
    """Write a float32 row as pairs of int16 in the order of turned keys, and the value of one step to ``scale``."""
    vectors = b.udiv(b.add(b.mul(units, units.type(2)), units.type(LANES - 1)), units.type(LANES))
    sizes, strange = (variable(b, ir.Constant(vector(F32), [0] * LANES)) for _ in range(2))
    with repeat(b, vectors) as i:
        x = load(b, offset(b, src, (i, LANES * 4)), vector(F32))
        b.store(greatest(b, call_vector(b, "llvm.fabs", x), b.load(sizes)), sizes)
        b.store(b.fadd(b.load(strange), b.fsub(x, x)), strange)  # NaN, if there is one
    top = reduce(b, lambda x, y: greatest(b, x, y), b.load(sizes))
    step = b.fmul(top, F32(1.0 / 32767.0))
    store(b, scale, b.select(any_nan(b, [b.load(strange)]), F32(float("nan")), step))
    inverse = splat(b, b.select(b.fcmp_ordered(">", top, F32(1e-30)), b.fdiv(F32(32767.0), top), F32(0.0)))
    with repeat(b, vectors) as i:
        x = b.fmul(load(b, offset(b, src, (i, LANES * 4)), vector(F32)), inverse)
        store(b, offset(b, dst, (i, LANES * 2)), woven(b, x))


pack_query = micro_kernel("pack_query", 4, _emit_pack)
