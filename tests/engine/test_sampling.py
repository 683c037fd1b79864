"""Sampling seen from outside: seeds, stops, logprobs, several replies."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams
from tests.engine.test_generate import prompts, run_together

WHO = Principal("acme", user="u", session="s")
PROMPT = prompts(200, [40])[0]


def reply(engine: Engine, **options: Any) -> Any:
    options.setdefault("ignore_eos", True)
    options.setdefault("max_tokens", 16)
    return engine.complete(PROMPT, principal=WHO, sampling=SamplingParams(**options))


def test_a_seed_gives_the_same_reply_whatever_else_is_in_the_batch(engine: Engine) -> None:
    alone = reply(engine, seed=7, temperature=1.5).token_ids
    assert reply(engine, seed=8, temperature=1.5).token_ids != alone
    sampling = SamplingParams(seed=7, temperature=1.5, ignore_eos=True, max_tokens=16)
    strangers = [(p, Principal(f"t{i}")) for i, p in enumerate(prompts(200, [12, 30, 55], seed=3))]
    together = run_together(engine, [*strangers, (PROMPT, Principal("acme", user="x"))], sampling)
    assert together[-1].token_ids == alone


def test_without_a_seed_replies_differ(engine: Engine) -> None:
    assert len({reply(engine, temperature=2.0).token_ids for _ in range(4)}) > 1


def test_n_replies_share_the_prompt_and_differ(engine: Engine) -> None:
    result = reply(engine, n=4, seed=1, temperature=2.0)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in result.choices}) == 4
    assert result.usage.completion_tokens == 4 * 16
    assert result.usage.computed_tokens == len(PROMPT)
    assert engine.stats().steps < 40
    assert reply(engine, n=4, seed=1, temperature=2.0).choices[3].token_ids == result.choices[3].token_ids


def test_a_stop_string_cuts_the_text_across_token_borders(engine: Engine) -> None:
    """The byte tokenizer makes every string of two characters span tokens."""
    full = reply(engine, temperature=0, max_tokens=24)
    stop = full.text[5:8]
    cut = full.text.index(stop)
    result = reply(engine, temperature=0, max_tokens=24, stop=[stop, "never there"])
    assert (result.text, result.finish_reason) == (full.text[:cut], "stop")
    assert result.token_ids == full.token_ids[: len(result.token_ids)]
    kept = reply(engine, temperature=0, max_tokens=24, stop=stop, include_stop=True)
    assert kept.text == full.text[: cut + len(stop)]


def test_a_stop_id_ends_the_reply_and_is_not_text(engine: Engine) -> None:
    full = reply(engine, temperature=0)
    result = reply(engine, temperature=0, stop_token_ids=[full.token_ids[3]])
    first = full.token_ids.index(full.token_ids[3])
    assert (result.token_ids, result.finish_reason) == (full.token_ids[: first + 1], "stop")


def test_logprobs_come_with_every_token(engine: Engine) -> None:
    result = reply(engine, temperature=0, logprobs=3)
    assert result.logprobs is not None and len(result.logprobs) == 16
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.token_id == token_id == entry.top[0][0]
        assert len(entry.top) == 3
        assert entry.logprob == pytest.approx(entry.top[0][1])
        assert entry.logprob <= 0
    assert reply(engine, temperature=0).logprobs is None


def test_a_bias_and_penalties_change_the_reply(engine: Engine) -> None:
    forced = reply(engine, temperature=0, logit_bias={9: 1e9})
    assert set(forced.token_ids) == {9}
    assert 9 in forced.token_ids and reply(engine, temperature=0, logit_bias={9: float("-inf")}).token_ids.count(9) == 0
    penalised = reply(engine, temperature=0, logit_bias={9: 30.0}, frequency_penalty=2.0, max_tokens=40)
    assert set(penalised.token_ids) != {9} or 9 not in penalised.token_ids


def test_deltas_add_up_to_the_result(engine: Engine) -> None:
    messages = [{"role": "user", "content": "héllo wörld"}]
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = engine.chat(messages, principal=WHO, sampling=sampling)
    stream = engine.stream(messages, principal=WHO, sampling=sampling)
    assert stream.result is None
    deltas = list(stream)
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].usage == stream.result.usage


def test_timings_add_up(engine: Engine) -> None:
    timings = reply(engine).timings
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s)
    assert timings.tokens_per_s == pytest.approx(15 / timings.decode_s)
