"""What happens to text that users shared when a reload says that only registered text is shared."""

from __future__ import annotations

from collections.abc import Collection

from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.retire import destroy_scope
from prefixkv.chat.recall import Recall
from prefixkv.engine.live import LiveRequest, Reply
from prefixkv.scope import Scope, ScopeLevel

__all__ = ["narrow", "unshare"]


def unshare(manager: KVCacheManager, recall: Recall, tenant: str, live: Collection[tuple[LiveRequest, Reply]]) -> None:
    """Destroy what a tenant's users share but for what is published, and let what is live share no more of it."""
    scope = Scope(ScopeLevel.TENANT, tenant)
    recall.forget_scope(scope)
    for request, reply in live:
        if request.tenant == tenant:
            narrow(manager, request, reply)
    publishing = [reply.seq.seq_id for _, reply in live if not reply.seq.generates]
    destroy_scope(manager, scope, keep=[seq_id for seq_id in publishing if seq_id in manager.sequences])


def narrow(manager: KVCacheManager, request: LiveRequest, reply: Reply) -> None:
    """Share what a user's request writes with nobody but the user; a publication is left alone."""
    seq = reply.seq
    if request.principal is None:
        return
    seq.scopes = seq.scopes.narrowed(ScopeLevel.USER)
    if seq.seq_id in manager.sequences:
        manager.sequences[seq.seq_id].scopes = seq.scopes
