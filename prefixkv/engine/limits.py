"""What is refused before anything is allocated: full queues and requests that could never fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from prefixkv.cache.manager import KVCacheManager
from prefixkv.engine.live import LiveRequest
from prefixkv.engine.rates import TokenRates
from prefixkv.errors import ContextOverflow, QueueFull, QuotaExceeded
from prefixkv.lifetime import Lifetime
from prefixkv.policy import PolicySet, TenantPolicy
from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.scheduler import Scheduler
from prefixkv.scope import Scope, ScopeLevel

__all__ = ["Limits", "PoliciesInForce", "TenantLimits"]


class PoliciesInForce:
    """Holds the policies. The engine thread keeps this and not the engine, so an engine that is dropped can end."""

    def __init__(self, policies: PolicySet) -> None:
        self.current = policies
        self._departed: dict[str, TenantPolicy] = {}
        self._former_default: TenantPolicy | None = None

    def get(self) -> PolicySet:
        """Return the policies that count now."""
        return self.current

    def replace(self, policies: PolicySet, known: Container[str]) -> None:
        """Put others in force. Who of the ``known`` tenants is no longer served keeps its former rules."""
        former, self.current = self.current, policies
        departed = self._departed | former.tenants
        self._departed = {name: rules for name, rules in departed.items() if name in known}
        self._former_default = former.default or self._former_default

    def of(self, tenant: str) -> TenantPolicy:
        """Return a tenant's policy, or its last one if it is no longer served."""
        current = self.current
        rules = current.tenants.get(tenant) or current.default
        return rules or self._departed.get(tenant) or self._former_default or TenantPolicy()


class TenantLimits:
    """Reads numbers off the policies in force.

    Args:
        policies: Asked anew each time, since they may be reloaded.
        num_blocks: Blocks in the pool.
        block_size: Tokens of one.
        bytes_per_block: Bytes of one.
    """

    def __init__(self, policies: PoliciesInForce, num_blocks: int, block_size: int, bytes_per_block: int) -> None:
        self._policies = policies
        self._pool = num_blocks, block_size, bytes_per_block
        self._read: PolicySet | None = None
        self._floors: dict[str, int] = {}
        self._partitions: dict[str, int] = {}
        self._lifetimes: dict[tuple[int, ScopeLevel], Lifetime] = {}

    def policy(self, tenant: str) -> TenantPolicy:
        """Return a tenant's policy; one that a reload removed keeps its last one while its blocks last."""
        return self._policies.of(tenant)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self.policy(tenant).weight

    def priority(self, tenant: str) -> int:
        """Return a tenant's priority."""
        return self.policy(tenant).priority

    def max_running(self, tenant: str) -> int | None:
        """Return how many sequences of a tenant may run at once, or None."""
        return self.policy(tenant).max_running_requests

    def floor_blocks(self, tenant: str) -> int:
        """Return how many blocks nobody can take from a tenant."""
        amount = self.policy(tenant).min_pool
        return 0 if amount is None else amount.blocks(*self._pool)

    def floors(self) -> Mapping[str, int]:
        """Return the floor of each tenant that has one, in blocks."""
        self._read_floors()
        return self._floors

    def partitions(self) -> Mapping[str, int]:
        """Return those floors that are hard partitions."""
        self._read_floors()
        return self._partitions

    def lifetime(self, scope: Scope) -> Lifetime:
        """Return the seconds without use, and in all, that what is cached of a scope lives; None is for ever."""
        if scope.tenant is None:
            return None, None
        self._read_floors()
        policy = self.policy(scope.tenant)
        known = self._lifetimes.get((id(policy), scope.level))  # asked for every scope that is kept, in each sweep
        if known is None:
            ttl = policy.ttl_of(scope.level)
            known = self._lifetimes[id(policy), scope.level] = ttl.idle, ttl.absolute
        return known

    def _read_floors(self) -> None:
        policies = self._policies.get()
        if policies is not self._read:
            self._floors = {name: n for name in policies.tenants if (n := self.floor_blocks(name))}
            self._partitions = {name: n for name, n in self._floors.items() if self.is_strict(name)}
            self._lifetimes = {}
            self._read = policies

    def is_strict(self, tenant: str) -> bool:
        """Return whether a tenant's floor is a hard partition: of the pool, and in proportion of each step."""
        return self.policy(tenant).isolation == "strict"

    def ceiling_blocks(self, tenant: str) -> int | None:
        """Return how many blocks a tenant may hold at most, or None."""
        if self.is_strict(tenant):
            return max(1, self.floor_blocks(tenant))
        amount = self.policy(tenant).max_pool
        return None if amount is None else max(1, amount.blocks(*self._pool))


@dataclass(frozen=True, slots=True)
class _Room:
    """Blocks that a sequence can have: ``left`` new ones and ``shared`` ones that are published already."""

    left: int
    shared: int
    tenant: str | None
    whose: str


