"""Block ids and who counts on them. Knows nothing of tokens, scopes or tensors."""

from __future__ import annotations

import logging

from prefixkv.errors import IntegrityError

__all__ = ["BlockPool"]

logger = logging.getLogger("prefixkv.cache.pool")


class BlockPool:
    """Hands out block ids and counts references to them.

    A block is *free* (on the free list), *in use* (referenced), or *idle* (unreferenced but kept for reuse).
    The pool knows free and referenced; the manager knows which unreferenced blocks it keeps.

    Attributes:
        owned_blocks: Tenants (None is public text) to the blocks that count against them.
        changed: Those whose number changed since somebody cleared it, in order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_blocks
        self._references = [0] * num_blocks
        self._owners: dict[int, str | None] = {}
        self.owned_blocks: dict[str | None, int] = {}
        self.changed: dict[str | None, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    def allocate(self, owner: str | None) -> int | None:
        """Take a free block with one reference, or return None when there is none."""
        if not self._free:
            return None
        block_id = self._free.pop()
        self._is_free[block_id] = 0
        self._references[block_id] = 1
        self._owners[block_id] = owner
        self.owned_blocks[owner] = self.owned_blocks.get(owner, 0) + 1
        self.changed[owner] = None
        logger.debug("allocate block=%d owner=%s free=%d", block_id, owner, len(self._free))
        return block_id

    def acquire(self, block_id: int) -> bool:
        """Add a reference; return whether the block was idle before."""
        self._refuse_free(block_id)
        self._references[block_id] += 1
        return self._references[block_id] == 1

    def drop(self, block_id: int) -> bool:
        """Remove a reference; return whether it was the last one."""
        self._refuse_free(block_id)
        if self._references[block_id] == 0:
            raise IntegrityError(f"block {block_id} has no reference to drop")
        self._references[block_id] -= 1
        return self._references[block_id] == 0

    def release(self, block_id: int) -> None:
        """Put an unreferenced block back on the free list."""
        self._refuse_free(block_id)
        if self._references[block_id]:
            raise IntegrityError(f"block {block_id} is released with {self._references[block_id]} references")
        owner = self._owners.pop(block_id)
        self.owned_blocks[owner] -= 1
        self.changed[owner] = None
        if not self.owned_blocks[owner]:
            del self.owned_blocks[owner], self.changed[owner]  # who has none is ranked nowhere
        self._is_free[block_id] = 1
        self._free.append(block_id)
        logger.debug("release block=%d owner=%s free=%d", block_id, owner, len(self._free))

    def references(self, block_id: int) -> int:
        """Return how many block tables and pins count on a block."""
        return self._references[block_id]

    def owner(self, block_id: int) -> str | None:
        """Return the tenant that a block in use or idle counts against."""
        return self._owners[block_id]

    def is_free(self, block_id: int) -> bool:
        """Return whether a block is on the free list."""
        return bool(self._is_free[block_id])

    def check(self) -> None:
        """Raise unless the pool agrees with itself."""
        if len(set(self._free)) != len(self._free) or sum(self._is_free) != len(self._free):
            raise IntegrityError("the free list holds a block twice")
        for block_id in self._free:
            if not self._is_free[block_id] or self._references[block_id] or block_id in self._owners:
                raise IntegrityError(f"block {block_id} is on the free list and in use")
        counted: dict[str | None, int] = {}
        for owner in self._owners.values():
            counted[owner] = counted.get(owner, 0) + 1
        if counted != self.owned_blocks or len(self._owners) + len(self._free) != self.num_blocks:
            raise IntegrityError("the tenants' shares do not add up to the pool")

    def _refuse_free(self, block_id: int) -> None:
        if self._is_free[block_id]:
            raise IntegrityError(f"block {block_id} is used after it was freed")
