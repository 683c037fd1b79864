"""What is refused before anything is allocated: full queues and requests that could never fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prefixkv.cache.manager import KVCacheManager
from prefixkv.engine.live import LiveRequest
from prefixkv.errors import ContextOverflow, QueueFull, QuotaExceeded
from prefixkv.policy import PolicySet, TenantPolicy
from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.scheduler import Scheduler

__all__ = ["Limits", "TenantLimits"]


class TenantLimits:
    """Reads numbers off the policies in force.

    Args:
        policies: Returns the policies; asked anew each time, since they may be reloaded.
        num_blocks: Blocks in the pool.
        bytes_per_block: Bytes of one.
    """

    def __init__(self, policies: Callable[[], PolicySet], num_blocks: int, bytes_per_block: int) -> None:
        self._policies = policies
        self._num_blocks = num_blocks
        self._bytes_per_block = bytes_per_block

    def policy(self, tenant: str) -> TenantPolicy:
        """Return a tenant's policy; one that a reload removed keeps a permissive one while its blocks last."""
        policies = self._policies()
        return policies.tenants.get(tenant) or policies.default or TenantPolicy()

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self.policy(tenant).weight

    def ceiling_blocks(self, tenant: str) -> int | None:
        """Return how many blocks a tenant may hold at most, or None."""
        ceiling = self.policy(tenant).max_pool
        if ceiling is None:
            return None
        if isinstance(ceiling, float):
            return max(1, int(ceiling * self._num_blocks))
        return max(1, min(self._num_blocks, int(ceiling) // self._bytes_per_block))


class Limits:
    """Checks requests on arrival. Does not mutate."""

    def __init__(self, tenants: TenantLimits, manager: KVCacheManager, scheduler: Scheduler) -> None:
        self._tenants = tenants
        self._manager = manager
        self._scheduler = scheduler

    def check_queue(self, request: LiveRequest) -> None:
        """Raise ``QueueFull`` if too many sequences wait already. A lone request may have any ``n``."""
        waiting, new = self._scheduler.waiting, len(request.replies)
        limit = self._scheduler.config.max_queued_requests
        if len(waiting) and len(waiting) + new > limit:
            raise QueueFull(f"{len(waiting)} sequences wait already and at most {limit} may; try again later")
        if request.tenant is None:
            return
        own_limit = self._tenants.policy(request.tenant).max_queued_requests
        own = waiting.num_waiting(request.tenant)
        if own_limit is not None and own and own + new > own_limit:
            raise QueueFull(f"{own} sequences of this tenant wait and at most {own_limit} may; try again later")

    def check_room(self, request: LiveRequest, live: Iterable[Sequence]) -> None:
        """Refuse what the pool could not hold even if nothing else ran.

        Raises:
            ContextOverflow: If it needs more than the whole pool.
            QuotaExceeded: If it needs more than its tenant may hold, or more than pinned blocks leave; or if pinning
                it would leave no room for one of the ``live`` sequences.
        """
        seq, manager = request.replies[0].seq, self._manager
        nodes = manager.match(seq.token_ids, seq.scopes).nodes
        pinned = {node for pins in manager.pins.values() for node in pins}
        total, blocks = manager.pool.num_blocks, self._most_blocks(seq)
        if blocks > total:
            raise ContextOverflow(total * manager.block_size, seq.max_tokens_total, "the whole pool")
        unpinned = total - len(pinned)
        own = blocks - len(pinned.intersection(nodes))
        if own > unpinned:
            raise QuotaExceeded(f"the request needs {own} blocks; {unpinned} are not pinned by publications")
        if request.pin:
            largest = max((self._most_blocks(other) for other in live), default=1)
            if own + largest > unpinned:
                raise QuotaExceeded(f"pinning {own} blocks would leave no room for the requests that wait or run")
        ceiling = self._tenants.ceiling_blocks(seq.tenant) if seq.tenant is not None else None
        if ceiling is not None:
            # Public blocks are not the tenant's, and its pinned ones count already.
            own = blocks - sum(1 for node in nodes if node in pinned or manager.pool.owner(node.block_id) is None)
            left = ceiling - sum(1 for node in pinned if manager.pool.owner(node.block_id) == seq.tenant)
            if own > left:
                raise QuotaExceeded(f"the request needs {own} blocks; its tenant may hold {left} besides pinned ones")

    def _most_blocks(self, seq: Sequence) -> int:
        # The last generated token is never computed, so its row needs no place.
        return self._manager.blocks_for(max(seq.num_prompt_tokens, seq.max_tokens_total - 1))
