"""Who gives way: floors, places, ceilings on running sequences; and lanes that do not see each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.rules import StepShare
from prefixkv.scope import Principal
from tests.cache.fakes import SESSION, TENANT, text
from tests.scheduler.loop import Loop, Rules, cold_reply


def _running(loop: Loop, tenant: str) -> int:
    return sum(seq.tenant == tenant for seq in loop.scheduler.running)


# -- floors ------------------------------------------------------------------------------------------------------------


def test_who_holds_more_than_its_floor_gives_way_first() -> None:
    """Though it is older than those inside their floor."""
    loop = Loop(num_blocks=24, rules=Rules(floors={"b": 11}), max_new_seqs_per_step=8)
    theirs = [loop.submit("a", text(8, seed=n), max_new=40) for n in range(3)]
    for _ in range(3):
        loop.step()
    mine = [loop.submit("b", text(4, seed=50 + n), max_new=16) for n in range(2)]
    loop.run()
    assert any(seq.was_preempted for seq in theirs)
    assert not any(seq.was_preempted for seq in mine)
    assert not theirs[0].was_preempted, "the oldest never gives way"


def test_a_floor_that_was_lent_comes_back_when_it_is_asked_for() -> None:
    """Not when the borrowers' long replies happen to end."""
    loop = Loop(num_blocks=24, rules=Rules(floors={"b": 12}), max_new_seqs_per_step=8, max_prefill_tokens=256)
    theirs = [loop.submit("a", text(20, seed=n), max_new=12) for n in range(4)]
    for _ in range(5):
        loop.step()
    assert _running(loop, "a") == 4
    mine = loop.submit("b", text(38, seed=50), max_new=4)
    loop.step()
    assert mine in loop.scheduler.running
    loop.run()
    assert [loop.reply(seq) for seq in theirs] == [cold_reply(text(20, n), 12) for n in range(4)]


def test_without_a_floor_a_newcomer_takes_nothing_from_those_that_run() -> None:
    loop = Loop(num_blocks=24, max_new_seqs_per_step=8, max_prefill_tokens=256)
    for n in range(3):
        loop.submit("a", text(20, seed=n), max_new=8)
    for _ in range(3):
        loop.step()
    mine = loop.submit("b", text(38, seed=50), max_new=4)
    loop.step()
    assert mine not in loop.scheduler.running
    loop.run()
    assert loop.scheduler.num_preemptions == 0


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_full_running_set_does_not_keep_a_tenant_out() -> None:
    loop = Loop(num_blocks=256, max_num_seqs=4, max_new_seqs_per_step=4)
    flood = [loop.submit("a", text(4, seed=n), max_new=60) for n in range(8)]
    for _ in range(5):
        loop.step()
    assert _running(loop, "a") == 4
    light = loop.submit("b", text(4, seed=50), max_new=2)
    loop.step()
    assert light in loop.scheduler.running and light.num_generated_tokens == 1
    assert flood[3].was_preempted and not any(seq.was_preempted for seq in flood[:3]), "the youngest gives way"
    loop.run()
    assert loop.scheduler.num_preemptions == 1
    assert [loop.reply(seq) for seq in flood] == [cold_reply(text(4, n), 60) for n in range(8)]


def test_places_are_taken_only_up_to_ones_part() -> None:
    loop = Loop(weight={"a": 3.0, "b": 1.0}.__getitem__, num_blocks=256, max_num_seqs=8, max_new_seqs_per_step=8)
    for tenant in "ab":
        for n in range(20):
            loop.submit(tenant, text(4, seed=ord(tenant) * 100 + n), max_new=200)
        for _ in range(5):
            loop.step()
    assert (_running(loop, "a"), _running(loop, "b")) == (6, 2)
    assert loop.scheduler.num_preemptions == 2


