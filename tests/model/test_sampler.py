"""Sampling against transformers' processors, plain Python, and the statistics of the draw."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixkv.config import SamplingParams
from prefixkv.errors import ExecutionError, InvalidRequest
from prefixkv.model.sampler import SampledToken, SamplerState, TokenLogprob, _allowed, check_sampling, sample

# Quarters make ties common, as they are among the logits of 16-bit models.
quarters = st.integers(-40, 40).map(lambda n: n / 4)
rows = st.lists(quarters, min_size=2, max_size=40)
NO_IDS = torch.zeros((1, 0), dtype=torch.int64)


def _ok(result: SampledToken | ExecutionError) -> SampledToken:
    assert isinstance(result, SampledToken), result
    return result


def _one(logits: list[float] | torch.Tensor, state: SamplerState) -> SampledToken:
    return _ok(sample(torch.as_tensor(logits, dtype=torch.float32)[None], [state])[0])


def _draws(logits: torch.Tensor, state: SamplerState, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        ids.append(_one(logits, state).token_id)
        state.append(ids[-1])
    return ids


def _warp(logits: list[float], *warpers: LogitsProcessor) -> list[float]:
    scores = torch.tensor([logits])
    for warper in warpers:
        scores = warper(NO_IDS, scores)
    return scores[0].tolist()


def _kept(logits: list[float], **options: Any) -> list[int]:
    """The ids among which our draw is made, lowest first."""
    row = torch.tensor(logits)
    params = SamplingParams(**options)
    ids, _ = _allowed((row - row.max()) / params.temperature, params)
    return list(range(len(logits))) if ids is None else sorted(ids.tolist())


def _assume_clear_border(logits: list[float], top_p: float) -> None:
    """Skip rows where the nucleus ends within a rounding error of ``top_p``."""
    probs = torch.tensor(logits, dtype=torch.float64).softmax(0).sort(descending=True).values
    assume(float((probs.cumsum(0) - top_p).abs().min()) > 1e-5)


@given(rows, st.integers(1, 50))
def test_top_k_keeps_what_transformers_keeps(logits: list[float], k: int) -> None:
    """Also where k exceeds the vocabulary and where tokens tie with the last one kept."""
    theirs = _warp(logits, TopKLogitsWarper(k))
    assert _kept(logits, top_k=k) == [i for i, score in enumerate(theirs) if score > -math.inf]


@given(rows, st.floats(0.01, 0.999))
def test_top_p_keeps_as_much_as_transformers_keeps(logits: list[float], top_p: float) -> None:
    """Of tokens that tie at the border transformers keeps arbitrary ones, we the lowest ids: scores are compared."""
    _assume_clear_border(logits, top_p)
    theirs = _warp(logits, TopPLogitsWarper(top_p))
    ours = _kept(logits, top_p=top_p)
    assert sorted(logits[i] for i in ours) == sorted(score for score in theirs if score > -math.inf)
    lowest = min(logits[i] for i in ours)
    tied = [i for i, score in enumerate(logits) if score == lowest]
    assert [i for i in ours if logits[i] == lowest] == tied[: sum(logits[i] == lowest for i in ours)]


@given(rows, st.floats(0.001, 1.0))
def test_min_p_keeps_what_transformers_keeps(logits: list[float], min_p: float) -> None:
    """The rule is relative to the best token, so no normalisation is needed on our side."""
    assume(all(abs(math.exp(score - max(logits)) - min_p) > 1e-6 for score in logits))
    theirs = _warp(logits, MinPLogitsWarper(min_p))
    assert _kept(logits, min_p=min_p) == [i for i, score in enumerate(theirs) if score > -math.inf]


@given(rows, st.floats(0.05, 5), st.integers(1, 50), st.floats(0.01, 0.999), st.floats(0.001, 1.0))
def test_filters_apply_in_transformers_order(
    logits: list[float], temperature: float, k: int, top_p: float, min_p: float
) -> None:
    """Temperature first, then top-k, then top-p over what top-k left, then min-p."""
    before = _warp(logits, TemperatureLogitsWarper(temperature), TopKLogitsWarper(k))
    _assume_clear_border(before, top_p)
    best = max(before)
    assume(all(abs(math.exp(score - best) - min_p) > 1e-5 for score in before))
    theirs = _warp(before, TopPLogitsWarper(top_p), MinPLogitsWarper(min_p))
    ours = _kept(logits, temperature=temperature, top_k=k, top_p=top_p, min_p=min_p)
    kept_scores = sorted(score for score in theirs if score > -math.inf)
    assert sorted(before[i] for i in ours) == pytest.approx(kept_scores)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9])
def test_a_nucleus_wider_than_the_shortlist_is_whole(top_p: float) -> None:
    """Only the best tokens are sorted at first; a flat distribution needs the full sort."""
    logits = (torch.randn(6000, generator=torch.Generator().manual_seed(1)) / 10).tolist()
    theirs = _warp(logits, TopPLogitsWarper(top_p))
    ours = _kept(logits, top_p=top_p)
    assert abs(len(ours) - sum(score > -math.inf for score in theirs)) <= 1  # one token lies on the border
    assert len(ours) >= top_p * 6000 / 2


@given(rows, st.floats(0.1, 5), st.data())
def test_repetition_penalty_is_transformers_penalty(logits: list[float], penalty: float, data: st.DataObject) -> None:
    """Over prompt and reply together, each token once however often it occurs."""
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=200)
    prompt, reply = data.draw(ids), data.draw(ids)
    state = SamplerState(SamplingParams(repetition_penalty=penalty), prompt, len(logits))
    for token_id in reply:
        state.append(token_id)
    row = torch.tensor(logits)
    state.process(row)
    expected = torch.tensor([logits])
    if prompt or reply:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + reply]), expected)
    torch.testing.assert_close(row[None], expected)


@given(
    st.lists(quarters, min_size=100, max_size=100),
    st.lists(st.integers(0, 99), max_size=300),
    st.lists(st.integers(0, 99), max_size=20),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 99), st.floats(-50, 50), max_size=5),
)
def test_bias_and_penalties_match_plain_python(
    logits: list[float],
    reply: list[int],
    prompt: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    """Bias first, then repetition, then frequency and presence, which ignore the prompt."""
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    state = SamplerState(params, prompt, 100)
    for token_id in reply:
        state.append(token_id)
    expected = list(logits)
    for token_id, value in bias.items():
        expected[token_id] += value
    for token_id in {*prompt, *reply}:
        score = expected[token_id]
        expected[token_id] = score / repetition if score > 0 else score * repetition
    for token_id, count in Counter(reply).items():
        expected[token_id] -= frequency * count + presence
    row = torch.tensor(logits)
    state.process(row)
    torch.testing.assert_close(row, torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_counters_grow_with_the_reply() -> None:
    """A reply may hold any number of distinct tokens."""
    state = SamplerState(SamplingParams(frequency_penalty=1.0), [], 1000)
    for token_id in [*range(500), *range(250)]:
        state.append(token_id)
    row = torch.zeros(1000)
    state.process(row)
    assert row.tolist() == [-2.0] * 250 + [-1.0] * 250 + [0.0] * 500


def test_prompt_ids_without_a_logit_are_ignored() -> None:
    """Placeholders of images may lie outside the vocabulary."""
    state = SamplerState(SamplingParams(repetition_penalty=2.0), [1, 7, -1], 4)
    row = torch.tensor([1.0, 1.0, 1.0, 1.0])
    state.process(row)
    assert row.tolist() == [1.0, 0.5, 1.0, 1.0]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    """In the batched path and in the one that computes log-probabilities."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    for options in ({}, {"logprobs": 0}):
        states = [SamplerState(SamplingParams(temperature=0, **options), [], 4) for _ in range(2)]
        assert [_ok(result).token_id for result in sample(logits, states)] == [1, 0]