class Limits:
    """Checks requests on arrival."""

    def __init__(
        self,
        tenants: TenantLimits,
        manager: KVCacheManager,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = tenants
        self._manager = manager
        self._scheduler = scheduler
        self._rates = TokenRates(lambda tenant: tenants.policy(tenant).tokens_per_minute, clock)

    def check_rate(self, request: LiveRequest) -> None:
        """Raise ``QuotaExceeded`` if the tenant has used up its tokens per minute. The operator may always publish."""
        if request.tenant is None or request.pin:
            return
        wait_s = self._rates.wait_s(request.tenant)
        if wait_s > 0:
            limit = self._tenants.policy(request.tenant).tokens_per_minute
            raise QuotaExceeded(
                f"this tenant has used up its {limit} tokens per minute; try again in {wait_s:.1f} seconds", wait_s
            )

    def count(self, tenant: str | None, num_tokens: int) -> None:
        """Count computed prompt tokens and generated tokens for a tenant's rate."""
        if tenant is not None and num_tokens:
            self._rates.spend(tenant, num_tokens)

    def check_queue(self, request: LiveRequest) -> None:
        """Raise ``QueueFull`` if too many sequences wait already. A lone request may have any ``n``.

        A strict tenant has a queue of its own; the others share what is left of the limit.
        """
        lane, new = self._scheduler.lane_of(request.tenant), len(request.replies)
        waiting, limit = lane.waiting, lane.share.max_queued_requests
        if len(waiting) and len(waiting) + new > limit:
            raise QueueFull(f"{len(waiting)} sequences wait already and at most {limit} may; try again later")
        if request.tenant is None:
            return
        own_limit = self._tenants.policy(request.tenant).max_queued_requests
        own = waiting.num_waiting(request.tenant)
        if own_limit is not None and own and own + new > own_limit:
            raise QueueFull(f"{own} sequences of this tenant wait and at most {own_limit} may; try again later")

    def shorten(self, request: LiveRequest, live: Iterable[Sequence]) -> None:
        """Let a request without ``max_tokens`` end where its room does; changes its sequences."""
        if request.sampling.max_tokens is not None or request.pin:
            return
        seq = request.replies[0].seq
        room = min(room.left + room.shared for room in self._rooms(seq, live))
        # The last token's row is never written, so one more token than there are rows can be had.
        most = max(seq.num_prompt_tokens, room * self._manager.block_size) + 1
        for reply in request.replies:
            reply.seq.max_tokens_total = min(reply.seq.max_tokens_total, most)

    def check_room(self, request: LiveRequest, live: Iterable[Sequence]) -> None:
        """Refuse what the pool could not hold even if nothing else ran.

        Raises:
            ContextOverflow: If it needs more than the whole pool.
            QuotaExceeded: If it needs more than its tenant may hold, or more than publications leave; or if pinning
                it would leave no room for one of the ``live`` sequences.
        """
        seq, manager = request.replies[0].seq, self._manager
        total, blocks = manager.pool.num_blocks, self._most_blocks(seq)
        if blocks > total:
            raise ContextOverflow(
                total * manager.block_size, seq.max_tokens_total, "the whole pool (CacheConfig.memory)"
            )
        for room in self._rooms(seq, live):
            own = blocks - room.shared
            if own > room.left:
                raise QuotaExceeded(f"the request needs {own} blocks; {room.whose} {room.left} besides published ones")
            if request.pin and own + self._largest(room, live) > room.left:
                raise QuotaExceeded(f"pinning {own} blocks would leave no room for the requests that wait or run")

    def _rooms(self, seq: Sequence, live: Iterable[Sequence]) -> list[_Room]:
        """Return what publications, those under way included, leave of the pool and under the tenant's ceiling."""
        manager = self._manager
        pinned = manager.pinned_nodes()
        shared = len(pinned.intersection(manager.match(seq.token_ids, seq.scopes).nodes))
        coming = [other for other in live if not other.generates]
        rooms = []
        if seq.tenant is None or not self._tenants.is_strict(seq.tenant):
            taken: Counter[str | None] = Counter(manager.pool.owner(node.block_id) for node in pinned)
            for other in coming:
                taken[other.tenant] += self._most_blocks(other)
            # Others' floors may be full of blocks that nobody can take; what they pin is inside.
            for tenant, floor in self._tenants.floors().items():
                if tenant != seq.tenant:
                    taken[tenant] = max(taken[tenant], floor)
            kept = sum(taken.values())
            rooms.append(_Room(max(0, manager.pool.num_blocks - kept), shared, None, "the pool has for it"))
        ceiling = self._tenants.ceiling_blocks(seq.tenant) if seq.tenant is not None else None
        if ceiling is not None:
            left = ceiling - sum(manager.pool.owner(node.block_id) == seq.tenant for node in pinned)
            left -= sum(self._most_blocks(other) for other in coming if other.tenant == seq.tenant)
            rooms.append(_Room(max(0, left), shared, seq.tenant, "its tenant may hold"))
        return rooms

    def _largest(self, room: _Room, live: Iterable[Sequence]) -> int:
        mine = [other for other in live if other.generates and room.tenant in (None, other.tenant)]
        if room.tenant is None:
            strict = self._tenants.partitions()
            mine = [other for other in mine if other.tenant not in strict]
        return max(map(self._most_blocks, mine), default=1 if room.tenant is None else 0)

    def _most_blocks(self, seq: Sequence) -> int:
        # The last generated token is never computed, so its row needs no place.
        return self._manager.blocks_for(max(seq.num_prompt_tokens, seq.max_tokens_total - 1))
