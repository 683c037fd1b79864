"""A pool that is too small for all at once: requests wait or are preempted, and every one of them ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.scheduler.request import SequenceStatus
from prefixkv.scope import Principal
from tests.cache.fakes import SESSION, TENANT, text
from tests.scheduler.loop import Loop, Rules, cold_reply

requests = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 24), st.integers(1, 16)),
    min_size=1,
    max_size=14,
)


def _every_set_ends(
    wanted: list[tuple[str, int, int, int]],
    block_size: int,
    spare_blocks: int,
    ceilings: dict[str, int],
    floors: dict[str, int],
    config: dict[str, int],
) -> None:
    largest = max(-(-(length + new - 1) // block_size) for _, _, length, new in wanted)
    limits = {tenant: largest + extra for tenant, extra in ceilings.items()}
    floors = {tenant: min(floor, limits.get(tenant, floor)) for tenant, floor in floors.items()}
    # The largest one fits beside the floors of all others.
    num_blocks = largest + spare_blocks + sum(floors.values())
    loop = Loop(num_blocks, block_size, ceiling=limits.get, rules=Rules(floors=floors), **config)
    seqs = [
        loop.submit(tenant, text(length, seed), new, spans=((0, TENANT), (min(3, length - 1), SESSION)))
        for tenant, seed, length, new in wanted
    ]
    steps = loop.run(max_steps=4000)
    assert steps
    loop.check()
    for seq, (_, seed, length, new) in zip(seqs, wanted, strict=True):
        assert seq.status is SequenceStatus.FINISHED
        assert loop.reply(seq) == cold_reply(text(length, seed), new)
    assert loop.manager.pool.num_free + len(loop.manager.idle) == loop.manager.pool.num_blocks


_sets = given(
    wanted=requests,
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 6),
    ceilings=st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    floors=st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)),
    config=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 14),
            "max_prefill_tokens": st.integers(1, 32),
            "max_new_seqs_per_step": st.integers(1, 6),
        }
    ),
)


@_sets
def test_any_set_of_requests_that_fit_one_by_one_ends(**drawn) -> None:  # type: ignore[no-untyped-def]
    """Also in a pool that just holds the largest one, under ceilings and beside floors; as in an empty engine."""
    _every_set_ends(**drawn)


@pytest.mark.slow
@settings(max_examples=5000)
@_sets
def test_very_many_sets_of_requests_that_fit_one_by_one_end(**drawn) -> None:  # type: ignore[no-untyped-def]
    _every_set_ends(**drawn)


def test_the_oldest_is_never_preempted() -> None:
    loop = Loop(num_blocks=8, max_new_seqs_per_step=4)
    seqs = [loop.submit("a", text(4, seed=n), max_new=24) for n in range(4)]
    while seqs[0] in loop.live:
        loop.step()
        assert not seqs[0].was_preempted
    assert loop.scheduler.num_preemptions > 0
    loop.run()
    loop.check()


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    """Its tokens stay; its rows are found again or computed again; what was cached at first is not counted twice."""
    loop = Loop(num_blocks=32)
    seq = loop.submit("a", text(10), max_new=12)
    while seq.num_generated_tokens < 5:
        loop.step()
    said = loop.reply(seq)
    loop.scheduler.preempt(seq)
    loop.pool.carry_out()
    assert loop.reply(seq) == said
    assert seq.num_computed_tokens == 0
    loop.step()
    assert loop.reply(seq)[:5] == said
    assert seq.num_cached_tokens == 0
    loop.run()
    assert loop.reply(seq) == cold_reply(text(10), 12)
    assert loop.computed_tokens == 10 + 11, "nothing had to be computed again: the pool had room"


def test_preemption_does_not_thrash() -> None:
    """A preempted sequence comes back when there is room for all it lost, not for its next token."""
    loop = Loop(num_blocks=12, max_new_seqs_per_step=6, max_num_seqs=6)
    for n in range(6):
        loop.submit("a", text(8, seed=n), max_new=24)
    loop.run()
    assert loop.scheduler.num_preemptions <= 12
    assert loop.computed_tokens <= 2 * 6 * (8 + 23)


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """Nobody may pass the one that waits for room."""
    loop = Loop(num_blocks=16, max_num_seqs=8, max_new_seqs_per_step=4)
    for n in range(8):
        loop.submit("a", text(4, seed=n), max_new=8)
    loop.step()
    long = loop.submit("a", text(48, seed=99))
    for n in range(200):
        loop.submit("a", text(4, seed=100 + n), max_new=8)
    for _ in range(40):
        loop.step()
    assert long not in loop.live


def test_a_long_prompt_under_a_ceiling_is_not_starved_by_other_tenants() -> None:
    """The pool is what it waits for, though its tenant's ceiling leaves less than the pool: nobody may pass it."""
    loop = Loop(num_blocks=20, ceiling={"b": 13}.get, max_num_seqs=6, max_new_seqs_per_step=4)
    long = None
    for n in range(200):
        for m in range(3):
            loop.submit("a", text(2, seed=3 * n + m), max_new=3)
        loop.step()
        if n == 5:
            assert len(loop.scheduler.running) >= 3
            long = loop.submit("b", text(48, seed=999))
        if long and long not in loop.live:
            break
    assert n < 20


