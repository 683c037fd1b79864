"""One step cut into items for the CPU kernel: which rows are attended by whom.

The rows of a sequence are cut at multiples of ``SPLIT_ROWS``, wherever its neighbours in the step are cut. Decodes that
read the same blocks between two cuts are attended together over them. So what is computed for a query, and in what
order, depends on its own rows alone: its result has the same bits in any batch, shared or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixkv.attention.base import AttentionMetadata
from prefixkv.kernels.numba_amx_tile import TILE_ROWS
from prefixkv.kernels.numba_attend import AttendPlan
from prefixkv.kernels.numba_layout import QUERIES_TOGETHER
from prefixkv.kernels.numba_tiles import ROWS

__all__ = ["plan_step"]

SPLIT_ROWS = 256
"""Rows per item of a decode. Fewer would cost more merging, more would leave threads without work at batch 1."""

_CHUNK_ITEMS = 4
"""Items that a chunk is cut into at most before its cuts move apart: each cut prepares and merges all queries again."""


class _Builder:
    """Collects items and the partial results of each token."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, int, int, int, int]] = []
        self.queries: list[tuple[int, int, int, int]] = []
        self.tokens: list[tuple[int, int, int]] = []
        self.tiles: list[tuple[int, int, int]] = []
        self.num_slots = 0

    def add_token(self, token: int, pieces: int) -> int:
        """Reserve partial results for a token; returns the first."""
        first = self.num_slots
        self.tokens.append((token, first, pieces))
        self.num_slots += pieces
        return first

    def add_item(
        self, seq: int, members: Sequence[tuple[int, int, int, int]], start: int, end: int, tiles_from: int | None
    ) -> None:
        """Add rows ``start`` to ``end`` of a sequence's blocks for members (token, slot, seen from, seen to).

        ``tiles_from`` is the index that a tile of the sequence's first row would have; None for decodes.
        """
        first = max(start, min(low for _, _, low, _ in members) // ROWS * ROWS)
        last = min(end, max(high for _, _, _, high in members))
        tile = -1 if tiles_from is None else tiles_from + first // TILE_ROWS
        self.items.append((seq, first, last, len(self.queries), len(members), tile))
        self.queries.extend(members)


def plan_step(
    meta: AttentionMetadata, seqs: Sequence[int], *, window: int | None, group: int, block_size: int
) -> AttendPlan:
    """Plan the attention of some sequences of a step; changes nothing.

    Args:
        meta: The step.
        seqs: Indices of the sequences; chunks of any length.
        window: Sliding window in tokens, or None.
        group: Query heads that share a kv head.
        block_size: Tokens per block.
    """
    builder = _Builder()
    together = max(1, QUERIES_TOGETHER // group)
    decodes: dict[tuple[int, tuple[int, ...]], list[tuple[int, tuple[int, int, int, int]]]] = {}
    starts = [0]
    for length in meta.query_lens:
        starts.append(starts[-1] + length)
    for seq in seqs:
        if meta.query_lens[seq] == 1:
            _add_decode(builder, decodes, meta, seq, starts[seq], window, block_size)
        else:
            _add_chunk(builder, meta, seq, range(starts[seq], starts[seq + 1]), window, together)
    for (cut, _), members in decodes.items():
        for at in range(0, len(members), together):
            some = members[at : at + together]
            # Any member's table will do that reaches as far as the furthest: between the cuts they are the same.
            reader = max(some, key=lambda member: member[1][3])[0]
            builder.add_item(reader, [fields for _, fields in some], cut, cut + SPLIT_ROWS, None)
    # The longest first: threads that take what is left over then end at about the same time.
    builder.items.sort(key=lambda item: (item[1] - item[2]) * (8 + item[4] * group))
    return AttendPlan(
        items=np.array(builder.items, np.int64).reshape(-1, 6),
        queries=np.array(builder.queries, np.int64).reshape(-1, 4),
        tokens=np.array(builder.tokens, np.int64).reshape(-1, 3),
        tiles=np.array(builder.tiles, np.int64).reshape(-1, 3),
        tables=meta.block_table.numpy(),
        num_slots=builder.num_slots,
    )


def _seen(meta: AttentionMetadata, token: int, window: int | None) -> tuple[int, int]:
    """Return the first row that a token sees and the end of the rows it sees."""
    high = meta.visible_host[token]
    return (0 if window is None else max(0, meta.positions_host[token] - window + 1)), high


def _add_decode(
    builder: _Builder,
    decodes: dict[tuple[int, tuple[int, ...]], list[tuple[int, tuple[int, int, int, int]]]],
    meta: AttentionMetadata,
    seq: int,
    token: int,
    window: int | None,
    block_size: int,
) -> None:
    """File a decode under the blocks it reads between each two cuts."""
    low, high = _seen(meta, token, window)
    cuts = range(low // SPLIT_ROWS * SPLIT_ROWS, high, SPLIT_ROWS)
    slot = builder.add_token(token, len(cuts))
    table = meta.block_tables_host[seq]
    for i, cut in enumerate(cuts):
        blocks = table[cut // block_size : -(-min(cut + SPLIT_ROWS, high) // block_size)]
        decodes.setdefault((cut, blocks), []).append((seq, (token, slot + i, low, high)))


def _add_chunk(
    builder: _Builder, meta: AttentionMetadata, seq: int, tokens: range, window: int | None, together: int
) -> None:
    """Add the tokens of a chunk, some of them together at a time."""
    packs = [tokens[at : at + together] for at in range(0, len(tokens), together)]
    lows, highs = zip(*(_seen(meta, token, window) for token in tokens), strict=True)
    begin, end = min(lows) // TILE_ROWS, max(highs)
    tiles_from = len(builder.tiles) - begin
    builder.tiles += [(seq, row, min(TILE_ROWS, end - row)) for row in range(begin * TILE_ROWS, end, TILE_ROWS)]
    split = SPLIT_ROWS
    while len(packs) > 1 and len(packs) * meta.kv_lens[seq] > _CHUNK_ITEMS * split:
        split *= 2
    for pack in packs:
        seen = [_seen(meta, token, window) for token in pack]
        # All tokens of a pack are cut alike; where one sees nothing of a piece, it weighs nothing in it.
        first, last = min(low for low, _ in seen), max(high for _, high in seen)
        cuts = range(first // split * split, last, split)
        slots = [builder.add_token(token, len(cuts)) for token in pack]
        for i, cut in enumerate(cuts):
            members = [(t, slot + i, low, high) for t, slot, (low, high) in zip(pack, slots, seen, strict=True)]
            builder.add_item(seq, members, cut, cut + split, tiles_from)
