"""Products of few tokens with a large matrix on a processor's matrix unit (Intel AMX), at the speed of memory.

The weights are read as they lie, [N, K] bfloat16 row by row: sixteen rows times 32 columns are one tile. The tokens are
the other operand, and sixteen of them go side by side. So activations are kept turned: :data:`TOKENS` tokens are the
lanes of a vector, and what is done to each number of a token is one instruction for all sixteen.

* ``lanes``: [K, 16] float32, number ``k`` of each token.
* ``pairs``: [K/2, 16] pairs of bfloat16, numbers ``2p`` and ``2p + 1`` of each token: what the unit wants.

More tokens make more such groups, one behind the other. Sums are float32; where the model's own operations round to
bfloat16, so do these.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (AMX).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

from prefixkv.kernels.numba_dots import EXP2
from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I16,
    I32,
    ask_for,
    call_vector,
    columns_of,
    fma,
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
    "TILE_BYTES",
    "TILE_CONFIG",
    "TOKENS",
    "add_residual",
    "amx",
    "in_twos",
    "norm_pairs",
    "pack_rows",
    "pack_silu",
    "pointer",
    "refuse_amx",
    "round_head",
    "tile_begin",
    "tile_end",
    "tile_product",
    "turn_head",
    "write_floats",
    "write_halves",
]

TOKENS = 16
"""Tokens of a group: the lanes of a vector, the columns of a tile."""

_I64, _VOID, _BYTES = ir.IntType(64), ir.VoidType(), I8.as_pointer()
_FLOATS, _INTS = vector(F32, TOKENS), vector(I32, TOKENS)
_ROW = TOKENS * 4
TILE_BYTES = 1024
"""Bytes of a tile: 16 rows of 64."""
_LOG2_E = 1.4426950408889634

_config = np.zeros(64, np.uint8)
_config[0] = 1  # palette
_config[16:32].view(np.uint16)[:] = 64  # bytes per row of each tile
_config[48:56] = 16  # rows
TILE_CONFIG: int = _config.ctypes.data
"""Address of the tiles' shapes: eight of 16 rows of 64 bytes."""

_STEPS = 18
"""Times 32 columns that are gone through at once: twice 16 rows of them fill three quarters of the first cache."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def refuse_amx() -> str | None:
    """Return None if the matrix unit can be used by this process, else why not. Asks the system for its use."""
    features = binding.get_host_cpu_features()
    # All that the kernels name: what is missing here would end the process when they are compiled.
    needed = ("amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512dq")
    if not all(features.get(name) for name in needed):
        return f"the processor lacks {', '.join(name for name in needed if not features.get(name))}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "AMX is used on Linux only"
    if ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        return "the system does not let this process use AMX"
    return None


def amx(b: ir.IRBuilder, name: str, *args: Any) -> None:
    """Emit an instruction of the unit, by LLVM's name."""
    kinds = [arg.type for arg in args]
    b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(_VOID, kinds), f"llvm.x86.{name}"), args)


def pointer(b: ir.IRBuilder, address: Any) -> Any:
    """Emit an address as LLVM's intrinsics want it."""
    return b.inttoptr(address, _BYTES)


def _emit_begin(b: ir.IRBuilder, config: Any, former: Any) -> None:
    """Set the tiles up; what they were set up for before, by torch's own kernels, goes to 64 bytes at ``former``."""
    amx(b, "sttilecfg", pointer(b, former))
    amx(b, "ldtilecfg", pointer(b, config))


def _emit_end(b: ir.IRBuilder, former: Any) -> None:
    amx(b, "ldtilecfg", pointer(b, former))


