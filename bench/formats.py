"""How much faster is a decode step when the pool is quantised?

Claim: a decode step is bound by bytes, so with long contexts a smaller format is a faster one.

One model, one pool per format, filled with random rows; the pools take turns, step by step. Beside each time stand the
bytes that a step reads: the weights once, and the rows of K and V that every sequence sees.

Run: python bench/formats.py --batch 16 --context 4000        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from prefix_reuse import RESULTS, describe_machine

from prefixkv import CacheConfig
from prefixkv.config import KV_FORMATS
from prefixkv.kernels.readiness import compile_now
from prefixkv.model.batch import Chunk
from prefixkv.model.load import load
from prefixkv.model.runner import ModelRunner


def fill(runner: ModelRunner) -> None:
    """Write random rows to the whole pool."""
    generator = torch.Generator().manual_seed(0)
    size = runner.spec.block_size
    for first in range(0, runner.num_blocks, 64):
        slots = torch.arange(first * size, min(first + 64, runner.num_blocks) * size)
        for index, layer in enumerate(runner.spec.layers):
            k = torch.randn(len(slots), layer.num_kv_heads, layer.key_dim, generator=generator)
            v = torch.randn(len(slots), layer.num_kv_heads, layer.value_dim, generator=generator)
            runner.storage.write(index, slots, k.to(runner.storage.dtype), v.to(runner.storage.dtype))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="+", default=list(KV_FORMATS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=4000, help="tokens of each sequence (4000); nothing is shared")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    compile_now()
    loaded = load(options.model)
    blocks = -(-(options.context + 1) // 32)
    runners: dict[str, ModelRunner] = {}
    for name in options.formats:
        probe = ModelRunner.build(loaded, CacheConfig(memory="1MiB", kv_format=name))
        memory = probe.spec.bytes_per_block * blocks * options.batch
        probe.close()
        runners[name] = ModelRunner.build(loaded, CacheConfig(memory=memory, kv_format=name))
        fill(runners[name])
    step = [
        Chunk([7 + i], options.context, list(range(i * blocks, (i + 1) * blocks)), True) for i in range(options.batch)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for repeat in range(options.repeats + 2):
        for name, runner in runners.items():
            started = time.perf_counter()
            runner.execute(step)
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - started)
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    rows = options.batch * (options.context + 1)
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "decoder": {name: runner.decoder for name, runner in runners.items()},
        "seconds": seconds,
    }
    print(f"{record['command']}\n{record['machine']}\nweights {weights / 1e6:.0f} MB, {rows} rows")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    sizes = {name: weights + rows * runner.spec.bytes_per_token for name, runner in runners.items()}
    first = options.formats[0]
    for name, median in medians.items():
        print(
            f"{name:6} {median * 1000:8.1f} ms  {median / medians[first]:.2f} x   "
            f"{sizes[name] / 1e6:6.0f} MB  {sizes[name] / sizes[first]:.2f} x   {sizes[name] / median / 1e9:.1f} GB/s"
        )
    record |= {"median": medians, "bytes": sizes}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "formats.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
