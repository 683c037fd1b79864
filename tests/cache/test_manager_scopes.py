"""The manager: who may reuse what."""

from __future__ import annotations

import pytest

from prefixkv.errors import IntegrityError
from prefixkv.scope import Scope
from tests.cache.fakes import CHAT, REQUEST, SESSION, TENANT, USER, Pool, Spans, prefixes, scopes_of, text


def test_equal_prompts_of_two_tenants_share_nothing() -> None:
    pool = Pool()
    pool.remember(text(12), scopes_of("a", spans=CHAT))
    assert pool.num_cached(text(12), scopes_of("b", spans=CHAT)) == 0


@pytest.mark.parametrize(
    ("user", "session"), [("v", "s"), ("u", "t"), ("v", "t"), (None, "s"), ("u", None), (None, None)]
)
def test_others_of_the_tenant_share_the_system_prompt_to_the_token(user: str | None, session: str | None) -> None:
    """The border lies inside a block: its first two rows are copied to a block that the whole tenant may read."""
    pool = Pool()
    pool.remember(text(12), scopes_of("a", spans=CHAT))
    assert pool.remember(text(12), scopes_of("a", user, session, spans=CHAT)) == 6
    pool.check()


def test_no_indexed_block_spans_two_scopes() -> None:
    """The copy at the border holds the rows before it and zeros, nothing of the conversation."""
    pool = Pool()
    pool.remember(text(12), scopes_of("a", spans=CHAT))
    shared = [node for node in pool.manager.index if node.scope == Scope(TENANT, "a")]
    assert sorted(node.tokens for node in shared) == [(0, 1, 2, 3), (4, 5)]
    border = next(node for node in shared if node.tokens == (4, 5))
    assert pool.storage.blocks[border.block_id] == [*prefixes(text(6))[4:], None, None]


def test_each_border_inside_one_block_has_its_own_copy() -> None:
    spans = ((0, TENANT), (1, USER), (3, SESSION))
    pool = Pool()
    pool.remember(text(4), scopes_of("a", spans=spans))
    assert pool.num_cached(text(4), scopes_of("a", "v", "s", spans=spans)) == 1
    assert pool.num_cached(text(4), scopes_of("a", "u", "t", spans=spans)) == 3
    assert pool.num_cached(text(4), scopes_of("a", "u", "s", spans=spans)) == 3
    pool.check()


def test_a_border_between_blocks_needs_no_copy() -> None:
    pool = Pool()
    pool.remember(text(8), scopes_of("a", spans=((0, TENANT), (4, SESSION))))
    assert len(pool.manager.index) == 2
    assert pool.num_cached(text(8), scopes_of("a", "v", spans=((0, TENANT), (4, SESSION)))) == 4


def test_without_room_for_the_copy_the_sequence_goes_on() -> None:
    """The copy is a favour to others."""
    pool = Pool(num_blocks=2)
    scopes = scopes_of("a", spans=CHAT)
    pool.close(pool.start(text(8), scopes), text(8), 8)
    pool.check()
    assert pool.num_cached(text(8), scopes) == 7


def test_request_scope_is_never_stored() -> None:
    pool = Pool()
    scopes = scopes_of("a", spans=((0, TENANT), (6, REQUEST)))
    pool.remember(text(20), scopes)
    pool.check()
    assert pool.num_cached(text(20), scopes) == 6
    assert {node.scope.level for node in pool.manager.index if node.scope} == {TENANT}
    held = {row for rows in pool.storage.blocks for row in rows if row is not None}
    assert held == set(prefixes(text(6))), "rows of a request outlive it"


