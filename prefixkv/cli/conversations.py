"""Holds many conversations at once with one engine and writes down what each turn cost. Prints nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from prefixkv.cli.scenario import Conversation
from prefixkv.config import SamplingParams
from prefixkv.engine.engine import Engine
from prefixkv.engine.result import ChatResult
from prefixkv.scope import Principal

__all__ = ["Progress", "TurnRow", "first_of_tenant", "hold_conversations"]


@dataclass(frozen=True, slots=True)
class TurnRow:
    """What one turn cost.

    Attributes:
        tenant: Tenant.
        user: User of that tenant.
        turn: 1 for the first.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those found in the cache.
        computed_tokens: Those computed.
        completion_tokens: Tokens generated, the end token included.
        ttft_s: Time to first token.
        tokens_per_s: Rate of the tokens after the first.
    """

    tenant: str
    user: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far all conversations together are.

    Attributes:
        turns: Turns finished.
        total_turns: Turns there will be.
        tokens: Tokens generated so far.
        prompt_tokens: Prompt tokens of finished turns.
        cached_tokens: Those found in the cache.
    """

    turns: int
    total_turns: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int


class _Stopped(Exception):
    """Another conversation failed, or the caller was interrupted."""


class _Tally:
    """Counts over all threads and reports after each change, one report at a time."""

    def __init__(self, total_turns: int, report: Callable[[Progress], None]) -> None:
        self._lock = threading.Lock()
        self._report = report
        self._now = Progress(0, total_turns, 0, 0, 0)
        self.stop = threading.Event()

    def add(self, tokens: int, result: ChatResult | None) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            now = self._now
            self._now = Progress(
                now.turns + (result is not None),
                now.total_turns,
                now.tokens + tokens,
                now.prompt_tokens + (result.usage.prompt_tokens if result else 0),
                now.cached_tokens + (result.usage.cached_tokens if result else 0),
            )
            self._report(self._now)


def hold_conversations(
    engine: Engine,
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    report: Callable[[Progress], None] = lambda progress: None,
) -> list[TurnRow]:
    """Hold all conversations at the same time, a thread each, and return one row per turn, in their order.

    Args:
        engine: Answers.
        conversations: Who says what.
        sampling: How replies are drawn.
        report: Called after each token, from several threads, never two at once.

    Raises:
        PrefixKVError: The first error of any conversation; the others end early.
    """
    tally = _Tally(sum(len(one.questions) for one in conversations), report)
    with ThreadPoolExecutor(max_workers=max(1, len(conversations)), thread_name_prefix="conversation") as threads:
        futures = [threads.submit(_hold, engine, one, sampling, tally) for one in conversations]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # on Ctrl-C too: the pool waits for its threads
            if not all(future.done() for future in futures):
                tally.stop.set()
        for future in done:
            future.result()
        return [row for future in futures for row in future.result()]


def first_of_tenant(rows: Sequence[TurnRow]) -> list[TurnRow]:
    """Return, per tenant, the first turn that found least in the cache: the one that computed what others reused."""
    firsts: dict[str, TurnRow] = {}
    for row in rows:
        known = firsts.get(row.tenant)
        if row.turn == 1 and (known is None or row.cached_tokens < known.cached_tokens):
            firsts[row.tenant] = row
    return list(firsts.values())


def _hold(engine: Engine, conversation: Conversation, sampling: SamplingParams, tally: _Tally) -> list[TurnRow]:
    principal = Principal(conversation.tenant, user=conversation.user, session=f"{conversation.user}-1")
    messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}]
    rows = []
    for turn, question in enumerate(conversation.questions, start=1):
        messages.append({"role": "user", "content": question})
        with engine.stream(messages, principal=principal, sampling=sampling) as stream:
            for delta in stream:
                tally.add(len(delta.token_ids), delta.result)
            result = stream.result
        if result is None:
            raise _Stopped
        messages.append(result.message)
        usage, timings = result.usage, result.timings
        rows.append(
            TurnRow(
                conversation.tenant,
                conversation.user,
                turn,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.computed_tokens,
                usage.completion_tokens,
                timings.ttft_s,
                timings.tokens_per_s,
            )
        )
    return rows
