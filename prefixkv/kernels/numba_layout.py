"""What the attention kernel knows of a layer, as one array of integers: addresses, sizes and where its scratch lies.

One array instead of a dozen arguments: a call costs a microsecond, and one compilation serves every format, dtype and
head size. The names below are indices into that array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefixkv.kernels.numba_amx import TILE_BYTES, TILE_CONFIG, refuse_amx
from prefixkv.kernels.numba_ir import LANES
from prefixkv.kernels.numba_tiles import ROWS

__all__ = ["MODES", "QUERIES_TOGETHER", "LayerView", "refuse_layout", "view_layer"]

F32, BF16, F16, INT8, INT4 = range(5)
FITS = 2
"""Times that scale and minimum of four bits are fitted to the codes they gave, see the codec."""
MODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: INT8, torch.uint8: INT4}
"""How stored numbers are to be read, by the dtype of the tensor that holds them."""

(
    K_MODE,
    V_MODE,
    K_ROWS,  # address of the first row
    V_ROWS,
    K_SCALES,
    V_SCALES,
    KV_HEADS,
    BLOCK,  # rows of a block
    K_DIM,
    V_DIM,
    K_BYTES,  # bytes of a row
    V_BYTES,
    K_SCALE_BYTES,
    V_SCALE_BYTES,
    K_STAGED,  # bytes of a row that was copied, or 0 where rows may be read in place
    V_STAGED,
    V_STAGE_BYTES,  # bytes of a staged row, whether for its width or for its place
    K_GROUPS,  # groups with a scale of their own
    V_GROUPS,
    K_UNITS,  # units of a group
    V_WIDTH,  # V_DIM rounded up to whole vectors
    K_TURN,  # size of the Hadamard blocks that stored keys were multiplied with, or 0
    V_TURN,
    P_WIDTH,  # numbers of a partial result: V_DIM in whole vectors, maximum, total
    K_OFFSETS,  # address of [K, D] float32 that is subtracted from quantised keys before they are stored, or 0
    MOST_QUERIES,
) = range(26)

(
    S_STAGE,
    S_K,
    S_K_SCALES,
    S_V,
    S_V_SCALES,
    S_ROW,
    S_Q,
    S_Q_SUMS,
    S_Q_SCALES,
    S_SCORES,
    S_WEIGHTS,
    S_W_SCALES,
    S_MOST,
    S_TOTAL,
    S_SHRINK,
    S_ACC,
) = range(MOST_QUERIES + 1, MOST_QUERIES + 17)

(
    M_STEPS,  # 64 bytes of a row of keys in bfloat16 that the matrix unit takes at a time
    M_TILE_BYTES,  # bytes of a prepared tile
    M_CONFIG,  # address of the tiles' shapes
    M_FORMER,  # from here on where the scratch of the matrix unit's kernel lies
    M_LANES,
    M_Q,
    M_Q_ROWS,
    M_ROOM,
    M_V_STAGE,
    M_SCORES,
    M_WEIGHTS,
    M_ACC,
) = range(S_ACC + 1, S_ACC + 13)

(
    D_CONFIG,  # where the scratch of decodes on the matrix unit lies
    D_ROW,
    D_Q,
    D_Q_SCALES,
    D_SEEN,
    D_MOST,
    D_TOTAL,
    D_K_SCALES,
    D_V_SCALES,
    D_K,
    D_V,
    D_PRODUCTS,
    D_SHRINK,
    D_W_SCALES,
    D_WEIGHTS,
    D_OUT,
    D_ACC,
) = range(M_ACC + 1, M_ACC + 18)

NUM_FIELDS = D_ACC + 1

QUERIES_TOGETHER = 48
"""Query heads that share a pass over the rows, or one group if it is larger; more would leave the first cache."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer for the kernel. Holds the tensors, since the kernel sees only their addresses.

    Attributes:
        fields: [NUM_FIELDS] int64.
        address: Where the fields lie.
        num_kv_heads: K.
        num_rows: Rows of the pool, N * B.
        scratch_bytes: Bytes of scratch that a thread needs.
        partial_width: Numbers of one partial result.
        turned: Whether keys, and whether values, are stored turned by a Hadamard matrix.
        matrix: Whether the matrix unit can attend chunks of queries in bfloat16.
        codes: Whether it can attend decodes, of queries in any dtype, to the codes as they are.
        tile_bytes: Bytes of a tile that is prepared for it.
        tensors: What the addresses point into.
    """

    fields: np.ndarray
    address: int
    num_kv_heads: int
    num_rows: int
    scratch_bytes: int
    partial_width: int
    turned: tuple[bool, bool]
    matrix: bool
    codes: bool
    tile_bytes: int
    tensors: tuple[torch.Tensor, ...]


def refuse_layout(key_dim: int, value_dim: int, modes: Sequence[int], key_group: int) -> str | None:
    """Return None if the kernel can read rows of this kind, else why not."""
    key_mode, value_mode = modes
    if key_dim > 512 or value_dim > 512:
        return f"heads of {max(key_dim, value_dim)} numbers overflow the sums of integers; the most is 512"
    multiple = {F32: 2, BF16: 2, F16: 2, INT8: 4, INT4: 8}
    if key_dim % multiple[key_mode] or (value_mode == INT4 and value_dim % 2):
        return f"head sizes {key_dim} and {value_dim} do not fill whole units of the stored rows"
    if key_mode == INT4 and key_group % 4:
        return f"groups of {key_group} keys do not fill whole units"
    return None


def view_layer(
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    *,
    turned: tuple[bool, bool],
    most_group: int,
    key_offsets: torch.Tensor | None = None,
) -> LayerView:
    """Describe one layer of the pool; keeps the tensors, changes nothing.

    Args:
        key: Contiguous parts of the keys, [N, K, B, ...]: rows, or codes and scales.
        value: Parts of the values.
        turned: Whether keys, and whether values, were multiplied with a Hadamard matrix.
        most_group: Query heads that share a kv head.
        key_offsets: [K, D] contiguous float32 to subtract from quantised keys, or None.
    """
    fields = np.zeros(NUM_FIELDS, np.int64)
    k_mode, v_mode = MODES[key[0].dtype], MODES[value[0].dtype]
    k_dim, v_dim = (part[0].shape[-1] * (2 if part[0].dtype == torch.uint8 else 1) for part in (key, value))
    k_groups, v_groups = (part[1].shape[-2] if part[0].dtype == torch.uint8 else 1 for part in (key, value))
    units = k_dim // 2 if k_mode in (INT8, INT4) else k_dim
    v_width = -(-v_dim // LANES) * LANES
    fields[K_MODE], fields[V_MODE] = k_mode, v_mode
    fields[K_ROWS], fields[V_ROWS] = key[0].data_ptr(), value[0].data_ptr()
    fields[K_SCALES] = key[1].data_ptr() if len(key) > 1 else 0
    fields[V_SCALES] = value[1].data_ptr() if len(value) > 1 else 0
    fields[KV_HEADS], fields[BLOCK] = key[0].shape[1:3]
    fields[K_DIM], fields[V_DIM] = k_dim, v_dim
    _describe_rows(fields, key, value)
    fields[V_STAGE_BYTES] = max(fields[V_BYTES], fields[V_STAGED])
    fields[K_GROUPS], fields[V_GROUPS] = k_groups, v_groups
    fields[K_UNITS], fields[V_WIDTH] = units // k_groups, v_width
    fields[K_TURN], fields[V_TURN] = (
        dim & -dim if turn else 0 for dim, turn in zip((k_dim, v_dim), turned, strict=True)
    )
    fields[P_WIDTH] = v_width + 2
    fields[K_OFFSETS] = 0 if key_offsets is None else key_offsets.data_ptr()
    fields[MOST_QUERIES] = max(QUERIES_TOGETHER, most_group)
    scratch_bytes = _plan_scratch(fields, units)
    modes = {k_mode, v_mode}
    matrix = modes <= {INT8, INT4, BF16} and refuse_amx() is None
    codes = matrix and modes == {INT8} and not (k_dim % 64 or v_dim % 64 or fields[BLOCK] % 16)
    num_blocks, num_kv_heads, block_size = key[0].shape[:3]
    tensors = (*key, *value) if key_offsets is None else (*key, *value, key_offsets)
    return LayerView(
        fields=fields,
        address=fields.ctypes.data,
        num_kv_heads=num_kv_heads,
        num_rows=num_blocks * block_size,
        scratch_bytes=scratch_bytes,
        partial_width=v_width + 2,
        turned=turned,
        matrix=matrix,
        codes=codes,
        tile_bytes=int(fields[M_TILE_BYTES]),
        tensors=tensors,
    )


def _describe_rows(fields: np.ndarray, key: Sequence[torch.Tensor], value: Sequence[torch.Tensor]) -> None:
    """Write the bytes of rows and scales, and of rows that have to be copied before they are read."""
    for part, size, staged in ((key, K_BYTES, K_STAGED), (value, V_BYTES, V_STAGED)):
        row_bytes = part[0].shape[-1] * part[0].itemsize
        fields[size] = row_bytes
        if len(part) > 1:
            fields[K_SCALE_BYTES if part is key else V_SCALE_BYTES] = part[1][0, 0, 0].nbytes
        # Tiles are read by whole vectors. A row that does not fill them is copied to where the rest does no harm.
        if part[0].shape[-1] % 16:
            fields[staged] = -(-row_bytes // 64) * 64


def _plan_scratch(fields: np.ndarray, units: int) -> int:
    """Write where each part of a thread's scratch lies, and return its bytes; kernels may use the same memory."""
    fields[M_STEPS] = -(-fields[K_DIM] * 2 // 64)
    fields[M_TILE_BYTES] = 64 * (fields[M_STEPS] * 64 + fields[V_WIDTH] * 2)
    fields[M_CONFIG] = TILE_CONFIG
    most = 0
    for sizes in (_scratch_sizes(fields, units), {**_matrix_sizes(fields), **_decode_sizes(fields)}):
        at = 0
        for name, size in sizes.items():
            fields[name] = at
            at += -(-size // 64) * 64
        most = max(most, at)
    return most


def _scratch_sizes(fields: np.ndarray, units: int) -> dict[int, int]:
    """Return the bytes of each part of a thread's scratch."""
    queries, v_width, k_dim = (int(fields[name]) for name in (MOST_QUERIES, V_WIDTH, K_DIM))
    k_groups, v_groups = int(fields[K_GROUPS]), int(fields[V_GROUPS])
    most_row = max(int(fields[size]) for size in (K_BYTES, V_BYTES)) + 64
    return {
        S_STAGE: ROWS * (most_row + (v_groups + 4) * 4),
        S_K: (units + 16) * ROWS * 4,
        S_K_SCALES: (k_groups + 4) * ROWS * 8,
        S_V: ROWS * v_width * 4,
        S_V_SCALES: (v_groups + 4) * ROWS * 8,
        S_ROW: (k_dim + 2 * LANES) * 4,
        S_Q: (queries * units + 2 * LANES) * 4,
        S_Q_SUMS: queries * k_groups * 4,
        S_Q_SCALES: queries * 4,
        S_SCORES: queries * ROWS * 4,
        S_WEIGHTS: queries * ROWS * 2,
        S_W_SCALES: queries * 4,
        S_MOST: queries * 4,
        S_TOTAL: queries * LANES * 4,
        S_SHRINK: queries * 4,
        S_ACC: queries * v_width * 4,
    }


def _matrix_sizes(fields: np.ndarray) -> dict[int, int]:
    """Return the bytes of each part of a thread's scratch for the matrix unit's kernel."""
    groups = -(-int(fields[MOST_QUERIES]) // 16)
    steps, v_width = int(fields[M_STEPS]), int(fields[V_WIDTH])
    return {
        M_FORMER: 64,
        M_LANES: groups * 8 * 64,
        M_Q: groups * steps * TILE_BYTES,
        M_Q_ROWS: 16 * steps * 64,
        M_ROOM: max(steps * 32 * 64, 8 * int(fields[K_GROUPS]), 8 * int(fields[V_GROUPS])),
        M_V_STAGE: 64 * v_width * 2,
        M_SCORES: 64 * 64,
        M_WEIGHTS: 2 * 1024,
        M_ACC: groups * v_width * 64,
    }


def _decode_sizes(fields: np.ndarray) -> dict[int, int]:
    """Return the bytes of each part of a thread's scratch for decodes on the matrix unit."""
    groups = -(-int(fields[MOST_QUERIES]) // 16)
    k_dim, v_dim = int(fields[K_DIM]), int(fields[V_WIDTH])
    return {
        D_CONFIG: 64,
        D_ROW: k_dim * 4 + 64,
        D_Q: groups * 16 * k_dim * 2,
        D_Q_SCALES: groups * 64,
        D_SEEN: groups * 256,
        D_MOST: groups * 64,
        D_TOTAL: groups * 1024,
        D_K_SCALES: 256,
        D_V_SCALES: 256,
        D_K: 64 * k_dim,
        D_V: 64 * v_dim,
        D_PRODUCTS: 8192,
        D_SHRINK: 64,
        D_W_SCALES: 64,
        D_WEIGHTS: 2048,
        D_OUT: 2 * 64 * v_dim,
        D_ACC: groups * 64 * v_dim,
    }