def _emit_product(
    b: ir.IRBuilder, w: Any, row_bytes: Any, steps: Any, x: Any, x_bytes: Any, out: Any, out_bytes: Any, tiles: Any,
    groups: Any
) -> None:  # fmt: skip
    """Write lanes of ``16 * tiles`` rows of w times every group of pairs.

    Args:
        b: Builder.
        w: First row.
        row_bytes: From row to row.
        steps: Columns / 32.
        x: Pairs of the first group.
        x_bytes: From group to group.
        out: Lanes of the first group.
        out_bytes: From group to group.
        tiles: Rows / 16.
        groups: Groups.
    """
    # What two tiles of rows need of a block stays in the first cache while pairs stream by.
    many = b.icmp_unsigned(">", groups, groups.type(2))
    blocks = b.select(many, b.udiv(b.add(steps, steps.type(_STEPS - 1)), steps.type(_STEPS)), steps.type(1))

    def rows(first: Any, height: int) -> None:
        start, place = offset(b, w, (b.mul(first, first.type(16)), row_bytes)), offset(b, out, (first, 16 * _ROW))
        with repeat(b, blocks) as block:
            done, end = (b.udiv(b.mul(steps, b.add(block, block.type(i))), blocks) for i in range(2))
            columns, pairs = offset(b, start, (done, 64)), offset(b, x, (done, TILE_BYTES))

            def emit(group: Any, width: int) -> None:
                _emit_tiles(
                    b, (columns, row_bytes), (offset(b, pairs, (group, x_bytes)), x_bytes), b.sub(end, done),
                    (offset(b, place, (group, out_bytes)), out_bytes), height, width,
                    b.icmp_unsigned("==", block, block.type(0)), b.icmp_unsigned("==", group, group.type(0)),
                )  # fmt: skip

            in_twos(b, groups, emit)

    in_twos(b, tiles, rows)


def in_twos(b: ir.IRBuilder, count: Any, emit: Callable[[Any, int], None]) -> None:
    """Emit ``emit(first, 2)`` for every two of ``count``, then ``emit(last, 1)`` if one is left."""
    twos = b.udiv(count, count.type(2))
    with repeat(b, twos) as two:
        emit(b.mul(two, two.type(2)), 2)
    last = b.mul(twos, twos.type(2))
    with b.if_then(b.icmp_unsigned("<", last, count)):
        emit(last, 1)


def _emit_tiles(
    b: ir.IRBuilder, w: tuple[Any, Any], x: tuple[Any, Any], steps: Any, out: tuple[Any, Any], height: int, width: int,
    fresh: Any, asks: Any
) -> None:  # fmt: skip
    """Write lanes of ``16 * height`` rows for ``width`` groups: as many tiles of sums as keep the unit busy.

    Args:
        b: Builder.
        w: First row, and bytes from row to row.
        x: Pairs of the first group, and bytes from group to group.
        steps: Columns / 32.
        out: Lanes of the first group, and bytes from group to group.
        height: 1 or 2.
        width: 1 or 2.
        fresh: Whether nothing is to be added to what is there.
        asks: Whether to let the memory work on the rows that come next.
    """
    places = [
        (I8(group * height + i), pointer(b, offset(b, out[0], (group, out[1]), (i, TILE_BYTES))))
        for group in range(width)
        for i in range(height)
    ]
    with b.if_else(fresh) as (then, other):
        with then:
            for sums, _ in places:
                amx(b, "tilezero", sums)
        with other:
            for sums, place in places:
                amx(b, "tileloadd64", sums, place, _I64(64))
    with repeat(b, steps) as step:
        for group in range(width):
            pairs = offset(b, x[0], (step, TILE_BYTES), (group, x[1]))
            # The hint keeps pairs from driving rows out of the first cache: without it a step takes twice as long.
            amx(b, "tileloaddt164", I8(6 + group), pointer(b, pairs), _I64(64))
        for i in range(height):
            rows = offset(b, w[0], (step, 64), (w[1], 16 * i))
            with b.if_then(asks):
                for row in range(16):
                    ask_for(b, offset(b, rows, (w[1], 16 * height + row)))
            amx(b, "tileloadd64", I8(4 + i), pointer(b, rows), w[1])
            for group in range(width):
                amx(b, "tdpbf16ps", I8(group * height + i), I8(4 + i), I8(6 + group))
    for sums, place in places:
        amx(b, "tilestored64", sums, place, _I64(64))


def _const(b: ir.IRBuilder, value: float | int) -> Any:
    return splat(b, F32(value) if isinstance(value, float) else I32(value), TOKENS)


def _float(b: ir.IRBuilder, bits: Any) -> Any:
    """Emit a vector of the float32 whose bits are an integer argument."""
    return splat(b, b.bitcast(b.trunc(bits, I32), F32), TOKENS)


def _number(b: ir.IRBuilder, address: Any) -> Any:
    """Emit a vector of the bfloat16 at an address."""
    bits = b.shl(b.zext(load(b, address, I16), I32), I32(16))
    return splat(b, b.bitcast(bits, F32), TOKENS)