def test_many_tenants_with_one_place_each_do_not_push_each_other_out() -> None:
    loop = Loop(num_blocks=256, max_num_seqs=3, max_new_seqs_per_step=3)
    for n in range(9):
        loop.submit(f"t{n}", text(4, seed=n), max_new=10)
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_a_lower_priority_takes_no_place_from_a_higher_one() -> None:
    loop = Loop(num_blocks=256, rules=Rules(priority={"a": 1}), max_num_seqs=4, max_new_seqs_per_step=4)
    for n in range(4):
        loop.submit("a", text(4, seed=n), max_new=30)
    loop.step()
    loop.submit("b", text(4, seed=50), max_new=2)
    loop.run()
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("max_running", [None, 4])
def test_one_user_that_fills_its_tenants_places_does_not_keep_another_out(max_running: int | None) -> None:
    limits = {} if max_running is None else {"a": max_running}
    loop = Loop(num_blocks=512, rules=Rules(max_running=limits), max_num_seqs=max_running or 4, max_new_seqs_per_step=4)
    for n in range(50):
        loop.submit("a", text(4, seed=n), max_new=100, who=Principal("a", "many", "s"))
    for _ in range(5):
        loop.step()
    few = loop.submit("a", text(4, seed=500), max_new=2, who=Principal("a", "few", "s"))
    loop.step()
    loop.step()
    assert few not in loop.live
    assert loop.scheduler.num_preemptions == 1


def test_no_more_sequences_run_than_a_tenant_may() -> None:
    loop = Loop(num_blocks=256, rules=Rules(max_running={"a": 2}), max_new_seqs_per_step=8)
    for n in range(6):
        loop.submit("a", text(4, seed=n), max_new=6)
        loop.submit("b", text(4, seed=50 + n), max_new=6)
    loop.step()
    assert (_running(loop, "a"), _running(loop, "b")) == (2, 6)
    while loop.scheduler.has_work:
        loop.step()
        assert _running(loop, "a") <= 2


# -- strict lanes ------------------------------------------------------------------------------------------------------


def test_a_step_is_parted_as_the_pool_is() -> None:
    loop = Loop(num_blocks=40, rules=Rules(partitions={"s": 10, "t": 1}), max_num_seqs=16, max_prefill_tokens=512)
    assert loop.scheduler.lane_of("s").share == StepShare(4, 128, 1, 1024)
    assert loop.scheduler.lane_of("t").share == StepShare(1, 12, 1, 102)
    assert loop.scheduler.lane_of("a").share == StepShare(11, 372, 1, 2970)


Request = tuple[int, int, int, str]
requests = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 24), st.integers(1, 12), st.sampled_from("uv")), max_size=8
)


def _seen(mine: list[Request], others: list[Request]) -> list[tuple[int, str, int, int, int | None]]:
    """Run both and return what the strict tenant sees: step, and what its sequences are at."""
    loop = Loop(24, 4, rules=Rules(partitions={"s": 10}), max_num_seqs=5, max_prefill_tokens=16)
    waiting = [(at, "s", n, *rest) for n, (at, *rest) in enumerate(mine)]
    waiting += [(at, "b", n, *rest) for n, (at, *rest) in enumerate(others)]
    watched: dict[int, Sequence] = {}
    seen = []
    for now in range(400):
        for at, tenant, n, length, new, user in waiting:
            if at == now:
                spans = ((0, TENANT), (min(5, length - 1), SESSION))
                who = Principal(tenant, user, "s")
                seq = loop.submit(tenant, text(length, seed=n % 3), new, who=who, spans=spans)
                if tenant == "s":
                    watched[n] = seq
        if loop.live:
            loop.step()
            assert {seq for seq in loop.scheduler.stuck} == set()
        for n, seq in watched.items():
            seen.append((now, seq.status.value, n, seq.num_computed_tokens, seq.num_cached_tokens))
        if now > 6 and not loop.live:
            break
    loop.check()
    assert not loop.live
    last = max((at for at, status, *_ in seen if status != "finished"), default=0)
    return [entry for entry in seen if entry[0] <= last + 1]


@given(mine=requests, others=requests)
def test_a_strict_tenant_sees_nothing_of_others(mine: list[Request], others: list[Request]) -> None:
    """Every token of it comes in the same step, from the same rows, whether others are busy or not there at all."""
    assert _seen(mine, others) == _seen(mine, [])


def test_a_tenant_moves_to_a_lane_of_its_own_when_it_is_idle_and_back_at_once() -> None:
    rules = Rules()
    loop = Loop(num_blocks=40, rules=rules)
    first = loop.submit("a", text(8), max_new=6)
    loop.step()
    rules.strict = {"a": 10}
    second = loop.submit("a", text(8, seed=1), max_new=6)
    assert not loop.scheduler.lane_of("a").is_strict
    loop.run()
    third = loop.submit("a", text(8, seed=2), max_new=6)
    loop.step()
    assert loop.scheduler.lane_of("a").is_strict
    rules.strict = {}
    fourth = loop.submit("a", text(8, seed=3), max_new=6)
    assert not loop.scheduler.lane_of("a").is_strict, "back it goes with all that it has"
    loop.check()
    loop.run()
    for n, seq in enumerate([first, second, third, fourth]):
        assert loop.reply(seq) == cold_reply(text(8, n), 6)
    loop.check()


