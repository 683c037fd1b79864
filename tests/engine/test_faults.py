"""A fault takes down what it touches and nothing else: forwards that throw, cancelled readers, purges in flight."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams, errors
from tests.engine.test_generate import prompts
from tests.support import byte_tokenizer, tiny_model

WHO = Principal("acme", user="u", session="s")
HELLO = [{"role": "system", "content": "Be kind. " * 12}, {"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=300, ignore_eos=True)


def wait_until_idle(engine: Engine) -> Any:
    for _ in range(200):
        stats = engine.stats()
        if stats.running == stats.waiting == 0:
            return stats
        time.sleep(0.02)
    raise AssertionError("the engine is still busy")


def test_an_exception_in_a_forward_fails_that_batch_and_nothing_else(make_engine: Any, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    want = engine.chat(HELLO, principal=WHO, sampling=SHORT)
    before = engine.stats()
    layer = model.model.layers[1].mlp

    def boom(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", boom)
        for prompt in prompts(200, [30, 50]):
            with pytest.raises(errors.ExecutionError) as caught:
                engine.complete(prompt, principal=WHO, sampling=SHORT)
            assert isinstance(caught.value.__cause__, RuntimeError)
    after = engine.stats()
    assert (after.blocks_in_use, after.blocks_idle, after.failed) == (0, before.blocks_idle, 2)
    again = engine.chat(HELLO, principal=WHO, sampling=SHORT)
    assert again.token_ids == want.token_ids
    assert again.usage.computed_tokens == 1


def test_logits_that_are_not_numbers_fail_only_their_request(make_engine: Any, monkeypatch: Any) -> None:
    import torch

    model = tiny_model("llama")
    engine = make_engine(model=model)
    marker = 77
    real = model.lm_head.forward
    seen: list[int] = []

    def poisoned(hidden: Any) -> Any:
        logits = real(hidden)
        if seen:
            logits[..., 0] = torch.nan
            seen.clear()
        return logits

    monkeypatch.setattr(model.lm_head, "forward", poisoned)
    seen.append(marker)
    with pytest.raises(errors.ExecutionError):
        engine.complete([5, 6, 7], principal=WHO, sampling=SHORT)
    assert engine.complete([5, 6, 7], principal=WHO, sampling=SHORT).usage.completion_tokens == 4


def test_what_overflowed_in_one_request_does_not_reach_the_next_owner_of_its_blocks(
    make_engine: Any, monkeypatch: Any
) -> None:
    """A masked NaN is still NaN: blocks go back to the pool as zeros, also those of a request that failed."""
    import torch

    model = tiny_model("llama")
    engine = make_engine(model=model, blocks=4)
    want = engine.complete([5, 6, 7], principal=WHO, sampling=SHORT).token_ids
    engine.purge()
    with monkeypatch.context() as patch:
        values = model.model.layers[0].self_attn.v_proj
        patch.setattr(values, "forward", lambda hidden: torch.full((*hidden.shape[:-1], 32), torch.nan))
        with pytest.raises(errors.ExecutionError):
            engine.complete(prompts(200, [60])[0], principal=Principal("other"), sampling=SHORT)
    engine.purge("other")
    assert engine.complete([5, 6, 7], principal=WHO, sampling=SHORT).token_ids == want


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_reader_that_goes_away_frees_everything(how: str, engine: Engine) -> None:
    stream = engine.stream(HELLO, principal=WHO, sampling=ENDLESS)
    assert next(stream).token_ids
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert wait_until_idle(engine).aborted == 1
    engine.check()


def test_a_stalled_reader_stops_nobody(engine: Engine) -> None:
    stalled = engine.stream(HELLO, principal=WHO, sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    assert engine.chat(HELLO, principal=Principal("other"), sampling=SHORT).usage.completion_tokens == 4
    wait_until_idle(engine)
    assert sum(len(d.token_ids) for d in stalled) == 40


def test_a_timeout_ends_with_what_there_is(engine: Engine) -> None:
    longest = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    result = engine.chat(HELLO, principal=WHO, sampling=longest, timeout_s=0.1)
    assert result.finish_reason == "abort"
    assert len(result.token_ids) == result.usage.completion_tokens < 900
    engine.check()


def test_closing_an_engine_fails_what_is_live() -> None:
    engine = Engine(tiny_model("llama"), byte_tokenizer())
    stream = engine.stream(HELLO, principal=WHO, sampling=ENDLESS)
    next(stream)
    threading.Thread(target=engine.close).start()
    with pytest.raises(errors.EngineClosed):
        for _ in stream:
            pass


@pytest.mark.parametrize("when", ["idle", "decoding", "waiting", "twice", "unknown"])
def test_purge_destroys_what_a_user_had_and_leaves_the_rest(when: str, engine: Engine) -> None:
    neighbour = Principal("acme", user="v", session="s")
    engine.chat(HELLO, principal=neighbour, sampling=SHORT)
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    stream = None
    if when == "decoding":
        stream = engine.stream(HELLO, principal=WHO, sampling=ENDLESS)
        next(stream)
    if when == "waiting":
        stream = engine.stream(HELLO, principal=WHO, sampling=ENDLESS)
    receipt = engine.purge("acme", "nobody" if when == "unknown" else "u")
    if when == "unknown":
        assert (receipt.blocks, receipt.tokens, receipt.requests_aborted) == (0, 0, 0)
        return
    assert receipt.blocks > 0 and receipt.tokens > 0
    assert receipt.bytes == receipt.blocks * engine.stats().block_bytes
    assert receipt.requests_aborted == (1 if stream else 0)
    if stream:
        assert [d.finish_reason for d in stream][-1] == "abort"
    if when == "twice":
        assert engine.purge("acme", "u").blocks == 0
    shared = sum(s.tokens for s in engine.explain(HELLO, principal=WHO).segments if s.scope == "tenant")
    assert engine.explain(HELLO, principal=WHO).cached_tokens == shared
    assert engine.explain(HELLO, principal=neighbour).cached_tokens > shared
    engine.check()


def test_purged_memory_is_zero(make_engine: Any) -> None:
    """Not only what is purged now: a free block holds zeros, whoever had it before."""
    engine = make_engine(blocks=10)
    for i in range(6):  # more than fits, so some of it is evicted on the way
        engine.complete(prompts(200, [60], seed=i)[0], principal=WHO, sampling=SHORT)
    engine.purge("acme")
    assert engine.stats().blocks_free == 10
    assert engine._runner.storage.is_zero(range(10))


def test_a_purge_without_arguments_empties_the_cache(engine: Engine) -> None:
    engine.publish("public words " * 6)
    engine.publish("tenant words " * 6, tenant="acme")
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    receipt = engine.purge()
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert receipt.blocks > 0


def test_a_tenants_publications_go_with_the_tenant_and_public_ones_stay(engine: Engine) -> None:
    public = engine.publish("public words " * 6)
    own = engine.publish("tenant words " * 6, tenant="acme")
    engine.purge("acme")
    assert not engine.unpublish(own)
    assert engine.unpublish(public)


def test_the_end_of_a_session_makes_its_blocks_the_first_to_go(make_engine: Any) -> None:
    engine = make_engine(blocks=12)
    ended, live = Principal("acme", user="u", session="1"), Principal("acme", user="u", session="2")
    first, second = prompts(200, [60, 60])
    engine.complete(second, principal=ended, sampling=SHORT)
    engine.complete(first, principal=live, sampling=SHORT)
    engine.complete(second, principal=ended, sampling=SHORT)  # the ended one is the most recent
    assert engine.end_session(ended) > 0
    engine.complete(prompts(200, [60], seed=9)[0], principal=Principal("acme", session="3"), sampling=SHORT)
    assert engine.complete(first, principal=live, sampling=SHORT).usage.cached_tokens == 59


def test_two_engines_live_in_one_process(make_engine: Any) -> None:
    """Also on one model object: neither sees the other's cache, and closing one leaves the other working."""
    model = tiny_model("llama")
    one, two = make_engine(model=model), make_engine(model=model)
    want = one.chat(HELLO, principal=WHO, sampling=SHORT)
    assert two.chat(HELLO, principal=WHO, sampling=SHORT).usage.cached_tokens == 0
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda e=e: results.append(e.chat(HELLO, principal=WHO, sampling=SHORT)))
        for e in (one, two)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    results.append(two.chat(HELLO, principal=WHO, sampling=SHORT))
    assert {r.token_ids for r in results} == {want.token_ids}


def test_allocations_and_releases_leave_a_line_each(engine: Engine, caplog: Any) -> None:
    """So that a leak can be traced by hand: every allocated block is released exactly once by the purge."""
    with caplog.at_level("DEBUG", logger="prefixkv.cache.pool"):
        engine.chat(HELLO, principal=WHO, sampling=SHORT)
        engine.purge()
    lines = [record.getMessage() for record in caplog.records]
    allocated = sorted(line.split()[1] for line in lines if line.startswith("allocate"))
    released = sorted(line.split()[1] for line in lines if line.startswith("release"))
    assert allocated == released and allocated
