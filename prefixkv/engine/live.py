"""A request between arrival and answer. Only the engine thread touches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixkv.chat.explain import CacheReport, build_report
from prefixkv.chat.recall import Recall
from prefixkv.chat.recall import Reply as RememberedReply
from prefixkv.chat.segment import Prompt
from prefixkv.config import SamplingParams
from prefixkv.engine.detokenize import Detokenizer
from prefixkv.engine.result import ChatResult, Choice, Delta, FinishReason, Publication, Timings, Usage
from prefixkv.model.sampler import SampledToken, SamplerState
from prefixkv.policy import TenantPolicy
from prefixkv.scheduler.request import Sequence
from prefixkv.scope import Principal

__all__ = ["Event", "LiveRequest", "Reply"]

Event = Delta | ChatResult | Publication | Exception


@dataclass(slots=True, eq=False)
class Reply:
    """One of the ``n`` replies of a request."""

    index: int
    seq: Sequence
    sampler: SamplerState
    detokenizer: Detokenizer
    text: list[str] = field(default_factory=list)
    logprobs: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request and everything it is answered from.

    Attributes:
        principal: Who asked; None for the operator's own publications.
        prompt: Its tokens and segments.
        sampling: How replies are drawn.
        sink: Takes the result or an error; where ``streams``, deltas of which the last one
            holds the result. Called on the engine thread; must not block.
        streams: Whether deltas are wanted.
        stop_ids: Ids that end a reply.
        deadline_s: Monotonic time at which it is aborted, or None.
        recall: Where its replies are remembered; None for raw text.
        policy: The rules that it was made under; None for publications.
    """

    principal: Principal | None
    prompt: Prompt
    sampling: SamplingParams
    sink: Callable[[Event], None]
    streams: bool
    stop_ids: frozenset[int]
    deadline_s: float | None
    arrival_s: float = field(default_factory=time.monotonic)
    replies: list[Reply] = field(default_factory=list)
    pin: bool = False
    recall: Recall | None = None
    policy: TenantPolicy | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether every reply has ended."""
        return all(reply.finish_reason is not None for reply in self.replies)

    @property
    def tenant(self) -> str | None:
        """Tenant it is charged to; None for the operator."""
        return self.replies[0].seq.tenant

    def append(self, reply: Reply, token: SampledToken) -> None:
        """Add a sampled token to a reply, and end the reply if this was its last one."""
        now = time.monotonic()
        self.first_token_s = self.first_token_s or now
        self.last_token_s = now
        reply.seq.token_ids.append(token.token_id)
        reply.sampler.append(token.token_id)
        if self.sampling.logprobs is not None:
            reply.logprobs.append(token)
        ends = token.token_id in self.stop_ids
        # End tokens are not text, even where the tokenizer does not mark them as special.
        text = reply.detokenizer.append(token.token_id) if not ends or self.sampling.include_stop else ""
        if ends or reply.detokenizer.stopped is not None:
            self.end(reply, "stop", text, (token.token_id,))
        elif len(reply.seq.token_ids) >= reply.seq.max_tokens_total:
            self.end(reply, "length", text, (token.token_id,))
        else:
            self._emit(reply, text, (token.token_id,))

    def end(self, reply: Reply, reason: FinishReason, text: str = "", token_ids: tuple[int, ...] = ()) -> None:
        """Mark a reply as ended and hand out what it held back. The last one also hands out the result."""
        text += reply.detokenizer.finish()
        if reason == "length" and reply.detokenizer.stopped is not None:
            reason = "stop"  # a stop string was complete, but a longer one could still have begun before it
        reply.finish_reason = reason
        self._emit(reply, text, token_ids)
        if self.is_done and not self.streams:
            self.sink(self.result())

    def usage(self) -> Usage:
        """Return the token counts so far."""
        prompt, cached = len(self.prompt.token_ids), self.replies[0].seq.num_cached_tokens or 0
        completion = sum(reply.seq.num_generated_tokens for reply in self.replies)
        return Usage(prompt, cached, prompt - cached, completion)

    def result(self) -> ChatResult:
        """Return the answer; every reply must have ended."""
        usage = self.usage()
        return ChatResult(
            choices=tuple(
                Choice(
                    index=reply.index,
                    text="".join(reply.text),
                    token_ids=tuple(reply.seq.token_ids[reply.seq.num_prompt_tokens :]),
                    finish_reason=reply.finish_reason or "abort",
                    logprobs=tuple(reply.logprobs) if self.sampling.logprobs is not None else None,
                )
                for reply in self.replies
            ),
            usage=usage,
            timings=self._timings(usage),
            report=self._report(usage.cached_tokens),
        )

    def _report(self, cached_tokens: int) -> CacheReport:
        seq, losses = self.replies[0].seq, None
        if self.recall is not None and self.principal is not None:
            losses = self.recall.losses(self.principal, counts=True)
        return build_report(self.prompt, cached_tokens, seq.diverged, seq.gone, losses)

    def _remember(self, reply: Reply) -> None:
        """Keep a reply with its prompt; its ids only where they spell its text."""
        origin = self.prompt.origin
        if self.recall is None or self.principal is None or origin is None or origin.sent is None:
            return
        text, ids = "".join(reply.text), reply.seq.token_ids[reply.seq.num_prompt_tokens :]
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        spelt = reply.detokenizer.spells(ids, text)
        kept = RememberedReply(text, tuple(ids) if spelt else ())
        self.recall.add_reply(self.principal, origin.sent, kept, origin.past)

    def _emit(self, reply: Reply, text: str, token_ids: tuple[int, ...]) -> None:
        if text:
            reply.text.append(text)
        if reply.finish_reason not in (None, "abort"):
            self._remember(reply)  # before the reader has it, who may come back with it at once
        if not self.streams:
            return
        result = self.result() if self.is_done else None
        usage = result.usage if result else None
        self.sink(Delta(text, token_ids, reply.finish_reason, usage, reply.index, result))

    def _timings(self, usage: Usage) -> Timings:
        end = time.monotonic()
        scheduled = self.scheduled_s or end
        first = self.first_token_s or end
        decode_s = (self.last_token_s or first) - first
        rest = max(0, usage.completion_tokens - len(self.replies))
        return Timings(
            queue_s=scheduled - self.arrival_s,
            prefill_s=first - scheduled,
            ttft_s=first - self.arrival_s,
            decode_s=decode_s,
            tokens_per_s=rest / decode_s if decode_s > 0 else 0.0,
        )
