"""Each planted fault is found: a test that finds nothing must be one that would have found something."""

from __future__ import annotations

import pytest

from prefixkv.errors import IntegrityError
from tests.audit.faults import FAULTS
from tests.audit.trial import run_trial

_MOST_TRIALS = 200
_RARE = {"evicting by content", "ties broken by content"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in _RARE else []) for n in FAULTS])
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    for seed in range(_MOST_TRIALS):
        try:
            outcome = run_trial(seed, fault.kind, checks=False)
        except IntegrityError:
            continue  # the engine noticed by itself; the trials shall see it without that
        if getattr(outcome, fault.shown_by):
            return
    raise AssertionError(f"{_MOST_TRIALS} trials did not show the fault: {name}")
