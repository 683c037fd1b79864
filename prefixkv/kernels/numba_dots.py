"""The arithmetic of attention on one tile: scores, softmax, weighted sums.

Where rows are quantised, both products run on integers: a query, and the weights of a tile, become int16 with a scale
of their own. That costs 2e-5 of the largest number and nothing else, since sums of int32 are exact, and a processor
multiplies and adds 32 pairs in one instruction. Rows in 16 or 32 bits are multiplied in float32.

Every result of a query depends on that query and the tile alone, bit for bit, whoever else is attended beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from prefixkv.kernels.numba_ir import (
    F32,
    I16,
    I32,
    LANES,
    any_nan,
    call_vector,
    dot_pairs,
    fma,
    fold,
    greatest,
    load,
    micro_kernel,
    offset,
    reduce,
    repeat,
    shuffle,
    splat,
    store,
    variable,
    vector,
)
from prefixkv.kernels.numba_tiles import ROWS

__all__ = [
    "EXP2",
    "MASKED",
    "NOTHING",
    "TOGETHER",
    "cap_scores",
    "score_float",
    "score_int",
    "softmax",
    "sum_float",
    "sum_int",
    "woven",
]

TOGETHER = 4
"""Queries whose accumulators are held in registers at once."""

NOTHING = -1e30
"""Running maximum before the first row."""

MASKED = -1e38
"""Score of a row that is not seen: so far below NOTHING that its weight is exactly 0. Infinities breed NaN."""

EXP2 = (1.3264727e-3, 9.6715129e-3, 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
"""2**x on -0.5 to 0.5 to within 1e-7 of itself, highest power first, exactly 1 at 0: a least-squares fit whose weights
were moved until the error was even."""

_SHIFT = 12582912.0 + 127.0
"""Adding 1.5 * 2**23 rounds a float32 to a whole number and leaves that number in its last bits, here plus 127."""


def _zeros(kind: ir.Type) -> Any:
    return ir.Constant(vector(kind), [0] * LANES)


def woven(b: ir.IRBuilder, x: Any) -> Any:
    """Emit a vector of float32 rounded to int16, of every four numbers the second and the third exchanged.

    So that they meet the pairs of turned keys and woven values.
    """
    codes = b.trunc(b.fptosi(call_vector(b, "llvm.rint", x), vector(I32)), vector(I16))
    return shuffle(b, codes, codes, [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)])


def _for_queries(count: Any, b: ir.IRBuilder, body: Callable[[Any, int], None]) -> None:
    """Emit ``body(first query, how many)`` for full groups of TOGETHER, then for the rest of 1 to TOGETHER - 1."""
    groups = b.udiv(count, count.type(TOGETHER))
    with repeat(b, groups) as group:
        body(b.mul(group, group.type(TOGETHER)), TOGETHER)
    first = b.mul(groups, groups.type(TOGETHER))
    rest = b.sub(count, first)
    for few in range(1, TOGETHER):
        with b.if_then(b.icmp_unsigned("==", rest, rest.type(few))):
            body(first, few)


def _accumulate(
    b: ir.IRBuilder,
    units: Any,
    num: int,
    step: Callable[[Any, Any, Any], Any],
    zero: Any,
    k_at: Any,
    q_at: Callable[[int], Any],
) -> list[list[Any]]:
    """Emit the sum over units for 2 vectors of rows and ``num`` queries; two sums each, for the latency of an add.

    The number of units is even.
    """
    kind = zero.type.element
    sums = [[[variable(b, zero) for _ in range(2)] for _ in range(2)] for _ in range(num)]
    with repeat(b, b.udiv(units, units.type(2))) as pair:
        for parity in range(2):
            unit = b.add(b.mul(pair, pair.type(2)), pair.type(parity))
            keys = [load(b, offset(b, k_at, (unit, ROWS * 4), (v, LANES * 4)), zero.type) for v in range(2)]
            for i in range(num):
                query = splat(b, load(b, offset(b, q_at(i), (unit, 4)), kind))
                for v in range(2):
                    place = sums[i][v][parity]
                    b.store(step(b.load(place), keys[v], query), place)
    add = b.fadd if kind == F32 else b.add
    return [[add(*(b.load(place) for place in places)) for places in rows] for rows in sums]


def _emit_score_int(
    b: ir.IRBuilder,
    k: Any,
    scales: Any,
    minima: Any,
    groups: Any,
    units: Any,
    q: Any,
    q_sums: Any,
    q_scales: Any,
    num: Any,
    out: Any,
) -> None:
    """Score queries against a tile: ``out[query, row] = q_scale * sum over groups (dot * scale + q_sum * minimum)``.

    Args: k [groups * units, 32] turned keys; scales and minima [groups, 32], 64 numbers apart; q [num, groups * units]
    pairs; q_sums [num, groups]; q_scales [num]; out [num, 32] float32.
    """
    width = b.mul(groups, units)

    def body(first: Any, few: int) -> None:
        with repeat(b, ROWS // (2 * LANES)) as part:
            lane = b.mul(part, part.type(2 * LANES * 4))
            totals = [[variable(b, _zeros(F32)) for _ in range(2)] for _ in range(few)]
            with repeat(b, groups) as group:
                at = b.mul(group, units)
                dots = _accumulate(
                    b,
                    units,
                    few,
                    lambda total, x, y: dot_pairs(b, total, x, y),
                    _zeros(I32),
                    offset(b, k, (at, ROWS * 4), (lane, 1)),
                    lambda i: offset(b, q, (b.mul(b.add(first, first.type(i)), width), 4), (at, 4)),
                )
                for v in range(2):
                    step, least = (
                        load(b, offset(b, base, (group, ROWS * 8), (lane, 1), (v, LANES * 4)), vector(F32))
                        for base in (scales, minima)
                    )
                    for i in range(few):
                        place = totals[i][v]
                        which = b.add(b.mul(b.add(first, first.type(i)), groups), group)
                        total = fma(b, b.sitofp(dots[i][v], vector(F32)), step, b.load(place))
                        q_sum = splat(b, load(b, offset(b, q_sums, (which, 4)), F32))
                        b.store(fma(b, q_sum, least, total), place)
            for i in range(few):
                query = b.add(first, first.type(i))
                scale = splat(b, load(b, offset(b, q_scales, (query, 4)), F32))
                for v in range(2):
                    at = offset(b, out, (query, ROWS * 4), (lane, 1), (v, LANES * 4))
                    store(b, at, b.fmul(b.load(totals[i][v]), scale))

    _for_queries(num, b, body)


def _emit_score_float(b: ir.IRBuilder, k: Any, units: Any, q: Any, num: Any, out: Any) -> None:
    """Score: ``out[query, row] = dot(q[query], k[:, row])`` with k [units, 32] and q [num, units] float32."""

    def body(first: Any, few: int) -> None:
        with repeat(b, ROWS // (2 * LANES)) as part:
            lane = b.mul(part, part.type(2 * LANES * 4))
            dots = _accumulate(
                b,
                units,
                few,
                lambda total, x, y: fma(b, x, y, total),
                _zeros(F32),
                offset(b, k, (lane, 1)),
                lambda i: offset(b, q, (b.mul(b.add(first, first.type(i)), units), 4)),
            )
            for i in range(few):
                for v in range(2):
                    at = offset(b, out, (b.add(first, first.type(i)), ROWS * 4), (lane, 1), (v, LANES * 4))
                    store(b, at, dots[i][v])

    _for_queries(num, b, body)


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Emit 2**x for x <= 0, exactly 0 below -126; NaN stays NaN."""
    lowest = splat(b, F32(-126.0))
    inside = greatest(b, lowest, x)
    shifted = b.fadd(inside, splat(b, F32(_SHIFT)))
    rest = b.fsub(inside, b.fsub(shifted, splat(b, F32(_SHIFT))))
    result = splat(b, F32(EXP2[0]))
    for coefficient in EXP2[1:]:
        result = fma(b, result, rest, splat(b, F32(coefficient)))
    power = b.bitcast(b.shl(b.bitcast(shifted, vector(I32)), splat(b, I32(23))), vector(F32))
    return b.select(b.fcmp_ordered("<", x, lowest), _zeros(F32), b.fmul(result, power))


