"""Attention in plain torch: a slow, obvious oracle and the path that runs everywhere.

The path makes two groups. Sequences with one new token (decodes) are gathered side by side, filled up to the longest
and attended in one call; a longer chunk is attended alone, in tiles of queries. The G queries that share a kv head are
packed as if they were G query positions of that head, so K and V are never repeated:

    q [S, H, D] -> [S, K, G, D]        against k, v [S, K, rows, D]

Over 2,048 rows in bfloat16 on a CPU this is an order of magnitude faster than torch's ``enable_gqa``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from prefixkv.attention.base import AttentionMetadata, AttentionSpec
from prefixkv.kv.storage import KVStorage

__all__ = ["TorchBackend", "oracle_attention"]

_TILE_SCORES = 1 << 22
"""Scores per kv head that one tile of a chunk may hold; bounds the mask and the fp32 scores of the slow path."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that are attended in one call.

    Attributes:
        tokens: [R*n] index of their rows in the packed step.
        num_seqs: R sequences ...
        num_queries: ... with n queries each.
        table: [R, m] their blocks.
        rows: Rows kept of the m * B gathered.
        mask: [R, 1, n, rows] bool, True where a query sees a row; None if all see all.
    """

    tokens: torch.Tensor
    num_seqs: int
    num_queries: int
    table: torch.Tensor
    rows: int
    mask: torch.Tensor | None


class TorchBackend:
    """The backend that is always there."""

    name = "torch"

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None: every shape, window, softcap, sink and format is supported."""
        return None

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
        """Attend as :class:`~prefixkv.attention.base.AttentionBackend` says; changes only ``meta.scratch``."""
        shape = storage.spec.layers[layer]
        heads, kv_heads = q.shape[1], shape.num_kv_heads
        group = heads // kv_heads
        key = (self.name, window)
        tiles = meta.scratch.get(key)
        if tiles is None:
            tiles = meta.scratch[key] = _plan(meta, storage.spec.block_size, group, window, q.device)
        out = q.new_empty(q.shape[0], heads, shape.value_dim)
        for tile in tiles:
            k, v = storage.gather(layer, tile.table)
            k, v = k[:, :, : tile.rows], v[:, :, : tile.rows]
            packed = q.index_select(0, tile.tokens).view(tile.num_seqs, tile.num_queries, kv_heads, group, -1)
            packed = packed.permute(0, 2, 3, 1, 4)  # [R, K, G, n, D]
            packed = packed.reshape(tile.num_seqs, kv_heads, group * tile.num_queries, -1)
            if softcap is None and sinks is None:
                mask = _packed_mask(tile, group, q.dtype, meta, key)
                got = functional.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
            else:
                got = _attend_fp32(packed, k, v, tile, group, scaling, softcap, sinks)
            got = got.view(tile.num_seqs, kv_heads, group, tile.num_queries, -1).permute(0, 3, 1, 2, 4)
            out.index_copy_(0, tile.tokens, got.reshape(-1, heads, shape.value_dim))
        return out


def _plan(
    meta: AttentionMetadata, block_size: int, group: int, window: int | None, device: torch.device
) -> list[_Tile]:
    """Cut a step into tiles: decodes of similar length together, chunks alone."""
    tiles: list[_Tile] = []
    decodes: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for seq, length in enumerate(meta.query_lens):
        if length == 1:
            # By powers of two, so filling up at most doubles what is read.
            decodes.setdefault((len(meta.block_tables_host[seq]) - 1).bit_length(), []).append((seq, start))
        else:
            tiles.extend(_chunk_tiles(meta, seq, start, length, block_size, group, window, device))
        start += length
    for members in decodes.values():
        tiles.append(_decode_tile(meta, members, window, device))
    return tiles


