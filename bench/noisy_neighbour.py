"""What does a tenant notice of another one that floods the engine?

Claim: its first token comes in at most twice the time that it takes alone, where its prompt is a few steps long; with
a floor that covers its prompts its hit rate stays within 2 points; and two tenants that flood with weights 1 and 2 get
service 1 : 2.

A flood keeps a number of requests with prompts that nobody sent before under way. ``new``: the calm tenant sends one
long prompt at a time that was never seen, alone and under the flood in turn. ``usual``: it sends prompts from a small
set, which hit; such a request is shorter than the step that is under way when it comes, so its ratio says how long
steps are: a smaller max_prefill_tokens makes it smaller. Service is computed prompt tokens and twice the output tokens
of the requests that ended in the window. The calm tenant has a floor, or it would wait for room in a pool that the
flood fills.

Run: python bench/noisy_neighbour.py        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections import deque
from typing import Any

from chat_load import prose
from prefix_reuse import RESULTS, describe_machine

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams, SchedulerConfig

LIGHT = Principal("light", user="u")


def ask(engine: Engine, system: str, question: str, who: Principal) -> Any:
    """Send one short request and return its result."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return engine.chat(messages, principal=who, sampling=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))


class Flood:
    """Keeps requests of one tenant under way while it is open."""

    def __init__(self, engine: Engine, tenant: str, under_way: int, words: int) -> None:
        self._engine, self._who = engine, Principal(tenant, user="u")
        self._under_way, self._words = under_way, words
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()
        while (
            stats := self._engine.stats(tenant=self._who.tenant)
        ).running + stats.waiting:  # what was cancelled ends between two steps
            time.sleep(0.01)

    def _run(self) -> None:
        rng = random.Random(self._who.tenant)
        sampling = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        streams: deque[Any] = deque()
        while not self._ends.is_set():
            stats = self._engine.stats(tenant=self._who.tenant)
            for _ in range(self._under_way - stats.running - stats.waiting):
                message = {"role": "user", "content": prose(self._words, rng)}
                streams.append(self._engine.stream([message], principal=self._who, sampling=sampling))
            while len(streams) > 20 * self._under_way:
                streams.popleft().close()  # ended long ago
            time.sleep(0.005)
        for stream in streams:
            stream.close()


def first_tokens(
    engine: Engine, alone: list[list[str]], flooded: list[list[str]], options: argparse.Namespace
) -> dict[str, Any]:
    """Send the first prompts with nobody else there and the others under a flood; compare the times."""
    times: dict[str, list[float]] = {"alone": [], "flood": []}
    computed: dict[str, list[int]] = {"alone": [], "flood": []}

    def run(label: str, prompts: list[list[str]]) -> None:
        for system, question in prompts:
            result = ask(engine, system, question, LIGHT)
            times[label].append(result.timings.ttft_s * 1000)
            computed[label].append(result.usage.computed_tokens)
            time.sleep(0.02)

    run("alone", alone)
    with Flood(engine, "flood", options.under_way, options.words):
        time.sleep(options.settle)
        run("flood", flooded)
    found: dict[str, Any] = {f"{label}_computed_tokens": statistics.median(computed[label]) for label in computed}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        alone_ms, flood_ms = (sorted(values)[int(share * (len(values) - 1) + 0.5)] for values in times.values())
        found |= {f"{name}_alone_ms": alone_ms, f"{name}_flood_ms": flood_ms, f"{name}_ratio": flood_ms / alone_ms}
    return {**found, "times_ms": times}


def hit_rate(engine: Engine, who: Principal, options: argparse.Namespace) -> float:
    """Return the percentage of a tenant's prompt tokens that hit, while it asks of a small set again and again."""
    rng = random.Random(1)
    usual = [(prose(options.words, rng), f"What of rule {n}?") for n in range(4)]
    prompt = cached = 0
    for turn in range(-len(usual), options.turns):
        usage = ask(engine, *usual[turn % len(usual)], who).usage
        if turn >= 0:
            prompt, cached = prompt + usage.prompt_tokens, cached + usage.cached_tokens
            time.sleep(options.pause)
    return 100 * cached / prompt


