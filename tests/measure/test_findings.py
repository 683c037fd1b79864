"""What a replay adds up to, and the policy file that comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixkv.chat.explain import CacheReport, MissReason
from prefixkv.measure.findings import Findings, suggest_policy
from prefixkv.measure.simulate import BLOCK_CHAIN, GIVEN_POLICIES, OURS, Outcome, Refusal, SimulatedRequest
from prefixkv.policy import PolicySet, TenantPolicy


def asked(
    tenant: str, prompt: int, cached: int, miss: tuple[str, int, str] | None = None, warnings: tuple[str, ...] = ()
) -> SimulatedRequest:
    reason = None if miss is None else MissReason(miss[0], 0, cached, miss[1], miss[2])
    report = CacheReport((), prompt, cached, reason, warnings)
    return SimulatedRequest(tenant, {BLOCK_CHAIN: Outcome(prompt, 0), OURS: Outcome(prompt, cached, report)}, {})


@pytest.fixture
def findings() -> Findings:
    made = Findings((BLOCK_CHAIN, OURS))
    made.add(asked("acme", 100, 0, ("first_seen", 90, "nothing is known")))
    made.add(asked("acme", 100, 60, ("volatile_text", 30, "a clock at A"), ("w",)))
    made.add(asked("globex", 300, 180, ("volatile_text", 100, "a clock at B"), ("w", "v")))
    made.add(asked("acme", 100, 99))
    made.add(SimulatedRequest("initech", {}, {OURS: Refusal("template_rejected", "f:5", "no text")}))
    return made


def test_totals_tenants_and_reasons_add_up(findings: Findings) -> None:
    assert findings.requests == 5
    assert findings.totals[OURS].hit_rate == 339 / 600
    assert findings.totals[BLOCK_CHAIN].hit_rate == 0
    assert findings.tenants["acme"].ways[OURS].prompt_tokens == 300
    assert findings.lost_tokens == {"first_seen": 90, "volatile_text": 130}
    assert findings.tenants["acme"].lost_tokens == {"first_seen": 90, "volatile_text": 30}
    assert findings.misses == {"first_seen": 1, "volatile_text": 2}
    assert findings.warnings == {"w": 2, "v": 1}
    assert findings.history[OURS] == [(100, 0), (100, 60), (300, 180), (100, 99)]
    assert findings.refusals == {"template_rejected": 1}
    assert findings.tenants["initech"].ways[OURS].hit_rate == 0


def test_advice_begins_with_the_reason_that_costs_most_and_its_costliest_hint(findings: Findings) -> None:
    """Codes are whatever the explainer says; none is known here by name."""
    findings.notes.append("a note")
    lines = findings.advice()
    assert lines[0] == "volatile_text: 130 tokens, 21.7% of all, in 2 requests: a clock at B"
    assert lines[1].startswith("first_seen: 90 tokens, 15.0% of all, in 1 requests: ")
    assert lines[2:] == [
        "warning of 2 requests: w",
        "warning of 1 requests: v",
        "a note",
        "1 requests are left out, template_rejected; the first is f:5: no text",
    ]


def test_reasons_are_those_of_the_given_policies_where_there_are_any() -> None:
    findings = Findings((OURS, GIVEN_POLICIES))
    reports = [CacheReport((), 10, 0, MissReason(code, 0, 0, 9, "h")) for code in ("a", "b")]
    outcomes = {way: Outcome(10, 0, report) for way, report in zip((OURS, GIVEN_POLICIES), reports, strict=True)}
    findings.add(SimulatedRequest("t", outcomes, {}))
    findings.add(SimulatedRequest("t", {}, {OURS: Refusal("x", "f:1", "h")}))
    assert findings.lost_tokens == {"b": 9}
    assert findings.refusals == {}


def test_warnings_are_counted_in_bounded_memory(findings: Findings) -> None:
    for i in range(3000):
        findings.add(asked("acme", 1, 0, None, (f"w{i}", "w")))
    assert len(findings.warnings) == 1000
    assert findings.warnings["w"] == 3002


def test_the_data_is_json_and_holds_every_figure(findings: Findings) -> None:
    data: dict[str, Any] = json.loads(json.dumps(findings.to_data()))
    assert data["ways"][OURS] == {"requests": 4, "prompt_tokens": 600, "cached_tokens": 339, "hit_rate": 0.565}
    assert data["tenants"]["globex"]["lost_tokens"] == {"volatile_text": 100}
    assert data["misses"]["volatile_text"] == {"requests": 2, "lost_tokens": 130, "hint": "a clock at B"}
    assert data["refusals"] == {"template_rejected": {"requests": 1, "first": "f:5"}}


@pytest.mark.parametrize("name", ["acme", "null", "1", "a: b", "- x", "#", "é\u2028\x1b[31m", '"', "<script>"])
def test_the_suggested_policy_loads_whatever_a_tenant_is_called(tmp_path: Any, name: str) -> None:
    findings = Findings((BLOCK_CHAIN, OURS))
    findings.add(asked(name, 1, 0))
    path = tmp_path / "policies.yaml"
    path.write_text(suggest_policy(findings), encoding="utf-8")
    loaded = PolicySet.load(path)
    assert loaded == PolicySet(default=TenantPolicy(), tenants={name: TenantPolicy()})
