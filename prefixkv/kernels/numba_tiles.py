"""Tiles of stored rows as the dot products want them. A tile is 32 rows.

Keys are turned: one *unit* of 32 bits of every row side by side, so that the scores of 16 rows come out in one vector
and nothing is added across it. A unit is one float32, or two int16 whose products a processor sums in one instruction.
Pairs hold numbers 2 apart (0 and 2, 1 and 3, ...), because four bytes split into those by shifts alone.

8-bit values are woven: for every number the int16 of two rows side by side. Other values are widened to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    fma,
    half_to_float,
    load,
    micro_kernel,
    offset,
    repeat,
    shuffle,
    splat,
    store,
    vector,
)

__all__ = [
    "ROWS",
    "turn_bf16",
    "turn_f16",
    "turn_f32",
    "turn_i4",
    "turn_i8",
    "weave_i8",
    "weave_run",
    "widen_bf16",
    "widen_f16",
    "widen_f32",
    "widen_i4",
]

ROWS = 32
"""Rows of a tile."""

Unpack = Callable[[ir.IRBuilder, Any, Any, Any], list[tuple[Any, Any]]]


def _turn(name: str, unpack: Unpack) -> Any:
    """Return ``turn(src, stride, dwords, dst)``: rows of dwords, ``stride`` bytes apart, to units [unit, row].

    Reads whole 16 bytes of each row and writes up to 3 dwords' units too many.
    """

    def emit(b: ir.IRBuilder, src: Any, stride: Any, dwords: Any, dst: Any) -> None:
        columns = b.udiv(b.add(dwords, dwords.type(3)), dwords.type(4))
        with repeat(b, ROWS // LANES) as part, repeat(b, columns) as index:
            # From the last dword to the first: the units too many of the last are overwritten by the first.
            column = b.sub(b.sub(columns, index), columns.type(1))
            first = b.mul(part, part.type(LANES))
            start = offset(b, src, (first, stride), (column, 16))
            rows = [load(b, offset(b, start, (row, stride)), vector(I32, 4)) for row in range(LANES)]
            for i, dword in reversed(list(enumerate(_transpose(b, rows)))):
                j = b.add(b.mul(column, column.type(4)), column.type(i))
                for unit, value in unpack(b, dword, j, dwords):
                    store(b, offset(b, dst, (unit, ROWS * 4), (first, 4)), value)

    return micro_kernel(f"turn_{name}", 4, emit)


def _transpose(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Return 4 vectors of one dword of every row, from LANES vectors of 4 dwords."""
    joined = []
    for i in range(4):
        parts = rows[i::4]
        while len(parts) > 1:
            width = 2 * parts[0].type.count
            parts = [shuffle(b, x, y, list(range(width))) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        joined.append(parts[0])
    low = [_interleave(b, x, y, 0, 1) for x, y in ((joined[0], joined[1]), (joined[2], joined[3]))]
    high = [_interleave(b, x, y, 2, 1) for x, y in ((joined[0], joined[1]), (joined[2], joined[3]))]
    return [_interleave(b, x, y, at, 2) for x, y in (low, high) for at in (0, 2)]


def _interleave(b: ir.IRBuilder, x: Any, y: Any, at: int, run: int) -> Any:
    """Take two dwords of each 128-bit lane from ``at`` on, alternating between x and y every ``run``."""
    picks = []
    for lane in range(0, x.type.count, 4):
        for i in range(0, 2, run):
            for origin in (0, x.type.count):
                picks += [origin + lane + at + i + k for k in range(run)]
    return shuffle(b, x, y, picks)


def _const(b: ir.IRBuilder, value: int, kind: ir.Type = I32, count: int = LANES) -> Any:
    return splat(b, kind(value), count)


def _twice(b: ir.IRBuilder, j: Any, low: Any, high: Any) -> list[tuple[Any, Any]]:
    unit = b.mul(j, j.type(2))
    return [(unit, low), (b.add(unit, unit.type(1)), high)]


def _unpack_f32(b: ir.IRBuilder, dword: Any, j: Any, dwords: Any) -> list[tuple[Any, Any]]:
    return [(j, dword)]


def _unpack_bf16(b: ir.IRBuilder, dword: Any, j: Any, dwords: Any) -> list[tuple[Any, Any]]:
    return _twice(b, j, b.shl(dword, _const(b, 16)), b.and_(dword, _const(b, 0xFFFF0000)))


def _unpack_f16(b: ir.IRBuilder, dword: Any, j: Any, dwords: Any) -> list[tuple[Any, Any]]:
    return _twice(b, j, half_to_float(b, dword), half_to_float(b, b.lshr(dword, _const(b, 16))))


def _split_bytes(b: ir.IRBuilder, dword: Any) -> tuple[Any, Any]:
    """Return bytes (0, 2) and (1, 3) of each dword as pairs of int16."""
    count = 2 * dword.type.count
    words, eight = b.bitcast(dword, vector(I16, count)), _const(b, 8, I16, count)
    even, odd = b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)
    return b.bitcast(even, dword.type), b.bitcast(odd, dword.type)


def _unpack_i8(b: ir.IRBuilder, dword: Any, j: Any, dwords: Any) -> list[tuple[Any, Any]]:
    return _twice(b, j, *_split_bytes(b, dword))


def _unpack_i4(b: ir.IRBuilder, dword: Any, j: Any, dwords: Any) -> list[tuple[Any, Any]]:
    nibbles = [b.and_(b.lshr(dword, _const(b, bits)), _const(b, 0x000F000F)) for bits in (0, 4, 8, 12)]
    return _twice(b, j, nibbles[0], nibbles[2]) + _twice(b, b.add(j, dwords), nibbles[1], nibbles[3])


