"""The pool's tensors. Knows rows and blocks; knows neither tokens, tenants nor what the stored numbers mean.

Every tensor is block-major, ``[N, K, B, *row_shape]``, so one block of one layer is a contiguous slice that can be
copied, cleared or moved to a slower tier as it is.

Raised heads, which are stored in a better format than the pool's, have tensors of their own: a small storage per format
that holds just them. Their rows in the pool's tensors are written and not read; they are few.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec
from prefixkv.config import parse_memory
from prefixkv.errors import ConfigError
from prefixkv.kv.formats import TORCH_DTYPES, KVFormat, RowCodec, get_format
from prefixkv.kv.pages import available_memory, commit_pages, zeros
from prefixkv.kv.writer import TorchWriter, choose_writer

__all__ = ["KVStorage", "LayerStorage", "RaisedPart", "plan_num_blocks"]


@dataclass(frozen=True, slots=True)
class LayerStorage:
    """The tensors of one layer: the parts of its keys and of its values, each [N, K, B, *row_shape]."""

    key: tuple[torch.Tensor, ...]
    value: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class RaisedPart:
    """The raised heads of one format.

    Attributes:
        storage: Their rows: the same blocks, and only the layers that have such heads.
        index: The model's layer to the layer in ``storage``.
        heads: [K'] int64 which kv heads these are, per layer in ``storage``, ascending.
    """

    storage: KVStorage
    index: dict[int, int]
    heads: tuple[torch.Tensor, ...]


class KVStorage:
    """Owns the tensors of all blocks and is the only writer of them. Only the engine thread calls it.

    Attributes:
        memo: What kernels remember about the tensors, such as where they lie. Dies with the pool.
        raised: One part per format of raised heads.
        key_offsets: [K, D] float32 per layer, subtracted from keys before they are stored, or None. Softmax does not
            see a number that is added to all scores of a query, so nothing is added back.

    Invariants:
        * Nothing is allocated after construction.
        * A row holds what was last written to it, encoded once, or zeros.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: torch.device | str,
        key_offsets: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Allocate all tensors, zeroed. On a CPU the system commits the memory only when rows are written.

        Args:
            spec: Shape of the cache.
            num_blocks: Blocks of the pool.
            device: Where it lies.
            key_offsets: [K, D] per layer, for formats with 4-bit keys.

        Raises:
            ConfigError: If the format or the dtype is unknown, a size is not positive, or offsets do not fit.
        """
        if num_blocks < 1 or spec.block_size < 1:
            raise ConfigError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={spec.block_size}")
        if spec.dtype not in TORCH_DTYPES:
            raise ConfigError(f"dtype={spec.dtype!r}: must be one of {', '.join(TORCH_DTYPES)}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.memo: dict[Any, Any] = {}
        self.format: KVFormat = get_format(spec.kv_format)
        self.dtype = TORCH_DTYPES[spec.dtype]
        self.layers: tuple[LayerStorage, ...] = tuple(
            LayerStorage(
                key=self._allocate(self.format.key, layer, layer.key_dim),
                value=self._allocate(self.format.value, layer, layer.value_dim),
            )
            for layer in spec.layers
        )
        self.raised: tuple[RaisedPart, ...] = tuple(
            self._raised_part(name) for name in dict.fromkeys(one.kv_format for one in spec.raised)
        )
        self.key_offsets = None if key_offsets is None else self._check_offsets(key_offsets)
        self._writer = choose_writer(self)
        self._uncommitted = commit_pages(self._tensors()) if self.device.type == "cpu" else iter(())

    def commit_more(self) -> bool:
        """Commit a little more of the memory that the pool was given, about a millisecond's worth.

        Returns:
            Whether there is more. Once there is not, writing a row never waits for the system.
        """
        return next(self._uncommitted, self) is None  # of the raised parts as well

    @contextmanager
    def committing_ahead(self) -> Iterator[None]:
        """Let a thread commit the first large page of each tensor meanwhile; else the first rows wait for them."""

        def commit() -> None:
            for _ in self._tensors():
                self.commit_more()

        thread = threading.Thread(target=commit, name="prefixkv-pages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def choose_writer(self) -> None:
        """Choose again who writes the rows: kernels may have become ready since."""
        self._writer = choose_writer(self)
        for part in self.raised:
            part.storage.choose_writer()

    def keep_torch_writer(self) -> None:
        """Have the rows written by torch from now on: kernels turned out not to work."""
        self._writer = TorchWriter(self)
        for part in self.raised:
            part.storage.keep_torch_writer()

    def _raised_part(self, kv_format: str) -> RaisedPart:
        named = [(one.layer, one.kv_head) for one in self.spec.raised if one.kv_format == kv_format]
        layers = sorted({layer for layer, _ in named})
        heads = [sorted(head for at, head in named if at == layer) for layer in layers]
        shapes = tuple(
            replace(self.spec.layers[layer], num_kv_heads=len(own)) for layer, own in zip(layers, heads, strict=True)
        )
        spec = replace(self.spec, layers=shapes, kv_format=kv_format, raised=())
        return RaisedPart(
            KVStorage(spec, self.num_blocks, self.device),
            {layer: i for i, layer in enumerate(layers)},
            tuple(torch.tensor(own, device=self.device) for own in heads),
        )

    def _check_offsets(self, key_offsets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if KV_LAYOUTS[self.spec.kv_format][0].bits != 4:
            raise ConfigError(f"key_offsets: keys of {self.spec.kv_format!r} have not 4 bits")
        shapes = [(layer.num_kv_heads, layer.key_dim) for layer in self.spec.layers]
        if [tuple(offsets.shape) for offsets in key_offsets] != shapes:
            raise ConfigError("key_offsets: do not have the shape of the model's keys")
        return tuple(offsets.to(self.device, torch.float32).contiguous() for offsets in key_offsets)

    def _allocate(self, codec: RowCodec, layer: LayerSpec, dim: int) -> tuple[torch.Tensor, ...]:
        lead = (self.num_blocks, layer.num_kv_heads, self.spec.block_size)
        return tuple(self._zeros((*lead, *part.row_shape), part.dtype) for part in codec.parts(dim, self.dtype))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        own = [tensor for layer in self.layers for tensor in (*layer.key, *layer.value)]
        return own + [tensor for part in self.raised for tensor in part.storage._tensors()]

    def raised_in(self, layer: int) -> list[tuple[KVStorage, int, torch.Tensor]]:
        """Return, per format of raised heads of a layer: storage, layer in it, and [K'] which kv heads it holds."""
        return [
            (part.storage, part.index[layer], part.heads[part.index[layer]])
            for part in self.raised
            if layer in part.index
        ]

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode new rows and store them; changes the rows that ``slot_mapping`` names.

        Args:
            layer: Layer index.
            slot_mapping: [T] int64, ``block * B + offset`` of each token, all different.
            k: [T, K, D].
            v: [T, K, Dv].

        Raises:
            IndexError: If a row lies outside the pool.
        """
        self._writer.write(layer, slot_mapping, k, v)
        for storage, index, heads in self.raised_in(layer):
            storage.write(index, slot_mapping, k.index_select(1, heads), v.index_select(1, heads))

    def gather(self, layer: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return decoded rows of several block lists side by side; changes nothing.

        Raised heads come from where they are stored better. What was subtracted from keys is not added back.

        Args:
            layer: Layer index.
            block_table: [S, M] integer block ids.

        Returns:
            k [S, K, M*B, D] and v [S, K, M*B, Dv] in the model's dtype.
        """
        store = self.layers[layer]
        k = self._gather(self.format.key, store.key, block_table)
        v = self._gather(self.format.value, store.value, block_table)
        for storage, index, heads in self.raised_in(layer):
            for rows, better in zip((k, v), storage.gather(index, block_table), strict=True):
                rows.index_copy_(1, heads, better)
        return k, v

    def _gather(self, codec: RowCodec, tensors: tuple[torch.Tensor, ...], table: torch.Tensor) -> torch.Tensor:
        num_seqs, width = table.shape
        flat = table.reshape(-1)
        parts = []
        for tensor in tensors:
            picked = tensor.index_select(0, flat)  # [S*M, K, B, ...]
            heads, block_size, *row_shape = picked.shape[1:]
            picked = picked.view(num_seqs, width, heads, block_size, *row_shape).transpose(1, 2)
            parts.append(picked.reshape(num_seqs, heads, width * block_size, *row_shape))
        return codec.decode(tuple(parts), self.dtype)

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Make block ``dst`` hold the first ``rows`` rows of block ``src`` in every layer, and zeros behind them.

        The zeros matter: rows behind a sequence's end are masked, but a masked NaN left by a former owner is still NaN.

        Raises:
            ValueError: If a block or the number of rows is out of range.
        """
        if not (0 <= src < self.num_blocks and 0 <= dst < self.num_blocks and 0 <= rows <= self.spec.block_size):
            raise ValueError(f"copy_rows({src}, {dst}, {rows}): {self.num_blocks} blocks of {self.spec.block_size}")
        self._writer.copy_rows(src, dst, rows)
        for part in self.raised:
            part.storage.copy_rows(src, dst, rows)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear whole blocks in every layer.

        Raises:
            ValueError: If a block is out of range.
        """
        if not all(0 <= block < self.num_blocks for block in block_ids):
            raise ValueError(f"zero({list(block_ids)}): {self.num_blocks} blocks")
        self._writer.zero(block_ids)
        for part in self.raised:
            part.storage.zero(block_ids)

    def is_zero(self, block_ids: Sequence[int]) -> bool:
        """Return whether every row of these blocks is zero in every layer; changes nothing."""
        if not block_ids:
            return True
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
        return not any(bool(tensor.index_select(0, index).any()) for tensor in self._tensors())


def plan_num_blocks(spec: KVCacheSpec, memory: int | float | str, device: torch.device | str) -> int:
    """Return how many blocks fit in ``memory``; allocates nothing.

    Args:
        spec: Shape of the cache.
        memory: As :func:`prefixkv.config.parse_memory` reads it; a share is of what is free on ``device`` now.
        device: Where the pool will live.

    Raises:
        ConfigError: If not even one block fits, or the free memory cannot be found out.
    """
    amount = parse_memory(memory)
    get_format(spec.kv_format)
    block_bytes = spec.bytes_per_block
    budget_bytes = int(amount * _free_bytes(torch.device(device))) if isinstance(amount, float) else amount
    if budget_bytes < block_bytes:
        raise ConfigError(
            f"CacheConfig.memory={memory!r} is {budget_bytes} bytes and one block of {spec.block_size} tokens takes "
            f"{block_bytes}: give more memory or a smaller block_size"
        )
    return budget_bytes // block_bytes


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        raise ConfigError(f"CacheConfig.memory: cannot tell what is free on {device}; give bytes or text")
    available = available_memory()
    if available is None:
        raise ConfigError("CacheConfig.memory: cannot tell how much memory is free here; give bytes or text")
    return available
