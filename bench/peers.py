"""How does this engine compare with others on the same weights, the same load and the same machine?

Claim: on a CPU, chat traffic that shares its prompts is answered sooner and faster than by the engines people use now.

Every engine runs in a process of its own, under a Python of its own if it needs one, and they take turns: a few
requests each, so that what slows the machine slows all. Each turn begins with a request that does not count. An engine
that is not installed is left out, with a line.

Measured, always from outside the engine, tokenising included, greedy:

* first_token_*: one request at a time, one token each. ``static`` repeats each tenant's system prompt; in ``dynamic`` a
  clock stands on its first line. Ours then gets the clock behind the system prompt (``late_bound`` of the load); what
  the others make of that prompt is measured as well, as dynamic_late.
* batch: all requests at once, 32 tokens each.
* decode_N: milliseconds per step of the first N requests of the static load: 33 tokens minus 1 token, over 32.
* prefill: a prompt of about 1,150 tokens that nothing shares.
* start: from the start of the process to a first token; each was started once before.

Run: python bench/peers.py MODEL_FOLDER --openvino PYTHON OV_FOLDER --vllm PYTHON
     on an otherwise idle machine; MODEL_FOLDER holds the weights for transformers and vLLM ("demo" is written there
     first if it is empty), OV_FOLDER what `optimum-cli export openvino --weight-format fp16` makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results"
KV_GIB = 1

# ---------------------------------------------------------------- the engines, each in a process of its own


def chatml(messages: list[dict[str, str]]) -> str:
    """Return the prompt that the demo model's template makes."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


Generate = Callable[[list[dict[str, Any]], int], None]


def prefixkv_engine(model: str, options: dict[str, Any]) -> Generate:
    """Messages through the segmenter, tenants and users apart."""
    sys.path.insert(0, str(HERE.parent.parent))
    from prefixkv import (
        CacheConfig,
        ChatRequest,
        Engine,
        EngineConfig,
        Principal,
        SamplingParams,
        SchedulerConfig,
    )

    cache = CacheConfig(memory=f"{KV_GIB}GiB", kv_format=options["format"])
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=cache, scheduler=SchedulerConfig()))
    print(engine.describe(), file=sys.stderr)

    def generate(requests: list[dict[str, Any]], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        results = engine.chat_batch(
            [
                ChatRequest(
                    r["messages"], Principal(r["tenant"], user=r["user"], session=r["session"]), sampling=sampling
                )
                for r in requests
            ]
        )
        assert all(r.usage.completion_tokens == tokens for r in results)

    return generate


def openvino_engine(model: str, options: dict[str, Any]) -> Generate:
    """OpenVINO GenAI's continuous batching with prefix caching; precision of the cache as it chooses."""
    import openvino_genai as ov

    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.enable_prefix_caching = True
    pipeline = ov.ContinuousBatchingPipeline(model, scheduler, "CPU")

    def generate(requests: list[dict[str, Any]], tokens: int) -> None:
        config = ov.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False)
        results = pipeline.generate([chatml(r["messages"]) for r in requests], [config] * len(requests))
        assert len(results) == len(requests)

    return generate


