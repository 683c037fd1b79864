"""What a policy gives a tenant, seen from outside: times to live, floors, what is registered, what a purge leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams, SchedulerConfig, errors
from prefixkv.scope import Scope, ScopeLevel
from tests.engine.test_generate import prompts
from tests.support import tiny_model

ANN = Principal("acme", user="ann", session="1")
BEN = Principal("acme", user="ben", session="1")
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
SYSTEM = {"role": "system", "content": "You answer for a shop that sells shoes and hats to people far away."}
CHAT = [SYSTEM, {"role": "user", "content": "May I return a hat?"}]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def hits(engine: Engine, who: Principal, chat: list[dict[str, str]] = CHAT) -> int:
    return engine.explain(chat, principal=who).cached_tokens


# -- times to live -----------------------------------------------------------------------------------------------------


def test_past_its_time_everything_of_a_session_is_gone_and_the_tenants_is_not(make_engine: Any) -> None:
    clock = Clock()
    policies = {"default": {"ttl": {"session": {"idle": "10m"}, "tenant": {"absolute": "1h"}}}}
    engine = make_engine(policies=policies, clock=clock)
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    shared = hits(engine, BEN)
    whole = hits(engine, ANN)
    assert whole > shared > 0
    clock.now_s += 599
    assert hits(engine, ANN) == whole
    clock.now_s += 1
    assert hits(engine, ANN) == shared
    report = engine.explain([*CHAT, {"role": "assistant", "content": "You may."}, CHAT[1]], principal=ANN)
    assert (report.cached_tokens, report.miss and report.miss.code) == (shared, "expired")
    assert engine._core.recall.past(ANN).prompts[0].level is ScopeLevel.TENANT, "the words of the chat are forgotten"
    clock.now_s += 3000
    assert hits(engine, BEN) == 0
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert engine._runner.storage.is_zero(range(stats.blocks_total))


def test_a_request_that_runs_past_the_time_of_its_blocks_ends_well(make_engine: Any) -> None:
    clock = Clock()
    engine = make_engine(policies={"default": {"ttl": {"session": {"absolute": 60}}}}, clock=clock)
    want = engine.chat(CHAT, principal=ANN, sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    stream = engine.stream(CHAT, principal=ANN, sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    next(stream)
    clock.now_s += 60
    list(stream)
    assert stream.result is not None and stream.result.token_ids == want.token_ids
    clock.now_s += 60
    assert hits(engine, ANN) == hits(engine, BEN)
    engine.check()


def test_an_engine_that_nobody_calls_destroys_what_is_past_its_time(make_engine: Any) -> None:
    engine = make_engine(policies={"default": {"ttl": {level: {"idle": 0.3} for level in ("session", "tenant")}}})
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    pool = engine._core.manager.pool
    assert pool.num_free < pool.num_blocks
    until = time.monotonic() + 20
    while pool.num_free < pool.num_blocks and time.monotonic() < until:
        time.sleep(0.05)
    assert pool.num_free == pool.num_blocks


def test_under_zero_retention_the_end_of_a_session_destroys_it(make_engine: Any) -> None:
    clock = Clock()
    engine = make_engine(policies={"tenants": {"acme": {"zero_retention": True}}, "default": {}}, clock=clock)
    other = Principal("acme", user="ann", session="2")
    for who in (ANN, other, Principal("globex", session="1")):
        engine.chat(CHAT, principal=who, sampling=SHORT)
    stream = engine.stream(CHAT, principal=ANN, sampling=ENDLESS)
    next(stream)
    shared, whole = hits(engine, BEN), hits(engine, other)
    blocks = engine.end_session(ANN)
    assert blocks > 0
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    assert (hits(engine, ANN), hits(engine, other)) == (shared, whole)
    free = engine.stats().blocks_free
    clock.now_s += 300
    assert hits(engine, other) == 0
    assert engine.stats().blocks_free > free
    assert hits(engine, Principal("globex", session="1")) == whole, "another tenant's rules"


def test_the_unnamed_session_of_one_user_ends_alone(make_engine: Any) -> None:
    engine = make_engine(policies={"default": {"zero_retention": True}})
    mine, named, theirs = Principal("acme"), Principal("acme", session="1"), Principal("acme", user="ann")
    for who in (mine, named, theirs):
        engine.chat(CHAT, principal=who, sampling=SHORT)
    whole = hits(engine, named)
    engine.end_session(mine)
    assert hits(engine, named) == hits(engine, theirs) == whole > hits(engine, mine)


# -- what is registered ------------------------------------------------------------------------------------------------


def test_where_text_is_registered_users_share_what_was_published_and_nothing_else(make_engine: Any) -> None:
    engine = make_engine(policies={"default": {"tenant_scope": "registered", "slots": {"x": {"scope": "tenant"}}}})
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    assert hits(engine, BEN) == 0, "what Ann's client sent as system text is hers"
    assert hits(engine, Principal("acme", user="ann", session="2")) > 0, "in all her sessions"
    assert {part.scope for part in engine.explain(CHAT, principal=BEN).segments} == {"user", "session"}
    engine.publish([SYSTEM], tenant="acme")
    assert 0 < hits(engine, BEN) < hits(engine, ANN)
    assert hits(engine, Principal("globex", user="ben")) == 0


# -- shares ------------------------------------------------------------------------------------------------------------


def flood(engine: Engine, seed: int) -> None:
    engine.complete(prompts(200, [100], seed=seed)[0], principal=Principal("loud", session=str(seed)), sampling=SHORT)


@pytest.mark.parametrize("isolation", ["shared", "strict"])
def test_a_noisy_neighbour_costs_nothing_that_the_floor_covers(make_engine: Any, isolation: str) -> None:
    """The quiet tenant's usual requests hit as much beside a flood as alone."""
    policies = {"tenants": {"quiet": {"min_pool": "50%", "isolation": isolation}}, "default": {}}
    usual = prompts(200, [60, 60, 60], seed=77)
    seen = {}
    for loud in (False, True):
        engine = make_engine(blocks=32, policies=policies)
        cached = 0
        for turn in range(8):
            for seed in range(4 * loud):
                flood(engine, 100 + 10 * turn + seed)
            for prompt in usual:
                result = engine.complete(prompt, principal=Principal("quiet", session="s"), sampling=SHORT)
                cached += result.usage.cached_tokens
        seen[loud] = cached
        stats = engine.stats("quiet")
        assert (stats.evicted_blocks, stats.evicted_by_others) == (0, 0)
        assert not loud or engine.stats("loud").evicted_blocks > 0
    assert seen[True] == seen[False] == 7 * 3 * 59


