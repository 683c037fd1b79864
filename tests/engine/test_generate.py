"""Greedy replies are token for token what ``model.generate`` gives: cold, warm, and batched with strangers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams
from tests.support import SERVED, byte_tokenizer, demo_loaded, tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0)


def generated(model: Any, prompt: list[int], num_tokens: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What transformers generates greedily, the end token included."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=sorted(eos) or None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def prompts(vocab: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("arch", SERVED)
def test_every_architecture_generates_what_transformers_does(arch: str, make_engine: Any) -> None:
    """Also with prompts longer than the sliding window, and chunked: 40 tokens a step."""
    from prefixkv import SchedulerConfig

    model = tiny_model(arch)
    vocab = min(model.config.get_text_config().vocab_size, 259)
    asked = prompts(vocab, [5, 33, 90])
    expected = [generated(model, p, GREEDY.max_tokens or 0) for p in asked]
    engine = make_engine(model=model, scheduler=SchedulerConfig(max_prefill_tokens=40))
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for round_number in range(2):
        for prompt, want in zip(asked, expected, strict=True):
            got = engine.complete(prompt, principal=Principal("a"), sampling=sampling)
            assert list(got.token_ids) == want
            assert got.usage.cached_tokens == (len(prompt) - 1 if round_number else 0)
    # Together, as strangers who share nothing.
    replies = run_together(engine, [(p, Principal(f"t{i}")) for i, p in enumerate(asked * 2)], sampling)
    assert [list(r.token_ids) for r in replies] == expected * 2
    assert all(r.usage.cached_tokens == 0 for r in replies)


def run_together(engine: Engine, asked: list[tuple[list[int], Principal]], sampling: SamplingParams) -> list[Any]:
    """Submit everything before anything ends."""
    import queue

    sinks = [queue.SimpleQueue[Any]() for _ in asked]
    made = [
        engine.builder.text(prompt, who, sampling, None, sink.put)
        for (prompt, who), sink in zip(asked, sinks, strict=True)
    ]
    for request in made:
        engine.submit(request)
    return [sink.get(timeout=240) for sink in sinks]


def demo_engine_and_prompts(lengths: list[int]) -> tuple[Engine, Any, list[list[int]]]:
    loaded = demo_loaded("float32")
    text = " ".join(
        f"The {i}th of many things that a visitor asks about is number {i * 7919 % 1000}." for i in range(300)
    )
    ids = loaded.tokenizer(text)["input_ids"]
    config = EngineConfig(cache=CacheConfig(kv_format="model"))
    engine = Engine(loaded.model, loaded.tokenizer, config=config)
    return engine, loaded, [ids[i : i + n] for i, n in enumerate(lengths)]


def check_demo(lengths: list[int], num_tokens: int) -> None:
    engine, loaded, asked = demo_engine_and_prompts(lengths)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0)
    expected = [generated(loaded.model, p, num_tokens, loaded.eos_token_ids) for p in asked]
    with engine:
        who = Principal("acme", user="u")
        for prompt, want in zip(asked, expected, strict=True):
            assert list(engine.complete(prompt, principal=who, sampling=sampling).token_ids) == want
        for prompt, want in zip(asked, expected, strict=True):
            warm = engine.complete(prompt, principal=who, sampling=sampling)
            assert list(warm.token_ids) == want
            assert warm.usage.computed_tokens == 1
        replies = run_together(engine, [(p, Principal(f"t{i}")) for i, p in enumerate(asked)], sampling)
        assert [list(r.token_ids) for r in replies] == expected
        engine.check()


def test_the_demo_model_generates_what_transformers_does() -> None:
    check_demo([20, 150], 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_model_generates_what_transformers_does_on_twenty_prompts() -> None:
    check_demo([20 + i * 1980 // 19 for i in range(20)], 64)


def test_a_model_in_an_engine_stays_usable_on_its_own(make_engine: Any) -> None:
    """Generating with the same object before, during and after gives the same tokens."""
    model = tiny_model("mistral")
    prompt = prompts(200, [60])[0]
    before = generated(model, prompt, 8)
    engine = make_engine(model=model)
    stream = engine.stream([{"role": "user", "content": "hello " * 20}], principal=Principal("a"))
    assert generated(model, prompt, 8) == before
    stream.close()
    engine.close()
    assert generated(model, prompt, 8) == before
    assert byte_tokenizer().chat_template
