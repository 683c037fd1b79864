"""A pool without numbers: a row is the text that its keys and values would be computed from.

Real rows depend on all tokens before them, so here a row *is* all tokens up to its position: any row that reaches the
wrong sequence, the wrong position or the wrong tenant is plainly wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefixkv.cache.keys import ScopeKeys
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.table import BlockOp, CopyRows
from prefixkv.scope import Principal, Scope, ScopeLevel

Row = tuple[int, ...]
Spans = Sequence[tuple[int, ScopeLevel]]

PUBLIC, TENANT, USER, SESSION, REQUEST = ScopeLevel
CHAT = ((0, TENANT), (6, SESSION))
"""A system prompt of six tokens, then a conversation: with blocks of four, the border is inside the second block."""

FOREIGN = -1
"""The token of a row that was computed from a row that is not there."""


class FakeStorage:
    """Carries out what the manager asks for. None is a row of zeros."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[Row | None]] = [[None] * block_size for _ in range(num_blocks)]

    def carry_out(self, ops: Iterable[BlockOp]) -> None:
        for op in ops:
            if isinstance(op, CopyRows):
                rows = self.blocks[op.source][: op.rows]
                self.blocks[op.target] = [*rows, *[None] * (self.block_size - len(rows))]
            else:
                for block_id in op.block_ids:
                    self.blocks[block_id] = [None] * self.block_size

    def read(self, block_table: Sequence[int], num_tokens: int) -> list[Row | None]:
        rows = [row for block_id in block_table[: -(-num_tokens // self.block_size)] for row in self.blocks[block_id]]
        return rows[:num_tokens]

    def compute(self, block_table: Sequence[int], start: int, token_ids: Iterable[int]) -> None:
        """Write new rows, each made from the row before it, as attention would."""
        before = self.read(block_table, start)[-1] if start else ()
        for position, token in enumerate(token_ids, start):
            before = (*((FOREIGN,) if before is None else before), token)
            self.blocks[block_table[position // self.block_size]][position % self.block_size] = before

    def is_zero(self, block_id: int) -> bool:
        return all(row is None for row in self.blocks[block_id])


def prefixes(token_ids: Sequence[int]) -> list[Row]:
    """What the rows of these tokens must be."""
    return [tuple(token_ids[: end + 1]) for end in range(len(token_ids))]


class Pool:
    """A manager and a fake storage, and a sequence's life in one line each."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        ceiling: Callable[[str], int | None] = lambda tenant: None,
        make: type[KVCacheManager] = KVCacheManager,
        **options: Any,
    ) -> None:
        keys = ScopeKeys(b"a secret of a test", b"a model")
        self.manager = make(num_blocks, block_size, keys, weight=weight, ceiling=ceiling, **options)
        self.storage = FakeStorage(num_blocks, block_size)
        self._next_seq = 1000

    def open(self, token_ids: Sequence[int], scopes: ScopeMap, num_tokens: int | None = None) -> tuple[int, int] | None:
        """Return a new sequence and how many of its tokens were cached, or None if there is no room."""
        manager = self.manager
        seq_id, self._next_seq = self._next_seq, self._next_seq + 1
        match = manager.match(token_ids, scopes)
        cached = manager.open(seq_id, match, scopes, len(token_ids) if num_tokens is None else num_tokens)
        self.carry_out()
        return None if cached is None else (seq_id, cached)

    def compute(self, seq_id: int, token_ids: Sequence[int], start: int, end: int, *, tail: bool = False) -> None:
        """Write rows and commit them."""
        self.storage.compute(self.manager.block_table(seq_id), start, token_ids[start:end])
        self.manager.commit(seq_id, token_ids, end, tail=tail)
        self.carry_out()

    def close(self, seq_id: int, token_ids: Sequence[int], num_computed: int, *, keep: bool = True) -> None:
        self.manager.close(seq_id, token_ids, num_computed, keep=keep)
        self.carry_out()

    def start(self, token_ids: Sequence[int], scopes: ScopeMap, room: int = 0) -> int:
        """Open a sequence with room for more tokens, compute its prompt, leave it open."""
        opened = self.open(token_ids, scopes, len(token_ids) + room)
        assert opened is not None, "the test's pool is too small"
        seq_id, cached = opened
        self.compute(seq_id, token_ids, cached, len(token_ids), tail=True)
        return seq_id

    def remember(self, token_ids: Sequence[int], scopes: ScopeMap) -> int:
        """Let a prompt run to its end; return how many of its tokens were cached."""
        cached = self.num_cached(token_ids, scopes)
        self.close(self.start(token_ids, scopes), token_ids, len(token_ids))
        return cached

    def publish(self, token_ids: Sequence[int], tenant: str | None = None) -> int:
        """Compute, pin, and return the pin."""
        scopes = ScopeMap.for_publication(tenant)
        seq_id = self.start(token_ids, scopes)
        self.close(seq_id, token_ids, len(token_ids))
        pin = self.manager.pin(token_ids, scopes)
        self.carry_out()
        return pin

    def num_cached(self, token_ids: Sequence[int], scopes: ScopeMap) -> int:
        return self.manager.match(token_ids, scopes).num_tokens

    def carry_out(self) -> None:
        self.storage.carry_out(self.manager.take_ops())

    def check(self) -> None:
        """Every promise that can be seen without knowing what was done."""
        self.manager.check()
        for block_id in range(self.manager.pool.num_blocks):
            if self.manager.pool.is_free(block_id):
                assert self.storage.is_zero(block_id), f"free block {block_id} is not cleared"
        for node in self.manager.index:
            text = [token for link in node.chain() for token in link.tokens]
            start = node.depth * self.manager.block_size
            rows = self.storage.blocks[node.block_id][: len(node.tokens)]
            assert rows == prefixes(text)[start:], f"block {node.block_id} does not hold what the index says"


def scopes_of(
    tenant: str, user: str | None = "u", session: str | None = "s", spans: Spans = ((0, SESSION),)
) -> ScopeMap:
    return ScopeMap.for_principal(Principal(tenant, user, session), spans)


def everywhere(manager: KVCacheManager, scope: Scope) -> list[int]:
    """Return the blocks that are indexed in a scope."""
    return [node.block_id for node in manager.index if node.scope == scope]


def text(length: int, seed: int = 0) -> list[int]:
    """Distinct tokens; another seed gives other ones."""
    return [seed * 1000 + n for n in range(length)]