def test_who_evicted_whose_blocks_is_counted(make_engine: Any) -> None:
    engine = make_engine(blocks=12)
    for seed in range(3):
        flood(engine, seed)
    engine.complete(prompts(200, [100], seed=9)[0], principal=Principal("late"), sampling=SHORT)
    stats, loud = engine.stats(), engine.stats("loud")
    lost = {(by, of): count for by, of, count in stats.evicted}
    assert lost["loud", "loud"] > 0 and lost["late", "loud"] > 0
    assert loud.evicted_by_others == lost["late", "loud"]
    assert loud.evicted_blocks == sum(lost.values()) == stats.evicted_blocks == stats.evictions


def test_a_request_that_others_floors_leave_no_room_for_is_refused_at_once(make_engine: Any) -> None:
    policies = {"tenants": {"kept": {"min_pool": "75%"}}, "default": {}}
    engine = make_engine(blocks=12, policies=policies)
    with pytest.raises(errors.QuotaExceeded):
        flood(engine, 1)
    engine.complete(prompts(200, [100])[0], principal=Principal("kept"), sampling=SHORT)


# -- purge -------------------------------------------------------------------------------------------------------------


def test_a_purge_in_the_middle_of_a_prefill_leaves_nothing(make_engine: Any) -> None:
    engine = make_engine(scheduler=SchedulerConfig(max_prefill_tokens=8))
    prompt = prompts(200, [400])[0]
    computed: Callable[[], int] = lambda: engine._core.metrics.steps  # noqa: E731
    failed: list[Any] = []

    def ask() -> None:
        failed.append(engine.complete(prompt, principal=ANN, sampling=SHORT).finish_reason)

    thread = threading.Thread(target=ask)
    thread.start()
    while computed() < 5:
        time.sleep(0.001)
    receipt = engine.purge("acme", "ann")
    thread.join()
    assert failed == ["abort"]
    assert receipt.requests_aborted == 1 and receipt.tokens >= 5 * 8 - 8
    assert receipt.bytes == receipt.blocks * engine.stats().block_bytes
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert engine._runner.storage.is_zero(range(stats.blocks_total))
    assert engine.complete(prompt, principal=ANN, sampling=SHORT).usage.cached_tokens == 0


