"""One step as flat tensors: a list of (sequence, number of new tokens) packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chunk"]


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
