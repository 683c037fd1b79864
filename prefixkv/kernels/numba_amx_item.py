"""One kv head of one item on a processor's matrix unit, for chunks of bfloat16 models.

It does what :mod:`prefixkv.kernels.numba_item` does. Sixteen queries are the lanes of a vector, see
:mod:`prefixkv.kernels.numba_amx_tile`. The rows of a tile are prepared once for all groups of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_amx import TOKENS, tile_begin, tile_end
from prefixkv.kernels.numba_amx_tile import (
    TILE_ROWS,
    add_values,
    mask_lanes,
    pack_codes,
    pack_halves,
    scale_scores,
    score_codes,
    score_halves,
    softmax_lanes,
    weave_codes,
    weave_halves,
)
from prefixkv.kernels.numba_build import compiled, sources_digest
from prefixkv.kernels.numba_dots import NOTHING
from prefixkv.kernels.numba_gather import decode_row
from prefixkv.kernels.numba_ir import copy_bytes, load_f32, prefetch, store_f32, store_i32, store_i64, zero_bytes
from prefixkv.kernels.numba_item import (
    FIRST_QUERY,
    FIRST_ROW,
    ITEM_PARAMETERS,
    LAST_ROW,
    NUM_QUERIES,
    SEEN_FROM,
    SEEN_TO,
    SLOT,
    TABLE,
    TOKEN,
    row_of,
)
from prefixkv.kernels.numba_queries import read_query

__all__ = ["matrix_item_function"]

_RUN = 16
_LINE = TOKENS * 4
_GROUP_NUMBERS = 6
_MOST, _TOTAL, _Q_SCALES, _LOW, _HIGH, _SHRINK = range(_GROUP_NUMBERS)
"""Lanes that each group of queries has."""
_LOWEST, _FARTHEST, _NEAREST, _HIGHEST = range(4)
"""Of each group of queries: the rows from which some see, from which all see, until which all see, until which some."""


@njit(nogil=True)
def _lanes_of(s: Any, f: Any, group: Any, which: Any) -> Any:
    return s + f[at.M_LANES] + (group * _GROUP_NUMBERS + which) * _LINE


@njit(nogil=True)
def _start_queries(
    f: Any, s: Any, queries: Any, spans: Any, q: Any, heads: Any, head: Any, factor: Any
) -> None:  # fmt: skip
    """Read an item's queries, reset their running softmax and write what each group sees to ``spans``."""
    together = heads // f[at.KV_HEADS]
    dim, steps, turn = f[at.K_DIM], f[at.M_STEPS], f[at.K_TURN]
    codes = f[at.K_MODE] == at.INT8
    size = steps * at.STEP_BYTES * (2 if codes else 1)
    num = queries.shape[0] * together
    groups = -(-num // TOKENS)
    root = np.float32(1.0)
    if turn > 1:
        root = np.float32(1.0) / np.sqrt(np.float32(turn))
    row = s + f[at.M_ROW]
    zero_bytes(row, steps * _LINE * 4)
    zero_bytes(s + f[at.M_LANES], groups * _GROUP_NUMBERS * _LINE)
    zero_bytes(s + f[at.M_Q], groups * size)
    zero_bytes(s + f[at.M_ACC], groups * _LINE * f[at.V_WIDTH])
    for group in range(groups):
        spans[group, _LOWEST], spans[group, _FARTHEST] = 1 << 30, 0
        spans[group, _NEAREST], spans[group, _HIGHEST] = 1 << 30, 0
    group = lane = 0
    for i in range(queries.shape[0]):
        that = queries[i]
        low, high = that[SEEN_FROM], that[SEEN_TO]
        src = q + (that[TOKEN] * heads + head * together) * dim * 2
        for _ in range(together):
            span = spans[group]
            span[_LOWEST], span[_FARTHEST] = min(span[_LOWEST], low), max(span[_FARTHEST], low)
            span[_NEAREST], span[_HIGHEST] = min(span[_NEAREST], high), max(span[_HIGHEST], high)
            store_i32(_lanes_of(s, f, group, _LOW) + lane * 4, np.int32(low))
            store_i32(_lanes_of(s, f, group, _HIGH) + lane * 4, np.int32(high))
            store_f32(_lanes_of(s, f, group, _MOST) + lane * 4, NOTHING)
            scale = _lanes_of(s, f, group, _Q_SCALES) + lane * 4
            dst = s + f[at.M_Q] + group * size
            if codes:
                read_query(at.BF16, src, dim, np.float32(factor * root), turn, row)
                pack_codes(row, steps, dst, lane, scale)
            else:
                read_query(at.BF16, src, dim, root, turn, row)
                pack_halves(row, steps, dst, lane)
                store_f32(scale, factor)
            src += dim * 2
            lane += 1
            if lane == TOKENS:
                group, lane = group + 1, 0


@njit(nogil=True)
def _decode_run(
    f: Any, mode: Any, rows: Any, row_bytes: Any, dim: Any, groups: Any, scales: Any, scale_bytes: Any, room: Any,
    count: Any, dst: Any, stride: Any
) -> None:  # fmt: skip
    """Write ``count`` of 16 rows, decoded or as they are, ``stride`` bytes apart, and zeros behind them."""
    for i in range(count):
        if mode == at.INT4:
            decode_row(mode, rows + i * row_bytes, dim, groups, scales + i * scale_bytes, room, dst + i * stride)
        else:
            copy_bytes(dst + i * stride, rows + i * row_bytes, row_bytes)
    zero_bytes(dst + count * stride, (_RUN - count) * stride)


@njit(nogil=True)
def _prepare_tile(f: Any, s: Any, table: Any, head: Any, first: Any, rows: Any) -> None:
    """Write where each run of 16 keys lies, all scales, and the woven values."""
    k_stride, v_stride = f[at.M_K_STRIDE], f[at.M_V_STRIDE]
    room = s + f[at.M_ROW]
    # Values behind the end get no weight, but zero times NaN would count; codes are no NaN.
    v_staged = f[at.M_V_STAGED] != 0 or (rows < TILE_ROWS and f[at.V_MODE] != at.INT8)
    for run in range(TILE_ROWS // _RUN):
        count = min(_RUN, rows - run * _RUN)
        # Behind the end any rows will do: nobody sees them.
        place = row_of(f, table, head, first + (run * _RUN if count > 0 else 0))
        keys, values = f[at.K_ROWS] + place * f[at.K_BYTES], f[at.V_ROWS] + place * f[at.V_BYTES]
        k_scales, v_scales = f[at.K_SCALES] + place * f[at.K_SCALE_BYTES], f[at.V_SCALES] + place * f[at.V_SCALE_BYTES]
        count = max(count, 0)
        if f[at.M_K_STAGED]:
            dst = s + f[at.M_K_STAGE] + run * _RUN * k_stride
            _decode_run(
                f, f[at.K_MODE], keys, f[at.K_BYTES], f[at.K_DIM], f[at.K_GROUPS], k_scales, f[at.K_SCALE_BYTES], room,
                count, dst, k_stride,
            )  # fmt: skip
            keys = dst
        if v_staged:
            dst = s + f[at.M_V_STAGE] + run * _RUN * v_stride
            _decode_run(
                f, f[at.V_MODE], values, f[at.V_BYTES], f[at.V_DIM], f[at.V_GROUPS], v_scales, f[at.V_SCALE_BYTES],
                room, count, dst, v_stride,
            )  # fmt: skip
            values = dst
        store_i64(s + f[at.M_RUNS] + run * 8, keys)
        store_i64(s + f[at.M_RUNS] + (4 + run) * 8, values)
        if f[at.K_MODE] == at.INT8:
            copy_bytes(s + f[at.M_K_SCALES] + run * _LINE, k_scales, _LINE)
        if f[at.V_MODE] == at.INT8:
            copy_bytes(s + f[at.M_V_SCALES] + run * _LINE, v_scales, _LINE)
    parts = f[at.V_WIDTH] // _RUN
    stride = v_stride if v_staged else f[at.V_BYTES]
    if f[at.V_MODE] == at.INT8:
        weave_codes(s + f[at.M_RUNS] + 32, stride, parts, s + f[at.M_V])
    else:
        weave_halves(s + f[at.M_RUNS] + 32, stride, parts, s + f[at.M_V])


@njit(nogil=True)
def _attend_group(f: Any, s: Any, group: Any, first: Any, masked: Any) -> None:
    """Attend one group of queries to the tile that is prepared."""
    steps, scores = f[at.M_STEPS], s + f[at.M_SCORES]
    stride = f[at.M_K_STRIDE] if f[at.M_K_STAGED] else f[at.K_BYTES]
    q_scales, most = _lanes_of(s, f, group, _Q_SCALES), _lanes_of(s, f, group, _MOST)
    peak = _lanes_of(s, f, group, _SHRINK)
    if f[at.K_MODE] == at.INT8:
        score_codes(s + f[at.M_RUNS], stride, steps, s + f[at.M_Q] + group * steps * 2 * at.STEP_BYTES, scores)
        scale_scores(scores, 1, s + f[at.M_K_SCALES], q_scales, most, peak)
    else:
        score_halves(s + f[at.M_RUNS], stride, steps, s + f[at.M_Q] + group * steps * at.STEP_BYTES, scores)
        scale_scores(scores, 0, 0, q_scales, most, peak)
    if masked:
        mask_lanes(scores, first, _lanes_of(s, f, group, _LOW), _lanes_of(s, f, group, _HIGH), most, peak)
    width = f[at.V_WIDTH]
    acc = s + f[at.M_ACC] + group * width * _LINE
    softmax_lanes(
        scores, 1 if masked else 0, s + f[at.M_V_SCALES], most, _lanes_of(s, f, group, _TOTAL),
        peak, acc, width, s + f[at.M_WEIGHTS],
    )  # fmt: skip
    add_values(s + f[at.M_WEIGHTS], s + f[at.M_V], width // _RUN, acc)


@njit(nogil=True)
def _finish_queries(f: Any, s: Any, queries: Any, partial: Any, heads: Any, head: Any) -> None:
    """Write an item's partial results: sums, maximum, total."""
    together, dim, width = heads // f[at.KV_HEADS], f[at.V_DIM], f[at.V_WIDTH]
    group = lane = 0
    acc = s + f[at.M_ACC]
    for i in range(queries.shape[0]):
        out = partial + (queries[i, SLOT] * heads + head * together) * f[at.P_WIDTH] * 4
        for _ in range(together):
            copy_bytes(out, acc, dim * 4)
            store_f32(out + dim * 4, load_f32(_lanes_of(s, f, group, _MOST) + lane * 4))
            store_f32(out + dim * 4 + 4, load_f32(_lanes_of(s, f, group, _TOTAL) + lane * 4))
            out += f[at.P_WIDTH] * 4
            acc += width * 4
            lane += 1
            if lane == TOKENS:
                group, lane = group + 1, 0


@njit(nogil=True, inline="always")
def _attend(
    f: Any, s: Any, item: Any, queries: Any, spans: Any, table: Any, head: Any, q: Any, heads: Any, partial: Any,
    factor: Any
) -> None:  # fmt: skip
    """Attend one kv head of one item."""
    _start_queries(f, s, queries, spans, q, heads, head, factor)
    groups = -(-(queries.shape[0] * (heads // f[at.KV_HEADS])) // TOKENS)
    if f[at.M_K_STAGED]:
        zero_bytes(s + f[at.M_K_STAGE], TILE_ROWS * f[at.M_K_STRIDE])
    for i in range(TILE_ROWS):
        store_f32(s + f[at.M_V_SCALES] + i * 4, np.float32(1.0))
    tile_begin(f[at.M_CONFIG], s + f[at.M_FORMER])
    # Tiles lie alike for everybody: what an item does not want before its first row nobody sees.
    for first in range(item[FIRST_ROW] // TILE_ROWS * TILE_ROWS, item[LAST_ROW], TILE_ROWS):
        rows = min(TILE_ROWS, item[LAST_ROW] - first)
        _prepare_tile(f, s, table, head, first, rows)
        for row in range(first + TILE_ROWS, min(first + 2 * TILE_ROWS, item[LAST_ROW]), _RUN):
            place = row_of(f, table, head, row)
            prefetch(f[at.K_ROWS] + place * f[at.K_BYTES], _RUN * f[at.K_BYTES])
            prefetch(f[at.V_ROWS] + place * f[at.V_BYTES], _RUN * f[at.V_BYTES])
        for group in range(groups):
            if spans[group, _LOWEST] < first + rows and spans[group, _HIGHEST] > first:
                seen = spans[group, _FARTHEST] <= first and spans[group, _NEAREST] >= first + TILE_ROWS
                _attend_group(f, s, group, first, rows < TILE_ROWS or not seen)
    tile_end(s + f[at.M_FORMER])
    _finish_queries(f, s, queries, partial, heads, head)


def _build(sources: str) -> Any:
    """Return the compiled function; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def matrix_item_of_one_head(
        f: Any, s: Any, item: Any, queries: Any, tables: Any, head: Any, q: Any, q_mode: Any, heads: Any, partial: Any,
        factor: Any, cap: Any
    ) -> None:  # fmt: skip
        if not sources:
            return
        fields = carray(f, at.NUM_FIELDS)
        that = carray(item, 6)
        wanted = carray(queries, (that[FIRST_QUERY] + that[NUM_QUERIES], 4))[that[FIRST_QUERY] :]
        table = carray(tables, that[TABLE] + 1)[that[TABLE] :]
        spans = np.empty((-(-fields[at.MOST_QUERIES] // TOKENS), 4), np.int64)
        _attend(fields, s, that, wanted, spans, table, head, q, heads, partial, factor)

    return compiled(functools.partial(cfunc, types.void(*ITEM_PARAMETERS)), matrix_item_of_one_head)


@functools.cache
def matrix_item_function() -> Any:
    """Return the compiled function, made or loaded on first use; called as ``numba_item.item_function`` is."""
    return _build(sources_digest())
