"""Which token sequences have rows in the pool: a forest of blocks, one child list per scope.

Each node is one block. A full node may have children; a partial one never does. Full blocks are found by key,
partial overlaps by bisection in the sorted children.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prefixkv.cache.keys import BlockKey, ScopeKey, block_key
from prefixkv.errors import IntegrityError
from prefixkv.scope import Scope

__all__ = ["BlockIndex", "Node", "common_prefix"]

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One indexed block.

    Attributes:
        uid: Identity that is never used again, unlike block ids.
        block_id: Where the rows are; -1 for the root.
        depth: The rows are positions ``depth * block_size`` onward.
        tokens: Ids of the rows that are committed; fewer than ``block_size`` in a partial node.
        scope: Whose they are.
        scope_key: Key of the scope when they were committed.
        created_s: When they were first committed, by the clock of :class:`~prefixkv.cache.expiry.Expiry`.
        used_s: When a sequence last began or ceased to use them.
        is_indexed: Whether it can be found.
    """

    uid: int
    block_id: int
    depth: int
    tokens: Tokens
    scope: Scope | None
    scope_key: ScopeKey
    key: BlockKey
    parent: Node | None
    children: dict[ScopeKey, list[Node]] = field(default_factory=dict, repr=False)
    created_s: float = 0.0
    used_s: float = 0.0
    is_indexed: bool = True

    @property
    def tenant(self) -> str | None:
        """Whose tenant's it is; None is public text."""
        return self.scope.tenant if self.scope else None

    @property
    def is_leaf(self) -> bool:
        """Whether no indexed block follows."""
        return not self.children

    def chain(self) -> list[Node]:
        """Return the blocks from the start of the text to this one; empty for the root."""
        chain: list[Node] = []
        node = self
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def is_prefix_of(self, token_ids: Sequence[int]) -> bool:
        """Return whether the text up to this block is how these tokens begin."""
        tokens = tuple(token for node in self.chain() for token in node.tokens)
        return tuple(token_ids[: len(tokens)]) == tokens


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading ids are equal. Both sequences must be of the same type."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _tokens_of(node: Node) -> Tokens:
    return node.tokens


def _oldest(children: list[Node], beginning: Tokens) -> Node:
    """Return the one that was stored first of sorted children that begin alike; there is at least one."""
    size = len(beginning)
    start = bisect_left(children, beginning, key=_tokens_of)
    end = bisect_right(children, beginning, lo=start, key=lambda node: node.tokens[:size])
    return min(children[start:end], key=lambda node: node.uid)


class BlockIndex:
    """Finds blocks by what they hold. Only the manager writes it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(0, -1, -1, (), None, ScopeKey(b""), BlockKey(b""), None)
        self.collisions = 0
        self._next_uid = 1
        self._buckets: dict[BlockKey, list[Node]] = {}
        self._by_block: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_block.values())

    def node_of(self, block_id: int) -> Node | None:
        """Return the node that indexes a block, if any."""
        return self._by_block.get(block_id)

    def find(self, scope_key: ScopeKey, parent: Node, tokens: Tokens) -> Node | None:
        """Return the node of exactly these tokens behind ``parent``, verified token by token."""
        for node in self._buckets.get(block_key(scope_key, parent.uid, tokens), ()):
            if node.scope_key == scope_key and node.parent is parent and node.tokens == tokens:
                return node
            self.collisions += 1
        return None

    def longest_overlap(self, scope_keys: Iterable[ScopeKey], parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """Return the child of ``parent`` in these scopes with the longest common prefix with ``tokens``.

        Of children that agree equally far it is the one stored first: which of them is used, and so kept from eviction,
        must not depend on what else they say.

        Returns:
            The child and the number of common tokens; with 0 common tokens any child, or None if there is no child.
        """
        best: Node | None = None
        length = 0
        for scope_key in scope_keys:
            children = parent.children.get(scope_key)
            if not children:
                continue
            # In sorted order the closest relatives of `tokens` stand next to where it would be inserted.
            place = bisect_left(children, tokens, key=_tokens_of)
            overlap = max(common_prefix(node.tokens, tokens) for node in children[max(0, place - 1) : place + 1])
            if overlap > length or best is None:
                best = _oldest(children, tokens[:overlap]) if overlap else children[0]  # of which nothing is used
                length = overlap
        return best, length

    def insert(self, scope: Scope, scope_key: ScopeKey, parent: Node, tokens: Tokens, block_id: int) -> Node:
        """Add a block behind a full ``parent`` and return its node."""
        if block_id in self._by_block:
            raise IntegrityError(f"block {block_id} is indexed twice")
        if parent is not self.root and len(parent.tokens) != self.block_size:
            raise IntegrityError("a partial block cannot have children")
        node = Node(self._next_uid, block_id, parent.depth + 1, (), scope, scope_key, BlockKey(b""), parent)
        self._next_uid += 1
        self._by_block[block_id] = node
        self._link(node, tokens)
        return node

    def extend(self, node: Node, tokens: Tokens) -> None:
        """Let a partial node hold more of its block's rows; ``tokens`` are all of them."""
        if tokens[: len(node.tokens)] != node.tokens:
            raise IntegrityError("a node may only grow")
        self._unlink(node)
        self._link(node, tokens)

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        if not node.is_leaf:
            raise IntegrityError(f"block {node.block_id} is removed before its children")
        self._unlink(node)
        node.is_indexed = False
        del self._by_block[node.block_id]

    def _link(self, node: Node, tokens: Tokens) -> None:
        parent = node.parent or self.root
        node.tokens = tokens
        node.key = block_key(node.scope_key, parent.uid, tokens)
        self._buckets.setdefault(node.key, []).append(node)
        insort(parent.children.setdefault(node.scope_key, []), node, key=_tokens_of)

    def _unlink(self, node: Node) -> None:
        parent = node.parent or self.root
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        siblings = parent.children[node.scope_key]
        place = bisect_left(siblings, node.tokens, key=_tokens_of)
        while siblings[place] is not node:
            place += 1
        del siblings[place]
        if not siblings:
            del parent.children[node.scope_key]

    def check(self) -> None:
        """Raise unless nodes, keys, buckets and child lists agree."""
        bucketed = sum(len(bucket) for bucket in self._buckets.values())
        listed = sum(len(nodes) for nodes in self.root.children.values())
        for block_id, node in self._by_block.items():
            parent = node.parent or self.root
            listed += sum(len(nodes) for nodes in node.children.values())
            if node.block_id != block_id:
                raise IntegrityError("index and blocks are not a bijection")
            if node.key != block_key(node.scope_key, parent.uid, node.tokens):
                raise IntegrityError(f"the stored key of block {block_id} is not the key of its content")
            if node not in self._buckets.get(node.key, ()) or node not in parent.children.get(node.scope_key, ()):
                raise IntegrityError(f"block {block_id} cannot be found in the index")
            if parent is not self.root and self._by_block.get(parent.block_id) is not parent:
                raise IntegrityError(f"the parent of block {block_id} is gone")
            if not 0 < len(node.tokens) <= self.block_size or (node.children and len(node.tokens) < self.block_size):
                raise IntegrityError(f"block {block_id} holds {len(node.tokens)} tokens")
        if not bucketed == listed == len(self._by_block):
            raise IntegrityError("the index lists a block that it does not hold")