def _round(b: ir.IRBuilder, x: Any) -> Any:
    """Emit float32 rounded to bfloat16, half to even."""
    bits = b.bitcast(x, _INTS)
    odd = b.and_(b.lshr(bits, _const(b, 16)), _const(b, 1))
    rounded = b.add(bits, b.add(odd, _const(b, 0x7FFF)))
    return b.bitcast(b.and_(rounded, _const(b, 0xFFFF0000 - 2**32)), _FLOATS)


def _pair(b: ir.IRBuilder, first: Any, second: Any) -> Any:
    """Emit pairs of two rounded numbers."""
    low = b.lshr(b.bitcast(first, _INTS), _const(b, 16))
    return b.or_(low, b.bitcast(second, _INTS))


def _row_at(b: ir.IRBuilder, base: Any, row: Any, extra: int = 0) -> Any:
    return offset(b, base, (row, _ROW), (extra * _ROW, 1))


def _biased(b: ir.IRBuilder, value: Any, bias: Any, row: Any) -> Any:
    """Emit ``value`` plus the bias of a row, rounded; no bias where its address is 0."""
    total = variable(b, value)
    with b.if_then(b.icmp_unsigned("!=", bias, bias.type(0))):
        b.store(b.fadd(value, _number(b, offset(b, bias, (row, 2)))), total)
    return _round(b, b.load(total))


def _inverse_root(b: ir.IRBuilder, x: Any, count: Any, eps: Any) -> Any:
    """Emit 1 / sqrt(mean of squares + eps) of ``count`` rows."""
    total = variable(b, _const(b, 0.0))
    with repeat(b, count) as row:
        value = load(b, _row_at(b, x, row), _FLOATS)
        b.store(fma(b, value, value, b.load(total)), total)
    size = splat(b, b.uitofp(count, F32), TOKENS)
    mean = b.fadd(b.fdiv(b.load(total), size), _float(b, eps))
    return b.fdiv(_const(b, 1.0), call_vector(b, "llvm.sqrt", mean))


def _emit_norm(b: ir.IRBuilder, x: Any, count: Any, weight: Any, eps: Any, out: Any) -> None:
    """Write the pairs of ``count`` rows of lanes under RMS norm."""
    scale = _inverse_root(b, x, count, eps)
    with repeat(b, b.udiv(count, count.type(2))) as pair:
        row = b.mul(pair, pair.type(2))
        numbers = []
        for i in range(2):
            value = b.fmul(load(b, _row_at(b, x, row, i), _FLOATS), scale)
            numbers.append(_round(b, b.fmul(value, _number(b, offset(b, weight, (row, 2), (2 * i, 1))))))
        store(b, _row_at(b, out, pair), _pair(b, *numbers))


def _emit_residual(b: ir.IRBuilder, c: Any, bias: Any, x: Any, count: Any) -> None:
    """Add ``count`` rows of a product to the residual stream."""
    with repeat(b, count) as row:
        place = _row_at(b, x, row)
        value = _biased(b, load(b, _row_at(b, c, row), _FLOATS), bias, row)
        store(b, place, _round(b, b.fadd(load(b, place, _FLOATS), value)))


