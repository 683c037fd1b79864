"""All layers of a step of few tokens in one compiled function, and the head."""

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
from prefixkv.kernels.numba_ir import read_cycles
from prefixkv.kernels.numba_layer import (
    _BLOCK,
    _FORMER,
    _ROW,
    _TILE_ROWS,
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

__all__ = ["run_head", "run_layers"]

_NOT_MET = -1


def run_layers(
    room: StepRoom,
    weights: np.ndarray,
    views: np.ndarray,
    view: LayerView,
    slots: torch.Tensor,
    plans: Sequence[AttendPlan],
    plan_of: np.ndarray,
    scaling: Sequence[float],
    x: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
) -> bool:
    """Run all layers of a step: writes its rows to the pool and leaves the residual stream in ``room.stream``.

    Args:
        room: For at least T tokens.
        weights: [L, F] the fields of each layer's :class:`LayerWeights`.
        views: [L, F'] the fields of each layer's :class:`~prefixkv.kernels.numba_layout.LayerView`.
        view: Any of those layers.
        slots: [T] int64 rows that are written.
        plans: Who attends to which rows, one plan for each kind of layer.
        plan_of: [L] int64 which of them is a layer's.
        scaling: [L] factor of each layer's scores.
        x: [T, hidden] embeddings.
        turn: cos and sin, [T, half of the numbers that RoPE turns] each.

    Returns:
        Whether the threads met; if they did not, nothing is done but what was there in ``room``.

    Raises:
        IndexError: If a row lies outside the pool; the others are written.
    """
    tokens = len(x)
    groups = -(-tokens // TOKENS)
    room.begin(x)
    cos, sin = room.lanes(turn[0]), room.lanes(turn[1])
    heads = room.q.shape[1]
    functions = item_functions(view, torch.bfloat16, None)
    rooms = [plan.room(view, heads, prepares=functions[2] != 0) for plan in plans]
    attend_scratch, partial = rooms[0][0], max((partial for _, _, partial in rooms), key=lambda partial: partial.size)
    prepared = np.array([prepared for _, prepared, _ in rooms])
    factors = np.array(scaling, np.float32) * np.float32(LOG2_E)
    next_work, refused = np.zeros(len(weights), np.int64), np.zeros(room.threads, np.int64)
    _run_layers(
        weights, views, view.num_rows, slots.numpy(), np.stack([plan.fields for plan in plans]),
        np.stack([plan.tokens for plan in plans]), prepared, plan_of,
        factors, groups, tokens, room.stream.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], room.scratch,
        room.scratch_bytes, room.threads, room.q.data_ptr(), room.k.data_ptr(), room.v.data_ptr(),
        room.inner.data_ptr(), room.attended.data_ptr(), *functions, attend_scratch,
        view.scratch_bytes, view.tile_bytes, partial, NO_SINKS, room.cycles, room.meeting, next_work, refused,
    )  # fmt: skip
    if _NOT_MET in refused:
        return False
    if refused.any():
        raise IndexError(f"{refused.sum() // len(weights)} of {tokens} rows lie outside the pool")
    return True


def run_head(room: StepRoom, norm: torch.Tensor, eps: float, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return logits [R, V] float32, rounded to bfloat16 as the model's are, of the tokens ``rows`` [R].

    Args:
        room: With the residual stream of a step.
        norm: [hidden] weight of the last norm.
        eps: Of that norm.
        weight: [V, hidden].
        rows: int64.
    """
    logits = torch.empty(len(rows), weight.shape[0])
    picked = room.lanes(room.stream[rows // TOKENS, :, rows % TOKENS])
    _head(
        norm.data_ptr(), float_bits_of(eps), weight.data_ptr(), weight.shape[0], room.hidden, len(rows),
        picked.data_ptr(), room.scratch, room.scratch_bytes, room.threads, TILE_CONFIG, logits.data_ptr(),
    )  # fmt: skip
    return logits


def _build_head(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def head(
        norm: Any, eps: Any, weight: Any, vocab: Any, hidden: Any, tokens: Any, x: Any, scratch: Any,
        scratch_bytes: Any, threads: Any, config: Any, logits: Any
    ) -> None:  # fmt: skip
        tiles, groups = vocab // _TILE_ROWS if sources else 0, -(-tokens // TOKENS)
        for thread in prange(threads):
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
                    weight + row * hidden * 2, hidden * 2, hidden // 32, pairs, hidden * (_ROW // 2), c, _BLOCK * _ROW,
                    count, groups,
                )  # fmt: skip
                for group in range(groups):
                    lanes, first = c + group * _BLOCK * _ROW, group * TOKENS
                    round_head(lanes, count * _TILE_ROWS, 0, 0, 0)
                    write_floats(
                        lanes, count, min(TOKENS, tokens - first), logits + (first * vocab + row) * 4, vocab * 4
                    )
            tile_end(former)

    return compiled(njit, head, parallel=True, nogil=True)


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
    plan_of: Any, factors: Any, groups: Any, tokens: Any, x: Any, cos: Any, sin: Any, half: Any, scratch: Any,
    scratch_bytes: Any, threads: Any, q: Any, k: Any, v: Any, inner_pairs: Any, attended: Any, decode_item: Any,
    chunk_item: Any, prepare: Any, attend_scratch: Any, attend_bytes: Any, tile_bytes: Any, partial: Any, sinks: Any,
    cycles: Any, meeting: Any, next_work: Any
) -> Any:  # fmt: skip
    """Do a thread's part of all layers; return how many rows it refused, or :data:`_NOT_MET`."""
    if not all_came(meeting, threads):
        return _NOT_MET
    met = refused = 0
    mine = attend_scratch + thread * attend_bytes
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
    return refused


def _build_layers(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def run_layers(
        weights: Any, views: Any, num_rows: Any, slots: Any, plans: Any, plan_tokens: Any, prepared: Any, plan_of: Any,
        factors: Any, groups: Any, tokens: Any, x: Any, cos: Any, sin: Any, half: Any, scratch: Any, scratch_bytes: Any,
        threads: Any, q: Any, k: Any, v: Any, inner_pairs: Any, attended: Any, decode_item: Any, chunk_item: Any,
        prepare: Any, attend_scratch: Any, attend_bytes: Any, tile_bytes: Any, partial: Any, sinks: Any, cycles: Any,
        meeting: Any, next_work: Any, refused: Any
    ) -> None:  # fmt: skip
        count = threads if sources else 0
        for thread in prange(count):
            refused[thread] = _run_share(
                thread, weights, views, num_rows, slots, plans, plan_tokens, prepared, plan_of, factors, groups,
                tokens, x, cos, sin, half, scratch, scratch_bytes, threads, q, k, v, inner_pairs, attended,
                decode_item, chunk_item, prepare, attend_scratch, attend_bytes, tile_bytes, partial, sinks, cycles,
                meeting, next_work,
            )  # fmt: skip

    return compiled(njit, run_layers, parallel=True, nogil=True)


_head = _build_head(sources_digest())
_run_layers = _build_layers(sources_digest())
