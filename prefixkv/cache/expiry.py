"""How long blocks live: idle and absolute limits per scope, by a clock that can be injected."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from prefixkv.cache.index import Node
from prefixkv.lifetime import Lifetime, end_of_life
from prefixkv.scope import Scope

__all__ = ["Expiry"]

_FEW_ENTRIES = 1024


class Expiry:
    """Knows which indexed blocks are past their time. Destroys nothing itself.

    Each block stands in a heap once, under a time that is no later than its end; it is looked at again then, so using a
    block costs nothing here. Entries of blocks that are gone are dropped when they are half of all.

    Args:
        lifetime: Of the blocks of a scope.
        clock: Seconds that only grow.
    """

    def __init__(self, lifetime: Callable[[Scope], Lifetime], clock: Callable[[], float]) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._heap: list[tuple[float, int, Node]] = []
        self._most_entries = _FEW_ENTRIES

    def added(self, node: Node) -> None:
        """Note that a block was stored just now."""
        node.created_s = node.used_s = self._clock()
        self._push(node)

    def used(self, node: Node) -> None:
        """Note that a block is used just now."""
        node.used_s = self._clock()

    def due(self) -> Iterator[Node]:
        """Iterate over the blocks whose time has come, each once. Those in use and pinned ones are named as well."""
        while self._heap and self._heap[0][0] <= self._clock():
            node = heapq.heappop(self._heap)[2]
            if not node.is_indexed:
                continue
            if self._end(node) <= self._clock():
                yield node
            else:
                self._push(node)

    def unpinned(self, node: Node) -> None:
        """Note that a block that may have been named while it could not go may go now."""
        self._push(node)

    def drop_gone(self) -> None:
        """Drop all entries of blocks that are not indexed any more: they name the blocks' tokens."""
        self._heap = [entry for entry in self._heap if entry[2].is_indexed]
        heapq.heapify(self._heap)
        self._most_entries = max(_FEW_ENTRIES, 2 * len(self._heap))

    def rebuild(self, nodes: Iterable[Node]) -> None:
        """Begin anew, since lifetimes have changed."""
        self._heap = []
        for node in nodes:
            self._push(node)

    def next_s(self) -> float | None:
        """Return the seconds until something may be due, 0 if it is now, or None if nothing ever is."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def _push(self, node: Node) -> None:
        end = self._end(node)
        if end != math.inf:
            heapq.heappush(self._heap, (end, node.uid, node))
            if len(self._heap) > self._most_entries:
                self.drop_gone()

    def _end(self, node: Node) -> float:
        if node.scope is None:
            return math.inf
        return end_of_life(self._lifetime(node.scope), used_s=node.used_s, created_s=node.created_s)
