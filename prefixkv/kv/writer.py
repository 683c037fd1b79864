"""Who puts new rows into the tensors: the codecs in torch everywhere, a compiled kernel on a CPU where numba is there.

Both leave the same bits, except that turning a row rounds differently; the torch one is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from prefixkv.cache.spec import KV_LAYOUTS
from prefixkv.kv.views import layer_view, refuse_kernels

if TYPE_CHECKING:
    from prefixkv.kv.storage import KVStorage

__all__ = ["NumbaWriter", "RowWriter", "TorchWriter", "choose_writer"]


class RowWriter(Protocol):
    """Encodes rows of one layer and stores them, and moves rows that are stored."""

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Change the rows that ``slot_mapping`` names; as :meth:`prefixkv.kv.storage.KVStorage.write` says."""
        ...

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Make block ``dst`` hold the first ``rows`` rows of block ``src`` in every layer, and zeros behind them."""
        ...

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear whole blocks in every layer."""
        ...


class TorchWriter:
    """Encodes with the format's codecs and scatters part by part."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Change the rows that ``slot_mapping`` names."""
        storage = self._storage
        block_size = storage.spec.block_size
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        offsets = slot_mapping - blocks * block_size
        store = storage.layers[layer]
        if storage.key_offsets is not None:
            k = k.float() - storage.key_offsets[layer]
        for tensor, rows in zip(store.key, storage.format.key.encode(k), strict=True):
            tensor[blocks, :, offsets] = rows
        for tensor, rows in zip(store.value, storage.format.value.encode(v), strict=True):
            tensor[blocks, :, offsets] = rows

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Change block ``dst``."""
        for layer in self._storage.layers:
            for tensor in (*layer.key, *layer.value):
                if src != dst:
                    tensor[dst, :, :rows] = tensor[src, :, :rows]
                tensor[dst, :, rows:] = 0

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks."""
        index = torch.tensor(block_ids, dtype=torch.int64, device=self._storage.device)
        for layer in self._storage.layers:
            for tensor in (*layer.key, *layer.value):
                tensor.index_fill_(0, index, 0)


class NumbaWriter:
    """Encodes and scatters in one pass over the rows."""

    def __init__(self, storage: KVStorage) -> None:
        from prefixkv.kernels.numba_store import describe_tensors

        self._tensors = describe_tensors([part for layer in storage.layers for part in (*layer.key, *layer.value)])
        self._views = [layer_view(storage, layer) for layer in range(len(storage.layers))]
        self._kinds = [storage.dtype if row.bits is None else None for row in KV_LAYOUTS[storage.spec.kv_format]]

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Change the rows that ``slot_mapping`` names.

        Raises:
            IndexError: If it names a row outside the pool; the other rows are written.
        """
        from prefixkv.kernels.numba_store import store_rows

        k, v = (rows if kind is None else rows.to(kind) for rows, kind in zip((k, v), self._kinds, strict=True))
        store_rows(self._views[layer], slot_mapping, k, v)

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Change block ``dst``."""
        from prefixkv.kernels.numba_store import copy_rows

        copy_rows(self._tensors, src, dst, rows)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks."""
        for block in block_ids:
            self.copy_rows(block, block, 0)


def choose_writer(storage: KVStorage) -> RowWriter:
    """Return the fastest writer that can run here; changes nothing."""
    refused = refuse_kernels(storage.spec, storage.device.type) is not None
    return TorchWriter(storage) if refused else NumbaWriter(storage)
