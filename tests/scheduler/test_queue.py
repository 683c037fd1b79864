"""Who stands where in line."""

from __future__ import annotations

import pytest

from prefixkv.scheduler.fairness import FairnessCounters
from prefixkv.scheduler.queue import RequestQueue
from prefixkv.scheduler.request import Sequence
from tests.cache.fakes import scopes_of


def _seq(seq_id: int, tenant: str = "a") -> Sequence:
    return Sequence(seq_id, [1], 1, scopes_of(tenant), 2)


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(FairnessCounters(lambda tenant: 1.0))


def test_first_come_first_served_inside_a_tenant(queue: RequestQueue) -> None:
    for n in range(3):
        queue.push(_seq(n))
    assert [seq.seq_id for seq in queue.candidates()] == [0, 1, 2]


def test_preempted_ones_stand_in_front_the_oldest_first(queue: RequestQueue) -> None:
    """They are preempted youngest first, so each goes before the one that was put back before it."""
    queue.push(_seq(9))
    for n in (3, 2, 1):
        queue.push(_seq(n), front=True)
    assert [seq.seq_id for seq in queue.candidates()] == [1, 2, 3, 9]


def test_tenants_stand_in_the_order_of_their_counters() -> None:
    fairness = FairnessCounters(lambda tenant: 1.0)
    queue = RequestQueue(fairness)
    queue.push(_seq(0, "a"))
    queue.push(_seq(1, "b"))
    assert [seq.seq_id for seq in queue.candidates()] == [0, 1]
    fairness.charge("a", 1)
    assert [seq.seq_id for seq in queue.candidates()] == [1, 0]


def test_counts_follow_pushes_and_removals(queue: RequestQueue) -> None:
    first, second, other = _seq(0), _seq(1), _seq(2, "b")
    for seq in (first, second, other):
        queue.push(seq)
    queue.remove(first)
    assert (len(queue), queue.num_waiting("a"), queue.num_waiting("b"), queue.num_waiting("c")) == (2, 1, 1, 0)
    assert set(queue) == {second, other}
    queue.remove(second)
    assert queue.tenants() == ["b"], "a tenant without a line is forgotten"
    queue.remove(other)
    assert not len(queue)
