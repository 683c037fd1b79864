"""Decodes over 8-bit codes on a processor's matrix unit: one kv head of one item, with the arithmetic of int8 itself.

It does what :mod:`prefixkv.kernels.numba_item` does, see :mod:`prefixkv.kernels.numba_amx_rows`. A decode has few
queries and all rows to read: what is done to a row has to be little.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_amx import TILE_BYTES, tile_begin, tile_end
from prefixkv.kernels.numba_amx_rows import (
    add_codes,
    pack_planes,
    scale_sums,
    score_codes,
    softmax_codes,
    turn_codes,
    weave_codes,
)
from prefixkv.kernels.numba_amx_tile import TILE_ROWS
from prefixkv.kernels.numba_build import compiled, sources_digest
from prefixkv.kernels.numba_dots import NOTHING
from prefixkv.kernels.numba_ir import (
    copy_bytes,
    prefetch,
    store_f32,
    store_i8,
    store_i64,
    zero_bytes,
)
from prefixkv.kernels.numba_item import (
    FIRST_ROW,
    ITEM_PARAMETERS,
    LAST_ROW,
    SEEN_FROM,
    SEEN_TO,
    SLOT,
    TABLE,
    TOKEN,
    queries_of,
    row_of,
    table_from,
    write_partial,
)
from prefixkv.kernels.numba_queries import read_query

__all__ = ["decode_function"]

_RUN = 16
_STEP = 64
"""Codes of a row that the unit takes at a time."""
_CONFIG_ROWS = 48
"""Where a tile's number of rows stands in the shapes of all."""


