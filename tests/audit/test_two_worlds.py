"""What a scope can observe does not depend on another's words; under `strict` not even on whether it is there."""

from __future__ import annotations

import pytest

from tests.audit.program import Kind, make_program
from tests.audit.trial import run_trial
from tests.audit.world import run_world

_AT_ONCE = 50


def _run(kind: Kind, first_seed: int, trials: int, *, idle: bool = False) -> None:
    seen = 0
    for seed in range(first_seed, first_seed + trials):
        outcome = run_trial(seed, kind, idle=idle)
        name = "idle" if idle else kind
        assert outcome.is_clean, f"python -m tests.audit --trials 1 --kind {name} --seed {seed}\n{outcome}"
        seen += outcome.num_observations
    assert seen > 5 * trials, "the attacker hardly saw anything: these are no trials"


@pytest.mark.parametrize("kind", ["tenants", "users", "strict"])
def test_the_attackers_view_is_the_same_whatever_the_victim_says(kind: Kind) -> None:
    _run(kind, 0, 14)


def test_a_strict_tenant_cannot_see_whether_another_is_there() -> None:
    _run("strict", 0, 14, idle=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("kind", "idle"), [("tenants", False), ("users", False), ("strict", False), ("strict", True)])
def test_400_trials_of_a_kind(kind: Kind, idle: bool, part: int) -> None:
    _run(kind, 1000 + part * _AT_ONCE, _AT_ONCE, idle=idle)


def test_a_seed_is_one_program() -> None:
    assert make_program(7, "tenants") == make_program(7, "tenants") != make_program(8, "tenants")


def test_the_trials_reach_what_they_are_about() -> None:
    """Crowded pools, preemption, hits, refusals, aborts: trials in which nothing happens would prove nothing."""
    totals: dict[str, int] = {}
    for kind in ("tenants", "users"):
        for seed in range(25):
            stats = run_world(make_program(seed, kind), {}).core.stats()
            for name in ("evictions", "preemptions", "cached_tokens", "aborted", "requests"):
                totals[name] = totals.get(name, 0) + getattr(stats, name)
            totals["lost to others"] = totals.get("lost to others", 0) + sum(
                blocks for by, of, blocks in stats.evicted if by != of
            )
    assert min(totals.values()) > 0, totals