def test_greedy_follows_the_processed_logits() -> None:
    """A forbidden token is not taken, and a repeated one loses its lead."""
    logits = [1.0, 2.0, 3.0]
    forbid = SamplerState(SamplingParams(temperature=0, logit_bias={2: -math.inf}), [], 3)
    assert _one(logits, forbid).token_id == 1
    tired = SamplerState(SamplingParams(temperature=0, frequency_penalty=0.8), [], 3)
    assert _draws(torch.tensor(logits), tired, 6) == [2, 2, 1, 2, 1, 0]


def test_a_greedy_batch_agrees_with_each_row_alone() -> None:
    """The batched maximum is only a faster way to the same ids."""
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(0))
    states = [SamplerState(SamplingParams(temperature=0), [], 500) for _ in range(16)]
    assert [_ok(result).token_id for result in sample(logits, states)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.5}]
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square against the probabilities that transformers' processors leave, with a fixed seed."""
    logits = [2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -3.0, 0.25]
    params = SamplingParams(seed=11, **options)
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    probs = torch.tensor(_warp(logits, *warpers)).softmax(0).tolist()
    count = 4000
    seen = Counter(_draws(torch.tensor(logits), SamplerState(params, [], 8), count))
    assert all(probs[token_id] > 0 for token_id in seen)
    chi_square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probs) if p > 0)
    assert chi_square < 27.9  # 7 degrees of freedom, one in ten thousand


