"""The public face: a model in process, a thread that runs it, and methods that any thread may call."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, overload

from prefixkv.chat.explain import CacheReport
from prefixkv.chat.segmenter import Segmenter
from prefixkv.collector import paused_collector
from prefixkv.config import EngineConfig, SamplingParams
from prefixkv.engine.builder import RequestBuilder
from prefixkv.engine.core import EngineCore
from prefixkv.engine.limits import PoliciesInForce
from prefixkv.engine.live import Event, LiveRequest
from prefixkv.engine.request import ChatRequest
from prefixkv.engine.result import ChatResult, Publication, PurgeReceipt
from prefixkv.engine.stream import TokenStream
from prefixkv.engine.thread import EngineThread, building, run_apart
from prefixkv.engine.waiting import run_batch, run_one
from prefixkv.engine.watcher import OnError, PolicyWatcher
from prefixkv.errors import ConfigError, EngineClosed, InvalidRequest
from prefixkv.measure.metrics import EngineStats, TenantStats
from prefixkv.model.fused import reserve_pages
from prefixkv.model.load import LoadedModel, load, wrap
from prefixkv.model.runner import ModelRunner
from prefixkv.policy import PolicySet
from prefixkv.scope import Principal

__all__ = ["Engine"]

logger = logging.getLogger("prefixkv")

Policies = PolicySet | Mapping[str, Any] | str | PathLike[str] | None
Progress = Callable[[str], None] | None
Clock = Callable[[], float]


class Engine:
    """Runs one model and reuses the keys and values that requests share.

    Every method is thread-safe. One engine thread runs the steps; a reader that stalls never stops it. Two engines may
    live in one process.

    Args:
        model: A causal language model of transformers, already loaded. It stays usable on its own.
        tokenizer: Its tokenizer.
        config: Options; the defaults suit a laptop.
        policies: Rules per tenant: a file, a mapping, a ``PolicySet``, or None for one permissive default.
        clock: Seconds that only grow, by which what is cached gets too old; for tests.

    Raises:
        UnsupportedModel: If the model cannot be served exactly.
        ConfigError: If an option is out of range, or the pool does not hold one block.
        PolicyError: If the policies are malformed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: EngineConfig | None = None,
        policies: Policies = None,
        clock: Clock = time.monotonic,
    ) -> None:
        config = _checked(config)
        loaded = wrap(model, tokenizer)
        self._start(type(loaded.model).__name__, loaded, config, PolicySet.load(policies), clock)

    @classmethod
    def from_pretrained(
        cls,
        model: str | PathLike[str],
        *,
        config: EngineConfig | None = None,
        policies: Policies = None,
        progress: Progress = None,
    ) -> Engine:
        """Load a model and start an engine on it.

        Args:
            model: Hub id, local folder, ``.gguf`` file, or ``"demo"`` (SmolLM2-135M-Instruct from PyPI).
            config: Options.
            policies: Rules per tenant.
            progress: Called with a line of text as loading goes on. By default lines go to standard error where that
                is a terminal, and to the ``prefixkv`` logger otherwise.

        Raises:
            ConfigError: If the model cannot be found, with what to do about it.
            UnsupportedModel: If the model cannot be served exactly.
            PolicyError: If the policies are malformed.
        """
        config = _checked(config)
        policy_set = PolicySet.load(policies)  # before the slow part
        say = progress or _say
        started = time.monotonic()
        name = str(model) if isinstance(model, PathLike) else model
        engine = cls.__new__(cls)
        with paused_collector():
            loaded = run_apart(lambda: load(name, dtype=config.dtype, device=config.device, progress=say))
            say("proving that the pool changes nothing")
            engine._start(name, loaded, config, policy_set, time.monotonic)
        say(f"ready in {time.monotonic() - started:.1f} s: {engine.describe()}")
        return engine

    def _start(self, name: str, loaded: LoadedModel, config: EngineConfig, policies: PolicySet, clock: Clock) -> None:
        self.config = config
        self._name, self._loaded = name, loaded
        self._policies = policies_in_force = PoliciesInForce(policies)
        pages = reserve_pages(loaded.model)
        with building(lambda: ModelRunner.build(loaded, config.cache, pages), undo=ModelRunner.close) as build:
            self._segmenter = Segmenter(loaded.tokenizer, vocab_tokens=loaded.vocab_size)
        self._runner = runner = build.result()
        try:
            self._core = EngineCore.assemble(runner, loaded.fingerprint, config, policies_in_force, clock)
        except BaseException:
            runner.close()
            raise
        max_context = min(size for size in (config.max_context, loaded.max_context, 2**31) if size is not None)
        self.builder = RequestBuilder(loaded, self._segmenter, max_context, policies_in_force.get, self._core.recall)
        self._thread = EngineThread(self._core)
        self._watcher: PolicyWatcher | None = None
        # For an engine that is dropped, and at exit: a thread that the interpreter finds inside torch then aborts it.
        weakref.finalize(self, _shut, self._thread, runner)

    # -- asking ----------------------------------------------------------------------------------------------------

    def chat(
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
        """Answer a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.
            principal: Who asks, as your own authentication says.
            tools: Functions the model may call, as JSON schemas.
            slots: Values of ``{{slot:NAME}}`` in the messages.
            sampling: How the reply is drawn.
            template_kwargs: More variables for the chat template, such as ``enable_thinking``.
            timeout_s: Seconds after which the reply ends with what there is, ``finish_reason`` ``"abort"``.
            few_shot: How many messages behind the system text are examples, shared like it; None asks the policy.
            continue_final_message: Leave the last message open: the reply goes on with it.

        Raises:
            InvalidRequest: If the request cannot be served as written; ``code``, ``path`` and ``hint`` say why.
            ContextOverflow: If it is too long.
            UnknownTenant: If the policies do not list the tenant.
            QueueFull: If too many requests wait.
            QuotaExceeded: If its tenant's room cannot hold it.
            EngineClosed: If the engine is closed.
            ExecutionError: If the model failed on it.
        """
        request = ChatRequest(
            messages, principal, tools, slots, sampling, template_kwargs, timeout_s, few_shot, continue_final_message
        )
        return run_one(self, lambda sink: self.builder.chat(request, sink, streams=False), ChatResult)

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
    ) -> TokenStream:
        """Answer a conversation piece by piece; arguments and errors as in :meth:`chat`.

        The request starts at once. ``close()``, leaving a ``with`` block, or dropping the stream cancels it.
        """
        item = ChatRequest(
            messages, principal, tools, slots, sampling, template_kwargs, timeout_s, few_shot, continue_final_message
        )
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = self.builder.chat(item, events.put, streams=True)
        self.submit(request)
        return TokenStream(events, lambda: self.cancel(request))

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        principal: Principal,
        sampling: SamplingParams | None = None,
        timeout_s: float | None = None,
    ) -> ChatResult:
        """Continue raw text or token ids, without a template; errors as in :meth:`chat`."""
        return run_one(self, lambda sink: self.builder.text(prompt, principal, sampling, timeout_s, sink), ChatResult)

    def chat_batch(self, requests: Sequence[ChatRequest], *, return_exceptions: bool = False) -> list[Any]:
        """Answer many requests at once, batched continuously; results in order.

        Args:
            requests: What :meth:`chat` takes, as values.
            return_exceptions: Put the error of a request in its place instead of raising the first one when all
                have ended.

        Raises:
            InvalidRequest: And the other errors of :meth:`chat`, for the first request that failed. What is wrong
                with a request as written is raised before any of them starts.
        """
        return run_batch(self, requests, return_exceptions=return_exceptions)

    # -- cache control ---------------------------------------------------------------------------------------------

    def explain(
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
        """Report what of a request would hit now, and why the rest would not. Runs and changes nothing."""
        item = ChatRequest(
            messages, principal, tools, slots, None, template_kwargs, None, few_shot, continue_final_message
        )
        prompt, scopes, _ = self.builder.chat_prompt(item)
        return self._thread.call(lambda: self._core.explain(prompt, scopes, principal))

    def publish(
        self,
        messages_or_text: Sequence[Mapping[str, Any]] | str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tenant: str | None = None,
    ) -> Publication:
        """Compute text ahead of time and keep it in the cache until :meth:`unpublish`.

        Args:
            messages_or_text: The leading messages of the prompts to come (rendered without a generation prompt), or
                raw text.
            tools: Tools rendered with the messages.
            tenant: Who may use it; None makes it public to every tenant, so publish only what everybody may know.

        Raises:
            QuotaExceeded: If pinning it would leave no room for other requests.
            InvalidRequest: And the other errors of :meth:`chat`.
        """
        return run_one(self, lambda sink: self.builder.publication(messages_or_text, tools, tenant, sink), Publication)

    def unpublish(self, publication: str | Publication) -> bool:
        """Let published text be evicted like any other; return whether there was such a publication."""
        handle = publication.id if isinstance(publication, Publication) else publication
        return self._thread.call(lambda: self._core.unpublish(handle))

    def purge(self, tenant: str | None = None, user: str | None = None, session: str | None = None) -> PurgeReceipt:
        """Destroy what is cached for an identity, now: abort its requests, free its blocks, overwrite them with zeros.

        Without arguments everything goes, public text included. A tenant's publications go with the tenant.

        Raises:
            InvalidRequest: If an id is no id; nobody shall believe that something is gone that is not.
        """
        for name, value in (("tenant", tenant), ("user", user), ("session", session)):
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequest("bad_principal", name, "must be non-empty text, or None for all")
        return self._thread.call(lambda: self._core.purge(tenant, user, session))

    def end_session(self, principal: Principal) -> int:
        """Say that a conversation is over. Returns how many blocks it has.

        They are the first to be evicted; under ``zero_retention`` they are destroyed now, and what of the session still
        runs is aborted.
        """
        if not isinstance(principal, Principal):
            raise InvalidRequest("missing_principal", "principal", "say whose session ended")
        return self._thread.call(lambda: self._core.end_session(principal))

    def reload_policies(self, source: Policies) -> None:
        """Replace the policies; on an error the old ones stay in force.

        A request that a lowered ceiling leaves no room for runs as long as it can, then fails with ``QuotaExceeded``.

        Raises:
            PolicyError: If the new ones are malformed; the message starts with where.
        """
        policies = PolicySet.load(source)
        self._thread.call(lambda: self._core.reload(policies))

    def watch_policies(
        self, path: str | PathLike[str], interval_s: float = 1.0, on_error: OnError = None
    ) -> PolicyWatcher:
        """Reload a policy file now and whenever it changes, until :meth:`close` or the next call; see the watcher.

        Raises:
            PolicyError: If it is malformed now. Later the old ones stay in force and ``on_error`` is called.
        """
        self._watcher = PolicyWatcher(path, self.reload_policies, interval_s, on_error).start(self._watcher)
        return self._watcher

    # -- looking ---------------------------------------------------------------------------------------------------

    @overload
    def stats(self) -> EngineStats: ...

    @overload
    def stats(self, tenant: str) -> TenantStats: ...

    def stats(self, tenant: str | None = None) -> EngineStats | TenantStats:
        """Return a snapshot of the engine, or of one tenant."""
        if tenant is not None:
            return self._thread.call(lambda: self._core.tenant_stats(tenant))
        return self._thread.call(self._core.stats)

    def check(self) -> None:
        """Check every invariant of the cache.

        Raises:
            IntegrityError: If one does not hold.
        """
        self._thread.call(self._core.check)

    def describe(self) -> str:
        """Return one line about the model, the pool and the attention backend."""
        spec, blocks = self._runner.spec, self._runner.num_blocks
        size = blocks * spec.bytes_per_block / 2**20
        refused = "".join(f" ({name}: {reason})" for name, reason in self._runner.refusals.items())
        return (
            f"{self._name}, {self._loaded.dtype} on {self._loaded.device}; pool of {blocks} blocks x "
            f"{spec.block_size} tokens = {blocks * spec.block_size} tokens, {size:.0f} MiB, "
            f"format {self._runner.format}; attention: {self._runner.backend}{refused}, decoder: {self._runner.decoder}"
        )

    def close(self) -> None:
        """End the engine: what is live fails with ``EngineClosed``. The model stays usable. Idempotent."""
        if self._watcher is not None:
            self._watcher.close()
        _shut(self._thread, self._runner)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for other faces of the same engine, such as AsyncEngine ------------------------------------------------------

    def submit(self, request: LiveRequest) -> None:
        """Hand a prepared request to the engine thread; its sink is called there and must not block."""
        self._thread.post(lambda: self._core.add(request), request.sink)

    def cancel(self, request: LiveRequest) -> None:
        """End a submitted request as soon as the step that runs is over; a finished one is left alone."""
        with contextlib.suppress(EngineClosed):
            self._thread.post(lambda: self._core.abort(request), lambda error: None)


def _checked(config: EngineConfig | None) -> EngineConfig:
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError(f"config: expected an EngineConfig, got {type(config).__name__}")
    return config or EngineConfig()


def _shut(thread: EngineThread, runner: ModelRunner) -> None:
    thread.close()
    runner.close()


def _say(line: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"prefixkv: {line}", file=sys.stderr, flush=True)
    else:
        logger.info(line)
