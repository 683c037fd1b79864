"""What is gone: enough to tell a principal that its own rows were evicted, expired or purged, and nothing to others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from prefixkv.cache.index import Node
from prefixkv.cache.keys import BlockKey, ScopeKey, block_key
from prefixkv.cache.table import PrefixMatch

__all__ = ["Ghosts", "GhostsByPart"]

_MOST_SCOPES = 4096


class Ghosts:
    """Keys of blocks that were evicted or expired lately, and of scopes that were purged and have stored nothing since.

    A key is a hash under a scope key: who cannot make the scope key finds nothing here. Of what was purged not even
    keys are kept, only that something was.

    Args:
        most_blocks: Blocks that are remembered.
        block_size: Tokens per block.
    """

    def __init__(self, most_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[BlockKey, str] = OrderedDict()
        self._scopes: OrderedDict[ScopeKey, None] = OrderedDict()

    def evicted(self, node: Node) -> None:
        """Note that a block is about to be destroyed because others needed room."""
        self._note(node, "evicted")

    def expired(self, node: Node) -> None:
        """Note that a block is about to be destroyed because its time is over."""
        self._note(node, "expired")

    def purged(self, scope_key: ScopeKey) -> None:
        """Note the new key of a scope whose blocks were destroyed on demand."""
        self._scopes[scope_key] = None
        if len(self._scopes) > _MOST_SCOPES:
            self._scopes.popitem(last=False)

    def stored(self, scope_key: ScopeKey) -> None:
        """Note that a scope has blocks again."""
        self._scopes.pop(scope_key, None)

    def why(
        self,
        match: PrefixMatch,
        token_ids: Sequence[int],
        scope_key: ScopeKey,
        reach: Iterable[ScopeKey],
        root: Node,
    ) -> str | None:
        """Return ``evicted``, ``expired`` or ``purged`` if that is why a match ends, else None. Does not mutate.

        Args:
            match: What matched.
            token_ids: The whole prompt.
            scope_key: Of the scope that the first token behind the match belongs to.
            reach: Keys of all scopes that the principal may read.
            root: The index's.
        """
        if match.num_tokens >= len(token_ids) - 1:
            return None
        start = match.num_tokens - match.partial_rows
        parent = match.nodes[-1] if match.nodes else root
        if self._blocks:
            # A block that was not yet full may have held less than a whole one, but more than what matches.
            block = token_ids[start : start + self._block_size]
            beginnings = [block[:size] for size in range(len(block), match.partial_rows, -1)]
            keys = (block_key(key, parent.uid, part) for key in reach for part in beginnings)
            reason = next((self._blocks[key] for key in keys if key in self._blocks), None)
            if reason is not None:
                return reason
        return "purged" if scope_key in self._scopes and not match.diverged else None

    def _note(self, node: Node, reason: str) -> None:
        self._blocks[node.key] = reason
        self._blocks.move_to_end(node.key)
        if len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)


class GhostsByPart:
    """What is gone of each partition and of the part that all others share, so that nobody can make a partition forget.

    Of each part four times as many blocks are remembered as it has.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        partitions: Returns the tenants that have blocks of their own, and how many.
    """

    def __init__(self, num_blocks: int, block_size: int, partitions: Callable[[], Mapping[str, int]]) -> None:
        self._block_size, self._partitions = block_size, partitions
        self._shared = Ghosts(4 * num_blocks, block_size)
        self._parts: dict[str, Ghosts] = {}

    def of(self, tenant: str | None) -> Ghosts:
        """Return what is gone of the part that a tenant's blocks belong to; None is public text."""
        partitions = self._partitions()
        if tenant is None or tenant not in partitions:
            return self._shared
        if tenant not in self._parts:
            self._parts = {name: ghosts for name, ghosts in self._parts.items() if name in partitions}
            self._parts[tenant] = Ghosts(4 * partitions[tenant], self._block_size)
        return self._parts[tenant]

    def why(
        self,
        match: PrefixMatch,
        token_ids: Sequence[int],
        scope_key: ScopeKey,
        reach: Collection[ScopeKey],
        root: Node,
        tenant: str | None,
    ) -> str | None:
        """Ask the part of a tenant, and the one that all share: see :meth:`Ghosts.why`."""
        own = self.of(tenant)
        told = own.why(match, token_ids, scope_key, reach, root)
        return told if told or own is self._shared else self._shared.why(match, token_ids, scope_key, reach, root)
