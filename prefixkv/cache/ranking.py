"""Who is most over its share, kept up as blocks come and go, so that no eviction asks every tenant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from prefixkv.cache.eviction import LRUEviction
from prefixkv.cache.pool import BlockPool

__all__ = ["Ranking"]


class Ranking:
    """Tenants with idle blocks that are over their shares, the one first that is most over. Public text is not ranked.

    Where two are equally far over, the one goes first whose blocks changed longer ago.

    Args:
        pool: Tells whose blocks came and went.
        idle: Who has idle blocks.
        over: How far a tenant is over its share, 0 or more. When it changes but for the tenant's blocks, call
            :meth:`rebuild`.
    """

    def __init__(self, pool: BlockPool, idle: LRUEviction, over: Callable[[str], float]) -> None:
        self._pool, self._idle, self._over = pool, idle, over
        self._heap: list[tuple[float, int, str]] = []  # entries that no longer count are dropped when they come first
        self._newest: dict[str, int] = {}
        self._number = 0

    def rebuild(self) -> None:
        """Rank all tenants anew."""
        self._take_changed()
        self._heap, self._newest = [], {}
        for tenant in self._idle.tenants():
            self._enter(tenant)

    def first(self) -> str | None:
        """Return the tenant that is most over its share and has idle blocks, or None."""
        for tenant in self._take_changed():
            self._enter(tenant)
        while self._heap:
            _, number, tenant = self._heap[0]
            is_newest = self._newest.get(tenant) == number
            if is_newest and self._idle.num_idle(tenant):
                return tenant
            heappop(self._heap)
            if is_newest:
                del self._newest[tenant]  # it enters again when a block of its own falls idle
        return None

    def _take_changed(self) -> list[str | None]:
        changed = list(self._pool.changed | self._idle.changed)
        self._pool.changed.clear()
        self._idle.changed.clear()
        return changed

    def _enter(self, tenant: str | None) -> None:
        if tenant is None:
            return
        self._newest.pop(tenant, None)
        over = self._over(tenant)
        if over > 0 and self._idle.num_idle(tenant):
            self._number += 1
            self._newest[tenant] = self._number
            heappush(self._heap, (-over, self._number, tenant))
        if len(self._heap) > 2 * len(self._newest) + 64:
            self._heap = [entry for entry in self._heap if self._newest.get(entry[2]) == entry[1]]
            heapify(self._heap)
