"""The manager: what is reused, to the token, also while it is still being written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.table import CopyRows, ZeroBlocks
from prefixkv.scope import ScopeLevel
from tests.cache.fakes import Pool, prefixes, scopes_of, text


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16])
@given(length=st.integers(1, 40))
def test_a_prompt_seen_before_costs_one_token(block_size: int, length: int) -> None:
    """At any length: the last token is always computed, since its logits are wanted."""
    pool = Pool(128, block_size)
    scopes = scopes_of("a")
    assert pool.remember(text(length), scopes) == 0
    assert pool.num_cached(text(length), scopes) == length - 1
    pool.check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16])
@given(length=st.integers(1, 40), shared=st.integers(0, 40), more=st.integers(1, 9))
def test_a_prompt_that_shares_its_first_tokens_reuses_just_those(
    block_size: int, length: int, shared: int, more: int
) -> None:
    pool = Pool(128, block_size)
    scopes = scopes_of("a")
    shared = min(shared, length)
    pool.remember(text(length), scopes)
    other = text(length)[:shared] + text(more, seed=1)
    assert pool.remember(other, scopes) == shared
    assert pool.num_cached(other, scopes) == len(other) - 1
    pool.check()


def test_a_match_says_whether_a_readable_block_goes_on_differently() -> None:
    """A miss because a prompt changed is another thing than a miss because it is new."""
    pool = Pool()
    scopes = scopes_of("a")
    pool.remember(text(10), scopes)
    assert pool.manager.match(text(6) + text(4, seed=1), scopes).diverged
    assert not pool.manager.match(text(16), scopes).diverged
    assert not pool.manager.match(text(16), scopes_of("b")).diverged


def test_a_match_changes_nothing() -> None:
    pool = Pool()
    pool.remember(text(10), scopes_of("a"))
    before = (list(pool.manager.idle), pool.manager.pool.num_free)
    pool.manager.match(text(10), scopes_of("a"))
    assert (list(pool.manager.idle), pool.manager.pool.num_free) == before


def test_full_blocks_are_reusable_while_their_owner_computes() -> None:
    pool = Pool()
    scopes = scopes_of("a")
    opened = pool.open(text(20), scopes)
    assert opened is not None
    pool.compute(opened[0], text(20), 0, 10)
    assert pool.num_cached(text(20), scopes) == 8
    pool.check()


def test_a_live_tail_is_readable_while_its_owner_decodes() -> None:
    """The owner writes on behind the committed rows; readers copy only those."""
    pool = Pool()
    scopes = scopes_of("a")
    owner = pool.start(text(6), scopes, room=2)
    pool.compute(owner, text(7), 6, 7)
    opened = pool.open([*text(6), 77, 78], scopes)
    assert opened is not None and opened[1] == 6
    reader, _ = opened
    assert pool.storage.read(pool.manager.block_table(reader), 8) == [*prefixes(text(6)), None, None]
    assert pool.manager.block_table(reader)[0] == pool.manager.block_table(owner)[0]
    assert pool.manager.block_table(reader)[1] != pool.manager.block_table(owner)[1]
    pool.compute(reader, [*text(6), 77, 78], 6, 8)
    pool.compute(owner, text(8), 7, 8)
    pool.check()
    assert pool.num_cached([*text(8), 0], scopes) == 8
    assert pool.num_cached([*text(6), 77, 78, 0], scopes) == 8


def test_two_sequences_that_compute_the_same_block_end_up_with_one() -> None:
    pool = Pool()
    scopes = scopes_of("a")
    first, second = pool.open(text(8), scopes), pool.open(text(8), scopes)
    assert first is not None and second is not None
    free = pool.manager.pool.num_free
    pool.compute(first[0], text(8), 0, 8)
    pool.compute(second[0], text(8), 0, 8)
    assert pool.manager.block_table(second[0]) == pool.manager.block_table(first[0])
    assert pool.manager.pool.num_free == free + 2
    pool.check()
    pool.close(first[0], text(8), 8)
    assert pool.storage.read(pool.manager.block_table(second[0]), 8) == prefixes(text(8))
    pool.check()


def test_a_pinned_tail_outlives_the_block_it_was_a_part_of() -> None:
    """Its owner may find the whole block elsewhere; what was pinned stays findable whatever happens to that one."""
    pool = Pool(num_blocks=4)
    scopes = ScopeMap.for_publication("a")
    owner = pool.start(text(2), scopes, room=2)
    pin = pool.manager.pin(text(2), scopes)
    pool.remember(text(4), scopes)
    pool.compute(owner, text(4), 2, 4)
    pool.check()
    pool.close(owner, text(4), 4)
    pool.remember(text(12, seed=1), scopes_of("b"))
    pool.check()
    assert pool.num_cached(text(4), scopes) == 2
    pool.manager.unpin(pin)
    pool.check()


def test_row_work_keeps_its_order_and_clears_are_joined() -> None:
    """A copy out of a block comes before its clearing, a copy into one after it."""
    pool = Pool(num_blocks=2)
    pool.remember(text(6), scopes_of("a"))
    opened = pool.manager.open(1, pool.manager.match(text(4), scopes_of("b")), scopes_of("b"), 8)
    assert opened == 0
    assert [type(op) for op in pool.manager.take_ops()] == [ZeroBlocks]
    pool.manager.close(1, (), 0, keep=False)
    pool.carry_out()
    pool.remember(text(2), scopes_of("a"))
    pool.manager.open(2, pool.manager.match(text(3), scopes_of("a")), scopes_of("a"), 3)
    assert [type(op) for op in pool.manager.take_ops()] == [CopyRows]
    assert pool.manager.take_ops() == [], "handed out once"


def test_rows_that_were_not_kept_are_cleared() -> None:
    """A failed request leaves nothing behind, neither in the index nor in the pool."""
    pool = Pool()
    opened = pool.open(text(10), scopes_of("a"))
    assert opened is not None
    pool.storage.compute(pool.manager.block_table(opened[0]), 0, text(10))
    pool.close(opened[0], text(10), 0, keep=False)
    assert pool.manager.pool.num_free == 32
    assert pool.num_cached(text(10), scopes_of("a")) == 0
    pool.check()


@pytest.mark.parametrize("length", [7, 8, 12])
def test_what_is_pinned_holds_nothing_that_a_user_wrote_behind_it(length: int) -> None:
    pool = Pool()
    scopes = scopes_of("a", spans=((0, ScopeLevel.TENANT),))
    pool.remember(text(length), scopes)
    pin = pool.manager.pin(text(6), ScopeMap.for_publication("a"))
    pool.carry_out()
    pool.check()
    assert [len(node.tokens) for node in pool.manager.pins[pin]] == [4, 2]
    tail = pool.manager.pins[pin][-1]
    assert pool.storage.read([tail.block_id], 4) == [*prefixes(text(6))[4:], None, None]


def test_what_is_pinned_does_not_grow_with_whom_it_was_pinned_from() -> None:
    pool = Pool()
    scopes = scopes_of("a", spans=((0, ScopeLevel.TENANT),))
    user = pool.start(text(6), scopes, room=8)
    pin = pool.manager.pin(text(6), ScopeMap.for_publication("a"))
    pool.compute(user, text(7), 6, 7)
    pool.close(user, text(7), 7)
    pool.check()
    assert [len(node.tokens) for node in pool.manager.pins[pin]] == [4, 2]
    assert pool.num_cached(text(9), scopes) == 7
