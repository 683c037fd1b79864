"""A manager that is watched, and the plain sets and lists that remember what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from prefixkv.cache.keys import ScopeKeys
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.pool import BlockPool
from prefixkv.cache.retire import purge
from prefixkv.cache.scopes import ScopeMap
from prefixkv.scope import Scope
from tests.cache.fakes import REQUEST, Row


class Oracle:
    """Every text that was committed, by scope; found again by looking at all of them.

    Attributes:
        known: Scope to each text whose last row was committed in it.
        texts: Each committed text with its scopes, for counting what must be found.
        is_lossless: Whether every committed row must still be there: nothing was evicted, refused or left out.
    """

    def __init__(self) -> None:
        self.known: dict[Scope, set[Row]] = {}
        self.texts: dict[tuple[Row, ScopeMap], None] = {}
        self.is_lossless = True

    def commit(self, token_ids: Sequence[int], scopes: ScopeMap, num_tokens: int) -> None:
        text = tuple(token_ids[:num_tokens])
        if not text or (text, scopes) in self.texts:
            return
        self.texts[text, scopes] = None
        for end in range(1, num_tokens + 1):
            scope = scopes.scope_at(end - 1)
            if scope.level is not REQUEST:
                self.known.setdefault(scope, set()).add(text[:end])

    def purge(self, tenant: str | None, user: str | None, session: str | None) -> None:
        self.known = {scope: texts for scope, texts in self.known.items() if not scope.is_within(tenant, user, session)}
        left: dict[tuple[Row, ScopeMap], None] = {}
        for text, scopes in self.texts:
            gone = [p for p in range(len(text)) if scopes.scope_at(p).is_within(tenant, user, session)]
            left[text[: gone[0]] if gone else text, scopes] = None
        self.texts = left

    def was_committed(self, text: Row, scopes: ScopeMap) -> bool:
        """Whether a reader may find exactly this text."""
        return any(text in self.known.get(scope, ()) for scope in scopes.reach)

    def must_find(self, token_ids: Sequence[int], scopes: ScopeMap, limit: int) -> int:
        """How many tokens a reader finds at least, if nothing was lost.

        An earlier text counts as far as it is equal, readable, and nowhere narrower than what the reader wants to
        store: blocks of a narrow scope are no parents for blocks of a wide one.
        """
        readable = set(scopes.reach)
        best = 0
        for text, theirs in self.texts:
            found = 0
            for mine, other in zip(token_ids[:limit], text, strict=False):
                scope = theirs.scope_at(found)
                if mine != other or scope not in readable or scope.level > scopes.scope_at(found).level:
                    break
                found += 1
            best = max(best, found)
        return best


class FlakyPool(BlockPool):
    """A pool that can be told to have nothing to give, and remembers how low it ran."""

    def __init__(self, num_blocks: int, oracle: Oracle) -> None:
        super().__init__(num_blocks)
        self.oracle = oracle
        self.fail_in: int | None = None

    def allocate(self, owner: str | None) -> int | None:
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                self.oracle.is_lossless = False
                return None
        block_id = super().allocate(owner)
        if not self.num_free:
            self.oracle.is_lossless = False
        return block_id


class WatchedManager(KVCacheManager):
    """Tells the oracle what is committed and purged, and checks every match against it."""

    def __init__(self, num_blocks: int, block_size: int, keys: ScopeKeys, **options: object) -> None:
        super().__init__(num_blocks, block_size, keys, **options)  # type: ignore[arg-type]
        self.oracle = Oracle()
        self.pool: FlakyPool = FlakyPool(num_blocks, self.oracle)
        self.shares._pool = self.pool
        self.floors: dict[str, int] = dict(self.shares._floors())
        # Room that is kept for others makes blocks go before the pool is full.
        self.oracle.is_lossless = not self.floors
        self.pinned: dict[int, tuple[Row, ScopeMap, int]] = {}

    def match(self, token_ids, scopes, limit=None):  # type: ignore[no-untyped-def]
        match = super().match(token_ids, scopes, limit)
        limit = len(token_ids) - 1 if limit is None else limit
        found = tuple(token_ids[: match.num_tokens])
        assert match.num_tokens <= max(0, limit)
        assert not found or self.oracle.was_committed(found, scopes), "a match that nobody who may share it committed"
        nodes = [*match.nodes, match.partial] if match.partial else list(match.nodes)
        assert all(node.scope in scopes.reach for node in nodes), "a match in a scope that the reader is not in"
        assert match.num_tokens == len(match.nodes) * self.block_size + match.partial_rows
        text = [token for node in nodes for token in node.tokens]
        assert tuple(text[: match.num_tokens]) == found
        if self.oracle.is_lossless:
            least = self.oracle.must_find(token_ids, scopes, limit)
            assert match.num_tokens >= least, f"found {match.num_tokens} tokens of {least} that were committed"
        return match

    def commit(self, seq_id, token_ids, num_computed, *, tail=False):  # type: ignore[no-untyped-def]
        super().commit(seq_id, token_ids, num_computed, tail=tail)
        whole = num_computed if tail else num_computed // self.block_size * self.block_size
        self.oracle.commit(token_ids, self.sequences[seq_id].scopes, whole)

    def pin(self, token_ids, scopes):  # type: ignore[no-untyped-def]
        length = self.match(token_ids, scopes, len(token_ids)).num_tokens
        pin = super().pin(token_ids, scopes)
        self.pinned[pin] = (tuple(token_ids), scopes, length)
        return pin

    def purge(self, tenant, user, session):  # type: ignore[no-untyped-def]
        self.oracle.purge(tenant, user, session)
        receipt = purge(self, tenant, user, session)
        assert not [node for node in self.index if node.scope and node.scope.is_within(tenant, user, session)]
        return receipt

    def evict(self, tenant: str | None, by: str | None) -> bool:
        owned = self.pool.owned_blocks.get(tenant, 0)
        went = super().evict(tenant, by)
        assert not went or tenant == by or tenant is None or owned > self.floors.get(tenant, 0), "another's floor"
        return went

    def check(self) -> None:
        """What is always true, and also that pinned text can still be found."""
        super().check()
        partitions = self.shares._partitions()
        waiting = sum(max(0, size - self.pool.owned_blocks.get(tenant, 0)) for tenant, size in partitions.items())
        assert self.pool.num_free >= waiting, "what waits for a partition was lent"
        assert all(self.pool.owned_blocks.get(tenant, 0) <= size for tenant, size in partitions.items())
        if self.num_evicted:
            self.oracle.is_lossless = False
        for node in self.index:
            text = tuple(token for link in node.chain() for token in link.tokens)
            assert node.scope and text in self.oracle.known[node.scope], (
                "indexed in a scope that it was not committed in"
            )
        for pin, (text, scopes, length) in self.pinned.items():
            if pin in self.pins:
                assert self.match(text, scopes, len(text)).num_tokens >= length, "pinned text is gone"
        assert all(self.pool.references(node.block_id) for nodes in self.pins.values() for node in nodes)
