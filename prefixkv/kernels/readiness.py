"""Whether the kernels are compiled, and how they get there without anybody waiting.

Compiling takes ten to thirty seconds, once per machine: numba keeps the code on disk, and when all of it is there a
marker is written beside it. Where the marker is missing, a process of its own compiles; until it is done, whoever wants
the kernels is told so and uses something else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["compile_now", "is_waiting", "prepare", "refusal"]

logger = logging.getLogger("prefixkv.kernels")

_lock = threading.Lock()
_background: threading.Thread | None = None
_refusal: str | None = "its kernels were not asked for"
_process: int | None = None
"""Process that called a kernel first."""


def refusal() -> str | None:
    """Return None once the kernels can be called without compiling anything, else why not; changes nothing."""
    if _is_forked():
        return "the process that this one was forked from has used them: start workers with spawn"
    return _refusal


def _is_forked() -> bool:
    """Return whether kernels ran in a process that this one was forked from: GNU's OpenMP ends it if it calls one."""
    return _process not in (None, os.getpid())


def is_waiting() -> bool:
    """Return whether they are being compiled in the background; changes nothing."""
    return _background is not None and _background.is_alive()


def prepare() -> None:
    """Load the kernels if they are compiled, else begin to compile them in the background; returns at once then.

    Where no other Python can be started, or nothing can be kept on disk, this process compiles, and says so. If numba
    is missing or broken, :func:`refusal` says so from then on.
    """
    global _background, _refusal
    with _lock:
        if _refusal is None or _background is not None or _is_forked():
            return
        try:
            marker = _marker()
        except Exception as error:  # a broken one raises anything: OSError, AttributeError
            _refusal = f"numba cannot be used here ({type(error).__name__}: {error})"
            return
        if marker is not None and marker.exists():
            try:
                _load(marker)
                return
            except Exception as error:
                _report_damage(marker, error)
        _refusal = "its kernels are being compiled, once on this machine"
        elsewhere = marker is not None and _can_start_python()
        if not elsewhere:
            _refusal = "its kernels are being compiled in this process"
            why = "" if marker else "; no folder can be written that would keep them: name one in NUMBA_CACHE_DIR"
            logger.warning("compiling the CPU kernels in this process, which takes about a minute%s", why)
        # LLVM must not be met by the end of the process: that waits for a thread that is no daemon.
        work = _compile_elsewhere if elsewhere else _compile_here
        _background = threading.Thread(target=work, name="prefixkv-kernels", daemon=elsewhere)
        _background.start()


def compile_now() -> Path | None:
    """Compile what is not compiled yet and wait for it, in this process.

    Returns:
        The folder that keeps the code, or None if it is kept nowhere.

    Raises:
        ImportError: If numba cannot be used; whatever it raised itself is the cause.
    """
    try:
        marker = _marker()
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error
    with _lock:
        _load_whole(marker)
    return None if marker is None else marker.parent


def _load_whole(marker: Path | None) -> None:
    """Load the kernels; if what is kept of them cannot be read, delete it and compile once more."""
    try:
        _load(marker)
    except Exception as error:
        if marker is None or not _kept(marker):
            raise
        _report_damage(marker, error)
        _forget(marker)
        _load(marker)


def _kept(marker: Path) -> list[Path]:
    """Return the files of compiled kernels, and the marker first if it exists."""
    return [*marker.parent.glob(marker.name), *marker.parent.glob("numba_*.nb[ci]")]


def _report_damage(marker: Path, error: Exception) -> None:
    what = f"{type(error).__name__}: {error}"
    logger.warning("the compiled kernels in %s cannot be read (%s): compiling them again", marker.parent, what)


def _forget(marker: Path) -> None:
    """Delete what is kept.

    Raises:
        OSError: If it cannot be deleted; names the folder, for somebody else to delete.
    """
    try:
        with _alone(marker):
            for path in _kept(marker):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"what was compiled earlier is damaged; delete the folder {marker.parent}: {error}") from error


