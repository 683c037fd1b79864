"""Past its time a block is gone: not colder, not findable, overwritten, and its tenant is told why."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from prefixkv.cache.index import Node
from prefixkv.cache.retire import destroy_scopes, expire, purge
from prefixkv.lifetime import Lifetime
from prefixkv.scope import Scope, ScopeLevel
from tests.cache.fakes import CHAT, SESSION, TENANT, Pool, scopes_of, text

CHATS = scopes_of("a", spans=CHAT)


class Timed(Pool):
    """A pool with a clock that the test winds."""

    def __init__(self, lifetimes: dict[ScopeLevel, Lifetime], **options: Any) -> None:
        self.now_s = 100.0
        lifetime: Callable[[Scope], Lifetime] = lambda scope: lifetimes.get(scope.level, (None, None))  # noqa: E731
        super().__init__(lifetime=lifetime, clock=lambda: self.now_s, **options)

    def wait(self, seconds: float) -> int:
        self.now_s += seconds
        gone = expire(self.manager)
        self.carry_out()
        self.check()
        return gone

    def why(self, token_ids: list[int], scopes: Any) -> str | None:
        return self.manager.why_missing(token_ids, scopes, self.manager.match(token_ids, scopes))


def test_idle_blocks_live_as_long_as_they_are_used() -> None:
    pool = Timed({SESSION: (10, None)})
    for _ in range(5):
        pool.remember(text(12), scopes_of("a"))
        assert pool.wait(9.5) == 0
    assert pool.wait(0.5) == 3
    assert (pool.num_cached(text(12), scopes_of("a")), pool.manager.pool.num_free) == (0, 32)
    assert pool.why(text(12), scopes_of("a")) == "expired"
    assert pool.why(text(12), scopes_of("b")) is None, "nobody else is told"


def test_in_all_they_live_so_long_however_they_are_used() -> None:
    pool = Timed({SESSION: (None, 10)})
    for _ in range(9):
        pool.remember(text(12), scopes_of("a"))
        assert pool.wait(1) == 0
    assert pool.wait(1) == 3


def test_each_level_has_its_own_time() -> None:
    """The conversation goes, the system text stays; the shared part of the border block too."""
    pool = Timed({SESSION: (10, None), TENANT: (100, None)})
    pool.remember(text(16), CHATS)
    assert pool.wait(10) == 3
    assert pool.num_cached(text(16), CHATS) == 6
    assert pool.wait(90) == 2


def test_what_stands_on_expired_blocks_goes_with_them() -> None:
    pool = Timed({TENANT: (None, 10)})
    pool.remember(text(16), CHATS)
    assert pool.wait(10) == 5
    assert pool.manager.pool.num_free == 32


def test_what_a_running_sequence_uses_cannot_be_found_and_goes_with_the_sequence() -> None:
    pool = Timed({TENANT: (None, 10)})
    seq_id = pool.start(text(16), CHATS, room=4)
    assert pool.wait(10) == 5
    assert pool.num_cached(text(16), CHATS) == 0
    grown = [*text(16), 7, 7, 7, 7]
    pool.compute(seq_id, grown, 16, 20, tail=True)  # it goes on with its own rows
    pool.check()
    assert pool.num_cached(grown, CHATS) == 0, "nothing is stored behind what is gone"
    pool.close(seq_id, grown, 20)
    pool.check()
    assert pool.manager.pool.num_free == 32


def test_a_sequence_that_uses_blocks_keeps_them_from_getting_idle_when_it_ends() -> None:
    pool = Timed({SESSION: (10, None)})
    seq_id = pool.start(text(12), scopes_of("a"))
    pool.now_s += 9
    pool.close(seq_id, text(12), 12)
    assert pool.wait(9) == 0
    assert pool.wait(1) == 3


def test_pinned_text_stays_and_ends_with_its_pin() -> None:
    pool = Timed({TENANT: (10, 20)})
    pin = pool.publish(text(8), "a")
    assert pool.wait(1000) == 0
    assert pool.num_cached(text(9), scopes_of("a")) == 8
    pool.manager.unpin(pin)
    assert pool.wait(0) == 2


def test_lifetimes_that_change_count_from_then_on() -> None:
    lifetimes: dict[ScopeLevel, Lifetime] = {}
    pool = Timed(lifetimes)
    pool.remember(text(12), scopes_of("a"))
    assert pool.manager.expiry.next_s() is None
    pool.wait(50)
    lifetimes[SESSION] = (60, None)
    pool.manager.expiry.rebuild(pool.manager.index)
    assert pool.manager.expiry.next_s() == 10
    assert pool.wait(10) == 3
    assert pool.manager.expiry.next_s() is None


def test_evicted_blocks_are_not_named_again() -> None:
    pool = Timed({SESSION: (10, None)}, num_blocks=4)
    pool.remember(text(16), scopes_of("a"))
    pool.remember(text(16, 1), scopes_of("b"))
    assert pool.wait(10) == 4
    assert pool.why(text(16), scopes_of("a")) == "evicted"


@pytest.mark.parametrize("is_open", [False, True])
def test_a_scope_is_destroyed_alone(is_open: bool) -> None:
    pool = Timed({})
    other = scopes_of("a", session="t", spans=CHAT)
    pool.remember(text(6) + text(10, 1), other)
    seq_id = pool.start(text(16), CHATS) if is_open else pool.remember(text(16), CHATS)
    if is_open:
        pool.close(seq_id, text(16), 16)
    assert destroy_scopes(pool.manager, Scope(SESSION, "a", "u", "s").__eq__) == 3
    pool.carry_out()
    pool.check()
    assert pool.num_cached(text(16), CHATS) == 6
    assert pool.num_cached(text(6) + text(10, 1), other) == 15
    assert pool.why(text(16), CHATS) == "purged"


def test_blocks_that_are_gone_are_not_remembered_until_their_time_would_have_come() -> None:
    pool = Timed({SESSION: (None, 86_400)}, num_blocks=4)
    for seed in range(1200):
        pool.remember(text(16, seed), scopes_of("a"))
    assert len(pool.manager.expiry._heap) <= 1024, "of four blocks"
    assert pool.wait(86_400) == 4


@pytest.mark.parametrize("how", ["purge", "end of a session"])
def test_what_is_destroyed_on_demand_leaves_no_tokens_behind(how: str) -> None:
    pool = Timed({SESSION: (None, 86_400)}, num_blocks=8)
    pool.remember(text(16), scopes_of("a"))
    pool.remember(text(16, 1), scopes_of("b"))
    gone = {node.tokens for node in pool.manager.index if node.scope and node.scope.tenant == "a"}
    assert len(gone) == 4
    if how == "purge":
        purge(pool.manager, "a", None, None)
    else:
        destroy_scopes(pool.manager, Scope(SESSION, "a", "u", "s").__eq__)
    gc.collect()
    nodes = [thing for thing in gc.get_objects() if type(thing) is Node and thing.tokens in gone]
    assert [node for node in nodes if node.scope and node.scope.tenant == "a"] == []
    assert pool.wait(86_400) == 4, "the other tenant's are still known"
