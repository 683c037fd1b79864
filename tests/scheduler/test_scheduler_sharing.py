"""Requests at the same time that share a prefix: it is computed once."""

from __future__ import annotations

import pytest

from prefixkv.scheduler.request import Sequence
from prefixkv.scope import Principal
from tests.cache.fakes import SESSION, TENANT, scopes_of, text
from tests.scheduler.loop import Loop


@pytest.mark.parametrize("length", [1, 2, 5, 33, 100])
@pytest.mark.parametrize("max_prefill_tokens", [8, 512])
def test_eight_equal_prompts_at_once_cost_one(length: int, max_prefill_tokens: int) -> None:
    """Seven wait for the first and then compute one token each."""
    loop = Loop(num_blocks=256, max_prefill_tokens=max_prefill_tokens, max_new_seqs_per_step=8)
    for _ in range(8):
        loop.submit("a", text(length))
    loop.run()
    assert loop.computed_tokens == length + 7


def test_users_of_a_tenant_wait_for_the_system_prompt_only() -> None:
    loop = Loop(num_blocks=256, max_prefill_tokens=512, max_new_seqs_per_step=8)
    for n in range(8):
        who = Principal("a", f"u{n}", "s")
        loop.submit("a", [*text(50), *text(10, seed=n)], who=who, spans=((0, TENANT), (50, SESSION)))
    loop.run()
    assert loop.computed_tokens == 50 + 8 * 10


def test_two_tenants_with_equal_prompts_do_not_wait_for_each_other() -> None:
    """Neither could reuse the other's rows, and neither may notice the other."""
    loop = Loop(num_blocks=256, max_new_seqs_per_step=8)
    seqs = [loop.submit(tenant, text(40)) for tenant in "ab"]
    assert {chunk.seq for chunk in loop.step()} == set(seqs)
    assert loop.computed_tokens == 80


def test_a_short_common_beginning_is_not_worth_a_wait() -> None:
    """Every chat of one template begins with the same few tokens."""
    loop = Loop(num_blocks=256, max_new_seqs_per_step=8)
    seqs = [loop.submit("a", [*text(8), *text(40, seed=n)]) for n in (1, 2)]
    assert {chunk.seq for chunk in loop.step()} == set(seqs)


@pytest.mark.parametrize("end", ["cancel", "fail", "preempt"])
def test_who_waits_for_another_goes_on_when_that_one_is_gone(end: str) -> None:
    loop = Loop(num_blocks=256)
    leader, follower = loop.submit("a", text(60)), loop.submit("a", text(60))
    assert [chunk.seq for chunk in loop.schedule()] == [leader]
    assert follower.leader is leader
    if end == "preempt":
        loop.scheduler.preempt(leader)
    else:
        loop.scheduler.finish(leader, keep=end == "cancel")
    loop.run()
    loop.check()
    assert follower.num_generated_tokens == 1
    assert loop.computed_tokens == (61 if end == "preempt" else 60)


def test_waiting_for_others_ends() -> None:
    """Leaders whose forward always fails cannot hold a sequence back for ever."""
    loop = Loop(num_blocks=256)
    follower = None
    for _ in range(20):
        leader = Sequence(-1, text(60), 60, scopes_of("a"), 61)
        lane = loop.scheduler.lane_of("a")
        lane.fairness.enter(leader, lane.now)
        lane.waiting.push(leader, front=True)
        follower = follower or loop.submit("a", text(60))
        running = [chunk.seq for chunk in loop.schedule()]
        if follower in running:
            break
        assert running == [leader]
        loop.scheduler.finish(leader, keep=False)
    assert follower in loop.scheduler.running
    assert 1 < follower.num_waits < 20


def test_a_long_shared_prompt_in_chunks_is_still_computed_once() -> None:
    """The others wait through all of its chunks, however many, not only through the first."""
    loop = Loop(num_blocks=256, max_prefill_tokens=8, max_new_seqs_per_step=8)
    for n in range(4):
        loop.submit("a", [*text(100), 7000 + n])
    loop.run()
    assert loop.computed_tokens == 100 + 4
