"""Pools full of random rows and steps over them, in any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixkv.attention.base import AttentionBackend, AttentionMetadata
from prefixkv.attention.torch_ref import oracle_attention
from prefixkv.cache.spec import KVCacheSpec, LayerSpec, RaisedHead
from prefixkv.kv.storage import KVStorage
from prefixkv.model.batch import Chunk, ForwardBatch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """A pool, a step and its queries."""

    storage: KVStorage
    meta: AttentionMetadata
    q: torch.Tensor

    def attend(
        self,
        backend: AttentionBackend,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> torch.Tensor:
        return backend.forward(0, self.q, self.storage, self.meta, **self._options(window, softcap, sinks))

    def oracle(self, *, window: int | None = None, softcap: float | None = None, sinks: bool = False) -> torch.Tensor:
        return oracle_attention(0, self.q, self.storage, self.meta, **self._options(window, softcap, sinks))

    def _options(self, window: int | None, softcap: float | None, sinks: bool) -> dict[str, object]:
        logits = torch.linspace(-1, 2, self.q.shape[1]) if sinks else None
        return {"scaling": self.q.shape[-1] ** -0.5, "window": window, "softcap": softcap, "sinks": logits}


def scene(
    spans: list[tuple[int, int]],
    *,
    kv_format: str = "int8",
    dtype: str = "float32",
    block_size: int = 16,
    group: int = 3,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    shared_blocks: int = 0,
    seed: int = 0,
    raised: tuple[RaisedHead, ...] = (),
    key_offsets: torch.Tensor | None = None,
    subtracts: bool = False,
) -> Scene:
    """Random rows everywhere, also behind the sequences' ends; spans are (tokens in the pool, new tokens).

    The first ``shared_blocks`` blocks are the same ones for all sequences. Keys lie around
    ``key_offsets``, which the pool subtracts or not.
    """
    needed = [-(-(start + length) // block_size) for start, length in spans]
    num_blocks = shared_blocks + sum(needed) + 1
    spec = KVCacheSpec((LayerSpec(kv_heads, *dims),), dtype, kv_format, block_size, raised)
    storage = KVStorage(spec, num_blocks, CPU, [key_offsets] if subtracts and key_offsets is not None else None)
    generator = torch.Generator().manual_seed(seed)
    total = num_blocks * block_size
    k, v = (torch.randn(total, kv_heads, dim, generator=generator) for dim in dims)
    k, v = (k if key_offsets is None else k + key_offsets).to(storage.dtype), v.to(storage.dtype)
    storage.write(0, torch.arange(total), k, v)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    common = [order.pop() for _ in range(shared_blocks)]
    chunks = []
    for (start, length), blocks in zip(spans, needed, strict=True):
        private = [order.pop() for _ in range(blocks - shared_blocks)]
        chunks.append(Chunk([0] * length, start, [*common, *private], False))
    batch = ForwardBatch.build(chunks, block_size=block_size, num_blocks=num_blocks, device=CPU)
    q = torch.randn(sum(length for _, length in spans), kv_heads * group, dims[0], generator=generator)
    return Scene(storage, batch.attention, q.to(storage.dtype))