turn_f32 = _turn("f32", _unpack_f32)
turn_bf16 = _turn("bf16", _unpack_bf16)
turn_f16 = _turn("f16", _unpack_f16)
turn_i8 = _turn("i8", _unpack_i8)
turn_i4 = _turn("i4", _unpack_i4)


def _emit_weave(b: ir.IRBuilder, src: Any, stride: Any, width: Any, dst: Any) -> None:
    """Weave 32 rows of ``width`` int8 (a multiple of LANES) into pairs [16, width].

    Rows 4i and 4i + 2 make pair 2i, the two others pair 2i + 1. In runs of 4 * LANES numbers the order is changed, see
    ``weave_run``; a rest is as it was.
    """
    run = 4 * LANES
    runs = b.udiv(width, width.type(run))
    rest = b.udiv(b.sub(width, b.mul(runs, runs.type(run))), width.type(LANES))
    with repeat(b, ROWS // 4) as quad:
        row = offset(b, src, (b.mul(quad, quad.type(4)), stride))
        pair = offset(b, dst, (b.mul(quad, quad.type(8)), width))
        with repeat(b, runs) as i:
            rows = [load(b, offset(b, row, (k, stride), (i, run)), vector(I8, run)) for k in range(4)]
            for k, dword in enumerate(weave_run(b, rows)):
                at = offset(b, pair, (i, run * 4), (k, LANES * 4))
                for value, where in zip(_split_bytes(b, dword), (at, offset(b, at, (width, 4))), strict=True):
                    store(b, where, value)
        with repeat(b, rest) as i:
            done = b.mul(runs, runs.type(run))
            rows = [load(b, offset(b, row, (k, stride), (i, LANES), (done, 1)), vector(I8)) for k in range(4)]
            wide = [b.sext(x, vector(I32)) for x in rows]
            for k in range(2):
                low = b.and_(wide[k], _const(b, 0xFFFF))
                value = b.or_(low, b.shl(wide[k + 2], _const(b, 16)))
                store(b, offset(b, pair, (k, b.mul(width, width.type(4))), (done, 4), (i, LANES * 4)), value)


def weave_run(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Return 4 vectors of dwords, each dword a byte of every one of 4 rows; stays inside 128-bit lanes."""

    def zipped(x: Any, y: Any, high: bool) -> Any:
        count, lane = x.type.count, 128 // x.type.element.width
        half = lane // 2
        picks = []
        for start in range(0, count, lane):
            for k in range(half):
                picks += [start + high * half + k, count + start + high * half + k]
        return shuffle(b, x, y, picks)

    words = vector(I16, rows[0].type.count // 2)
    out = []
    for high in (False, True):
        ab, cd = (b.bitcast(zipped(rows[i], rows[i + 1], high), words) for i in (0, 2))
        out += [b.bitcast(zipped(ab, cd, part), vector(I32)) for part in (False, True)]
    return out


weave_i8 = micro_kernel("weave_i8", 4, _emit_weave)


def _widen(name: str, kind: ir.Type, convert: Callable[[ir.IRBuilder, Any], Any]) -> Any:
    """Return ``widen(src, stride, width, dst)``: 32 rows of ``width`` numbers (a multiple of LANES) to float32."""
    size = 4 if kind == F32 else 2

    def emit(b: ir.IRBuilder, src: Any, stride: Any, width: Any, dst: Any) -> None:
        with repeat(b, ROWS) as row, repeat(b, b.udiv(width, width.type(LANES))) as i:
            value = load(b, offset(b, src, (row, stride), (i, LANES * size)), vector(kind))
            at = offset(b, dst, (b.mul(row, width), 4), (i, LANES * 4))
            store(b, at, convert(b, value))

    return micro_kernel(f"widen_{name}", 4, emit)


widen_f32 = _widen("f32", F32, lambda b, x: x)
widen_bf16 = _widen("bf16", I16, lambda b, x: b.shl(b.zext(x, vector(I32)), _const(b, 16)))
widen_f16 = _widen("f16", I16, lambda b, x: half_to_float(b, b.zext(x, vector(I32))))


def _emit_widen_i4(b: ir.IRBuilder, src: Any, stride: Any, dim: Any, shift: Any, scales: Any, dst: Any) -> None:
    """Write 32 rows of ``dim`` 4-bit codes as float32.

    Args: shift: a group is ``1 << shift`` vectors; scales [groups, 2, 32] scale and minimum.
    """
    half = b.udiv(dim, dim.type(2))
    vectors = b.udiv(half, half.type(LANES))
    with repeat(b, ROWS) as row, repeat(b, vectors) as i:
        codes = b.zext(load(b, offset(b, src, (row, stride), (i, LANES)), vector(I8)), vector(I32))
        for start, value in ((i.type(0), b.and_(codes, _const(b, 15))), (vectors, b.lshr(codes, _const(b, 4)))):
            at = b.add(start, i)
            both = offset(b, scales, (b.lshr(at, shift), ROWS * 8), (row, 4))
            scale, least = (splat(b, load(b, offset(b, both, (n, ROWS * 4)), F32)) for n in (0, 1))
            value = fma(b, b.uitofp(value, vector(F32)), scale, least)
            store(b, offset(b, dst, (b.mul(row, dim), 4), (at, LANES * 4)), value)


widen_i4 = micro_kernel("widen_i4", 6, _emit_widen_i4)
