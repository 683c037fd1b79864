"""The asyncio face gives what the threaded one gives, and blocks nobody."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prefixkv import AsyncEngine, ChatRequest, Engine, Principal, SamplingParams, errors

WHO = Principal("acme", user="u", session="s")
MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=300, ignore_eos=True)

# What other faces are built from; the async one uses them and does not offer them again.
SEAMS = {"submit", "cancel"}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_both_faces_have_the_same_methods_with_the_same_arguments() -> None:
    assert public(AsyncEngine) - {"from_engine"} == public(Engine) - SEAMS
    for name in public(Engine) - SEAMS:
        sync, other = getattr(Engine, name), getattr(AsyncEngine, name)
        assert list(inspect.signature(sync).parameters) == list(inspect.signature(other).parameters), name
        if name != "stream":
            assert inspect.iscoroutinefunction(other), name


CALLS: dict[str, tuple[Callable[[Engine], Any], Callable[[AsyncEngine], Awaitable[Any]]]] = {
    "chat": (
        lambda e: e.chat(MESSAGES, principal=WHO, sampling=GREEDY).token_ids,
        lambda e: _attr(e.chat(MESSAGES, principal=WHO, sampling=GREEDY), "token_ids"),
    ),
    "complete": (
        lambda e: e.complete("abc", principal=WHO, sampling=GREEDY).text,
        lambda e: _attr(e.complete("abc", principal=WHO, sampling=GREEDY), "text"),
    ),
    "chat_batch": (
        lambda e: [r.text for r in e.chat_batch([ChatRequest(MESSAGES, WHO, sampling=GREEDY)] * 2)],
        lambda e: _texts(e.chat_batch([ChatRequest(MESSAGES, WHO, sampling=GREEDY)] * 2)),
    ),
    "explain": (
        lambda e: e.explain(MESSAGES, principal=WHO).segments,
        lambda e: _attr(e.explain(MESSAGES, principal=WHO), "segments"),
    ),
    "publish": (lambda e: e.publish("text " * 9).tokens, lambda e: _attr(e.publish("text " * 9), "tokens")),
    "unpublish": (lambda e: e.unpublish("pub-99"), lambda e: e.unpublish("pub-99")),
    "purge": (lambda e: e.purge("nobody"), lambda e: e.purge("nobody")),
    "end_session": (lambda e: e.end_session(WHO) > 0, lambda e: _positive(e.end_session(WHO))),
    "reload_policies": (lambda e: e.reload_policies(None), lambda e: e.reload_policies(None)),
    "stats": (lambda e: e.stats().blocks_total, lambda e: _attr(e.stats(), "blocks_total")),
    "check": (lambda e: e.check(), lambda e: e.check()),
    "describe": (lambda e: e.describe(), lambda e: e.describe()),
}


async def _attr(call: Awaitable[Any], name: str) -> Any:
    return getattr(await call, name)


async def _texts(call: Awaitable[Any]) -> list[str]:
    return [r.text for r in await call]


async def _positive(call: Awaitable[int]) -> bool:
    return await call > 0


@pytest.mark.parametrize("name", CALLS)
async def test_both_faces_answer_alike(name: str, engine: Engine) -> None:
    engine.chat(MESSAGES, principal=WHO, sampling=GREEDY)
    sync, other = CALLS[name]
    assert await other(AsyncEngine.from_engine(engine)) == sync(engine)


async def test_streams_are_equal_too(engine: Engine) -> None:
    want = engine.chat(MESSAGES, principal=WHO, sampling=GREEDY)
    stream = AsyncEngine.from_engine(engine).stream(MESSAGES, principal=WHO, sampling=GREEDY)
    deltas = [delta async for delta in stream]
    assert "".join(d.text for d in deltas) == want.text
    assert stream.result is not None and stream.result.token_ids == want.token_ids


async def idle(engine: Engine) -> Any:
    for _ in range(200):
        stats = engine.stats()
        if stats.running == stats.waiting == 0:
            return stats
        await asyncio.sleep(0.02)
    raise AssertionError("the engine is still busy")


async def test_cancelling_a_task_cancels_its_request(engine: Engine) -> None:
    face = AsyncEngine.from_engine(engine)
    task = asyncio.create_task(face.chat(MESSAGES, principal=WHO, sampling=ENDLESS))
    while not engine.stats().running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await idle(engine)).aborted == 1


@pytest.mark.parametrize("how", ["close", "with", "break"])
async def test_leaving_a_stream_cancels_its_request(how: str, engine: Engine) -> None:
    stream = AsyncEngine.from_engine(engine).stream(MESSAGES, principal=WHO, sampling=ENDLESS)
    if how == "with":
        async with stream:
            await stream.__anext__()
    else:
        async for _ in stream:
            break
        if how == "close":
            await stream.aclose()
        else:
            del stream
    assert (await idle(engine)).aborted == 1


async def test_waiting_for_a_reply_leaves_the_loop_free(engine: Engine) -> None:
    face = AsyncEngine.from_engine(engine)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    heart = asyncio.create_task(beat())
    started = time.monotonic()
    await asyncio.gather(*(face.chat(MESSAGES, principal=Principal(f"t{i}"), sampling=ENDLESS) for i in range(2)))
    heart.cancel()
    assert beats > 10 * (time.monotonic() - started)


async def test_errors_are_the_same(engine: Engine) -> None:
    face = AsyncEngine.from_engine(engine)
    with pytest.raises(errors.InvalidRequest):
        await face.chat([], principal=WHO)
    with pytest.raises(errors.InvalidRequest) as caught:
        await face.chat_batch([ChatRequest([], WHO)])
    assert caught.value.path.startswith("requests[0]")
    await face.close()
    with pytest.raises(errors.EngineClosed):
        await face.chat(MESSAGES, principal=WHO)


async def test_one_bad_request_keeps_a_batch_from_starting(make_engine: Any) -> None:
    """As from a thread: what is wrong as written is said before anything runs."""
    engine = make_engine()
    face = AsyncEngine.from_engine(engine)
    good, bad = ChatRequest(MESSAGES, WHO, sampling=GREEDY), ChatRequest([], WHO)
    with pytest.raises(errors.InvalidRequest, match=r"requests\[1\]"):
        await face.chat_batch([good, bad])
    assert engine.stats().steps == 0
    first, second = await face.chat_batch([good, bad], return_exceptions=True)
    assert first.text and isinstance(second, errors.InvalidRequest)


async def test_a_cancelled_batch_leaves_nothing_running(make_engine: Any) -> None:
    engine = make_engine()
    face = AsyncEngine.from_engine(engine)
    task = asyncio.ensure_future(face.chat_batch([ChatRequest(MESSAGES, WHO, sampling=ENDLESS)] * 3))
    while engine.stats().running == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.stats().running == engine.stats().waiting == 0
