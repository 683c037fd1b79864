"""Write a step's new rows to the pool: encode and scatter in one pass, to the bit as the torch codecs do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_build import compiled, sources_digest, use_threads
from prefixkv.kernels.numba_halves import half_bits, load_number
from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I32,
    LANES,
    call_vector,
    copy_bytes,
    load,
    load_f32,
    load_u8,
    micro_kernel,
    offset,
    reduce,
    repeat,
    splat,
    store,
    store_f32,
    store_i8,
    store_i16,
    variable,
    vector,
    zero_bytes,
)
from prefixkv.kernels.numba_layout import LayerView
from prefixkv.kernels.numba_queries import read_query, turn_row

__all__ = ["ROOM", "cache_folder", "copy_rows", "describe_tensors", "store_rows", "store_share"]

_MOST_FP16 = 65504.0
_HALVES = (torch.bfloat16, torch.float16)
ROOM = 8192
"""Bytes a thread needs: a row of 512 numbers as float32, and its codes."""


def _emit_quantise(b: ir.IRBuilder, row: Any, vectors: Any, codes: Any, scale: Any) -> None:
    """Write a float32 row as int8 codes and one scale, both exactly as the formula says: no approximate division."""
    sizes = variable(b, ir.Constant(vector(F32), [0] * LANES))
    with repeat(b, vectors) as i:
        x = call_vector(b, "llvm.fabs", load(b, offset(b, row, (i, LANES * 4)), vector(F32)))
        b.store(call_vector(b, "llvm.maximum", x, b.load(sizes)), sizes)  # NaN stays NaN
    step = b.fdiv(reduce(b, lambda x, y: call_vector(b, "llvm.maximum", x, y), b.load(sizes)), F32(127.0))
    store(b, scale, step)
    divisor = splat(b, b.select(b.fcmp_ordered(">", step, F32(0.0)), step, F32(1.0)))
    with repeat(b, vectors) as i:
        x = b.fdiv(load(b, offset(b, row, (i, LANES * 4)), vector(F32)), divisor)
        code = b.trunc(b.fptosi(call_vector(b, "llvm.rint", x), vector(I32)), vector(I8))
        store(b, offset(b, codes, (i, LANES)), code)


_quantise_i8 = micro_kernel("quantise_i8", 4, _emit_quantise)


@njit(nogil=True)
def _clamp(x: Any, low: Any, high: Any) -> Any:
    """Return x within bounds; NaN stays NaN."""
    if x < low:
        return low
    return high if x > high else x


@njit(nogil=True)
def _code(x: Any, low: Any, step: Any) -> Any:
    """Return the nearest of 16 steps from ``low``; any number for NaN."""
    return np.int32(_clamp(np.rint((x - low) / step), np.float32(0.0), np.float32(15.0))) & 15


@njit(nogil=True)
def _put_scale(scales: Any, group: Any, step: Any, low: Any) -> Any:
    """Write a group's scale and minimum as float16."""
    most = np.float32(_MOST_FP16)
    store_i16(scales + group * 4, half_bits(_clamp(step, np.float32(0.0), most)))
    store_i16(scales + group * 4 + 2, half_bits(_clamp(low, -most, most)))


@njit(nogil=True)
def _quantise_i4(row: Any, dim: Any, groups: Any, codes: Any, scales: Any) -> None:
    """Write a float32 row as nibbles, number i beside number i + dim/2, and float16 scale and minimum per group."""
    half, size = dim // 2, dim // groups
    for i in range(half):
        store_i8(codes + i, 0)
    for group in range(groups):
        first = row + group * size * 4
        low = high = load_f32(first)
        for i in range(size):
            x = load_f32(first + i * 4)
            low = x if x < low or x != x else low
            high = x if x > high or x != x else high
        _put_scale(scales, group, (high - low) / np.float32(15.0), low)
        for _ in range(at.FITS):
            low, step = load_number(at.F16, scales, 2 * group + 1), load_number(at.F16, scales, 2 * group)
            if not step > np.float32(0.0):
                break
            # The line through codes and numbers with the least squares.
            codes_sum = squares = 0
            total = product = np.float32(0.0)
            for i in range(size):
                x = load_f32(first + i * 4)
                code = _code(x, low, step)
                codes_sum += code
                squares += code * code
                total += x
                product += np.float32(code) * x
            spread = np.float32(squares * size - codes_sum * codes_sum)
            if not spread > np.float32(0.0):
                break
            step = (product * np.float32(size) - np.float32(codes_sum) * total) / spread
            _put_scale(scales, group, step, (total - step * np.float32(codes_sum)) / np.float32(size))
        low, step = load_number(at.F16, scales, 2 * group + 1), load_number(at.F16, scales, 2 * group)
        if not step > np.float32(0.0):
            step = np.float32(1.0)
        for i in range(group * size, (group + 1) * size):
            nibble = _code(load_f32(row + i * 4), low, step)
            place = codes + i % half
            store_i8(place, load_u8(place) | (nibble << 4 if i >= half else nibble))


