"""How much sooner does the first token come when the prompt was seen before?

Claim: with a system prompt of S tokens in the cache, a chat turn's time to first token is that of its new tokens.

Cold and warm requests alternate in one process, so a busy machine slows both. Each cold request has a tenant of its
own, which may reuse nothing; its twin, right after it, comes from another user of that tenant and may reuse the system
prompt. The result is the ratio, pair by pair. Prints a table, writes JSON with machine, versions and command.

Run: python bench/prefix_reuse.py        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams, __version__

RESULTS = Path(__file__).resolve().parent / "results"
SENTENCE = "Rule {}: answer briefly, stay friendly, never promise a refund and hand over when in doubt. "
QUESTION = "What should I do if my parcel is late?"


def measure(engine: Engine, system: str, pairs: int) -> list[dict[str, Any]]:
    """Run cold and warm in turn; one row per pair. The first pair warms up the process and is left out."""
    rows = []
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    for pair in range(pairs + 1):
        row: dict[str, Any] = {"pair": pair}
        for label in ("cold", "warm"):
            principal = Principal(f"tenant-{pair}-{len(system)}", user=label)
            result = engine.chat(messages, principal=principal, sampling=SamplingParams(max_tokens=1, temperature=0))
            row["prompt_tokens"] = result.usage.prompt_tokens
            row[f"{label}_computed_tokens"] = result.usage.computed_tokens
            row[f"{label}_ttft_s"] = result.timings.ttft_s
        row["ratio"] = row["cold_ttft_s"] / row["warm_ttft_s"]
        rows.append(row)
    return rows[1:]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the pairs, and the least and greatest ratio."""
    ratios = [row["ratio"] for row in rows]
    keys = ("prompt_tokens", "cold_computed_tokens", "warm_computed_tokens", "cold_ttft_s", "warm_ttft_s", "ratio")
    return {
        **{key: statistics.median(row[key] for row in rows) for key in keys},
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
        "pairs": len(rows),
    }


def describe_machine() -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "prefixkv": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=10, help="pairs per length (10)")
    parser.add_argument("--sentences", type=int, nargs="+", default=[10, 40, 100], help="lengths of the system prompt")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args()
    machine = describe_machine()
    command = " ".join(["python", *sys.argv])
    print(f"{command}\n{machine}")
    results = []
    with Engine.from_pretrained(options.model, config=EngineConfig(cache=CacheConfig(memory="1GiB"))) as engine:
        described = engine.describe()
        print(described)
        print(f"{'prompt':>8} {'cold':>10} {'warm':>10} {'ratio':>7}  computed tokens, cold and warm")
        for sentences in options.sentences:
            system = "".join(SENTENCE.format(number) for number in range(sentences))
            rows = measure(engine, system, options.pairs)
            found = summarise(rows)
            results.append({**found, "rows": rows})
            cold_ms, warm_ms = found["cold_ttft_s"] * 1000, found["warm_ttft_s"] * 1000
            print(
                f"{found['prompt_tokens']:8.0f} {cold_ms:7.1f} ms {warm_ms:7.1f} ms {found['ratio']:7.2f}  "
                f"{found['cold_computed_tokens']:.0f} and {found['warm_computed_tokens']:.0f}"
            )
        engine.check()
    options.out.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = options.out / f"prefix_reuse-{when}.json"
    record = {"command": command, "machine": machine, "engine": described, "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
