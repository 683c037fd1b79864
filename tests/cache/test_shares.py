"""Floors protect, what they do not use is lent, ceilings bind, partitions are not lent."""

from __future__ import annotations

import pytest

from tests.cache.fakes import Pool, scopes_of, text


def owned(pool: Pool) -> dict[str | None, int]:
    return dict(pool.manager.pool.owned_blocks)


def make(num_blocks: int, floors: dict[str, int], partitions: tuple[str, ...] = (), **options: object) -> Pool:
    hard = {tenant: floors[tenant] for tenant in partitions}
    return Pool(
        num_blocks,
        floors=lambda: floors,
        partitions=lambda: hard,
        **{"ceiling": hard.get} | options,  # type: ignore[arg-type]
    )


def test_a_flood_takes_what_is_lent_and_stops_at_the_floor() -> None:
    pool = make(12, {"b": 4}, weight={"a": 100.0, "b": 1.0}.__getitem__)
    pool.remember(text(24, 1), scopes_of("b"))
    for seed in range(2, 9):
        pool.remember(text(16, seed), scopes_of("a"))
    assert owned(pool) == {"a": 8, "b": 4}
    assert pool.num_cached(text(24, 1), scopes_of("b")) == 16, "its tail went, its head stayed"
    pool.check()


def test_an_idle_tenant_keeps_its_floor_for_ever() -> None:
    pool = make(8, {"b": 3})
    pool.remember(text(12, 1), scopes_of("b"))
    for seed in range(2, 40):
        pool.remember(text(12, seed), scopes_of("a"))
    assert pool.num_cached(text(12, 1), scopes_of("b")) == 11


def test_what_a_floor_does_not_use_is_lent_and_comes_back() -> None:
    pool = make(8, {"b": 6})
    for seed in range(1, 3):
        pool.remember(text(16, seed), scopes_of("a"))
    assert owned(pool) == {"a": 8}, "all of it"
    pool.remember(text(24, 9), scopes_of("b"))
    assert owned(pool) == {"a": 2, "b": 6}
    assert pool.manager.shares.evicted_of("a") == (6, 6)
    pool.check()


def test_a_tenant_over_its_share_evicts_its_own() -> None:
    pool = make(8, {"b": 4})
    pool.remember(text(8, 1), scopes_of("b"))
    for seed in range(2, 6):
        pool.remember(text(12, seed), scopes_of("a"))
    assert pool.num_cached(text(8, 1), scopes_of("b")) == 7
    assert {pair for pair, count in pool.manager.shares.evictions.items() if count} == {("a", "a")}


def test_by_weight_behind_the_floors() -> None:
    """Four blocks of floor do not count: a is 4 over at weight 4, b is 3 over at weight 1."""
    pool = make(11, {"a": 4}, weight={"a": 4.0, "b": 1.0, "c": 1.0}.__getitem__)
    pool.remember(text(32, 1), scopes_of("a"))
    pool.remember(text(12, 2), scopes_of("b"))
    pool.remember(text(4, 3), scopes_of("c"))
    assert owned(pool) == {"a": 8, "b": 2, "c": 1}


def test_a_request_in_its_floor_finds_room_among_idle_blocks_of_others_and_a_borrower_does_not() -> None:
    pool = make(8, {"b": 4})
    pool.remember(text(16, 1), scopes_of("b"))
    pool.remember(text(16, 2), scopes_of("a"))
    shares = pool.manager.shares
    assert (shares.room("a"), shares.room("b"), shares.room("c"), shares.room(None)) == (4, 8, 4, 4)


def test_what_is_kept_for_a_match_is_not_counted_twice() -> None:
    pool = make(8, {"b": 4})
    pool.remember(text(16, 1), scopes_of("b"))
    match = pool.manager.match(text(17, 1), scopes_of("b"))
    assert len(match.nodes) == 4
    assert pool.manager.num_available("b", match.nodes) == pool.manager.num_available("b") - 4 == 4


