"""Single numbers in float32, bfloat16 and float16, by their bits: numba has no 16-bit floats on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from prefixkv.kernels.numba_ir import float_bits, int_bits, load_f32, load_u16, store_f32, store_i16
from prefixkv.kernels.numba_layout import BF16, F32

__all__ = ["half_bits", "load_number", "store_number"]


@njit(nogil=True)
def load_number(mode: Any, src: Any, i: Any) -> Any:
    """Return number ``i`` of a row in float32, bfloat16 or float16 as float32."""
    if mode == F32:
        return load_f32(src + 4 * i)
    raw = load_u16(src + 2 * i)
    if mode == BF16:
        return float_bits(raw << 16)
    size = float_bits((raw & 0x7FFF) << 13) * float_bits((127 + 112) << 23)
    if raw & 0x7C00 == 0x7C00:
        size = float_bits((raw & 0x7FFF) << 13 | 0x7F800000)
    return -size if raw & 0x8000 else size


@njit(nogil=True)
def store_number(mode: Any, dst: Any, i: Any, value: Any) -> None:
    """Write number ``i`` of a row in float32, bfloat16 or float16, rounded half to even."""
    if mode == F32:
        store_f32(dst + 4 * i, value)
    elif mode == BF16:
        bits = int_bits(value) if value == value else 0x7FC00000
        store_i16(dst + 2 * i, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        store_i16(dst + 2 * i, half_bits(value))


@njit(nogil=True)
def half_bits(value: Any) -> Any:
    """Return the bits of the float16 nearest to a number, rounded half to even; infinity beyond the range."""
    if value != value:
        return 0x7E00
    bits = int_bits(value)
    sign = (bits >> 16) & 0x8000
    bits &= 0x7FFFFFFF
    if bits >= 0x477FF000:
        return sign | 0x7C00
    if bits < 0x38800000:  # below 2**-14: adding 0.5 leaves the rounded multiple of 2**-24 in the last bits
        return sign | (int_bits(float_bits(bits) + np.float32(0.5)) - 0x3F000000)
    return sign | ((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13)
