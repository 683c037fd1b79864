"""Attention on 64 rows of 8-bit codes by a processor's matrix unit (Intel AMX), for few queries.

Codes are operands as they are: nothing is decoded. A query, and the weights of a tile, are 16 bits, two planes of 8;
sums of int32 are exact. Up to 16 queries go together, a row of a tile each, and each is computed for itself: to the
same bits whoever is beside it.

* Keys are turned by four bytes, so that the scores of 16 rows come out side by side.
* Values are woven, four rows side by side, see :mod:`prefixkv.kernels.numba_tiles`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from prefixkv.kernels.numba_amx import TILE_BYTES, amx, in_twos, pointer
from prefixkv.kernels.numba_amx_tile import exp2, number, whole
from prefixkv.kernels.numba_dots import EXP2, MASKED
from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I32,
    any_nan,
    call_vector,
    columns_of,
    fma,
    fold,
    greatest,
    load,
    micro_kernel,
    offset,
    reduce,
    repeat,
    splat,
    store,
    variable,
    vector,
)
from prefixkv.kernels.numba_tiles import weave_run

__all__ = ["add_codes", "pack_planes", "scale_sums", "score_codes", "softmax_codes", "turn_codes", "weave_codes"]

_I64 = ir.IntType(64)
_RUN, _RUNS = 16, 4
_FLOATS, _INTS, _BYTES = vector(F32, _RUN), vector(I32, _RUN), vector(I8, _RUN)
_MOST = 32767.0
_ROW = 64
_SCORE_ROW = _RUN * _RUNS * 4
_SCORE_PLANE = _RUN * _SCORE_ROW


def _store_planes(b: ir.IRBuilder, codes: Any, place: Any, plane_bytes: Any) -> None:
    """Emit stores of the upper bytes and the lower bytes of 16 numbers."""
    store(b, place, b.trunc(b.ashr(codes, whole(b, 8)), _BYTES))
    store(b, offset(b, place, (plane_bytes, 1)), b.trunc(codes, _BYTES))


def _emit_pack(b: ir.IRBuilder, row: Any, steps: Any, dst: Any, scale: Any) -> None:
    """Write a float32 query [64 * steps] as a row of the planes [steps, 2, 16, 64], and the value of 1 to ``scale``."""
    sizes, strange = (variable(b, number(b, 0.0)) for _ in range(2))
    with repeat(b, b.mul(steps, steps.type(4))) as i:
        x = load(b, offset(b, row, (i, 64)), _FLOATS)
        b.store(greatest(b, call_vector(b, "llvm.fabs", x), b.load(sizes)), sizes)
        b.store(b.fadd(b.load(strange), b.fsub(x, x)), strange)  # NaN, if there is one
    top = reduce(b, lambda x, y: greatest(b, x, y), b.load(sizes))
    step = b.fmul(top, F32(1.0 / _MOST))
    store(b, scale, b.select(any_nan(b, [b.load(strange)]), F32(float("nan")), step))
    inverse = splat(b, b.select(b.fcmp_ordered(">", top, F32(1e-30)), b.fdiv(F32(_MOST), top), F32(0.0)), _RUN)
    with repeat(b, steps) as at, repeat(b, 4) as part:
        x = b.fmul(load(b, offset(b, row, (at, 256), (part, 64)), _FLOATS), inverse)
        codes = b.fptosi(call_vector(b, "llvm.rint", x), _INTS)
        _store_planes(b, codes, offset(b, dst, (at, 2 * TILE_BYTES), (part, _RUN)), TILE_BYTES)


def _emit_turn(b: ir.IRBuilder, src: Any, steps: Any, dst: Any) -> None:
    """Turn 16 rows of ``64 * steps`` codes into [steps, 16, 16] groups of four: four numbers, then row."""
    stride = b.mul(steps, steps.type(_ROW))
    with repeat(b, steps) as step:
        start = offset(b, src, (step, 64))
        rows = [load(b, offset(b, start, (stride, i)), _INTS) for i in range(_RUN)]
        for i, column in enumerate(columns_of(b, rows)):
            store(b, offset(b, dst, (step, TILE_BYTES), (i, 64)), column)


def _emit_weave(b: ir.IRBuilder, src: Any, steps: Any, dst: Any) -> None:
    """Weave 16 rows of ``64 * steps`` codes into 4 lines of each of the tiles [4 * steps, 16, 16] of groups of four."""
    stride = b.mul(steps, steps.type(_ROW))
    with repeat(b, _RUN // 4) as quad, repeat(b, steps) as step:
        first = offset(b, src, (b.mul(quad, quad.type(4)), stride), (step, 64))
        rows = [load(b, offset(b, first, (stride, i)), vector(I8, _ROW)) for i in range(4)]
        for i, line in enumerate(weave_run(b, rows)):
            store(b, offset(b, dst, (step, 4 * TILE_BYTES), (i, TILE_BYTES), (quad, 64)), line)


def _emit_score(b: ir.IRBuilder, q: Any, k: Any, steps: Any, out: Any) -> None:
    """Write the products of a group's planes [steps, 2, 16, 64] with turned keys [4, steps, 16, 16].

    ``out`` [2, 16, 64] int32, for the upper and the lower plane.
    """
    for first in range(0, _RUNS, 2):
        for i in range(4):
            amx(b, "tilezero", I8(i))
        with repeat(b, steps) as step:
            for plane in range(2):
                where = offset(b, q, (step, 2 * TILE_BYTES), (plane, TILE_BYTES))
                amx(b, "tileloadd64", I8(4 + plane), pointer(b, where), _I64(64))
            for i in range(2):
                keys = offset(b, k, (steps, (first + i) * TILE_BYTES), (step, TILE_BYTES))
                amx(b, "tileloadd64", I8(6 + i), pointer(b, keys), _I64(64))
                amx(b, "tdpbssd", I8(2 * i), I8(4), I8(6 + i))
                amx(b, "tdpbusd", I8(2 * i + 1), I8(5), I8(6 + i))
        for i in range(2):
            for plane in range(2):
                place = offset(b, out, (plane * _SCORE_PLANE + (first + i) * 64, 1))
                amx(b, "tilestored64", I8(2 * i + plane), pointer(b, place), _I64(_SCORE_ROW))


def _joined(b: ir.IRBuilder, place: Any, plane_bytes: Any) -> Any:
    """Emit the float32 of sums in two planes."""
    upper, lower = load(b, place, _INTS), load(b, offset(b, place, (plane_bytes, 1)), _INTS)
    return b.sitofp(b.add(b.shl(upper, whole(b, 8)), lower), _FLOATS)


def _emit_softmax(
    b: ir.IRBuilder, products: Any, count: Any, k_scales: Any, v_scales: Any, q_scales: Any, masked: Any, first: Any,
    seen: Any, most: Any, total: Any, shrink: Any, w_scales: Any, weights: Any
) -> None:  # fmt: skip
    """Go on with the running softmax of ``count`` queries, and write the weights of their values.

    Args: products [2, 16, 64]; k_scales, v_scales [64]; q_scales [16], of powers of two; masked: whether somebody does
    not see all rows; first: the tile's first row; seen [16, 2] first row and end of what each sees; most [16]; total
    [16, 16] lanes to be added in the end; shrink [16], written, the factor of what was summed before; w_scales [16],
    written, the value of one step of the weights; weights [2, 16, 64] planes.
    """

    def larger(x: Any, y: Any) -> Any:
        return greatest(b, x, y)

    lanes = ir.Constant(_INTS, list(range(_RUN)))
    k_steps, v_steps = (
        [load(b, offset(b, base, (run * 64, 1)), _FLOATS) for run in range(_RUNS)] for base in (k_scales, v_scales)
    )
    with repeat(b, count) as query:
        factor = splat(b, load(b, offset(b, q_scales, (query, 4)), F32), _RUN)
        rows = []
        for run in range(_RUNS):
            dot = _joined(b, offset(b, products, (query, _SCORE_ROW), (run * 64, 1)), _SCORE_PLANE)
            rows.append(variable(b, b.fmul(b.fmul(dot, k_steps[run]), factor)))
        with b.if_then(b.icmp_unsigned("!=", masked, masked.type(0))):
            low, high = (
                splat(b, b.trunc(load(b, offset(b, seen, (query, 16), (i * 8, 1)), _I64), I32), _RUN) for i in range(2)
            )
            for run, place in enumerate(rows):
                row = b.add(lanes, splat(b, b.trunc(b.add(first, first.type(run * _RUN)), I32), _RUN))
                inside = b.and_(b.icmp_signed(">=", row, low), b.icmp_signed("<", row, high))
                b.store(b.select(inside, b.load(place), number(b, MASKED)), place)
        scores = [b.load(place) for place in rows]
        before = load(b, offset(b, most, (query, 4)), F32)
        peak = greatest(b, reduce(b, larger, fold(scores, larger)), before)
        moved = variable(b, F32(1.0))
        with b.if_then(b.fcmp_ordered(">", peak, before)):  # seldom after the first tiles
            b.store(b.extract_element(exp2(b, splat(b, b.fsub(before, peak), _RUN), EXP2), I32(0)), moved)
            store(b, offset(b, most, (query, 4)), peak)
        store(b, offset(b, shrink, (query, 4)), b.load(moved))
        powers = [exp2(b, b.fsub(x, splat(b, peak, _RUN)), EXP2) for x in scores]
        sums = offset(b, total, (query, 64))
        store(b, sums, fma(b, load(b, sums, _FLOATS), splat(b, b.load(moved), _RUN), fold(powers, b.fadd)))
        scaled = []
        for x, step in zip(powers, v_steps, strict=True):
            # What is not seen must not count, and zero times NaN would.
            scaled.append(b.select(b.fcmp_ordered(">", x, number(b, 0.0)), b.fmul(x, step), number(b, 0.0)))
        top = reduce(b, larger, fold(scaled, larger))
        step = b.select(any_nan(b, scaled), F32(float("nan")), b.fmul(top, F32(1.0 / _MOST)))
        store(b, offset(b, w_scales, (query, 4)), step)
        inverse = splat(b, b.select(b.fcmp_ordered(">", top, F32(1e-30)), b.fdiv(F32(_MOST), top), F32(0.0)), _RUN)
        for run, x in enumerate(scaled):
            codes = b.fptosi(call_vector(b, "llvm.rint", b.fmul(x, inverse)), _INTS)
            _store_planes(b, codes, offset(b, weights, (query, _ROW), (run * _RUN, 1)), TILE_BYTES)


def _emit_add(b: ir.IRBuilder, weights: Any, values: Any, tiles: Any, out: Any, plane_bytes: Any) -> None:
    """Write the products of weights [2, 16, 64] with woven values [tiles, 16, 16].

    ``out`` [2, 16, 16 * tiles] int32, the planes ``plane_bytes`` apart.
    """
    stride = b.mul(tiles, tiles.type(64))
    for plane in range(2):
        amx(b, "tileloadd64", I8(4 + plane), pointer(b, offset(b, weights, (plane * TILE_BYTES, 1))), _I64(64))

    def emit(first: Any, width: int) -> None:
        for i in range(2 * width):
            amx(b, "tilezero", I8(i))
        for i in range(width):
            where = offset(b, values, (first, TILE_BYTES), (i * TILE_BYTES, 1))
            amx(b, "tileloadd64", I8(6 + i), pointer(b, where), _I64(64))
            for plane in range(2):
                amx(b, "tdpbusd", I8(2 * i + plane), I8(4 + plane), I8(6 + i))
        for i in range(width):
            for plane in range(2):
                place = offset(b, out, (first, 64), (plane_bytes, plane), (i * 64, 1))
                amx(b, "tilestored64", I8(2 * i + plane), pointer(b, place), stride)

    in_twos(b, tiles, emit)


def _emit_scale(
    b: ir.IRBuilder, products: Any, plane_bytes: Any, count: Any, tiles: Any, shrink: Any, w_scales: Any, acc: Any
) -> None:
    """Bring acc [count, 16 * tiles] float32 to the new maximum and add products [2, 16, 16 * tiles]."""
    with repeat(b, count) as query:
        less, step = (splat(b, load(b, offset(b, base, (query, 4)), F32), _RUN) for base in (shrink, w_scales))
        row = b.mul(b.mul(query, tiles), tiles.type(64))
        with repeat(b, tiles) as i:
            at = offset(b, row, (i, 64))
            place = b.add(acc, at)
            more = _joined(b, b.add(products, at), plane_bytes)
            store(b, place, fma(b, more, step, b.fmul(load(b, place, _FLOATS), less)))


pack_planes = micro_kernel("pack_planes", 4, _emit_pack)
turn_codes = micro_kernel("turn_codes", 3, _emit_turn)
weave_codes = micro_kernel("weave_codes", 3, _emit_weave)
score_codes = micro_kernel("score_codes", 4, _emit_score)
softmax_codes = micro_kernel("softmax_codes", 13, _emit_softmax)
add_codes = micro_kernel("add_codes", 5, _emit_add)
scale_sums = micro_kernel("scale_sums", 7, _emit_scale)
