"""Tokens per minute, and the other limits of a tenant that time or others' requests decide."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixkv import Principal, SamplingParams, SchedulerConfig, errors
from prefixkv.engine.rates import TokenRates
from tests.support import random_ids


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def rates(clock: Clock, **limits: int) -> TokenRates:
    return TokenRates(limits.get, clock)


def test_a_minutes_worth_may_come_at_once_and_comes_back_evenly() -> None:
    clock = Clock()
    buckets = rates(clock, a=600)
    assert buckets.wait_s("a") == 0
    buckets.spend("a", 600)
    assert buckets.wait_s("a") == pytest.approx(0.1)
    clock.now_s += 0.1
    assert buckets.wait_s("a") == pytest.approx(0)
    clock.now_s += 3600
    buckets.spend("a", 600)
    assert buckets.wait_s("a") == pytest.approx(0.1), "an hour saves up one minute's worth"


def test_a_debt_is_paid_before_the_next_request() -> None:
    clock = Clock()
    buckets = rates(clock, a=60)
    buckets.spend("a", 90)
    assert buckets.wait_s("a") == pytest.approx(31)
    clock.now_s += 30.9
    assert buckets.wait_s("a") == pytest.approx(0.1)
    clock.now_s -= 500
    assert buckets.wait_s("a") == pytest.approx(0.1), "a clock that jumps back takes nothing"


def test_buckets_are_each_tenants_own_and_no_limit_is_no_bucket() -> None:
    buckets = rates(Clock(), a=10, b=10)
    buckets.spend("a", 50)
    buckets.spend("free", 10**9)
    assert (buckets.wait_s("b"), buckets.wait_s("free")) == (0, 0)


def test_a_new_limit_counts_at_once() -> None:
    limits = {"a": 600}
    clock = Clock()
    buckets = TokenRates(limits.get, clock)
    assert buckets.wait_s("a") == 0
    limits["a"] = 6
    buckets.spend("a", 6)
    assert buckets.wait_s("a") == pytest.approx(10)


WHO = Principal("acme", user="u", session="s")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def test_an_engine_counts_what_it_computes_and_what_it_generates(make_engine: Any) -> None:
    """Cached tokens cost nothing: with 30 of 100 left, a prompt of 60 that is in the cache goes through."""
    engine = make_engine(policies={"default": {}, "tenants": {"acme": {"tokens_per_minute": 100}}})
    clock = Clock()
    engine._core.limits._rates._clock = clock
    ids = random_ids(60)
    engine.complete(ids, principal=WHO, sampling=greedy(10))
    engine.complete(ids, principal=WHO, sampling=greedy(28))
    assert engine._core.limits._rates.wait_s("acme") == 0, "60 + 10 + 1 + 28 are used, one is left"
    engine.complete(ids, principal=WHO, sampling=greedy(1))
    with pytest.raises(errors.QuotaExceeded, match="100 tokens per minute") as caught:
        engine.complete(ids, principal=WHO, sampling=greedy(1))
    assert caught.value.retry_after_s == pytest.approx(1.2)
    engine.complete(ids, principal=Principal("other"), sampling=greedy(1))
    engine.publish("by the operator", tenant="acme")
    clock.now_s += 60
    engine.complete(ids, principal=WHO, sampling=greedy(1))


def test_no_more_requests_run_than_the_tenant_may(make_engine: Any) -> None:
    """More of them wait; those of others do not wait behind them."""
    engine = make_engine(policies={"default": {}, "tenants": {"acme": {"max_running_requests": 2}}})
    seen: list[int] = []
    core = engine._core
    schedule = core.scheduler.schedule

    def watched() -> Any:
        step = schedule()
        seen.append(sum(seq.tenant == "acme" for seq in core.scheduler.running))
        return step

    core.scheduler.schedule = watched
    threads = [
        threading.Thread(target=engine.complete, args=(random_ids(20, seed=n),), kwargs=dict(principal=WHO))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    engine.complete(random_ids(20), principal=Principal("other"), sampling=greedy(3))
    for thread in threads:
        thread.join(30)
    assert max(seen) == 2


def test_a_strict_tenant_has_a_queue_of_its_own(make_engine: Any) -> None:
    """Others' full queue refuses it nothing."""
    engine = make_engine(
        blocks=40,
        policies={"default": {}, "tenants": {"strict": {"isolation": "strict", "min_pool": 0.25}}},
        scheduler=SchedulerConfig(max_num_seqs=2, max_queued_requests=4),
    )
    scheduler = engine._core.scheduler
    assert scheduler.lane_of("strict").share.max_queued_requests == 1
    assert scheduler.lane_of("other").share.max_queued_requests == 3
    message = [{"role": "user", "content": "hello"}]
    streams = [engine.stream(message, principal=Principal("other"), sampling=greedy(200)) for _ in range(20)]
    assert engine.complete(random_ids(9), principal=Principal("strict"), sampling=greedy(2)).usage.completion_tokens
    with pytest.raises(errors.QueueFull):
        for stream in streams[::-1]:
            next(stream)
    for stream in streams:
        stream.close()
    engine.check()
