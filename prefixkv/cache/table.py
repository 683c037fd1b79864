"""The blocks of one sequence, and the tensor work that bookkeeping asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from prefixkv.cache.index import Node
from prefixkv.cache.keys import ScopeKey
from prefixkv.cache.scopes import ScopeMap
from prefixkv.scope import ScopeLevel

__all__ = ["BlockOp", "CopyRows", "PrefixMatch", "SequenceBlocks", "ZeroBlocks", "merged"]


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy the first ``rows`` rows of block ``source`` to block ``target``, in every layer."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """Overwrite whole blocks with zeros, codes and scales, in every layer."""

    block_ids: tuple[int, ...]


BlockOp = CopyRows | ZeroBlocks


def merged(ops: Iterable[BlockOp]) -> list[BlockOp]:
    """Return the same work in the same order, neighbouring clears made one; changes nothing."""
    result: list[BlockOp] = []
    for is_zero, run in groupby(ops, key=lambda op: isinstance(op, ZeroBlocks)):
        if is_zero:
            result.append(ZeroBlocks(tuple(b for op in run if isinstance(op, ZeroBlocks) for b in op.block_ids)))
        else:
            result.extend(run)
    return result


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix of a prompt. Valid until the manager next changes.

    Attributes:
        nodes: Full blocks that match, from the start.
        partial: The block whose first ``partial_rows`` rows match behind them, or None.
        partial_rows: Rows to copy from ``partial``.
        num_tokens: Tokens matched in all.
        diverged: Whether a block that this principal may read goes on differently where the match ends.
    """

    nodes: tuple[Node, ...]
    partial: Node | None
    partial_rows: int
    num_tokens: int
    diverged: bool


@dataclass(slots=True)
class SequenceBlocks:
    """What the manager remembers about one open sequence.

    Attributes:
        scopes: Scope of each position.
        reach: Key to level of the scopes it may read, widest first.
        block_table: Blocks in order of position, each referenced once by this table.
        nodes: Index nodes of the leading full blocks; ``nodes[i].block_id == block_table[i]``.
        tail: Node that indexes the committed part of ``block_table[len(nodes)]`` while that block fills.
        sealed: Whether nothing more may be committed (a ``request`` scope was reached, or its blocks expired).
        inherited: How many of the nodes were matched when it was opened, until its first commit.
    """

    scopes: ScopeMap
    reach: dict[ScopeKey, ScopeLevel]
    block_table: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    tail: Node | None = None
    sealed: bool = False
    inherited: int = 0
