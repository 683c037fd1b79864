"""Slots, notes, examples and spliced replies in an engine: what is reused, remembered and forgotten."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams
from prefixkv.model.load import load_tokenizer

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
RULES = "Be kind to customers, and never promise what the shop cannot keep. " * 6
POLICIES: dict[str, Any] = {
    "default": {},
    "tenants": {
        "late": {"slots": {"now": {"placement": "tail"}}},
        "secretive": {"slots": {"now": {"placement": "tail", "scope": "request"}}},
        "coarse": {"slots": {"now": {"placement": "coarsen", "scope": "tenant"}}},
        "examples": {"few_shot_messages": 2},
    },
}


def system(text: str = "It is {{slot:now}}. " + RULES) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def engine(make_engine: Any) -> Engine:
    made: Engine = make_engine(policies=POLICIES)
    return made


def ask(engine: Engine, tenant: str, messages: list[Any], *, session: str = "s", now: str | None = None) -> Any:
    who = Principal(tenant, user="u", session=session)
    slots = None if now is None else {"now": now}
    return engine.chat(messages, principal=who, slots=slots, sampling=SHORT)


def talk(engine: Engine, tenant: str, turns: int, *, session: str | None = "s") -> list[Any]:
    """Hold a conversation whose clock moves on with every turn; return the results."""
    who = Principal(tenant, user="u", session=session)
    messages, results = [system()], []
    for turn in range(turns):
        messages.append(user(f"Question {turn}?"))
        results.append(engine.chat(messages, principal=who, slots={"now": f"10:3{turn}"}, sampling=SHORT))
        messages.append({"role": "assistant", "content": "A reply of the backend's own."})
    return results


def test_a_late_clock_leaves_system_text_and_history_a_prefix(engine: Engine) -> None:
    """Each turn finds all that the turn before it sent, though the clock moved on."""
    results = talk(engine, "late", 4)
    for before, after in itertools.pairwise(results):
        turn_before = next(part.start for part in reversed(before.report.segments) if part.kind == "generation_prompt")
        assert after.usage.cached_tokens >= turn_before - 1
        assert after.report.miss is None or after.report.miss.code != "slot_changed"


def test_an_inline_clock_loses_what_stands_behind_it(engine: Engine) -> None:
    first, second = talk(engine, "plain", 2)
    assert second.report.miss.code == "slot_changed"
    assert second.usage.cached_tokens < len("It is 10:30") + 40 < first.usage.prompt_tokens / 2


def test_an_undeclared_clock_is_named_and_counted(engine: Engine) -> None:
    """What it cost is the tenant's own figure; another tenant has none."""
    reports = [ask(engine, "plain", [system(f"It is 10:3{i}. {RULES}"), user("Hi")]).report for i in range(3)]
    assert [report.miss.code for report in reports] == ["first_seen", "volatile_text", "volatile_text"]
    assert {report.miss.kind for report in reports[1:]} == {"clock"}
    lost = sum(report.miss.tokens_lost for report in reports[1:])
    assert reports[2].miss.lost_so_far_tokens == lost
    assert engine.stats(tenant="plain").volatile_tokens == {"clock": lost}
    assert engine.stats(tenant="late").volatile_tokens == {}
    assert f"{lost} so far" in str(reports[2])


def test_without_a_session_only_the_turn_before_is_computed_again(engine: Engine) -> None:
    """Nobody's notes are remembered there: they would be other callers' words."""
    results = talk(engine, "late", 3, session=None)
    for before, after in itertools.pairwise(results):
        assert sum(part.kind == "slot" for part in after.report.segments) == 1
        slot = next(part for part in before.report.segments if part.kind == "slot")
        assert abs(after.usage.cached_tokens - slot.start) < len("<|im_start|>system\n") + 2


def test_a_late_value_reaches_other_sessions_of_the_tenant_nowhere(engine: Engine) -> None:
    """The system text is shared, the value is not."""
    ask(engine, "late", [system(), user("Hi")], now="10:31")
    report = engine.explain(
        [system(), user("Hi")], principal=Principal("late", user="v", session="t"), slots={"now": "10:31"}
    )
    kinds = {part.kind: part for part in report.segments}
    assert kinds["system"].cached_tokens == kinds["system"].tokens
    assert kinds["slot"].cached_tokens == 0
    assert kinds["slot"].scope == "session"


def test_a_value_of_request_scope_is_neither_stored_nor_remembered(engine: Engine) -> None:
    first, second = talk(engine, "secretive", 2)
    slot = next(part for part in first.report.segments if part.kind == "slot")
    assert slot.scope == "request"
    assert sum(part.kind == "slot" for part in second.report.segments) == 1  # the first turn's note is gone
    assert second.usage.cached_tokens <= slot.start


def test_a_turn_that_goes_on_with_tool_results_keeps_its_values(engine: Engine) -> None:
    who = Principal("late", user="u", session="loop")
    messages = [system(), user("Where is my order?")]
    first = engine.chat(messages, principal=who, slots={"now": "10:31"}, sampling=SHORT)
    messages += [{"role": "assistant", "content": "I look it up."}, {"role": "tool", "content": "It was sent."}]
    again = engine.chat(messages, principal=who, slots={"now": "10:32"}, sampling=SHORT)
    slot = next(part for part in again.report.segments if part.kind == "slot")
    assert slot.cached_tokens == slot.tokens
    assert again.usage.cached_tokens >= first.usage.prompt_tokens - len("<|im_start|>assistant\n")


