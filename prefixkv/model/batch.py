"""One step as flat tensors: a list of (sequence, number of new tokens) packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from prefixkv.attention.base import AttentionMetadata
from prefixkv.errors import IntegrityError

__all__ = ["Chunk", "ForwardBatch"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The share of one sequence in a step. A decode is a chunk of one token.

    Attributes:
        token_ids: The new tokens, at least 1.
        start: Position of the first of them, which is the number of tokens already in the pool.
        block_table: Block ids that hold positions 0 to start + len(token_ids), in order; may be longer.
        needs_logits: Whether the logits of the last token are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    needs_logits: bool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step ready to run.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        logits_rows: [R] int64, packed index of the last token of each chunk that needs logits.
        attention: The rest of the plan.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_rows: torch.Tensor
    attention: AttentionMetadata

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        *,
        block_size: int,
        num_blocks: int,
        device: torch.device,
        all_logits: bool = False,
    ) -> ForwardBatch:
        """Pack chunks end to end; changes nothing.

        Args:
            chunks: At least one.
            block_size: Tokens per block.
            num_blocks: Blocks of the pool.
            device: Where the tensors shall be.
            all_logits: Ask for the logits of every token, whatever the chunks need.

        Raises:
            IntegrityError: If a chunk is empty, its block table is too short or names a block that does not exist.
        """
        for chunk in chunks:
            _check(chunk, block_size, num_blocks)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        bounds = [0, *accumulate(len(chunk.token_ids) for chunk in chunks)]
        if all_logits:
            rows = list(range(len(ids)))
        else:
            rows = [end - 1 for chunk, end in zip(chunks, bounds[1:], strict=True) if chunk.needs_logits]
        attention = _plan(chunks, bounds, block_size, device)
        return cls(
            input_ids=_tensor([ids], np.int64, device),
            position_ids=attention.positions[None],
            logits_rows=_tensor(rows, np.int64, device),
            attention=attention,
        )


def _tensor(numbers: Sequence[Any], dtype: type[np.signedinteger[Any]], device: torch.device) -> torch.Tensor:
    """Return the same as ``torch.tensor``, in half the time."""
    return torch.from_numpy(np.array(numbers, dtype)).to(device)


def _end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids)


def _check(chunk: Chunk, block_size: int, num_blocks: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise IntegrityError(f"a chunk of {len(chunk.token_ids)} tokens at position {chunk.start} cannot run")
    capacity = len(chunk.block_table) * block_size
    if capacity < _end(chunk):
        raise IntegrityError(f"a chunk ends at token {_end(chunk)} and its blocks hold {capacity}")
    if not all(0 <= block < num_blocks for block in chunk.block_table):
        raise IntegrityError(f"a block table names a block outside 0 to {num_blocks - 1}")


def _plan(chunks: Sequence[Chunk], bounds: Sequence[int], block_size: int, device: torch.device) -> AttentionMetadata:
    """Return the attention side of a step; only here do lists become tensors."""
    positions: list[int] = []
    slots: list[int] = []
    tables: list[tuple[int, ...]] = []
    for chunk in chunks:
        table = tuple(chunk.block_table[: -(-_end(chunk) // block_size)])
        span = range(chunk.start, _end(chunk))
        positions.extend(span)
        slots.extend(table[position // block_size] * block_size + position % block_size for position in span)
        tables.append(table)
    width = max(len(table) for table in tables)
    padded = [[*table, *([table[-1]] * (width - len(table)))] for table in tables]
    visible = tuple(position + 1 for position in positions)
    kv_lens = tuple(_end(chunk) for chunk in chunks)
    return AttentionMetadata(
        query_lens=tuple(len(chunk.token_ids) for chunk in chunks),
        kv_lens=kv_lens,
        positions_host=tuple(positions),
        visible_host=visible,
        block_tables_host=tuple(tables),
        cu_seqlens_q=_tensor(bounds, np.int32, device),
        seq_lens=_tensor(kv_lens, np.int32, device),
        block_table=_tensor(padded, np.int32, device),
        slot_mapping=_tensor(slots, np.int64, device),
        positions=_tensor(positions, np.int64, device),
        visible_tokens=_tensor(visible, np.int64, device),
    )
