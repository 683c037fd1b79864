"""Every invariant of the cache, recomputed from scratch. Slow on purpose."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prefixkv.errors import IntegrityError

if TYPE_CHECKING:
    from prefixkv.cache.manager import KVCacheManager

__all__ = ["check_manager"]


def check_manager(manager: KVCacheManager) -> None:
    """Raise ``IntegrityError`` unless pool, index, idle list, tables and pins agree. Does not mutate."""
    pool, index, idle = manager.pool, manager.index, manager.idle
    pool.check()
    index.check()
    references: Counter[int] = Counter()
    for blocks in manager.sequences.values():
        references.update(blocks.block_table)
    for nodes in manager.pins.values():
        references.update(node.block_id for node in nodes)
    # A sealed sequence may stand on blocks whose time was over while it ran.
    held = [node for blocks in manager.sequences.values() for node in blocks.nodes if not blocks.sealed]
    if any(index.node_of(node.block_id) is not node for nodes in (held, *manager.pins.values()) for node in nodes):
        raise IntegrityError("a pin or a sequence counts on a block that is not indexed any more")
    idle_nodes = list(idle)
    if len(idle_nodes) != len(idle) or len(set(idle_nodes)) != len(idle):
        raise IntegrityError("the idle list counts wrong")
    for block_id in range(pool.num_blocks):
        node = index.node_of(block_id)
        if pool.is_free(block_id):
            if references[block_id] or node is not None:
                raise IntegrityError(f"block {block_id} is free and used")
            continue
        if pool.references(block_id) != references[block_id]:
            raise IntegrityError(f"block {block_id} counts {pool.references(block_id)}, has {references[block_id]}")
        if (node is not None and node in idle) != (references[block_id] == 0):
            raise IntegrityError(f"block {block_id} is neither free, idle nor in use")
    if pool.num_free + len(idle) + len(references) != pool.num_blocks:
        raise IntegrityError("free + idle + in use is not the pool")
    _check_scopes(manager)


def _check_scopes(manager: KVCacheManager) -> None:
    size, keys = manager.block_size, manager.keys
    for node in manager.index:
        if node.scope is None or node.scope_key != keys.key(node.scope):
            raise IntegrityError(f"block {node.block_id} is stored under a key that is not its scope's")
        if manager.pool.owner(node.block_id) != node.scope.tenant:
            raise IntegrityError(f"block {node.block_id} counts against a tenant that does not own it")
        parent = node.parent.scope if node.parent else None
        if parent and not (
            parent.level <= node.scope.level and node.scope.is_within(parent.tenant, parent.user, parent.session)
        ):
            raise IntegrityError(f"block {node.block_id} follows a block of a scope it is not inside")
    for seq_id, blocks in manager.sequences.items():
        manager.block_table(seq_id)
        if [node.block_id for node in blocks.nodes] != blocks.block_table[: len(blocks.nodes)]:
            raise IntegrityError(f"sequence {seq_id} has nodes that are not its blocks")
        for depth, node in enumerate(blocks.nodes):
            if node.depth != depth or len(node.tokens) != size:
                raise IntegrityError(f"sequence {seq_id} has a partial block in the middle")
        if blocks.tail and blocks.tail.block_id != blocks.block_table[len(blocks.nodes)]:
            raise IntegrityError(f"sequence {seq_id} has a tail that is not its last block")
