"""Attention over the pool, in place, for any step: decodes, chunks, and sequences that share blocks.

The work is a list of items. An item is a range of rows of one block table and the queries that see some of them; every
kv head of it is attended alone. Threads take items from a common counter, so one sequence keeps all of them busy. Rows
go by tiles of 32 or 64, each read once for all queries of the item, with a running softmax; what chunks read may be
prepared before, once for all items. What an item finds is a partial result; the second pass merges those of each query
by their log-sum-exp, which is exact.

Source: partial softmax over splits of the context as in flash-decoding (Dao et al. 2023), shared rows read once for
all as in Hydragen (Juravsky et al. 2024); both over paged, quantised rows here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_amx_decode import decode_function
from prefixkv.kernels.numba_amx_item import call_prepare, chunk_function, prepare_function
from prefixkv.kernels.numba_build import compiled, sources_digest, use_threads
from prefixkv.kernels.numba_dots import EXP2, NOTHING
from prefixkv.kernels.numba_halves import store_number
from prefixkv.kernels.numba_ir import (
    F32,
    I16,
    I32,
    LANES,
    atomic_add,
    bf16_bits,
    float_bits,
    fma,
    int_bits,
    load,
    load_f32,
    load_i32,
    load_i64,
    micro_kernel,
    offset,
    repeat,
    splat,
    store,
    vector,
)
from prefixkv.kernels.numba_item import FIRST_TILE, call_item, item_function
from prefixkv.kernels.numba_layout import LayerView
from prefixkv.kernels.numba_meet import share
from prefixkv.kernels.numba_queries import turn_row

__all__ = [
    "LOG2_E",
    "NO_SINKS",
    "AttendPlan",
    "attend",
    "attend_items",
    "item_functions",
    "merge_share",
    "num_prepared",
    "prepare_share",
]

NO_SINKS = np.zeros(0, np.float32)


class AttendPlan:
    """One step's work, and the room it is done in. Dies with the step; one thread uses it."""

    def __init__(
        self, items: np.ndarray, queries: np.ndarray, tokens: np.ndarray, tiles: np.ndarray, tables: np.ndarray,
        num_slots: int
    ) -> None:  # fmt: skip
        """Keep the arrays; they must be contiguous and not change.

        Args:
            items: [I, 6] int64: block table, first row (a multiple of 32), end of the rows, first query, number of
                queries, for a chunk the index of the tile that its first row is in, for a decode -1.
            queries: [J, 4] int64: row of q, where its partial result goes, first row it sees, end of the rows it sees.
            tokens: [T', 3] int64: row of q, its first partial result, how many there are.
            tiles: [N, 3] int64, what chunks read: block table, first row (a multiple of 64), number of rows.
            tables: [S, M] int32 block tables.
            num_slots: Partial results in all.
        """
        self.items = items.copy()
        tiles = tiles.copy()
        for rows in (self.items, tiles):
            rows[:, 0] *= tables.shape[1]  # where a table begins: saves the kernel the width
        self._arrays = (queries, tables, tiles)
        self._num_slots = num_slots
        self._scratch = self._prepared = torch.empty(0, dtype=torch.uint8)
        self._partial = np.empty(0, np.float32)
        self.fields = np.array(
            [self.items.ctypes.data, len(items), queries.ctypes.data, tables.ctypes.data, tiles.ctypes.data, len(tiles)]
        )
        self.tokens = tokens
        self.threads = use_threads()

    def room(self, view: LayerView, heads: int, *, prepares: bool) -> tuple[int, int, np.ndarray]:
        """Return the addresses of the threads' scratch and of prepared tiles, and room for partial results.

        That is [slots, heads, width]. May allocate. ``prepares``: whether tiles are prepared at all.
        """
        need = view.scratch_bytes * self.threads + 64
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8)
        need = int(self.fields[P_NUM_TILES]) * view.num_kv_heads * view.tile_bytes + 64 if prepares else 0
        if self._prepared.numel() < need:
            self._prepared = torch.empty(need, dtype=torch.uint8)
        size = self._num_slots * heads * view.partial_width
        if self._partial.size < size:
            self._partial = np.empty(size, np.float32)
        partial = self._partial[:size].reshape(self._num_slots, heads, view.partial_width)
        scratch, prepared = (-(-room.data_ptr() // 64) * 64 for room in (self._scratch, self._prepared))
        return scratch, prepared, partial


P_ITEMS, P_NUM_ITEMS, P_QUERIES, P_TABLES, P_TILES, P_NUM_TILES = range(6)
"""Fields of a plan: addresses and counts."""

_ITEM_RECORD, _TILE_RECORD = 6 * 8, 3 * 8
_TOKEN, _SLOT, _NUM_SLOTS = 0, 1, 2

LOG2_E = 1.4426950408889634


@njit(nogil=True)
def _exp2(x: Any) -> Any:
    """Return 2**x for x <= 0 in float32."""
    x = max(x, np.float32(-126.0))
    whole = np.rint(x)
    rest = np.float32(x - whole)
    value = np.float32(EXP2[0])
    for coefficient in EXP2[1:]:
        value = value * rest + np.float32(coefficient)
    return value * float_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


def _factor(b: ir.IRBuilder, bits: Any) -> Any:
    return splat(b, b.bitcast(b.trunc(bits, I32), F32))


def _emit_scale(b: ir.IRBuilder, row: Any, vectors: Any, factor: Any) -> None:
    """Multiply a float32 row by a factor, given by its bits."""
    scale = _factor(b, factor)
    with repeat(b, vectors) as i:
        place = offset(b, row, (i, LANES * 4))
        store(b, place, b.fmul(load(b, place, vector(F32)), scale))


def _emit_add(b: ir.IRBuilder, row: Any, other: Any, vectors: Any, factor: Any) -> None:
    """Add another row times a factor."""
    scale = _factor(b, factor)
    with repeat(b, vectors) as i:
        place, more = (offset(b, base, (i, LANES * 4)) for base in (row, other))
        store(b, place, fma(b, load(b, more, vector(F32)), scale, load(b, place, vector(F32))))


def _emit_round(b: ir.IRBuilder, row: Any, vectors: Any, factor: Any, out: Any) -> None:
    """Write a row times a factor as bfloat16, rounded half to even."""
    scale = _factor(b, factor)
    with repeat(b, vectors) as i:
        x = b.fmul(load(b, offset(b, row, (i, LANES * 4)), vector(F32)), scale)
        store(b, offset(b, out, (i, LANES * 2)), b.trunc(bf16_bits(b, x), vector(I16)))


_scale_row = micro_kernel("scale_row", 3, _emit_scale)
_add_row = micro_kernel("add_row", 4, _emit_add)
_round_row = micro_kernel("round_row", 4, _emit_round)


@njit(nogil=True)
def _merge_token(token: Any, head: Any, partial: Any, dim: Any, turn: Any, sinks: Any, out: Any, mode: Any) -> None:
    """Merge the partial results of one query, turn it back and write it in the queries' dtype."""
    first, count = token[_SLOT], token[_NUM_SLOTS]
    most, total = np.float32(NOTHING), np.float32(0.0)
    for i in range(first, first + count):
        most = max(most, partial[i, head, dim])
    if sinks.shape[0]:
        most = max(most, np.float32(sinks[head] * np.float32(LOG2_E)))
        total = _exp2(np.float32(sinks[head] * np.float32(LOG2_E)) - most)
    result, vectors = partial[first, head].ctypes.data, -(-dim // LANES)
    for i in range(first, first + count):
        weight = _exp2(partial[i, head, dim] - most)
        total += weight * partial[i, head, dim + 1]
        if i == first:
            _scale_row(result, vectors, int_bits(weight))
        else:
            _add_row(result, partial[i, head].ctypes.data, vectors, int_bits(weight))
    inverse = np.float32(1.0) / max(total, np.float32(1e-37))
    if turn > 1:
        inverse /= np.sqrt(np.float32(turn))
        turn_row(result, dim, turn)
    done = 0
    if mode == at.BF16:
        done = dim // LANES * LANES
        _round_row(result, dim // LANES, int_bits(inverse), out)
    for d in range(done, dim):
        store_number(mode, out, d, load_f32(result + 4 * d) * inverse)


@njit(nogil=True)
def num_prepared(prepare: Any, plan: Any, kv_heads: Any) -> Any:
    """Return how many tiles there are to prepare, one head of each."""
    return plan[P_NUM_TILES] * kv_heads if prepare else 0


@njit(nogil=True)
def prepare_share(
    prepare: Any, f: Any, plan: Any, scratch: Any, prepared: Any, tile_bytes: Any, kv_heads: Any, first: Any, last: Any
) -> None:  # fmt: skip
    """Prepare some of the tiles that chunks read. ``scratch``: of this thread."""
    head_bytes = plan[P_NUM_TILES] * tile_bytes
    for work in range(first, last):
        tile, head = work // kv_heads, work % kv_heads
        call_prepare(
            prepare, f, scratch, plan[P_TILES] + tile * _TILE_RECORD, plan[P_TABLES], head,
            prepared + head * head_bytes + tile * tile_bytes,
        )  # fmt: skip


@njit(nogil=True)
def attend_items(
    decode_item: Any, chunk_item: Any, prepare: Any, f: Any, plan: Any, partial: Any, scratch: Any, prepared: Any,
    tile_bytes: Any, kv_heads: Any, heads: Any, q: Any, q_mode: Any, factor: Any, cap: Any, next_work: Any
) -> None:  # fmt: skip
    """Attend items, as many as this thread gets. ``next_work``: address of what all threads count them with."""
    head_bytes = plan[P_NUM_TILES] * tile_bytes
    count = plan[P_NUM_ITEMS] * kv_heads
    work = atomic_add(next_work, 1)
    while work < count:
        item, head = plan[P_ITEMS] + work // kv_heads * _ITEM_RECORD, work % kv_heads
        function, how = decode_item, q_mode
        if prepare and load_i64(item + FIRST_TILE * 8) >= 0:
            function, how = chunk_item, prepared + head * head_bytes
        call_item(
            function, f, scratch, item, plan[P_QUERIES], plan[P_TABLES], head, q, how, heads, partial.ctypes.data,
            factor, cap,
        )  # fmt: skip
        work = atomic_add(next_work, 1)


@njit(nogil=True)
def merge_share(
    f: Any, tokens: Any, partial: Any, heads: Any, dim: Any, sinks: Any, out: Any, q_mode: Any, first: Any, last: Any
) -> None:  # fmt: skip
    """Merge the partial results of some of ``tokens * heads``, the heads of a token one behind the other."""
    size = 4 if q_mode == at.F32 else 2
    turn = load_i32(f + at.V_TURN * 8)
    for index in range(first, last):
        token, head = tokens[index // heads], index % heads
        place = out + (token[_TOKEN] * heads + head) * dim * size
        _merge_token(token, head, partial, dim, turn, sinks, place, q_mode)


def _build(sources: str) -> Any:
    """Return the compiled entry. Its disk cache is keyed by what it closes over, so by the sources of its parts too."""

    def attend(
        decode_item: Any, chunk_item: Any, prepare: Any, f: Any, plan: Any, tokens: Any, partial: Any, scratch: Any,
        scratch_bytes: Any, prepared: Any, tile_bytes: Any, threads: Any, kv_heads: Any, heads: Any, dim: Any, q: Any,
        q_mode: Any, factor: Any, cap: Any, sinks: Any, out: Any
    ) -> None:  # fmt: skip
        counter = np.zeros(1, np.int64)
        count = num_prepared(prepare, plan, kv_heads) if sources else 0
        if count > 0:
            for thread in prange(threads):
                prepare_share(
                    prepare, f, plan, scratch + thread * scratch_bytes, prepared, tile_bytes, kv_heads,
                    share(count, thread, threads), share(count, thread + 1, threads),
                )  # fmt: skip
        for thread in prange(threads):
            attend_items(
                decode_item, chunk_item, prepare, f, plan, partial, scratch + thread * scratch_bytes, prepared,
                tile_bytes, kv_heads, heads, q, q_mode, factor, cap, counter.ctypes.data,
            )  # fmt: skip
        counter[0] = 0  # keeps it alive until here
        count = tokens.shape[0] * heads
        for thread in prange(threads):
            merge_share(
                f, tokens, partial, heads, dim, sinks, out, q_mode, share(count, thread, threads),
                share(count, thread + 1, threads),
            )  # fmt: skip

    return compiled(njit, attend, parallel=True, nogil=True)


_attend = _build(sources_digest())


def item_functions(view: LayerView, dtype: torch.dtype, softcap: float | None) -> tuple[int, int, int]:
    """Return the kernels of decodes, of chunks and of what prepares tiles for these; 0 where vectors do all.

    A decode is done to the same bits whether it shares its rows or not, so who does it depends on the layer alone.
    """
    vectors: int = item_function().address
    decode, chunk, prepare = vectors, 0, 0
    if softcap is None and view.codes:
        decode = decode_function().address
    if softcap is None and view.matrix and dtype == torch.bfloat16:
        chunk, prepare = chunk_function().address, prepare_function().address
    return decode, chunk, prepare


def attend(
    view: LayerView, plan: AttendPlan, q: torch.Tensor, out: torch.Tensor, *, scaling: float, softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Attend the queries that a plan names; writes their rows of ``out`` and the plan's buffers.

    Args:
        view: The layer.
        plan: Who attends to which rows.
        q: [T, H, D] contiguous, float32, bfloat16 or float16.
        out: [T, H, Dv] contiguous, of q's dtype.
        scaling: Factor of the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)``, or None.
        sinks: [H] one extra logit per head, or None.
    """
    heads, dim = q.shape[1], out.shape[2]
    functions = item_functions(view, q.dtype, softcap)
    scratch, prepared, partial = plan.room(view, heads, prepares=functions[2] != 0)
    _attend(
        *functions, view.address, plan.fields, plan.tokens, partial, scratch,
        view.scratch_bytes, prepared, view.tile_bytes, plan.threads, view.num_kv_heads, heads, dim, q.data_ptr(),
        at.MODES[q.dtype], np.float32(scaling * LOG2_E / (softcap or 1.0)), np.float32((softcap or 0.0) * LOG2_E),
        NO_SINKS if sinks is None else sinks.detach().float().numpy(), out.data_ptr(),
    )  # fmt: skip
