"""A replay says what an engine would have had in its cache."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from prefixkv import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from prefixkv.chat.segmenter import Segmenter
from prefixkv.measure.findings import Findings, suggest_policy
from prefixkv.measure.simulate import (
    BLOCK_CHAIN,
    BLOCK_CHAIN_PER_TENANT,
    GIVEN_POLICIES,
    OURS,
    WHOLE_REQUEST,
    Simulator,
)
from prefixkv.measure.trace import TraceRequest, interleave, parse_line
from prefixkv.policy import PolicySet
from prefixkv.scope import Principal
from tests.support import byte_tokenizer, tiny_model

BOT = "You are the bot of a shop. Be short, and kind to those who ask the same thing twice."


def request(*turns: str, tenant: str = "acme", session: str = "s", system: str = BOT) -> TraceRequest:
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return TraceRequest("f:1", Principal(tenant, session=session), messages)


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter(byte_tokenizer())


def simulator(segmenter: Segmenter, policies: dict[str, Any] | None = None, **options: Any) -> Simulator:
    chosen = None if policies is None else PolicySet.load(policies)
    return Simulator(segmenter, chosen, **options)


TRAFFIC = [
    request("hello"),
    request("hello"),
    request("hello", "Good day.", "what is the time?"),
    request("hello", session="other"),
    request("hello", tenant="globex"),
    request("hello", "Good day.", "what is the time?", "Ten.", "thank you"),
    request("hello", "Good morning.", "what is the time?", "Ten.", "thank you"),
    request("ahoy", session="other", system=BOT + " Say ahoy."),
]


@pytest.mark.parametrize("pool_blocks", [None, 12])
def test_a_replay_has_the_cached_tokens_of_an_engine(segmenter: Segmenter, pool_blocks: int | None) -> None:
    """One token is generated per request, whose row is never written: then an engine too keeps prompts alone."""
    replay = simulator(segmenter, block_size=32, pool_blocks=pool_blocks)
    outcomes = [replay.ask(one).outcomes[OURS] for one in TRAFFIC]
    spec_blocks = 64 if pool_blocks is None else pool_blocks
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    with Engine(model, tokenizer, config=EngineConfig(cache=CacheConfig(memory="1MiB", block_size=32))) as engine:
        block_bytes = engine.stats().block_bytes
    config = EngineConfig(
        cache=CacheConfig(memory=block_bytes * spec_blocks, block_size=32), scheduler=SchedulerConfig()
    )
    with Engine(model, tokenizer, config=config) as engine:
        assert engine.stats().blocks_total == spec_blocks
        sampling = SamplingParams(max_tokens=1, temperature=0)
        results = [engine.chat(one.messages, principal=one.principal, sampling=sampling) for one in TRAFFIC]
        evictions = engine.stats().evictions
    assert [(one.prompt_tokens, one.cached_tokens) for one in outcomes] == [
        (one.usage.prompt_tokens, one.usage.cached_tokens) for one in results
    ]
    assert [one.report for one in outcomes] == [one.report for one in results]
    assert replay.caches[OURS].manager.num_evicted == evictions
    assert (evictions > 0) == (pool_blocks is not None)
    replay.caches[OURS].manager.check()


def test_each_way_shares_as_far_as_it_does(segmenter: Segmenter) -> None:
    replay = simulator(segmenter)
    first, again, *_, other_session, other_tenant = (replay.ask(one).outcomes for one in [*TRAFFIC[:2], *TRAFFIC[3:5]])
    total = first[OURS].prompt_tokens
    assert {way: one.cached_tokens for way, one in first.items()} == dict.fromkeys(replay.ways, 0)
    assert again[WHOLE_REQUEST].cached_tokens == total
    assert again[BLOCK_CHAIN].cached_tokens == again[BLOCK_CHAIN_PER_TENANT].cached_tokens == (total - 1) // 16 * 16
    assert again[OURS].cached_tokens == total - 1
    system_tokens = len(f"<|im_start|>system\n{BOT}") - len("<|im_start|>") + 1
    assert system_tokens <= other_session[OURS].cached_tokens < total - 1
    assert other_tenant[BLOCK_CHAIN].cached_tokens > 0
    assert other_tenant[BLOCK_CHAIN_PER_TENANT].cached_tokens == other_tenant[OURS].cached_tokens == 0


def test_given_policies_are_replayed_beside_the_default(segmenter: Segmenter) -> None:
    replay = simulator(segmenter, {"tenants": {"acme": {"scopes": {"system": "session", "preamble": "session"}}}})
    replay.ask(request("hello"))
    outcomes = replay.ask(request("hello", session="other")).outcomes
    assert outcomes[OURS].cached_tokens > 0 == outcomes[GIVEN_POLICIES].cached_tokens
    refused = replay.ask(request("hello", tenant="unknown"))
    assert refused.refusals[GIVEN_POLICIES].code == "unknown_tenant"
    assert set(refused.outcomes) == {*replay.ways} - {GIVEN_POLICIES}


def test_a_request_without_a_prompt_is_refused_in_every_way_and_remembered_in_none(segmenter: Segmenter) -> None:
    replay = simulator(segmenter, {"default": {"max_prompt_tokens": 60}})
    bad = request("hello", system="{{slot:now}}")
    refused = replay.ask(bad)
    assert refused.outcomes == {}
    assert {one.code for one in refused.refusals.values()} == {"missing_slot"}
    assert set(refused.refusals) == set(replay.ways)
    too_long = replay.ask(request("hello"))
    assert [(way, one.code) for way, one in too_long.refusals.items()] == [(GIVEN_POLICIES, "too_long")]


def test_a_prompt_larger_than_the_pool_is_refused_and_leaves_nothing_behind(segmenter: Segmenter) -> None:
    replay = simulator(segmenter, pool_blocks=2)
    refused = replay.ask(request("hello"))
    assert refused.refusals[OURS].code == "no_room"
    assert replay.caches[OURS].manager.pool.num_free == 2


def test_a_ceiling_that_is_a_share_counts_and_one_in_bytes_does_not(segmenter: Segmenter) -> None:
    policies = {"tenants": {"acme": {"max_pool": 0.1}, "globex": {"max_pool": "1KiB"}}}
    replay = simulator(segmenter, policies, pool_blocks=20)
    assert replay.ask(request("hello")).refusals[GIVEN_POLICIES].code == "no_room"
    assert GIVEN_POLICIES in replay.ask(request("hello", tenant="globex")).outcomes


# -- recorded conversations ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool_segmenter(data_dir: Path) -> Segmenter:
    """A real tokenizer with a real template that knows tools."""
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "qwen2")
    template = data_dir / "templates" / "llama.cpp" / "Qwen-Qwen2.5-7B-Instruct.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return Segmenter(tokenizer)


def replayed(segmenter: Segmenter, requests: list[TraceRequest], policies: PolicySet | None = None) -> Findings:
    replay = Simulator(segmenter, policies)
    findings = Findings(replay.ways)
    for one in requests:
        findings.add(replay.ask(one))
    assert not findings.refusals
    return findings


def airline_requests(data_dir: Path, num_lines: int) -> list[TraceRequest]:
    """Conversations of the airline's agent, a request per reply; the clock of the policy is another for each."""
    folder = data_dir / "conversations" / "tau-bench"
    system = (folder / "airline_system.txt").read_text(encoding="utf-8")
    tools = json.loads((folder / "tools_airline.json").read_text(encoding="utf-8"))
    assert system.count("15:00:00") == 1
    requests: list[TraceRequest] = []
    with (folder / "airline_trajectories.jsonl").open(encoding="utf-8") as lines:
        for number, line in zip(range(num_lines), lines, strict=False):
            messages = [{"role": "system", "content": system}, *json.loads(line)["messages"]]
            data = {"messages": messages, "tools": tools, "tenant": "airline"}
            requests += parse_line(json.dumps(data).encode(), f"airline:{number}", conversations=True)
    changed = []
    for i, one in enumerate(requests):
        clock = f"{15 + i // 3600}:{i // 60 % 60:02}:{i % 60:02}"
        first = {**one.messages[0], "content": system.replace("15:00:00", clock)}
        changed.append(dataclasses.replace(one, messages=[first, *one.messages[1:]]))
    return changed


