"""Packing chunks into flat tensors."""

from __future__ import annotations

import pytest
import torch

from prefixkv.errors import IntegrityError
from prefixkv.model.batch import Chunk, ForwardBatch

CPU = torch.device("cpu")


def build(*chunks: Chunk, block_size: int = 4, num_blocks: int = 10) -> ForwardBatch:
    return ForwardBatch.build(chunks, block_size=block_size, num_blocks=num_blocks, device=CPU)


def test_chunks_are_packed_end_to_end() -> None:
    """A decode and a chunk have the same shape; nothing says which is which."""
    batch = build(Chunk([7], 5, [3, 8], True), Chunk([1, 2, 4], 2, [9, 0, 5], False), Chunk([6], 0, [2], True))
    meta = batch.attention
    assert batch.input_ids.tolist() == [[7, 1, 2, 4, 6]]
    assert batch.position_ids.tolist() == [[5, 2, 3, 4, 0]]
    assert batch.logits_rows.tolist() == [0, 4]
    assert meta.slot_mapping.tolist() == [8 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 0 * 4 + 0, 2 * 4 + 0]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 4, 5]
    assert meta.seq_lens.tolist() == [6, 5, 1]
    assert meta.visible_tokens.tolist() == [6, 3, 4, 5, 1]
    assert meta.query_lens == (1, 3, 1)


def test_a_short_table_is_filled_with_its_own_block() -> None:
    """Filling up with block 0 would read another sequence's rows, and a NaN there survives a mask."""
    meta = build(Chunk([1], 0, [7], True), Chunk([1], 8, [1, 2, 3, 4], True)).attention
    assert meta.block_table.tolist() == [[7, 7, 7], [1, 2, 3]]


@pytest.mark.parametrize(
    "chunk",
    [Chunk([], 0, [0], True), Chunk([1], -1, [0], True), Chunk([1] * 5, 0, [0], True), Chunk([1], 0, [10], True)],
)
def test_a_chunk_that_does_not_fit_its_blocks_is_a_bug_that_raises(chunk: Chunk) -> None:
    """Writing on would corrupt somebody else's rows."""
    with pytest.raises(IntegrityError):
        build(chunk)
