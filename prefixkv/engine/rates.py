"""How many tokens a tenant may use in a minute: a bucket per tenant that fills as time goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache

__all__ = ["TokenRates"]

_MAX_TENANTS = 10_000
_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class TokenRates:
    """Buckets that hold one minute's worth and fill evenly.

    Tokens are counted as they are computed, so what was accepted runs to its end and may leave a debt, which is paid
    before the next request is accepted. Tenants without a limit have no bucket.

    Args:
        per_minute: A tenant's tokens per minute, or None.
        clock: Seconds that only grow.
    """

    def __init__(self, per_minute: Callable[[str], int | None], clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: LRUCache[str, _Bucket] = LRUCache(_MAX_TENANTS)

    def wait_s(self, tenant: str) -> float:
        """Return in how many seconds a tenant has a token again; 0 if it has one now."""
        limit = self._per_minute(tenant)
        if limit is None:
            return 0.0
        tokens = self._filled(tenant, limit).tokens
        return 0.0 if tokens >= 1 else (1 - tokens) * _MINUTE_S / limit

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Take tokens out of a tenant's bucket, more than it holds if need be."""
        limit = self._per_minute(tenant)
        if limit is not None:
            self._filled(tenant, limit).tokens -= num_tokens

    def _filled(self, tenant: str, limit: int) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(float(limit), now_s)
        gained = max(0.0, now_s - bucket.at_s) * limit / _MINUTE_S
        bucket.tokens = min(float(limit), bucket.tokens + gained)
        bucket.at_s = now_s
        return bucket
