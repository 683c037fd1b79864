"""Long plain chunks on a CPU: torch's 16-bit products over rows decoded once.

A chunk of n queries sees everything before it, and itself up to the diagonal. The two parts are attended apart, without
any mask, and merged by their log-sum-exp in float32. The queries go in pieces, so that little above the diagonal is
computed, and everything before a piece counts as "before". The G queries of a group are packed as if they were G query
positions of their kv head: keys and values are never repeated over what is long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prefixkv.attention.base import AttentionMetadata
from prefixkv.kernels.numba_gather import gather_rows
from prefixkv.kernels.numba_layout import LayerView
from prefixkv.kv.formats import hadamard

__all__ = ["MIN_QUERIES", "attend_chunk", "flash_attention"]

MIN_QUERIES = 128
"""Queries of a chunk from which on the products save more than decoding costs."""

_PIECE = 256
"""Queries attended at once."""

Flash = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def flash_attention() -> Flash | None:
    """Return torch's attention that gives log-sum-exps too, or None where it is absent or slower than our kernel.

    The operator is not public: it may go, so it is asked for by name.
    """
    found: Flash | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    try:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        supported = False
    return found if supported else None


def attend_chunk(
    flash: Flash,
    view: LayerView,
    meta: AttentionMetadata,
    seq: int,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    scaling: float,
) -> None:
    """Attend one sequence's chunk; writes ``out``.

    Args:
        flash: From :func:`flash_attention`.
        view: The layer, with keys and values of one head size.
        meta: The step; its ``scratch`` keeps the room for decoded rows from layer to layer.
        seq: Index of the sequence.
        q: [n, H, D] bfloat16.
        out: [n, H, D] bfloat16.
        scaling: Factor of the scores.
    """
    length, heads, dim = q.shape
    kv_heads, rows = view.num_kv_heads, meta.kv_lens[seq]
    if view.turned[0]:  # then queries have to be
        q = (q.float() @ hadamard(dim, q.device)).to(q.dtype)
    k, v = _room(meta, 2 * kv_heads * rows * dim).view(2, kv_heads, rows, dim)
    gather_rows(view, meta.block_table[seq], k, v)
    k, v = k[None], v[None]
    start = rows - length
    for at in range(0, length, _PIECE):
        count = min(_PIECE, length - at)
        packed = q[at : at + count].view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        packed = packed.reshape(1, kv_heads, -1, dim)
        before, end = start + at, start + at + count
        own = [_repeat(x[:, :, before:end], heads) for x in (k, v)]
        result, own_lse = flash(packed.view(1, heads, count, dim), *own, 0.0, True, scale=scaling)
        if before:
            far, far_lse = flash(packed, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scaling)
            share = torch.sigmoid(own_lse - far_lse.reshape(own_lse.shape))[..., None]
            result = torch.lerp(far.reshape(result.shape).float(), result.float(), share)
        result = result[0].transpose(0, 1)
        out[at : at + count] = result.float() @ hadamard(dim, q.device) if view.turned[1] else result


def _repeat(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [1, K, n, D] as [1, H, n, D], each kv head once per query head."""
    _, kv_heads, count, dim = rows.shape
    return rows[:, :, None].expand(1, kv_heads, heads // kv_heads, count, dim).reshape(1, heads, count, dim)


def _room(meta: AttentionMetadata, size: int) -> torch.Tensor:
    """Return ``size`` bfloat16 numbers of scratch, the same in each layer."""
    room: torch.Tensor | None = meta.scratch.get("numba rows")
    if room is None or room.numel() < size:
        room = meta.scratch["numba rows"] = torch.empty(size, dtype=torch.bfloat16)
    return room[:size]
