"""From the arguments of a call to a request: everything that is checked before the engine thread hears of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixkv.cache.scopes import ScopeMap
from prefixkv.chat.recall import Recall
from prefixkv.chat.segment import Prompt
from prefixkv.chat.segmenter import Segmenter
from prefixkv.config import SamplingParams
from prefixkv.engine.detokenize import Detokenizer
from prefixkv.engine.live import Event, LiveRequest, Reply
from prefixkv.engine.request import ChatRequest
from prefixkv.errors import InvalidRequest
from prefixkv.model.load import LoadedModel
from prefixkv.model.sampler import SamplerState, check_sampling
from prefixkv.policy import PolicySet, TenantPolicy
from prefixkv.scheduler.request import Sequence as ScheduledSequence
from prefixkv.scope import Principal

__all__ = ["RequestBuilder"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


_ENDLESS_S = 1e9
"""A timeout of 30 years is none."""


class RequestBuilder:
    """Validates and tokenises on the caller's thread. Holds no state of its own, so any thread may use it.

    Args:
        loaded: The model and its tokenizer.
        segmenter: Makes prompts.
        max_context: Most tokens of prompt and reply.
        policies: Returns the policies in force.
        recall: What was sent before.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        segmenter: Segmenter,
        max_context: int,
        policies: Callable[[], PolicySet],
        recall: Recall,
    ) -> None:
        self._recall = recall
        self._loaded = loaded
        self._segmenter = segmenter
        self._max_context = max_context
        self._policies = policies
        self._ids = itertools.count()

    def chat_prompt(self, item: ChatRequest) -> tuple[Prompt, ScopeMap, TenantPolicy]:
        """Render and tokenise messages, and say whose each token is, by which rules. Remembers nothing."""
        if not isinstance(item.principal, Principal):
            self._policy(item.principal)  # says what is missing
        # In this order: what a reload in between says is then known to be older than the reload, and is made anew.
        past = self._recall.past(item.principal)
        policy = self._policy(item.principal)
        prompt = self._segmenter.segment(
            item.messages,
            policy=policy,
            tools=item.tools,
            slots=item.slots,
            continue_final_message=item.continue_final_message,
            template_kwargs=item.template_kwargs,
            few_shot=item.few_shot,
            past=past,
            limit=self._max_context - 1,
        )
        return prompt, _scopes(prompt, item.principal), policy

    def chat(self, item: ChatRequest, sink: Callable[[Event], None], *, streams: bool, path: str = "") -> LiveRequest:
        """Build the request of a chat; ``path`` goes before the path in an error."""
        try:
            if not isinstance(item, ChatRequest):
                raise InvalidRequest("bad_request", "", "must be a ChatRequest")
            while True:
                prompt, scopes, policy = self.chat_prompt(item)
                request = self._request(
                    prompt, scopes, policy, item.principal, item.sampling, item.timeout_s, sink, streams=streams
                )
                if prompt.origin is None:
                    return request
                request.recall, origin = self._recall, prompt.origin
                # Else it was purged while the prompt was made, which may still say what was purged: make it anew.
                if self._recall.remember(item.principal, origin.sent, origin.notes, origin.past):
                    return request
        except InvalidRequest as error:
            if not path:
                raise
            raise InvalidRequest(error.code, (path + error.path).rstrip("."), error.hint) from None

    def text(
        self,
        text: str | Sequence[int],
        principal: Principal,
        sampling: SamplingParams | None,
        timeout_s: float | None,
        sink: Callable[[Event], None],
    ) -> LiveRequest:
        """Build the request of a completion of raw text, or of token ids."""
        policy = self._policy(principal)
        prompt = self._segmenter.segment_text(text, policy=policy, limit=self._max_context - 1)
        scopes = _scopes(prompt, principal)
        return self._request(prompt, scopes, policy, principal, sampling, timeout_s, sink, streams=False)

    def publication(
        self, content: Messages | str, tools: Tools | None, tenant: str | None, sink: Callable[[Event], None]
    ) -> LiveRequest:
        """Build the request that computes published text and samples nothing."""
        policy = TenantPolicy()
        if tenant is not None:
            policy = self._policies().get(Principal(tenant).tenant)
        if isinstance(content, str):
            if tools:
                raise InvalidRequest("bad_tools", "tools", "tools need messages to be rendered with, not bare text")
            prompt = self._segmenter.segment_text(content, policy=policy, limit=self._max_context - 1)
        else:
            prompt = self._segmenter.segment(
                content, policy=policy, tools=tools, add_generation_prompt=False, limit=self._max_context - 1
            )
        request = LiveRequest(None, prompt, SamplingParams(temperature=0), sink, False, frozenset(), None, pin=True)
        self._add_reply(request, 0, ScopeMap.for_publication(tenant), len(prompt.token_ids))
        return request

    def _request(
        self,
        prompt: Prompt,
        scopes: ScopeMap,
        policy: TenantPolicy,
        principal: Principal,
        sampling: SamplingParams | None,
        timeout_s: float | None,
        sink: Callable[[Event], None],
        *,
        streams: bool,
    ) -> LiveRequest:
        """Build a request for one prompt, with one sequence per reply."""
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest("bad_sampling", "sampling", "must be a SamplingParams")
        check_sampling(sampling, self._loaded.vocab_size)
        eos = frozenset() if sampling.ignore_eos else self._loaded.eos_token_ids
        stop_ids = eos.union(sampling.stop_token_ids)
        request = LiveRequest(principal, prompt, sampling, sink, streams, stop_ids, _deadline(timeout_s), policy=policy)
        length = len(prompt.token_ids)
        # Without max_tokens the reply may fill the context; the engine shortens it to the room there is.
        total = self._max_context if sampling.max_tokens is None else length + sampling.max_tokens
        total = min(total, self._max_context)
        for index in range(sampling.n):
            self._add_reply(request, index, scopes, total)
        return request

    def _add_reply(self, request: LiveRequest, index: int, scopes: ScopeMap, total: int) -> None:
        token_ids = list(request.prompt.token_ids)
        seq = ScheduledSequence(
            seq_id=next(self._ids),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            scopes=scopes,
            max_tokens_total=total,
            generates=not request.pin,
        )
        sampling = request.sampling
        sampler = SamplerState(sampling, token_ids, self._loaded.vocab_size, index)
        detokenizer = Detokenizer(self._loaded.tokenizer, sampling.stop, sampling.include_stop)
        request.replies.append(Reply(index, seq, sampler, detokenizer))

    def _policy(self, principal: Principal) -> TenantPolicy:
        if not isinstance(principal, Principal):
            raise InvalidRequest("missing_principal", "principal", "say who asks: Principal(tenant, user, session)")
        return self._policies().get(principal.tenant)


def _scopes(prompt: Prompt, principal: Principal) -> ScopeMap:
    return ScopeMap.for_principal(principal, ((segment.start, segment.scope) for segment in prompt.segments))


def _deadline(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidRequest("bad_timeout", "timeout_s", "must be a number of seconds above 0, or None")
    return time.monotonic() + timeout_s if timeout_s < _ENDLESS_S else None