def _decode_tile(
    meta: AttentionMetadata, members: list[tuple[int, int]], window: int | None, device: torch.device
) -> _Tile:
    seqs = [seq for seq, _ in members]
    tokens = [token for _, token in members]
    visible = [meta.visible_host[token] for token in tokens]
    width = max(len(meta.block_tables_host[seq]) for seq in seqs)
    rows = max(visible)
    full = all(length == rows for length in visible)
    windowed = window is not None and any(meta.positions_host[token] >= window for token in tokens)
    index = torch.tensor(tokens, device=device)
    table = meta.block_table.index_select(0, torch.tensor(seqs, device=device))[:, :width]
    mask = None if full and not windowed else _mask(meta, index, rows, window)[:, None, None]
    return _Tile(index, len(seqs), 1, table, rows, mask)


def _chunk_tiles(
    meta: AttentionMetadata,
    seq: int,
    start: int,
    length: int,
    block_size: int,
    group: int,
    window: int | None,
    device: torch.device,
) -> list[_Tile]:
    tiles = []
    step = max(16, _TILE_SCORES // (group * meta.kv_lens[seq]))
    for first in range(start, start + length, step):
        last = min(first + step, start + length)
        rows = max(meta.visible_host[first:last])
        index = torch.arange(first, last, device=device)
        table = meta.block_table[seq : seq + 1, : -(-rows // block_size)]
        tiles.append(_Tile(index, 1, last - first, table, rows, _mask(meta, index, rows, window)[None, None]))
    return tiles


def _mask(meta: AttentionMetadata, index: torch.Tensor, rows: int, window: int | None) -> torch.Tensor:
    """Return [n, rows] bool, True where a query sees a row."""
    row = torch.arange(rows, device=index.device)
    seen = row < meta.visible_tokens.index_select(0, index)[:, None]
    if window is not None:
        seen &= meta.positions.index_select(0, index)[:, None] - row < window
    return seen


def _packed_mask(
    tile: _Tile, group: int, dtype: torch.dtype, meta: AttentionMetadata, key: object
) -> torch.Tensor | None:
    """Return the mask of the packed queries as numbers to add, made once per step and not once per layer."""
    if tile.mask is None:
        return None
    name = (key, "added", id(tile), group, dtype)
    added: torch.Tensor | None = meta.scratch.get(name)
    if added is None:
        added = torch.zeros(tile.mask.shape, dtype=dtype, device=tile.mask.device).masked_fill_(~tile.mask, -torch.inf)
        if tile.num_queries > 1:
            added = added.repeat(1, 1, group, 1)
        meta.scratch[name] = added
    return added


def _attend_fp32(
    packed: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: _Tile,
    group: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend [R, K, G*n, D] with what SDPA does not know: softcap and sinks. Softmax in fp32."""
    scores = (packed @ k.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if tile.mask is not None:
        mask = tile.mask.repeat(1, 1, group, 1) if tile.num_queries > 1 else tile.mask
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        kv_heads = packed.shape[1]
        sink = sinks.float().view(1, kv_heads, group, 1).expand(tile.num_seqs, -1, -1, tile.num_queries)
        sink = sink.reshape(tile.num_seqs, kv_heads, group * tile.num_queries, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def oracle_attention(
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
    """Attend token by token and head by head in fp32, as the definition says; changes nothing. For tests only.

    Returns:
        [T, H, Dv] float32.
    """
    heads = q.shape[1]
    shape = storage.spec.layers[layer]
    out = torch.empty(q.shape[0], heads, shape.value_dim, dtype=torch.float32)
    token = 0
    for seq, length in enumerate(meta.query_lens):
        table = torch.tensor([meta.block_tables_host[seq]], device=storage.device)
        k, v = (rows[0].float().cpu() for rows in storage.gather(layer, table))  # [K, rows, D]
        for _ in range(length):
            position, visible = meta.positions_host[token], meta.visible_host[token]
            seen = [j for j in range(visible) if window is None or position - j < window]
            for head in range(heads):
                kv_head = head // (heads // shape.num_kv_heads)
                scores = k[kv_head, seen] @ q[token, head].float().cpu() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].float().cpu()])
                weights = scores.softmax(0)[: len(seen)]
                out[token, head] = weights @ v[kv_head, seen]
            token += 1
    return out