def _failed(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return f"its kernels cannot be compiled here ({last or error})"


def _load(marker: Path | None) -> None:
    """Call every kernel once, so that all are compiled or read from disk."""
    global _process, _refusal
    _process = _process or os.getpid()
    if marker is None or marker.exists():
        _call_all()
    else:
        with _alone(marker):
            _call_all()
            marker.touch()
    _refusal = None


def _compile_elsewhere() -> None:
    """Have the kernels compiled by another process, then load them."""
    global _refusal
    # At the lowest priority: a thread that is kept waiting keeps all threads of a parallel region waiting.
    command = (
        "import os; getattr(os, 'nice', int)(19); from prefixkv.kernels.readiness import compile_now; compile_now()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        subprocess.run(
            [sys.executable, "-c", command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True
        )
        _load(_marker())
    except Exception as error:  # whatever it is, the engine serves on without kernels
        _refusal = _failed(error)


def _compile_here() -> None:
    global _refusal
    try:
        _load_whole(_marker())
    except Exception as error:
        _refusal = _failed(error)


def _marker() -> Path | None:
    """Return the file that says: compiled, by this numba, for this processor, from these sources. None: not kept."""
    import numba

    from prefixkv.kernels import numba_store
    from prefixkv.kernels.numba_build import ready_name

    if numba.config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
    folder = numba_store.cache_folder()
    return None if folder is None else folder / ready_name()


def _can_start_python() -> bool:
    """Return whether ``sys.executable`` is a Python; inside another program it is that program."""
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


@contextlib.contextmanager
def _alone(marker: Path) -> Iterator[None]:
    """Let one process compile at a time; the others then find its work on disk."""
    try:
        import fcntl
    except ImportError:  # not POSIX: they all compile
        yield
        return
    with marker.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _call_all() -> None:
    """Call each kernel on nothing much. Formats and shapes are values to them, so this compiles all there is."""
    import numpy as np

    from prefixkv.kernels.numba_amx import refuse_amx
    from prefixkv.kernels.numba_amx_decode import decode_function
    from prefixkv.kernels.numba_attend import AttendPlan, attend
    from prefixkv.kernels.numba_gather import gather_rows
    from prefixkv.kernels.numba_layer import LayerWeights, StepRoom, finish_layer
    from prefixkv.kernels.numba_layout import view_layer
    from prefixkv.kernels.numba_step import Head, run_head, run_step
    from prefixkv.kernels.numba_store import copy_rows, describe_tensors, store_rows

    rows = torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16)
    view = view_layer((rows,), (rows.clone(),), turned=(False, False), most_group=1)
    store_rows(view, torch.tensor([0]), rows[0, :, :1], rows[0, :, :1])
    copy_rows(describe_tensors([rows]), 0, 0, 1)
    table = torch.zeros(1, 1, dtype=torch.int32)
    gather_rows(view, table[0], rows[0].clone(), rows[0].clone())
    plan = AttendPlan(
        items=np.array([[0, 0, 1, 0, 1, 0]]),
        queries=np.array([[0, 0, 0, 1]]),
        tokens=np.array([[0, 0, 1]]),
        tiles=np.array([[0, 0, 1]]),
        tables=table.numpy(),
        num_slots=1,
    )
    q = rows[0, :, :1].clone()
    attend(view, plan, q, torch.empty_like(q), scaling=1.0, softcap=None, sinks=None)
    if refuse_amx() is None:
        decode_function()
        width, inner = 32, 32
        square = torch.zeros(3 * width, width, dtype=torch.bfloat16)
        layer = LayerWeights(
            heads=1, kv_heads=1, dim=width, turns=True, eps=(1e-5, 1e-5), head_eps=1e-5, in_norm=square[0],
            qkv=square, qkv_bias=None, q_norm=None, k_norm=None, out=square[:width], out_bias=None,
            mlp_norm=square[0], gate_up=square[: 2 * inner], gate_up_bias=None, down=square[:width], down_bias=None,
        )  # fmt: skip
        room = StepRoom(layer, 1)
        first, turn, head = np.array([0]), square[:1, : width // 2], Head(square[0], 1e-5, square[:width])
        run_step(
            room, layer.fields[None], view.fields[None], view, torch.tensor([0]), [plan], first, [1.0],
            (square, first), (turn, turn, first), head, first,
        )  # fmt: skip
        finish_layer(room, layer.fields, room.attended)
        run_head(room, head, first)
