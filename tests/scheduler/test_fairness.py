"""Whose turn it is."""

from __future__ import annotations

import pytest

from prefixkv.scheduler.fairness import FairnessCounters
from tests.scheduler.loop import Loop


def _counters(**weights: float) -> FairnessCounters:
    return FairnessCounters(lambda tenant: weights.get(tenant, 1.0))


def test_the_least_served_goes_next_and_ties_keep_their_order() -> None:
    counters = _counters()
    counters.charge("a", 10)
    counters.charge("b", 5)
    assert counters.order(["a", "b", "c", "d"]) == ["c", "d", "b", "a"]
    counters.charge("c", 11)
    assert counters.order(["a", "b", "c"]) == ["b", "a", "c"]


def test_service_counts_by_weight() -> None:
    counters = _counters(a=1.0, b=4.0)
    counters.charge("a", 10)
    counters.charge("b", 30)
    assert counters.order(["a", "b"]) == ["b", "a"]


def test_the_operators_own_work_is_free_and_first() -> None:
    counters = _counters()
    counters.charge(None, 10**6)
    counters.charge("a", 1)
    assert counters.order(["a", None]) == [None, "a"]


def test_who_pauses_saves_nothing_up() -> None:
    """A tenant that was silent for an hour does not own the next hour."""
    counters = _counters()
    counters.charge("a", 1000)
    counters.activate("b", ["a"])
    counters.charge("b", 1)
    assert counters.order(["b", "a"]) == ["a", "b"]


def test_who_is_ahead_is_not_set_back_by_a_pause() -> None:
    """Nor can a tenant wash off what it got by leaving and coming back."""
    counters = _counters()
    counters.charge("a", 1000)
    counters.charge("b", 10)
    counters.activate("a", ["b"])
    assert counters.order(["a", "b"]) == ["b", "a"]


def test_an_idle_engine_is_no_time_to_save_up_either() -> None:
    """What a tenant took while nobody else wanted anything is not held against it."""
    counters = _counters()
    counters.charge("a", 1000)
    counters.activate("b", [])
    counters.activate("a", ["b"])
    counters.charge("b", 1)
    assert counters.order(["b", "a"]) == ["a", "b"]


def test_the_operators_work_does_not_lower_the_floor() -> None:
    """Its counter never grows; a tenant that arrives during a publication would start far ahead."""
    counters = _counters()
    counters.activate(None, [])
    counters.charge("a", 1000)
    counters.activate("b", ["a", None])
    counters.charge("b", 1)
    assert counters.order(["b", "a"]) == ["a", "b"]


def _served(loop: Loop, steps: int) -> dict[str, int]:
    served: dict[str, int] = {}
    for _ in range(steps):
        for chunk in loop.step():
            tenant = chunk.seq.tenant or ""
            served[tenant] = served.get(tenant, 0) + chunk.num_tokens
    return served


@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("lengths", [{"a": 20, "b": 20}, {"a": 40, "b": 10}])
def test_tenants_of_weights_one_and_two_get_one_and_two_shares(slots: int, lengths: dict[str, int]) -> None:
    """While both have work, whatever the length of their prompts."""
    loop = Loop(weight={"a": 1.0, "b": 2.0}.__getitem__, num_blocks=128, max_num_seqs=slots, max_prefill_tokens=20)
    for tenant, length in lengths.items():
        for n in range(6000 // length):
            loop.submit(tenant, [n, *([7] * (length - 1))])
    served = _served(loop, 180)
    assert all(loop.scheduler.waiting.num_waiting(tenant) for tenant in lengths)
    assert served["b"] / served["a"] == pytest.approx(2.0, rel=0.15)


def test_what_the_cache_saves_is_free() -> None:
    """A tenant with a long shared prompt is charged for what it computes, not for what it sends."""
    loop = Loop(num_blocks=128, max_num_seqs=1, max_prefill_tokens=64)
    shared = list(range(100, 160))
    loop.submit("a", shared)
    loop.run()
    for n in range(60):
        loop.submit("a", [*shared, n, 1, 2, 3])
        loop.submit("b", [n, 5, 6, 7])
    finished: dict[str | None, int] = {}
    for _ in range(60):
        for chunk in loop.step():
            finished[chunk.seq.tenant] = finished.get(chunk.seq.tenant, 0) + 1
    assert abs(finished["a"] - finished["b"]) <= 2


def test_many_prompts_of_one_tenant_do_not_delay_another() -> None:
    loop = Loop(num_blocks=128, max_num_seqs=2, max_prefill_tokens=16)
    for n in range(200):
        loop.submit("a", [n, *([3] * 15)])
    for _ in range(10):
        loop.step()
    late = loop.submit("b", [1] * 16)
    for _ in range(6):
        loop.step()
    assert late not in loop.live
