"""How an engine ends: dropped, at exit, in a forked child, broken from inside. Nobody is left waiting."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams, errors
from prefixkv.errors import UnsupportedModel
from tests.support import byte_tokenizer, tiny_model

WHO = Principal("acme", user="u", session="s")
HELLO = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


def test_an_engine_that_is_dropped_ends_its_thread_and_gives_the_model_back() -> None:
    """A pool may be gigabytes; whoever forgets close() must not keep it for ever."""
    model = tiny_model("llama")
    stock = model.config._attn_implementation
    engine = Engine(model, byte_tokenizer())
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    thread, core = engine._thread._thread, weakref.ref(engine._core)
    del engine
    gc.collect()
    thread.join(5)
    gc.collect()
    assert not thread.is_alive() and core() is None
    assert model.config._attn_implementation == stock


def test_a_tokenizer_that_will_not_do_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is built beside the segmenter: what is built when that fails is taken down again."""
    model = tiny_model("llama")
    stock = model.config._attn_implementation

    def refuse(*args: Any, **options: Any) -> None:
        raise UnsupportedModel("no such tokenizer")

    monkeypatch.setattr("prefixkv.engine.engine.Segmenter", refuse)
    with pytest.raises(UnsupportedModel, match="no such tokenizer"):
        Engine(model, byte_tokenizer())
    assert model.config._attn_implementation == stock


def test_a_program_that_ends_in_the_middle_of_a_reply_ends_cleanly(repo_root: Path) -> None:
    """A daemon thread that the interpreter finds inside torch at exit aborts the process (exit code -6)."""
    program = (
        "from tests.support import *; from prefixkv import *\n"
        "engine = Engine(tiny_model('llama'), byte_tokenizer())\n"
        "stream = engine.stream([{'role': 'user', 'content': 'hello'}], principal=Principal('acme'),\n"
        "                       sampling=SamplingParams(max_tokens=900, ignore_eos=True))\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repo_root, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_that_the_engine_stayed_behind(engine: Engine) -> None:
    """Servers that load before they fork would otherwise wait for a thread that is not there."""
    engine.chat(HELLO, principal=WHO, sampling=SHORT)
    child = os.fork()
    if child == 0:
        threading.Timer(10, lambda: os._exit(3)).start()
        try:
            engine.stats()
        except errors.EngineClosed:
            engine.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.chat(HELLO, principal=WHO, sampling=SHORT).usage.cached_tokens > 0


def test_when_the_books_break_every_reader_is_told(monkeypatch: Any) -> None:
    """Also those behind the first one, whose blocks cannot be given back either."""
    engine = Engine(tiny_model("llama"), byte_tokenizer())
    streams = [engine.stream(HELLO, principal=Principal(f"tenant{i}"), sampling=ENDLESS) for i in range(3)]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise errors.IntegrityError("broken")

    monkeypatch.setattr(engine._core.manager, "commit", broken)
    monkeypatch.setattr(engine._core.manager, "close", broken)
    for stream in streams:
        with pytest.raises(errors.EngineClosed) as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, errors.IntegrityError)
    engine.close()


def test_when_accepting_a_request_breaks_it_and_those_behind_it_are_told(monkeypatch: Any) -> None:
    """They were taken off the line already, so only the engine knew of them."""
    engine = Engine(tiny_model("llama"), byte_tokenizer())
    gate = threading.Event()
    monkeypatch.setattr(engine._core, "add", lambda request: 1 / 0)
    engine._thread.post(gate.wait, lambda error: None)  # so that all of them stand in line
    streams = [engine.stream(HELLO, principal=WHO, sampling=SHORT) for _ in range(3)]
    gate.set()
    for stream in streams:
        with pytest.raises(errors.EngineClosed) as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(errors.EngineClosed):
        engine.stats()
    engine.close()


def test_the_engine_thread_refuses_to_wait_for_itself(engine: Engine) -> None:
    """As a finaliser that ends a session would make it, when the garbage collector runs there."""
    caught: list[BaseException] = []
    done = threading.Event()

    def finaliser() -> None:
        try:
            engine.end_session(WHO)
        except RuntimeError as error:
            caught.append(error)
        done.set()

    engine._thread.post(finaliser, lambda error: None)
    assert done.wait(5)
    assert "engine thread" in str(caught[0])


def test_a_tokenizer_that_will_not_do_leaves_the_model_as_it_was(monkeypatch: Any) -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    stock = model.config._attn_implementation

    def broken(self: Any) -> Any:
        raise UnsupportedModel("no vocabulary")

    monkeypatch.setattr(type(tokenizer), "get_vocab", broken)
    with pytest.raises(UnsupportedModel):
        Engine(model, tokenizer)
    assert model.config._attn_implementation == stock


def test_all_who_read_one_stream_come_to_its_end(engine: Engine) -> None:
    stream = engine.stream(HELLO, principal=WHO, sampling=SHORT)
    threads = [threading.Thread(target=list, args=(stream,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_the_model_is_proved_on_a_thread_that_is_gone_when_the_engine_serves(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP's helpers of the thread that built it would halve the speed of the one that serves."""
    from prefixkv.model.runner import ModelRunner

    builders = []
    build = ModelRunner.build.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, *args: Any) -> Any:
        builders.append(threading.current_thread())
        return build(cls, *args)

    monkeypatch.setattr(ModelRunner, "build", classmethod(watched))
    make_engine()
    assert [thread.is_alive() for thread in builders] == [False]
