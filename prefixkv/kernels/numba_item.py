"""One kv head of one item: its queries against a range of rows, tile by tile, with a running softmax."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_build import compiled, sources_digest
from prefixkv.kernels.numba_dots import MASKED, NOTHING, cap_scores, score_float, score_int, softmax, sum_float, sum_int
from prefixkv.kernels.numba_ir import (
    LANES,
    copy_bytes,
    int_bits,
    load_f32,
    load_i16,
    load_u8,
    prefetch,
    store_f32,
    zero_bytes,
)
from prefixkv.kernels.numba_queries import pack_query, read_query
from prefixkv.kernels.numba_tiles import (
    ROWS,
    turn_bf16,
    turn_f16,
    turn_f32,
    turn_i4,
    turn_i8,
    weave_i8,
    widen_bf16,
    widen_f16,
    widen_f32,
    widen_i4,
)

__all__ = [
    "FIRST_ROW",
    "FIRST_TILE",
    "ITEM_PARAMETERS",
    "LAST_ROW",
    "SEEN_FROM",
    "SEEN_TO",
    "SLOT",
    "TABLE",
    "TOKEN",
    "call_item",
    "item_function",
    "queries_of",
    "row_of",
    "table_from",
    "write_partial",
]

TABLE, FIRST_ROW, LAST_ROW, FIRST_QUERY, NUM_QUERIES, FIRST_TILE = range(6)
"""Columns of an item, as ``AttendPlan`` says."""

TOKEN, SLOT, SEEN_FROM, SEEN_TO = range(4)
"""Columns of a query."""


@njit(nogil=True)
def row_of(f: Any, table: Any, head: Any, row: Any) -> Any:
    """Return where row ``row`` of a sequence lies, counted in rows of one kv head from the start of the pool."""
    size = f[at.BLOCK]
    block = row // size
    return (table[block] * f[at.KV_HEADS] + head) * size + row - block * size


@njit(nogil=True)
def _gather(
    base: Any, row_bytes: Any, stride: Any, f: Any, table: Any, head: Any, first: Any, rows: Any, dst: Any
) -> None:
    """Copy a tile's rows of one tensor to ``dst``, ``stride`` bytes apart, and zeros behind them."""
    size = f[at.BLOCK]
    done = 0
    while done < rows:
        run = min(rows - done, size - (first + done) % size)
        source = base + row_of(f, table, head, first + done) * row_bytes
        if stride == row_bytes:
            copy_bytes(dst + done * stride, source, run * row_bytes)
        else:
            for i in range(run):
                copy_bytes(dst + (done + i) * stride, source + i * row_bytes, row_bytes)
        done += run
    zero_bytes(dst + rows * stride, (ROWS - rows) * stride)