@njit(nogil=True)
def _start_queries(f: Any, s: Any, queries: Any, q: Any, q_mode: Any, heads: Any, head: Any, factor: Any) -> None:
    """Read an item's queries and reset their running softmax."""
    together = heads // f[at.KV_HEADS]
    num, dim, turn = queries.shape[0] * together, f[at.K_DIM], f[at.K_TURN]
    steps = dim // _STEP
    size = 4 if q_mode == at.F32 else 2
    if turn > 1:
        factor = np.float32(factor / np.sqrt(np.float32(turn)))
    index = 0
    for i in range(queries.shape[0]):
        that = queries[i]
        src = q + (that[TOKEN] * heads + head * together) * dim * size
        for _ in range(together):
            read_query(q_mode, src, dim, factor, turn, s + f[at.D_ROW])
            dst = s + f[at.D_Q] + (index // _RUN * steps * 2 * _RUN + index % _RUN) * _STEP
            pack_planes(s + f[at.D_ROW], steps, dst, s + f[at.D_Q_SCALES] + index * 4)
            store_i64(s + f[at.D_SEEN] + index * 16, that[SEEN_FROM])
            store_i64(s + f[at.D_SEEN] + index * 16 + 8, that[SEEN_TO])
            store_f32(s + f[at.D_MOST] + index * 4, NOTHING)
            src += dim * size
            index += 1
    zero_bytes(s + f[at.D_TOTAL], num * _RUN * 4)
    zero_bytes(s + f[at.D_ACC], num * f[at.V_DIM] * 4)
    # Tiles 0 to 5 are sums and weights, a row per query, and the unit's time is in rows; 6 and 7 are keys or values.
    copy_bytes(s + f[at.D_CONFIG], f[at.M_CONFIG], 64)
    for tile in range(6):
        store_i8(s + f[at.D_CONFIG] + _CONFIG_ROWS + tile, min(num, _RUN))


@njit(nogil=True)
def _prepare(f: Any, s: Any, table: Any, head: Any, first: Any, last: Any) -> None:
    """Turn a tile's keys, weave its values, and copy its scales."""
    rows = last - first
    k_steps, v_steps = f[at.K_DIM] // _STEP, f[at.V_DIM] // _STEP
    for run in range(TILE_ROWS // _RUN):
        # Behind the end any rows will do: nobody sees them.
        place = row_of(f, table, head, first + (run * _RUN if run * _RUN < rows else 0))
        turn_codes(f[at.K_ROWS] + place * f[at.K_BYTES], k_steps, s + f[at.D_K] + run * k_steps * TILE_BYTES)
        _ask_for_keys(f, table, head, first + TILE_ROWS + run * _RUN, last)
        weave_codes(f[at.V_ROWS] + place * f[at.V_BYTES], v_steps, s + f[at.D_V] + run * 4 * 64)  # four lines
        copy_bytes(s + f[at.D_K_SCALES] + run * _RUN * 4, f[at.K_SCALES] + place * 4, _RUN * 4)
        copy_bytes(s + f[at.D_V_SCALES] + run * _RUN * 4, f[at.V_SCALES] + place * 4, _RUN * 4)


@njit(nogil=True)
def _ask_for_keys(f: Any, table: Any, head: Any, row: Any, last: Any) -> None:
    """Let the memory work on a run of keys: as many lines as it can be asked for at once."""
    if row < last:
        place = row_of(f, table, head, row)
        prefetch(f[at.K_ROWS] + place * f[at.K_BYTES], _RUN * f[at.K_BYTES])


@njit(nogil=True)
def _ask_for_values(f: Any, table: Any, head: Any, row: Any, last: Any) -> None:
    """Let the memory work on a run of values and on its scales."""
    if row < last:
        place = row_of(f, table, head, row)
        prefetch(f[at.V_ROWS] + place * f[at.V_BYTES], _RUN * f[at.V_BYTES])
        prefetch(f[at.K_SCALES] + place * 4, 1)
        prefetch(f[at.V_SCALES] + place * 4, 1)


@njit(nogil=True)
def _attend_group(
    f: Any, s: Any, group: Any, count: Any, first: Any, masked: Any, table: Any, head: Any, next_row: Any, last: Any
) -> None:
    """Attend up to 16 queries to the tile that is prepared, and let the memory work on values from a row on."""
    k_steps, v_tiles = f[at.K_DIM] // _STEP, f[at.V_DIM] // _RUN
    before = group * _RUN
    plane = _RUN * f[at.V_DIM] * 4
    score_codes(s + f[at.D_Q] + group * k_steps * 2 * TILE_BYTES, s + f[at.D_K], k_steps, s + f[at.D_PRODUCTS])
    _ask_for_values(f, table, head, next_row, last)
    softmax_codes(
        s + f[at.D_PRODUCTS], count, s + f[at.D_K_SCALES], s + f[at.D_V_SCALES], s + f[at.D_Q_SCALES] + before * 4,
        masked, first, s + f[at.D_SEEN] + before * 16, s + f[at.D_MOST] + before * 4,
        s + f[at.D_TOTAL] + before * _RUN * 4, s + f[at.D_SHRINK], s + f[at.D_W_SCALES], s + f[at.D_WEIGHTS],
    )  # fmt: skip
    _ask_for_values(f, table, head, next_row + _RUN, last)
    add_codes(s + f[at.D_WEIGHTS], s + f[at.D_V], v_tiles, s + f[at.D_OUT], plane)
    _ask_for_values(f, table, head, next_row + 2 * _RUN, last)
    scale_sums(
        s + f[at.D_OUT], plane, count, v_tiles, s + f[at.D_SHRINK], s + f[at.D_W_SCALES],
        s + f[at.D_ACC] + before * f[at.V_DIM] * 4,
    )  # fmt: skip
    _ask_for_values(f, table, head, next_row + 3 * _RUN, last)


@njit(nogil=True)
def _finish_queries(f: Any, s: Any, queries: Any, partial: Any, heads: Any, head: Any) -> None:
    """Write an item's partial results: sums in their true order, maximum, total."""
    together, dim = heads // f[at.KV_HEADS], f[at.V_DIM]
    index = 0
    for i in range(queries.shape[0]):
        out = partial + (queries[i, SLOT] * heads + head * together) * f[at.P_WIDTH] * 4
        for _ in range(together):
            acc = s + f[at.D_ACC] + index * dim * 4
            most, total = s + f[at.D_MOST] + index * 4, s + f[at.D_TOTAL] + index * _RUN * 4
            write_partial(acc, dim, dim, most, total, out)
            out += f[at.P_WIDTH] * 4
            index += 1


@njit(nogil=True, inline="always")
def _attend(
    f: Any, s: Any, item: Any, queries: Any, table: Any, head: Any, q: Any, q_mode: Any, heads: Any, partial: Any,
    factor: Any
) -> None:  # fmt: skip
    """Attend one kv head of one item."""
    _start_queries(f, s, queries, q, q_mode, heads, head, factor)
    num = queries.shape[0] * (heads // f[at.KV_HEADS])
    farthest, nearest = 0, 1 << 30
    for i in range(queries.shape[0]):
        farthest, nearest = max(farthest, queries[i, SEEN_FROM]), min(nearest, queries[i, SEEN_TO])
    tile_begin(s + f[at.D_CONFIG], s + f[at.M_FORMER])
    # Tiles lie alike for everybody: what is before an item's first row nobody in it sees.
    for first in range(item[FIRST_ROW] // TILE_ROWS * TILE_ROWS, item[LAST_ROW], TILE_ROWS):
        _prepare(f, s, table, head, first, item[LAST_ROW])
        masked = 1 if farthest > first or nearest < first + TILE_ROWS else 0
        for group in range(-(-num // _RUN)):
            next_row = first + TILE_ROWS if group == 0 else item[LAST_ROW]
            count = min(_RUN, num - group * _RUN)
            _attend_group(f, s, group, count, first, masked, table, head, next_row, item[LAST_ROW])
    tile_end(s + f[at.M_FORMER])
    _finish_queries(f, s, queries, partial, heads, head)


def _build(sources: str) -> Any:
    """Return the compiled function; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def decode_of_one_head(
        f: Any, s: Any, item: Any, queries: Any, tables: Any, head: Any, q: Any, q_mode: Any, heads: Any, partial: Any,
        factor: Any, cap: Any
    ) -> None:  # fmt: skip
        if not sources:
            return
        fields = carray(f, at.NUM_FIELDS)
        that = carray(item, 6)
        table = table_from(tables, that[TABLE])
        _attend(fields, s, that, queries_of(that, queries), table, head, q, q_mode, heads, partial, factor)

    return compiled(functools.partial(cfunc, types.void(*ITEM_PARAMETERS)), decode_of_one_head)


@functools.cache
def decode_function() -> Any:
    """Return the compiled function of an item, called as ``numba_item.item_function`` is."""
    return _build(sources_digest())
