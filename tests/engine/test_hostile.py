"""Faults at the edges of the engine: tokenizers, loops and numbers that misbehave fail one request and no other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from prefixkv import AsyncEngine, Engine, Principal, SamplingParams, errors
from tests.support import byte_tokenizer, random_ids, tiny_model

WHO = Principal("acme", user="u", session="s")
HELLO = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


def test_an_id_that_the_tokenizer_cannot_decode_fails_its_request(engine: Engine, monkeypatch: Any) -> None:
    """SentencePiece raises IndexError for the ids that pad a vocabulary."""

    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise IndexError("piece id is out of range")

    with monkeypatch.context() as patch:
        patch.setattr(type(byte_tokenizer()), "decode", decode)
        with pytest.raises(errors.ExecutionError) as caught:
            engine.chat(HELLO, principal=WHO, sampling=SHORT)
    assert isinstance(caught.value.__cause__, IndexError)
    assert engine.chat(HELLO, principal=WHO, sampling=SHORT).usage.completion_tokens == 4


@pytest.mark.parametrize("length", [5, 16, 60])
def test_rows_that_are_not_numbers_are_not_reused(length: int, make_engine: Any, monkeypatch: Any) -> None:
    """A fault that passed must not live on in the cache; what others cached stays."""
    import torch

    model = tiny_model("llama")
    engine = make_engine(model=model)
    want = engine.complete(random_ids(length), principal=Principal("other"), sampling=SHORT)
    with monkeypatch.context() as patch:
        values = model.model.layers[0].self_attn.v_proj
        patch.setattr(values, "forward", lambda hidden: torch.full((*hidden.shape[:-1], 32), torch.nan))
        with pytest.raises(errors.ExecutionError):
            engine.complete(random_ids(length), principal=WHO, sampling=SHORT)
    got = engine.complete(random_ids(length), principal=WHO, sampling=SHORT)
    assert (got.token_ids, got.usage.cached_tokens) == (want.token_ids, 0)
    again = engine.complete(random_ids(length), principal=Principal("other"), sampling=SHORT)
    assert again.usage.cached_tokens == length - 1


def test_a_loop_that_closes_under_a_reply_harms_nobody(engine: Engine) -> None:
    """The engine thread may be about to hand over a token at that very moment."""
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = AsyncEngine.from_engine(engine).stream(HELLO, principal=WHO, sampling=ENDLESS)
        await stream.__anext__()
        return stream

    stream = loop.run_until_complete(begin())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    del stream


@pytest.mark.parametrize("when", ["before", "while it starts"])
def test_a_stream_closed_before_its_first_token_runs_nothing(when: str, engine: Engine) -> None:
    async def main() -> None:
        stream = AsyncEngine.from_engine(engine).stream(HELLO, principal=WHO, sampling=ENDLESS)
        reader = None
        if when == "while it starts":
            reader = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(0)
        await stream.aclose()
        if reader is not None:
            assert (await reader).finish_reason == "abort"
        assert [delta async for delta in stream] == []

    asyncio.run(main())
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.completion_tokens) == (0, 0, 0)


@pytest.mark.parametrize("ids", [(WHO,), ("",), ("acme", 5), ("acme", None, b"s")])
def test_a_purge_of_what_is_no_id_is_refused(ids: Any, engine: Engine) -> None:
    """Zero blocks destroyed would read as if there had been none."""
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    with pytest.raises(errors.InvalidRequest):
        engine.purge(*ids)


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 1025]])
def test_stop_strings_are_bounded(stop: list[str]) -> None:
    """They are searched on the thread that all requests share."""
    with pytest.raises(errors.InvalidRequest, match="at most 64"):
        SamplingParams(stop=stop)


def test_text_outside_of_contents_is_refused_before_it_is_tokenised(make_engine: Any, monkeypatch: Any) -> None:
    """Ten megabytes in a tool's description hold everybody up as ten megabytes in a message would."""
    engine = make_engine()
    encoder = engine._segmenter._encoder
    encoder.tokenizer.chat_template += "{{ tools[0]['function']['description'] if tools }}"
    monkeypatch.setattr(encoder, "_encode", lambda *args, **kwargs: pytest.fail("tokenised"))
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 10_000_000}}
    with pytest.raises(errors.ContextOverflow):
        engine.chat(HELLO, principal=WHO, tools=[tool], sampling=SHORT)


def test_a_timeout_too_large_for_a_float_is_none(engine: Engine) -> None:
    assert engine.chat(HELLO, principal=WHO, sampling=SHORT, timeout_s=10**400).finish_reason == "length"


def test_an_option_that_is_no_config_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="EngineConfig"):
        Engine(tiny_model("llama"), byte_tokenizer(), config={"cache": {}})  # type: ignore[arg-type]


def test_many_clients_who_cancel_at_random_leave_nothing(make_engine: Any) -> None:
    """Readers close, drop, time out and are purged while a small pool is fought over; cold replies come out after."""
    engine = make_engine(blocks=10)
    want = {i: engine.complete(random_ids(30, seed=i), principal=WHO, sampling=SHORT).token_ids for i in range(4)}
    failures: list[BaseException] = []

    def client(i: int) -> None:
        who = Principal(f"t{i % 3}", user=f"u{i % 2}", session=str(i))
        try:
            for turn in range(3):
                stream = engine.stream(HELLO, principal=who, sampling=SamplingParams(max_tokens=20, seed=i))
                for _ in range((i * 7 + turn) % 5):
                    next(stream, None)
                stream.close() if i % 2 else stream.__del__()
                engine.complete(random_ids(40, seed=i), principal=who, sampling=SHORT, timeout_s=1e-6 * (i + 1))
                if i % 5 == 0:
                    engine.purge(who.tenant, who.user)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures and not any(thread.is_alive() for thread in threads)
    engine.check()
    assert engine.stats().blocks_in_use == 0
    for i, ids in want.items():
        assert engine.complete(random_ids(30, seed=i), principal=WHO, sampling=SHORT).token_ids == ids
