"""Every example runs as its reader would run it, and shows what it says it shows."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from prefixkv import AsyncEngine, CacheConfig, Engine, EngineConfig, SchedulerConfig
from tests.support import byte_tokenizer, tiny_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SYSTEM = {"role": "system", "content": "You are the assistant of a bicycle shop. Answer in one short sentence. " * 3}
ASK = [SYSTEM, {"role": "user", "content": "Do you sell bells?"}]


@pytest.fixture
def run(loaded_demo: None, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example as a program and return what it printed."""

    def run_example(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_each_example_is_short_and_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"quickstart", "streaming", "batch", "publish_and_purge", "fastapi_chatbot"}
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path.name


def test_quickstart_computes_only_what_is_new(run: Callable[[str], str]) -> None:
    turns = re.findall(r"prompt (\d+), cached (\d+), computed (\d+)", run("quickstart"))
    (prompt, cached, _), (_, cached_again, computed_again) = [tuple(map(int, turn)) for turn in turns]
    assert cached == 0
    assert cached_again >= prompt - 1
    assert computed_again < prompt / 2


def test_a_broken_off_stream_leaves_nothing_running(run: Callable[[str], str]) -> None:
    out = run("streaming")
    assert "running 0, waiting 0, aborted 1" in out
    assert "completion_tokens=32" in out or "[stop:" in out


def test_a_batch_shares_its_prompt_and_refuses_one_request_only(run: Callable[[str], str]) -> None:
    lines = run("batch").splitlines()
    computed = [int(match[1]) for line in lines if (match := re.search(r"(\d+) tokens computed", line))]
    assert len(computed) == 4
    assert sorted(computed)[2] < max(computed) / 2
    assert sum("refused" in line and "missing_content" in line for line in lines) == 1


def test_publication_serves_the_first_request_and_purge_takes_the_rest(run: Callable[[str], str]) -> None:
    out = run("publish_and_purge")
    published = int(re.search(r"published (\d+) tokens", out)[1])  # type: ignore[index]
    first, before, after = (
        int(re.search(pattern, out)[1])  # type: ignore[index]
        for pattern in (r"first request: (\d+) of", r"prompt had (\d+) tokens", r"now (\d+)")
    )
    assert first == after == published
    assert before > published


# -- the chatbot backend ----------------------------------------------------------------------------------------------


MakeApp = Callable[..., tuple[Any, Engine]]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Build the example's application over an engine of the test's own, with a tiny model."""
    spec = importlib.util.spec_from_file_location("fastapi_chatbot", EXAMPLES / "fastapi_chatbot.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engines = []

    def make(policies: Any = None, **scheduler: Any) -> tuple[Any, Engine]:
        cache = CacheConfig(memory="8MiB")
        config = EngineConfig(cache=cache, scheduler=SchedulerConfig(**scheduler), debug=True)
        engine = Engine(tiny_model("llama"), byte_tokenizer(), config=config, policies=policies)
        engines.append(engine)
        return module.create_app(AsyncEngine.from_engine(engine)), engine

    yield make
    for engine in engines:
        engine.close()


def post(client: TestClient, tenant: str = "acme", user: str = "u1", **body: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 6, **body}
    return client.post("/chat", json=body, headers={"x-tenant": tenant, "x-user": user, "x-session": "s1"})


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def test_the_backend_streams_events_and_reports_cached_tokens(
    run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program itself, on the demo model; only the server that waits for clients is replaced by one client."""
    answers: list[httpx.Response] = []

    def serve(app: Any) -> None:
        client = TestClient(app)
        answers.extend([post(client), post(client, stream=True)])

    monkeypatch.setattr(uvicorn, "run", serve)
    run("fastapi_chatbot")
    plain, streamed = answers
    assert plain.json()["message"]["role"] == "assistant"
    assert plain.json()["usage"]["cached_tokens"] == 0
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *deltas, last = events(streamed.text)
    assert all(event["usage"] is None for event in deltas)
    assert last["usage"]["cached_tokens"] == last["usage"]["prompt_tokens"] - 1, "the same prompt again"
    assert len(deltas) + 1 == last["usage"]["completion_tokens"], "a piece for each token"


def test_the_header_decides_whose_cache_it_is(make_app: MakeApp) -> None:
    client = TestClient(make_app()[0])
    first = post(client).json()["usage"]
    colleague = post(client, user="u2").json()["usage"]["cached_tokens"]
    assert 0 < colleague < first["prompt_tokens"] - 1, "a colleague shares the system prompt and no more"
    assert post(client, tenant="other").json()["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_each_refusal_has_its_status(make_app: MakeApp, stream: bool) -> None:
    """A streamed request is refused before the stream begins, with the same status."""
    app, engine = make_app(policies={"tenants": {"acme": {}, "tiny": {"max_pool": "20KiB"}}})
    client = TestClient(app, raise_server_exceptions=False)
    long_ask = [{"role": "user", "content": "bicycle " * 9_000}]
    assert client.post("/chat", json={"messages": ASK}).status_code == 401
    assert client.post("/chat", content="{", headers={"x-tenant": "acme"}).status_code == 422
    refused = post(client, stream=stream, messages=[{"role": "robot", "content": "x"}])
    assert (refused.status_code, refused.json()["error"]) == (400, "InvalidRequest")
    assert post(client, stream=stream, messages=[]).status_code == 400
    assert post(client, stream=stream, max_tokens=0).status_code == 400
    assert post(client, stream=stream, messages=long_ask).status_code == 413
    assert post(client, "stranger", stream=stream).status_code == 403
    assert post(client, "tiny", stream=stream).status_code == 507
    assert engine.stats().requests == 0
    assert post(client, stream=stream).status_code == 200, "and the next good one works"
    engine.close()
    assert post(client, stream=stream).status_code == 503


def test_a_full_queue_is_too_many_requests(make_app: MakeApp) -> None:
    app, engine = make_app(max_num_seqs=1, max_queued_requests=1)

    async def ask_many() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"json": {"messages": ASK, "max_tokens": 16}, "headers": {"x-tenant": "acme"}}
            replies = await asyncio.gather(*(client.post("/chat", **ask) for _ in range(8)))
        return sorted(reply.status_code for reply in replies)

    codes = asyncio.run(ask_many())
    assert set(codes) == {200, 429}
    engine.check()


def test_a_client_that_goes_away_ends_its_request(make_app: MakeApp) -> None:
    """Over a real socket: a test client would read the reply to its end."""
    app, engine = make_app()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/chat"
            body = {"messages": ASK, "max_tokens": 700, "stream": True}
            deadline = time.monotonic() + 60
            with httpx.stream("POST", url, json=body, headers={"x-tenant": "acme"}, timeout=60) as response:
                assert next(response.iter_lines()).startswith("data: ")
            while engine.stats().running and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            server.should_exit = True
            thread.join()
    assert engine.stats().running == 0
    assert engine.stats().aborted == 1
    assert engine.stats().completion_tokens < 700
    engine.check()
