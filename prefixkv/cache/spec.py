"""What one token costs: the shape of the cache in plain numbers, so that planning needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "KVCacheSpec", "LayerSpec"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """K and V of one attention layer: K kv heads of ``key_dim`` and ``value_dim`` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Everything that decides how many bytes a block takes.

    Attributes:
        layers: One entry per attention layer, in layer order.
        dtype: What the model computes in: a key of :data:`DTYPE_BYTES`.
        kv_format: How rows are stored.
        block_size: Tokens per block.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str
    kv_format: str
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that K and V of one token take over all layers, scales included."""
        numbers = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return numbers * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size
