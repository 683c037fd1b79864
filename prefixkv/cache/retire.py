"""How blocks end before anybody needs their room: their time or their session is over, or their rows are spoilt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prefixkv.cache.index import Node
from prefixkv.cache.scopes import ScopeMap
from prefixkv.scope import Scope

if TYPE_CHECKING:
    from prefixkv.cache.manager import KVCacheManager

__all__ = ["demote_scope", "destroy_scopes", "discard", "evict", "expire", "purge", "retire", "shrink"]


def expire(manager: KVCacheManager) -> int:
    """Destroy what is past its time; return how many blocks. Call it before every use of the cache.

    What is pinned stays. What a running sequence stands on cannot be found any more, and goes when the sequence ends.
    """
    due = list(manager.expiry.due())
    if not due:
        return 0
    pinned = manager.pinned_nodes()
    doomed = [node for node in due if node not in pinned]
    for node in doomed:
        manager.ghosts.of(node.tenant).expired(node)
    return len(retire(manager, doomed))


def demote_scope(manager: KVCacheManager, scope: Scope) -> int:
    """Make the idle blocks of exactly one scope the first to be evicted; return how many there are."""
    nodes = [node for node in manager.idle if node.scope == scope]
    for node in sorted(nodes, key=lambda node: node.depth):
        manager.idle.demote(node)
    return len(nodes)


def purge(
    manager: KVCacheManager, tenant: str | None, user: str | None = None, session: str | None = None
) -> tuple[int, int]:
    """Destroy every block of an identity and begin a new key generation; return blocks and tokens destroyed.

    Its sequences must be closed before. Without any filter the public scope goes as well.
    """
    doomed = {node: node.scope for node in manager.index if node.scope and node.scope.is_within(tenant, user, session)}
    for pin in [pin for pin, nodes in manager.pins.items() if not doomed.keys().isdisjoint(nodes)]:
        manager.unpin(pin)
    manager.keys.bump(tenant, user, session)
    retire(manager, doomed)  # descendants are never wider than their parents, so whole subtrees are doomed
    manager.expiry.drop_gone()
    for scope in dict.fromkeys(doomed.values()):
        manager.ghosts.of(scope.tenant).purged(manager.keys.key(scope))
    return len(doomed), sum(len(node.tokens) for node in doomed)


def discard(manager: KVCacheManager, token_ids: Sequence[int], scopes: ScopeMap) -> None:
    """Destroy the idle blocks that hold a prefix of these tokens in the sequence's reach: their rows are spoilt."""
    reach = {manager.keys.key(scope) for scope in scopes.reach}
    spoilt = [node for node in manager.idle if node.scope_key in reach and node.is_prefix_of(token_ids)]
    for node in sorted(spoilt, key=lambda node: -node.depth):
        if node.is_leaf:  # what another sequence or another text stands on stays
            manager.destroy(node)


def destroy_scopes(manager: KVCacheManager, is_meant: Callable[[Scope], bool], keep: Iterable[int] = ()) -> int:
    """Destroy all blocks of the scopes that are meant, and what stands on them; return how many.

    What is pinned stays, and what the sequences ``keep`` have; what others still use goes when they end.
    """
    kept = manager.pinned_nodes()
    for blocks in map(manager.sequences.__getitem__, keep):
        kept.update(blocks.nodes, [blocks.tail] if blocks.tail else ())
    nodes = [node for node in manager.index if node.scope and is_meant(node.scope) and node not in kept]
    gone = {node.scope_key: node.tenant for node in nodes}
    retired = retire(manager, nodes)
    manager.expiry.drop_gone()
    for key, tenant in gone.items():
        manager.ghosts.of(tenant).purged(key)
    return len(retired)


def evict(manager: KVCacheManager, tenant: str | None) -> list[str | None]:
    """Destroy the idle block of a tenant that goes first; return whose blocks went, empty if it has none.

    Public text that others' blocks stand on takes them along: they would be of no use, and all that could go otherwise
    is gone. None of them is in use, since whoever uses a block uses all before it.
    """
    node, behind = manager.idle.victim(tenant), False
    if node is None and tenant is None:
        node, behind = next(manager.idle.of(None), None), True
    if node is None:
        return []
    doomed = sorted(_with_descendants(node), key=lambda node: -node.depth) if behind else [node]
    for gone in doomed:
        manager.ghosts.of(gone.tenant).evicted(gone)
        manager.destroy(gone)
    return [gone.tenant for gone in doomed]


def shrink(manager: KVCacheManager) -> bool:
    """Evict what strict tenants hold idle beyond partitions that a reload made smaller; return whether there was any.

    Left alone it would go when others need room, and its tenant would see when that is.
    """
    found = False
    for tenant in manager.shares.beyond_partitions():
        while manager.shares.is_beyond_partition(tenant) and manager.evict(tenant, by=tenant):
            found = True
    return found


def retire(manager: KVCacheManager, nodes: Iterable[Node]) -> set[Node]:
    """Take blocks and all that stands on them out of the index; free those that nobody uses. Returns all of them."""
    doomed = {node for top in nodes for node in _with_descendants(top)}
    used = {node for node in doomed if manager.pool.references(node.block_id)}
    for blocks in manager.sequences.values():
        if not used.isdisjoint(blocks.nodes) or blocks.tail in used:
            blocks.sealed = True  # nothing can be stored behind what is gone
            blocks.tail, blocks.inherited = None, 0
    for node in sorted(doomed, key=lambda node: -node.depth):
        if node in used:
            manager.index.remove(node)  # freed, and overwritten, when its last sequence lets go
        else:
            manager.destroy(node)
    return doomed


def _with_descendants(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack += (child for children in top.children.values() for child in children)