def test_a_retried_turn_gets_the_new_value(engine: Engine) -> None:
    messages = [system(), user("What time is it?")]
    ask(engine, "late", messages, now="10:31")
    again = ask(engine, "late", messages, now="11:00")
    slot = next(part for part in again.report.segments if part.kind == "slot")
    assert 0 < slot.cached_tokens < slot.tokens


def test_explain_remembers_nothing(engine: Engine) -> None:
    who = Principal("late", user="u", session="s")
    engine.explain([system(), user("Hi")], principal=who, slots={"now": "10:31"})
    history = [system(), user("Hi"), {"role": "assistant", "content": "Hello."}, user("And now?")]
    report = engine.explain(history, principal=who, slots={"now": "10:32"})
    assert sum(part.kind == "slot" for part in report.segments) == 1


@pytest.mark.parametrize("how", ["purge", "end_session"])
def test_what_is_purged_or_ended_is_forgotten(how: str, engine: Engine) -> None:
    """Notes are the users' words: they go with the blocks, and only those of the identity that was named."""
    for session in ("s", "t"):
        ask(engine, "late", [system(), user("Hi")], session=session, now="10:31")
    if how == "purge":
        engine.purge(tenant="late", user="u", session="s")
    else:
        engine.end_session(Principal("late", user="u", session="s"))
    history = [system(), user("Hi"), {"role": "assistant", "content": "Hello."}, user("And now?")]
    slots = {}
    for session in ("s", "t"):
        report = engine.explain(history, principal=Principal("late", user="u", session=session), slots={"now": "10:32"})
        slots[session] = sum(part.kind == "slot" for part in report.segments)
    assert slots == {"s": 1, "t": 2}


def test_a_coarse_clock_is_shared_within_its_hour(engine: Engine) -> None:
    one, two, three = (
        ask(engine, "coarse", [system(), user("Hi")], session=str(i), now=now)
        for i, now in enumerate(("10:31", "10:59", "11:00"))
    )
    end = [part.end for part in two.report.segments if part.kind == "system"][-1]
    assert end > len(RULES)
    assert one.usage.cached_tokens == 0
    assert two.usage.cached_tokens >= end
    assert three.report.miss.code == "slot_changed"


def test_examples_are_shared_by_a_tenants_users(engine: Engine) -> None:
    messages = [system(RULES), user("Do you sell oil?"), {"role": "assistant", "content": "We do."}, user("Hi")]
    ask(engine, "examples", messages)
    report = engine.explain([*messages[:3], user("Hello")], principal=Principal("examples", user="v", session="t"))
    few_shot = [part for part in report.segments if part.kind == "few_shot"]
    assert [part.role for part in few_shot] == ["user", "assistant"]
    assert all(part.scope == "tenant" and part.cached_tokens == part.tokens for part in few_shot)
    plain = engine.explain(messages, principal=Principal("plain", user="v", session="t"))
    assert not [part for part in plain.segments if part.kind == "few_shot"]
    declared = engine.explain(messages, principal=Principal("plain", user="v", session="t"), few_shot=2)
    assert [part.role for part in declared.segments if part.kind == "few_shot"] == ["user", "assistant"]


@pytest.mark.parametrize("splices", [True, False])
def test_a_reply_that_encodes_to_other_tokens_is_hit_with_splicing_only(splices: bool, loaded_demo: None) -> None:
    """One letter after the other, as the model may write them; read back they are fewer tokens."""
    tokenizer = load_tokenizer("demo")
    letter = tokenizer.encode("a", add_special_tokens=False)[0]
    sampling = SamplingParams(max_tokens=12, temperature=0, logit_bias={letter: 1000.0})
    config = EngineConfig(cache=CacheConfig(memory="64MiB"))
    policies = {"default": {"splice_generated": splices}}
    with Engine.from_pretrained("demo", config=config, policies=policies) as engine:
        who = Principal("acme", user="u", session="s")
        messages = [system(RULES), user("Say a.")]
        first = engine.chat(messages, principal=who, sampling=sampling)
        assert first.text == "a" * 12
        assert len(tokenizer.encode(first.text, add_special_tokens=False)) < 12
        second = engine.chat([*messages, first.message, user("More.")], principal=who, sampling=sampling)
        before = first.usage.prompt_tokens
        if splices:
            assert second.report.miss is None
            assert second.usage.cached_tokens == before + 11  # the last token of a reply is never computed
        else:
            assert second.report.miss.code == "retokenised"
            assert second.usage.cached_tokens < before + 11
        other = engine.explain(
            [*messages, first.message, user("More.")], principal=Principal("acme", user="u", session="t")
        )
        expected = tokenizer.apply_chat_template(
            [*messages, first.message, user("More.")], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert other.prompt_tokens == len(expected)  # ids of one session are spliced into no other's
