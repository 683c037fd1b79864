"""What the engine answers with: plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prefixkv.chat.explain import CacheReport
from prefixkv.model.sampler import SampledToken

__all__ = ["ChatResult", "Choice", "Delta", "FinishReason", "Publication", "PurgeReceipt", "Timings", "Usage"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; ``cached_tokens + computed_tokens == prompt_tokens``.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens whose rows were found in the cache.
        computed_tokens: Prompt tokens that had to be computed.
        completion_tokens: Tokens generated, end tokens included, over all replies.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went.

    Attributes:
        queue_s: From arrival to the first step it ran in.
        prefill_s: From there to the first token.
        ttft_s: Time to first token, from arrival; the sum of the two.
        decode_s: From the first token to the last.
        tokens_per_s: Tokens after the first, over all replies, per second of decode; 0 where there are none.
    """

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply.

    Attributes:
        index: Which of the ``n`` replies.
        text: The reply, cut before a stop string.
        token_ids: Every generated id, the end token included.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        logprobs: One entry per token where ``SamplingParams.logprobs`` asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The answer to one request. ``text``, ``token_ids``, ``finish_reason`` and ``logprobs`` are the first choice's."""

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    report: CacheReport

    @property
    def text(self) -> str:
        """The reply."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its token ids, the end token included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[SampledToken, ...] | None:
        """Log-probabilities of its tokens, if asked for."""
        return self.choices[0].logprobs

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message to append to the conversation."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed reply.

    Attributes:
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New token ids.
        finish_reason: Set on the last delta of a reply.
        usage: Set on the last delta of the request.
        index: Which of the ``n`` replies.
        result: The whole answer, on the last delta of the request.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    result: ChatResult | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """Text that stays in the cache until ``engine.unpublish(id)``.

    Attributes:
        id: Handle.
        tokens: Tokens held.
        blocks: Blocks held; two publications may share some.
        bytes: Bytes of those blocks.
    """

    id: str
    tokens: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PurgeReceipt:
    """What a purge destroyed. When it is handed out the rows are zeros already.

    Attributes:
        blocks: Blocks destroyed.
        tokens: Tokens whose rows they held.
        bytes: Bytes overwritten with zeros.
        requests_aborted: Waiting or running requests that were ended for it.
    """

    blocks: int
    tokens: int
    bytes: int
    requests_aborted: int
