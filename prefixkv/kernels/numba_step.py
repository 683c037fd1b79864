"""A whole step of few tokens, from ids to logits, in one compiled function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_amx import (
    TILE_CONFIG,
    TOKENS,
    norm_pairs,
    round_head,
    tile_begin,
    tile_end,
    tile_product,
    write_floats,
)
from prefixkv.kernels.numba_attend import (
    LOG2_E,
    NO_SINKS,
    AttendPlan,
    attend_items,
    item_functions,
    merge_share,
    num_prepared,
    prepare_share,
)
from prefixkv.kernels.numba_build import compiled, sources_digest
from prefixkv.kernels.numba_halves import load_number
from prefixkv.kernels.numba_ir import read_cycles, store_f32
from prefixkv.kernels.numba_layer import (
    _BLOCK,
    _FORMER,
    _ROW,
    _TILE_ROWS,
    CONFIG,
    DIM,
    HEADS,
    KV_HEADS,
    StepRoom,
    add_attention_share,
    add_mlp_share,
    float_bits_of,
    project_share,
    widen_share,
)
from prefixkv.kernels.numba_layout import LayerView
from prefixkv.kernels.numba_meet import all_came, meet, share
from prefixkv.kernels.numba_store import store_share

__all__ = ["Head", "run_head", "run_step"]

_NOT_MET = -1


def run_step(
    room: StepRoom,
    weights: np.ndarray,
    views: np.ndarray,
    view: LayerView,
    slots: torch.Tensor,
    plans: Sequence[AttendPlan],
    plan_of: np.ndarray,
    scaling: Sequence[float],
    tokens: tuple[torch.Tensor, np.ndarray],
    turn: tuple[torch.Tensor, torch.Tensor, np.ndarray],
    head: Head,
    rows: np.ndarray,
) -> torch.Tensor | None:
    """Run a whole step, from ids to logits; writes its rows to the pool.

    Args:
        room: For at least T tokens.
        weights: [L, F] the fields of each layer's :class:`LayerWeights`.
        views: [L, F'] the fields of each layer's :class:`~prefixkv.kernels.numba_layout.LayerView`.
        view: Any of those layers.
        slots: [T] int64 rows that are written.
        plans: Who attends to which rows, one plan for each kind of layer.
        plan_of: [L] int64 which of them is a layer's.
        scaling: [L] factor of each layer's scores.
        tokens: [V, hidden] embeddings and [T] int64, which of them.
        turn: cos and sin, [P, half of the numbers that RoPE turns] each, and [T] int64, which rows of them.
        head: Of the model.
        rows: [R] int64 tokens whose logits are wanted.

    Returns:
        [R, V] float32, rounded to bfloat16 as the model's are; None, and nothing is done, if the threads do not run at
        the same time.

    Raises:
        IndexError: If a row lies outside the pool, or an id beyond the embeddings; other rows are written.
    """
    embeddings, ids = tokens
    cos, sin, positions = turn
    if ids.min() < 0 or ids.max() >= len(embeddings):
        raise IndexError(f"ids from {ids.min()} to {ids.max()} for {len(embeddings)} embeddings")
    functions, fields, plan_tokens, prepared, attend_scratch, partial = _planned(view, plans, room.q.shape[1])
    factors = np.array(scaling, np.float32) * np.float32(LOG2_E)
    next_work, refused = np.zeros(len(weights), np.int64), np.zeros(room.threads, np.int64)
    logits = torch.empty(len(rows), len(head.weight), dtype=torch.float32)
    _run_step(
        weights, views, view.num_rows, slots.numpy(), fields, plan_tokens, prepared, plan_of, factors, ids,
        embeddings.data_ptr(), positions,
        at.MODES[cos.dtype], cos.data_ptr(), sin.data_ptr(), cos.shape[1], room.stream.data_ptr(), room.cos.data_ptr(),
        room.sin.data_ptr(), room.scratch, room.scratch_bytes, room.threads, room.q.data_ptr(), room.k.data_ptr(),
        room.v.data_ptr(), room.inner.data_ptr(), room.attended.data_ptr(), *functions, attend_scratch,
        view.scratch_bytes, view.tile_bytes, partial, NO_SINKS, room.cycles, room.let_meet(), next_work, refused, rows,
        room.picked.data_ptr(), head.fields, logits.data_ptr(),
    )  # fmt: skip
    if _NOT_MET in refused:
        return None
    if refused.any():
        raise IndexError(f"{refused.sum() // len(weights)} of {len(ids)} rows lie outside the pool")
    return logits


def _planned(view: LayerView, plans: Sequence[AttendPlan], heads: int) -> tuple[Any, ...]:
    """Return who attends, the plans' fields and tokens, where tiles are prepared, scratch, room for partial results."""
    functions = item_functions(view, torch.bfloat16, None)
    rooms = [plan.room(view, heads, prepares=functions[2] != 0) for plan in plans]
    partial = max((partial for _, _, partial in rooms), key=lambda partial: partial.size)
    fields, tokens = (np.stack(arrays) for arrays in zip(*((plan.fields, plan.tokens) for plan in plans), strict=True))
    return functions, fields, tokens, np.array([prepared for _, prepared, _ in rooms]), rooms[0][0], partial


class Head:
    """Where the last norm and the head lie. Keeps the tensors alive."""

    def __init__(self, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> None:
        """Read the addresses.

        Args:
            norm: [hidden] weight of the last norm, bfloat16.
            eps: Of that norm.
            weight: [V, hidden] bfloat16.
        """
        self.norm, self.weight = norm, weight
        self.fields = np.array([norm.data_ptr(), float_bits_of(eps), weight.data_ptr(), *weight.shape])


def run_head(room: StepRoom, head: Head, rows: np.ndarray) -> torch.Tensor:
    """Return logits [R, V] float32, rounded to bfloat16 as the model's are, of the tokens ``rows`` [R].

    Args:
        room: With the residual stream of a step.
        head: Of the model.
        rows: int64.
    """
    logits = torch.empty(len(rows), len(head.weight), dtype=torch.float32)
    _head(
        head.fields, len(rows), rows, room.stream.data_ptr(), room.picked.data_ptr(), room.scratch,
        room.scratch_bytes, room.threads, TILE_CONFIG, logits.data_ptr(),
    )  # fmt: skip
    return logits


@njit(nogil=True)
def _take_lanes(
    mode: Any, source: Any, width: Any, token_step: Any, number_step: Any, rows: Any, out: Any, thread: Any,
    threads: Any
) -> None:  # fmt: skip
    """Write a thread's share of the lanes of some rows of ``width`` numbers, as float32; zeros behind the last row.

    In a table [n, width] the steps from row to row and from number to number are ``width`` and 1, in lanes they are 1
    and :data:`TOKENS`.
    """
    count = -(-rows.shape[0] // TOKENS) * width
    for place in range(share(count, thread, threads), share(count, thread + 1, threads)):
        first, number = place // width * TOKENS, place % width
        for lane in range(TOKENS):
            value = np.float32(0.0)
            if first + lane < rows.shape[0]:
                row = rows[first + lane]
                begin = row // TOKENS * TOKENS * width + row % TOKENS * token_step
                value = load_number(mode, source, begin + number * number_step)
            store_f32(out + (place * TOKENS + lane) * 4, value)


@njit(nogil=True)
def _head_share(
    thread: Any, head: Any, tokens: Any, x: Any, scratch: Any, scratch_bytes: Any, threads: Any, config: Any,
    logits: Any
) -> None:  # fmt: skip
    """Compute a thread's rows of the head for the lanes of some tokens."""
    norm, eps, weight, vocab, hidden = head[0], head[1], head[2], head[3], head[4]
    tiles, groups = vocab // _TILE_ROWS, -(-tokens // TOKENS)
    former = scratch + thread * scratch_bytes
    pairs = former + _FORMER
    c = pairs + groups * hidden * (_ROW // 2)
    for group in range(groups):
        norm_pairs(x + group * hidden * _ROW, hidden, norm, eps, pairs + group * hidden * (_ROW // 2))
    tile_begin(config, former)
    last = share(tiles, thread + 1, threads)
    for tile in range(share(tiles, thread, threads), last, _BLOCK // _TILE_ROWS):
        count = min(_BLOCK // _TILE_ROWS, last - tile)
        row = tile * _TILE_ROWS
        tile_product(
            weight + row * hidden * 2, hidden * 2, hidden // 32, pairs, hidden * (_ROW // 2), c, _BLOCK * _ROW, count,
            groups,
        )  # fmt: skip
        for group in range(groups):
            lanes, first = c + group * _BLOCK * _ROW, group * TOKENS
            round_head(lanes, count * _TILE_ROWS, 0, 0, 0)
            write_floats(lanes, count, min(TOKENS, tokens - first), logits + (first * vocab + row) * 4, vocab * 4)
    tile_end(former)


def _build_head(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def run_head(
        head: Any, tokens: Any, rows: Any, stream: Any, picked: Any, scratch: Any, scratch_bytes: Any, threads: Any,
        config: Any, logits: Any
    ) -> None:  # fmt: skip
        _take_lanes(at.F32, stream, head[4], 1, TOKENS, rows, picked, 0, 1)
        count = threads if sources else 0
        for thread in prange(count):
            _head_share(thread, head, tokens, picked, scratch, scratch_bytes, threads, config, logits)

    return compiled(njit, run_head, parallel=True, nogil=True)


@njit(nogil=True)
def _count(cycles: Any, thread: Any, part: Any, began: Any) -> Any:
    """Add to a part of :data:`PARTS` what has passed since ``began`` in the first thread; return now."""
    now = read_cycles()
    if thread == 0:
        cycles[part] += now - began
    return now


@njit(nogil=True)
def _attend_share(
    thread: Any, threads: Any, met: Any, meeting: Any, decode_item: Any, chunk_item: Any, prepare: Any, f: Any,
    plan: Any, tokens: Any, partial: Any, scratch: Any, prepared: Any, tile_bytes: Any, kv_heads: Any, heads: Any,
    dim: Any, q: Any, factor: Any, sinks: Any, out: Any, next_work: Any
) -> Any:  # fmt: skip
    """Do a thread's part of one layer's attention; return how often all have met."""
    count = num_prepared(prepare, plan, kv_heads)
    if count > 0:
        first, last = share(count, thread, threads), share(count, thread + 1, threads)
        prepare_share(prepare, f, plan, scratch, prepared, tile_bytes, kv_heads, first, last)
        met = meet(meeting, met, threads)
    attend_items(
        decode_item, chunk_item, prepare, f, plan, partial, scratch, prepared, tile_bytes, kv_heads, heads, q,
        at.BF16, factor, np.float32(0.0), next_work,
    )  # fmt: skip
    met = meet(meeting, met, threads)
    count = tokens.shape[0] * heads
    first, last = share(count, thread, threads), share(count, thread + 1, threads)
    merge_share(f, tokens, partial, heads, dim, sinks, out, at.BF16, first, last)
    return met


@njit(nogil=True)
def _run_share(
    thread: Any, weights: Any, views: Any, num_rows: Any, slots: Any, plans: Any, plan_tokens: Any, prepared: Any,
    plan_of: Any, factors: Any, ids: Any, embeddings: Any, positions: Any, turn_mode: Any, all_cos: Any, all_sin: Any,
    half: Any, x: Any, cos: Any, sin: Any, scratch: Any, scratch_bytes: Any, threads: Any, q: Any, k: Any, v: Any,
    inner_pairs: Any, attended: Any, decode_item: Any, chunk_item: Any, prepare: Any, attend_scratch: Any,
    attend_bytes: Any, tile_bytes: Any, partial: Any, sinks: Any, cycles: Any, meeting: Any, next_work: Any, rows: Any,
    picked: Any, head: Any, logits: Any
) -> Any:  # fmt: skip
    """Do a thread's part of a step; return how many rows it refused, or :data:`_NOT_MET`."""
    if not all_came(meeting, threads):
        return _NOT_MET
    met = refused = 0
    tokens = ids.shape[0]
    groups, mine = -(-tokens // TOKENS), attend_scratch + thread * attend_bytes
    _take_lanes(at.BF16, embeddings, head[4], head[4], 1, ids, x, thread, threads)
    _take_lanes(turn_mode, all_cos, half, half, 1, positions, cos, thread, threads)
    _take_lanes(turn_mode, all_sin, half, half, 1, positions, sin, thread, threads)
    met = meet(meeting, met, threads)
    for layer in range(weights.shape[0]):
        f, view = weights[layer], views[layer]
        began = read_cycles()
        project_share(thread, f, groups, tokens, x, cos, sin, half, scratch, scratch_bytes, threads, q, k, v)
        met = meet(meeting, met, threads)
        began = _count(cycles, thread, 0, began)
        count = tokens * f[KV_HEADS]
        refused += store_share(
            view, num_rows, slots, k, at.BF16, v, at.BF16, share(count, thread, threads),
            share(count, thread + 1, threads), scratch + thread * scratch_bytes,
        )  # fmt: skip
        met = meet(meeting, met, threads)
        began = _count(cycles, thread, 1, began)
        kind = plan_of[layer]
        met = _attend_share(
            thread, threads, met, meeting, decode_item, chunk_item, prepare, np.int64(view.ctypes.data), plans[kind],
            plan_tokens[kind], partial, mine, prepared[kind], tile_bytes, f[KV_HEADS], f[HEADS], f[DIM], q,
            factors[layer], sinks, attended, np.int64(next_work[layer:].ctypes.data),
        )  # fmt: skip
        met = meet(meeting, met, threads)
        began = _count(cycles, thread, 2, began)
        add_attention_share(thread, f, groups, tokens, x, scratch, scratch_bytes, threads, attended)
        met = meet(meeting, met, threads)
        began = _count(cycles, thread, 3, began)
        widen_share(thread, f, groups, x, inner_pairs, scratch, scratch_bytes, threads)
        met = meet(meeting, met, threads)
        began = _count(cycles, thread, 4, began)
        add_mlp_share(thread, f, groups, x, inner_pairs, scratch, scratch_bytes, threads)
        met = meet(meeting, met, threads)
        _count(cycles, thread, 5, began)
    began = read_cycles()
    _take_lanes(at.F32, x, head[4], 1, TOKENS, rows, picked, thread, threads)
    met = meet(meeting, met, threads)
    _head_share(thread, head, rows.shape[0], picked, scratch, scratch_bytes, threads, weights[0, CONFIG], logits)
    _count(cycles, thread, 6, began)
    return refused


def _build_step(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def run_step(
        weights: Any, views: Any, num_rows: Any, slots: Any, plans: Any, plan_tokens: Any, prepared: Any, plan_of: Any,
        factors: Any, ids: Any, embeddings: Any, positions: Any, turn_mode: Any, all_cos: Any, all_sin: Any, half: Any,
        x: Any, cos: Any, sin: Any, scratch: Any, scratch_bytes: Any, threads: Any, q: Any, k: Any, v: Any,
        inner_pairs: Any, attended: Any, decode_item: Any, chunk_item: Any, prepare: Any, attend_scratch: Any,
        attend_bytes: Any, tile_bytes: Any, partial: Any, sinks: Any, cycles: Any, meeting: Any, next_work: Any,
        refused: Any, rows: Any, picked: Any, head: Any, logits: Any
    ) -> None:  # fmt: skip
        count = threads if sources else 0
        for thread in prange(count):
            refused[thread] = _run_share(
                thread, weights, views, num_rows, slots, plans, plan_tokens, prepared, plan_of, factors, ids,
                embeddings, positions, turn_mode, all_cos, all_sin, half, x, cos, sin, scratch, scratch_bytes, threads,
                q, k, v, inner_pairs, attended, decode_item, chunk_item, prepare, attend_scratch, attend_bytes,
                tile_bytes, partial, sinks, cycles, meeting, next_work, rows, picked, head, logits,
            )  # fmt: skip

    return compiled(njit, run_step, parallel=True, nogil=True)


_head = _build_head(sources_digest())
_run_step = _build_step(sources_digest())
