"""Decode the rows of one sequence into contiguous bfloat16, for products that read them many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange

from prefixkv.kernels import numba_layout as at
from prefixkv.kernels.numba_build import compiled, sources_digest, use_threads
from prefixkv.kernels.numba_halves import load_number, store_number
from prefixkv.kernels.numba_ir import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    bf16_bits,
    copy_bytes,
    load,
    load_f32,
    load_i8,
    load_u8,
    micro_kernel,
    offset,
    repeat,
    splat,
    store,
    store_f32,
    vector,
)
from prefixkv.kernels.numba_layout import LayerView

__all__ = ["decode_rows", "gather_rows"]

_RUN = 32
"""Rows that a thread decodes at a time."""


def _store_bf16(b: ir.IRBuilder, address: Any, value: Any) -> None:
    """Emit a store of float32 as bfloat16, rounded half to even."""
    store(b, address, b.trunc(bf16_bits(b, value), vector(I16)))


def _emit_decode_i8(
    b: ir.IRBuilder, src: Any, row_bytes: Any, rows: Any, vectors: Any, scales: Any, dst: Any, stride: Any
) -> None:
    """Write rows of int8 codes times their scales as bfloat16."""
    with repeat(b, rows) as row:
        factor = splat(b, load(b, offset(b, scales, (row, 4)), F32))
        codes, out = offset(b, src, (row, row_bytes)), offset(b, dst, (row, stride))
        with repeat(b, vectors) as i:
            code = b.sext(load(b, offset(b, codes, (i, LANES)), vector(I8)), vector(I32))
            _store_bf16(b, offset(b, out, (i, LANES * 2)), b.fmul(b.sitofp(code, vector(F32)), factor))


def _emit_decode_i4(b: ir.IRBuilder, codes: Any, half: Any, shift: Any, scales: Any, dst: Any) -> None:
    """Write nibbles as bfloat16: ``half`` vectors of low ones, then as many of high ones.

    A group is ``1 << shift`` vectors; scales [groups, 2] float32 hold scale and minimum.
    """
    with repeat(b, half) as i:
        both = b.zext(load(b, offset(b, codes, (i, LANES)), vector(I8)), vector(I32))
        for first, code in ((half.type(0), b.and_(both, splat(b, I32(15)))), (half, b.lshr(both, splat(b, I32(4))))):
            place = b.add(first, i)
            pair = offset(b, scales, (b.lshr(place, shift), 8))
            step, least = (splat(b, load(b, offset(b, pair, (n, 4)), F32)) for n in (0, 1))
            value = b.fadd(b.fmul(b.uitofp(code, vector(F32)), step), least)
            _store_bf16(b, offset(b, dst, (place, LANES * 2)), value)


_decode_i8 = micro_kernel("decode_i8", 7, _emit_decode_i8)
_decode_i4 = micro_kernel("decode_i4", 5, _emit_decode_i4)


@njit(nogil=True)
def decode_rows(
    mode: Any, src: Any, row_bytes: Any, dim: Any, groups: Any, scales: Any, scale_bytes: Any, room: Any, count: Any,
    dst: Any, stride: Any
) -> None:  # fmt: skip
    """Write stored rows that lie side by side as bfloat16, ``stride`` bytes apart; turned ones stay turned.

    ``room`` [groups, 2] float32 is overwritten.
    """
    if mode == at.INT8:
        vectors = dim // LANES
        _decode_i8(src, row_bytes, count, vectors, scales, dst, stride)
        if vectors * LANES < dim:
            for i in range(count):
                for d in range(vectors * LANES, dim):
                    code = np.float32(load_i8(src + i * row_bytes + d))
                    store_number(at.BF16, dst + i * stride, d, code * load_f32(scales + i * 4))
        return
    for i in range(count):
        row, out = src + i * row_bytes, dst + i * stride
        if mode == at.BF16:
            copy_bytes(out, row, dim * 2)
        else:
            _decode_nibbles(row, dim, groups, scales + i * scale_bytes, room, out)


@njit(nogil=True)
def _decode_nibbles(src: Any, dim: Any, groups: Any, scales: Any, room: Any, dst: Any) -> None:
    """Write one row of 4-bit codes as bfloat16."""
    for i in range(2 * groups):
        store_f32(room + 4 * i, load_number(at.F16, scales, i))
    length = dim // groups
    if dim % (2 * LANES) == 0:
        for shift in range(3):
            if length == LANES << shift:
                _decode_i4(src, dim // (2 * LANES), shift, room, dst)
                return
    for i in range(dim):
        code = load_u8(src + i % (dim // 2))
        code = code >> 4 if i >= dim // 2 else code & 15
        pair = room + i // length * 8
        store_number(at.BF16, dst, i, np.float32(code) * load_f32(pair) + load_f32(pair + 4))


def _build(sources: str) -> Any:
    """Return the compiled entry; see :func:`~prefixkv.kernels.numba_build.sources_digest`."""

    def gather(f: Any, table: Any, rows: Any, k: Any, v: Any) -> None:
        heads, size = f[at.KV_HEADS], f[at.BLOCK]
        k_dim, v_dim = f[at.K_DIM], f[at.V_DIM]
        runs = (rows + _RUN - 1) // _RUN if sources else 0
        for work in prange(runs * heads):
            head = work // runs
            space = np.empty(f[at.K_GROUPS] + f[at.V_GROUPS], np.int64)
            room = space.ctypes.data
            row = work % runs * _RUN
            end = min(rows, row + _RUN)
            while row < end:
                block = row // size
                inside = row - block * size
                count = min(end - row, size - inside)
                index, to = (table[block] * heads + head) * size + inside, head * rows + row
                decode_rows(
                    f[at.K_MODE], f[at.K_ROWS] + index * f[at.K_BYTES], f[at.K_BYTES], k_dim, f[at.K_GROUPS],
                    f[at.K_SCALES] + index * f[at.K_SCALE_BYTES], f[at.K_SCALE_BYTES], room, count, k + to * k_dim * 2,
                    k_dim * 2,
                )  # fmt: skip
                decode_rows(
                    f[at.V_MODE], f[at.V_ROWS] + index * f[at.V_BYTES], f[at.V_BYTES], v_dim, f[at.V_GROUPS],
                    f[at.V_SCALES] + index * f[at.V_SCALE_BYTES], f[at.V_SCALE_BYTES], room, count, v + to * v_dim * 2,
                    v_dim * 2,
                )  # fmt: skip
                row += count
            space[0] = 0  # keeps it alive until here

    return compiled(njit, gather, parallel=True, nogil=True)


_gather = _build(sources_digest())


def gather_rows(view: LayerView, table: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Decode the first rows of a block list; writes ``k`` and ``v``. Keys that are stored turned stay turned.

    Args:
        view: The layer, of a bfloat16 model.
        table: [M] int32 blocks that hold the rows.
        k: [K, rows, D] contiguous bfloat16.
        v: [K, rows, Dv].
    """
    use_threads()
    _gather(view.fields, table.numpy(), k.shape[1], k.data_ptr(), v.data_ptr())
