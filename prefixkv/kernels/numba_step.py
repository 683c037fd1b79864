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
from prefixkv.kernels.numba_attend import _LOG2_E, _NO_SINKS, AttendPlan, _attend, item_functions
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
    _add_attention,
    _add_mlp,
    _project,
    _share,
    _widen,
    float_bits_of,
)
from prefixkv.kernels.numba_layout import LayerView
from prefixkv.kernels.numba_store import _store_rows

__all__ = ["run_head", "run_layers"]


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
) -> None:
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
    factors = np.array(scaling, np.float32) * np.float32(_LOG2_E)
    refused = _run_layers(
        weights, views, view.num_rows, slots.numpy(), np.stack([plan.fields for plan in plans]),
        np.stack([plan.tokens for plan in plans]), prepared, plan_of,
        factors, groups, tokens, room.stream.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], room.scratch,
        room.scratch_bytes, room.threads, room.q.data_ptr(), room.k.data_ptr(), room.v.data_ptr(),
        room.inner.data_ptr(), room.attended.data_ptr(), *functions, attend_scratch,
        view.scratch_bytes, view.tile_bytes, partial, _NO_SINKS, room.cycles,
    )  # fmt: skip
    if refused:
        raise IndexError(f"{refused} of {tokens} rows lie outside the pool")


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
            last = _share(tiles, thread + 1, threads)
            for tile in range(_share(tiles, thread, threads), last, _BLOCK // _TILE_ROWS):
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
def _count(cycles: Any, part: Any, began: Any) -> Any:
    """Add to a part of :data:`PARTS` what has passed since ``began``; return now."""
    now = read_cycles()
    cycles[part] += now - began
    return now


def _build_layers(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def run_layers(
        weights: Any, views: Any, num_rows: Any, slots: Any, plans: Any, plan_tokens: Any, prepared: Any, plan_of: Any,
        factors: Any, groups: Any, tokens: Any, x: Any, cos: Any, sin: Any, half: Any, scratch: Any, scratch_bytes: Any,
        threads: Any, q: Any, k: Any, v: Any, inner_pairs: Any, attended: Any, decode_item: Any, chunk_item: Any,
        prepare: Any, attend_scratch: Any, attend_bytes: Any, tile_bytes: Any, partial: Any, sinks: Any, cycles: Any
    ) -> Any:  # fmt: skip
        refused = 0
        for layer in range(weights.shape[0] if sources else 0):
            f, view = weights[layer], views[layer]
            began = read_cycles()
            _project(f, groups, tokens, x, cos, sin, half, scratch, scratch_bytes, threads, q, k, v)
            began = _count(cycles, 0, began)
            refused += _store_rows(view, num_rows, slots, k, at.BF16, v, at.BF16)
            began = _count(cycles, 1, began)
            kind = plan_of[layer]
            _attend(
                decode_item, chunk_item, prepare, np.int64(view.ctypes.data), plans[kind], plan_tokens[kind], partial,
                attend_scratch, attend_bytes, prepared[kind], tile_bytes, threads, f[KV_HEADS], f[HEADS], f[DIM], q,
                at.BF16, factors[layer], np.float32(0.0), sinks, attended,
            )  # fmt: skip
            began = _count(cycles, 2, began)
            _add_attention(f, groups, tokens, x, scratch, scratch_bytes, threads, attended)
            began = _count(cycles, 3, began)
            _widen(f, groups, x, inner_pairs, scratch, scratch_bytes, threads)
            began = _count(cycles, 4, began)
            _add_mlp(f, groups, x, inner_pairs, scratch, scratch_bytes, threads)
            _count(cycles, 5, began)
        return refused

    return compiled(njit, run_layers, nogil=True)


_head = _build_head(sources_digest())
_run_layers = _build_layers(sources_digest())
