"""A watched policy file: what it holds is in force, what is broken changes nothing, and nobody waits for it."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixkv import AsyncEngine, Engine, PolicySet, Principal, SamplingParams, errors
from prefixkv.engine.watcher import PolicyWatcher
from prefixkv.errors import ConfigError, ContextOverflow, EngineClosed, PolicyError, UnknownTenant
from tests.support import byte_tokenizer, tiny_model

WHO = Principal("acme", user="u", session="s")
HELLO = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
OPEN = "default: {}\n"
CLOSED = "tenants: {beta: {}}\n"
BROKEN = "default: {wieght: 2}\n"
FAST_S = 0.01


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Loaded(list[PolicySet]):
    """Takes policies as an engine does, and refuses the weight 13."""

    def __call__(self, policies: PolicySet) -> None:
        if policies.get("x").weight == 13:
            raise PolicyError("default.weight: does not fit\ntenants: neither")
        self.append(policies)

    @property
    def weights(self) -> list[float]:
        return [policies.get("x").weight for policies in self]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text("default: {weight: 1}")
    return path


def looking(file: Path, times: int = 2, **options: Any) -> tuple[PolicyWatcher, Loaded, Callable[..., None]]:
    """Return a watcher that looks when it is told to, what it loaded, and how to write and let it look."""
    loaded = Loaded()
    watcher = PolicyWatcher(file, loaded, **options)

    def write(text: str | None, looks: int = times) -> None:
        if text is not None:
            file.write_text(text)
        for _ in range(looks):
            watcher.look()

    return watcher, loaded, write


# -- what counts as a change ------------------------------------------------------------------------------------------


def test_new_content_is_loaded_once_and_the_same_is_not(file: Path) -> None:
    _, loaded, write = looking(file)
    assert loaded.weights == [1]
    write("default: {weight: 2}", 5)
    file.touch()
    write(None, 5)
    write("default: {weight: 3}")
    write("default: {weight: 1}")
    assert loaded.weights == [1, 2, 3, 1]


def test_same_size_and_same_time_hide_nothing(file: Path) -> None:
    _, loaded, write = looking(file)
    before = file.stat()
    file.write_text("default: {weight: 9}")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    write(None)
    assert loaded.weights == [1, 9]


def test_a_file_that_is_still_being_written_is_left_alone(file: Path) -> None:
    """Half of it may be valid, and lack half of the tenants."""
    _, loaded, write = looking(file)
    for part in ("", "default:", "default: {}\n", "default: {weight: 5}\n"):
        write(part, 1)
    assert loaded.weights == [1]
    write(None, 1)
    assert loaded.weights == [1, 5]


def test_what_comes_back_before_it_settles_is_no_change(file: Path) -> None:
    _, loaded, write = looking(file)
    write("default: {weight: 2}", 1)
    write("default: {weight: 1}", 3)
    assert loaded.weights == [1]


def test_a_rename_over_the_file_and_a_link_that_moves_are_seen(file: Path, tmp_path: Path) -> None:
    """How editors and how container platforms replace files."""
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    _, loaded, write = looking(link)
    other = tmp_path / "other.yaml"
    other.write_text("default: {weight: 2}")
    (tmp_path / "new").symlink_to(other)
    os.replace(tmp_path / "new", link)
    for _ in range(2):
        write(None)
    other = tmp_path / "third.yaml"
    other.write_text("default: {weight: 3}")
    os.replace(other, tmp_path / "other.yaml")
    write(None)
    assert loaded.weights == [1, 2, 3]


# -- what is broken ---------------------------------------------------------------------------------------------------


def test_a_broken_file_is_told_once_with_its_place_and_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[PolicyError] = []
    watcher, loaded, write = looking(file, on_error=told.append)
    with caplog.at_level(logging.INFO, logger="prefixkv"):
        write(BROKEN, 6)
        assert [str(error) for error in told] == [str(watcher.error)]
        assert str(told[0]).startswith(f"{file}: default.wieght: ")
        write("default: [", 6)
        assert str(told[1]).startswith(f"{file}: line 1, column ")
        assert loaded.weights == [1]
        write("default: {weight: 1}")
    assert watcher.error is None
    assert loaded.weights == [1, 1]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]
    assert str(told[0]) in caplog.text


def test_policies_that_the_engine_refuses_are_told_with_the_file(file: Path) -> None:
    """They are well-formed and do not fit its pool; it knows of no file."""
    told: list[PolicyError] = []
    _, loaded, write = looking(file, on_error=told.append)
    write("default: {weight: 13}")
    assert str(told[0]) == f"{file}: default.weight: does not fit\n{file}: tenants: neither"
    assert loaded.weights == [1]
    with pytest.raises(PolicyError, match=r"policies\.yaml: default\.weight: does not fit"):
        PolicyWatcher(file, loaded)


def test_a_file_may_be_absent_for_a_moment_and_is_told_when_it_stays_away(file: Path) -> None:
    told: list[PolicyError] = []
    watcher, loaded, write = looking(file, on_error=told.append)
    file.unlink()
    write(None, 2)
    write("default: {weight: 2}")
    assert (told, loaded.weights) == ([], [1, 2])
    file.unlink()
    write(None, 9)
    assert len(told) == 1 and "cannot be read" in str(told[0]) and str(file) in str(told[0])
    write("default: {weight: 2}")
    assert watcher.error is None, "it is back, so nothing is wrong any more"
    assert loaded.weights == [1, 2, 2]


def test_a_file_that_is_broken_at_the_start_raises(file: Path) -> None:
    loaded = Loaded()
    file.write_text(BROKEN)
    with pytest.raises(PolicyError, match="did you mean weight"):
        PolicyWatcher(file, loaded)
    with pytest.raises(PolicyError, match="cannot be read"):
        PolicyWatcher(file.with_name("absent.yaml"), loaded)
    assert loaded == []


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        ({"interval_s": 0}, ConfigError, "interval_s=0"),
        ({"interval_s": float("nan")}, ConfigError, "interval_s=nan"),
        ({"interval_s": "1s"}, ConfigError, "interval_s='1s'"),
        ({"interval_s": True}, ConfigError, "interval_s=True"),
        ({"on_error": "print"}, ConfigError, "on_error=str"),
        ({"path": {"default": {}}}, PolicyError, "expected the path of a file, got dict"),
    ],
)
def test_wrong_options_are_named(file: Path, options: dict[str, Any], error: type[Exception], hint: str) -> None:
    with pytest.raises(error, match=hint):
        PolicyWatcher(**{"path": file, "reload": Loaded(), **options})


# -- an engine's file -------------------------------------------------------------------------------------------------


def served(engine: Engine) -> bool:
    try:
        return engine.chat(HELLO, principal=WHO, sampling=SHORT).finish_reason == "length"
    except UnknownTenant:
        return False


def test_a_reload_under_load_loses_no_request(engine: Engine, file: Path) -> None:
    """Valid, broken, valid, while four threads ask: each request is answered whole, under one set or the other."""
    want = engine.chat(HELLO, principal=WHO, sampling=SHORT).token_ids
    told: list[PolicyError] = []
    engine.watch_policies(file, FAST_S, told.append)
    stop = threading.Event()
    answers: list[int] = []
    failures: list[BaseException] = []

    def hammer(number: int) -> None:
        who = Principal("acme", user=f"u{number}")
        try:
            while not stop.is_set():
                assert engine.chat(HELLO, principal=who, sampling=SHORT).token_ids == want
                answers.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for weight in (2, 3):
        file.write_text(f"tenants: {{acme: {{weight: {weight}}}}}")
        until(lambda weight=weight: engine._policies.get().get("acme").weight == weight)
        file.write_text(f"tenants: {{acme: {{weight: {weight}, wieght: 1}}}}")
        until(lambda weight=weight: len(told) == weight - 1)
        assert engine._policies.get().get("acme").weight == weight
        before = len(answers)
        until(lambda before=before: len(answers) > before + 8)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(answers) == {0, 1, 2, 3}


def test_what_is_watched_is_in_force(engine: Engine, file: Path) -> None:
    file.write_text(CLOSED)
    engine.watch_policies(file, FAST_S)
    assert not served(engine)
    file.write_text(OPEN)
    until(lambda: served(engine))
    file.write_text("default: {max_prompt_tokens: 1}")

    def is_refused() -> bool:
        try:
            engine.chat(HELLO, principal=WHO, sampling=SHORT)
        except ContextOverflow:
            return True
        return False

    until(is_refused)


def test_a_second_file_takes_the_place_of_the_first(engine: Engine, file: Path) -> None:
    first = engine.watch_policies(file, FAST_S)
    other = file.with_name("other.json")
    other.write_text('{"default": {"weight": 5}}')
    second = engine.watch_policies(other, FAST_S)
    assert not first._thread.is_alive() and second._thread.is_alive()
    file.write_text("default: {weight: 7}")
    other.write_text('{"default": {"weight": 6}}')
    until(lambda: engine._policies.get().get("x").weight == 6)
    with pytest.raises(PolicyError):
        engine.watch_policies(file.with_name("absent.yaml"), FAST_S)
    assert second._thread.is_alive(), "what could not be watched ends nothing"


def test_the_file_watched_last_wins_over_a_reload_of_the_one_before(file: Path) -> None:
    """The first file changed, and was reloaded, while the second was being read."""
    loaded = Loaded()
    first = PolicyWatcher(file, loaded, FAST_S).start()
    other = file.with_name("other.yaml")
    other.write_text("default: {weight: 5}")
    second = PolicyWatcher(other, loaded, FAST_S)
    file.write_text("default: {weight: 2}")
    until(lambda: loaded.weights == [1, 5, 2])
    second.start(first).close()
    assert loaded.weights == [1, 5, 2, 5]


def test_closing_the_engine_ends_the_watch(engine: Engine, file: Path) -> None:
    told: list[PolicyError] = []
    watcher = engine.watch_policies(file, FAST_S, told.append)
    engine.close()
    assert not watcher._thread.is_alive()
    file.write_text(BROKEN)
    time.sleep(5 * FAST_S)
    assert told == []
    watcher.close()


def test_on_error_may_close_the_engine_or_raise(engine: Engine, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[PolicyError] = []

    def on_error(error: PolicyError) -> None:
        calls.append(error)
        if len(calls) == 2:
            engine.close()
        raise ValueError("a bug of the caller")

    watcher = engine.watch_policies(file, FAST_S, on_error)
    file.write_text(BROKEN)
    until(lambda: len(calls) == 1)
    assert watcher._thread.is_alive(), "the caller's bug is its own"
    file.write_text(BROKEN * 2)
    until(lambda: len(calls) == 2)
    watcher._thread.join(5)
    assert not watcher._thread.is_alive()
    assert "a bug of the caller" in caplog.text
    with pytest.raises(errors.EngineClosed):
        engine.chat(HELLO, principal=WHO)


def test_a_watch_ends_when_its_engine_was_closed_elsewhere(file: Path) -> None:
    def closed(policies: PolicySet) -> None:
        if policies.get("x").weight == 2:
            raise EngineClosed("the engine is closed")

    watcher = PolicyWatcher(file, closed, FAST_S).start()
    file.write_text("default: {weight: 2}")
    watcher._thread.join(20)
    assert not watcher._thread.is_alive() and watcher.error is None


def test_a_watch_keeps_no_dropped_engine_alive(file: Path) -> None:
    """Also where ``on_error`` knows the engine, as a method of the caller's would."""

    class Owner:
        def __init__(self) -> None:
            self.engine = Engine(tiny_model("llama"), byte_tokenizer())
            self.thread = self.engine.watch_policies(file, FAST_S, self.on_error)._thread

        def on_error(self, error: PolicyError) -> None:
            raise AssertionError(self.engine.describe())

    owner = Owner()
    thread, core = owner.thread, weakref.ref(owner.engine._core)
    assert thread.is_alive()
    del owner
    gc.collect()
    thread.join(5)
    until(lambda: gc.collect() is not None and core() is None)
    assert not thread.is_alive()


async def test_the_asyncio_face_watches_the_same_way(engine: Engine, file: Path) -> None:
    face = AsyncEngine.from_engine(engine)
    watcher = await face.watch_policies(file, FAST_S)
    assert watcher is engine._watcher and watcher.path == file
    await face.close()
    assert not watcher._thread.is_alive()
