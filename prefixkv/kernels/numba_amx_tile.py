"""Attention on one tile by a processor's matrix unit (Intel AMX): scores, softmax, weighted sums.

A tile is 64 rows of keys and values; queries go by groups of 16, the lanes of a vector. Scores come out with a row of
the tile in each vector, so the softmax of 16 queries is plain vector code: nothing is added across a vector.

* Keys are one operand as they lie, 16 rows by 64 bytes. 8-bit codes meet queries in 16 bits, as two planes of 8;
  bfloat16 meets bfloat16.
* Values are woven into pairs of rows, codes of 8 bits exactly, as bfloat16; the weights of a query, times the rows'
  scales, are rounded to bfloat16, and sums are float32.

What is computed for a query depends on it and on the tile alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from prefixkv.kernels.numba_amx import (
    TILE_BYTES,
    TOKENS,
    amx,
    in_twos,
    pointer,
)
from prefixkv.kernels.numba_dots import MASKED
from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I16,
    I32,
    any_nan,
    bf16_bits,
    call_vector,
    columns_of,
    fma,
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

__all__ = [
    "TILE_ROWS",
    "add_values",
    "mask_lanes",
    "pack_codes",
    "pack_halves",
    "scale_scores",
    "score_codes",
    "score_halves",
    "softmax_lanes",
    "weave_codes",
    "weave_halves",
]

TILE_ROWS = 64
"""Rows of a tile: four runs of 16, each of them in one block."""

_RUN = 16
_RUNS = TILE_ROWS // _RUN
_I64 = ir.IntType(64)
_FLOATS, _INTS = vector(F32, TOKENS), vector(I32, TOKENS)
_LINE = TOKENS * 4
_MOST = 32767.0

_EXP2 = (5.5171669e-2, 2.4261113e-1, 6.9326097e-1, 9.9992806e-1)
"""2**x on -0.5 to 0.5 to within 8e-5 of itself, as in ``numba_dots``: the weights are rounded to 8 bits anyway."""


def _number(b: ir.IRBuilder, value: float) -> Any:
    return splat(b, F32(value), TOKENS)


def _whole(b: ir.IRBuilder, value: int) -> Any:
    return splat(b, I32(value), TOKENS)


def _line(b: ir.IRBuilder, base: Any, row: Any) -> Any:
    return offset(b, base, (row, _LINE))


def _splat_at(b: ir.IRBuilder, address: Any) -> Any:
    return splat(b, load(b, address, F32), TOKENS)


# ---------------------------------------------------------------- queries


def _emit_pack_codes(b: ir.IRBuilder, row: Any, steps: Any, dst: Any, lane: Any, scale: Any) -> None:
    """Write a float32 query as lane ``lane`` of two planes of 8 bits, and the value of one step to ``scale``.

    Args: row [64 * steps]; dst [steps, 2, 16, 16] groups of 4 numbers, the upper bytes first.
    """
    sizes, strange = (variable(b, _number(b, 0.0)) for _ in range(2))
    with repeat(b, b.mul(steps, steps.type(4))) as i:
        x = load(b, _line(b, row, i), _FLOATS)
        b.store(greatest(b, call_vector(b, "llvm.fabs", x), b.load(sizes)), sizes)
        b.store(b.fadd(b.load(strange), b.fsub(x, x)), strange)  # NaN, if there is one
    top = reduce(b, lambda x, y: greatest(b, x, y), b.load(sizes))
    step = b.fmul(top, F32(1.0 / _MOST))
    store(b, scale, b.select(any_nan(b, [b.load(strange)]), F32(float("nan")), step))
    inverse = splat(b, b.select(b.fcmp_ordered(">", top, F32(1e-30)), b.fdiv(F32(_MOST), top), F32(0.0)), TOKENS)
    with repeat(b, steps) as at, repeat(b, 4) as part:
        x = b.fmul(load(b, offset(b, row, (at, 4 * _LINE), (part, _LINE)), _FLOATS), inverse)
        codes = b.fptosi(call_vector(b, "llvm.rint", x), _INTS)
        for plane, some in enumerate((b.ashr(codes, _whole(b, 8)), codes)):
            fours = b.bitcast(b.trunc(some, vector(I8, 16)), vector(I32, 4))
            for j in range(4):
                place = offset(b, dst, (at, 2 * TILE_BYTES), (part, 4 * _LINE), (lane, 4))
                store(b, offset(b, place, (plane * TILE_BYTES + j * _LINE, 1)), b.extract_element(fours, I32(j)))


def _emit_pack_halves(b: ir.IRBuilder, row: Any, steps: Any, dst: Any, lane: Any) -> None:
    """Write a float32 query, rounded to bfloat16, as lane ``lane`` of pairs.

    Args: row [32 * steps]; dst [steps, 16, 16] pairs.
    """
    with repeat(b, steps) as at, repeat(b, 2) as part:
        x = load(b, offset(b, row, (at, 2 * _LINE), (part, _LINE)), _FLOATS)
        pairs = b.bitcast(b.trunc(bf16_bits(b, x), vector(I16, 16)), vector(I32, 8))
        for j in range(8):
            place = offset(b, dst, (at, TILE_BYTES), (part, 8 * _LINE), (lane, 4), (j * _LINE, 1))
            store(b, place, b.extract_element(pairs, I32(j)))


# ---------------------------------------------------------------- scores


def _run_at(b: ir.IRBuilder, runs: Any, run: int) -> Any:
    return load(b, offset(b, runs, (run, 8)), _I64)


def _emit_score_codes(b: ir.IRBuilder, runs: Any, stride: Any, steps: Any, q: Any, out: Any) -> None:
    """Write the products of 64 rows of int8 with the two planes of a group, [2, 64, 16] int32.

    Args: runs [4] addresses of 16 rows each, ``stride`` bytes apart.
    """
    for first in range(0, _RUNS, 2):
        for i in range(4):
            amx(b, "tilezero", I8(i))
        places = [_run_at(b, runs, first + i) for i in range(2)]
        with repeat(b, steps) as step:
            for plane in range(2):
                where = offset(b, q, (step, 2 * TILE_BYTES), (plane, TILE_BYTES))
                amx(b, "tileloadd64", I8(6 + plane), pointer(b, where), _I64(64))
            for i, place in enumerate(places):
                amx(b, "tileloadd64", I8(4 + i), pointer(b, offset(b, place, (step, 64))), stride)
                amx(b, "tdpbssd", I8(2 * i), I8(4 + i), I8(6))
                amx(b, "tdpbsud", I8(2 * i + 1), I8(4 + i), I8(7))
        for i in range(2):
            for plane in range(2):
                place = offset(b, out, (plane * TILE_ROWS * _LINE + (first + i) * TILE_BYTES, 1))
                amx(b, "tilestored64", I8(2 * i + plane), pointer(b, place), _I64(64))


def _emit_score_halves(b: ir.IRBuilder, runs: Any, stride: Any, steps: Any, q: Any, out: Any) -> None:
    """Write the products of 64 rows of bfloat16 with a group, [64, 16] float32."""
    for i in range(_RUNS):
        amx(b, "tilezero", I8(i))
    places = [_run_at(b, runs, i) for i in range(_RUNS)]
    with repeat(b, steps) as step:
        amx(b, "tileloadd64", I8(6), pointer(b, offset(b, q, (step, TILE_BYTES))), _I64(64))
        for i, place in enumerate(places):
            amx(b, "tileloadd64", I8(4 + i % 2), pointer(b, offset(b, place, (step, 64))), stride)
            amx(b, "tdpbf16ps", I8(i), I8(4 + i % 2), I8(6))
    for i in range(_RUNS):
        amx(b, "tilestored64", I8(i), pointer(b, offset(b, out, (i, TILE_BYTES))), _I64(64))


def _emit_mask(b: ir.IRBuilder, scores: Any, first: Any, low: Any, high: Any, most: Any, peak: Any) -> None:
    """Take from each query the rows that it does not see: those before ``low`` [16] or from ``high`` [16] on, int32.

    Writes ``peak`` [16] anew, the largest score of each query that is left, not less than ``most`` [16].
    """
    lows, highs = (load(b, address, _INTS) for address in (low, high))
    largest = variable(b, load(b, most, _FLOATS))
    with repeat(b, TILE_ROWS) as row:
        place = _line(b, scores, row)
        number = splat(b, b.trunc(b.add(first, row), I32), TOKENS)
        seen = b.and_(b.icmp_signed(">=", number, lows), b.icmp_signed("<", number, highs))
        x = b.select(seen, load(b, place, _FLOATS), _number(b, MASKED))
        store(b, place, x)
        b.store(greatest(b, x, b.load(largest)), largest)
    store(b, peak, b.load(largest))


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Emit 2**x for x <= 0, 0 where that is too small for float32; NaN stays NaN."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS, I32, _FLOATS, I16, I32])
    take = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.reduce.ps.512")
    rest = b.call(take, [x, I32(0), x, I16(-1), I32(4)])  # x less the nearest whole number
    result = _number(b, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = fma(b, result, rest, _number(b, coefficient))
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS, _FLOATS, I16, I32])
    scale = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    return b.call(scale, [result, b.fsub(x, rest), x, I16(-1), I32(4)])


_WIDE = 4
"""Rows at a time: as many independent chains."""


def _fold(values: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def _emit_scale_scores(
    b: ir.IRBuilder, scores: Any, planes: Any, k_scales: Any, q_scales: Any, most: Any, peak: Any
) -> None:
    """Turn products into scores in powers of two, in place: [64, 16] float32; the largest of each query to ``peak``.

    Args: planes: whether the products are two planes of int32; k_scales [64], read then; q_scales [16]; most [16], of
    the rows before; peak [16], not less than ``most``.
    """
    factor = load(b, q_scales, _FLOATS)
    peaks = [variable(b, load(b, most, _FLOATS)) for _ in range(_WIDE)]

    def keep(i: int, place: Any, x: Any) -> None:
        store(b, place, x)
        b.store(greatest(b, x, b.load(peaks[i])), peaks[i])

    with b.if_else(b.icmp_unsigned("!=", planes, planes.type(0))) as (then, other):
        with then, repeat(b, TILE_ROWS // _WIDE) as group:
            for i in range(_WIDE):
                row = b.add(b.mul(group, group.type(_WIDE)), group.type(i))
                place = _line(b, scores, row)
                upper, lower = (load(b, offset(b, place, (plane, TILE_ROWS * _LINE)), _INTS) for plane in range(2))
                dot = b.sitofp(b.add(b.shl(upper, _whole(b, 8)), lower), _FLOATS)
                scale = b.fmul(_splat_at(b, offset(b, k_scales, (row, 4))), factor)
                keep(i, place, b.fmul(dot, scale))
        with other, repeat(b, TILE_ROWS // _WIDE) as group:
            for i in range(_WIDE):
                place = offset(b, scores, (group, _WIDE * _LINE), (i, _LINE))
                keep(i, place, b.fmul(load(b, place, _FLOATS), factor))
    store(b, peak, _fold([b.load(place) for place in peaks], lambda x, y: greatest(b, x, y)))


def _emit_softmax(
    b: ir.IRBuilder, scores: Any, masked: Any, v_scales: Any, most: Any, total: Any, shrink: Any, acc: Any, width: Any,
    weights: Any
) -> None:  # fmt: skip
    """Go on with the running softmax of a group by scores [64, 16], and write the weights that its values get.

    Args: masked: whether some rows are not seen, whose scales must not count; v_scales [64]; most, total [16]; shrink
    [16] the new maximum, overwritten; acc [16, width] sums so far, brought to the new maximum; weights [2, 16, 16]
    pairs of bfloat16: 32 rows, query by query, rows i and i + 16 side by side.
    """
    before, peak = load(b, most, _FLOATS), load(b, shrink, _FLOATS)
    factor = variable(b, _number(b, 1.0))
    moved = b.bitcast(b.fcmp_ordered(">", peak, before), I16)
    with b.if_then(b.icmp_unsigned("!=", moved, I16(0))):  # seldom after the first tiles
        b.store(_exp2(b, b.fsub(before, peak)), factor)
        store(b, most, peak)
        store(b, shrink, b.load(factor))
        with repeat(b, TOKENS) as query:
            less = _splat_at(b, offset(b, shrink, (query, 4)))
            with repeat(b, b.udiv(width, width.type(TOKENS))) as i:
                place = offset(b, acc, (b.mul(query, width), 4), (i, _LINE))
                store(b, place, b.fmul(load(b, place, _FLOATS), less))
    sums = [variable(b, _number(b, 0.0)) for _ in range(_WIDE)]

    def pairs(check: bool) -> None:
        with repeat(b, 2) as half, repeat(b, _RUN // (_WIDE // 2)) as group:
            for i in range(_WIDE // 2):
                pair = b.add(b.mul(group, group.type(_WIDE // 2)), group.type(i))
                both = []
                for j in range(2):
                    row = offset(b, pair, (half, 2 * _RUN), (j, _RUN))
                    x = _exp2(b, b.fsub(load(b, _line(b, scores, row), _FLOATS), peak))
                    place = sums[2 * i + j]
                    b.store(b.fadd(b.load(place), x), place)
                    y = b.fmul(x, _splat_at(b, offset(b, v_scales, (row, 4))))
                    if check:  # zero times NaN would count
                        y = b.select(b.fcmp_ordered(">", x, _number(b, 0.0)), y, x)
                    both.append(b.add(b.bitcast(y, _INTS), _whole(b, 0x8000)))
                low = b.lshr(both[0], _whole(b, 16))
                dwords = b.or_(low, b.and_(both[1], _whole(b, -0x10000)))
                store(b, offset(b, weights, (half, TILE_BYTES), (pair, _LINE)), dwords)

    with b.if_else(b.icmp_unsigned("!=", masked, masked.type(0))) as (then, other):
        with then:
            pairs(True)
        with other:
            pairs(False)
    all_sums = _fold([b.load(place) for place in sums], b.fadd)
    store(b, total, fma(b, load(b, total, _FLOATS), b.load(factor), all_sums))
    with repeat(b, 2) as half:
        base = offset(b, weights, (half, TILE_BYTES))
        lines = [load(b, offset(b, base, (i, _LINE)), _INTS) for i in range(16)]
        for i, line in enumerate(columns_of(b, lines)):
            store(b, offset(b, base, (i, _LINE)), line)


# ---------------------------------------------------------------- values


def _weave(name: str, size: int, join: Callable[[ir.IRBuilder, Any, Any], Any], kind: ir.Type) -> Any:
    """Return ``weave(runs, stride, parts, dst)``: 64 rows of ``16 * parts`` numbers to [2, parts, 16, 16] pairs.

    Rows i and i + 16 of 32 are side by side.
    """

    def emit(b: ir.IRBuilder, runs: Any, stride: Any, parts: Any, dst: Any) -> None:
        for half in range(2):
            places = [_run_at(b, runs, 2 * half + i) for i in range(2)]
            with repeat(b, _RUN) as row:
                rows = [offset(b, place, (row, stride)) for place in places]
                out = offset(b, dst, (parts, half * TILE_BYTES), (row, _LINE))
                with repeat(b, parts) as part:
                    x, y = (load(b, offset(b, at, (part, 16 * size)), vector(kind, 16)) for at in rows)
                    store(b, offset(b, out, (part, TILE_BYTES)), join(b, x, y))

    return micro_kernel(name, 4, emit)


def _join_codes(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    low, high = (b.bitcast(b.sitofp(b.sext(codes, _INTS), _FLOATS), _INTS) for codes in (x, y))
    return b.or_(b.lshr(low, _whole(b, 16)), high)  # a code has at most 8 bits: nothing is lost


def _join_halves(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    low, high = (b.zext(halves, _INTS) for halves in (x, y))
    return b.or_(low, b.shl(high, _whole(b, 16)))


def _emit_add_values(b: ir.IRBuilder, weights: Any, values: Any, parts: Any, acc: Any) -> None:
    """Add the weighted sums of 64 rows to acc [16, 16 * parts] float32; values as woven."""
    stride = b.mul(parts, parts.type(_LINE))
    for half in range(2):
        amx(b, "tileloadd64", I8(6 + half), pointer(b, offset(b, weights, (half, TILE_BYTES))), _I64(64))

    def emit(first: Any, width: int) -> None:
        places = [offset(b, acc, (first, _LINE), (i, _LINE)) for i in range(width)]
        for i, place in enumerate(places):
            amx(b, "tileloadd64", I8(i), pointer(b, place), stride)
        for half in range(2):
            for i in range(width):
                where = offset(b, values, (parts, half * TILE_BYTES), (first, TILE_BYTES), (i, TILE_BYTES))
                amx(b, "tileloadd64", I8(2 + 2 * half + i), pointer(b, where), _I64(64))
                amx(b, "tdpbf16ps", I8(i), I8(6 + half), I8(2 + 2 * half + i))
        for i, place in enumerate(places):
            amx(b, "tilestored64", I8(i), pointer(b, place), stride)

    in_twos(b, parts, emit)


pack_codes = micro_kernel("pack_codes", 5, _emit_pack_codes)
pack_halves = micro_kernel("pack_halves", 4, _emit_pack_halves)
score_codes = micro_kernel("score_codes", 5, _emit_score_codes)
score_halves = micro_kernel("score_halves", 5, _emit_score_halves)
scale_scores = micro_kernel("scale_scores", 6, _emit_scale_scores)
mask_lanes = micro_kernel("mask_lanes", 6, _emit_mask)
softmax_lanes = micro_kernel("softmax_lanes", 9, _emit_softmax)
weave_codes = _weave("weave_codes", 1, _join_codes, I8)
weave_halves = _weave("weave_halves", 2, _join_halves, I16)
add_values = micro_kernel("add_values", 4, _emit_add_values)