def service_requests(data_dir: Path, num_tenants: int, num_dialogues: int) -> list[TraceRequest]:
    """Dialogues with services, each service a tenant with a system text and tools of its own, so many of each."""
    folder = data_dir / "conversations" / "sgd"
    services = json.loads((folder / "services.json").read_text(encoding="utf-8"))
    requests: list[TraceRequest] = []
    taken: Counter[str] = Counter()
    for number, line in enumerate((folder / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()):
        dialogue = json.loads(line)
        tenant = dialogue["services"][0]
        if taken[tenant] == num_dialogues or (tenant not in taken and len(taken) == num_tenants):
            continue
        taken[tenant] += 1
        system = f"You are the assistant of {tenant}. {services[tenant]['description']}."
        messages = [{"role": "system", "content": system}, *dialogue["messages"]]
        data = {"messages": messages, "tools": services[tenant]["tools"], "tenant": tenant}
        requests += parse_line(json.dumps(data).encode(), f"sgd:{number}")
    assert len(taken) == num_tenants
    return requests


@pytest.mark.data
def test_a_clock_at_the_start_of_a_real_policy_leaves_block_chains_nothing(
    tool_segmenter: Segmenter, data_dir: Path
) -> None:
    requests = airline_requests(data_dir, 10)[:80]
    findings = replayed(tool_segmenter, requests)
    assert 0.003 < findings.totals[BLOCK_CHAIN].hit_rate < 0.007
    main = findings.totals[OURS]
    assert findings.lost_tokens["volatile_text"] > 0.85 * main.prompt_tokens
    assert set(findings.tenants["airline"].volatile_tokens) == {"clock"}
    policy = yaml.safe_load(suggest_policy(findings))
    assert policy["tenants"]["airline"] == {"slots": {"clock": {"placement": "tail"}}}


@pytest.mark.data
def test_the_same_clock_bound_late_gives_nearly_all_back(tool_segmenter: Segmenter, data_dir: Path) -> None:
    requests = []
    for one in airline_requests(data_dir, 10)[:80]:
        first = one.messages[0]
        clock = re.search(r"\d\d:\d\d:\d\d", first["content"])
        assert clock is not None
        content = first["content"].replace(clock[0], "{{slot:now}}")
        messages = [{**first, "content": content}, *one.messages[1:]]
        requests.append(dataclasses.replace(one, messages=messages, slots={"now": clock[0]}))
    policies = PolicySet.load({"default": {"slots": {"now": {"placement": "tail"}}}})
    findings = replayed(tool_segmenter, requests, policies)
    assert findings.totals[BLOCK_CHAIN].hit_rate < 0.007
    assert findings.totals[GIVEN_POLICIES].hit_rate >= 0.9


@pytest.mark.data
def test_scoped_keys_hit_nearly_all_that_tenants_of_real_services_repeat(
    tool_segmenter: Segmenter, data_dir: Path
) -> None:
    """Each conversation has a session of its own, and eight of them are held at a time."""
    requests = interleave(service_requests(data_dir, num_tenants=6, num_dialogues=14), 8)
    assert len(requests) > 500
    findings = replayed(tool_segmenter, requests)
    assert findings.totals[OURS].hit_rate >= 0.89
    assert findings.totals[OURS].cached_tokens > findings.totals[BLOCK_CHAIN].cached_tokens
    assert set(findings.lost_tokens) == {"first_seen"}
