"""Where does the time of a decode step go?

Claim: a decode step is bound by the bytes it must read: weights once, and the rows of K and V that each sequence sees.

The first requests of the static load are prefilled; then decode steps of the whole batch are timed, and beside them
each part alone on the same shapes: linear layers, language-model head, attention, writing rows, everything else on the
host. The last line says how long the bytes alone would take at the bandwidth of a plain copy in the same process.

Run: python bench/profile_step.py --batch 1 8 16        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
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
        prompt, scopes = engine.builder.chat_prompt(request["messages"], who, None, None)
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
    """Time the whole forward and its parts alone."""
    runner = engine._runner
    size, device = runner.spec.block_size, runner.storage.device
    batch = ForwardBatch.build(chunks, block_size=size, num_blocks=runner.num_blocks, device=device)
    found = {
        "forward": median_ms(lambda: runner.execute(chunks), repeats),
        "batch planning": median_ms(
            lambda: ForwardBatch.build(chunks, block_size=size, num_blocks=runner.num_blocks, device=device), repeats
        ),
    }
    fused = runner._fused
    if fused is None:
        return found
    tokens = len(chunks)
    dtype = runner.storage.dtype
    inputs = {
        name: torch.randn(tokens, getattr(fused._layers[0], name).weight.shape[1]).to(dtype)
        for name in ("qkv", "out", "gate_up", "down")
    }

    def linears() -> None:
        for layer in fused._layers:
            for name, x in inputs.items():
                getattr(layer, name)(x)

    spec = runner.spec.layers[0]
    q = torch.randn(tokens, runner._shape.num_heads[0], spec.key_dim).to(dtype)
    rows = torch.randn(tokens, spec.num_kv_heads, spec.key_dim).to(dtype)

    def attention() -> None:
        for index in range(len(runner.spec.layers)):
            runner._backend.forward(
                index,
                q,
                runner.storage,
                batch.attention,
                scaling=0.125,
                window=None,
                softcap=None,
                sinks=None,
            )

    def writing() -> None:
        for index in range(len(runner.spec.layers)):
            runner.storage.write(index, batch.attention.slot_mapping, rows, rows)

    head = fused._head.weight
    with torch.inference_mode():
        found["linears"] = median_ms(linears, repeats)
        found["head"] = median_ms(lambda: torch.nn.functional.linear(inputs["qkv"], head), repeats)
        found["attention"] = median_ms(attention, repeats)
        found["writing rows"] = median_ms(writing, repeats)
    known = ("batch planning", "linears", "head", "attention", "writing rows")
    found["norms, RoPE, host"] = found["forward"] - sum(found[name] for name in known)
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
    """Return what a plain copy reads and writes per second."""
    source = torch.ones(64 * 2**20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source), 5) / 1000)


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
        bound_ms = (weights + rows * spec.bytes_per_token) / bandwidth * 1000
        print(f"\nbatch {count}, {rows} rows in all; {described}")
        for name, value in {"engine, per token": step_ms, **found}.items():
            print(f"  {name:20} {value:8.2f} ms")
        print(f"  {'bytes alone':20} {bound_ms:8.2f} ms  at {bandwidth / 1e9:.0f} GB/s of a plain copy")
        record["batches"][count] = {"engine_ms": step_ms, "parts_ms": found, "bound_ms": bound_ms, "engine": described}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "profile_step.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