@pytest.mark.parametrize("num_blocks", [2, 8])
def test_a_tail_at_a_border_does_not_take_in_what_follows(num_blocks: int) -> None:
    """A tail that is indexed for the tenant must not grow into the conversation that shares its block.

    So it is copied; and where there is no room for the copy, it is not indexed at all.
    """
    pool = Pool(num_blocks)
    scopes, others = scopes_of("a", spans=CHAT), scopes_of("a", "v", spans=((0, TENANT),))
    opened = pool.open(text(8), scopes)
    assert opened is not None
    for start, end in ((0, 5), (5, 6), (6, 7)):
        pool.compute(opened[0], text(8), start, end, tail=True)
        assert pool.num_cached(text(9), others) == (4 if num_blocks == 2 else min(end, 6))
    pool.compute(opened[0], text(8), 7, 8)
    assert pool.num_cached(text(9), others) == (4 if num_blocks == 2 else 6)
    assert pool.num_cached(text(9), scopes) == 8
    pool.check()


@pytest.mark.parametrize(("prompt", "spans"), [(text(3), ((0, TENANT),)), ([*text(3), 9], ((0, TENANT), (3, SESSION)))])
def test_rows_in_a_narrow_scope_do_not_stand_in_for_those_of_a_wide_one(prompt: list[int], spans: Spans) -> None:
    """That a conversation holds the text already is no help to others of the tenant."""
    pool = Pool()
    pool.remember(text(4), scopes_of("a"))
    pool.remember(prompt, scopes_of("a", spans=spans))
    pool.check()
    assert pool.num_cached(text(4), scopes_of("a", "v", spans=spans)) == 3


def test_a_narrow_block_never_gets_a_wide_child() -> None:
    """What rests on a conversation may not be offered to the tenant; the rows are copied instead."""
    pool = Pool()
    pool.remember(text(12), scopes_of("a"))
    wide = scopes_of("a", spans=((0, TENANT),))
    pool.remember(text(12), wide)
    pool.check()
    assert pool.num_cached(text(12), scopes_of("a", "v", "t", spans=((0, TENANT),))) == 11


def test_text_published_after_it_was_sent_does_not_hide_what_followed_it() -> None:
    """The published chain is new and short; the conversation's old one goes on further."""
    pool = Pool()
    scopes = scopes_of("a", spans=CHAT)
    pool.remember(text(20), scopes)
    for tenant in (None, "a"):
        pool.publish(text(6), tenant)
        assert pool.num_cached(text(20), scopes) == 19
        assert pool.num_cached(text(20), scopes_of("b")) == 6
    pool.check()


def test_published_text_is_everybodys_or_one_tenants() -> None:
    pool = Pool()
    pool.publish(text(6))
    pool.publish(text(6, seed=1), "a")
    assert pool.num_cached(text(9), scopes_of("a")) == pool.num_cached(text(9), scopes_of("b")) == 6
    assert pool.num_cached(text(9, seed=1), scopes_of("a")) == 6
    assert pool.num_cached(text(9, seed=1), scopes_of("b")) == 0


def test_a_foreign_block_in_a_table_is_refused() -> None:
    """The last line of defence: were the index wrong, nothing would be read through it."""
    pool = Pool()
    mine, theirs = scopes_of("a"), scopes_of("b")
    pool.remember(text(8), theirs)
    seq_id = pool.start(text(8), mine)
    foreign = pool.manager.match(text(9), theirs).nodes[0]
    pool.manager.sequences[seq_id].nodes[0] = foreign
    pool.manager.sequences[seq_id].block_table[0] = foreign.block_id
    with pytest.raises(IntegrityError):
        pool.manager.block_table(seq_id)
    with pytest.raises(IntegrityError):
        pool.manager.check()


@pytest.mark.parametrize("opening", [1, 3])
def test_what_a_session_brings_as_its_tenants_is_shared_though_its_own_block_is_a_hit(opening: int) -> None:
    """It sent the same text as its own before; the block that matches is the session's, and others may not read it."""
    pool = Pool()
    pool.remember(text(8), scopes_of("a"))
    spans = ((0, TENANT), (opening, SESSION))
    pool.remember(text(8), scopes_of("a", spans=spans))
    assert pool.num_cached(text(8), scopes_of("a", "v", "t", spans=spans)) == opening
    pool.check()
