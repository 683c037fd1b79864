"""How rows of K and V are laid down in the pool: the only place that knows what the stored numbers mean.

A :class:`KVFormat` pairs one codec for keys with one for values, because they tolerate different precision. A codec
says which tensors a row needs, turns rows into them (``encode``, once, when a token is written) and back (``decode``).
Storage moves the parts about without looking inside; kernels read the parts themselves and have ``decode`` as oracle.
To add a format, describe it in :data:`prefixkv.cache.spec.KV_LAYOUTS`, name it in ``config.KV_FORMATS``, and write a
codec here if none of these reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

import torch

from prefixkv.cache.spec import KV_LAYOUTS, RowFormat
from prefixkv.errors import ConfigError

__all__ = ["FORMATS", "TORCH_DTYPES", "KVFormat", "Part", "RowCodec", "get_format", "hadamard"]

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
"""Dtypes a model may compute in, by the names that :mod:`prefixkv.cache.spec` uses."""

_MOST_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a row is stored in.

    Attributes:
        name: What it holds, such as ``"codes"`` or ``"scales"``.
        row_shape: Its shape for one token of one kv head; () for a scalar.
        dtype: Its element type.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize


class RowCodec(Protocol):
    """Stores rows of one width. Stateless; works on whole rows only, so a token is never encoded twice."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the tensors that rows of ``dim`` numbers of ``dtype`` need."""
        ...

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of rows [..., D], each [..., *row_shape]. Changes nothing."""
        ...

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return rows [..., D] of ``dtype`` from parts [..., *row_shape]. Changes nothing; may alias its input."""
        ...


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A named choice of codecs for keys and for values."""

    name: str
    key: RowCodec
    value: RowCodec


class _AsComputed:
    """Rows exactly as the model computes them."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("rows", (dim,), dtype),)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype)


class _Int8:
    """Symmetric 8-bit codes with one scale per token and kv head: ``number = code * scale``."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return Part("codes", (dim,), torch.int8), Part("scales", (), torch.float32)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = rows.float()
        scales = rows.abs().amax(-1) / 127
        # A row of zeros has no scale to divide by; its codes are zero under any.
        codes = (rows / scales.where(scales > 0, 1)[..., None]).round_().to(torch.int8)
        return codes, scales

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        return (codes.float() * scales[..., None]).to(dtype)


class _Int4:
    """Asymmetric 4-bit codes in groups along the row: ``number = code * scale + minimum``, both of them float16.

    Byte ``i`` of a row holds the codes of numbers ``i`` (low nibble) and ``i + D/2`` (high nibble), so that a vector
    of bytes unpacks into two vectors of neighbours. Scale and minimum first span the group, then they are fitted by
    least squares to the codes this gave, twice: the ends of a group lose a little, all between them gains.

    Source: grouped asymmetric quantisation as in KIVI (Liu et al. 2024); groups lie along the head size of one token
    here, so that a token is quantised once, when it is written.
    """

    def __init__(self, layout: RowFormat) -> None:
        self._layout = layout

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        if dim % 2:
            raise ConfigError(f"4-bit formats pack two numbers in a byte; a head of {dim} numbers needs int8 or model")
        groups = dim // self._layout.group_size(dim)
        return Part("codes", (dim // 2,), torch.uint8), Part("scales", (groups, 2), torch.float16)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = rows.float()
        dim = rows.shape[-1]
        size = self._layout.group_size(dim)
        groups = rows.reshape(*rows.shape[:-1], dim // size, size)
        low, high = groups.aminmax(dim=-1)
        scale, low = _half_pair((high - low) / 15, low)
        for _ in range(_FITS):
            codes = _codes(groups, scale, low).float()
            total, code_sum = groups.sum(-1), codes.sum(-1)
            spread = (codes * codes).sum(-1) * size - code_sum * code_sum
            fitted = ((codes * groups).sum(-1) * size - code_sum * total) / spread
            fitted_scale, fitted_low = _half_pair(fitted, (total - fitted * code_sum) / size)
            fits = (spread > 0) & (scale > 0)
            scale, low = fitted_scale.where(fits, scale), fitted_low.where(fits, low)
        codes = _codes(groups, scale, low).to(torch.uint8).flatten(-2)
        packed = codes[..., : dim // 2] | codes[..., dim // 2 :] << 4
        return packed, torch.stack((scale, low), dim=-1)

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        packed, scales = parts
        codes = torch.cat((packed & 15, packed >> 4), dim=-1).float()
        groups = codes.reshape(*scales.shape[:-1], -1)
        rows: torch.Tensor = (groups * scales[..., :1].float() + scales[..., 1:].float()).flatten(-2)
        return rows.to(dtype)


_FITS = 2


def _half_pair(scale: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum as they are stored. Codes are made against these, so rounding costs nothing twice."""
    return scale.clamp(0, _MOST_FP16).half(), low.clamp(-_MOST_FP16, _MOST_FP16).half()


def _codes(groups: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    step = scale.float()
    codes = (groups - low.float()[..., None]) / step.where(step > 0, 1)[..., None]
    return codes.round_().clamp_(0, 15)


class _Turned:
    """Rows times a Hadamard matrix, which spreads outliers over the row, stored by another codec.

    Source: rotation as in QuaRot (Ashkboos et al. 2024).
    """

    def __init__(self, codec: RowCodec) -> None:
        self._codec = codec

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return self._codec.parts(dim, dtype)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._codec.encode(rows.float() @ hadamard(rows.shape[-1], rows.device))

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        rows = self._codec.decode(parts, torch.float32)
        return (rows @ hadamard(rows.shape[-1], rows.device).T).to(dtype)


@lru_cache(maxsize=64)
def hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix [D, D] that rows are multiplied with; block-diagonal for odd multiples.

    Source: Sylvester's construction.
    """
    power = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float32, device=device)
    while block.shape[0] < power:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.kron(torch.eye(dim // power, dtype=torch.float32, device=device), block / power**0.5)


def _codec(layout: RowFormat) -> RowCodec:
    if layout.bits is None:
        return _AsComputed()
    codec: RowCodec = _Int8() if layout.bits == 8 else _Int4(layout)
    return _Turned(codec) if layout.rotate else codec


FORMATS: Mapping[str, KVFormat] = MappingProxyType(
    {name: KVFormat(name, _codec(key), _codec(value)) for name, (key, value) in KV_LAYOUTS.items()}
)
"""Every format, by name."""


def get_format(name: str) -> KVFormat:
    """Return a format by name.

    Raises:
        ConfigError: If there is no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"kv_format={name!r}: available are {', '.join(FORMATS)}") from None
