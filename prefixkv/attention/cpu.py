"""Attention on a CPU over the pool as it is stored, by kernels that numba compiles on this machine.

Decodes, short chunks, and whatever needs a window, a softcap, sinks or visible lengths go to one call that reads the
quantised rows where they are. A long plain chunk is bound by multiplications, not by bytes: where the kernel has no
matrix unit to do them with, the chunk's rows are decoded once, and torch's 16-bit products do the rest, the part before
the chunk and the chunk itself apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefixkv.attention.base import AttentionMetadata, AttentionSpec
from prefixkv.errors import IntegrityError
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.views import layer_view, refuse_kernels

if TYPE_CHECKING:
    from prefixkv.attention.cpu_chunk import Flash
    from prefixkv.kernels.numba_attend import AttendPlan

__all__ = ["NumbaBackend"]


class NumbaBackend:
    """The fast backend of a CPU. numba is imported when a model is about to use it and not before."""

    name = "numba"

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None if the kernels can run the model here, else the reason why not."""
        return refuse_kernels(spec.cache, spec.device_type)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        storage: KVStorage,
        meta: AttentionMetadata,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend as :class:`~prefixkv.attention.base.AttentionBackend` says; changes only what is remembered."""
        from prefixkv.attention.cpu_chunk import attend_chunk
        from prefixkv.kernels.numba_attend import attend

        heads, shape = q.shape[1], storage.spec.layers[layer]
        group = heads // shape.num_kv_heads
        plain = softcap is None and sinks is None and q.dtype == torch.bfloat16 and shape.key_dim == shape.value_dim
        key = (self.name, window, group, plain)
        step: _Step | None = meta.scratch.get(key)
        view = layer_view(storage, layer, group)
        if step is None:
            step = meta.scratch[key] = _plan(meta, storage, window, group, plain and not view.matrix)
        q = q.contiguous()
        out = q.new_empty(q.shape[0], heads, shape.value_dim)
        for flash, seq, start, end in step.chunks:
            attend_chunk(flash, view, meta, seq, q[start:end], out[start:end], scaling=scaling)
        if step.rest is not None:
            attend(view, step.rest, q, out, scaling=scaling, softcap=softcap, sinks=sinks)
        for better, index, kv_heads in storage.raised_in(layer):
            # Once more over the rows that are stored better, and over the first result. The plan serves again: it
            # names tokens and rows, not heads.
            own = (kv_heads[:, None] * group + torch.arange(group)).flatten()
            out[:, own] = self.forward(
                index,
                q[:, own],
                better,
                meta,
                scaling=scaling,
                window=window,
                softcap=softcap,
                sinks=None if sinks is None else sinks[own],
            )
        return out


@dataclass(frozen=True, slots=True)
class _Step:
    """How one step is attended by layers of one kind.

    Attributes:
        chunks: Each long plain chunk: torch's kernel for it, sequence, first token and end of its tokens.
        rest: Everything else, or None if there is nothing else.
    """

    chunks: tuple[tuple[Flash, int, int, int], ...]
    rest: AttendPlan | None


def _plan(meta: AttentionMetadata, storage: KVStorage, window: int | None, group: int, plain: bool) -> _Step:
    """Decide who goes which way.

    Raises:
        IntegrityError: If a block table names a block that does not exist: a kernel would read whatever lies there.
    """
    from prefixkv.attention.cpu_chunk import MIN_QUERIES, flash_attention
    from prefixkv.attention.cpu_plan import plan_step

    if not all(0 <= block < storage.num_blocks for table in meta.block_tables_host for block in table):
        raise IntegrityError(f"a block table names a block outside 0 to {storage.num_blocks - 1}")
    flash = flash_attention() if plain else None
    chunks: list[tuple[Flash, int, int, int]] = []
    rest, start = [], 0
    for seq, length in enumerate(meta.query_lens):
        end = start + length
        rows = meta.kv_lens[seq]
        fits = length >= MIN_QUERIES and (window is None or window >= rows)
        if flash is not None and fits and meta.visible_host[start:end] == tuple(range(rows - length + 1, rows + 1)):
            chunks.append((flash, seq, start, end))
        else:
            rest.append(seq)
        start = end
    plan = plan_step(meta, rest, window=window, group=group, block_size=storage.spec.block_size) if rest else None
    return _Step(tuple(chunks), plan)
