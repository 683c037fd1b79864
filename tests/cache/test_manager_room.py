"""The manager: what happens when room runs out, and what is kept or destroyed on purpose."""

from __future__ import annotations

import pytest

from prefixkv.cache.retire import demote_scope, purge
from prefixkv.cache.scopes import ScopeMap
from prefixkv.scope import Scope
from tests.cache.fakes import CHAT, SESSION, Pool, everywhere, scopes_of, text


def test_open_is_all_or_nothing() -> None:
    pool = Pool(num_blocks=4)
    scopes = scopes_of("a")
    pool.remember(text(8), scopes)
    seq_id = pool.start(text(8, seed=1), scopes_of("b"))
    before = set(pool.manager.idle)
    assert pool.open([*text(8), *text(12, seed=2)], scopes) is None
    assert set(pool.manager.idle) == before
    assert list(pool.manager.sequences) == [seq_id]
    pool.check()


def test_reserve_is_all_or_nothing() -> None:
    pool = Pool(num_blocks=4)
    seq_id = pool.start(text(8), scopes_of("a"))
    pool.start(text(4, seed=1), scopes_of("b"))
    table = list(pool.manager.block_table(seq_id))
    assert not pool.manager.reserve(seq_id, 16)
    assert pool.manager.block_table(seq_id) == table
    assert pool.manager.pool.num_free == 1
    assert pool.manager.reserve(seq_id, 12)
    pool.check()