@njit(nogil=True)
def _ask_ahead(f: Any, row: Any) -> None:
    """Let the memory work on the tile that begins at ``row`` of the pool while this one is computed."""
    prefetch(f[at.K_ROWS] + row * f[at.K_BYTES], ROWS // 2 * f[at.K_BYTES])
    prefetch(f[at.V_ROWS] + row * f[at.V_BYTES], ROWS // 2 * f[at.V_BYTES])
    prefetch(f[at.K_SCALES] + row * f[at.K_SCALE_BYTES], ROWS * f[at.K_SCALE_BYTES])
    prefetch(f[at.V_SCALES] + row * f[at.V_SCALE_BYTES], ROWS * f[at.V_SCALE_BYTES])


@njit(nogil=True)
def _score_tile(f: Any, s: Any, table: Any, head: Any, first: Any, rows: Any, place: Any, num: Any) -> None:
    """Prepare the tile's keys and write the scores of ``num`` queries. ``place`` is its row in the pool, or -1."""
    mode, k, q, out = f[at.K_MODE], s + f[at.S_K], s + f[at.S_Q], s + f[at.S_SCORES]
    scales, least = s + f[at.S_K_SCALES], s + f[at.S_K_SCALES] + ROWS * 4
    units, groups = f[at.K_UNITS], f[at.K_GROUPS]
    src, stride = f[at.K_ROWS] + place * f[at.K_BYTES], f[at.K_BYTES]
    if place < 0 or f[at.K_STAGED]:
        src, stride = s + f[at.S_STAGE], max(stride, f[at.K_STAGED])
        _gather(f[at.K_ROWS], f[at.K_BYTES], stride, f, table, head, first, rows, src)
    if mode == at.INT8:
        turn_i8(src, stride, units // 2, k)
        if place < 0:
            _gather(f[at.K_SCALES], 4, 4, f, table, head, first, rows, scales)
        else:
            scales = f[at.K_SCALES] + place * 4
    elif mode == at.INT4:
        turn_i4(src, stride, units * groups // 4, k)
        size = f[at.K_SCALE_BYTES]
        src, stride = f[at.K_SCALES] + place * size, size
        if place < 0 or size % 16:
            src, stride = s + f[at.S_STAGE], (size + 15) // 16 * 16
            _gather(f[at.K_SCALES], size, stride, f, table, head, first, rows, src)
        turn_f16(src, stride, groups, scales)
    elif mode == at.F32:
        turn_f32(src, stride, units, k)
    elif mode == at.BF16:
        turn_bf16(src, stride, units // 2, k)
    else:
        turn_f16(src, stride, units // 2, k)
    if mode == at.INT8 or mode == at.INT4:
        score_int(k, scales, least, groups, units, q, s + f[at.S_Q_SUMS], s + f[at.S_Q_SCALES], num, out)
    else:
        score_float(k, units, q, num, out)


@njit(nogil=True)
def _mask_tile(scores: Any, queries: Any, group: Any, first: Any) -> None:
    """Take from each query the rows that it does not see."""
    for i in range(queries.shape[0]):
        low, high = queries[i, SEEN_FROM] - first, queries[i, SEEN_TO] - first
        if low > 0 or high < ROWS:
            for row in range(ROWS):
                if row < low or row >= high:
                    for g in range(group):
                        store_f32(scores + ((i * group + g) * ROWS + row) * 4, MASKED)


@njit(nogil=True)
def _add_tile(f: Any, s: Any, table: Any, head: Any, first: Any, rows: Any, place: Any, num: Any) -> None:
    """Turn scores into weights, prepare the tile's values and add the weighted sums."""
    mode, v, width = f[at.V_MODE], s + f[at.S_V], f[at.V_WIDTH]
    scores, weights, w_scales = s + f[at.S_SCORES], s + f[at.S_WEIGHTS], s + f[at.S_W_SCALES]
    acc, shrink = s + f[at.S_ACC], s + f[at.S_SHRINK]
    scales = 0
    if mode == at.INT8:
        scales = f[at.V_SCALES] + place * 4
        if place < 0:
            scales = s + f[at.S_V_SCALES]
            _gather(f[at.V_SCALES], 4, 4, f, table, head, first, rows, scales)
    softmax(scores, num, s + f[at.S_MOST], s + f[at.S_TOTAL], shrink, scales, weights, w_scales)
    src, stride = f[at.V_ROWS] + place * f[at.V_BYTES], f[at.V_BYTES]
    if place < 0 or f[at.V_STAGED]:
        src, stride = s + f[at.S_STAGE], max(stride, f[at.V_STAGED])
        _gather(f[at.V_ROWS], f[at.V_BYTES], stride, f, table, head, first, rows, src)
    if mode == at.INT8:
        weave_i8(src, stride, width, v)
        sum_int(v, weights, width, num, acc, shrink, w_scales)
        return
    if mode == at.F32:
        widen_f32(src, stride, width, v)
    elif mode == at.BF16:
        widen_bf16(src, stride, width, v)
    elif mode == at.F16:
        widen_f16(src, stride, width, v)
    else:
        _widen_i4(f, s, src, stride, table, head, first, rows, place, v)
    sum_float(v, scores, width, num, acc, shrink, w_scales)


@njit(nogil=True)
def _widen_i4(
    f: Any, s: Any, src: Any, stride: Any, table: Any, head: Any, first: Any, rows: Any, place: Any, v: Any
) -> None:
    """Write a tile of 4-bit values as float32 [32, width]."""
    dim, width, groups = f[at.V_DIM], f[at.V_WIDTH], f[at.V_GROUPS]
    length, size, scales = dim // groups, f[at.V_SCALE_BYTES], s + f[at.S_V_SCALES]
    begin, step = f[at.V_SCALES] + place * size, size
    if place < 0 or size % 16:
        # Behind the codes, which may be staged as well.
        begin, step = s + f[at.S_STAGE] + ROWS * f[at.V_STAGE_BYTES], (size + 15) // 16 * 16
        _gather(f[at.V_SCALES], size, step, f, table, head, first, rows, begin)
    turn_f16(begin, step, groups, scales)
    if dim % (2 * LANES) == 0:
        for shift in range(3):
            if length == LANES << shift:
                widen_i4(src, stride, dim, shift, scales, v)
                return
    for row in range(ROWS):
        out, codes = v + row * width * 4, src + row * stride
        for i in range(dim // 2):
            code = load_u8(codes + i)
            store_f32(out + 4 * i, np.float32(code & 15))
            store_f32(out + 4 * (i + dim // 2), np.float32(code >> 4))
        for i in range(dim, width):
            store_f32(out + 4 * i, 0.0)
        for i in range(dim):
            both = scales + (2 * (i // length) * ROWS + row) * 4
            store_f32(out + 4 * i, load_f32(out + 4 * i) * load_f32(both) + load_f32(both + ROWS * 4))


@njit(nogil=True)
def _start_queries(f: Any, s: Any, queries: Any, q: Any, q_mode: Any, heads: Any, head: Any, factor: Any) -> None:
    """Read an item's queries and reset their running softmax."""
    group = heads // f[at.KV_HEADS]
    dim, groups = f[at.K_DIM], f[at.K_GROUPS]
    width = f[at.K_UNITS] * groups
    integer = f[at.K_MODE] == at.INT8 or f[at.K_MODE] == at.INT4
    size = 4 if q_mode == at.F32 else 2
    turn = f[at.K_TURN]
    if turn > 1:
        factor = np.float32(factor / np.sqrt(np.float32(turn)))
    num = 0
    for i in range(queries.shape[0]):
        for g in range(group):
            src = q + (queries[i, TOKEN] * heads + head * group + g) * dim * size
            dst = s + f[at.S_Q] + num * width * 4
            row = s + f[at.S_ROW] if integer else dst
            read_query(q_mode, src, dim, factor, turn, row)
            if integer:
                pack_query(row, width, dst, s + f[at.S_Q_SCALES] + num * 4)
                for k in range(groups):
                    total = 0
                    if f[at.K_MODE] == at.INT4:  # int8 codes have no minimum to go with the sum
                        for j in range(k * f[at.K_UNITS] * 2, (k + 1) * f[at.K_UNITS] * 2):
                            total += load_i16(dst + 2 * j)
                    store_f32(s + f[at.S_Q_SUMS] + (num * groups + k) * 4, np.float32(total))
            store_f32(s + f[at.S_MOST] + num * 4, NOTHING)
            num += 1
    zero_bytes(s + f[at.S_TOTAL], num * LANES * 4)
    zero_bytes(s + f[at.S_ACC], num * f[at.V_WIDTH] * 4)
    zero_bytes(s + f[at.S_K_SCALES], ROWS * 8)


@njit(nogil=True)
def write_partial(acc: Any, woven: Any, dim: Any, most: Any, total: Any, out: Any) -> None:
    """Write one query's partial result: sums in their true order, maximum, the lanes of the total added.

    The first ``woven`` sums are in the order of :func:`~prefixkv.kernels.numba_tiles.weave_run`.
    """
    for start in range(0, min(woven, dim), 16):
        # Sixteen numbers lie in four places of four, one in each vector of their run.
        place = acc + (start // (4 * LANES) * 4 * LANES + start % (4 * LANES) // 4) * 4
        for j in range(min(4, (dim - start + 3) // 4)):
            copy_bytes(out + (start + 4 * j) * 4, place + j * LANES * 4, min(16, (dim - start - 4 * j) * 4))
    if woven < dim:
        copy_bytes(out + woven * 4, acc + woven * 4, (dim - woven) * 4)
    sum_of_lanes = np.float32(0.0)
    for lane in range(LANES):
        sum_of_lanes += load_f32(total + lane * 4)
    store_f32(out + dim * 4, load_f32(most))
    store_f32(out + dim * 4 + 4, sum_of_lanes)


@njit(nogil=True)
def queries_of(item: Any, queries: Any) -> Any:
    """Return an item's queries, of all behind a pointer."""
    first = item[FIRST_QUERY]
    return carray(queries, (first + item[NUM_QUERIES], 4))[first:]


@njit(nogil=True)
def table_from(tables: Any, begin: Any) -> Any:
    """Return the block table that begins at number ``begin`` behind a pointer."""
    return carray(tables, begin + 1)[begin:]


@njit(nogil=True)
def _finish_queries(f: Any, s: Any, queries: Any, partial: Any, heads: Any, head: Any) -> None:
    """Write an item's partial results: sums in their true order, maximum, total."""
    group, dim, width = heads // f[at.KV_HEADS], f[at.V_DIM], f[at.V_WIDTH]
    woven = width // (4 * LANES) * 4 * LANES if f[at.V_MODE] == at.INT8 else 0
    for i in range(queries.shape[0]):
        for g in range(group):
            num = i * group + g
            out = partial + (queries[i, SLOT] * heads + head * group + g) * f[at.P_WIDTH] * 4
            acc = s + f[at.S_ACC] + num * width * 4
            write_partial(acc, woven, dim, s + f[at.S_MOST] + num * 4, s + f[at.S_TOTAL] + num * LANES * 4, out)


@njit(nogil=True, inline="always")
def _attend(
    f: Any, s: Any, item: Any, queries: Any, table: Any, head: Any, q: Any, q_mode: Any, heads: Any, partial: Any,
    factor: Any, cap: Any
) -> None:  # fmt: skip
    """Attend one kv head of one item."""
    group = heads // f[at.KV_HEADS]
    num = queries.shape[0] * group
    _start_queries(f, s, queries, q, q_mode, heads, head, factor)
    size = f[at.BLOCK]
    here = row_of(f, table, head, item[FIRST_ROW])
    inside = item[FIRST_ROW] % size
    for first in range(item[FIRST_ROW], item[LAST_ROW], ROWS):
        rows = min(ROWS, item[LAST_ROW] - first)
        # A tile that is whole and lies in one block is read where it is.
        place = here if rows == ROWS and inside + ROWS <= size else -1
        inside += ROWS
        if inside < size:
            here += ROWS
        elif first + ROWS < item[LAST_ROW]:
            inside = (first + ROWS) % size
            here = row_of(f, table, head, first + ROWS)
        _ask_ahead(f, here)
        _score_tile(f, s, table, head, first, rows, place, num)
        if cap > 0.0:
            cap_scores(s + f[at.S_SCORES], num * ROWS, int_bits(cap))
        _mask_tile(s + f[at.S_SCORES], queries, group, first)
        _add_tile(f, s, table, head, first, rows, place, num)
    _finish_queries(f, s, queries, partial, heads, head)


_INT, _FLOAT = types.int64, types.float32
ITEM_PARAMETERS = (
    types.CPointer(_INT), _INT, types.CPointer(_INT), types.CPointer(_INT), types.CPointer(types.int32),
    _INT, _INT, _INT, _INT, _INT, _FLOAT, _FLOAT,
)  # fmt: skip


def _build(sources: str) -> Any:
    """Return the compiled function; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def item_of_one_head(
        f: Any, s: Any, item: Any, queries: Any, tables: Any, head: Any, q: Any, q_mode: Any, heads: Any, partial: Any,
        factor: Any, cap: Any
    ) -> None:  # fmt: skip
        if not sources:
            return
        fields = carray(f, at.NUM_FIELDS)
        that = carray(item, 6)
        table = table_from(tables, that[TABLE])
        _attend(fields, s, that, queries_of(that, queries), table, head, q, q_mode, heads, partial, factor, cap)

    return compiled(functools.partial(cfunc, types.void(*ITEM_PARAMETERS)), item_of_one_head)


@functools.cache
def item_function() -> Any:
    """Return the compiled function, made or loaded on first use; its ``address`` is what :data:`call_item` calls.

    Everything around it is compiled apart: numba optimises a callee again inside each of its callers, and this one is
    most of the code.
    """
    return _build(sources_digest())


@intrinsic
def call_item(
    typing_context: Any, address: Any, f: Any, s: Any, item: Any, queries: Any, tables: Any, head: Any, q: Any,
    q_mode: Any, heads: Any, partial: Any, factor: Any, cap: Any
) -> Any:  # fmt: skip
    """Attend one kv head of one item; integers are addresses."""
    integers = (_INT,) * 11

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kinds = [ir.FloatType() if kind == _FLOAT else ir.IntType(64) for kind in ITEM_PARAMETERS]
        function = ir.FunctionType(ir.VoidType(), kinds)
        b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*integers, _FLOAT, _FLOAT), generate
