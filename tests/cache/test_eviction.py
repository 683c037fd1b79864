"""Which idle block goes first."""

from __future__ import annotations

from prefixkv.cache.eviction import LRUEviction
from prefixkv.cache.index import BlockIndex, Node
from prefixkv.cache.keys import ScopeKey
from prefixkv.scope import Scope
from tests.cache.fakes import PUBLIC, TENANT

KEY = ScopeKey(b"k" * 16)


class _Forest:
    def __init__(self) -> None:
        self.index = BlockIndex(1)
        self.idle = LRUEviction()
        self._next = 0

    def grow(self, scope: Scope, parent: Node | None = None) -> Node:
        self._next += 1
        return self.index.insert(scope, KEY, parent or self.index.root, (self._next,), self._next)


A, B = Scope(TENANT, "a"), Scope(TENANT, "b")


def test_the_least_recently_used_goes_first() -> None:
    forest = _Forest()
    nodes = [forest.grow(A) for _ in range(3)]
    for node in nodes:
        forest.idle.add(node)
    forest.idle.remove(nodes[0])
    forest.idle.add(nodes[0])
    assert forest.idle.victim("a") is nodes[1]


def test_a_parent_never_goes_before_its_child() -> None:
    """A child without its parent could not be found, and its block would be lost until a restart."""
    forest = _Forest()
    parent = forest.grow(A)
    child = forest.grow(A, parent)
    forest.idle.add(parent)
    forest.idle.add(child)
    assert forest.idle.victim("a") is child
    forest.idle.remove(child)
    forest.index.remove(child)
    assert forest.idle.victim("a") is parent


def test_a_tenant_loses_only_its_own() -> None:
    forest = _Forest()
    mine, theirs, public = forest.grow(A), forest.grow(B), forest.grow(Scope(PUBLIC))
    for node in (theirs, public, mine):
        forest.idle.add(node)
    assert forest.idle.victim("a") is mine
    assert forest.idle.victim("b") is theirs
    assert forest.idle.victim(None) is public
    assert forest.idle.victim("c") is None


def test_a_demoted_block_goes_before_older_ones() -> None:
    forest = _Forest()
    old, new = forest.grow(A), forest.grow(A)
    forest.idle.add(old)
    forest.idle.add(new)
    forest.idle.demote(new)
    assert forest.idle.victim("a") is new


def test_counts_and_membership_follow() -> None:
    forest = _Forest()
    mine, theirs = forest.grow(A), forest.grow(B)
    forest.idle.add(mine)
    forest.idle.add(theirs)
    assert (len(forest.idle), forest.idle.num_idle("a"), forest.idle.num_idle("c")) == (2, 1, 0)
    assert set(forest.idle) == {mine, theirs}
    assert set(forest.idle.tenants()) == {"a", "b"}
    forest.idle.remove(mine)
    assert mine not in forest.idle
    assert theirs in forest.idle
    assert set(forest.idle.tenants()) == {"b"}