def test_principals_whose_names_join_alike_share_nothing(engine: Engine) -> None:
    for mine, other in (
        (Principal("org_1", user="2345"), Principal("org_12345")),
        (Principal("a", user="b", session="c"), Principal("a", user="bc")),
        (Principal("a", session="b"), Principal("a", user="b")),
    ):
        engine.chat(CHAT, principal=mine, sampling=SHORT)
        tenant = Scope.of(mine, ScopeLevel.TENANT) == Scope.of(other, ScopeLevel.TENANT)
        assert (hits(engine, other) > 0) == tenant
        assert hits(engine, other) < hits(engine, mine)


# -- reload ------------------------------------------------------------------------------------------------------------


def test_a_tenant_that_a_reload_removed_keeps_its_rules_while_its_blocks_last(make_engine: Any) -> None:
    clock = Clock()
    rules = {"ttl": {level: {"idle": "5m"} for level in ("session", "tenant")}}
    engine = make_engine(policies={"tenants": {"acme": rules, "globex": {}}}, clock=clock)
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    engine.reload_policies({"tenants": {"globex": {}}})
    with pytest.raises(errors.UnknownTenant):
        engine.chat(CHAT, principal=ANN, sampling=SHORT)
    assert engine.stats("acme").blocks > 0
    clock.now_s += 300
    assert engine.stats("acme").blocks == 0


def test_a_shorter_time_counts_for_what_is_stored_already(make_engine: Any) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    clock.now_s += 100
    engine.reload_policies({"default": {"ttl": {"session": {"idle": "1m"}}}})
    assert hits(engine, ANN) == hits(engine, BEN) > 0
    assert all(sent.level is ScopeLevel.TENANT for sent in engine._core.recall.past(ANN).prompts)


@pytest.mark.parametrize(
    ("rules", "where"),
    [
        ({"min_pool": "1GiB"}, "tenants.acme.min_pool"),
        ({"min_pool": 1, "isolation": "strict"}, "tenants.acme.min_pool"),
        ({"kv_format": "int4"}, "tenants.acme.kv_format"),
    ],
    ids=["a floor above the pool", "a partition of no block", "a format without a pool"],
)
def test_policies_that_do_not_fit_the_pool_are_refused_and_the_model_is_given_back(
    make_engine: Any, rules: dict[str, Any], where: str
) -> None:
    policies = {"tenants": {"acme": rules}, "default": {}}
    model = tiny_model("llama")
    stock = model.config._attn_implementation
    with pytest.raises(errors.PolicyError, match=where):
        make_engine(model=model, policies=policies)
    assert model.config._attn_implementation == stock
    engine = make_engine(model=model)
    with pytest.raises(errors.PolicyError, match=where):
        engine.reload_policies(policies)
    assert engine.chat(CHAT, principal=Principal("globex"), sampling=SHORT).token_ids


def test_what_users_planted_before_text_had_to_be_registered_is_shared_no_more(make_engine: Any) -> None:
    published = [{"role": "system", "content": "This one the backend published itself."}, CHAT[1]]
    fresh = make_engine(policies={"default": {"tenant_scope": "registered"}})
    fresh.publish(published[:1], tenant="acme")
    engine = make_engine()
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    engine.publish(published[:1], tenant="acme")
    assert hits(engine, BEN) > hits(fresh, BEN)
    engine.reload_policies({"default": {"tenant_scope": "registered"}})
    assert (hits(engine, BEN), hits(engine, BEN, published)) == (hits(fresh, BEN), hits(fresh, BEN, published))
    engine.check()