@njit(nogil=True)
def _store_row(
    mode: Any,
    dim: Any,
    groups: Any,
    src: Any,
    src_mode: Any,
    rows: Any,
    row_bytes: Any,
    scales: Any,
    scale_bytes: Any,
    index: Any,
    turn: Any,
    away: Any,
    room: Any,
) -> None:
    """Turn and encode one row and put it at row ``index`` of its tensors.

    ``away`` is the address of the float32 row to subtract before, or 0.
    """
    dst = rows + index * row_bytes
    if mode != at.INT8 and mode != at.INT4:
        copy_bytes(dst, src, row_bytes)
        return
    factor = np.float32(1.0) / np.sqrt(np.float32(turn)) if turn > 1 else np.float32(1.0)
    if away == 0:
        read_query(src_mode, src, dim, factor, turn, room)
    else:
        read_query(src_mode, src, dim, np.float32(1.0), 0, room)
        for i in range(dim):
            store_f32(room + 4 * i, (load_f32(room + 4 * i) - load_f32(away + 4 * i)) * factor)
        if turn > 1:
            turn_row(room, dim, turn)
    if mode == at.INT8:
        codes = room + ROOM // 2
        _quantise_i8(room, -(-dim // LANES), codes, scales + index * 4)
        copy_bytes(dst, codes, dim)
    else:
        _quantise_i4(room, dim, groups, dst, scales + index * scale_bytes)


@njit(nogil=True)
def store_share(
    f: Any, num_rows: Any, slots: Any, k: Any, k_mode: Any, v: Any, v_mode: Any, first: Any, last: Any, room: Any
) -> Any:  # fmt: skip
    """Write the rows of some of ``tokens * heads``, the heads of a token one behind the other; return what is refused.

    That is, how many tokens of which the first head is among them lie outside the pool. ``room``: address of
    :data:`ROOM` bytes.
    """
    heads, size = f[at.KV_HEADS], f[at.BLOCK]
    k_row = f[at.K_DIM] * (4 if k_mode == at.F32 else 2)
    v_row = f[at.V_DIM] * (4 if v_mode == at.F32 else 2)
    refused = 0
    for which in range(first, last):
        token, head = which // heads, which % heads
        if slots[token] < 0 or slots[token] >= num_rows:
            refused += head == 0
            continue
        block = slots[token] // size
        index = (block * heads + head) * size + slots[token] - block * size
        away = f[at.K_OFFSETS]
        if away != 0:
            away += head * f[at.K_DIM] * 4
        _store_row(
            f[at.K_MODE], f[at.K_DIM], f[at.K_GROUPS], k + which * k_row, k_mode,
            f[at.K_ROWS], f[at.K_BYTES], f[at.K_SCALES], f[at.K_SCALE_BYTES], index, f[at.K_TURN], away, room,
        )  # fmt: skip
        _store_row(
            f[at.V_MODE], f[at.V_DIM], f[at.V_GROUPS], v + which * v_row, v_mode,
            f[at.V_ROWS], f[at.V_BYTES], f[at.V_SCALES], f[at.V_SCALE_BYTES], index, f[at.V_TURN], 0, room,
        )  # fmt: skip
    return refused


def _build(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def store_rows(f: Any, num_rows: Any, slots: Any, k: Any, k_mode: Any, v: Any, v_mode: Any) -> Any:
        heads = f[at.KV_HEADS]
        count = slots.shape[0] if sources else 0
        refused = 0
        for token in prange(count):
            scratch = np.empty(ROOM, np.uint8)
            refused += store_share(
                f, num_rows, slots, k, k_mode, v, v_mode, token * heads, (token + 1) * heads, scratch.ctypes.data
            )
            scratch[0] = 0  # keeps it alive until here
        return refused

    return compiled(njit, store_rows, parallel=True, nogil=True)


def _build_copy(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def copy(tensors: Any, src: Any, dst: Any, rows: Any) -> None:
        for i in range(tensors.shape[0] if sources else 0):
            base, heads, size, row_bytes = tensors[i, 0], tensors[i, 1], tensors[i, 2], tensors[i, 3]
            for head in range(heads):
                to = base + (dst * heads + head) * size * row_bytes
                if src != dst:
                    copy_bytes(to, base + (src * heads + head) * size * row_bytes, rows * row_bytes)
                zero_bytes(to + rows * row_bytes, (size - rows) * row_bytes)

    return compiled(njit, copy, nogil=True)


_store_rows = _build(sources_digest())
_copy_rows = _build_copy(sources_digest())


def describe_tensors(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Return what :func:`copy_rows` wants of tensors [N, K, B, ...]: [T, 4] int64, which holds addresses only."""
    return np.array(
        [(x.data_ptr(), x.shape[1], x.shape[2], x[0, 0, 0].numel() * x.itemsize) for x in tensors], np.int64
    )


def copy_rows(tensors: np.ndarray, src: int, dst: int, rows: int) -> None:
    """Make block ``dst`` of each tensor hold the first ``rows`` rows of block ``src``, and zeros behind them.

    Args:
        tensors: From :func:`describe_tensors`.
        src: Block.
        dst: Block; if it is ``src``, its own first rows stay.
        rows: 0 to B.
    """
    _copy_rows(tensors, src, dst, rows)


def cache_folder() -> Path | None:
    """Return where compiled kernels are kept, or None if they are not; changes nothing."""
    folder = _store_rows.stats.cache_path
    return None if folder is None else Path(folder)


def store_rows(view: LayerView, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Encode rows and write them to the pool.

    Args:
        view: The layer.
        slot_mapping: [T] int64, ``block * B + offset`` of each token, all different.
        k: [T, K, D], of the pool's dtype where rows are kept as computed.
        v: [T, K, Dv].

    Raises:
        IndexError: If a row lies outside the pool; the others are written.
    """
    k, v = (rows.contiguous() if rows.dtype in _HALVES else rows.float().contiguous() for rows in (k, v))
    use_threads()
    refused = _store_rows(
        view.fields,
        view.num_rows,
        slot_mapping.numpy(),
        k.data_ptr(),
        at.MODES[k.dtype],
        v.data_ptr(),
        at.MODES[v.dtype],
    )
    if refused:
        raise IndexError(f"{refused} of {len(slot_mapping)} rows lie outside the pool")
