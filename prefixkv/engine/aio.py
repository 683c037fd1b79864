"""The same engine for asyncio: every method a coroutine, streams as async iterators. Nothing blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, TypeVar, overload

from prefixkv.chat.explain import CacheReport
from prefixkv.config import EngineConfig, SamplingParams
from prefixkv.engine.engine import Engine, Policies, Progress
from prefixkv.engine.live import Event, LiveRequest
from prefixkv.engine.request import ChatRequest
from prefixkv.engine.result import ChatResult, Delta, Publication, PurgeReceipt
from prefixkv.engine.watcher import OnError, PolicyWatcher
from prefixkv.errors import ExecutionError
from prefixkv.measure.metrics import EngineStats, TenantStats
from prefixkv.scope import Principal

__all__ = ["AsyncEngine", "AsyncTokenStream"]

T = TypeVar("T")
Prepare = Callable[[Callable[[Event], None]], LiveRequest]


class AsyncTokenStream:
    """Iterates over the deltas of one request; ``aclose()``, ``async with`` or cancelling its reader cancels it."""

    def __init__(self, engine: Engine, prepare: Prepare) -> None:
        self._engine = engine
        self._prepare = prepare
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._request: LiveRequest | None = None
        self._starting = asyncio.Lock()
        self._done = False
        self._result: ChatResult | None = None

    @property
    def result(self) -> ChatResult | None:
        """The whole answer once the last delta was read, else None."""
        return self._result

    async def start(self) -> None:
        """Submit the request; the first iteration does it otherwise."""
        async with self._starting:
            if self._request is None and not self._done:
                request = await _start(self._engine, self._prepare, self._events)
                self._request = request
                if self._done:  # closed meanwhile
                    self._engine.cancel(request)

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> Delta:
        if self._done:
            raise StopAsyncIteration
        try:
            await self.start()
            if self._request is None:
                raise StopAsyncIteration  # closed before it began
            event = await self._events.get()
        except BaseException:
            await self.aclose()
            raise
        if not isinstance(event, Delta):
            self._done = True
            raise event if isinstance(event, Exception) else TypeError(type(event).__name__)
        if event.result is not None:
            self._done = True
            self._result = event.result
        return event

    async def aclose(self) -> None:
        """Cancel the request if it is still running. Idempotent."""
        self._cancel()

    def _cancel(self) -> None:
        if not self._done:
            self._done = True
            if self._request is not None:
                self._engine.cancel(self._request)

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()


class AsyncEngine:
    """:class:`Engine` for asyncio: the same arguments, results and errors. Cancelling a task cancels its request."""

    def __init__(
        self, model: Any, tokenizer: Any, *, config: EngineConfig | None = None, policies: Policies = None
    ) -> None:
        self._engine = Engine(model, tokenizer, config=config, policies=policies)

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncEngine:
        """Wrap an engine that is also used from threads."""
        wrapped = cls.__new__(cls)
        wrapped._engine = engine
        return wrapped

    @classmethod
    async def from_pretrained(
        cls,
        model: str | PathLike[str],
        *,
        config: EngineConfig | None = None,
        policies: Policies = None,
        progress: Progress = None,
    ) -> AsyncEngine:
        """Load a model in a worker thread; see :meth:`Engine.from_pretrained`."""
        engine = await asyncio.to_thread(
            Engine.from_pretrained, model, config=config, policies=policies, progress=progress
        )
        return cls.from_engine(engine)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        principal: Principal,
        tools: Sequence[Mapping[str, Any]] | None = None,
        slots: Mapping[str, str] | None = None,
        sampling: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        few_shot: int | None = None,
        continue_final_message: bool = False,
    ) -> ChatResult:
        """See :meth:`Engine.chat`."""
        request = ChatRequest(
            messages, principal, tools, slots, sampling, template_kwargs, timeout_s, few_shot, continue_final_message
        )
        return await self._run(lambda sink: self._engine.builder.chat(request, sink, streams=False), ChatResult)

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        principal: Principal,
        tools: Sequence[Mapping[str, Any]] | None = None,
        slots: Mapping[str, str] | None = None,
        sampling: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        few_shot: int | None = None,
        continue_final_message: bool = False,
    ) -> AsyncTokenStream:
        """See :meth:`Engine.stream`. The request starts with the first iteration."""
        request = ChatRequest(
            messages, principal, tools, slots, sampling, template_kwargs, timeout_s, few_shot, continue_final_message
        )
        return AsyncTokenStream(self._engine, lambda sink: self._engine.builder.chat(request, sink, streams=True))

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        principal: Principal,
        sampling: SamplingParams | None = None,
        timeout_s: float | None = None,
    ) -> ChatResult:
        """See :meth:`Engine.complete`."""
        return await self._run(
            lambda sink: self._engine.builder.text(prompt, principal, sampling, timeout_s, sink), ChatResult
        )

    async def chat_batch(self, requests: Sequence[ChatRequest], *, return_exceptions: bool = False) -> list[Any]:
        """See :meth:`Engine.chat_batch`."""
        queues: list[asyncio.Queue[Event]] = [asyncio.Queue() for _ in requests]
        prepared = await asyncio.gather(
            *(self._prepare_chat(request, i, queues[i]) for i, request in enumerate(requests)), return_exceptions=True
        )
        wrong = [error for error in prepared if isinstance(error, BaseException)]
        if wrong and not return_exceptions:
            raise wrong[0]
        started = [request for request in prepared if isinstance(request, LiveRequest)]
        try:
            for request in started:
                self._engine.submit(request)
            events = [
                await queue.get() if isinstance(one, LiveRequest) else one
                for one, queue in zip(prepared, queues, strict=True)
            ]
        except BaseException:
            for request in started:
                self._engine.cancel(request)
            raise
        for event in events:
            if isinstance(event, Exception) and not return_exceptions:
                raise event
        return events

    async def explain(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        principal: Principal,
        tools: Sequence[Mapping[str, Any]] | None = None,
        slots: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        few_shot: int | None = None,
        continue_final_message: bool = False,
    ) -> CacheReport:
        """See :meth:`Engine.explain`."""
        return await asyncio.to_thread(
            self._engine.explain,
            messages,
            principal=principal,
            tools=tools,
            slots=slots,
            template_kwargs=template_kwargs,
            few_shot=few_shot,
            continue_final_message=continue_final_message,
        )

    async def publish(
        self,
        messages_or_text: Sequence[Mapping[str, Any]] | str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tenant: str | None = None,
    ) -> Publication:
        """See :meth:`Engine.publish`."""
        return await self._run(
            lambda sink: self._engine.builder.publication(messages_or_text, tools, tenant, sink), Publication
        )

    async def unpublish(self, publication: str | Publication) -> bool:
        """See :meth:`Engine.unpublish`."""
        return await asyncio.to_thread(self._engine.unpublish, publication)

    async def purge(
        self, tenant: str | None = None, user: str | None = None, session: str | None = None
    ) -> PurgeReceipt:
        """See :meth:`Engine.purge`."""
        return await asyncio.to_thread(self._engine.purge, tenant, user, session)

    async def end_session(self, principal: Principal) -> int:
        """See :meth:`Engine.end_session`."""
        return await asyncio.to_thread(self._engine.end_session, principal)

    async def reload_policies(self, source: Policies) -> None:
        """See :meth:`Engine.reload_policies`."""
        await asyncio.to_thread(self._engine.reload_policies, source)

    async def watch_policies(
        self, path: str | PathLike[str], interval_s: float = 1.0, on_error: OnError = None
    ) -> PolicyWatcher:
        """See :meth:`Engine.watch_policies`. ``on_error`` is called on the watcher's thread, not on the event loop."""
        return await asyncio.to_thread(self._engine.watch_policies, path, interval_s, on_error)

    @overload
    async def stats(self) -> EngineStats: ...

    @overload
    async def stats(self, tenant: str) -> TenantStats: ...

    async def stats(self, tenant: str | None = None) -> EngineStats | TenantStats:
        """See :meth:`Engine.stats`."""
        if tenant is None:
            return await asyncio.to_thread(self._engine.stats)
        return await asyncio.to_thread(self._engine.stats, tenant)

    async def check(self) -> None:
        """See :meth:`Engine.check`."""
        await asyncio.to_thread(self._engine.check)

    async def describe(self) -> str:
        """See :meth:`Engine.describe`."""
        return self._engine.describe()

    async def close(self) -> None:
        """See :meth:`Engine.close`."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _prepare_chat(self, request: ChatRequest, place: int, events: asyncio.Queue[Event]) -> LiveRequest:
        path = f"requests[{place}]."
        return await _prepare(lambda sink: self._engine.builder.chat(request, sink, streams=False, path=path), events)

    async def _run(self, prepare: Prepare, kind: type[T]) -> T:
        events: asyncio.Queue[Event] = asyncio.Queue()
        request = await _start(self._engine, prepare, events)
        try:
            event = await events.get()
        except BaseException:
            self._engine.cancel(request)
            raise
        if isinstance(event, kind):
            return event
        raise event if isinstance(event, Exception) else ExecutionError("purged before it was complete")


async def _start(engine: Engine, prepare: Prepare, events: asyncio.Queue[Event]) -> LiveRequest:
    """Validate and tokenise in a worker thread, then submit; events come back on this loop."""
    request = await _prepare(prepare, events)
    engine.submit(request)
    return request


async def _prepare(prepare: Prepare, events: asyncio.Queue[Event]) -> LiveRequest:
    """Validate and tokenise in a worker thread; what comes of the request will come back on this loop."""
    loop = asyncio.get_running_loop()

    def sink(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            loop.call_soon_threadsafe(events.put_nowait, event)

    return await asyncio.to_thread(prepare, sink)
