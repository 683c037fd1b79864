"""Attention on one tile by a processor's matrix unit (Intel AMX): scores, softmax, weighted sums.

A tile is 64 rows of keys and values in bfloat16, whatever they are stored as; queries go by groups of 16, the lanes of
a vector. Scores come out with a row of the tile in each vector, so the softmax of 16 queries is plain vector code:
nothing is added across a vector.

* Keys are one operand as rows, 16 of them by 64 bytes; queries are lanes of pairs.
* Values are turned, a row for each of their numbers: then weights are the other operand as they come out of the
  softmax, rounded to bfloat16, and sums are lanes again. They are float32.

What is computed for a query depends on it and on the tile alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    bf16_bits,
    columns_of,
    fma,
    fold,
    greatest,
    load,
    micro_kernel,
    offset,
    repeat,
    splat,
    store,
    variable,
    vector,
)

__all__ = [
    "TILE_ROWS",
    "add_values",
    "exp2",
    "isolate_rows",
    "mask_tile",
    "number",
    "pack_queries",
    "score_tile",
    "softmax_tile",
    "turn_values",
    "whole",
    "write_sums",
]

TILE_ROWS = 64
"""Rows of a tile: four runs of 16."""

_RUN = 16
_RUNS = TILE_ROWS // _RUN
_I64 = ir.IntType(64)
_FLOATS, _INTS = vector(F32, TOKENS), vector(I32, TOKENS)
_LINE = TOKENS * 4

_EXP2 = (5.5171669e-2, 2.4261113e-1, 6.9326097e-1, 9.9992806e-1)
"""2**x on -0.5 to 0.5 to within 8e-5 of itself, not exactly 1 at 0: the weights are rounded to 8 bits anyway."""


def number(b: ir.IRBuilder, value: float) -> Any:
    """Emit 16 times a float32."""
    return splat(b, F32(value), TOKENS)


def whole(b: ir.IRBuilder, value: int) -> Any:
    """Emit 16 times an int32."""
    return splat(b, I32(value), TOKENS)


def _line(b: ir.IRBuilder, base: Any, row: Any) -> Any:
    return offset(b, base, (row, _LINE))


# ---------------------------------------------------------------- queries


def _emit_pack_queries(b: ir.IRBuilder, sources: Any, steps: Any, turn: Any, room: Any, dst: Any) -> None:
    """Write 16 queries as lanes of pairs, multiplied by the Hadamard matrix of ``turn`` numbers, without its factor.

    Args: sources [16] addresses of rows of ``32 * steps`` bfloat16; turn: 0 or 1 for no matrix; room
    [32 * steps, 16] float32; dst [steps, 16, 16] pairs.
    """
    starts = [load(b, offset(b, sources, (i, 8)), _I64) for i in range(TOKENS)]
    turns = b.icmp_unsigned(">", turn, turn.type(1))
    with b.if_else(turns) as (then, other):
        with then:
            with repeat(b, steps) as step:
                columns = columns_of(b, [load(b, offset(b, start, (step, 64)), _INTS) for start in starts])
                for i, column in enumerate(columns):
                    place = offset(b, room, (step, 2 * TILE_BYTES), (i, 2 * _LINE))
                    store(b, place, b.shl(column, whole(b, 16)))
                    store(b, offset(b, place, (1, _LINE)), b.and_(column, whole(b, -0x10000)))
            _emit_hadamard(b, room, b.mul(steps, steps.type(32)), turn)
            with repeat(b, b.mul(steps, steps.type(16))) as pair:
                place = offset(b, room, (pair, 2 * _LINE))
                low, high = (bf16_bits(b, load(b, offset(b, place, (i, _LINE)), _FLOATS)) for i in range(2))
                store(b, _line(b, dst, pair), b.or_(low, b.shl(high, whole(b, 16))))
        with other, repeat(b, steps) as step:
            columns = columns_of(b, [load(b, offset(b, start, (step, 64)), _INTS) for start in starts])
            for i, column in enumerate(columns):
                store(b, offset(b, dst, (step, TILE_BYTES), (i, _LINE)), column)


def _emit_hadamard(b: ir.IRBuilder, lanes: Any, count: Any, turn: Any) -> None:
    """Multiply ``count`` lines, in blocks of ``turn``, by the Hadamard matrix without its factor."""
    for step in (1, 4, 16, 64, 256):
        for radix in (4, 2):  # two of its stages at once where there are two
            sized = (">=" if radix == 4 else "==", turn.type(radix * step))
            with b.if_then(b.icmp_unsigned(sized[0], turn, sized[1])):
                blocks = b.udiv(count, count.type(radix * step))
                with repeat(b, blocks) as block, repeat(b, step) as i:
                    first = offset(b, lanes, (block, radix * step * _LINE), (i, _LINE))
                    places = [offset(b, first, (k * step, _LINE)) for k in range(radix)]
                    values = [load(b, place, _FLOATS) for place in places]
                    for apart in (1, 2)[: radix // 2]:
                        for k in (k for k in range(radix) if not k & apart):
                            x, y = values[k], values[k + apart]
                            values[k], values[k + apart] = b.fadd(x, y), b.fsub(x, y)
                    for place, value in zip(places, values, strict=True):
                        store(b, place, value)


# ---------------------------------------------------------------- scores


def _emit_score(b: ir.IRBuilder, k: Any, steps: Any, q: Any, out: Any) -> None:
    """Write the products of 64 keys [64, 32 * steps] with a group of queries, [64, 16] float32."""
    stride = b.mul(steps, steps.type(64))
    for i in range(_RUNS):
        amx(b, "tilezero", I8(i))
    with repeat(b, steps) as step:
        amx(b, "tileloadd64", I8(6), pointer(b, offset(b, q, (step, TILE_BYTES))), _I64(64))
        for i in range(_RUNS):
            rows = offset(b, k, (step, 64), (stride, i * _RUN))
            amx(b, "tileloadd64", I8(4 + i % 2), pointer(b, rows), stride)
            amx(b, "tdpbf16ps", I8(i), I8(4 + i % 2), I8(6))
    for i in range(_RUNS):
        amx(b, "tilestored64", I8(i), pointer(b, offset(b, out, (i, TILE_BYTES))), _I64(64))


def _emit_mask(b: ir.IRBuilder, scores: Any, first: Any, low: Any, high: Any) -> None:
    """Take from each query the rows that it does not see: those before ``low`` [16] or from ``high`` [16] on, int32."""
    lows, highs = (load(b, address, _INTS) for address in (low, high))
    with repeat(b, TILE_ROWS) as row:
        place = _line(b, scores, row)
        rows = splat(b, b.trunc(b.add(first, row), I32), TOKENS)
        seen = b.and_(b.icmp_signed(">=", rows, lows), b.icmp_signed("<", rows, highs))
        store(b, place, b.select(seen, load(b, place, _FLOATS), number(b, MASKED)))


def exp2(b: ir.IRBuilder, x: Any, powers: Sequence[float]) -> Any:
    """Emit 2**x for x <= 0, 0 where that is too small for float32; NaN stays NaN.

    ``powers``: 2**x on -0.5 to 0.5, highest power first.
    """
    kind = ir.FunctionType(_FLOATS, [_FLOATS, I32, _FLOATS, I16, I32])
    take = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.reduce.ps.512")
    rest = b.call(take, [x, I32(0), x, I16(-1), I32(4)])  # x less the nearest whole number
    result = number(b, powers[0])
    for coefficient in powers[1:]:
        result = fma(b, result, rest, number(b, coefficient))
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS, _FLOATS, I16, I32])
    scale = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    return b.call(scale, [result, b.fsub(x, rest), x, I16(-1), I32(4)])


_WIDE = 4
"""Rows at a time: as many independent chains."""


def _emit_softmax(
    b: ir.IRBuilder, scores: Any, factor: Any, most: Any, total: Any, acc: Any, width: Any, weights: Any
) -> None:
    """Go on with the running softmax of a group by scores [64, 16], and write the weights that its values get.

    Args: factor: bits of the float32 that makes powers of two of scores, more than 0; most, total [16]; acc [width, 16]
    sums so far, brought to the new maximum; weights [2, 16, 16] pairs of bfloat16, rows i and i + 16 of 32 side by
    side.
    """
    scale = splat(b, b.bitcast(b.trunc(factor, I32), F32), TOKENS)
    peaks = [variable(b, load(b, offset(b, scores, (i, _LINE)), _FLOATS)) for i in range(_WIDE)]
    with repeat(b, TILE_ROWS // _WIDE) as group:
        for i, place in enumerate(peaks):
            x = load(b, offset(b, scores, (group, _WIDE * _LINE), (i, _LINE)), _FLOATS)
            b.store(greatest(b, x, b.load(place)), place)
    before = load(b, most, _FLOATS)
    largest = fold([b.load(place) for place in peaks], lambda x, y: greatest(b, x, y))
    peak = greatest(b, b.fmul(largest, scale), before)
    shrink = variable(b, number(b, 1.0))
    moved = b.fcmp_ordered(">", peak, before)
    with b.if_then(b.icmp_unsigned("!=", b.bitcast(moved, I16), I16(0))):  # seldom after the first tiles
        # Exactly 1 for who has not moved, whatever its neighbours do.
        b.store(b.select(moved, exp2(b, b.fsub(before, peak), _EXP2), number(b, 1.0)), shrink)
        store(b, most, peak)
        with repeat(b, width) as i:
            place = _line(b, acc, i)
            store(b, place, b.fmul(load(b, place, _FLOATS), b.load(shrink)))
    below = b.fsub(number(b, 0.0), peak)
    sums = [variable(b, number(b, 0.0)) for _ in range(_WIDE)]
    with repeat(b, 2) as half, repeat(b, _RUN // (_WIDE // 2)) as group:
        for i in range(_WIDE // 2):
            pair = b.add(b.mul(group, group.type(_WIDE // 2)), group.type(i))
            both = []
            for j in range(2):
                row = offset(b, pair, (half, 2 * _RUN), (j, _RUN))
                x = exp2(b, fma(b, load(b, _line(b, scores, row), _FLOATS), scale, below), _EXP2)
                place = sums[2 * i + j]
                b.store(b.fadd(b.load(place), x), place)
                # Rounded half up, which is cheap. The sum of weights keeps all bits: errors of many weights cancel.
                both.append(b.add(b.bitcast(x, _INTS), whole(b, 0x8000)))
            dwords = b.or_(b.lshr(both[0], whole(b, 16)), b.and_(both[1], whole(b, -0x10000)))
            store(b, offset(b, weights, (half, TILE_BYTES), (pair, _LINE)), dwords)
    all_sums = fold([b.load(place) for place in sums], b.fadd)
    store(b, total, fma(b, load(b, total, _FLOATS), b.load(shrink), all_sums))


# ---------------------------------------------------------------- values


def _emit_turn_values(b: ir.IRBuilder, rows: Any, parts: Any, dst: Any) -> None:
    """Turn 64 rows of ``16 * parts`` bfloat16 into [2, parts, 16, 16] pairs: number, then rows i and i + 16 of 32."""
    stride = b.mul(parts, parts.type(2 * TOKENS))
    with repeat(b, 2) as half, repeat(b, parts) as part:
        first = offset(b, rows, (b.mul(half, half.type(2 * _RUN)), stride), (part, 2 * TOKENS))
        pairs = []
        for row in range(_RUN):
            places = (offset(b, first, (stride, row + i * _RUN)) for i in range(2))
            low, high = (b.zext(load(b, place, vector(I16, TOKENS)), _INTS) for place in places)
            pairs.append(b.or_(low, b.shl(high, whole(b, 16))))
        out = offset(b, dst, (b.add(b.mul(half, parts), part), TILE_BYTES))
        for i, column in enumerate(columns_of(b, pairs)):
            store(b, offset(b, out, (i, _LINE)), column)


def _emit_isolate(b: ir.IRBuilder, values: Any, parts: Any, keys: Any, stride: Any) -> None:
    """Move what is not finite from values to keys: rows of ``16 * parts`` bfloat16, keys ``stride`` bytes apart.

    A weight of 0 times NaN would reach queries that do not see the row; a score that is NaN reaches those that see it,
    and makes all their numbers NaN.
    """

    def const(value: int) -> Any:
        return splat(b, I16(value), TOKENS)

    with repeat(b, TILE_ROWS) as row:
        line = offset(b, values, (b.mul(row, parts), 2 * TOKENS))
        found = variable(b, I16(0))
        with repeat(b, parts) as part:
            size = b.and_(load(b, offset(b, line, (part, 2 * TOKENS)), vector(I16, TOKENS)), const(0x7FFF))
            bad = b.bitcast(b.icmp_unsigned(">=", size, const(0x7F80)), I16)
            b.store(b.or_(b.load(found), bad), found)
        with b.if_then(b.icmp_unsigned("!=", b.load(found), I16(0))):
            with repeat(b, parts) as part:
                store(b, offset(b, line, (part, 2 * TOKENS)), const(0))
            store(b, offset(b, keys, (row, stride)), I16(0x7FC0))


def _emit_add_values(b: ir.IRBuilder, weights: Any, values: Any, parts: Any, acc: Any) -> None:
    """Add the weighted sums of 64 rows to acc [16 * parts, 16] float32; values as turned."""
    for half in range(2):
        amx(b, "tileloadd64", I8(6 + half), pointer(b, offset(b, weights, (half, TILE_BYTES))), _I64(64))

    def emit(first: Any, width: int) -> None:
        places = [offset(b, acc, (first, TILE_BYTES), (i, TILE_BYTES)) for i in range(width)]
        for i, place in enumerate(places):
            amx(b, "tileloadd64", I8(i), pointer(b, place), _I64(64))
        for half in range(2):
            for i in range(width):
                where = offset(b, values, (parts, half * TILE_BYTES), (first, TILE_BYTES), (i, TILE_BYTES))
                amx(b, "tileloadd64", I8(2 + 2 * half + i), pointer(b, where), _I64(64))
                amx(b, "tdpbf16ps", I8(i), I8(2 + 2 * half + i), I8(6 + half))
        for i, place in enumerate(places):
            amx(b, "tilestored64", I8(i), pointer(b, place), _I64(64))

    in_twos(b, parts, emit)


def _emit_write_sums(b: ir.IRBuilder, acc: Any, parts: Any, targets: Any, count: Any) -> None:
    """Write the sums [16 * parts, 16] of ``count`` queries as rows to the addresses ``targets`` [16]."""
    with repeat(b, parts) as part:
        base = offset(b, acc, (part, TILE_BYTES))
        columns = columns_of(b, [load(b, offset(b, base, (i, _LINE)), _INTS) for i in range(TOKENS)])
        for lane, column in enumerate(columns):
            with b.if_then(b.icmp_unsigned("<", count.type(lane), count)):
                store(b, offset(b, load(b, offset(b, targets, (lane, 8)), _I64), (part, _LINE)), column)


pack_queries = micro_kernel("pack_queries", 5, _emit_pack_queries)
isolate_rows = micro_kernel("isolate_rows", 4, _emit_isolate)
score_tile = micro_kernel("score_tile", 4, _emit_score)
mask_tile = micro_kernel("mask_tile", 4, _emit_mask)
softmax_tile = micro_kernel("softmax_tile", 7, _emit_softmax)
turn_values = micro_kernel("turn_values", 3, _emit_turn_values)
add_values = micro_kernel("add_values", 4, _emit_add_values)
write_sums = micro_kernel("write_sums", 4, _emit_write_sums)