def _emit_cap(b: ir.IRBuilder, scores: Any, count: Any, cap: Any) -> None:
    """Replace each of ``count`` scores x by ``cap * tanh(x / log2(e))``; ``cap`` holds the bits of a float32."""
    factor = splat(b, b.bitcast(b.trunc(cap, I32), F32))
    one, two = splat(b, F32(1.0)), splat(b, F32(2.0))
    with repeat(b, b.udiv(count, count.type(LANES))) as i:
        at = offset(b, scores, (i, LANES * 4))
        x = load(b, at, vector(F32))
        size = call_vector(b, "llvm.fabs", x)
        small = _exp2(b, b.fmul(size, splat(b, F32(-2.0))))  # e**(-2 |x|), since x comes in units of log2(e)
        tanh = b.fsub(b.fdiv(two, b.fadd(one, small)), one)
        value = call_vector(b, "llvm.copysign", tanh, x)
        store(b, at, b.fmul(value, factor))


def _emit_softmax(
    b: ir.IRBuilder,
    scores: Any,
    num: Any,
    most: Any,
    total: Any,
    shrink: Any,
    v_scales: Any,
    weights: Any,
    w_scales: Any,
) -> None:
    """Turn scores [num, 32], in powers of two, into weights in place, and go on with each query's running softmax.

    Updates most [num] and total [num, LANES], whose lanes are to be added in the end; writes shrink [num], the factor
    of what was summed before. Where v_scales [32] is not 0, also writes weights times v_scales as int16 pairs
    [num, 16] in the order of woven rows, with w_scales [num].
    """
    parts = ROWS // LANES
    integer = b.icmp_unsigned("!=", v_scales, v_scales.type(0))
    with repeat(b, num) as query:

        def place(base: Any, size: int = 4) -> Any:
            return offset(b, base, (query, size))

        def larger(x: Any, y: Any) -> Any:
            return greatest(b, x, y)

        rows = [load(b, offset(b, place(scores, ROWS * 4), (v, LANES * 4)), vector(F32)) for v in range(parts)]
        before = load(b, place(most), F32)
        peak = greatest(b, reduce(b, larger, fold(rows, larger)), before)
        factor = variable(b, F32(1.0))
        with b.if_then(b.fcmp_ordered(">", peak, before)):  # seldom after the first tiles
            b.store(b.extract_element(_exp2(b, splat(b, b.fsub(before, peak))), I32(0)), factor)
            store(b, place(most), peak)
        rows = [_exp2(b, b.fsub(x, splat(b, peak))) for x in rows]
        store(b, place(shrink), b.load(factor))
        sums = place(total, LANES * 4)
        store(b, sums, fma(b, load(b, sums, vector(F32)), splat(b, b.load(factor)), fold(rows, b.fadd)))
        for v, x in enumerate(rows):
            store(b, offset(b, place(scores, ROWS * 4), (v, LANES * 4)), x)
        with b.if_then(integer):
            scaled = []
            for v, x in enumerate(rows):
                scale = load(b, offset(b, v_scales, (v, LANES * 4)), vector(F32))
                # What is not seen must not count, and zero times NaN would.
                scaled.append(b.select(b.fcmp_ordered(">", x, _zeros(F32)), b.fmul(x, scale), _zeros(F32)))
            top = reduce(b, larger, fold(scaled, larger))
            step = b.fmul(top, F32(1.0 / 32767.0))
            store(b, place(w_scales), b.select(any_nan(b, scaled), F32(float("nan")), step))
            inverse = b.select(b.fcmp_ordered(">", top, F32(1e-30)), b.fdiv(F32(32767.0), top), F32(0.0))
            for v, x in enumerate(scaled):
                codes = woven(b, b.fmul(x, splat(b, inverse)))
                store(b, offset(b, place(weights, ROWS * 2), (v, LANES * 2)), codes)