def test_preemptions_in_a_lane_that_ended_are_still_counted() -> None:
    loop = Loop(num_blocks=40, rules=Rules(partitions={"s": 20}))
    seq = loop.submit("s", text(8), max_new=6)
    loop.step()
    loop.scheduler.preempt(seq)
    loop.run()
    assert loop.scheduler.num_preemptions == 1


def test_a_strict_tenant_does_not_wait_for_a_publication_under_way() -> None:
    """Whose text it is about to hit; when it is done is the operator's business and others'."""
    loop = Loop(num_blocks=80, rules=Rules(partitions={"s": 40}), max_prefill_tokens=16)
    loop.publish(text(60))
    loop.step()
    mine = loop.submit("s", text(60))
    assert mine in {chunk.seq for chunk in loop.step()}
    loop.run()


PARTITIONS = [{}, {"a": 6}, {"a": 12}, {"a": 6, "b": 8}, {"c": 16}, {"b": 12, "c": 6}]
ONE = st.tuples(st.sampled_from("abcd"), st.sampled_from([3, 10, 16]), st.sampled_from([2, 8]))


@given(
    st.lists(ONE, min_size=5, max_size=20),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(PARTITIONS)), min_size=1, max_size=5),
)
def test_borders_that_reloads_move_fail_nobody_who_fits_inside_each_of_them(
    requests: list[tuple[str, int, int]], reloads: list[tuple[int, dict[str, int]]]
) -> None:
    """Six blocks at most each. What others hold of a new partition comes back when they end; nothing is refused."""
    rules = Rules()
    loop = Loop(num_blocks=24, rules=rules, max_prefill_tokens=48)
    seqs = [loop.submit(tenant, text(size, n), more) for n, (tenant, size, more) in enumerate(requests)]
    for steps, partitions in [*reloads, (2000, {})]:
        if steps != 2000:
            rules.strict = dict(partitions)
        for _ in range(steps):
            if not loop.scheduler.has_work:
                break
            loop.step()
            assert not loop.scheduler.stuck
            loop.check()
    assert not loop.live
    assert [loop.reply(seq) for seq in seqs] == [
        cold_reply(text(size, n), more) for n, (_, size, more) in enumerate(requests)
    ]


def test_what_can_be_saved_up_follows_the_part_of_a_step_that_partitions_leave() -> None:
    rules = Rules()
    loop = Loop(num_blocks=40, rules=rules, max_prefill_tokens=64)
    loop.step()
    saved = [loop.scheduler._open.fairness.tenants.burst_tokens]
    for partitions in ({"s": 20}, {}):
        rules.strict = partitions
        loop.step()
        saved.append(loop.scheduler._open.fairness.tenants.burst_tokens)
    assert saved == [256, 128, 256]


def test_a_new_partition_waits_for_those_who_hold_it() -> None:
    rules = Rules()
    loop = Loop(num_blocks=16, rules=rules, max_prefill_tokens=64)
    theirs = loop.submit("a", text(8), 46)
    for _ in range(44):
        loop.step()
    rules.strict = {"b": 8}
    mine = loop.submit("b", text(20, 1), 3)
    loop.step()
    assert (mine in loop.scheduler.waiting, loop.scheduler.stuck) == (True, [])
    while theirs in loop.scheduler.running:
        loop.step()
        if loop.scheduler.stuck == [theirs]:
            loop.scheduler.finish(theirs)
    loop.run()
    assert loop.reply(mine) == cold_reply(text(20, 1), 3)


def test_who_ceases_to_be_strict_competes_with_all_others_at_once() -> None:
    rules = Rules(partitions={"b": 8})
    loop = Loop(num_blocks=16, rules=rules, max_prefill_tokens=64)
    mine = [loop.submit("b", text(8, seed), 20) for seed in range(2)]
    loop.step()
    rules.strict = {}
    theirs = [loop.submit("a", text(8, seed), 50) for seed in range(2, 5)]
    while loop.live:
        loop.step()
        assert not loop.scheduler.stuck
    assert not mine[0].was_preempted, "the oldest of all"
    assert [loop.reply(seq) for seq in mine] == [cold_reply(text(8, seed), 20) for seed in range(2)]
    assert [loop.reply(seq) for seq in theirs] == [cold_reply(text(8, seed), 50) for seed in range(2, 5)]