def test_a_tenant_at_its_ceiling_does_not_hold_up_others() -> None:
    loop = Loop(num_blocks=64, ceiling={"a": 4}.get, max_new_seqs_per_step=4)
    for n in range(6):
        loop.submit("a", text(12, seed=n), max_new=4)
    other = loop.submit("b", text(12, seed=50), max_new=4)
    loop.step()
    assert other in loop.scheduler.running
    loop.run()
    assert loop.manager.pool.owned_blocks["a"] <= 4


def test_a_tenant_with_a_low_ceiling_runs_while_many_others_do() -> None:
    """The spare blocks kept for others' sequences are the pool's, not taken from its few."""
    loop = Loop(num_blocks=256, ceiling={"b": 3}.get, max_num_seqs=32, max_new_seqs_per_step=8)
    for n in range(12):
        loop.submit("a", text(4, seed=n), max_new=60)
    for _ in range(4):
        loop.step()
    small = loop.submit("b", text(9, seed=99))
    for _ in range(3):
        loop.step()
    assert small not in loop.live
    assert len(loop.scheduler.running) == 12


def test_a_ceiling_preempts_only_inside_its_tenant() -> None:
    loop = Loop(num_blocks=64, ceiling={"a": 6}.get, max_new_seqs_per_step=8)
    mine = [loop.submit("a", text(4, seed=n), max_new=16) for n in range(3)]
    theirs = [loop.submit("b", text(4, seed=n), max_new=16) for n in range(3)]
    loop.run()
    assert any(seq.was_preempted for seq in mine)
    assert not any(seq.was_preempted for seq in theirs)
    loop.check()


@pytest.mark.parametrize(("num_blocks", "ceiling", "other"), [(6, None, "a"), (6, None, "b"), (64, 6, "a")])
def test_admission_leaves_a_spare_block_for_those_that_run(num_blocks: int, ceiling: int | None, other: str) -> None:
    """Otherwise the next token of a running reply would push the new one out again."""
    loop = Loop(num_blocks, ceiling=lambda tenant: ceiling)
    loop.submit("a", text(8), max_new=12)
    loop.step()
    loop.submit(other, text(12, seed=1), max_new=8)
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_a_preempted_sequence_goes_before_later_ones_of_its_tenant() -> None:
    loop = Loop(num_blocks=32, max_num_seqs=1)
    first = loop.submit("a", text(8), max_new=8)
    loop.step()
    later = loop.submit("a", text(8, seed=1))
    loop.scheduler.preempt(first)
    loop.pool.carry_out()
    loop.step()
    assert first in loop.scheduler.running
    assert later in loop.scheduler.waiting


def test_a_copy_that_finds_no_room_does_not_exceed_the_budget() -> None:
    """Then more is left to compute than the match promised."""
    loop = Loop(num_blocks=2, max_prefill_tokens=2)
    loop.submit("a", text(8))
    loop.run()
    loop.submit("a", [*text(6), 90, 91])
    assert [(chunk.seq.num_computed_tokens, chunk.num_tokens) for chunk in loop.schedule()] == [(4, 2)]
    loop.scheduler.finish(loop.sequences[-1])


def test_pinned_text_leaves_the_rest_of_the_pool_usable() -> None:
    loop = Loop(num_blocks=8)
    loop.publish(text(12))
    loop.run()
    seqs = [loop.submit("a", text(16, seed=n), max_new=5) for n in range(1, 6)]
    loop.run()
    assert all(loop.reply(seq) == cold_reply(text(16, n), 5) for n, seq in enumerate(seqs, 1))
    assert loop.manager.match(text(13), seqs[0].scopes).num_tokens == 12


@given(own=st.integers(0, 2), lengths=st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_what_a_tenant_sees_does_not_depend_on_what_others_say(own: int, lengths: list[int]) -> None:
    """Cached tokens, and the step of every token, are the same whether others' text equals its own or not."""

    def run(other_seed: int) -> list[tuple[int | None, list[int]]]:
        loop = Loop(num_blocks=24, max_prefill_tokens=8, max_new_seqs_per_step=2)
        watched = []
        for n, length in enumerate(lengths):
            loop.submit("b", text(length, seed=other_seed + n), max_new=3, who=Principal("b", "u", str(n)))
            watched.append(loop.submit("a", text(length, seed=n % (own + 1)), max_new=3))
        seen: list[list[int]] = [[] for _ in watched]
        while loop.live:
            loop.step()
            for steps, seq in zip(seen, watched, strict=True):
                steps.append(seq.num_generated_tokens)
        return [(seq.num_cached_tokens, steps) for seq, steps in zip(watched, seen, strict=True)]

    assert run(0) == run(500)