class _Sum:
    """Emits ``acc[query] = acc[query] * shrink + weights[query] @ v``; acc [num, width] float32.

    kind int32: v [16, width] woven pairs, weights [num, 16] pairs, w_scales [num]. float32: v [32, width], [num, 32].
    """

    def __init__(self, kind: ir.Type) -> None:
        self._kind = kind
        self._steps = ROWS // 2 if kind == I32 else ROWS

    def __call__(
        self, b: ir.IRBuilder, v: Any, weights: Any, width: Any, num: Any, acc: Any, shrink: Any, w_scales: Any
    ) -> None:
        wide = 4 if LANES == 16 else 2
        runs = b.udiv(width, width.type(wide * LANES))
        done = b.mul(runs, runs.type(wide * LANES))
        rest = b.udiv(b.sub(width, done), width.type(LANES))

        def columns(first: Any, few: int) -> None:
            queries = [b.add(first, first.type(i)) for i in range(few)]
            with repeat(b, runs) as i:
                self._columns(
                    b, v, weights, width, acc, shrink, w_scales, queries, b.mul(i, i.type(wide * LANES)), wide
                )
            with repeat(b, rest) as i:
                start = b.add(done, b.mul(i, i.type(LANES)))
                self._columns(b, v, weights, width, acc, shrink, w_scales, queries, start, 1)

        _for_queries(num, b, columns)

    def _columns(
        self,
        b: ir.IRBuilder,
        v: Any,
        weights: Any,
        width: Any,
        acc: Any,
        shrink: Any,
        w_scales: Any,
        queries: list[Any],
        start: Any,
        wide: int,
    ) -> None:
        """Emit the sums of some queries over ``wide`` vectors of columns from ``start`` on."""
        integer = self._kind == I32
        columns = [offset(b, start, (n, LANES)) for n in range(wide)]
        places = [[offset(b, acc, (b.mul(q, width), 4), (n, 4)) for n in columns] for q in queries]
        before = []
        for query, row in zip(queries, places, strict=True):
            factor = splat(b, load(b, offset(b, shrink, (query, 4)), F32))
            before.append([b.fmul(load(b, place, vector(F32)), factor) for place in row])
        sums = [[variable(b, _zeros(I32) if integer else x) for x in row] for row in before]
        with repeat(b, self._steps) as step:
            values = [load(b, offset(b, v, (b.mul(step, width), 4), (n, 4)), vector(self._kind)) for n in columns]
            for query, row in zip(queries, sums, strict=True):
                weight = splat(b, load(b, offset(b, weights, (query, self._steps * 4), (step, 4)), self._kind))
                for value, place in zip(values, row, strict=True):
                    x = b.load(place)
                    b.store(dot_pairs(b, x, value, weight) if integer else fma(b, value, weight, x), place)
        for i, query in enumerate(queries):
            scale = splat(b, load(b, offset(b, w_scales, (query, 4)), F32)) if integer else None
            for n in range(wide):
                total = b.load(sums[i][n])
                if integer:
                    total = fma(b, b.sitofp(total, vector(F32)), scale, before[i][n])
                store(b, places[i][n], total)


score_int = micro_kernel("score_int", 10, _emit_score_int)
score_float = micro_kernel("score_float", 5, _emit_score_float)
cap_scores = micro_kernel("cap_scores", 3, _emit_cap)
softmax = micro_kernel("softmax", 8, _emit_softmax)
sum_int = micro_kernel("sum_int", 7, _Sum(I32))
sum_float = micro_kernel("sum_float", 7, _Sum(F32))
