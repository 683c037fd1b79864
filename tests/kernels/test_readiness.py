"""Nobody waits for a compiler, and nobody is served by kernels that are not there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

from prefixkv.config import CacheConfig
from prefixkv.kernels import readiness
from prefixkv.kernels.numba_amx import refuse_amx
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.writer import NumbaWriter, TorchWriter
from prefixkv.model.batch import Chunk
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import byte_tokenizer, tiny_model


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine where nothing is compiled yet; what is loaded in this process stays."""
    monkeypatch.setattr(readiness, "_refusal", "its kernels were not asked for")
    monkeypatch.setattr(readiness, "_background", None)
    monkeypatch.setattr(readiness, "_marker", lambda: tmp_path / "ready-0")
    yield
    if readiness._background is not None:
        readiness._background.join()


def _runner() -> ModelRunner:
    return ModelRunner.build(wrap(tiny_model("llama"), byte_tokenizer()), CacheConfig(memory="1MiB", block_size=4))


def _logits(runner: ModelRunner, start: int) -> torch.Tensor:
    return runner.execute([Chunk([3 + start, 7, 11], start, [0, 1], True)])


def _wait() -> None:
    deadline = time.monotonic() + 60
    while readiness.is_waiting():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_serves_while_another_process_compiles_and_changes_over(
    not_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in the pool, the same logits, before and after."""
    release = []

    def compile_slowly(*args: object, **options: object) -> None:
        while not release:
            time.sleep(0.001)

    monkeypatch.setattr(readiness.subprocess, "run", compile_slowly)
    want = [_logits(runner := _runner(), 0), _logits(runner, 3)]
    assert runner.backend == "torch"
    assert "being compiled" in runner.refusals["numba"]
    assert isinstance(runner.storage._writer, TorchWriter)
    runner.close()

    changing = _runner()
    got = [_logits(changing, 0)]
    release.append(True)
    _wait()
    got.append(_logits(changing, 3))
    assert (changing.backend, changing.refusals) == ("numba", {})
    assert isinstance(changing.storage._writer, NumbaWriter)
    for have, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-4)
    changing.close()


def test_kernels_that_cannot_be_compiled_are_a_reason(not_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine serves on; the reason is there to be read."""

    def fail(*args: object, **options: object) -> None:
        raise subprocess.CalledProcessError(1, "python", stderr=b"Traceback\nLLVM ERROR: out of memory\n")

    monkeypatch.setattr(readiness.subprocess, "run", fail)
    runner = _runner()
    _wait()
    _logits(runner, 0)
    assert runner.backend == "torch"
    assert runner.refusals == {"numba": "its kernels cannot be compiled here (LLVM ERROR: out of memory)"}
    runner.close()


def test_kernels_that_fail_the_self_test_are_not_taken(not_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proved when they arrive, as they would be at load."""
    from prefixkv.attention.cpu import NumbaBackend

    monkeypatch.setattr(readiness.subprocess, "run", lambda *args, **options: time.sleep(0.2))
    monkeypatch.setattr(NumbaBackend, "forward", lambda self, layer, q, *args, **options: torch.ones_like(q))
    runner = _runner()
    want = _logits(runner, 0)
    _wait()
    torch.testing.assert_close(_logits(runner, 0), want)
    assert runner.backend == "torch"
    assert "self-test failed" in runner.refusals["numba"]
    runner.close()


@pytest.mark.parametrize("broken", [(ModelRunner, "_self_test"), (KVStorage, "choose_writer")])
def test_kernels_that_raise_when_they_arrive_are_not_taken(
    not_compiled: None, monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]
) -> None:
    """Whatever they raise, and wherever: the request that met them is served, and so are those behind it."""

    def fail(*args: object) -> float:
        raise MemoryError("no room")

    compiled = threading.Event()
    monkeypatch.setattr(readiness.subprocess, "run", lambda *args, **options: compiled.wait())
    runner = _runner()
    want = _logits(runner, 0)
    compiled.set()
    _wait()
    with monkeypatch.context() as broken_now:
        broken_now.setattr(*broken, fail)
        assert torch.equal(_logits(runner, 0), want)
    assert torch.equal(_logits(runner, 0), want)
    assert (runner.backend, runner.refusals) == ("torch", {"numba": "self-test failed: MemoryError: no room"})
    assert runner.decoder == "fused"
    assert isinstance(runner.storage._writer, TorchWriter)
    runner.close()


def test_kernels_that_cannot_be_had_say_why_they_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command promises one kind of error."""

    def fail() -> None:
        raise OSError("no libgomp")

    monkeypatch.setattr(readiness, "_marker", fail)
    with pytest.raises(ImportError, match="OSError: no libgomp"):
        readiness.compile_now()


@pytest.mark.parametrize("why", ["another program", "nothing can be kept"])
def test_where_nobody_else_can_compile_this_process_does_and_says_so(
    not_compiled: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """Inside another program ``sys.executable`` is that program: starting it would be anything but a compiler."""
    if why == "another program":
        monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    else:
        monkeypatch.setattr(readiness, "_marker", lambda: None)
    go_on, call_all = threading.Event(), readiness._call_all
    monkeypatch.setattr(readiness, "_call_all", lambda: go_on.wait() and call_all())
    readiness.prepare()
    assert readiness.refusal() == "its kernels are being compiled in this process"
    assert "compiling the CPU kernels in this process" in caplog.text
    assert ("NUMBA_CACHE_DIR" in caplog.text) == (why == "nothing can be kept")
    go_on.set()
    _wait()
    assert readiness.refusal() is None


_FORK = """
import os, warnings
warnings.simplefilter("ignore")
from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams
from prefixkv.errors import EngineClosed
from prefixkv.kernels.readiness import compile_now
from tests.support import byte_tokenizer, tiny_model
config = EngineConfig(cache=CacheConfig(memory="1MiB", block_size=16, kv_format="model"))
sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
def make():
    return Engine(tiny_model("llama"), byte_tokenizer(), config=config)
def reply(engine):
    return engine.complete(list(range(40)), principal=Principal("a"), sampling=sampling).token_ids
compile_now()
engine = make()
want = reply(engine)
child = os.fork()
if child == 0:
    try:
        reply(engine)
    except EngineClosed as error:
        print(error)
    other = make()
    print(reply(other) == want, other.describe(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_process_that_used_them_is_served_by_torch(repo_root: Path) -> None:
    """GNU's OpenMP would end the child at the first kernel it calls."""
    environment = {**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", _FORK], env=environment, capture_output=True, text=True, check=True)
    closed, served, status = done.stdout.splitlines()
    assert "start workers with spawn" in closed
    assert served.startswith("True")
    assert "attention: torch (numba: the process that this one was forked from has used them" in served
    assert status == "0"


@pytest.fixture
def damaged(not_compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is marked as ready and holds a file that cannot be read; kernels are whole files there."""
    kept = tmp_path / "numba_kernel.1.nbc"

    def call_all() -> None:
        if not kept.exists():
            kept.write_bytes(b"whole")
        if kept.read_bytes() != b"whole":
            raise EOFError("Ran out of input")

    monkeypatch.setattr(readiness, "_call_all", call_all)
    monkeypatch.setattr(
        readiness.subprocess, "run", lambda *args, **options: readiness._load_whole(tmp_path / "ready-0")
    )
    kept.write_bytes(b"half")
    (tmp_path / "ready-0").touch()
    return kept


def test_a_damaged_file_is_compiled_again(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the background, as whatever has to be compiled; the next process finds it whole."""
    readiness.prepare()
    _wait()
    assert readiness.refusal() is None
    assert (damaged.read_bytes(), damaged.with_name("ready-0").exists()) == (b"whole", True)
    assert f"in {damaged.parent} cannot be read (EOFError: Ran out of input)" in caplog.text


def test_the_command_compiles_a_damaged_file_again(damaged: Path) -> None:
    readiness.compile_now()
    assert (damaged.read_bytes(), damaged.with_name("ready-0").exists()) == (b"whole", True)


def test_damage_that_cannot_be_deleted_names_the_folder(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may delete it; until then torch serves."""

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "unlink", fail)
    readiness.prepare()
    _wait()
    assert f"delete the folder {damaged.parent}: not yours" in str(readiness.refusal())


def test_what_cannot_be_compiled_is_tried_once_again_and_not_for_ever(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise ValueError("no such instruction")

    monkeypatch.setattr(readiness, "_call_all", fail)
    with pytest.raises(ValueError, match="no such instruction"):
        readiness.compile_now()
    assert len(tries) == 2


_REPAIR = """
from pathlib import Path
import logging, sys
if sys.argv[1:] == ["read-only"]:
    import tempfile
    def refuse(*args, **options):
        raise PermissionError("read-only")
    tempfile.TemporaryFile = refuse  # how numba tries a folder
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from prefixkv.kernels import numba_store, readiness
marker = readiness._marker()
readiness._call_all = lambda: numba_store.copy_rows(numba_store.describe_tensors([]).reshape(0, 4), 0, 0, 1)
readiness.compile_now()
if len(sys.argv) > 1:
    for path in marker.parent.glob(sys.argv[1]):
        path.write_bytes(path.read_bytes()[:40])
print(sum(numba_store._copy_rows.stats.cache_misses.values()), marker.exists())
"""


@pytest.mark.parametrize("ending", ["*.nbc", "*.nbi"])
def test_whatever_of_numbas_files_is_cut_short_is_compiled_again(tmp_path: Path, repo_root: Path, ending: str) -> None:
    """The real files of the smallest kernel."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(repo_root)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", _REPAIR, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run(ending).split() == ["1", "True"]
    said = run()
    assert "cannot be read" in said
    assert said.split()[-1] == "True"
    assert run().split() == ["0", "True"]
    assert run("read-only").split() == ["0", "True"]


_LOAD = """
from prefixkv.kernels import readiness, numba_attend, numba_gather, numba_store
folder = readiness.compile_now()
made = [kernel.stats for kernel in (numba_attend._attend, numba_gather._gather, numba_store._store_rows)]
print(sum(sum(stats.cache_misses.values()) for stats in made), len(list(folder.glob("ready-*"))))
print(len(numba_attend._attend.signatures), len(numba_store._store_rows.signatures))
"""


@pytest.mark.slow
def test_what_one_process_compiled_the_next_one_loads(tmp_path: Path, repo_root: Path) -> None:
    """The marker stands for all kernels, for every format and dtype."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(repo_root), "NUMBA_OPT": "1"}
    said = [
        subprocess.run([sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [done.stdout.split()[0] for done in said] == ["3", "0"]
    # What the compiled step calls is what others call: a constant array would be a type of its own, compiled again.
    assert said[0].stdout.split()[-2:] == ["1", "1"]


def entries() -> list[Any]:
    """All that is called from Python and kept on disk."""
    names = [path.stem for path in Path(readiness.__file__).parent.glob("numba_*.py")]
    modules = [importlib.import_module(f"prefixkv.kernels.{name}") for name in names]
    functions = [function for module in modules for function in vars(module).values()]
    return [function for function in functions if getattr(function, "targetoptions", {}).get("parallel")]


@pytest.mark.skipif(refuse_amx() is not None, reason=str(refuse_amx()))
def test_no_kernel_is_left_to_be_compiled_when_it_is_first_called() -> None:
    """It would hold up a step for ten seconds; one that no engine had called yet was forgotten once."""
    readiness.compile_now()
    assert len(entries()) >= 6
    assert all(len(kernel.signatures) == 1 for kernel in entries()), [kernel.__name__ for kernel in entries()]


def test_no_kernel_is_compiled_for_a_second_signature() -> None:
    """Formats, dtypes and shapes are values; another type of argument would compile for a minute in mid-service."""
    for kv_format in ("model", "int8", "k8v4", "int4"):
        for dtype in (torch.float32, torch.bfloat16):
            loaded = wrap(tiny_model("llama").to(dtype), byte_tokenizer())
            runner = ModelRunner.build(loaded, CacheConfig(memory="1MiB", block_size=16, kv_format=kv_format))
            runner.execute([Chunk(list(range(3, 63)), 0, [3, 2, 1, 0], True), Chunk([5], 0, [4], True)])
            assert isinstance(runner.storage, KVStorage)
            runner.close()
    for kernel in entries():
        assert len(kernel.signatures) <= 1, kernel.signatures
