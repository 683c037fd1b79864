"""What an engine looks like from outside, as plain data. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv.measure.metrics import EngineStats, TenantStats

if TYPE_CHECKING:
    from prefixkv.engine.core import EngineCore

__all__ = ["engine_stats", "tenant_stats"]


def engine_stats(core: EngineCore) -> EngineStats:
    """Return a snapshot of the engine."""
    pool, idle = core.manager.pool, len(core.manager.idle)
    return EngineStats(
        **core.metrics.of(None),
        blocks=pool.num_blocks - pool.num_free,
        running=len(core.scheduler.running),
        waiting=len(core.scheduler.waiting),
        volatile_tokens=core.recall.lost_tokens(None),
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_idle=idle,
        blocks_in_use=pool.num_blocks - pool.num_free - idle,
        block_bytes=core.runner.spec.bytes_per_block,
        evictions=core.manager.num_evicted,
        preemptions=core.scheduler.num_preemptions,
        steps=core.metrics.steps,
        evicted_blocks=core.manager.num_evicted,
        evicted=tuple((by, of, count) for (by, of), count in core.manager.shares.evictions.items()),
        hash_collisions=core.manager.index.collisions,
        tenants=tuple(sorted({*core.metrics.tenants, *(t for t in pool.owned_blocks if t is not None)})),
    )


def tenant_stats(core: EngineCore, tenant: str) -> TenantStats:
    """Return a snapshot of one tenant."""
    evicted, by_others = core.manager.shares.evicted_of(tenant)
    return TenantStats(
        **core.metrics.of(tenant),
        evicted_blocks=evicted,
        evicted_by_others=by_others,
        blocks=core.manager.pool.owned_blocks.get(tenant, 0),
        running=sum(1 for seq in core.scheduler.running if seq.tenant == tenant),
        waiting=core.scheduler.waiting.num_waiting(tenant),
        volatile_tokens=core.recall.lost_tokens(tenant),
    )