def vllm_engine(model: str, options: dict[str, Any]) -> Generate:
    """VLLM on the CPU with prefix caching."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=True)

    def generate(requests: list[dict[str, Any]], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        results = engine.generate([chatml(r["messages"]) for r in requests], sampling, use_tqdm=False)
        assert all(len(r.outputs[0].token_ids) == tokens for r in results)

    return generate


def transformers_engine(model: str, options: dict[str, Any]) -> Generate:
    """``model.generate``, padded to the left; it reuses nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def generate(requests: list[dict[str, Any]], tokens: int) -> None:
        inputs = tokenizer([chatml(r["messages"]) for r in requests], return_tensors="pt", padding=True)
        with torch.inference_mode():
            loaded.generate(
                **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip

    return generate


ENGINES = {
    "prefixkv": prefixkv_engine,
    "openvino": openvino_engine,
    "vllm": vllm_engine,
    "transformers": transformers_engine,
}


def serve(name: str, model: str, options: dict[str, Any]) -> None:
    """Answer lines of JSON on standard input: requests and tokens in, seconds out."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is not a reply
    generate = ENGINES[name](model, options)
    generate([{"tenant": "warm", "user": "u", "session": "s", "messages": [{"role": "user", "content": "Hi"}]}], 1)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        generate(asked["requests"], asked["tokens"])
        print(json.dumps(time.perf_counter() - started), file=replies, flush=True)


class Peer:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, model: str, options: dict[str, Any]) -> None:
        """Start it; :meth:`wait` for it."""
        self.name = name
        self._command = [python, str(HERE), "--serve", name, model, json.dumps(options)]
        self._log = (RESULTS / f"peer-{name}.log").open("w")
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def wait(self) -> float | None:
        """Return the seconds from its start to its first token, or None if it failed."""
        return time.perf_counter() - self._started if self._reply() == "ready" else None

    def wake(self, requests: list[dict[str, Any]]) -> None:
        """Let it answer something that does not count: while others had their turn its memory has gone cold."""
        self.run(requests, 1)

    def run(self, requests: list[dict[str, Any]], tokens: int) -> float:
        """Return the seconds that some requests took together."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"requests": requests, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        seconds = self._reply()
        if not isinstance(seconds, float):
            raise SystemExit(f"{self.name} ended in the middle; see {self._log.name}")
        return seconds

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------- what is measured


def in_turns(peers: list[Peer], requests: dict[str, list[dict[str, Any]]], at_once: int = 8) -> dict[str, list[float]]:
    """Let the engines answer their requests one at a time, ``at_once`` each before the next engine's turn."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for first in range(0, max(len(some) for some in requests.values()), at_once):
        for peer in peers:
            peer.wake([unique_prompt(first, words=20)])
            for request in requests[peer.name][first : first + at_once]:
                seconds[peer.name].append(peer.run([request], 1))
    return seconds


def late(load: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the load with the clock behind the system prompt."""
    return [{**request, "messages": request["late_bound"]} for request in load]


def renamed(load: list[dict[str, Any]], run: int) -> list[dict[str, Any]]:
    """Return the load as other tenants would send it, so that nothing of an earlier run is found."""
    return [
        {
            **request,
            "tenant": f"{request['tenant']}-{run}",
            "messages": [
                {**m, "content": f"[{run}] {m['content']}"} if i == 0 else m for i, m in enumerate(request["messages"])
            ],
        }
        for request in load
    ]


def unique_prompt(seed: int, words: int = 560) -> dict[str, Any]:
    """Return a request that shares nothing with any other; 560 words are about 1,150 tokens."""
    from chat_load import load

    pool = load(dynamic=False)[0]["messages"][0]["content"].split()
    rng = random.Random(seed)
    text = " ".join([str(seed), *(rng.choice(pool) for _ in range(words))])
    return {"tenant": f"u{seed}", "user": "u", "session": "s", "messages": [{"role": "user", "content": text}]}


def measure(peers: list[Peer], rounds: int, note: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """Return per figure and engine every single measurement, in seconds."""
    from chat_load import load

    static, dynamic = load(dynamic=False), load(dynamic=True)
    found: dict[str, dict[str, list[float]]] = {}

    def keep(figure: str, values: dict[str, list[float]]) -> None:
        found[figure] = values
        note(figure + ": " + ", ".join(f"{k} {statistics.median(v) * 1000:.1f} ms" for k, v in values.items()))

    reusing = [peer for peer in peers if peer.name != "transformers"]  # it would take minutes, having no reuse
    keep("first_token_static", in_turns(reusing, {p.name: static for p in reusing}))
    ours = {p.name: late(dynamic) if p.name == "prefixkv" else dynamic for p in reusing}
    keep("first_token_dynamic", in_turns(reusing, ours))
    keep("first_token_dynamic_late", in_turns(reusing, {p.name: renamed(late(dynamic), 0) for p in reusing}))
    prefills: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(rounds + 1):
        for number, peer in enumerate(peers):
            peer.wake([unique_prompt(turn, words=20)])
            seconds = peer.run([unique_prompt(1000 * turn + number)], 1)
            if turn:
                prefills[peer.name].append(seconds)
    keep("prefill", prefills)
    for count in (1, 8, 16):
        able = peers if count == 1 else reusing
        steps: dict[str, list[float]] = {peer.name: [] for peer in able}
        for turn in range(rounds + 1):
            for peer in able:
                peer.wake(static[:count])
                one, many = (peer.run(static[:count], tokens) for tokens in (1, 33))
                if turn:
                    steps[peer.name].append((many - one) / 32)
        keep(f"decode_{count}", steps)
    batches: dict[str, list[float]] = {peer.name: [] for peer in reusing}
    for turn in range(2):
        for peer in reusing:
            peer.wake([unique_prompt(turn, words=20)])
            batches[peer.name].append(peer.run(renamed(static, turn + 1), 32))
    keep("batch", batches)
    return found


FIGURES = {
    "first_token_static": ("time to first token, prompts that share a system prompt", "ms"),
    "first_token_dynamic": ("the same, a clock on the first line; ours late-bound", "ms"),
    "first_token_dynamic_late": ("the same, the clock late-bound for all", "ms"),
    "prefill": ("a prompt of about 1,150 new tokens", "ms"),
    "decode_1": ("decode step, 1 sequence of about 1,000 tokens", "ms"),
    "decode_8": ("decode step, 8 sequences", "ms"),
    "decode_16": ("decode step, 16 sequences", "ms"),
    "batch": ("96 requests at once, 32 tokens each", "s"),
    "start": ("process start to first token", "s"),
}


def write_readme(record: dict[str, Any]) -> None:
    """Put the table between the marks in the README, and the plot beside this file."""
    medians = record["median"]
    names = sorted({name for values in medians.values() for name in values}, key=list(ENGINES).index)
    machine = record["machine"]
    lines = [
        "## How fast",
        "",
        f"Written by `{record['command']}` on {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{record['date']}: medians, SmolLM2-135M-Instruct in bfloat16, our pool `{record['format']}`. Engines took "
        "turns on the same requests, each in a process of its own. The last column is ours over the best other.",
        "",
        f"| | {' | '.join(names)} | ratio |",
        f"| --- |{' ---: |' * (len(names) + 1)}",
    ]
    for figure, (label, unit) in FIGURES.items():
        values = medians.get(figure, {})
        scale = 1000 if unit == "ms" else 1
        cells = [f"{values[name] * scale:.1f} {unit}" if name in values else "" for name in names]
        others = [value for name, value in values.items() if name != "prefixkv"]
        ratio = f"{values['prefixkv'] / min(others):.2f}" if others else ""
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio} |")
    lines += ["", "![The same figures as bars](bench/peers.svg)"]
    readme = HERE.parent.parent / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split(MARK, 1)
    tail = rest.split(END_MARK, 1)[1]
    readme.write_text(f"{head}{MARK}\n" + "\n".join(lines) + f"\n{END_MARK}{tail}", encoding="utf-8")
    plot(medians, names, HERE.parent / "peers.svg")


MARK, END_MARK = "<!-- peers: written by bench/peers.py -->", "<!-- /peers -->"


def plot(medians: dict[str, dict[str, float]], names: list[str], path: Path) -> None:
    """Draw each figure as bars, relative to ours."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figures = [figure for figure in FIGURES if len(medians.get(figure, {})) > 1]
    chart, axes = pyplot.subplots(figsize=(8, 0.9 * len(figures) + 1))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        shown = [(y, medians[f][name] / medians[f]["prefixkv"]) for y, f in enumerate(figures) if name in medians[f]]
        axes.barh([y + i * height for y, _ in shown], [x for _, x in shown], height, label=name)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(figures))], [FIGURES[f][0] for f in figures], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("time, as a multiple of prefixkv's (less is better)")
    axes.legend(fontsize=8)
    chart.tight_layout()
    chart.savefig(path, metadata={"Date": None})


def start_seconds(name: str, python: str, model: str, options: dict[str, Any]) -> float | None:
    """Start an engine, wait for its first token, end it."""
    peer = Peer(name, python, model, options)
    try:
        return peer.wait()
    finally:
        peer.close()


def command_of(options: argparse.Namespace) -> str:
    """Return the command without the paths of this machine."""
    peers = (" --openvino PYTHON OV_FOLDER" if options.openvino else "") + (" --vllm PYTHON" if options.vllm else "")
    return f"python bench/peers.py MODEL_FOLDER{peers} --rounds {options.rounds} --starts {options.starts} --readme"


def write_demo(folder: Path) -> None:
    """Write the demo model for engines that load a folder."""
    sys.path.insert(0, str(HERE.parent.parent))
    from prefixkv.model.load import load

    loaded = load("demo")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=RESULTS / "demo-model", help="folder of the weights")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "FOLDER"), help="its Python and the exported model")
    parser.add_argument("--vllm", metavar="PYTHON", help="its Python")
    parser.add_argument("--format", default="int8", help="our pool's format (int8)")
    parser.add_argument("--readme", action="store_true", help="put the table in the README and draw the plot")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure that is repeated (5)")
    parser.add_argument("--starts", type=int, default=3, help="process starts of each engine (3)")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not (options.model / "config.json").exists():
        write_demo(options.model)
    from prefix_reuse import describe_machine

    setups = {"prefixkv": (sys.executable, str(options.model)), "transformers": (sys.executable, str(options.model))}
    if options.openvino:
        setups["openvino"] = (options.openvino[0], options.openvino[1])
    if options.vllm:
        setups["vllm"] = (options.vllm, str(options.model))
    own = {"format": options.format}
    peers, starts = [], {}
    for name in ENGINES:
        if name not in setups:
            print(f"{name}: left out, no Python was named for it")
            continue
        if start_seconds(name, *setups[name], own) is None:  # also compiles what it keeps on disk
            print(f"{name}: left out, it does not start; see {RESULTS / f'peer-{name}.log'}")
            continue
        starts[name] = [start_seconds(name, *setups[name], own) for _ in range(options.starts)]
        print(f"{name}: started in {statistics.median(starts[name]):.1f} s", flush=True)
        peers.append(name)
    running = [Peer(name, *setups[name], own) for name in peers]
    for peer in running:
        peer.wait()
    try:
        found = measure(running, options.rounds, lambda line: print(line, flush=True))
    finally:
        for peer in running:
            peer.close()
    found["start"] = {name: [s for s in seconds if s is not None] for name, seconds in starts.items()}
    record = {
        "command": command_of(options),
        "machine": describe_machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "format": options.format,
        "seconds": found,
        "median": {figure: {k: statistics.median(v) for k, v in values.items()} for figure, values in found.items()},
    }
    path = RESULTS / "peers.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    if options.readme:
        write_readme(record)


if __name__ == "__main__":
    main()
