"""Chunks of bfloat16 models on a processor's matrix unit: rows are prepared once a step, then attended item by item.

An item does what :mod:`prefixkv.kernels.numba_item` does, and finds its rows decoded, in tiles as
:mod:`prefixkv.kernels.numba_amx_tile` wants them: a chunk reads every row many times.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_amx import TILE_BYTES, TOKENS, tile_begin, tile_end
from prefixkv.kernels.numba_amx_tile import (
    TILE_ROWS,
    add_values,
    isolate_rows,
    mask_tile,
    pack_queries,
    score_tile,
    softmax_tile,
    turn_values,
    write_sums,
)
from prefixkv.kernels.numba_build import compiled, sources_digest
from prefixkv.kernels.numba_dots import NOTHING
from prefixkv.kernels.numba_gather import decode_rows
from prefixkv.kernels.numba_ir import (
    copy_bytes,
    int_bits,
    load_f32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
    zero_bytes,
)
from prefixkv.kernels.numba_item import (
    FIRST_ROW,
    FIRST_TILE,
    ITEM_PARAMETERS,
    LAST_ROW,
    SEEN_FROM,
    SEEN_TO,
    SLOT,
    TOKEN,
    queries_of,
    row_of,
    table_from,
)

__all__ = ["call_prepare", "chunk_function", "prepare_function"]

_LINE = TOKENS * 4
_GROUP_LINES = 8
_MOST, _TOTAL, _LOW, _HIGH, _FROM, _TO = 0, 1, 2, 3, 4, 6
"""Lanes that each group of queries has; addresses of queries and of their results take two lines."""
_LOWEST, _FARTHEST, _NEAREST, _HIGHEST = range(4)
"""Of each group of queries: the rows from which some see, from which all see, until which all see, until which some."""

_T_TABLE, _T_FIRST_ROW, _T_ROWS = range(3)
"""Columns of a tile, as ``AttendPlan`` says."""


@njit(nogil=True)
def _decode_tile(
    f: Any, table: Any, head: Any, first: Any, rows: Any, mode: Any, base: Any, row_bytes: Any, dim: Any, groups: Any,
    scales: Any, scale_bytes: Any, room: Any, dst: Any, stride: Any
) -> None:  # fmt: skip
    """Write rows of one tensor as bfloat16, and zeros behind them: what nobody sees must not be NaN."""
    done = 0
    while done < rows:
        count = min(rows - done, f[at.BLOCK] - (first + done) % f[at.BLOCK])
        place = row_of(f, table, head, first + done)
        decode_rows(
            mode, base + place * row_bytes, row_bytes, dim, groups, scales + place * scale_bytes, scale_bytes, room,
            count, dst + done * stride, stride,
        )  # fmt: skip
        done += count
    zero_bytes(dst + rows * stride, (TILE_ROWS - rows) * stride)


@njit(nogil=True)
def _prepare(f: Any, s: Any, tile: Any, table: Any, head: Any, dst: Any) -> None:
    """Write the keys of a tile and then its turned values to ``dst``."""
    stride, room, rows = f[at.M_STEPS] * 64, s + f[at.M_ROOM], s + f[at.M_V_STAGE]
    if f[at.K_DIM] * 2 < stride:
        zero_bytes(dst, TILE_ROWS * stride)
    if f[at.V_DIM] < f[at.V_WIDTH]:
        zero_bytes(rows, TILE_ROWS * f[at.V_WIDTH] * 2)  # or leftovers would be taken for NaN
    _decode_tile(
        f, table, head, tile[_T_FIRST_ROW], tile[_T_ROWS], f[at.K_MODE], f[at.K_ROWS], f[at.K_BYTES], f[at.K_DIM],
        f[at.K_GROUPS], f[at.K_SCALES], f[at.K_SCALE_BYTES], room, dst, stride,
    )  # fmt: skip
    _decode_tile(
        f, table, head, tile[_T_FIRST_ROW], tile[_T_ROWS], f[at.V_MODE], f[at.V_ROWS], f[at.V_BYTES], f[at.V_DIM],
        f[at.V_GROUPS], f[at.V_SCALES], f[at.V_SCALE_BYTES], room, rows, f[at.V_WIDTH] * 2,
    )  # fmt: skip
    isolate_rows(rows, f[at.V_WIDTH] // TOKENS, dst, stride)
    turn_values(rows, f[at.V_WIDTH] // TOKENS, dst + TILE_ROWS * stride)


@njit(nogil=True)
def _lanes_of(s: Any, f: Any, group: Any, which: Any) -> Any:
    return s + f[at.M_LANES] + (group * _GROUP_LINES + which) * _LINE


@njit(nogil=True)
def _start_queries(f: Any, s: Any, queries: Any, spans: Any, q: Any, heads: Any, head: Any, partial: Any) -> None:
    """Read an item's queries, reset their running softmax and write what each group sees to ``spans``."""
    together = heads // f[at.KV_HEADS]
    dim, steps = f[at.K_DIM], f[at.M_STEPS]
    groups = -(-(queries.shape[0] * together) // TOKENS)
    zero_bytes(s + f[at.M_LANES], groups * _GROUP_LINES * _LINE)
    zero_bytes(s + f[at.M_ACC], groups * _LINE * f[at.V_WIDTH])
    for group in range(groups):
        spans[group, _LOWEST], spans[group, _FARTHEST] = 1 << 30, 0
        spans[group, _NEAREST], spans[group, _HIGHEST] = 1 << 30, 0
    copies = dim % 32 != 0  # such rows do not fill the steps
    if copies:
        zero_bytes(s + f[at.M_Q_ROWS], TOKENS * steps * 64)
    group = lane = 0
    for i in range(queries.shape[0]):
        that = queries[i]
        low, high = that[SEEN_FROM], that[SEEN_TO]
        first = that[TOKEN] * heads + head * together
        src = q + first * dim * 2
        out = partial + (that[SLOT] * heads + head * together) * f[at.P_WIDTH] * 4
        for g in range(together):
            span = spans[group]
            span[_LOWEST], span[_FARTHEST] = min(span[_LOWEST], low), max(span[_FARTHEST], low)
            span[_NEAREST], span[_HIGHEST] = min(span[_NEAREST], high), max(span[_HIGHEST], high)
            store_i32(_lanes_of(s, f, group, _LOW) + lane * 4, np.int32(low))
            store_i32(_lanes_of(s, f, group, _HIGH) + lane * 4, np.int32(high))
            store_f32(_lanes_of(s, f, group, _MOST) + lane * 4, NOTHING)
            row = src + g * dim * 2
            if copies:
                row = s + f[at.M_Q_ROWS] + lane * steps * 64
                copy_bytes(row, src + g * dim * 2, dim * 2)
            store_i64(_lanes_of(s, f, group, _FROM) + lane * 8, row)
            store_i64(_lanes_of(s, f, group, _TO) + lane * 8, out + g * f[at.P_WIDTH] * 4)
            lane += 1
            if lane == TOKENS:
                _pack_group(f, s, group)
                group, lane = group + 1, 0
    if lane > 0:
        for rest in range(lane, TOKENS):  # nobody asks what comes of them
            store_i64(_lanes_of(s, f, group, _FROM) + rest * 8, load_i64(_lanes_of(s, f, group, _FROM)))
        _pack_group(f, s, group)


@njit(nogil=True)
def _pack_group(f: Any, s: Any, group: Any) -> None:
    steps = f[at.M_STEPS]
    q = s + f[at.M_Q] + group * steps * TILE_BYTES
    pack_queries(_lanes_of(s, f, group, _FROM), steps, f[at.K_TURN], s + f[at.M_ROOM], q)


@njit(nogil=True)
def _attend_group(f: Any, s: Any, group: Any, tile: Any, first: Any, masked: Any, factor: Any) -> None:
    """Attend one group of queries to a tile."""
    steps, scores, weights, width = f[at.M_STEPS], s + f[at.M_SCORES], s + f[at.M_WEIGHTS], f[at.V_WIDTH]
    acc = s + f[at.M_ACC] + group * width * _LINE
    score_tile(tile, steps, s + f[at.M_Q] + group * steps * TILE_BYTES, scores)
    if masked:
        mask_tile(scores, first, _lanes_of(s, f, group, _LOW), _lanes_of(s, f, group, _HIGH))
    softmax_tile(
        scores, int_bits(factor), _lanes_of(s, f, group, _MOST), _lanes_of(s, f, group, _TOTAL),
        acc, width, weights,
    )  # fmt: skip
    add_values(weights, tile + TILE_ROWS * steps * 64, width // TOKENS, acc)


@njit(nogil=True)
def _finish_queries(f: Any, s: Any, num: Any) -> None:
    """Write an item's partial results: sums, maximum, total."""
    dim, width = f[at.V_DIM], f[at.V_WIDTH]
    for group in range(-(-num // TOKENS)):
        count = min(TOKENS, num - group * TOKENS)
        targets = _lanes_of(s, f, group, _TO)
        # Writes whole vectors, so over the places of maximum and total.
        write_sums(s + f[at.M_ACC] + group * width * _LINE, width // TOKENS, targets, count)
        for lane in range(count):
            out = load_i64(targets + lane * 8) + dim * 4
            store_f32(out, load_f32(_lanes_of(s, f, group, _MOST) + lane * 4))
            store_f32(out + 4, load_f32(_lanes_of(s, f, group, _TOTAL) + lane * 4))


@njit(nogil=True, inline="always")
def _attend(
    f: Any, s: Any, item: Any, queries: Any, spans: Any, tiles: Any, head: Any, q: Any, heads: Any, partial: Any,
    factor: Any
) -> None:  # fmt: skip
    """Attend one kv head of one item. ``tiles``: where its first tile lies."""
    _start_queries(f, s, queries, spans, q, heads, head, partial)
    num = queries.shape[0] * (heads // f[at.KV_HEADS])
    turn = f[at.K_TURN]
    if turn > 1:
        factor = np.float32(factor / np.sqrt(np.float32(turn)))
    tile_begin(f[at.M_CONFIG], s + f[at.M_FORMER])
    # Tiles lie alike for everybody: what is before an item's first row nobody in it sees.
    for first in range(item[FIRST_ROW] // TILE_ROWS * TILE_ROWS, item[LAST_ROW], TILE_ROWS):
        for group in range(-(-num // TOKENS)):
            if spans[group, _LOWEST] < first + TILE_ROWS and spans[group, _HIGHEST] > first:
                whole = spans[group, _FARTHEST] <= first and spans[group, _NEAREST] >= first + TILE_ROWS
                _attend_group(f, s, group, tiles, first, not whole, factor)
        tiles += f[at.M_TILE_BYTES]
    tile_end(s + f[at.M_FORMER])
    _finish_queries(f, s, num)


_INT = types.int64
_PREPARE_PARAMETERS = (types.CPointer(_INT), _INT, types.CPointer(_INT), types.CPointer(types.int32), _INT, _INT)


def _build_prepare(sources: str) -> Any:
    """Return the compiled function; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def prepare_tile(f: Any, s: Any, tile: Any, tables: Any, head: Any, dst: Any) -> None:
        if not sources:
            return
        fields = carray(f, at.NUM_FIELDS)
        that = carray(tile, 3)
        _prepare(fields, s, that, table_from(tables, that[_T_TABLE]), head, dst)

    return compiled(functools.partial(cfunc, types.void(*_PREPARE_PARAMETERS)), prepare_tile)


def _build_chunk(sources: str) -> Any:
    """Return the compiled function; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def chunk_of_one_head(
        f: Any, s: Any, item: Any, queries: Any, tables: Any, head: Any, q: Any, tiles: Any, heads: Any, partial: Any,
        factor: Any, cap: Any
    ) -> None:  # fmt: skip
        if not sources:
            return
        fields = carray(f, at.NUM_FIELDS)
        that = carray(item, 6)
        spans = np.empty((-(-fields[at.MOST_QUERIES] // TOKENS), 4), np.int64)
        tiles += that[FIRST_TILE] * fields[at.M_TILE_BYTES]
        _attend(fields, s, that, queries_of(that, queries), spans, tiles, head, q, heads, partial, factor)

    return compiled(functools.partial(cfunc, types.void(*ITEM_PARAMETERS)), chunk_of_one_head)


@functools.cache
def prepare_function() -> Any:
    """Return the compiled function that prepares one kv head of a tile; :func:`call_prepare` calls its ``address``."""
    return _build_prepare(sources_digest())


@functools.cache
def chunk_function() -> Any:
    """Return the compiled function of an item, called as ``numba_item.item_function`` is.

    In place of the queries' mode, which is bfloat16, it takes where the prepared tiles of its kv head lie.
    """
    return _build_chunk(sources_digest())


@intrinsic
def call_prepare(typing_context: Any, address: Any, f: Any, s: Any, tile: Any, tables: Any, head: Any, dst: Any) -> Any:
    """Prepare one kv head of one tile; integers are addresses."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6)
        b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[_INT] * 7), generate
