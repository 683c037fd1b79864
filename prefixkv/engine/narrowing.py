"""What happens to text that a reload says is shared with fewer than it was, or is no longer to be gone soon."""

from __future__ import annotations

from collections.abc import Collection

from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.retire import destroy_scopes
from prefixkv.chat.recall import Recall
from prefixkv.engine.live import LiveRequest, Reply
from prefixkv.policy import TenantPolicy
from prefixkv.scope import Scope, ScopeLevel

__all__ = ["narrow", "withdraw"]

Live = Collection[tuple[LiveRequest, Reply]]


def withdraw(
    manager: KVCacheManager, recall: Recall, tenant: str, former: TenantPolicy, now: TenantPolicy, live: Live
) -> None:
    """Destroy what a tenant stored that may not stay as it is, and let what is live share no more than it may now.

    That is what was stored wider than it may be now; what else was stored as wide cannot be told apart and goes too.
    And all of it where zero retention ends: what was promised for it still holds. What is published stays.
    """
    levels = _levels(former, now)
    if levels is None:
        return
    widest, narrowest = levels

    def is_meant(scope: Scope) -> bool:
        return scope.tenant == tenant and widest <= scope.level < narrowest

    recall.forget_scopes(is_meant)
    for request, reply in live:
        if request.tenant == tenant:
            _narrow(manager, request, reply, narrowest)
    publishing = [reply.seq.seq_id for _, reply in live if not reply.seq.generates]
    destroy_scopes(manager, is_meant, keep=[seq_id for seq_id in publishing if seq_id in manager.sequences])


def narrow(manager: KVCacheManager, request: LiveRequest, now: TenantPolicy) -> None:
    """Let a request share no more than the rules allow now, if it was made under others."""
    levels = None if request.policy is None or request.policy is now else _levels(request.policy, now)
    if levels is not None:
        for reply in request.replies:
            _narrow(manager, request, reply, levels[1])


def _levels(former: TenantPolicy, now: TenantPolicy) -> tuple[ScopeLevel, ScopeLevel] | None:
    """Return from which scope on, and down to which, nothing may stay as it was stored under former rules, or None."""
    if former.zero_retention and not now.zero_retention:
        return ScopeLevel.TENANT, ScopeLevel.REQUEST
    return now.narrowed_since(former)


def _narrow(manager: KVCacheManager, request: LiveRequest, reply: Reply, level: ScopeLevel) -> None:
    """Store what a user's request writes no wider than ``level``; a publication is left alone."""
    if request.principal is None:
        return
    seq = reply.seq
    seq.scopes = seq.scopes.narrowed(Scope.of(request.principal, level))
    if seq.seq_id in manager.sequences:
        manager.sequences[seq.seq_id].scopes = seq.scopes
