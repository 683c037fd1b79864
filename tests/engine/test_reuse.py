"""What is cached is exactly what must be, and never more than a scope allows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams, SchedulerConfig
from tests.engine.test_generate import prompts, run_together
from tests.support import tiny_model

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_a_repeated_prompt_hits_all_but_its_last_token(block_size: int, make_engine: Any) -> None:
    engine = make_engine(block_size=block_size)
    for number, n in enumerate((block_size - 1, block_size, block_size + 1, 2 * block_size)):
        prompt = prompts(200, [n], seed=number)[0]
        cold = engine.complete(prompt, principal=Principal("a"), sampling=ONE)
        warm = engine.complete(prompt, principal=Principal("a"), sampling=ONE)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, n - 1)
        assert warm.token_ids == cold.token_ids
        assert warm.usage.cached_tokens + warm.usage.computed_tokens == warm.usage.prompt_tokens == n


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_prompt_that_shares_its_first_m_tokens_hits_m(block_size: int, make_engine: Any) -> None:
    engine = make_engine(block_size=block_size)
    base = prompts(200, [3 * block_size])[0]
    engine.complete(base, principal=Principal("a"), sampling=ONE)
    for m in (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size - 2):
        other = base[:m] + [base[m] + 1] + prompts(200, [20], seed=m)[0]
        assert engine.complete(other, principal=Principal("a"), sampling=ONE).usage.cached_tokens == m


def test_eight_equal_prompts_at_once_cost_about_one(make_engine: Any) -> None:
    """Seven wait for the one that computes; all together compute at most 1.1 times one prompt."""
    engine = make_engine(scheduler=SchedulerConfig(max_prefill_tokens=64))
    prompt = prompts(200, [200])[0]
    replies = run_together(engine, [(prompt, Principal("a"))] * 8, SamplingParams(max_tokens=4, temperature=0))
    assert sum(r.usage.computed_tokens for r in replies) <= 1.1 * len(prompt)
    assert len({r.token_ids for r in replies}) == 1


def chat(engine: Engine, principal: Principal, user_text: str = "hello there") -> Any:
    messages = [{"role": "system", "content": "You are a helpful robot. " * 8}, {"role": "user", "content": user_text}]
    return engine.chat(messages, principal=principal, sampling=ONE)


def by_kind(report: Any) -> dict[str, tuple[int, int]]:
    return {s.kind: (s.cached_tokens, s.tokens) for s in report.segments}


def test_two_tenants_share_nothing(engine: Engine) -> None:
    chat(engine, Principal("acme", user="u", session="s"))
    assert chat(engine, Principal("other", user="u", session="s")).usage.cached_tokens == 0


def test_two_users_of_a_tenant_share_the_system_prompt_only(engine: Engine) -> None:
    chat(engine, Principal("acme", user="u1", session="s"))
    result = chat(engine, Principal("acme", user="u2", session="s"))
    kinds = by_kind(result.report)
    assert kinds["system"][0] == kinds["system"][1] > 0
    assert kinds["user"][0] == 0
    assert result.usage.cached_tokens == sum(s.tokens for s in result.report.segments if s.scope == "tenant")


def test_two_sessions_of_a_user_share_the_system_prompt_only(engine: Engine) -> None:
    chat(engine, Principal("acme", user="u", session="1"))
    assert by_kind(chat(engine, Principal("acme", user="u", session="2")).report)["user"][0] == 0


def test_published_text_serves_every_tenant(engine: Engine) -> None:
    publication = engine.publish([{"role": "system", "content": "You are a helpful robot. " * 8}])
    for tenant in ("acme", "other"):
        result = chat(engine, Principal(tenant))
        assert result.usage.cached_tokens == publication.tokens
    assert publication.blocks * 16 >= publication.tokens


def test_text_published_to_a_tenant_serves_only_that_tenant(engine: Engine) -> None:
    publication = engine.publish([{"role": "system", "content": "You are a helpful robot. " * 8}], tenant="acme")
    assert chat(engine, Principal("acme")).usage.cached_tokens == publication.tokens
    assert chat(engine, Principal("other")).usage.cached_tokens == 0


def test_the_next_turn_reuses_the_whole_conversation(engine: Engine) -> None:
    """Prompt and reply are both reused, as far as the reply's text encodes to the ids that were generated."""
    who = Principal("acme", user="u", session="s")
    messages = [{"role": "system", "content": "Be brief. " * 10}, {"role": "user", "content": "One?"}]
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    first = engine.chat(messages, principal=who, sampling=sampling)
    messages += [first.message, {"role": "user", "content": "Two?"}]
    second = engine.chat(messages, principal=who, sampling=sampling)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1


def test_sixty_four_clients_in_a_tight_pool_get_their_cold_replies(make_engine: Any) -> None:
    """A pool of one and a half conversations: waiting, preemption and eviction change no reply and lose nothing."""
    model = tiny_model("llama")
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    asked = [
        (
            prompts(200, [20 + (i * 37) % 80], seed=i % 12)[0],
            Principal(f"t{i % 3}", user=f"u{i % 5}", session=f"s{i % 7}"),
        )
        for i in range(64)
    ]
    cold_engine = make_engine(model=model)
    cold = {}
    for prompt, _ in asked:
        if tuple(prompt) not in cold:
            reply = cold_engine.complete(prompt, principal=Principal("cold"), sampling=sampling)
            cold[tuple(prompt)] = reply.token_ids
    engine = make_engine(model=model, blocks=11)  # the longest conversation takes 8 of 16 tokens
    got: dict[int, Any] = {}

    def client(i: int) -> None:
        prompt, who = asked[i]
        got[i] = engine.complete(prompt, principal=who, sampling=sampling).token_ids

    threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert not any(thread.is_alive() for thread in threads)
    assert [got[i] for i in range(64)] == [cold[tuple(prompt)] for prompt, _ in asked]
    stats = engine.stats()
    assert stats.evictions > 0
    assert stats.blocks_in_use == 0
    engine.check()


def test_a_reply_that_was_begun_goes_on(engine: Engine) -> None:
    """The last message stays open: no header, no end token behind it, and what stood before it is a hit."""
    who, hello = Principal("acme", user="u", session="s"), [{"role": "user", "content": "hello"}]
    engine.chat(hello, principal=who, sampling=ONE)
    begun = [*hello, {"role": "assistant", "content": "Once upon"}]
    report = engine.explain(begun, principal=who, continue_final_message=True)
    result = engine.chat(begun, principal=who, sampling=ONE, continue_final_message=True)
    assert [part.kind for part in result.report.segments][-1] != "generation_prompt"
    assert report.cached_tokens == result.usage.cached_tokens > 0
    whole = engine.explain(begun, principal=who)
    assert whole.prompt_tokens > result.usage.prompt_tokens
