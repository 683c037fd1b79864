"""One step as flat tensors: a list of (sequence, number of new tokens) packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        opened_blocks: Last blocks of chunks that write their first row: what a former owner left behind their end
            must be cleared before attention reads them.
        attention: The rest of the plan.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_rows: torch.Tensor
    opened_blocks: tuple[int, ...]
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
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[tuple[int, ...]] = []
        opened: list[int] = []
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            table = tuple(chunk.block_table[: -(-end // block_size)])
            _check(chunk, table, end, block_size, num_blocks)
            ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, end))
            slots.extend(table[p // block_size] * block_size + p % block_size for p in range(chunk.start, end))
            tables.append(table)
            if end % block_size and (len(table) - 1) * block_size >= chunk.start:
                opened.append(table[-1])
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        kv_lens = [chunk.start + length for chunk, length in zip(chunks, query_lens, strict=True)]
        bounds = [0, *accumulate(query_lens)]
        width = max(len(table) for table in tables)
        padded = [[*table, *([table[-1]] * (width - len(table)))] for table in tables]
        rows = [end - 1 for chunk, end in zip(chunks, bounds[1:], strict=True) if chunk.needs_logits]
        if all_logits:
            rows = list(range(len(ids)))
        position_ids = torch.tensor(positions, dtype=torch.int64, device=device)
        visible = tuple(position + 1 for position in positions)
        return cls(
            input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
            position_ids=position_ids[None],
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            opened_blocks=tuple(opened),
            attention=AttentionMetadata(
                query_lens=tuple(query_lens),
                kv_lens=tuple(kv_lens),
                positions_host=tuple(positions),
                visible_host=visible,
                block_tables_host=tuple(tables),
                cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32, device=device),
                seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
                block_table=torch.tensor(padded, dtype=torch.int32, device=device),
                slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
                positions=position_ids,
                visible_tokens=torch.tensor(visible, dtype=torch.int64, device=device),
            ),
        )


def _check(chunk: Chunk, table: tuple[int, ...], end: int, block_size: int, num_blocks: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise IntegrityError(f"a chunk of {len(chunk.token_ids)} tokens at position {chunk.start} cannot run")
    if len(table) * block_size < end:
        raise IntegrityError(f"a chunk ends at token {end} and its {len(table)} blocks hold {len(table) * block_size}")
    if not all(0 <= block < num_blocks for block in table):
        raise IntegrityError(f"a block table names a block outside 0 to {num_blocks - 1}")
