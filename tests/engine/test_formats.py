"""Every pool format through the whole engine: a hit gives what a miss gives, alone and in a crowd."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams, SchedulerConfig
from prefixkv.cache.spec import KV_LAYOUTS
from tests.engine.test_generate import prompts, run_together
from tests.support import byte_tokenizer, tiny_model

SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
HEAD = {"head_dim": 32, "hidden_size": 64}


def make(arch: str, kv_format: str, **model: Any) -> Engine:
    return Engine(
        tiny_model(arch, **model),
        byte_tokenizer(),
        config=EngineConfig(
            cache=CacheConfig(kv_format=kv_format, memory="16MiB", block_size=16),
            scheduler=SchedulerConfig(max_prefill_tokens=48),
            debug=True,
        ),
    )


@pytest.mark.parametrize("kv_format", sorted(KV_LAYOUTS))
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_hit_gives_the_tokens_of_a_miss(arch: str, kv_format: str, backend: str) -> None:
    """Full attention, a window, a softcap with a window, sinks; prompts longer than a step's budget."""
    with make(arch, kv_format, **HEAD) as engine:
        asked = prompts(250, [5, 33, 90, 130])
        cold = [engine.complete(p, principal=Principal("a"), sampling=SAMPLING) for p in asked]
        warm = [engine.complete(p, principal=Principal("a"), sampling=SAMPLING) for p in asked]
        assert [r.token_ids for r in warm] == [r.token_ids for r in cold]
        assert [r.usage.cached_tokens for r in warm] == [len(p) - 1 for p in asked]
        crowd = run_together(engine, [(p, Principal("a")) for p in asked * 2], SAMPLING)
        assert [r.token_ids for r in crowd] == [r.token_ids for r in cold] * 2
        engine.check()


def test_the_format_changes_the_bytes_and_not_the_answer() -> None:
    """A quantised pool takes less and mostly answers the same."""
    prompt = prompts(250, [60])[0]
    replies, sizes = {}, {}
    for kv_format in KV_LAYOUTS:
        with make("llama", kv_format, **HEAD) as engine:
            replies[kv_format] = engine.complete(prompt, principal=Principal("a"), sampling=SAMPLING).token_ids
            sizes[kv_format] = engine.stats().block_bytes
    assert sizes["int8"] < 0.3 * sizes["model"]
    assert sizes["int4"] < sizes["k8v4"] < sizes["int8"]
    assert replies["int8"][:4] == replies["model"][:4]