SHARED = {"scopes": {"history": "tenant", "user": "tenant", "generation_prompt": "tenant"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"scopes": {"system": "user"}}),
        ({}, {"scopes": {"system": "request"}}),
        ({"scopes": {"user": "user"}}, {}),
        ({"few_shot_messages": 2}, {}),
        ({"slots": {"x": {"scope": "tenant"}}}, {"slots": {"x": {"scope": "session"}}}),
        ({"slots": {"x": {"scope": "tenant"}}}, {}),
        (SHARED, {}),
        (SHARED, {"scopes": {"history": "tenant", "user": "user"}}),
        (SHARED, {"tenant_scope": "registered"}),
    ],
)
@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_a_reload_that_narrows_what_is_shared_leaves_nothing_of_it_to_others(
    make_engine: Any, before: dict[str, Any], after: dict[str, Any], when: str
) -> None:
    """To users of the tenant, and to other sessions of the same user, it is as if nobody had asked before."""
    system = {"role": "system", "content": "You sell shoes. {{slot:x}} Be kind."}
    chat = [system, *CHAT[1:], {"role": "assistant", "content": "Hello to you."}, {"role": "user", "content": "Boots?"}]
    another = Principal(ANN.tenant, ANN.user, "another session")
    engine, fresh = make_engine(policies={"default": before}), make_engine(policies={"default": after})
    slots = {"x": "The shop is open."}
    if when == "before":
        engine.chat(chat, principal=ANN, slots=slots, sampling=SHORT)
        assert any(engine.explain(chat, principal=who, slots=slots).cached_tokens for who in (BEN, another))
        engine.reload_policies({"default": after})
    else:
        with engine.stream(chat, principal=ANN, slots=slots, sampling=ENDLESS) as stream:
            next(iter(stream))
            engine.reload_policies({"default": after})
            next(iter(stream))
    fresh.chat(chat, principal=ANN, slots=slots, sampling=SHORT)
    for who in (BEN, another):
        assert (
            engine.explain(chat, principal=who, slots=slots).cached_tokens
            <= fresh.explain(chat, principal=who, slots=slots).cached_tokens
        )
    engine.check()


@pytest.mark.parametrize("after", [{"default": {}}, {"tenants": {"acme": {}}}], ids=["left out", "changed"])
def test_what_was_stored_under_zero_retention_does_not_outlive_it(make_engine: Any, after: dict[str, Any]) -> None:
    """Also where a line was lost from the file; what is published stays."""
    engine = make_engine(policies={"tenants": {"acme": {"zero_retention": True}}, "default": {}})
    engine.publish([SYSTEM], tenant="acme")
    published = hits(engine, BEN)
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    engine.chat(CHAT, principal=Principal("globex"), sampling=SHORT)
    assert hits(engine, ANN) > published > 0
    kept = hits(engine, Principal("globex"))
    with engine.stream(CHAT, principal=BEN, sampling=ENDLESS) as stream:
        next(iter(stream))
        engine.reload_policies(after | {"default": {}})
        next(iter(stream))
    found = [hits(engine, who) for who in (ANN, BEN, Principal("globex"))]
    assert found == [published, published, kept], "also what ran meanwhile"
    engine.check()


def test_a_reload_that_shares_as_before_destroys_nothing(make_engine: Any) -> None:
    engine = make_engine()
    engine.chat(CHAT, principal=ANN, sampling=SHORT)
    kept = engine.stats().blocks_idle
    engine.reload_policies({"default": {"weight": 2, "scopes": {"user": "tenant"}, "few_shot_messages": 1}})
    assert engine.stats().blocks_idle == kept > 0


def test_what_users_are_planting_while_text_becomes_registered_is_not_shared(make_engine: Any) -> None:
    """One runs, one waits, and the backend is publishing."""
    engine = make_engine(scheduler=SchedulerConfig(max_num_seqs=2, max_prefill_tokens=16))
    chats = [[{"role": "system", "content": f"You are number {n}. " * 6}, CHAT[1]] for n in range(3)]
    with engine.stream(chats[0], principal=ANN, sampling=ENDLESS) as first:
        next(iter(first))
        with engine.stream(chats[1], principal=ANN, sampling=ENDLESS) as second:
            published: list[Any] = []
            publisher = threading.Thread(target=lambda: published.append(engine.publish(chats[2][:1], tenant="acme")))
            publisher.start()
            engine.reload_policies({"default": {"tenant_scope": "registered"}})
            next(iter(second))
        publisher.join()
    fresh = make_engine(policies={"default": {"tenant_scope": "registered"}})
    assert fresh.publish(chats[2][:1], tenant="acme").blocks == published[0].blocks
    assert [hits(engine, BEN, chat) for chat in chats] == [hits(fresh, BEN, chat) for chat in chats]
    engine.check()