@pytest.mark.parametrize("call", range(4))
def test_an_allocation_that_fails_reserves_nothing(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever block of the request it happens."""
    pool = Pool(num_blocks=8)
    scopes = scopes_of("a")
    pool.remember(text(6), scopes)
    allocate, calls = pool.manager.pool.allocate, iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(pool.manager.pool, "allocate", lambda owner: allocate(owner) if next(calls) != call else None)
        assert pool.open(text(20), scopes) is None
    pool.check()
    assert pool.manager.sequences == {}
    assert len(pool.manager.idle) + pool.manager.pool.num_free == 8
    opened = pool.open(text(20), scopes)
    assert opened is not None and opened[1] == 6


def test_in_the_smallest_pool_the_block_to_copy_from_makes_room() -> None:
    """A prompt that fits alone must run even if the partial hit it would reuse is in its way."""
    pool = Pool(num_blocks=2)
    pool.remember(text(8), scopes_of("a"))
    opened = pool.open(text(6) + text(2, seed=1), scopes_of("a"))
    assert opened is not None and opened[1] == 4
    pool.check()


def test_tails_go_before_heads() -> None:
    pool = Pool(num_blocks=4)
    pool.remember(text(16), scopes_of("a"))
    pool.start(text(5, seed=1), scopes_of("b"))
    assert pool.num_cached(text(16), scopes_of("a")) == 8
    pool.check()


@pytest.mark.parametrize("how", ["closed", "unpinned", "demoted"])
def test_a_chain_falls_idle_tail_first(how: str) -> None:
    """So the first idle block is a leaf, and finding a victim takes one look."""
    pool = Pool()
    if how == "unpinned":
        pool.manager.unpin(pool.publish(text(16)))
    else:
        pool.remember(text(16), scopes_of("a"))
    if how == "demoted":
        demote_scope(pool.manager, Scope(SESSION, "a", "u", "s"))
    assert [node.depth for node in pool.manager.idle] == [3, 2, 1, 0]


def test_the_tenant_most_over_its_share_loses_first() -> None:
    """By blocks per weight, not by age: a's blocks are the oldest here and b's fewer."""
    pool = Pool(num_blocks=11, weight={"a": 4.0, "b": 1.0, "c": 1.0}.__getitem__)
    pool.remember(text(24), scopes_of("a"))
    pool.remember(text(12), scopes_of("b"))
    pool.remember(text(12), scopes_of("c"))
    assert pool.num_cached(text(24), scopes_of("a")) == 23
    assert pool.num_cached(text(12), scopes_of("b")) == 8
    pool.check()


def test_public_text_is_evicted_last() -> None:
    pool = Pool(num_blocks=4)
    pool.manager.unpin(pool.publish(text(4)))
    pool.remember(text(4, seed=1), scopes_of("a"))
    pool.start(text(12, seed=2), scopes_of("b"))
    assert pool.num_cached(text(5), scopes_of("a")) == 4
    assert pool.num_cached(text(5, seed=1), scopes_of("a")) == 0
    pool.start(text(4, seed=3), scopes_of("c"))
    assert pool.num_cached(text(5), scopes_of("a")) == 0
    pool.check()


def test_a_tenant_at_its_ceiling_makes_room_for_itself_only() -> None:
    pool = Pool(num_blocks=16, ceiling={"a": 4, "b": None}.get)
    pool.remember(text(8), scopes_of("b"))
    for seed in range(1, 5):
        pool.remember(text(8, seed), scopes_of("a"))
        assert pool.manager.pool.owned_blocks["a"] <= 4
        pool.check()
    assert pool.num_cached(text(8), scopes_of("b")) == 7
    assert pool.open(text(17), scopes_of("a")) is None, "five blocks"
    assert pool.manager.pool.num_free > 5


def test_a_lowered_ceiling_is_kept_from_the_next_allocation_on() -> None:
    ceilings: dict[str, int] = {}
    pool = Pool(num_blocks=16, ceiling=ceilings.get)
    for seed in range(5):
        pool.remember(text(8, seed), scopes_of("a"))
    ceilings["a"] = 3
    pool.remember(text(4, seed=9), scopes_of("a"))
    assert pool.manager.pool.owned_blocks["a"] == 3
    pool.check()


def test_public_blocks_do_not_count_against_a_ceiling() -> None:
    pool = Pool(num_blocks=16, ceiling={"a": 2}.get)
    pool.publish(text(16))
    assert pool.open(text(24), scopes_of("a")) is not None
    pool.check()


def test_what_can_be_had_is_counted_exactly() -> None:
    """The scheduler trusts this number: one too many and a reserve fails, one too few and a request waits forever."""
    pool = Pool(num_blocks=8, ceiling={"a": 4}.get)
    pool.remember(text(8), scopes_of("a"))
    pool.start(text(4, seed=1), scopes_of("b"))
    mine = list(pool.manager.idle)
    assert pool.manager.num_available("a", keep=mine[:1]) == 3
    assert pool.manager.num_available("b", keep=mine[:1]) == pool.manager.num_available("b") - 1 == 6
    for tenant in ("a", "b", None):
        count = pool.manager.num_available(tenant)
        scopes = scopes_of(tenant) if tenant else ScopeMap.for_publication(None)
        assert pool.open(text(4 * count + 1, seed=2), scopes) is None
        opened = pool.open(text(4 * count, seed=2), scopes)
        assert opened is not None
        pool.close(opened[0], (), 0, keep=False)
        pool.check()


def test_a_pin_survives_pressure_and_falls_idle_after_it() -> None:
    pool = Pool(num_blocks=8)
    pin = pool.publish(text(6))
    for seed in range(1, 6):
        pool.remember(text(24, seed), scopes_of("a"))
        assert pool.num_cached(text(7), scopes_of("b")) == 6
    pool.manager.unpin(pin)
    pool.check()
    pool.remember(text(32, seed=9), scopes_of("a"))
    assert pool.num_cached(text(7), scopes_of("b")) == 0


def test_text_pinned_twice_needs_two_unpins() -> None:
    pool = Pool(num_blocks=4)
    pins = [pool.publish(text(4)), pool.publish(text(4))]
    pool.manager.unpin(pins[0])
    pool.remember(text(12, seed=1), scopes_of("a"))
    assert pool.num_cached(text(5), scopes_of("b")) == 4
    pool.manager.unpin(pins[1])
    pool.check()


@pytest.mark.parametrize(
    ("identity", "left"),
    [
        (("a", None, None), {"b": 11}),
        (("a", "u", None), {"a": 6, "b": 11}),
        (("a", None, "s"), {"a": 6, "b": 11}),
        ((None, "u", None), {"a": 6, "b": 6}),
        ((None, None, None), {}),
        (("c", None, None), {"a": 11, "b": 11}),
        (("a", "v", None), {"a": 11, "b": 11}),
    ],
)
def test_a_purge_takes_an_identity_and_nothing_else(
    identity: tuple[str | None, str | None, str | None], left: dict[str, int]
) -> None:
    pool = Pool()
    for tenant in ("a", "b"):
        pool.remember(text(12), scopes_of(tenant, spans=CHAT))
    held = len(pool.manager.index)
    blocks, tokens = purge(pool.manager, *identity)
    pool.carry_out()
    pool.check()
    assert {t: n for t in ("a", "b") if (n := pool.num_cached(text(12), scopes_of(t, spans=CHAT)))} == left
    assert len(pool.manager.index) == held - blocks
    assert (tokens > 0) == (blocks > 0)


def test_purged_rows_are_overwritten() -> None:
    pool = Pool()
    pool.remember(text(12), scopes_of("a", spans=CHAT))
    purge(pool.manager, "a", None, None)
    pool.carry_out()
    assert not any(row for rows in pool.storage.blocks for row in rows)


def test_a_purge_of_everything_takes_public_text_and_its_pins() -> None:
    pool = Pool()
    pool.publish(text(6))
    purge(pool.manager, None, None, None)
    pool.carry_out()
    assert pool.manager.pins == {}
    assert pool.manager.pool.num_free == 32
    pool.check()


def test_a_purged_tenant_loses_its_publications_not_the_public_ones_below() -> None:
    pool = Pool()
    public = pool.publish(text(4))
    own = pool.publish(text(8), "a")
    purge(pool.manager, "a", None, None)
    pool.carry_out()
    assert set(pool.manager.pins) == {public}
    assert own not in pool.manager.pins
    assert pool.num_cached(text(9), scopes_of("a")) == 4
    pool.check()


def test_a_tenant_starts_anew_after_a_purge() -> None:
    pool = Pool()
    scopes = scopes_of("a", spans=CHAT)
    for _ in range(3):
        assert pool.remember(text(12), scopes) == 0
        assert pool.num_cached(text(12), scopes) == 11
        keys = {pool.manager.keys.key(scope) for scope in scopes.scopes}
        purge(pool.manager, "a", None, None)
        assert keys.isdisjoint(pool.manager.keys.key(scope) for scope in scopes.scopes), "a missed block could be found"
        pool.carry_out()
        pool.check()


def test_an_ended_session_is_evicted_first_and_its_system_prompt_is_not() -> None:
    pool = Pool(num_blocks=10)
    ended, other = scopes_of("a", session="s", spans=CHAT), scopes_of("a", session="t", spans=CHAT)
    pool.remember([*text(6), *text(6, seed=1)], other)
    pool.remember([*text(6), *text(6, seed=2)], ended)
    place = Scope(SESSION, "a", "u", "s")
    assert demote_scope(pool.manager, place) == len(everywhere(pool.manager, place)) == 2
    pool.start(text(24, seed=3), scopes_of("b"))
    pool.check()
    assert everywhere(pool.manager, place) == []
    assert pool.num_cached([*text(6), *text(6, seed=1)], other) == 11