def hit_rates(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Return the calm tenant's hit rate alone, and under floods with and without a floor.

    One flood would not do: beyond its share a tenant evicts its own. Many leave the calm one a small share.
    """
    rates = {}
    for label, floor in (("alone", None), ("floods, no floor", None), ("floods, floor", options.floor)):
        # A tenant of its own for each, so that none finds what another left behind.
        who = Principal(f"calm {len(rates)}", user="u")
        engine.reload_policies({"default": {}, "tenants": {who.tenant: {"min_pool": floor}} if floor else {}})
        with contextlib.ExitStack() as floods:
            if label != "alone":
                for number in range(_FLOODS):
                    under_way = options.under_way // _FLOODS
                    floods.enter_context(Flood(engine, f"flood {number}", under_way, options.words))
                time.sleep(options.settle)
            rates[label] = hit_rate(engine, who, options)
    return rates


_FLOODS = 8


def service_ratio(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Return what two floods with weights 1 and 2 got."""
    engine.reload_policies({"default": {}, "tenants": {"one": {"weight": 1.0}, "two": {"weight": 2.0}}})

    def service(tenant: str) -> int:
        stats = engine.stats(tenant=tenant)
        return stats.computed_tokens + 2 * stats.completion_tokens

    one = Flood(engine, "one", options.under_way, options.words // 4)
    two = Flood(engine, "two", options.under_way, options.words // 4)
    with one, two:
        time.sleep(2 * options.settle)
        before = service("one"), service("two")
        time.sleep(options.window)
        got = service("one") - before[0], service("two") - before[1]
    return {"one": got[0], "two": got[1], "ratio": got[1] / max(1, got[0])}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=100, help="requests of the calm tenant in each run (100)")
    parser.add_argument("--turns", type=int, default=24, help="requests for each hit rate (24)")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between these (1)")
    parser.add_argument("--words", type=int, default=150, help="words of a prompt (150)")
    parser.add_argument("--under-way", type=int, default=24, help="requests that a flood keeps under way (24)")
    parser.add_argument("--max-prefill-tokens", type=int, default=64, help="prompt tokens of one step (64)")
    parser.add_argument("--memory", default="128MiB", help="the pool (128MiB)")
    parser.add_argument("--floor", default="40%", help="the calm tenant's floor (40%%)")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds that a flood runs before it counts (3)")
    parser.add_argument("--window", type=float, default=60.0, help="seconds in which service is counted (60)")
    options = parser.parse_args()
    machine, command = describe_machine(), " ".join(["python", *sys.argv])
    print(f"{command}\n{machine}")
    config = EngineConfig(
        cache=CacheConfig(memory=options.memory),
        scheduler=SchedulerConfig(max_num_seqs=16, max_prefill_tokens=options.max_prefill_tokens),
    )
    rng = random.Random(0)
    policies = {"default": {}, "tenants": {LIGHT.tenant: {"min_pool": options.floor}}}
    with Engine.from_pretrained(options.model, config=config, policies=policies) as engine:
        described = engine.describe()
        print(described)
        system = prose(options.words, rng)
        sets: dict[str, list[list[list[str]]]] = {
            "new": [[[prose(options.words, rng), "Why?"] for _ in range(options.requests)] for _ in range(2)],
            "usual": [
                [[system, f"Question {n}?"] for n in range(start, start + options.requests)] for start in (0, 1000)
            ],
        }
        for warm_up in (*(prose(options.words, rng) for _ in range(4)), system):
            ask(engine, warm_up, "Warm up.", LIGHT)
        results: dict[str, Any] = {}
        print("first token     p50 alone      flood  ratio  p99 alone      flood  ratio")
        for label, (alone, flooded) in sets.items():
            found = results[label] = first_tokens(engine, alone, flooded, options)
            cells = [
                f"{found[f'{name}_alone_ms']:7.0f} ms {found[f'{name}_flood_ms']:7.0f} ms {found[f'{name}_ratio']:6.2f}"
                for name in ("p50", "p99")
            ]
            print(f"{label:<14} {' '.join(cells)}")
        results["hit_rates"] = hit_rates(engine, options)
        print("hit rate     " + ", ".join(f"{label} {rate:.1f} %" for label, rate in results["hit_rates"].items()))
        results["service"] = service_ratio(engine, options)
        print(f"service      weights 1 and 2 got 1 : {results['service']['ratio']:.3f}")
        engine.check()
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "machine": machine, "engine": described, "results": results}
    path = RESULTS / "noisy_neighbour.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
