"""The owner of block ids and of the index: match, open, reserve, commit, close, pin.

Only the engine thread calls it. It never touches a tensor: what must happen to rows is handed out by
:meth:`KVCacheManager.take_ops`, in an order that must be kept, before the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prefixkv.cache.audit import check_manager
from prefixkv.cache.eviction import LRUEviction
from prefixkv.cache.expiry import Expiry
from prefixkv.cache.ghosts import GhostsByPart
from prefixkv.cache.index import BlockIndex, Node
from prefixkv.cache.keys import ScopeKey, ScopeKeys
from prefixkv.cache.pool import BlockPool
from prefixkv.cache.retire import evict
from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.shares import Shares, no_floors
from prefixkv.cache.table import BlockOp, CopyRows, PrefixMatch, SequenceBlocks, ZeroBlocks, merged
from prefixkv.errors import IntegrityError
from prefixkv.lifetime import Lifetime
from prefixkv.scope import Scope, ScopeLevel

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Decides which block holds what.

    Invariants (see :meth:`check`): free + idle + in use == total; reference counts == table entries + pins; index and
    blocks are a bijection; every indexed block's parent is indexed; no block is reachable from outside its scope;
    a free block holds zeros once :meth:`take_ops` has been carried out.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        keys: Maker of scope keys.
        weight: A tenant's share of the pool relative to others'.
        ceiling: Most blocks a tenant may hold, or None.
        floors: Returns how many blocks nobody can take from a tenant, partitions included.
        partitions: Returns the floors that are not lent.
        lifetime: Of the blocks of a scope.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        keys: ScopeKeys,
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        ceiling: Callable[[str], int | None] = lambda tenant: None,
        floors: Callable[[], Mapping[str, int]] = no_floors,
        partitions: Callable[[], Mapping[str, int]] = no_floors,
        lifetime: Callable[[Scope], Lifetime] = lambda scope: (None, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = BlockIndex(block_size)
        self.idle = LRUEviction()
        self.shares = Shares(self.pool, self.idle, weight=weight, ceiling=ceiling, floors=floors, partitions=partitions)
        self.expiry = Expiry(lifetime, clock)
        self.keys = keys
        self.ghosts = GhostsByPart(num_blocks, block_size, partitions)
        self.num_evicted = 0
        self.pins: dict[int, tuple[Node, ...]] = {}
        self.sequences: dict[int, SequenceBlocks] = {}
        self._ops: list[BlockOp] = []
        self._next_pin = 1

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], scopes: ScopeMap, limit: int | None = None) -> PrefixMatch:
        """Find the longest reusable prefix, token by token. Does not mutate.

        Args:
            token_ids: The whole prompt.
            scopes: Its scopes.
            limit: Most tokens to match; by default all but the last, which is always computed.
        """
        limit = len(token_ids) - 1 if limit is None else limit
        size, reach = self.block_size, self._reach(scopes)
        # The same text may stand in several readable scopes (sent first, published later): follow all of its chains.
        ends = [self.index.root]
        while (end := (ends[0].depth + 2) * size) <= limit:
            level, tokens = scopes.scope_at(end - 1).level, tuple(token_ids[end - size : end])
            longer = [node for parent in ends for node in self._find(reach, level, parent, tokens)]
            if not longer:
                break
            ends = longer
        start = (ends[0].depth + 1) * size
        rest = tuple(token_ids[start : min(limit, start + size)])
        overlaps = [(parent, *self.index.longest_overlap(reach, parent, rest)) for parent in ends]
        parent, partial, rows = max(overlaps, key=lambda overlap: (overlap[2], overlap[1] is not None))
        diverged = partial is not None and rows < len(rest) and rows < len(partial.tokens)
        return PrefixMatch(tuple(parent.chain()), partial if rows else None, rows, start + rows, diverged)

    def why_missing(self, token_ids: Sequence[int], scopes: ScopeMap, match: PrefixMatch) -> str | None:
        """Return ``evicted``, ``expired`` or ``purged`` if a match ends since rows of its own principal are gone."""
        next_key = self.keys.key(scopes.scope_at(min(match.num_tokens, len(token_ids) - 1)))
        return self.ghosts.why(match, token_ids, next_key, self._reach(scopes), self.index.root, scopes.tenant)

    def shareable_prefix(self, seq_id: int, scopes: ScopeMap) -> int:
        """Return how many leading positions of an open sequence a reader with ``scopes`` will be able to reuse."""
        return self.sequences[seq_id].scopes.readable_prefix(scopes)

    def block_table(self, seq_id: int) -> list[int]:
        """Return a sequence's block ids in order of position.

        Raises:
            IntegrityError: If a block of another scope got into the table.
        """
        blocks = self.sequences[seq_id]
        for node in blocks.nodes:
            if node.scope_key not in blocks.reach:
                raise IntegrityError(f"sequence {seq_id} holds block {node.block_id} of a scope it may not read")
        return blocks.block_table

    def num_available(self, tenant: str | None, keep: Iterable[Node] = ()) -> int:
        """Return how many blocks ``tenant`` could allocate now, evicting idle ones except those in ``keep``."""
        return self.shares.available(tenant, keep)

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def open(self, seq_id: int, match: PrefixMatch, scopes: ScopeMap, num_tokens: int) -> int | None:
        """Give a sequence its matched prefix and room for ``num_tokens`` tokens. All or nothing.

        Returns:
            Tokens whose rows it now has, at most ``match.num_tokens``; or None when there is no room, and then
            nothing has changed.
        """
        needed = self.blocks_for(num_tokens) - len(match.nodes)
        partial = match.partial
        keep = [*match.nodes, partial] if partial else match.nodes
        if self.num_available(scopes.tenant, keep) < needed:
            # In the smallest pools the block to copy from may have to make room.
            partial = None
            if self.num_available(scopes.tenant, match.nodes) < needed:
                return None
        blocks = SequenceBlocks(scopes, self._reach(scopes))
        self.sequences[seq_id] = blocks
        for node in match.nodes:
            self._acquire(node)
            blocks.nodes.append(node)
            blocks.block_table.append(node.block_id)
        if partial:
            self._acquire(partial)
        reserved = self.reserve(seq_id, num_tokens)
        cached = len(match.nodes) * self.block_size
        if partial:
            if reserved:
                target = blocks.block_table[len(match.nodes)]
                self._ops.append(CopyRows(partial.block_id, target, match.partial_rows))
                cached += match.partial_rows
            self._drop(partial.block_id)
        if not reserved:
            self.close(seq_id, (), 0, keep=False)
            return None
        blocks.inherited = len(match.nodes)
        return cached

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Extend a block table until it can hold ``num_tokens`` tokens. All or nothing; evicts idle blocks."""
        blocks, tenant = self.sequences[seq_id], self.sequences[seq_id].scopes.tenant
        needed = self.blocks_for(num_tokens) - len(blocks.block_table)
        if needed <= 0:
            return True
        if self.num_available(tenant) < needed:
            return False
        new: list[int] = []
        for _ in range(needed):
            block_id = self._allocate(tenant)
            if block_id is None:
                for taken in new:
                    self._drop(taken)
                return False
            new.append(block_id)
        blocks.block_table.extend(new)
        return True

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int, *, tail: bool = False) -> None:
        """Make rows reusable under their scope, as far as they are written.

        Args:
            seq_id: The sequence.
            token_ids: Its tokens, at least ``num_computed``.
            num_computed: Positions whose rows are written.
            tail: Also index the last, not yet full block (at the end of a prompt and of a reply).
        """
        blocks, size = self.sequences[seq_id], self.block_size
        inherited, blocks.inherited = blocks.inherited, 0
        for place in {
            change // size for change in blocks.scopes.starts if change % size and change // size < inherited
        }:
            # A block of its session that it brings as its tenant's, in part: others may have that part now.
            node = blocks.nodes[place]
            self._publish_wider_parts(blocks, place, node.parent or self.index.root, node.tokens)
        while not blocks.sealed and (len(blocks.nodes) + 1) * size <= num_computed:
            start = len(blocks.nodes) * size
            self._commit_block(blocks, tuple(token_ids[start : start + size]))
        rows = num_computed - len(blocks.nodes) * size
        if tail and not blocks.sealed and rows > 0:
            self._commit_tail(blocks, tuple(token_ids[num_computed - rows : num_computed]))

    def close(self, seq_id: int, token_ids: Sequence[int], num_computed: int, *, keep: bool = True) -> None:
        """End a sequence: commit what it computed (unless ``keep`` is false) and return all its references.

        Blocks that are indexed fall idle, tail first; the others are freed.
        """
        if keep:
            self.commit(seq_id, token_ids, num_computed, tail=True)
        blocks = self.sequences.pop(seq_id)
        for block_id in reversed(blocks.block_table):
            self._drop(block_id)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, token_ids: Sequence[int], scopes: ScopeMap) -> int:
        """Keep the committed blocks of these tokens until :meth:`unpin`; return the pin's id."""
        match, last = self.match(token_ids, scopes, limit=len(token_ids)), scopes.scope_at(len(token_ids) - 1)
        nodes = [*match.nodes, *([match.partial] if match.partial else ())]
        for node in nodes:
            self._acquire(node)
        if match.partial and match.partial.scope == last:
            nodes[-1] = self._without_more(last, match.partial, match.partial_rows)
        pin, self._next_pin = self._next_pin, self._next_pin + 1
        self.pins[pin] = tuple(nodes)
        return pin

    def _without_more(self, scope: Scope, node: Node, rows: int) -> Node:
        """Return, in place of a block that is held, one of its first rows and no more, now and later.

        What is published stays, and what a user wrote behind it must not. Only in a full pool the block itself stays.
        """
        growing = {blocks.tail for blocks in self.sequences.values()}
        parent, tokens = node.parent or self.index.root, node.tokens[:rows]
        exact = (node, self.index.find(node.scope_key, parent, tokens))
        own = next((other for other in exact if other and other.tokens == tokens and other not in growing), None)
        own = own or self._copy(scope, parent, tokens, node.block_id) or node
        self._acquire(own)
        self._drop(node.block_id)
        return own

    def unpin(self, pin: int) -> None:
        """Let pinned blocks fall idle."""
        for node in reversed(self.pins.pop(pin)):
            self._drop(node.block_id)
            self.expiry.unpinned(node)

    def pinned_nodes(self) -> set[Node]:
        """Return the blocks that pins hold."""
        return {node for nodes in self.pins.values() for node in nodes}

    def take_ops(self) -> list[BlockOp]:
        """Hand out the row work noted since the last call; it must be done in order, before the next forward."""
        ops, self._ops = self._ops, []
        return merged(ops)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Raise ``IntegrityError`` unless every invariant holds. Does not mutate."""
        check_manager(self)

    def _reach(self, scopes: ScopeMap) -> dict[ScopeKey, ScopeLevel]:
        return {self.keys.key(scope): scope.level for scope in scopes.reach}

    def _find(
        self, reach: dict[ScopeKey, ScopeLevel], level: ScopeLevel, parent: Node, tokens: tuple[int, ...]
    ) -> Iterator[Node]:
        """Look in the readable scopes not narrower than ``level``, widest first; so no chain ever widens."""
        for scope_key, own in reach.items():
            if own <= level and scope_key in parent.children:
                node = self.index.find(scope_key, parent, tokens)
                if node is not None:
                    yield node

    def _commit_block(self, blocks: SequenceBlocks, tokens: tuple[int, ...]) -> None:
        place = len(blocks.nodes)
        parent = blocks.nodes[-1] if place else self.index.root
        scope = self._publish_wider_parts(blocks, place, parent, tokens)
        if scope.level is ScopeLevel.REQUEST:
            blocks.sealed = True
            return
        tail, blocks.tail = blocks.tail, None
        node = next(self._find(blocks.reach, scope.level, parent, tokens), None)
        block_id = blocks.block_table[place]
        if node is not None:
            # Somebody else committed the same block meanwhile: use theirs and give ours back.
            self._acquire(node)
            blocks.block_table[place] = node.block_id
            if tail and self.pool.references(block_id) == 1:
                self.index.remove(tail)  # only ours; a pinned one stays
            self._drop(block_id)
        elif tail:
            self.index.extend(tail, tokens)
            node = tail
        else:
            node = self._insert(scope, parent, tokens, block_id)
        blocks.nodes.append(node)

    def _commit_tail(self, blocks: SequenceBlocks, tokens: tuple[int, ...]) -> None:
        place = len(blocks.nodes)
        parent = blocks.nodes[-1] if place else self.index.root
        scope = self._publish_wider_parts(blocks, place, parent, tokens)
        # Where the scope narrows further on in this block, our rows are copied: narrower ones will follow them here.
        if scope.level is ScopeLevel.REQUEST or scope != blocks.scopes.scope_at((place + 1) * self.block_size - 1):
            return
        if blocks.tail:
            self.index.extend(blocks.tail, tokens)
            return
        wide_enough = [key for key, level in blocks.reach.items() if level <= scope.level]
        if self.index.longest_overlap(wide_enough, parent, tokens)[1] < len(tokens):
            blocks.tail = self._insert(scope, parent, tokens, blocks.block_table[place])

    def _publish_wider_parts(self, blocks: SequenceBlocks, place: int, parent: Node, tokens: tuple[int, ...]) -> Scope:
        """Where the scope narrows inside a block, copy the rows before it to a partial block of the wider scope.

        The sequence keeps its own block, so a full pool only means that the copy is not made.

        Returns:
            The scope of the last token.
        """
        start = place * self.block_size
        end = start + len(tokens)
        narrows = blocks.scopes.scope_at(end - 1) != blocks.scopes.scope_at(start + self.block_size - 1)
        for change in [*blocks.scopes.changes_within(start, end), *([end] if narrows else [])]:
            rows = change - start
            scope = blocks.scopes.scope_at(change - 1)
            keys = [key for key, level in blocks.reach.items() if level <= scope.level]
            if self.index.longest_overlap(keys, parent, tokens[:rows])[1] == rows:
                continue
            if self._copy(scope, parent, tokens[:rows], blocks.block_table[place]) is None:
                break
        return blocks.scopes.scope_at(end - 1)

    def _copy(self, scope: Scope, parent: Node, tokens: tuple[int, ...], source: int) -> Node | None:
        """Store the first rows of a block in another one, which falls idle; None if there is no room for it."""
        if not self.num_available(scope.tenant) or (block_id := self._allocate(scope.tenant)) is None:
            return None
        self._ops.append(CopyRows(source, block_id, len(tokens)))
        node = self._insert(scope, parent, tokens, block_id)
        self._drop(block_id)
        return node

    def _insert(self, scope: Scope, parent: Node, tokens: tuple[int, ...], block_id: int) -> Node:
        key = self.keys.key(scope)
        self.ghosts.of(scope.tenant).stored(key)
        node = self.index.insert(scope, key, parent, tokens, block_id)
        self.expiry.added(node)
        return node

    def _allocate(self, tenant: str | None) -> int | None:
        # More than once where the ceiling was lowered meanwhile.
        while self.shares.is_at_ceiling(tenant) and self.evict(tenant, by=tenant):
            pass
        # And where a partition was made meanwhile: what it lacks is freed first.
        while not self.shares.free_for(tenant) and self.evict(self.shares.victim(tenant), by=tenant):
            pass
        return self.pool.allocate(tenant) if self.shares.free_for(tenant) else None

    def evict(self, tenant: str | None, by: str | None) -> bool:
        """Destroy the idle block of a tenant that goes first, for ``by``, and count it; False if there is none."""
        gone = evict(self, tenant)
        for owner in gone:
            self.shares.note_eviction(by, owner)
        self.num_evicted += len(gone)
        return bool(gone)

    def destroy(self, node: Node) -> None:
        """Free an idle block that nothing stands on."""
        self.idle.remove(node)
        self.index.remove(node)
        self._free(node.block_id)

    def _acquire(self, node: Node) -> None:
        self.expiry.used(node)
        if self.pool.acquire(node.block_id):
            self.idle.remove(node)

    def _drop(self, block_id: int) -> None:
        if self.pool.drop(block_id):
            node = self.index.node_of(block_id)
            if node is None:
                self._free(block_id)
            else:
                self.expiry.used(node)
                self.idle.add(node)

    def _free(self, block_id: int) -> None:
        self.pool.release(block_id)
        self._ops.append(ZeroBlocks((block_id,)))
