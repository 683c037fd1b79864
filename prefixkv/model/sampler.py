"""Logits to tokens. Knows nothing of scheduling or text; the engine keeps one :class:`SamplerState` per reply.

    logits of a row -> logit bias -> repetition -> frequency, presence -> temperature -> top-k -> top-p -> min-p -> draw

Rows that are greedy and change nothing share one batched argmax. Every other row is worked on alone, in its own
float32 copy on the CPU and with its own generator, so that what a request draws never depends on its neighbours.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkv.config import SamplingParams
from prefixkv.errors import ExecutionError, InvalidRequest

__all__ = ["SampledToken", "SamplerState", "TokenLogprob", "check_sampling", "sample"]

_SHORTLIST = 1024
"""Tokens sorted at first for top-p. A nucleus is nearly always smaller, and sorting a whole vocabulary takes
milliseconds; a wider nucleus falls back to the full sort."""

_MIN_TEMPERATURE = 1e-30
"""Keeps float32 from turning a tiny temperature into a division by zero; far below this the draw is greedy anyway."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a reply.

    Attributes:
        token_id: Its id.
        logprob: Its log-probability under the unprocessed logits; None where the request asked for none.
        top: The most likely tokens under the unprocessed logits and their log-probabilities, best first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


TokenLogprob = SampledToken
"""The name under which results show it."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check what only the model's vocabulary can decide; changes nothing.

    Raises:
        InvalidRequest: If a biased or a stop token does not exist.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(token_id >= vocab_size for token_id in ids):
            raise InvalidRequest("bad_sampling", f"sampling.{name}", f"token ids must be below {vocab_size}")


class _Tally:
    """The distinct tokens that penalties touch, and how often the reply holds each. Grows by one step per token."""

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        # A prompt may hold ids without a logit, such as placeholders of images.
        seen = sorted({token_id for token_id in prompt_ids if 0 <= token_id < vocab_size})
        self._place = {token_id: place for place, token_id in enumerate(seen)}
        self._ids = torch.tensor(seen + [0] * 64, dtype=torch.int64)  # with room to grow
        self._counts = torch.zeros(len(self._ids), dtype=torch.float32)

    def append(self, token_id: int) -> None:
        """Count one more occurrence in the reply."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def apply(self, row: Tensor, params: SamplingParams) -> None:
        """Mutate ``row [V]``: lower the logits of the tokens seen."""
        ids, counts = self._ids[: len(self._place)], self._counts[: len(self._place)]
        logits = row[ids]
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row[ids] = logits


class SamplerState:
    """What sampling remembers of one reply: its random stream and the tokens it holds. Only the engine thread uses it.

    Args:
        params: The request's options, checked by :func:`check_sampling`.
        prompt_ids: The prompt, for the repetition penalty.
        vocab_size: Width V of the logits.
        index: Which of the request's ``n`` replies this is; each draws from its own stream.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, index: int = 0) -> None:
        self.params = params
        self.index = index
        self._generator: torch.Generator | None = None
        if not params.is_greedy:
            self._generator = _generator(params.seed, index)
        self._tally: _Tally | None = None
        if params.repetition_penalty != 1:
            self._tally = _Tally(prompt_ids, vocab_size)
        elif params.presence_penalty or params.frequency_penalty:
            self._tally = _Tally((), vocab_size)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    @property
    def changes_logits(self) -> bool:
        """Whether the choice is made on other logits than the model's."""
        return self._tally is not None or len(self._bias_ids) > 0

    def append(self, token_id: int) -> None:
        """Record a token of the reply; mutates the state."""
        if self._tally is not None:
            self._tally.append(token_id)

    def process(self, row: Tensor) -> None:
        """Mutate ``row [V]`` float32: add the bias, then the penalties."""
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._tally is not None:
            self._tally.apply(row, self.params)

    def uniform(self) -> float:
        """Return the next number of the reply's stream, in [0, 1); advances the stream."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def _generator(seed: int | None, index: int) -> torch.Generator:
    """Return a new generator. Torch's CPU engine keeps 32 bits of a seed, so all of ours are hashed into them."""
    name = f"{secrets.randbits(64) if seed is None else seed}:{index}"
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[SampledToken | ExecutionError]:
    """Choose one token per row; advances the random streams, changes neither logits nor counts.

    Args:
        logits: [S, V] float32, on any device.
        states: One per row.

    Returns:
        One entry per row, in order. A row that cannot be sampled has its error in its place; the others go on.
    """
    if not states:
        return []
    # A maximum over a row is NaN, infinite or minus infinity exactly when the row is unusable: one pass says it all.
    best, best_ids = _leaders(logits)
    results: list[SampledToken | ExecutionError] = []
    alone: list[int] = []
    for place, (top, token_id, state) in enumerate(zip(best, best_ids, states, strict=True)):
        if not math.isfinite(top):
            results.append(ExecutionError("the model returned logits that are not finite numbers"))
            continue
        if not state.params.is_greedy or state.changes_logits or state.params.logprobs is not None:
            alone.append(place)
        results.append(SampledToken(token_id))
    if alone:
        rows = logits.detach()[alone].to("cpu", torch.float32)  # one transfer for all of them
        for row, place in zip(rows, alone, strict=True):
            results[place] = _sample_row(row, states[place])
    return results