def _emit_silu(b: ir.IRBuilder, gate: Any, up: Any, gate_bias: Any, up_bias: Any, count: Any, out: Any) -> None:
    """Write the pairs of ``silu(gate) * up`` of ``count`` rows."""
    with repeat(b, b.udiv(count, count.type(2))) as pair:
        numbers = []
        for i in range(2):
            row = b.add(b.mul(pair, pair.type(2)), pair.type(i))
            g = _biased(b, load(b, _row_at(b, gate, row), _FLOATS), gate_bias, row)
            u = _biased(b, load(b, _row_at(b, up, row), _FLOATS), up_bias, row)
            silu = b.fdiv(g, b.fadd(_const(b, 1.0), _exp2(b, b.fmul(g, _const(b, -_LOG2_E)))))
            numbers.append(_round(b, b.fmul(_round(b, silu), u)))
        store(b, _row_at(b, out, pair), _pair(b, *numbers))


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Emit 2**x in float32, within 2**-126 to 2**126; NaN stays NaN."""
    for bound, compare in ((-126.0, "<"), (126.0, ">")):
        limit = _const(b, bound)
        x = b.select(b.fcmp_ordered(compare, x, limit), limit, x)
    whole = call_vector(b, "llvm.rint", x)
    rest = b.fsub(x, whole)
    power = _const(b, EXP2[0])
    for factor in EXP2[1:]:
        power = fma(b, power, rest, _const(b, factor))
    exponent = b.shl(b.add(b.fptosi(whole, _INTS), _const(b, 127)), _const(b, 23))
    return b.fmul(power, b.bitcast(exponent, _FLOATS))


def _emit_round_head(b: ir.IRBuilder, c: Any, count: Any, bias: Any, weight: Any, eps: Any) -> None:
    """Round ``count`` rows of a head in place, with bias and RMS norm where their addresses are not 0."""
    with repeat(b, count) as row:
        place = _row_at(b, c, row)
        store(b, place, _biased(b, load(b, place, _FLOATS), bias, row))
    with b.if_then(b.icmp_unsigned("!=", weight, weight.type(0))):
        scale = _inverse_root(b, c, count, eps)
        with repeat(b, count) as row:
            place = _row_at(b, c, row)
            value = b.fmul(load(b, place, _FLOATS), scale)
            store(b, place, _round(b, b.fmul(value, _number(b, offset(b, weight, (row, 2))))))


def _emit_turn(b: ir.IRBuilder, c: Any, cos: Any, sin: Any, half: Any) -> None:
    """Apply RoPE to the first ``2 * half`` rows of a head, in place; cos and sin are lanes of ``half`` rows."""
    with repeat(b, half) as row:
        places = [_row_at(b, c, row), _row_at(b, c, b.add(row, half))]
        first, second = (load(b, place, _FLOATS) for place in places)
        x, y = (load(b, _row_at(b, base, row), _FLOATS) for base in (cos, sin))
        turned = (
            b.fsub(_round(b, b.fmul(first, x)), _round(b, b.fmul(second, y))),
            b.fadd(_round(b, b.fmul(second, x)), _round(b, b.fmul(first, y))),
        )
        for place, value in zip(places, turned, strict=True):
            store(b, place, _round(b, value))


def _emit_write(to_bf16: bool) -> Callable[..., None]:
    def emit(b: ir.IRBuilder, c: Any, tiles: Any, tokens: Any, out: Any, row_bytes: Any) -> None:
        """Write ``16 * tiles`` rows of one group's lanes as ``tokens`` rows, ``row_bytes`` apart."""
        with repeat(b, tiles) as tile:
            base = offset(b, c, (tile, TILE_BYTES))
            columns = columns_of(b, [load(b, offset(b, base, (i, _ROW)), _INTS) for i in range(TOKENS)])
            for token, column in enumerate(columns):
                with b.if_then(b.icmp_unsigned("<", tokens.type(token), tokens)):
                    if to_bf16:
                        column = b.trunc(b.lshr(column, _const(b, 16)), vector(I16, TOKENS))
                    store(b, offset(b, out, (row_bytes, token), (tile, _ROW // 2 if to_bf16 else _ROW)), column)

    return emit


def _emit_pack_rows(b: ir.IRBuilder, src: Any, tokens: Any, row_bytes: Any, out: Any) -> None:
    """Write 1 to 16 rows of bfloat16 as the pairs of one group; other lanes get what the last one has."""
    last = b.sub(tokens, tokens.type(1))
    starts = []
    for token in range(TOKENS):
        at = tokens.type(token)
        starts.append(offset(b, src, (b.select(b.icmp_unsigned("<", at, tokens), at, last), row_bytes)))
    with repeat(b, b.udiv(row_bytes, row_bytes.type(_ROW))) as part:
        columns = columns_of(b, [load(b, offset(b, start, (part, _ROW)), _INTS) for start in starts])
        for i, column in enumerate(columns):
            store(b, offset(b, out, (part, TILE_BYTES), (i, _ROW)), column)


tile_begin = micro_kernel("tile_begin", 2, _emit_begin)
tile_end = micro_kernel("tile_end", 1, _emit_end)
tile_product = micro_kernel("tile_product", 9, _emit_product)
norm_pairs = micro_kernel("norm_pairs", 5, _emit_norm)
add_residual = micro_kernel("add_residual", 4, _emit_residual)
pack_silu = micro_kernel("pack_silu", 6, _emit_silu)
round_head = micro_kernel("round_head", 5, _emit_round_head)
turn_head = micro_kernel("turn_head", 4, _emit_turn)
write_floats = micro_kernel("write_floats", 5, _emit_write(False))
write_halves = micro_kernel("write_halves", 5, _emit_write(True))
pack_rows = micro_kernel("pack_rows", 4, _emit_pack_rows)
