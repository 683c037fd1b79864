"""What an attention backend is given and what it must do.

Shapes, here and everywhere: T tokens of the packed step, S sequences, H query heads, K kv heads, D head size (Dv of
values), N blocks, B tokens per block, M blocks per sequence, L layers, V vocabulary; G = H / K queries share a kv head.

A step is a list of chunks packed end to end. The key at row ``j`` of a sequence has position ``j``. A query sees row
``j`` iff ``j < visible_tokens`` of that query and, under a sliding window, ``position - j < window``. The visible
length belongs to the query token, not to its sequence, so that tokens behind a patched span can be computed in the
same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from prefixkv.cache.spec import KVCacheSpec
from prefixkv.kv.storage import KVStorage

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionSpec"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of its attention, so that a backend can refuse at load and not at token 900.

    Attributes:
        cache: Shape and format of the pool.
        num_heads: Query heads of each layer.
        windows: Sliding window of each layer in tokens, None where attention is full.
        softcap: Whether any layer caps its scores with tanh.
        sinks: Whether any layer has attention sinks.
        device_type: ``"cpu"``, ``"cuda"``, ...
    """

    cache: KVCacheSpec
    num_heads: tuple[int, ...]
    windows: tuple[int | None, ...]
    softcap: bool
    sinks: bool
    device_type: str


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step, planned once on the host and shared by all layers.

    Attributes:
        query_lens: New tokens of each sequence, on the host.
        kv_lens: Rows of each sequence that any of its queries sees, on the host.
        positions_host: Position of each token, on the host.
        visible_host: Rows each token sees before any window, on the host.
        block_tables_host: Blocks of each sequence, exactly as many as its ``kv_lens`` needs, on the host.
        cu_seqlens_q: [S+1] int32, where each sequence's queries begin.
        seq_lens: [S] int32, ``kv_lens`` on the device.
        block_table: [S, M] int32; a short list is filled up with its own last block, never with somebody else's.
        slot_mapping: [T] int64, ``block * B + offset`` where each token's row is written.
        positions: [T] int64.
        visible_tokens: [T] int64.
        scratch: What a backend wants to remember between the layers of this step, such as masks. Dies with the step.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    positions_host: tuple[int, ...]
    visible_host: tuple[int, ...]
    block_tables_host: tuple[tuple[int, ...], ...]
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    visible_tokens: torch.Tensor
    scratch: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class AttentionBackend(Protocol):
    """Reads the pool and attends. Stateless: what a step needs to remember goes to its metadata's ``scratch``."""

    @property
    def name(self) -> str:
        """Word for logs and for ``select``."""
        ...

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None if this backend can run the model here, else the reason why not."""
        ...

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
        """Attend from the step's queries to the rows in the pool, this step's own included; changes nothing.

        The rows were written before: attention reads what is stored, also inside the chunk, so a hit equals a miss.

        Args:
            layer: Layer index.
            q: [T, H, D].
            storage: The pool.
            meta: The step.
            scaling: Factor of the scores.
            window: Sliding window in tokens, or None.
            softcap: Scores become ``softcap * tanh(score / softcap)``, or None.
            sinks: [H] one extra logit per head that takes probability and gives nothing, or None.

        Returns:
            [T, H, Dv] in q's dtype.
        """
        ...
