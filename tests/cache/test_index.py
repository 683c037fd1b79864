"""The index: what is found was put there, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache import index as index_module
from prefixkv.cache.index import BlockIndex, common_prefix
from prefixkv.cache.keys import BlockKey, ScopeKey
from prefixkv.errors import IntegrityError
from prefixkv.scope import Scope
from tests.cache.fakes import SESSION, TENANT, Pool, scopes_of

KEYS = (ScopeKey(b"a" * 16), ScopeKey(b"b" * 16))
SCOPE = Scope(TENANT, "a")
tokens = st.lists(st.integers(0, 3), max_size=6).map(tuple)


@pytest.fixture
def colliding_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sixteen keys for everything: what somebody who can make xxHash collide would do to us."""
    real = index_module.block_key
    monkeypatch.setattr(index_module, "block_key", lambda *args: BlockKey(bytes([real(*args)[0] & 15])))
    yield


@given(tokens, tokens)
def test_common_prefix_counts_equal_leading_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    slow = 0
    while slow < min(len(one), len(other)) and one[slow] == other[slow]:
        slow += 1
    assert common_prefix(one, other) == slow


@given(st.lists(st.tuples(st.sampled_from(KEYS), tokens.filter(bool))), tokens, st.sets(st.sampled_from(KEYS)))
def test_the_longest_overlap_is_found_among_any_children(
    children: list[tuple[ScopeKey, tuple[int, ...]]], wanted: tuple[int, ...], readable: set[ScopeKey]
) -> None:
    """Bisection looks at two neighbours; the oracle looks at all."""
    index = BlockIndex(6)
    for block_id, (key, text) in enumerate(children):
        index.insert(SCOPE, key, index.root, text, block_id)
    index.check()
    found, length = index.longest_overlap(sorted(readable), index.root, wanted)
    seen = [text for key, text in children if key in readable]
    assert length == max((common_prefix(text, wanted) for text in seen), default=0)
    assert (found is None) == (not seen)
    if found is not None:
        assert found.scope_key in readable
        assert common_prefix(found.tokens, wanted) == length


def test_the_same_words_in_another_scope_or_behind_another_text_are_not_found() -> None:
    index = BlockIndex(2)
    first = index.insert(SCOPE, KEYS[0], index.root, (1, 2), 0)
    other = index.insert(SCOPE, KEYS[0], index.root, (3, 4), 1)
    node = index.insert(SCOPE, KEYS[0], first, (5, 6), 2)
    assert index.find(KEYS[0], first, (5, 6)) is node
    assert index.find(KEYS[1], first, (5, 6)) is None
    assert index.find(KEYS[0], other, (5, 6)) is None
    assert index.find(KEYS[0], first, (5,)) is None
    assert node.chain() == [first, node]
    assert index.root.chain() == []


def test_a_block_id_that_comes_back_is_another_block() -> None:
    """Children are tied to the identity of their parent, which unlike a block id is never used again."""
    index = BlockIndex(1)
    old = index.insert(SCOPE, KEYS[0], index.root, (1,), 7)
    index.remove(old)
    new = index.insert(SCOPE, KEYS[0], index.root, (2,), 7)
    assert new.uid != old.uid
    assert index.find(KEYS[0], old, (3,)) is None


def test_a_partial_block_grows_and_is_then_found_whole() -> None:
    index = BlockIndex(3)
    node = index.insert(SCOPE, KEYS[0], index.root, (1,), 0)
    assert index.find(KEYS[0], index.root, (1, 2, 3)) is None
    index.extend(node, (1, 2))
    index.extend(node, (1, 2, 3))
    assert index.find(KEYS[0], index.root, (1, 2, 3)) is node
    assert index.find(KEYS[0], index.root, (1,)) is None
    index.check()


def test_what_would_break_the_forest_is_refused() -> None:
    index = BlockIndex(2)
    partial = index.insert(SCOPE, KEYS[0], index.root, (1,), 0)
    with pytest.raises(IntegrityError, match="children"):
        index.insert(SCOPE, KEYS[0], partial, (2,), 1)
    with pytest.raises(IntegrityError, match="twice"):
        index.insert(SCOPE, KEYS[0], index.root, (2,), 0)
    with pytest.raises(IntegrityError, match="grow"):
        index.extend(partial, (2, 2))
    index.extend(partial, (1, 2))
    index.insert(SCOPE, KEYS[0], partial, (3,), 1)
    with pytest.raises(IntegrityError, match="before its children"):
        index.remove(partial)
    index.check()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda index, node: setattr(node, "tokens", (9, 9)), id="tokens changed"),
        pytest.param(lambda index, node: setattr(node, "scope_key", KEYS[1]), id="moved to another scope"),
        pytest.param(lambda index, node: setattr(node, "block_id", 5), id="moved to another block"),
        pytest.param(lambda index, node: index._buckets.clear(), id="buckets lost"),
        pytest.param(lambda index, node: node.parent.children.clear(), id="child list lost"),
        pytest.param(lambda index, node: index._by_block.pop(0), id="parent evicted"),
    ],
)
def test_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    index = BlockIndex(2)
    parent = index.insert(SCOPE, KEYS[0], index.root, (1, 2), 0)
    node = index.insert(SCOPE, KEYS[0], parent, (3, 4), 1)
    index.check()
    damage(index, node)
    with pytest.raises(IntegrityError):
        index.check()


def test_colliding_keys_change_no_result_and_are_counted(colliding_keys: None) -> None:
    """A collision costs time, never a wrong hit: a hit counts only after tokens, parent and scope are compared."""
    pool = Pool(64, block_size=2)
    scopes = {name: scopes_of(name, spans=((0, TENANT), (4, SESSION))) for name in ("a", "b")}
    texts = [[n % 4, n // 4 % 4, 1, 2, 3, n % 3] for n in range(10)]
    for tenant in scopes.values():
        for text in texts:
            pool.remember(text, tenant)
            pool.check()
    assert pool.manager.index.collisions > 0
    for tenant in scopes.values():
        for text in texts:
            assert pool.num_cached(text, tenant) == len(text) - 1
    assert pool.num_cached(texts[0], scopes_of("c")) == 0


def test_honest_keys_do_not_collide() -> None:
    """Otherwise the counter would say nothing."""
    pool = Pool(64, block_size=2)
    for n in range(10):
        pool.remember([n % 4, n // 4, 1, 2, 3, n % 3], scopes_of("a"))
    assert pool.manager.index.collisions == 0


def test_words_do_not_decide_which_of_equally_close_blocks_is_used() -> None:
    """The one that is used is kept from eviction, and what is evicted others may see: so it is the oldest."""
    for tails in ((1, 3), (3, 1)):
        index = BlockIndex(4)
        nodes = [index.insert(SCOPE, KEYS[0], index.root, (7, 7, tail), place) for place, tail in enumerate(tails)]
        assert index.longest_overlap(KEYS[:1], index.root, (7, 7, 2, 2)) == (nodes[0], 2)
