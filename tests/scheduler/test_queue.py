"""Who stands where in line."""

from __future__ import annotations

import pytest

from prefixkv.scheduler.fairness import FairnessCounters
from prefixkv.scheduler.queue import RequestQueue
from prefixkv.scheduler.request import Sequence
from tests.cache.fakes import scopes_of
from tests.scheduler.loop import Rules


class Line(RequestQueue):
    """A queue with its counters."""

    def __init__(self, **priority: int) -> None:
        self.counters = FairnessCounters(Rules(priority=priority))
        super().__init__(self.counters)

    def put(self, seq_id: int, tenant: str = "a", user: str = "u", *, front: bool = False) -> Sequence:
        seq = Sequence(seq_id, [1], 1, scopes_of(tenant, user), 2)
        self.counters.enter(seq, 0)
        self.push(seq, front=front)
        return seq

    def order(self, cached: dict[int, int] | None = None, now: int = 1) -> list[int]:
        """Return the ids of one user's line in the order of admission."""
        (tenant,) = self.counters.tenants.active.values()
        (user,) = tenant.users.active.values()
        return [seq.seq_id for seq in self.in_order(user, now, lambda seq: (cached or {}).get(seq.seq_id, 0))]

    def next_tenant(self, now: int = 1) -> str | None:
        found = self.first(now)
        return found[1].name if found else None


@pytest.fixture
def line() -> Line:
    return Line()


def test_first_come_first_served_inside_a_user(line: Line) -> None:
    for n in range(3):
        line.put(n)
    assert line.order() == [0, 1, 2]


def test_the_longest_cached_prefix_goes_first(line: Line) -> None:
    for n in range(4):
        line.put(n)
    assert line.order({1: 10, 3: 20}) == [3, 1, 0, 2]


def test_only_the_first_few_are_looked_at(line: Line) -> None:
    """Looking costs a walk through the index for each; a line may hold thousands."""
    for n in range(100):
        line.put(n)
    looked: list[int] = []
    (tenant,) = line.counters.tenants.active.values()
    user = tenant.users.active["u"]

    def look(seq: Sequence) -> int:
        looked.append(seq.seq_id)
        return seq.seq_id

    assert line.in_order(user, 1, look)[0].seq_id == 7
    assert looked == list(range(8))
    line.in_order(user, 20, look)
    assert len(looked) == 8, "what was seen is used for a while"
    line.in_order(user, 40, look)
    assert len(looked) == 16


def test_who_was_passed_often_enough_goes_first(line: Line) -> None:
    first = line.put(0)
    line.put(1)
    first.num_passed = 7
    assert line.order({1: 5}) == [1, 0]
    first.num_passed = 8
    assert line.order({1: 5}) == [0, 1]


def test_preempted_ones_stand_in_front_the_oldest_first(line: Line) -> None:
    """They are preempted youngest first, so each goes before the one that was put back before it."""
    line.put(9)
    for n in (3, 2, 1):
        line.put(n, front=True).was_preempted = True
    assert line.order({9: 50}) == [1, 2, 3, 9]


def test_tenants_stand_in_the_order_of_their_counters(line: Line) -> None:
    seq = line.put(0, "a")
    line.put(1, "b")
    assert line.next_tenant() == "a"
    line.counters.charge(seq, 1)
    assert line.next_tenant() == "b"


def test_who_is_set_aside_is_back_in_the_next_step(line: Line) -> None:
    line.put(0, "a")
    line.put(1, "b")
    line.begin_step(1, ())
    line.set_aside(line.counters.tenants.active["a"])
    assert line.next_tenant() == "b"
    line.begin_step(2, ())
    assert line.next_tenant() == "a"


def test_a_higher_priority_goes_first_whatever_the_counters_say() -> None:
    line = Line(high=3, low=-3)
    line.put(0, "low")
    line.put(1, "normal")
    line.counters.charge(line.put(2, "high"), 1000)
    assert line.next_tenant() == "high"


def test_a_turn_that_is_overdue_passes_any_priority_once() -> None:
    line = Line(high=100, low=-100)
    line.put(0, "low")
    line.put(1, "high")
    order = []
    for now in range(1, 200):
        line.begin_step(now, ())
        found = line.first(now)
        assert found
        line.served(found[1], now)
        order.append(found[1].name)
    assert [now for now, name in enumerate(order, 1) if name == "low"] == [65, 129, 193]


def test_who_has_nothing_waiting_builds_up_no_claim() -> None:
    line = Line(high=1)
    line.put(0, "high")
    for now in range(1, 200):
        line.begin_step(now, ())
        line.served(line.counters.tenants.active["high"], now)
    line.put(1, "low")
    line.begin_step(200, ())
    assert line.next_tenant(200) == "high"


def test_a_new_priority_counts_from_the_next_request_on() -> None:
    priorities: dict[str, int] = {}
    line = Line()
    line.counters._rules = Rules(priority=priorities)
    line.put(0, "a")
    line.put(1, "b")
    priorities["b"] = 5
    assert line.next_tenant() == "a"
    line.put(2, "b")
    assert line.next_tenant() == "b"


def test_counts_follow_pushes_and_removals(line: Line) -> None:
    first, second, other = line.put(0), line.put(1), line.put(2, "b")
    line.remove(first)
    assert (len(line), line.num_waiting("a"), line.num_waiting("b"), line.num_waiting("c")) == (2, 1, 1, 0)
    assert set(line) == {second, other}
    line.remove(second)
    assert line.next_tenant() == "b", "a tenant without a line has no turn"
    line.remove(other)
    assert not len(line) and line.next_tenant() is None
