"""Policies: from files, mappings and objects; every fault named by its path."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.times import template_clock
from prefixkv.errors import PolicyError, UnknownTenant
from prefixkv.policy import CLOCK_UNITS, DEFAULT_SCOPES, SEGMENT_KINDS, PolicySet, PoolAmount, SlotPolicy, TenantPolicy
from prefixkv.scope import ScopeLevel

DATA: dict[str, Any] = {
    "tenants": {
        "acme": {
            "weight": 2,
            "max_pool": "64MiB",
            "scopes": {"tools": "user", "history": "request"},
            "slots": {"now": {"placement": "inline", "scope": "request"}},
            "max_prompt_tokens": 4096,
            "max_queued_requests": 8,
        }
    },
    "default": {"max_pool": 0.5},
}
YAML = """
tenants:
  acme:
    weight: 2
    max_pool: 64MiB
    scopes: {tools: user, history: request}
    slots:
      now: {placement: inline, scope: request}
    max_prompt_tokens: 4096
    max_queued_requests: 8
default: {max_pool: 0.5}
"""
TOML = """
[tenants.acme]
weight = 2
max_pool = "64MiB"
scopes = {tools = "user", history = "request"}
max_prompt_tokens = 4096
max_queued_requests = 8
[tenants.acme.slots.now]
placement = "inline"
scope = "request"
[default]
max_pool = 0.5
"""


def test_fields_arrive_as_written() -> None:
    """Levels become levels, sizes become numbers, what is left out keeps its default."""
    policy = PolicySet.load(DATA).get("acme")
    assert (policy.weight, policy.max_pool) == (2.0, PoolAmount(size_bytes=64 * 2**20))
    assert (policy.max_prompt_tokens, policy.max_queued_requests) == (4096, 8)
    assert policy.scope_level("tools") is ScopeLevel.USER
    assert policy.scope_level("history") is ScopeLevel.REQUEST
    assert policy.scope_level("system") is ScopeLevel.TENANT
    assert policy.slot("now") == SlotPolicy(placement="inline", scope=ScopeLevel.REQUEST)
    assert policy.slot("other") == SlotPolicy(placement="inline", scope=ScopeLevel.SESSION)


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.yaml", YAML), ("p.YML", YAML), ("p.toml", TOML), ("p.json", json.dumps(DATA)), ("p.yaml", json.dumps(DATA))],
)
def test_every_file_type_reads_alike(tmp_path: Path, name: str, text: str) -> None:
    """As a Path and as text, whatever the case of the ending."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert PolicySet.load(path) == PolicySet.load(str(path)) == PolicySet.load(DATA)


def test_no_source_gives_one_permissive_default() -> None:
    """Every tenant is served, under the default scopes."""
    policy = PolicySet.load(None).get("anyone")
    assert policy == TenantPolicy()
    assert {kind: policy.scope_level(kind) for kind in SEGMENT_KINDS} == DEFAULT_SCOPES


def test_objects_pass_through_and_mix_with_mappings() -> None:
    """Policies built in Python need no file."""
    policies = PolicySet(tenants={"acme": TenantPolicy(weight=3)})
    assert PolicySet.load(policies) is policies
    assert PolicySet.load({"tenants": {"acme": TenantPolicy(weight=3)}}) == policies


def test_a_dump_loads_again() -> None:
    """So that an operator can print the policies in force and start from them."""
    policies = PolicySet.load(DATA)
    dumped = policies.model_dump()
    assert json.loads(json.dumps(dumped)) == dumped
    assert PolicySet.load(dumped) == policies == pickle.loads(pickle.dumps(policies))


def test_tenants_outside_the_policies_need_a_default() -> None:
    """Without one they are refused, and the message does not repeat who asked."""
    assert PolicySet.load(DATA).get("zeta").max_pool == PoolAmount(share=0.5)
    with pytest.raises(UnknownTenant) as caught:
        PolicySet.load({"tenants": DATA["tenants"]}).get("zeta")
    assert "zeta" not in str(caught.value)


def test_default_scopes_know_every_segment_kind() -> None:
    """A kind without a default would have no scope."""
    assert set(SEGMENT_KINDS) == {kind.value for kind in SegmentKind}


