"""Whose turn it is: virtual token counters, one per tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cachetools import LRUCache

__all__ = ["FairnessCounters"]

_MAX_REMEMBERED = 10_000


class FairnessCounters:
    """Counts the service each tenant got, divided by its weight; the lowest counter goes next.

    A tenant that comes back after a pause is lifted to the lowest active counter, or the one served last if nobody is
    active, so it cannot save up service.

    Source: Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models"); we charge computed
    prompt tokens and twice the output tokens, so what the cache saves is free.
    """

    OUTPUT_COST = 2

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._counters: LRUCache[str | None, float] = LRUCache(_MAX_REMEMBERED)
        self._last_served = 0.0

    def activate(self, tenant: str | None, active: Iterable[str | None]) -> None:
        """Lift a tenant that had no request until now to the lowest counter among the ``active`` ones."""
        # The operator's own work is free, so its counter says nothing.
        others = [self._counters.get(other, 0.0) for other in active if other not in (tenant, None)]
        floor = min(others, default=self._last_served)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)

    def charge(self, tenant: str | None, num_tokens: int) -> None:
        """Add service to a tenant's counter. The operator's own work (None) is free."""
        if tenant is not None:
            self._last_served = self._counters.get(tenant, 0.0) + num_tokens / self._weight(tenant)
            self._counters[tenant] = self._last_served

    def order(self, tenants: Iterable[str | None]) -> list[str | None]:
        """Return the tenants, the least served first; ties keep the given order."""
        return sorted(tenants, key=lambda tenant: self._counters.get(tenant, 0.0))
