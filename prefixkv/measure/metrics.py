"""Counters of one engine and the snapshots made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cachetools import LRUCache

__all__ = ["Counters", "EngineStats", "Metrics", "TenantStats"]

_MAX_TENANTS = 10_000


@dataclass(slots=True)
class Counters:
    """Running totals, of the engine or of one tenant. Only the engine thread adds to them.

    Attributes:
        requests: Requests answered, aborted ones included.
        aborted: Requests ended early: cancelled, timed out or purged.
        failed: Requests that ended in an error after they were accepted.
        prompt_tokens: Prompt tokens of answered requests.
        cached_tokens: Those found in the cache.
        computed_tokens: Those computed.
        completion_tokens: Tokens generated.
    """

    requests: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """One tenant: its totals since the engine started, and what it holds now.

    Attributes:
        evicted_blocks: Blocks of its own that were evicted.
        evicted_by_others: Those of them that made room for another tenant.
        volatile_tokens: Tokens that undeclared text which changes has cost, by its kind; see ``MissReason.kind``.
    """

    requests: int
    aborted: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    blocks: int
    running: int
    waiting: int
    evicted_blocks: int = 0
    evicted_by_others: int = 0
    volatile_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache, 0 where there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(TenantStats):
    """The whole engine. ``blocks`` counts blocks idle or in use; free + idle + in use == total.

    Attributes:
        evicted: (tenant that needed room, tenant whose blocks went, blocks); None is the operator's public text.
        hash_collisions: Blocks that a hash named and a comparison of tokens, parent and scope turned away. A handful in
            the life of an engine would mean that somebody makes them on purpose.
    """

    blocks_total: int
    blocks_free: int
    blocks_idle: int
    blocks_in_use: int
    block_bytes: int
    evictions: int
    preemptions: int
    steps: int
    tenants: tuple[str, ...]
    evicted: tuple[tuple[str | None, str | None, int], ...] = ()
    hash_collisions: int = 0


@dataclass(slots=True)
class Metrics:
    """Totals of the engine and of each tenant, the most recent 10,000 tenants."""

    total: Counters = field(default_factory=Counters)
    tenants: LRUCache[str, Counters] = field(default_factory=lambda: LRUCache(_MAX_TENANTS))
    steps: int = 0

    def add(self, tenant: str | None, **amounts: int) -> None:
        """Add to the engine's and the tenant's counters."""
        targets = [self.total]
        if tenant is not None:
            targets.append(self.tenants.setdefault(tenant, Counters()))
        for counters in targets:
            for name, amount in amounts.items():
                setattr(counters, name, getattr(counters, name) + amount)

    def of(self, tenant: str | None) -> dict[str, int]:
        """Return the counters of a tenant, or of the engine, as keyword arguments for a snapshot."""
        counters = self.total if tenant is None else self.tenants.get(tenant, Counters())
        return {item.name: getattr(counters, item.name) for item in fields(Counters)}
