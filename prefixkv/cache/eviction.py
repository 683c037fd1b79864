"""Which idle block goes first: inside a tenant, the least recently used leaf."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from prefixkv.cache.index import Node

__all__ = ["LRUEviction"]


class LRUEviction:
    """Idle nodes of each tenant, oldest first. A pinned or referenced node is never in here.

    A chain is added tail first, so the order alone evicts tails before heads; the leaf check guards the rest.

    Attributes:
        changed: Tenants whose first idle node came since somebody cleared it, in order.
    """

    def __init__(self) -> None:
        self._idle: dict[str | None, OrderedDict[Node, None]] = {}
        self._count = 0
        self.changed: dict[str | None, None] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, node: Node) -> bool:
        return node in self._idle.get(node.tenant, ())

    def __iter__(self) -> Iterator[Node]:
        for nodes in self._idle.values():
            yield from nodes

    def tenants(self) -> Iterator[str | None]:
        """Iterate over the tenants that have idle blocks."""
        return iter(self._idle)

    def of(self, tenant: str | None) -> Iterator[Node]:
        """Iterate over a tenant's idle blocks, the one first that is due first."""
        return iter(self._idle.get(tenant, ()))

    def num_idle(self, tenant: str | None) -> int:
        """Return how many idle blocks a tenant has."""
        return len(self._idle.get(tenant, ()))

    def add(self, node: Node) -> None:
        """Note that a node fell idle just now."""
        tenant = node.tenant
        if tenant not in self._idle:
            self._idle[tenant] = OrderedDict()
            self.changed[tenant] = None
        self._idle[tenant][node] = None
        self._count += 1

    def remove(self, node: Node) -> None:
        """Forget a node that is used again or gone."""
        tenant = node.tenant
        nodes = self._idle[tenant]
        del nodes[node]
        if not nodes:
            del self._idle[tenant]
            self.changed.pop(tenant, None)
        self._count -= 1

    def demote(self, node: Node) -> None:
        """Make an idle node the first to go."""
        self._idle[node.tenant].move_to_end(node, last=False)

    def victim(self, tenant: str | None) -> Node | None:
        """Return the tenant's node to evict next, or None. Does not mutate."""
        for node in self._idle.get(tenant, ()):
            if node.is_leaf:
                return node
        return None
