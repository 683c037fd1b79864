"""Who may hold how much of the pool: floors protect, what they do not use is lent, ceilings bind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from prefixkv.cache.eviction import LRUEviction
from prefixkv.cache.index import Node
from prefixkv.cache.pool import BlockPool
from prefixkv.cache.ranking import Ranking

__all__ = ["Shares", "no_floors"]

_MOST_PAIRS = 10_000
_NONE: Mapping[str, int] = MappingProxyType({})


def no_floors() -> Mapping[str, int]:
    """Return the floors where nobody has one."""
    return _NONE


class Shares:
    """Counts what a tenant could have, and names the tenant whose block goes. Changes neither pool nor index.

    A floor is what nobody can take from a tenant; while the tenant needs less, others borrow it, and lose it first.
    A partition is a floor whose rest is not lent.

    Args:
        pool: Who holds what.
        idle: What could be evicted.
        weight: A tenant's share relative to others'.
        ceiling: Most blocks a tenant may hold, or None.
        floors: Returns the floor of each tenant that has one, in blocks, partitions included; the same object until
            other policies are in force.
        partitions: Returns those of them that are not lent.

    Attributes:
        evictions: (who needed room, whose block went) to how many; None is public text.
    """

    def __init__(
        self,
        pool: BlockPool,
        idle: LRUEviction,
        *,
        weight: Callable[[str], float],
        ceiling: Callable[[str], int | None],
        floors: Callable[[], Mapping[str, int]],
        partitions: Callable[[], Mapping[str, int]],
    ) -> None:
        self._pool, self._idle = pool, idle
        self._weight, self._ceiling = weight, ceiling
        self._floors, self._partitions = floors, partitions
        self._ranking = Ranking(pool, idle, self._over)
        self._ranked_by: Mapping[str, int] | None = None
        self.evictions: Counter[tuple[str | None, str | None]] = Counter()

    def room(self, tenant: str | None, keep: Iterable[Node] = ()) -> int:
        """Return how many blocks the pool has for a tenant now, evicting idle ones except those in ``keep``."""
        kept = Counter(self._pool.owner(node.block_id) for node in keep if node in self._idle)
        return self._room(tenant, kept)

    def available(self, tenant: str | None, keep: Iterable[Node] = ()) -> int:
        """Return how many blocks a tenant could have now: :meth:`room`, and not more than its ceiling leaves."""
        kept = Counter(self._pool.owner(node.block_id) for node in keep if node in self._idle)
        own = self._below_ceiling(tenant, kept)
        room = self._room(tenant, kept)
        return room if own is None else min(room, own)

    def is_limited_by_ceiling(self, tenant: str | None) -> bool:
        """Return whether it is the tenant's own ceiling, not the pool, that bounds what it can have now."""
        own = self._below_ceiling(tenant, Counter())
        return own is not None and own < self._room(tenant, Counter())

    def is_at_ceiling(self, tenant: str | None) -> bool:
        """Return whether a tenant holds all that it may."""
        ceiling = None if tenant is None else self._ceiling(tenant)
        return ceiling is not None and self._pool.owned_blocks.get(tenant, 0) >= ceiling

    def is_beyond_partition(self, tenant: str) -> bool:
        """Return whether a strict tenant holds more than its partition, which a reload made smaller."""
        return self._pool.owned_blocks.get(tenant, 0) > self._partitions().get(tenant, self._pool.num_blocks)

    def beyond_partitions(self) -> list[str]:
        """Return the strict tenants that hold more than their partitions."""
        return [tenant for tenant in self._partitions() if self.is_beyond_partition(tenant)]

    def free_for(self, tenant: str | None) -> int:
        """Return how many free blocks a tenant may take: not those that wait for others' partitions."""
        return max(0, self._pool.num_free - self._reserved(tenant))

    def victim(self, tenant: str | None) -> str | None:
        """Return the tenant whose idle block goes when ``tenant`` needs one: who is most over its share.

        Its own goes where it is that itself, and where all the others are inside their floors. Public text goes last.
        """
        floors = self._floors()
        if floors is not self._ranked_by:  # other policies are in force: other floors, other weights
            self._ranked_by = floors
            self._ranking.rebuild()
        first = self._ranking.first()
        if tenant is not None and self._idle.num_idle(tenant):
            if first is None or self._over(tenant) >= self._over(first):
                return tenant
        return first

    def note_eviction(self, by: str | None, of: str | None) -> None:
        """Count an evicted block."""
        self.evictions[by, of] += 1
        if len(self.evictions) > _MOST_PAIRS:
            self.evictions = Counter(dict(self.evictions.most_common(_MOST_PAIRS // 2)))

    def evicted_of(self, tenant: str | None) -> tuple[int, int]:
        """Return how many blocks a tenant lost to anybody, and how many of them to others."""
        lost = {by: count for (by, of), count in self.evictions.items() if of == tenant}
        return sum(lost.values()), sum(count for by, count in lost.items() if by != tenant)

    def _over(self, tenant: str) -> float:
        beyond = self._pool.owned_blocks.get(tenant, 0) - self._floors().get(tenant, 0)
        return max(0, beyond) / self._weight(tenant)

    def _room(self, tenant: str | None, kept: Counter[str | None]) -> int:
        owned, idle = self._pool.owned_blocks, self._idle
        # Of idle blocks all can go but those that keep others at their floors.
        protected = 0
        for other, floor in self._floors().items():
            if other != tenant:
                borrowed = max(0, owned.get(other, 0) - floor)
                protected += max(0, idle.num_idle(other) - borrowed)
        # What partitions lack, after a reload made them, comes out of idle blocks as well.
        free = self._pool.num_free - self._reserved(tenant)
        return max(0, free + len(idle) - protected - sum(kept.values()))

    def _reserved(self, tenant: str | None) -> int:
        owned = self._pool.owned_blocks
        return sum(max(0, n - owned.get(o, 0)) for o, n in self._partitions().items() if o != tenant)

    def _below_ceiling(self, tenant: str | None, kept: Counter[str | None]) -> int | None:
        ceiling = None if tenant is None else self._ceiling(tenant)
        if ceiling is None:
            return None
        own = ceiling - self._pool.owned_blocks.get(tenant, 0) + self._idle.num_idle(tenant) - kept[tenant]
        return max(0, own)
