"""The caller's end of a streamed reply."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import TracebackType

from prefixkv.engine.live import Event
from prefixkv.engine.result import ChatResult, Delta

__all__ = ["TokenStream"]


_END = StopIteration()


class TokenStream:
    """Iterates over the deltas of one request. Closing it, or dropping it, cancels the request.

    The engine never waits for the reader: deltas queue up without bound until they are read.
    """

    def __init__(self, events: queue.SimpleQueue[Event], cancel: Callable[[], None]) -> None:
        self._events = events
        self._cancel = cancel
        self._done = False
        self._result: ChatResult | None = None

    @property
    def result(self) -> ChatResult | None:
        """The whole answer once the last delta was read, else None."""
        return self._result

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Delta:
        if self._done:
            raise StopIteration
        event = self._events.get()
        if not isinstance(event, Delta) or event.result is not None:
            self._events.put(_END)  # for other threads that read the same stream
        if event is _END:
            raise StopIteration
        if not isinstance(event, Delta):
            self._done = True
            raise event if isinstance(event, Exception) else TypeError(type(event).__name__)
        if event.result is not None:
            self._done = True
            self._result = event.result
        return event

    def close(self) -> None:
        """Cancel the request if it is still running. Idempotent."""
        if not self._done:
            self._done = True
            self._cancel()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