def test_a_ceiling_of_ten_keeps_the_newest_ten() -> None:
    """Twenty written; the other tenant is untouched and nothing fails."""
    pool = Pool(64, ceiling={"a": 10, "b": None}.get)
    pool.remember(text(20, 99), scopes_of("b"))
    for seed in range(10):
        pool.remember(text(8, seed), scopes_of("a"))
    assert owned(pool) == {"a": 10, "b": 5}
    assert [pool.num_cached(text(8, seed), scopes_of("a")) for seed in range(10)] == [0] * 5 + [7] * 5
    assert pool.num_cached(text(20, 99), scopes_of("b")) == 19
    assert pool.manager.shares.evictions == {("a", "a"): 10}
    pool.check()


@pytest.mark.parametrize("load", [0, 1, 5])
def test_a_partition_is_the_same_whatever_others_do(load: int) -> None:
    """Room, hits and own evictions of ``a`` do not depend on ``b``."""
    pool = make(12, {"a": 5}, partitions=("a",))
    shares = pool.manager.shares
    seen: list[object] = []
    for turn in range(6):
        for seed in range(load):
            pool.remember(text(20, 100 + 10 * turn + seed), scopes_of("b"))
        seen.append((shares.available("a"), pool.remember(text(12, turn % 2), scopes_of("a"))))
        seen.append((owned(pool)["a"], shares.evicted_of("a")))
        pool.check()
    assert seen[:2] == [(5, 0), (3, (0, 0))]
    assert seen == [
        *[(5, 0), (3, (0, 0)), (5, 0), (5, (1, 0)), (5, 8), (5, (2, 0))],
        *[(5, 8), (5, (3, 0)), (5, 8), (5, (4, 0)), (5, 8), (5, (5, 0))],
    ]


def test_a_partition_is_not_lent_and_borrows_nothing() -> None:
    pool = make(8, {"a": 3}, partitions=("a",))
    pool.remember(text(32, 1)[:20], scopes_of("b"))
    assert owned(pool) == {"b": 5}
    assert pool.open(text(24, 2), scopes_of("b")) is None, "six blocks; three of the eight are not to be had"
    assert pool.open(text(16, 3), scopes_of("a")) is None, "four blocks"
    assert pool.open(text(12, 3), scopes_of("a")) is not None
    pool.check()


def test_a_partition_that_a_reload_enlarged_is_filled_from_what_others_borrowed() -> None:
    floors: dict[str, int] = {}
    pool = Pool(8, floors=lambda: floors, partitions=lambda: floors, ceiling=floors.get)
    pool.remember(text(32, 1), scopes_of("b"))
    floors["a"] = 4
    pool.remember(text(16, 2), scopes_of("a"))
    assert owned(pool) == {"a": 4, "b": 4}
    pool.check()


@pytest.mark.parametrize("most", [8, 16])
def test_a_partition_made_while_others_fill_the_pool_leaves_them_the_rest_and_gets_its_own(most: int) -> None:
    hard: dict[str, int] = {}
    pool = Pool(16, floors=lambda: hard, partitions=lambda: hard)
    for seed in range(1, 6):
        pool.remember(text(16, seed), scopes_of("a"))
    assert owned(pool) == {"a": 16}
    hard["b"] = 16 - most  # a reload
    assert pool.open(text(4 * most + 4, 9), scopes_of("a")) is None
    opened = pool.open(text(4 * most, 9), scopes_of("a"))
    assert opened is not None, "all that is not b's"
    assert hard["b"] == 0 or pool.open(text(4 * hard["b"], 10), scopes_of("b")) is not None
    pool.check()


@pytest.mark.parametrize("is_partition", [False, True])
def test_public_text_that_is_no_longer_published_goes_with_what_floors_hold_behind_it(is_partition: bool) -> None:
    """Rows behind rows that are gone are of no use; and who was promised all but the floors gets it."""
    pool = make(8, {"b": 2}, ("b",) if is_partition else ())
    pin = pool.publish(text(16, 1))
    assert pool.remember([*text(16, 1), *text(8, 2)], scopes_of("b")) == 16
    pool.manager.unpin(pin)
    assert owned(pool) == {None: 4, "b": 2}
    assert pool.manager.num_available("a") == 6
    assert pool.open(text(24, 3), scopes_of("a")) is not None
    assert pool.manager.num_evicted == sum(pool.manager.shares.evictions.values()) >= 4
    pool.check()