BAD_TENANTS: list[tuple[str, dict[str, Any], str]] = [
    ("weight", {"weight": 0}, "greater than 0"),
    ("weight", {"weight": -1}, "greater than 0"),
    ("weight", {"weight": float("nan")}, "finite"),
    ("weight", {"weight": "heavy"}, "number"),
    ("weight", {"weight": True}, "number"),
    ("max_pool", {"max_pool": "64 of them"}, "share of the pool"),
    ("max_pool", {"max_pool": 0}, "share of the pool"),
    ("max_pool", {"max_pool": 1.5}, "share of the pool"),
    ("max_pool", {"max_pool": True}, "share of the pool"),
    ("max_pool", {"max_pool": []}, "share of the pool"),
    ("scopes.system", {"scopes": {"system": "tennant"}}, "one of tenant, user, session, request"),
    ("scopes.system", {"scopes": {"system": 1}}, "one of tenant, user, session, request"),
    ("scopes", {"scopes": {"sytem": "tenant"}}, "'sytem' is no segment kind"),
    ("scopes.system", {"scopes": {"system": "public"}}, "engine.publish"),
    ("slots.now.placement", {"slots": {"now": {"placement": "somewhere"}}}, "inline"),
    ("slots.now.scope", {"slots": {"now": {"scope": "everyone"}}}, "one of tenant, user, session, request"),
    ("slots.now.scope", {"slots": {"now": {"scope": "public"}}}, "engine.publish"),
    ("slots.now.placement", {"slots": {"now": {"placement": None}}}, "coarsen"),
    ("slots.now.unit", {"slots": {"now": {"placement": "coarsen", "unit": "week"}}}, "'minute', 'hour' or 'day'"),
    ("slots.now.phrase", {"slots": {"now": {"phrase": "x" * 201}}}, "at most 200"),
    ("slots.now.phrase", {"slots": {"now": {"phrase": 5}}}, "string"),
    ("few_shot_messages", {"few_shot_messages": -1}, "greater than or equal to 0"),
    ("few_shot_messages", {"few_shot_messages": "2"}, "integer"),
    ("few_shot_messages", {"few_shot_messages": True}, "integer"),
    ("tools_order", {"tools_order": "sorted"}, "'as_given' or 'canonical'"),
    ("splice_generated", {"splice_generated": 1}, "boolean"),
    ("splice_generated", {"splice_generated": "yes"}, "boolean"),
    ("template_clock", {"template_clock": "noon"}, "one of hour, day, month, year"),
    ("template_clock", {"template_clock": "minute"}, "an ISO date or time (2026-01-31)"),
    ("template_clock", {"template_clock": "2026-02-30"}, "an ISO date or time (2026-01-31)"),
    ("template_clock", {"template_clock": 2026}, "an ISO date or time (2026-01-31)"),
    ("slots.now.colour", {"slots": {"now": {"colour": "red"}}}, "no such field; there are placement, scope"),
    ("max_prompt_tokens", {"max_prompt_tokens": 0}, "greater than or equal to 1"),
    ("max_prompt_tokens", {"max_prompt_tokens": True}, "integer"),
    ("max_queued_requests", {"max_queued_requests": "4"}, "integer"),
    ("priority", {"priority": 101}, "less than or equal to 100"),
    ("min_pool", {"min_pool": "0%"}, "share of the pool"),
    ("min_pool", {"min_pool": "0 tokens"}, "share of the pool"),
    ("min_pool", {"min_pool": "ten tokens"}, "share of the pool"),
    ("min_pool", {"min_pool": 2**63}, "share of the pool"),
    ("min_pool", {"min_pool": "50%", "max_pool": 0.25}, "the floor of 50 % is above the ceiling, max_pool, of 25 %"),
    ("min_pool", {"min_pool": "2 tokens", "max_pool": "1 tokens"}, "2 tokens is above"),
    ("min_pool", {"min_pool": "2GiB", "max_pool": "1GiB"}, "2 GiB is above"),
    ("isolation", {"isolation": "strict"}, "needs min_pool"),
    ("isolation", {"isolation": "strict", "min_pool": 0.1, "max_pool": 0.2}, "leave max_pool out"),
    ("ttl.tennant", {"ttl": {"tennant": {}}}, "one of tenant, user, session"),
    ("ttl.public", {"ttl": {"public": {}}}, "has none; there are tenant, user and session"),
    ("ttl.session", {"ttl": {"session": "10m"}}, "mapping of fields"),
    ("ttl.session.idle", {"ttl": {"session": {"idle": "10 minutes"}}}, '"10m"'),
    ("ttl.session.idle", {"ttl": {"session": {"idle": 0}}}, "above 0"),
    ("ttl.session.idle", {"ttl": {"session": {"idle": True}}}, "above 0"),
    ("ttl.session.ilde", {"ttl": {"session": {"ilde": 1}}}, "did you mean idle?"),
    ("kv_format", {"kv_format": "int5"}, "model, int8, k8v4, k4v8, int4"),
    ("kv_format", {"kv_format": 8}, "string"),
    ("tokens_per_minute", {"tokens_per_minute": 0}, "greater than or equal to 1"),
    ("ttl", {"ttl": None}, "must be a mapping"),
    ("wieght", {"wieght": 1}, "no such field, did you mean weight? there are weight, priority"),
]