def test_draws_do_not_depend_on_the_batch() -> None:
    """Same ids and bit-identical log-probabilities alone, among strangers and at another place of the batch."""
    width, steps = 5003, 4  # an odd width: rows of the batch start at odd addresses
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.9},
        {"top_k": 40, "repetition_penalty": 1.3},
        {"min_p": 0.05, "presence_penalty": 1.0},
        {"temperature": 0, "logprobs": None},
        {"logit_bias": {3: 8.0}, "temperature": 1.7},
    ]
    logits = torch.randn(steps, len(options), width, generator=torch.Generator().manual_seed(3)) * 3

    def run(places: list[int]) -> dict[int, list[SampledToken]]:
        states = {
            i: SamplerState(SamplingParams(**{"seed": 100 + i, "logprobs": 3, **options[i]}), [1, 2, 3], width)
            for i in places
        }
        results: dict[int, list[SampledToken]] = {i: [] for i in places}
        for step in range(steps):
            for i, result in zip(places, sample(logits[step, places], list(states.values())), strict=True):
                results[i].append(_ok(result))
                states[i].append(results[i][-1].token_id)
        return results

    everyone = list(range(len(options)))
    together, reversed_order = run(everyone), run(everyone[::-1])
    for i in everyone:
        assert run([i])[i] == together[i] == reversed_order[i]


def test_sampling_leaves_the_logits_alone() -> None:
    """The caller may still need them, for example to compare engines."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5, top_p=0.5)
    sample(logits, [SamplerState(params, [1, 2], 50), SamplerState(SamplingParams(temperature=0), [], 50)])
    assert torch.equal(logits, before)


def test_a_seed_repeats_and_replies_of_one_request_differ() -> None:
    """Reply i of n has its own stream, and that stream is fixed by the seed and i."""
    logits = torch.zeros(1000)
    replies = [_draws(logits, SamplerState(SamplingParams(seed=5, n=8), [], 1000, i), 10) for i in range(8)]
    again = [_draws(logits, SamplerState(SamplingParams(seed=5, n=8), [], 1000, i), 10) for i in range(8)]
    assert replies == again
    assert len({tuple(reply) for reply in replies}) == 8


def test_every_bit_of_a_seed_counts() -> None:
    """Torch's own seeding keeps 32 bits, and Python's drops the sign."""
    logits = torch.zeros(1000)
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**63) + 1]
    replies = {tuple(_draws(logits, SamplerState(SamplingParams(seed=s), [], 1000), 10)) for s in seeds}
    assert len(replies) == len(seeds)


def test_requests_without_a_seed_differ() -> None:
    """Two requests with equal prompts must not get equal replies."""
    logits = torch.zeros(1000)
    replies = {tuple(_draws(logits, SamplerState(SamplingParams(), [], 1000), 10)) for _ in range(8)}
    assert len(replies) == 8


def test_one_number_is_drawn_per_token_whatever_the_options() -> None:
    """A stream's position depends on the tokens drawn only, so a change of the row does not shift later draws."""
    first, second = (SamplerState(SamplingParams(seed=1, top_p=p), [], 10) for p in (1.0, 0.5))
    _one([1.0] * 10, first)
    _one([9.0] + [0.0] * 9, second)
    assert first.uniform() == second.uniform()


class _Fixed(SamplerState):
    """A state whose next number is given."""

    value = 0.0

    def uniform(self) -> float:
        return self.value


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3), (1.0, 3)])
def test_impossible_tokens_are_never_drawn_at_the_edges(value: float, expected: int) -> None:
    """Tokens of probability zero lie before, between and behind the two possible ones."""
    state = _Fixed(SamplingParams(), [], 5)
    state.value = value
    assert _one([-math.inf, 1.0, -math.inf, 1.0, -math.inf], state).token_id == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """float32 would divide by zero."""
    state = SamplerState(SamplingParams(temperature=temperature, seed=0), [], 4)
    assert _draws(torch.tensor([0.0, -1e30, 2.0, 1.9]), state, 5) == [2] * 5


