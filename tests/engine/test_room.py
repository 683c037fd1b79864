"""Room that shrinks after a request was accepted: nobody waits for ever, and nobody pays for another's request."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from prefixkv import Principal, SamplingParams, SchedulerConfig, errors
from tests.support import random_ids

WHO = Principal("acme", user="u", session="s")
OPEN_END = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def started(call: Any) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(call())
        except errors.PrefixKVError as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def test_a_publication_under_way_counts_as_published(make_engine: Any) -> None:
    """What would not fit beside it is refused on arrival, and those behind it in line are served."""
    engine = make_engine(blocks=12, scheduler=SchedulerConfig(max_prefill_tokens=1))
    thread, out = started(lambda: engine.publish("p" * 120))
    while not engine.stats().running:
        time.sleep(0.001)
    with pytest.raises(errors.QuotaExceeded):
        engine.complete(random_ids(100), principal=WHO, sampling=greedy(60))
    engine.complete(random_ids(20), principal=Principal("other"), sampling=greedy(3))
    thread.join(20)
    assert out[0].blocks == 8


@pytest.mark.parametrize("limit", ["pool", "publication", "ceiling"])
def test_a_reply_without_max_tokens_ends_where_its_room_does(limit: str, make_engine: Any) -> None:
    """It says no number that could be too large."""
    engine = make_engine(blocks=12, policies={"default": {"max_pool": 0.5}} if limit == "ceiling" else None)
    if limit == "publication":
        engine.publish("x" * 64)
    usage = engine.complete([1, 2, 3], principal=WHO, sampling=OPEN_END).usage
    rows = {"pool": 12, "publication": 8, "ceiling": 6}[limit] * 16
    assert usage.completion_tokens == rows + 1 - 3


def test_a_ceiling_lowered_under_a_request_ends_it_though_others_run_on(make_engine: Any) -> None:
    """Waiting until nothing at all runs would be waiting for ever on a busy engine."""
    engine = make_engine(blocks=40)
    busy = [
        engine.stream(
            [{"role": "user", "content": "x"}], principal=Principal("big", session=str(n)), sampling=greedy(n)
        )
        for n in (400, 80)
    ]
    small = engine.stream([{"role": "user", "content": "y" * 30}], principal=Principal("small"), sampling=greedy(150))
    for stream in (*busy, small):
        next(stream)
    engine.reload_policies({"default": {}, "tenants": {"small": {"max_pool": 0.1}}})
    with pytest.raises(errors.QuotaExceeded):
        list(small)
    assert engine.stats().running
    busy[0].close()
    assert sum(len(delta.token_ids) for delta in busy[1]) == 79
    engine.check()
