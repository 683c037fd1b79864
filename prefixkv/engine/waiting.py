"""Callers that wait: for one request, or for a batch of them. Runs on the caller's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prefixkv.engine.live import Event, LiveRequest
from prefixkv.engine.request import ChatRequest
from prefixkv.errors import ExecutionError

if TYPE_CHECKING:
    from prefixkv.engine.engine import Engine

__all__ = ["run_batch", "run_one"]

T = TypeVar("T")


def run_one(engine: Engine, prepare: Callable[[Callable[[Event], None]], LiveRequest], kind: type[T]) -> T:
    """Submit a request that does not stream and wait for its one event; an interrupted wait cancels it."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = prepare(events.put)
    engine.submit(request)
    try:
        event = events.get()
    except BaseException:
        engine.cancel(request)
        raise
    if isinstance(event, kind):
        return event
    raise event if isinstance(event, Exception) else ExecutionError("purged before it was complete")


def run_batch(engine: Engine, requests: Sequence[ChatRequest], *, return_exceptions: bool) -> list[Any]:
    """Submit requests and wait for all of them; an interrupted wait cancels what is left. See ``Engine.chat_batch``."""
    prepared: list[LiveRequest | Exception] = []
    events: list[queue.SimpleQueue[Event]] = []
    for place, item in enumerate(requests):
        sink: queue.SimpleQueue[Event] = queue.SimpleQueue()
        events.append(sink)
        try:
            prepared.append(engine.builder.chat(item, sink.put, streams=False, path=f"requests[{place}]."))
        except Exception as error:
            if not return_exceptions:
                raise
            prepared.append(error)
    results: list[Any] = []
    try:
        for request in prepared:
            if isinstance(request, LiveRequest):
                engine.submit(request)
        for request, sink in zip(prepared, events, strict=True):
            results.append(sink.get() if isinstance(request, LiveRequest) else request)
    finally:
        for request in prepared[len(results) :]:
            if isinstance(request, LiveRequest):
                engine.cancel(request)
    if not return_exceptions:
        for result in results:
            if isinstance(result, Exception):
                raise result
    return results
