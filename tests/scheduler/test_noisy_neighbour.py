"""A tenant, or a user, that floods: how late others are, what share each gets, and that nobody starves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.scheduler.request import Sequence, SequenceStatus
from prefixkv.scope import Principal
from tests.cache.fakes import text
from tests.scheduler.loop import Loop, Rules

LIGHT = Principal("light", "u", "s")


class Clock:
    """A loop whose time passes as its steps cost: one for each computed token, and one for the step."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.now = 0

    def step(self) -> None:
        self.now += 1 + sum(chunk.num_tokens for chunk in self.loop.step())


def _percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _lateness(
    flood: Callable[[Loop, int], None], length: int, who: Principal = LIGHT
) -> tuple[list[int], list[int], int]:
    """Return how long 100 requests waited for their first token, in steps and in time, and the sum of their computes.

    Each comes while a step is under way, if one is: it waits for the end of that step first.
    """
    loop = Loop(num_blocks=2048, max_num_seqs=16, max_prefill_tokens=64, max_new_seqs_per_step=2)
    clock, rng = Clock(loop), random.Random(7)
    steps_late, time_late = [], []
    for n in range(100):
        for _ in range(rng.randrange(3, 12)):
            flood(loop, n)
            if loop.scheduler.has_work:
                clock.step()
        arrival, steps = clock.now, 0
        flood(loop, n)
        if loop.scheduler.has_work:
            clock.step()
            steps += 1
        seq = loop.submit(who.tenant, text(length, seed=10_000 + n), 4, who=who)
        while not seq.num_generated_tokens:
            flood(loop, n)
            clock.step()
            steps += 1
        steps_late.append(steps)
        time_late.append(clock.now - arrival)
        while seq.status is not SequenceStatus.FINISHED:
            flood(loop, n)
            clock.step()
    return steps_late, time_late, loop.scheduler.num_preemptions


def _silence(loop: Loop, n: int) -> None:
    """Nobody else is there."""


def _flood_from(who: Principal) -> Callable[[Loop, int], None]:
    """At least 40 requests of one party wait at any time, with long and short prompts and replies."""
    rng = random.Random(3)
    seeds = iter(range(1, 10_000))

    def flood(loop: Loop, n: int) -> None:
        while len(loop.scheduler.waiting) < 40:
            prompt = text(rng.choice((8, 30, 100, 300)), seed=next(seeds))
            loop.submit(who.tenant, prompt, rng.choice((2, 20, 60)), who=who)

    return flood


@pytest.mark.parametrize(
    "length", [pytest.param(20, marks=pytest.mark.slow), 64, pytest.param(300, marks=pytest.mark.slow)]
)
def test_a_light_tenants_first_token_comes_in_twice_the_steps_at_most(length: int) -> None:
    """Alone: its prompt in chunks. Under a flood: the step under way, and half of the turns."""
    alone, _, _ = _lateness(_silence, length)
    flooded, _, preemptions = _lateness(_flood_from(Principal("flood")), length)
    assert preemptions, "the flood had taken all places"
    assert _percentile(flooded, 0.99) <= 2 * _percentile(alone, 0.99)


def test_a_light_tenants_first_token_comes_in_twice_the_time_at_most() -> None:
    """Where its prompt is a few steps long; the step under way is at most one chunk and a token for each reply."""
    _, alone, _ = _lateness(_silence, 400)
    _, flooded, _ = _lateness(_flood_from(Principal("flood")), 400)
    assert _percentile(flooded, 0.99) <= 2 * _percentile(alone, 0.99)


@pytest.mark.parametrize(
    "length", [pytest.param(20, marks=pytest.mark.slow), 64, pytest.param(300, marks=pytest.mark.slow)]
)
def test_a_light_user_is_as_well_off_beside_a_flooding_user_of_its_tenant(length: int) -> None:
    who = Principal("light", "calm", "s")
    alone, _, _ = _lateness(_silence, length, who)
    flooded, _, _ = _lateness(_flood_from(Principal("light", "flooding", "s")), length, who)
    assert _percentile(flooded, 0.99) <= 2 * _percentile(alone, 0.99)


# -- nobody starves ----------------------------------------------------------------------------------------------------

floods = st.lists(
    st.tuples(st.sampled_from("abv"), st.sampled_from("pq"), st.integers(1, 20), st.integers(1, 8), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


def _ends_in_bounded_steps(
    flood: list[tuple[str, str, int, int, int]],
    victim: tuple[int, int],
    rules: dict[str, dict[str, int]],
    weights: dict[str, float],
    config: dict[str, int],
) -> None:
    """For ever two new requests a step, cycling through what was drawn; and one of ``v`` that must end."""
    length, new = victim
    loop = Loop(20, 4, rules=Rules(weight=lambda tenant: weights.get(tenant, 1.0), **rules), **config)
    seq: Sequence | None = None
    # A turn for each chunk of the prompt, for those of its own user before it, and each again for preemptions; a
    # priority waits 64 steps for a turn, which is one of up to three tenants' and two users' in it.
    chunks = -(-(length + new) // config["max_prefill_tokens"])
    bound = 64 * 6 * (chunks + 8) + 40 * new
    number = 0
    for now in range(40 + bound):
        while len(loop.scheduler.waiting) < 12:
            tenant, user, size, fresh, seed = flood[number % len(flood)]
            number += 1
            if (tenant, user) == ("v", "p") and seq is not None:
                user = "q"  # what its own user sends behind it is no flood, but its own work
            loop.submit(tenant, text(size, seed=seed + number), fresh, who=Principal(tenant, user, "s"))
        if now == 40:
            seq = loop.submit("v", text(length, seed=999_999), new, who=Principal("v", "p", "s"))
        loop.step()
        if seq is not None and seq.status is SequenceStatus.FINISHED:
            return
    raise AssertionError(f"not done after {bound} steps")


_starving = given(
    flood=floods,
    victim=st.tuples(st.integers(1, 24), st.integers(1, 8)),
    rules=st.fixed_dictionaries(
        {
            "priority": st.dictionaries(st.sampled_from("abv"), st.integers(-2, 2)),
            "max_running": st.dictionaries(st.sampled_from("abv"), st.integers(1, 3)),
            "floors": st.dictionaries(st.sampled_from("abv"), st.integers(1, 4)),
        }
    ),
    weights=st.dictionaries(st.sampled_from("abv"), st.sampled_from((0.5, 1.0, 3.0))),
    config=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "max_prefill_tokens": st.integers(4, 32),
            "max_new_seqs_per_step": st.integers(1, 3),
        }
    ),
)


@settings(max_examples=40)
@_starving
def test_nobody_starves(**drawn) -> None:  # type: ignore[no-untyped-def]
    """Whatever others keep sending, with any priorities, weights, floors and limits."""
    _ends_in_bounded_steps(**drawn)


@pytest.mark.slow
@settings(max_examples=1000)
@_starving
def test_nobody_starves_in_very_many_floods(**drawn) -> None:  # type: ignore[no-untyped-def]
    _ends_in_bounded_steps(**drawn)
