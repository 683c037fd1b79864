"""How rows of K and V are laid down in the pool: the only place that knows what the stored numbers mean.

A :class:`KVFormat` pairs one codec for keys with one for values, because they tolerate different precision. A codec
says which tensors a row needs, turns rows into them (``encode``, once, when a token is written) and back (``decode``).
Storage moves the parts about without looking inside; kernels read the parts themselves and use ``decode`` as oracle.
To add a format, write a codec, enter it in :data:`FORMATS` and in ``config.KV_FORMATS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from prefixkv.cache.spec import LayerSpec
from prefixkv.errors import ConfigError

__all__ = ["FORMATS", "TORCH_DTYPES", "KVFormat", "Part", "RowCodec", "get_format"]

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
"""Dtypes a model may compute in, by the names that :mod:`prefixkv.cache.spec` uses."""


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
        """Return the parts of rows [T, K, D], each [T, K, *row_shape]. Changes nothing."""
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

    def bytes_per_token(self, layer: LayerSpec, dtype: str) -> int:
        """Bytes that K and V of one token take in one layer, scales included."""
        torch_dtype = TORCH_DTYPES[dtype]
        key = sum(part.row_bytes for part in self.key.parts(layer.key_dim, torch_dtype))
        value = sum(part.row_bytes for part in self.value.parts(layer.value_dim, torch_dtype))
        return layer.num_kv_heads * (key + value)


class _AsComputed:
    """Rows exactly as the model computes them."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("rows", (dim,), dtype),)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype)


FORMATS: Mapping[str, KVFormat] = MappingProxyType({"model": KVFormat("model", _AsComputed(), _AsComputed())})
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
