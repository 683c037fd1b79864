"""The tenant that is most over its share, against asking all of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.retire import purge
from prefixkv.cache.shares import Shares
from tests.cache.fakes import Pool, scopes_of, text

TENANTS = "abcd"
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}


def most_over(shares: Shares, pool: Pool, floors: dict[str, int], tenant: str | None) -> tuple[float, set[str | None]]:
    """Ask every tenant: how far over its share the furthest is, and who may go."""
    manager = pool.manager
    over = {
        other: max(0, manager.pool.owned_blocks[other] - floors.get(other, 0)) / WEIGHTS[other]
        for other in manager.idle.tenants()
        if other is not None
    }
    most = max((value for other, value in over.items() if value > 0 or other == tenant), default=None)
    if most is None:
        return 0.0, {None}
    tied = {other for other, value in over.items() if value == most and (value > 0 or other == tenant)}
    return most, {tenant} if tenant in tied else set(tied)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 5), st.integers(0, 30)), max_size=40), st.data())
def test_the_victim_is_the_one_that_asking_all_would_find(
    acts: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    rules: list[dict[str, int]] = [{}, {"a": 3}, {"a": 2, "b": 4}]
    floors = rules[0]
    pool = Pool(24, weight=WEIGHTS.__getitem__, floors=lambda: floors)
    shares = pool.manager.shares
    for tenant, blocks, seed in acts:
        if seed % 5 == 0:
            floors = data.draw(st.sampled_from(rules))
        if seed == 7:
            purge(pool.manager, tenant, None, None)
        pool.remember(text(4 * blocks, seed), scopes_of(tenant))
        for asker in (*TENANTS, None):
            assert shares.victim(asker) in most_over(shares, pool, floors, asker)[1]
    pool.check()


def count_calls(weight: Callable[[str], float]) -> tuple[Callable[[str], float], list[str]]:
    calls: list[str] = []

    def counted(tenant: str) -> float:
        calls.append(tenant)
        return weight(tenant)

    return counted, calls


def test_an_eviction_does_not_ask_all_tenants() -> None:
    floors: dict[str, int] = {}
    weight, calls = count_calls(lambda tenant: 1.0)
    pool = Pool(500, weight=weight, floors=lambda: floors)
    for number in range(500):
        pool.remember(text(4, number), scopes_of(f"tenant {number}"))
    pool.remember(text(4, 1000), scopes_of("new"))  # the first eviction ranks all of them
    calls.clear()
    for number in range(100):
        pool.remember(text(4, 2000 + number), scopes_of(f"another {number}"))
    assert sum(pool.manager.shares.evictions.values()) == 101
    assert len(calls) < 100 * 12