def _leaders(logits: Tensor) -> tuple[list[float], list[int]]:
    """Return the largest number of each row and where it is, the first of several; a NaN is larger than any."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        rows = logits.detach().numpy()  # whose argmax uses vectors, unlike torch's
        ids = rows.argmax(axis=-1)
        return rows[np.arange(len(rows)), ids].tolist(), ids.tolist()
    best, best_ids = logits.max(dim=-1)
    return best.tolist(), best_ids.tolist()


def _sample_row(row: Tensor, state: SamplerState) -> SampledToken | ExecutionError:
    # Memory of its own: a row's place in the batch decides its alignment, and must not decide a rounding.
    raw = row.clone()
    try:
        row = raw
        if state.changes_logits:
            row = raw.clone()
            state.process(row)
        best, best_id = row.max(dim=0)
        if not math.isfinite(float(best)):
            return ExecutionError("logit bias and penalties leave no token to choose")
        token_id = int(best_id) if state.params.is_greedy else _draw(row - best, state)
        return _with_logprobs(token_id, raw, state.params.logprobs)
    except Exception as cause:
        # One request's fault must not fail its neighbours in the batch.
        error = ExecutionError("sampling failed")
        error.__cause__ = cause
        return error


def _draw(scores: Tensor, state: SamplerState) -> int:
    """Return a random token of ``scores [V]``, whose maximum is 0; advances the stream by one number."""
    scores = scores / max(state.params.temperature, _MIN_TEMPERATURE)
    ids, scores = _allowed(scores, state.params)
    # Inverse of the cumulative distribution: one random number a token, whatever the size of the vocabulary.
    cumulative = torch.cumsum(scores.exp(), dim=0, dtype=torch.float64)
    total = float(cumulative[-1])
    target = min(state.uniform() * total, math.nextafter(total, 0.0))
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if ids is None else int(ids[place])


def _allowed(scores: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """Return the ids that top-k, top-p and min-p keep (None: all of them) and their scores."""
    ids: Tensor | None = None
    if 0 < params.top_k < len(scores):
        ids = _leading(scores, params.top_k)
        scores = scores[ids]
    if params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    if params.min_p > 0:
        kept = (scores >= math.log(params.min_p)).nonzero().flatten()
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    return ids, scores


def _leading(scores: Tensor, k: int) -> Tensor:
    """Return the ids of the ``k`` highest scores and of all that tie with the last, best first, lower ids first."""
    threshold = scores.topk(k).values[-1]
    ids = (scores >= threshold).nonzero().flatten()
    order = scores[ids].sort(descending=True, stable=True).indices
    return ids[order]


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return the ids of the fewest most likely tokens that have at least the probability ``top_p``, best first."""
    probs = scores.softmax(dim=0)
    for k in (_SHORTLIST, len(scores)):
        ids = _leading(scores, min(k, len(scores)))
        cumulative = torch.cumsum(probs[ids], dim=0, dtype=torch.float64)
        if float(cumulative[-1]) >= top_p:
            break
    # A token stays while what comes before it is not enough, so the first one always stays.
    before = cumulative.roll(1)
    before[0] = 0.0
    return ids[before < top_p]


def _with_logprobs(token_id: int, raw: Tensor, num_top: int | None) -> SampledToken:
    if num_top is None:
        return SampledToken(token_id)
    logprobs = raw.log_softmax(dim=0)
    top_ids = _leading(logprobs, min(num_top, len(logprobs)))[:num_top] if num_top else None
    top = () if top_ids is None else tuple(zip(top_ids.tolist(), logprobs[top_ids].tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