@pytest.mark.parametrize(("path", "data", "hint"), BAD_TENANTS)
def test_a_fault_is_named_by_its_path(tmp_path: Path, path: str, data: dict[str, Any], hint: str) -> None:
    """Built directly, inside a set, and in a file: the path grows, the hint stays."""
    with pytest.raises(PolicyError) as caught:
        TenantPolicy(**data)
    assert str(caught.value).startswith(f"{path}: ")
    assert hint in str(caught.value)
    with pytest.raises(PolicyError) as caught:
        PolicySet.load({"tenants": {"acme": data}})
    assert str(caught.value).startswith(f"tenants.acme.{path}: ")
    file = tmp_path / "policies.json"
    file.write_text(json.dumps({"default": data}))
    with pytest.raises(PolicyError) as caught:
        PolicySet.load(file)
    assert str(caught.value).startswith(f"{file}: default.{path}: ")
    assert hint in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    """One line each, so that a file is mended in one go."""
    data: dict[str, Any] = {"tenants": {"a": {"weight": 0, "slots": {"s": {"scope": 1}}}, "b": []}, "extra": 1}
    with pytest.raises(PolicyError) as caught:
        PolicySet.load(data)
    paths = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert paths == ["tenants.a.weight", "tenants.a.slots.s.scope", "tenants.b", "extra"]


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("p.yaml", b"- just\n- a list\n", "mapping"),
        ("p.yaml", b"", "mapping"),
        ("p.yaml", b"a: [1\n", "line"),
        ("p.yaml", b"1: {}\n", "expected 'tenants' or 'default'"),
        ("p.yaml", b"default:\n  \xff\xfe", "line 2: is no UTF-8 text (byte 0xff)"),
        ("p.yaml", b"!!python/object/apply:os.getcwd []", "no tag of a policy file"),
        ("p.toml", b"weight = \n", "line 1"),
        ("p.json", b'{"tenants": ', "line 1"),
        ("p.json", b"[]", "mapping"),
        ("p.txt", b"{}", ".yaml, .yml, .toml or .json"),
        ("policies", b"{}", ".yaml, .yml, .toml or .json"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    """Malformed text, the wrong kind of document, an unknown ending."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        PolicySet.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert hint in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Absent, or a folder."""
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(PolicyError) as caught:
            PolicySet.load(path)
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("source", [5, b"policies.yaml", ["acme"], object(), {1: {}}, {"tenants": []}, {"default": 3}])
def test_other_sources_are_policy_errors(source: Any) -> None:
    """Never a TypeError from inside."""
    with pytest.raises(PolicyError):
        PolicySet.load(source)


def test_policies_are_frozen() -> None:
    """A reload replaces the set; nothing edits it while requests read it."""
    policies = PolicySet.load(DATA)
    with pytest.raises(ValidationError):
        policies.default = None  # type: ignore[misc]


# -- segments, slots and templates -------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "few_shot_messages": 4,
    "tools_order": "canonical",
    "splice_generated": True,
    "template_clock": "day",
    "slots": {
        "now": {"placement": "coarsen", "unit": "day", "scope": "tenant"},
        "nick": {"placement": "tail", "phrase": "see below"},
        "mood": {"placement": "patch"},
    },
}


def test_what_is_left_out_changes_no_prompt() -> None:
    """Everything that moves text, orders tools or tells a template another time has to be asked for."""
    policy = TenantPolicy()
    assert (policy.few_shot_messages, policy.tools_order) == (0, "as_given")
    assert (policy.splice_generated, policy.template_clock) == (False, None)
    assert policy.slot("any") == SlotPolicy(placement="inline", scope=ScopeLevel.SESSION, unit="hour", phrase=None)


@pytest.mark.parametrize("name", ["p.yaml", "p.json"])
def test_fields_of_chats_arrive_from_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"default": CHAT}), encoding="utf-8")
    policy = PolicySet.load(path).get("anyone")
    assert policy == TenantPolicy(**CHAT)
    assert policy.slot("now") == SlotPolicy(placement="coarsen", unit="day", scope=ScopeLevel.TENANT)
    assert policy.slot("nick") == SlotPolicy(placement="tail", phrase="see below")
    assert TenantPolicy(**json.loads(json.dumps(policy.model_dump()))) == policy


@pytest.mark.parametrize("rule", [None, *CLOCK_UNITS])
def test_the_clock_of_a_template_is_rounded_or_left_alone(rule: str | None) -> None:
    assert TenantPolicy(template_clock=rule).template_clock == rule


@pytest.mark.parametrize("written", ["2026-01-31", "'2026-01-31'", "2026-01-31T00:00:00", "'20260131'"])
@pytest.mark.parametrize("name", ["p.yaml", "p.toml"])
def test_a_date_needs_no_quotes(tmp_path: Path, name: str, written: str) -> None:
    """YAML and TOML read a bare date as a date; it is pinned all the same."""
    path = tmp_path / name
    path.write_text(
        f"default: {{template_clock: {written}}}" if name == "p.yaml" else f"[default]\ntemplate_clock = {written}",
        encoding="utf-8",
    )
    rule = PolicySet.load(path).get("anyone").template_clock
    assert rule is not None
    assert template_clock(rule) == datetime(2026, 1, 31)
    assert TenantPolicy(template_clock=rule).template_clock is not None
