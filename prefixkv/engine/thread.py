"""The one thread that runs an engine's steps, and the way into it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from prefixkv.engine.core import EngineCore
from prefixkv.errors import EngineClosed

__all__ = ["EngineThread", "building", "run_apart"]

logger = logging.getLogger("prefixkv.engine")
T = TypeVar("T")
Task = tuple[Callable[[], None], Callable[[Exception], None]]


class EngineThread:
    """Runs steps while there is work and carries out calls between them. All methods are thread-safe."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._tasks: deque[Task] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._cause: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="prefixkv-engine", daemon=True)
        self._thread.start()

    def post(self, task: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        """Run ``task`` on the engine thread between two steps, without waiting.

        Args:
            task: What to run.
            on_error: Called instead if the engine ends before it gets to it.

        Raises:
            EngineClosed: If the engine has ended.
        """
        if os.getpid() != self._process:
            raise EngineClosed(
                "the engine stayed in the process that built it: start workers with spawn, or fork before the first "
                "engine is built"
            )
        with self._wake:
            if self._closing:
                raise self._closed()
            self._tasks.append((task, on_error))
            self._wake.notify()

    def call(self, task: Callable[[], T]) -> T:
        """Run ``task`` on the engine thread between two steps and return what it returns or raise what it raises.

        Raises:
            EngineClosed: If the engine has ended.
            RuntimeError: If the engine thread calls it, say from a finaliser or a log handler: it would wait for
                itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("called on the engine thread, which would wait for itself; call it from another thread")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)

        self.post(run, future.set_exception)
        return future.result()

    def close(self) -> None:
        """End the thread after the step it is in; what is live fails with ``EngineClosed``. Idempotent."""
        if os.getpid() != self._process:
            return  # the thread, and maybe whoever holds the lock, stayed in the parent
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("the engine thread died")
            self._cause = error
        with self._wake:
            self._closing = True
            tasks, self._tasks = self._tasks, deque()
        closed = self._closed()
        for _, on_error in tasks:
            on_error(closed)
        self._core.abandon(closed)

    def _turn(self) -> bool:
        """Carry out what was posted and one step; return whether to go on."""
        # A millisecond at a time, and another engine of this process may be waiting for the processor.
        while self._is_idle() and self._core.use_idle_time():
            time.sleep(0.0005)
        with self._wake:
            if self._is_idle():
                self._wake.wait(self._core.next_sweep_s())
            if self._closing:
                return False
            count = len(self._tasks)
        self._core.sweep()  # nobody shall see what is past its time
        for _ in range(count):
            task = self._tasks.popleft()
            try:
                task[0]()
            except BaseException:
                self._tasks.appendleft(task)  # whoever posted it waits, as do those behind it
                raise
        if self._core.has_work:
            self._core.step()
        return True

    def _is_idle(self) -> bool:
        return not (self._tasks or self._closing or self._core.has_work)

    def _closed(self) -> EngineClosed:
        if self._cause is None:
            return EngineClosed("the engine is closed")
        error = EngineClosed(f"the engine died of {type(self._cause).__name__}; see __cause__")
        error.__cause__ = self._cause
        return error


def run_apart(work: Callable[[], T]) -> T:
    """Run ``work`` on a thread that ends with it, and return what it returns.

    OpenMP keeps helpers for every live thread that ever ran a parallel region. Once there are more of them than cores
    they all sleep between two regions instead of spinning, and a decode step takes twice as long.
    """
    with building(work) as build:
        pass
    return build.result()


@contextmanager
def building(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> Iterator[Future[T]]:
    """Run ``work`` on a thread of its own beside the block, which ends when both have ended.

    Args:
        work: What to run.
        undo: Called with what it returned if the block raises.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefixkv-load") as pool:
        build = pool.submit(work)
        try:
            yield build
        except BaseException:
            if build.exception() is None and undo is not None:
                undo(build.result())
            raise
