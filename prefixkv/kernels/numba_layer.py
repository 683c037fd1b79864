"""One layer of a step on the matrix unit: everything between one attention and the next, in four parts.

At the end of each all threads meet. Within one, each norms what it needs for itself (a thousand numbers, less work than
meeting once more) and takes its share of the rows of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from prefixkv.kernels.numba_amx import (
    TILE_CONFIG,
    TOKENS,
    add_residual,
    norm_pairs,
    pack_rows,
    pack_silu,
    round_head,
    tile_begin,
    tile_end,
    tile_product,
    turn_head,
    write_halves,
)
from prefixkv.kernels.numba_build import compiled, sources_digest, use_threads
from prefixkv.kernels.numba_meet import MEETING_BYTES, share
from prefixkv.kernels.numba_store import ROOM

__all__ = [
    "PARTS",
    "LayerWeights",
    "StepRoom",
    "add_attention_share",
    "add_mlp_share",
    "finish_layer",
    "float_bits_of",
    "project",
    "project_share",
    "widen_share",
]

(
    HIDDEN, HEADS, KV_HEADS, DIM, TURNS, INNER, IN_EPS, MLP_EPS, HEAD_EPS,
    IN_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS,
    CONFIG, NUM_FIELDS,
) = range(23)  # fmt: skip

PARTS = ("qkv", "writing rows", "attention", "out", "gate and up", "down", "head")
"""What layers consist of, in order, and the head; :attr:`StepRoom.cycles` counts each."""

_ROW = TOKENS * 4
_TILE_ROWS = 16
_FORMER = 64
"""Bytes at the start of a thread's scratch that keep the tiles' former shapes."""


def float_bits_of(x: float) -> int:
    """Return the bits of a float32, as kernels take them among integers."""
    return int(np.float32(x).view(np.int32))


class LayerWeights:
    """Where one layer's weights lie. Keeps the tensors alive."""

    def __init__(
        self, *, heads: int, kv_heads: int, dim: int, turns: bool, eps: tuple[float, float],
        head_eps: float,
        in_norm: torch.Tensor, qkv: torch.Tensor, qkv_bias: torch.Tensor | None, q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None, out: torch.Tensor, out_bias: torch.Tensor | None, mlp_norm: torch.Tensor,
        gate_up: torch.Tensor, gate_up_bias: torch.Tensor | None, down: torch.Tensor, down_bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Read the addresses.

        Args:
            heads: H.
            kv_heads: K.
            dim: D.
            turns: Whether the layer has RoPE.
            eps: Of the norms before attention and before the MLP.
            head_eps: Of the norms of heads.
            in_norm: [hidden] weight of the norm before attention; this and all others bfloat16 and contiguous.
            qkv: [(H + 2K) * D, hidden].
            qkv_bias: [(H + 2K) * D] or None.
            q_norm: [D] or None.
            k_norm: [D] or None.
            out: [hidden, H * D].
            out_bias: [hidden] or None.
            mlp_norm: [hidden].
            gate_up: [2I, hidden], the gate's rows first.
            gate_up_bias: [2I] or None.
            down: [hidden, I].
            down_bias: [hidden] or None.
        """
        tensors = {
            IN_NORM: in_norm, QKV: qkv, QKV_BIAS: qkv_bias, Q_NORM: q_norm, K_NORM: k_norm, OUT: out,
            OUT_BIAS: out_bias, MLP_NORM: mlp_norm, GATE_UP: gate_up, GATE_UP_BIAS: gate_up_bias, DOWN: down,
            DOWN_BIAS: down_bias,
        }  # fmt: skip
        self._tensors = tensors
        fields = self.fields = np.zeros(NUM_FIELDS, np.int64)
        for name, tensor in tensors.items():
            fields[name] = 0 if tensor is None else tensor.data_ptr()
        fields[HIDDEN], fields[INNER] = down.shape
        fields[HEADS], fields[KV_HEADS], fields[DIM], fields[TURNS] = heads, kv_heads, dim, turns
        fields[IN_EPS], fields[MLP_EPS], fields[HEAD_EPS] = (float_bits_of(x) for x in (*eps, head_eps))
        fields[CONFIG] = TILE_CONFIG


class StepRoom:
    """What a step is computed in: the residual stream, rows on their way, scratch. One thread uses it.

    Attributes:
        cycles: Of the processor's clock, spent in each of :data:`PARTS` since it was made.
    """

    def __init__(self, layer: LayerWeights, tokens: int) -> None:
        """Allocate for layers of one size.

        Args:
            layer: Any of them.
            tokens: Most tokens of a step.
        """
        f = layer.fields
        hidden, inner, heads, kv_heads, dim = (int(f[i]) for i in (HIDDEN, INNER, HEADS, KV_HEADS, DIM))
        groups = -(-tokens // TOKENS)
        self.threads = use_threads()
        widest = max(hidden, heads * dim)
        self.scratch_bytes = _FORMER + max(ROOM, groups * (widest * _ROW // 2 + max(dim, 2 * _BLOCK) * _ROW))
        self._scratch = torch.zeros(self.threads * self.scratch_bytes + 64, dtype=torch.uint8)
        self.scratch = -(-self._scratch.data_ptr() // 64) * 64
        self._meeting = np.zeros(MEETING_BYTES + 64, np.uint8)
        self.meeting = -(-self._meeting.ctypes.data // 64) * 64
        self.hidden, self.groups = hidden, groups
        self.stream, self.picked = torch.zeros(2, groups, hidden, TOKENS, dtype=torch.float32)
        self.cos, self.sin = torch.zeros(2, groups, dim // 2, TOKENS, dtype=torch.float32)
        self.inner = torch.zeros(groups * inner // 2 * TOKENS, dtype=torch.int32)
        self.q = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16)
        self.k, self.v = torch.zeros(2, tokens, kv_heads, dim, dtype=torch.bfloat16)
        self.attended = torch.zeros_like(self.q)
        self.cycles = np.zeros(len(PARTS), np.int64)

    def begin(self, x: torch.Tensor) -> None:
        """Take embeddings [T, hidden] as the residual stream."""
        lanes = self.lanes(x)
        self.stream[: len(lanes)] = lanes

    def let_meet(self) -> int:
        """Return where the threads of the next region can meet."""
        self._meeting.fill(0)
        return self.meeting

    @staticmethod
    def lanes(x: torch.Tensor) -> torch.Tensor:
        """Return [T, n] as float32 lanes [groups, n, 16]; changes nothing."""
        tokens, width = x.shape
        groups = -(-tokens // TOKENS)
        lanes = torch.zeros(groups * TOKENS, width, dtype=torch.float32)
        lanes[:tokens] = x
        return lanes.view(groups, TOKENS, width).transpose(1, 2).contiguous()


def project(
    room: StepRoom, fields: np.ndarray, tokens: int, turn: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [T, H, D], k and v [T, K, D] of a layer, in the room's memory.

    Args:
        room: With the residual stream before the layer.
        fields: Of the layer's :class:`LayerWeights`.
        tokens: T.
        turn: :meth:`StepRoom.lanes` of cos and sin.
    """
    _run(room, (_PROJECT,), fields, tokens, turn, room.attended)
    return room.q[:tokens], room.k[:tokens], room.v[:tokens]


def finish_layer(room: StepRoom, fields: np.ndarray, attended: torch.Tensor) -> None:
    """Add attention's output [T, H, D], contiguous, and then the MLP to the residual stream."""
    _run(room, (_ADD_ATTENTION, _WIDEN, _ADD_MLP), fields, len(attended), (room.cos, room.sin), attended)


def _run(
    room: StepRoom, parts: Sequence[int], fields: np.ndarray, tokens: int, turn: tuple[torch.Tensor, torch.Tensor],
    attended: torch.Tensor
) -> None:  # fmt: skip
    for part in parts:
        _run_part(
            part, fields, tokens, room.stream.data_ptr(), turn[0].data_ptr(), turn[1].data_ptr(), turn[0].shape[1],
            room.scratch, room.scratch_bytes, room.threads, room.q.data_ptr(), room.k.data_ptr(), room.v.data_ptr(),
            room.inner.data_ptr(), attended.data_ptr(),
        )  # fmt: skip


_PROJECT, _ADD_ATTENTION, _WIDEN, _ADD_MLP = range(4)

_BLOCK = 32
"""Rows of weights between two looks at the results: two tiles."""


@njit(nogil=True)
def project_share(
    thread: Any, f: Any, groups: Any, tokens: Any, x: Any, cos: Any, sin: Any, half: Any, scratch: Any,
    scratch_bytes: Any, threads: Any, q: Any, k: Any, v: Any
) -> None:  # fmt: skip
    """Compute a thread's heads of q, k and v."""
    hidden, dim = f[HIDDEN], f[DIM]
    heads = f[HEADS] + 2 * f[KV_HEADS]
    former = scratch + thread * scratch_bytes
    pairs = former + _FORMER
    c = pairs + groups * hidden * (_ROW // 2)
    for group in range(groups):
        norm_pairs(x + group * hidden * _ROW, hidden, f[IN_NORM], f[IN_EPS], pairs + group * hidden * (_ROW // 2))
    tile_begin(f[CONFIG], former)
    for head in range(share(heads, thread, threads), share(heads, thread + 1, threads)):
        tile_product(
            f[QKV] + head * dim * hidden * 2, hidden * 2, hidden // 32, pairs, hidden * (_ROW // 2), c,
            dim * _ROW, dim // _TILE_ROWS, groups,
        )  # fmt: skip
        bias = f[QKV_BIAS] + head * dim * 2 if f[QKV_BIAS] else 0
        if head < f[HEADS]:
            norm, out, at, stride = f[Q_NORM], q, head, f[HEADS]
        elif head < f[HEADS] + f[KV_HEADS]:
            norm, out, at, stride = f[K_NORM], k, head - f[HEADS], f[KV_HEADS]
        else:
            norm, out, at, stride = 0, v, head - f[HEADS] - f[KV_HEADS], f[KV_HEADS]
        for group in range(groups):
            lanes = c + group * dim * _ROW
            round_head(lanes, dim, bias, norm, f[HEAD_EPS])
            if f[TURNS] and head < f[HEADS] + f[KV_HEADS]:
                turn_head(lanes, cos + group * half * _ROW, sin + group * half * _ROW, half)
            first = group * TOKENS
            write_halves(
                lanes, dim // _TILE_ROWS, min(TOKENS, tokens - first), out + (first * stride + at) * dim * 2,
                stride * dim * 2,
            )  # fmt: skip
    tile_end(former)


@njit(nogil=True)
def _add_rows(
    weight: Any, biases: Any, width: Any, pairs: Any, groups: Any, c: Any, x: Any, hidden: Any, tiles: Any
) -> None:  # fmt: skip
    """Add the products of some tiles of rows of a weight [hidden, width] to the residual stream; ``c``: for results."""
    first, last = tiles
    for tile in range(first, last, _BLOCK // _TILE_ROWS):
        count = min(_BLOCK // _TILE_ROWS, last - tile)
        row = tile * _TILE_ROWS
        tile_product(
            weight + row * width * 2, width * 2, width // 32, pairs, width * (_ROW // 2), c, _BLOCK * _ROW, count,
            groups,
        )  # fmt: skip
        bias = biases + row * 2 if biases else 0
        for group in range(groups):
            add_residual(c + group * _BLOCK * _ROW, bias, x + (group * hidden + row) * _ROW, count * _TILE_ROWS)


@njit(nogil=True)
def add_attention_share(
    thread: Any, f: Any, groups: Any, tokens: Any, x: Any, scratch: Any, scratch_bytes: Any, threads: Any, attended: Any
) -> None:  # fmt: skip
    """Add a thread's rows of attention's output to the residual stream."""
    hidden, width = f[HIDDEN], f[HEADS] * f[DIM]
    tiles = hidden // _TILE_ROWS
    former = scratch + thread * scratch_bytes
    pairs = former + _FORMER
    c = pairs + groups * width * (_ROW // 2)
    for group in range(groups):
        first = group * TOKENS
        pack_rows(
            attended + first * width * 2, min(TOKENS, tokens - first), width * 2,
            pairs + group * width * (_ROW // 2),
        )  # fmt: skip
    tile_begin(f[CONFIG], former)
    rows = share(tiles, thread, threads), share(tiles, thread + 1, threads)
    _add_rows(f[OUT], f[OUT_BIAS], width, pairs, groups, c, x, hidden, rows)
    tile_end(former)


@njit(nogil=True)
def widen_share(
    thread: Any, f: Any, groups: Any, x: Any, inner_pairs: Any, scratch: Any, scratch_bytes: Any, threads: Any
) -> None:  # fmt: skip
    """Compute a thread's rows of what goes into the last product of the MLP."""
    hidden, inner = f[HIDDEN], f[INNER]
    inner_tiles = inner // _TILE_ROWS
    former = scratch + thread * scratch_bytes
    pairs = former + _FORMER
    c = pairs + groups * hidden * (_ROW // 2)
    for group in range(groups):
        norm_pairs(x + group * hidden * _ROW, hidden, f[MLP_NORM], f[MLP_EPS], pairs + group * hidden * (_ROW // 2))
    tile_begin(f[CONFIG], former)
    last = share(inner_tiles, thread + 1, threads)
    for tile in range(share(inner_tiles, thread, threads), last, _BLOCK // _TILE_ROWS):
        count = min(_BLOCK // _TILE_ROWS, last - tile)
        row = tile * _TILE_ROWS
        for part in range(2):
            tile_product(
                f[GATE_UP] + (part * inner + row) * hidden * 2, hidden * 2, hidden // 32, pairs,
                hidden * (_ROW // 2), c + part * _BLOCK * _ROW, 2 * _BLOCK * _ROW, count, groups,
            )  # fmt: skip
        bias = f[GATE_UP_BIAS] + row * 2 if f[GATE_UP_BIAS] else 0
        up_bias = bias + inner * 2 if bias else 0
        for group in range(groups):
            lanes = c + group * 2 * _BLOCK * _ROW
            pack_silu(
                lanes, lanes + _BLOCK * _ROW, bias, up_bias, count * _TILE_ROWS,
                inner_pairs + (group * inner + row) * (_ROW // 2),
            )  # fmt: skip
    tile_end(former)


@njit(nogil=True)
def add_mlp_share(
    thread: Any, f: Any, groups: Any, x: Any, inner_pairs: Any, scratch: Any, scratch_bytes: Any, threads: Any
) -> None:  # fmt: skip
    """Add a thread's rows of the MLP's output to the residual stream."""
    hidden, inner = f[HIDDEN], f[INNER]
    tiles = hidden // _TILE_ROWS
    former = scratch + thread * scratch_bytes
    c = former + _FORMER
    tile_begin(f[CONFIG], former)
    rows = share(tiles, thread, threads), share(tiles, thread + 1, threads)
    _add_rows(f[DOWN], f[DOWN_BIAS], inner, inner_pairs, groups, c, x, hidden, rows)
    tile_end(former)


def _build_part(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def run_part(
        part: Any, f: Any, tokens: Any, x: Any, cos: Any, sin: Any, half: Any, scratch: Any, scratch_bytes: Any,
        threads: Any, q: Any, k: Any, v: Any, inner: Any, attended: Any
    ) -> None:  # fmt: skip
        groups, count = -(-tokens // TOKENS), threads if sources else 0
        for thread in prange(count):
            if part == _PROJECT:
                project_share(thread, f, groups, tokens, x, cos, sin, half, scratch, scratch_bytes, threads, q, k, v)
            elif part == _ADD_ATTENTION:
                add_attention_share(thread, f, groups, tokens, x, scratch, scratch_bytes, threads, attended)
            elif part == _WIDEN:
                widen_share(thread, f, groups, x, inner, scratch, scratch_bytes, threads)
            else:
                add_mlp_share(thread, f, groups, x, inner, scratch, scratch_bytes, threads)

    return compiled(njit, run_part, parallel=True, nogil=True)


_run_part = _build_part(sources_digest())