def test_logprobs_are_those_of_the_model() -> None:
    """Bias, penalties and temperature choose the token but do not change what is reported."""
    raw = torch.randn(50, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0, logit_bias={7: 100.0}, repetition_penalty=1.5, logprobs=4)
    result = _one(raw, SamplerState(params, [1, 2], 50))
    expected = raw.log_softmax(0)
    assert isinstance(result, TokenLogprob)
    assert (result.token_id, result.logprob) == (7, pytest.approx(float(expected[7])))
    assert [token_id for token_id, _ in result.top] == expected.argsort(descending=True)[:4].tolist()
    assert [value for _, value in result.top] == pytest.approx(sorted(expected.tolist(), reverse=True)[:4])


def test_logprobs_count_and_ties() -> None:
    """None reports nothing, 0 the token alone; equals come in order of id; a small vocabulary bounds the list."""
    logits = [1.0, 1.0, 1.0]
    greedy = {"temperature": 0}
    assert _one(logits, SamplerState(SamplingParams(**greedy), [], 3)) == SampledToken(0, None, ())
    only = _one(logits, SamplerState(SamplingParams(**greedy, logprobs=0), [], 3))
    assert only.logprob == pytest.approx(-math.log(3))
    assert only.top == ()
    two = _one(logits, SamplerState(SamplingParams(**greedy, logprobs=2), [], 3))
    assert [token_id for token_id, _ in two.top] == [0, 1]
    assert len(_one(logits, SamplerState(SamplingParams(**greedy, logprobs=20), [], 3)).top) == 3


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"seed": 1, "top_p": 0.5}])
def test_unusable_rows_fail_alone(options: dict[str, Any]) -> None:
    """NaN anywhere, plus infinity, or nothing possible: an error in that row's place, as if it were not there."""
    good = torch.randn(20, generator=torch.Generator().manual_seed(4))
    nan, infinite = good.clone(), good.clone()
    nan[13], infinite[2] = math.nan, math.inf
    logits = torch.stack([good, nan, infinite, torch.full((20,), -math.inf), good])
    results = sample(logits, [SamplerState(SamplingParams(**options), [], 20) for _ in range(5)])
    assert [type(result) for result in results] == [SampledToken, *[ExecutionError] * 3, SampledToken]
    assert results[0] == results[4] == _one(good, SamplerState(SamplingParams(**options), [], 20))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bias_that_forbids_everything_is_an_error(temperature: float) -> None:
    """Nothing is left to choose: the reply fails instead of holding a forbidden token."""
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(4), -math.inf))
    (result,) = sample(torch.zeros(1, 4), [SamplerState(params, [], 4)])
    assert isinstance(result, ExecutionError)


def test_a_fault_in_one_row_is_reported_in_its_place() -> None:
    """Here a bias that ``check_sampling`` would have refused."""
    broken = SamplerState(SamplingParams(logit_bias={99: 1.0}), [], 4)
    fine = SamplerState(SamplingParams(temperature=0), [], 4)
    first, second = sample(torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2), [broken, fine])
    assert isinstance(first, ExecutionError)
    assert isinstance(first.__cause__, IndexError)
    assert second == SampledToken(1)


def test_no_rows_no_results() -> None:
    """A step may compute prompts only."""
    assert sample(torch.zeros(0, 10), []) == []


def test_lower_precision_logits_are_widened() -> None:
    """bfloat16 rows are computed on in float32."""
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(6)).bfloat16()
    states = [SamplerState(SamplingParams(seed=3, logprobs=1), [], 100) for _ in range(2)]
    assert sample(logits, states[:1]) == sample(logits.float(), states[1:])


def test_tokens_outside_the_vocabulary_are_refused_early() -> None:
    """The path names the option, and ids that exist pass."""
    check_sampling(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]), 10)
    for name, value in (("logit_bias", {10: 1.0}), ("stop_token_ids", [3, 10])):
        options: dict[str, Any] = {name: value}
        with pytest.raises(InvalidRequest) as caught:
            check_sampling(SamplingParams(**options), 10)
        assert (caught.value.code, caught.value.path) == ("bad_sampling", f"sampling.{name}")


def test_states_do_not_share_counters() -> None:
    """Replies of one request count their own tokens."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    one, two = (SamplerState(copy.copy(params), [], 3, i) for i in range(2))
    one.append(0)
    logits = [1.0, 0.5, 0.0]
    assert (_one(logits, one).token_id, _one(logits, two).token_id) == (1, 0)
