"""Where does the time of a decode step go?

Claim: a decode step is bound by the bytes it must read: weights once, and the rows of K and V that each sequence sees.

The first requests of the static load are prefilled; then decode steps of the whole batch are timed: in the engine, as a
forward of the model alone, and, where the step is compiled, part by part with the processor's own clock. What the
engine adds is the difference of the first two. The last lines say how long the bytes alone would take, those of the
weights and those of the rows, at the bandwidth of a plain read in the same process.

Run: python bench/profile_step.py --batch 1 8 16        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from chat_load import load
from prefix_reuse import RESULTS, describe_machine

from prefixkv import CacheConfig, ChatRequest, Engine, EngineConfig, Principal, SamplingParams, SchedulerConfig
from prefixkv.kernels import readiness
from prefixkv.model.batch import Chunk, ForwardBatch


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call in milliseconds, after two calls that do not count."""
    times = []
    for repeat in range(repeats + 2):
        started = time.perf_counter()
        call()
        if repeat >= 2:
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def prefill(engine: Engine, count: int) -> list[Chunk]:
    """Bring the first requests into the pool; return the decode step that follows."""
    chunks = []
    manager, runner = engine._core.manager, engine._runner
    for seq_id, request in enumerate(load(dynamic=False)[:count]):
        who = Principal(request["tenant"], user=request["user"], session=request["session"])
        prompt, scopes, _ = engine.builder.chat_prompt(ChatRequest(request["messages"], who))
        ids = list(prompt.token_ids)
        cached = manager.open(seq_id, manager.match(ids, scopes), scopes, len(ids) + 1)
        if cached is None:
            raise SystemExit("the pool is too small for this batch")
        engine._core._run_ops()
        for start in range(cached, len(ids), 512):
            part = ids[start : start + 512]
            runner.execute([Chunk(part, start, manager.block_table(seq_id), False)])
        manager.commit(seq_id, ids, len(ids), tail=True)
        engine._core._run_ops()
        chunks.append(Chunk([ids[-1]], len(ids), list(manager.block_table(seq_id)), True))
    return chunks


def parts_ms(engine: Engine, chunks: list[Chunk], repeats: int) -> dict[str, float]:
    """Return what a step consists of; the compiled step counts cycles per part, other decoders are timed as a whole."""
    runner = engine._runner
    size, device = runner.spec.block_size, runner.storage.device
    found = {
        "forward": median_ms(lambda: runner.execute(chunks), repeats),
        "planning the batch": median_ms(
            lambda: ForwardBatch.build(chunks, block_size=size, num_blocks=runner.num_blocks, device=device), repeats
        ),
    }
    compiled = None if runner._fused is None else runner._fused._few
    if compiled is None:
        return found
    from prefixkv.kernels import numba_step
    from prefixkv.kernels.numba_layer import PARTS

    seconds = 0.0
    original = numba_step._run_step

    def timed(*args: Any) -> None:
        nonlocal seconds
        started = time.perf_counter()
        original(*args)
        seconds += time.perf_counter() - started

    numba_step._run_step = timed
    compiled._room.cycles[:] = 0
    try:
        for _ in range(repeats):
            runner.execute(chunks)
    finally:
        numba_step._run_step = original
    cycles = compiled._room.cycles
    share = seconds / repeats * 1000 / cycles.sum()
    found.update({f"  {name}": float(count * share) for name, count in zip(PARTS, cycles, strict=True)})
    found["  Python of the step"] = found["forward"] - seconds / repeats * 1000
    return found


def engine_step_ms(engine: Engine, count: int, tokens: int) -> float:
    """Return the median time between the tokens of a whole batch, engine thread and all."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    asked = [
        ChatRequest(r["messages"], Principal(r["tenant"], user=r["user"], session=r["session"]), sampling=sampling)
        for r in load(dynamic=False)[:count]
    ]
    results = engine.chat_batch(asked)
    return statistics.median(r.timings.decode_s / (tokens - 1) * 1000 for r in results)


def bandwidth_bytes_per_s() -> float:
    """Return how fast all threads together read memory that no cache holds."""
    source = torch.ones(64 * 2**20)
    return source.nbytes / (median_ms(source.sum, 9) / 1000)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--format", default="int8", help="pool format (int8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    command, machine = " ".join(["python", *sys.argv]), describe_machine()
    print(f"{command}\n{machine}")
    with contextlib.suppress(ImportError):  # numba; torch is profiled then
        readiness.compile_now()
    record: dict[str, Any] = {"command": command, "machine": machine, "batches": {}}
    for count in options.batch:
        config = EngineConfig(
            cache=CacheConfig(memory="1GiB", kv_format=options.format),
            scheduler=SchedulerConfig(max_num_seqs=count, max_new_seqs_per_step=count),
        )
        with Engine.from_pretrained(options.model, config=config) as engine:
            step_ms = engine_step_ms(engine, count, 24)
            engine.purge()
            chunks = prefill(engine, count)
            found = parts_ms(engine, chunks, options.repeats)
            described, spec = engine.describe(), engine._runner.spec
            weights = sum(p.nbytes for p in engine._loaded.model.parameters())
            rows = sum(chunk.start + 1 for chunk in chunks)
        bandwidth = bandwidth_bytes_per_s()
        bound_ms = {
            "weights alone": weights / bandwidth * 1000,
            "rows alone": rows * spec.bytes_per_token / bandwidth * 1000,
        }
        print(f"\nbatch {count}, {rows} rows in all; {described}")
        for name, value in {"engine, per token": step_ms, **found, **bound_ms}.items():
            print(f"  {name:22} {value:8.2f} ms")
        print(f"  {'plain read':22} {bandwidth / 1e9:8.0f} GB/s")
        record["batches"][count] = {"engine_ms": step_ms, "parts_ms": found, "bound_ms": bound_ms, "engine": described}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "profile_step.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
