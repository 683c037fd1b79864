"""What one token costs: the shape of the cache in plain numbers, so that planning needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prefixkv.errors import ConfigError

__all__ = ["DTYPE_BYTES", "KV_LAYOUTS", "KVCacheSpec", "LayerSpec", "RaisedHead", "RowFormat"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the numbers of one token and kv head are stored.

    Attributes:
        bits: 8 (symmetric, one float32 scale a row), 4 (a float16 scale and minimum per group), or None: as computed.
        group: Most numbers that share a scale, in the 4-bit format.
        rotate: Whether rows are turned by a Hadamard matrix first, which spreads outliers over the row.
    """

    bits: int | None = None
    group: int = 32
    rotate: bool = False

    def group_size(self, dim: int) -> int:
        """Return the numbers per group: the largest divisor of ``dim`` that is at most ``group``."""
        return next(size for size in range(min(self.group, dim), 0, -1) if dim % size == 0)

    def row_bytes(self, dim: int, dtype: str) -> int:
        """Return the bytes of one row of ``dim`` numbers, scales included."""
        if self.bits is None:
            return dim * DTYPE_BYTES[dtype]
        if self.bits == 8:
            return dim + 4
        return dim // 2 + 4 * (dim // self.group_size(dim))

    def stored_bits(self, dtype: str) -> int:
        """Return the bits of one number, scales left out."""
        return DTYPE_BYTES[dtype] * 8 if self.bits is None else self.bits


_AS_COMPUTED = RowFormat()
_K8 = RowFormat(bits=8, rotate=True)
_V8 = RowFormat(bits=8)
_K4 = RowFormat(bits=4, group=16, rotate=True)
_V4 = RowFormat(bits=4, group=32, rotate=True)

KV_LAYOUTS: Mapping[str, tuple[RowFormat, RowFormat]] = MappingProxyType(
    {
        "model": (_AS_COMPUTED, _AS_COMPUTED),
        "int8": (_K8, _V8),
        "k8v4": (_K8, _V4),
        "k4v8": (_K4, _V8),
        "int4": (_K4, _V4),
    }
)
"""Every format by name: how keys and how values are stored."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """K and V of one attention layer: K kv heads of ``key_dim`` and ``value_dim`` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class RaisedHead:
    """A kv head that is stored better than the pool's format would: ``kv_format`` is a key of :data:`KV_LAYOUTS`."""

    layer: int
    kv_head: int
    kv_format: str


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Everything that decides how many bytes a block takes.

    Attributes:
        layers: One entry per attention layer, in layer order.
        dtype: What the model computes in: a key of :data:`DTYPE_BYTES`.
        kv_format: How rows are stored: a key of :data:`KV_LAYOUTS`.
        block_size: Tokens per block.
        raised: Heads that are stored in a better format besides, each once.

    Raises:
        ConfigError: If a raised head does not exist, is named twice or would not be stored better.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str
    kv_format: str
    block_size: int
    raised: tuple[RaisedHead, ...] = ()

    def __post_init__(self) -> None:
        for i, one in enumerate(self.raised):
            self._check_raised(f"heads[{i}]", one)
        if len({(one.layer, one.kv_head) for one in self.raised}) != len(self.raised):
            raise ConfigError("heads: a head is named twice")

    def _check_raised(self, path: str, one: RaisedHead) -> None:
        if not 0 <= one.layer < len(self.layers):
            raise ConfigError(f"{path}.layer={one.layer}: the model has layers 0 to {len(self.layers) - 1}")
        if not 0 <= one.kv_head < self.layers[one.layer].num_kv_heads:
            raise ConfigError(
                f"{path}.kv_head={one.kv_head}: layer {one.layer} has kv heads 0 to "
                f"{self.layers[one.layer].num_kv_heads - 1}"
            )
        if one.kv_format not in KV_LAYOUTS:
            raise ConfigError(f"{path}.kv_format={one.kv_format!r}: available are {', '.join(KV_LAYOUTS)}")
        pool, own = (
            [row.stored_bits(self.dtype) for row in KV_LAYOUTS[name]] for name in (self.kv_format, one.kv_format)
        )
        if own == pool or any(ours < theirs for ours, theirs in zip(own, pool, strict=True)):
            raise ConfigError(
                f"{path}.kv_format={one.kv_format!r}: a head can only be raised above the pool's {self.kv_format!r}, "
                f"in K or V and lowered in neither"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that K and V of one token take over all layers, scales included.

        A raised head takes its room in the pool's format too.
        """
        plain = sum(layer.num_kv_heads * self._row_bytes(layer, self.kv_format) for layer in self.layers)
        return plain + sum(self._row_bytes(self.layers[one.layer], one.kv_format) for one in self.raised)

    def _row_bytes(self, layer: LayerSpec, kv_format: str) -> int:
        key, value = KV_LAYOUTS[kv_format]
        return key.row_bytes(layer.key_dim, self.dtype) + value.row_bytes(layer.value_dim, self.dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size
