"""What does it cost to know what a prompt is made of?

Claim: segmenting a prompt whose beginning was seen costs at most 3 ms for 5,000 tokens, and a new one at most a fifth
more than the tokenizer's own ``apply_chat_template``.

A conversation of about so many tokens is segmented as new (its tenant asked before, so the words of the template are
known), and again when all but its last turn was sent before. ``plain`` is questions and answers; ``tools`` is calls of
tools and their results. ``apply_chat_template`` takes turns with both in the same
run. Times are processor time of this process, so a busy machine does not count.

Run: python bench/segmenting.py --tokens 1500 5000 10000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from prefix_reuse import RESULTS, describe_machine

from prefixkv import Principal
from prefixkv.chat.recall import Past, Recall
from prefixkv.chat.segmenter import Segmenter
from prefixkv.model.load import load_tokenizer
from prefixkv.policy import TenantPolicy

POLICY = TenantPolicy()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()}.",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}, "day": {"type": "integer"}}},
        },
    }
    for name in ("find_order", "cancel_order")
]


def conversation(tokenizer: Any, tokens: int, kind: str) -> list[dict[str, Any]]:
    """Return a chat of at least so many tokens, no two turns alike; a third of it is the system text."""
    tools = TOOLS if kind == "tools" else None
    rule = "Rule {0}: an order of {1} pieces may be returned within {0} days, unless it was opened. "
    system = "You are the assistant of a shop. "
    number = 0
    while len(tokenizer.encode(system, add_special_tokens=False)) < tokens / 3:
        number += 1
        system += rule.format(number, number * 7919 % 1000)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system.strip()}]
    while True:
        number += 1
        if kind == "plain" or len(messages) == 1:
            messages.append({"role": "user", "content": f"My order {number * 7919} of day {number}: may I return it?"})
        if len(tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)) >= tokens:
            return messages
        if kind == "plain":
            answer = f"Order {number * 7919} came on day {number}. Rule {number % 40} applies to it, so you may. " * 4
            messages.append({"role": "assistant", "content": answer.strip()})
            continue
        call_id = f"call{number:05d}"
        function = {"name": TOOLS[number % 2]["function"]["name"], "arguments": {"order": str(number * 7919), "day": 3}}
        call = {"type": "function", "id": call_id, "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answer = f"Order {number * 7919} was sent on day {number} and came to town {number * 31 % 97}."
        messages.append({"role": "tool", "tool_call_id": call_id, "content": answer})


def interleaved_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median processor time of each call, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            started = time.process_time()
            call()
            if repeat >= 2:
                times[name].append((time.process_time() - started) * 1000)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(tokenizer: Any, segmenter: Segmenter, tokens: int, kind: str, repeats: int) -> dict[str, Any]:
    """Return tokens of the prompt and the times of one size."""
    messages, tools = conversation(tokenizer, tokens, kind), TOOLS if kind == "tools" else None
    who, recall = Principal("acme", user="ada", session="1"), Recall()
    shapes = recall.past(who).shapes
    before = segmenter.segment(messages[:-2], policy=POLICY, tools=tools, past=Past(shapes=shapes))
    recall.remember(who, before.origin.sent if before.origin else None, {})
    found = interleaved_ms(
        {
            "apply_chat_template": lambda: tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=True
            ),
            "new": lambda: segmenter.segment(messages, policy=POLICY, tools=tools, past=Past(shapes=shapes)),
            "seen": lambda: segmenter.segment(messages, policy=POLICY, tools=tools, past=recall.past(who)),
        },
        repeats,
    )
    prompt = segmenter.segment(messages, policy=POLICY, tools=tools, past=recall.past(who))
    return {"kind": kind, "tokens": len(prompt.token_ids), "messages": len(messages), **found}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose tokenizer (demo)")
    parser.add_argument("--template", type=Path, help="a .jinja file in place of its own")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1500, 5000, 10000])
    parser.add_argument("--kinds", nargs="+", choices=("plain", "tools"), default=["plain"], help="of chats (plain)")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(options.model)
    tokenizer.model_max_length = 10**9
    if options.template:
        tokenizer.chat_template = options.template.read_text(encoding="utf-8")
    segmenter = Segmenter(tokenizer)
    command, machine = " ".join(["python", *sys.argv]), describe_machine()
    print(f"{command}\n{machine}\n")
    print("kind   tokens  messages  apply_chat_template       new  ratio      seen")
    rows = []
    for kind, tokens in product(options.kinds, options.tokens):
        row = measure(tokenizer, segmenter, tokens, kind, options.repeats)
        ratio = row["new"] / row["apply_chat_template"]
        print(
            f"{kind}  {row['tokens']:6.0f}  {row['messages']:8.0f}  {row['apply_chat_template']:16.2f} ms"
            f"  {row['new']:5.2f} ms  {ratio:5.2f}  {row['seen']:5.2f} ms"
        )
        rows.append({**row, "ratio": ratio})
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "segmenting.json"
    path.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=2) + "\n", "utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
