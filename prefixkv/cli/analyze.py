"""``prefixkv analyze``: how much of your own traffic repeats, before you adopt anything."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from prefixkv.errors import ConfigError
from prefixkv.policy import PolicySet

if TYPE_CHECKING:
    from prefixkv.measure.findings import Findings
    from prefixkv.measure.trace import TraceRequest

__all__ = ["add_arguments", "format_advice", "format_tenants", "format_ways", "run"]

_PROGRESS_EVERY_S = 5.0
# A tenant may have any name, and a terminal would obey an escape sequence in it.
_PRINTABLE = {code: None for code in (*range(32), *range(127, 160))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    parser.add_argument(
        "requests",
        metavar="FILE",
        help='JSON lines: {"messages": [...]}, also "tools", "tenant", "user", "session", "slots", "timestamp"; '
        "a line that ends with an assistant turn is a conversation, one request per reply",
    )
    parser.add_argument(
        "--model", default="demo", help='whose tokenizer: "demo", a .gguf file, a folder or a hub id (default: demo)'
    )
    parser.add_argument("--policies", metavar="FILE", help="policies to compare with the default policy")
    parser.add_argument("--conversations", action="store_true", help="take every line for a conversation")
    parser.add_argument("--interleave", type=int, metavar="N", help="hold N conversations at once, in turns")
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests")
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per block of block-chain caching (16)"
    )
    parser.add_argument(
        "--blocks", type=int, metavar="N", help="pool of N blocks of 32 tokens (default: enough for all)"
    )
    parser.add_argument("--html", metavar="OUT", help="write a report with plots, one file that loads nothing")
    parser.add_argument("--json", metavar="OUT", help="write the figures")


def run(options: argparse.Namespace) -> int:
    """Replay the requests, print what was found and write what is asked for; returns 0."""
    _check(options)
    policies = None if options.policies is None else PolicySet.load(options.policies)
    from prefixkv.measure.trace import count_lone

    started = time.monotonic()
    requests = _requests(options)
    _say(f"{len(requests)} requests read ({time.monotonic() - started:.1f} s)")
    findings = _replay(requests, options, policies)
    if lone := count_lone(requests):
        findings.notes.append(
            f"{lone} requests hold earlier replies, but nothing else was sent in their session: name the session of "
            "each line, or use --conversations if a line is a whole conversation"
        )
    main = findings.totals[findings.main]
    if not main.requests:
        first = next(iter(findings.first_refusals.values()))
        raise ConfigError(f"{first.where}: none of the requests can be served; the first: {first.hint} [{first.code}]")
    from prefixkv.measure.findings import suggest_policy

    policy = suggest_policy(findings)
    left_out = findings.refusals.total()
    print(
        f"{findings.requests} requests of {len(findings.tenants)} tenants" + (f", {left_out} left out" * bool(left_out))
    )
    print(f"\n{format_ways(findings)}\n\n{format_tenants(findings)}\n\n{format_advice(findings)}")
    print(f"\nsuggested policy file:\n\n{policy}", end="", flush=True)
    if options.json is not None:
        _write("--json", options.json, json.dumps(findings.to_data(), indent=1) + "\n")
    if options.html is not None:
        from prefixkv.measure.report import render_html

        _write("--html", options.html, render_html(findings, Path(options.requests).name, policy))
    return 0


def format_ways(findings: Findings) -> str:
    """Return the hit rates of all ways as a table."""
    from prefixkv.measure.findings import LABELS

    rows: list[Sequence[str]] = [("what would have been cached", "prompt tokens", "cached", "hit rate")]
    for way, tally in findings.totals.items():
        rows.append((LABELS[way], str(tally.prompt_tokens), str(tally.cached_tokens), f"{tally.hit_rate:.1%}"))
    return _table(rows, 1)


def format_tenants(findings: Findings, most: int = 40) -> str:
    """Return the tenants with most tokens as a table, in the main way."""
    rows: list[Sequence[str]] = [("tenant", "main reason", "requests", "prompt tokens", "hit rate", "tokens lost")]
    tenants = sorted(findings.tenants.items(), key=lambda item: -item[1].ways[findings.main].prompt_tokens)
    for name, tenant in tenants[:most]:
        tally = tenant.ways[findings.main]
        reason = next((code for code, _ in tenant.lost_tokens.most_common(1)), "-")
        numbers = (
            str(tally.requests),
            str(tally.prompt_tokens),
            f"{tally.hit_rate:.1%}",
            str(_lost(tenant.lost_tokens)),
        )
        rows.append((name.translate(_PRINTABLE), reason, *numbers))
    hidden = len(tenants) - most
    return _table(rows, 2) + (f"\nand {hidden} more tenants" if hidden > 0 else "")


def format_advice(findings: Findings) -> str:
    """Return what to do, one line each."""
    lines = [f"- {line.translate(_PRINTABLE)}" for line in findings.advice()]
    return "\n".join(lines or ["- nothing is lost before the current turn"])


def _check(options: argparse.Namespace) -> None:
    for name in ("interleave", "limit", "block_size", "blocks"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    for option, name in (("--json", options.json), ("--html", options.html)):
        if name is not None and (Path(name).expanduser().is_dir() or not Path(name).expanduser().parent.is_dir()):
            raise ConfigError(f"{option} {name}: there is no such folder, or it is one; give a file to write")


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    from prefixkv.measure.trace import interleave, read_trace

    requests = read_trace(Path(options.requests).expanduser(), conversations=options.conversations)
    if options.interleave is not None:
        requests = interleave(requests, options.interleave)
    return requests[: options.limit]


def _replay(requests: Sequence[TraceRequest], options: argparse.Namespace, policies: PolicySet | None) -> Findings:
    """Replay with the model's tokenizer; the slow imports come after a wrong option or line has been refused."""
    _say(f"loading the tokenizer of {options.model}")
    from prefixkv.chat.segmenter import Segmenter
    from prefixkv.measure.findings import Findings
    from prefixkv.measure.simulate import Simulator
    from prefixkv.model.load import load_tokenizer

    segmenter = Segmenter(load_tokenizer(options.model))
    simulator = Simulator(segmenter, policies, chain_block_size=options.block_size, pool_blocks=options.blocks)
    findings = Findings(simulator.ways)
    progress = _Progress(sys.stderr, len(requests))
    for request in requests:
        findings.add(simulator.ask(request))
        progress.show(findings)
    if evicted := simulator.caches[findings.main].manager.num_evicted:
        findings.notes.append(f"the pool was full: {evicted} blocks were evicted")
    return findings


class _Progress:
    """Says every few seconds how far it is."""

    def __init__(self, out: TextIO, num_requests: int) -> None:
        self._out = out
        self._num_requests = num_requests
        self._shown_s = time.monotonic()

    def show(self, findings: Findings) -> None:
        now = time.monotonic()
        if now - self._shown_s >= _PROGRESS_EVERY_S:
            self._shown_s = now
            tally = findings.totals[findings.main]
            done = f"{findings.requests} of {self._num_requests} requests"
            print(f"{done}, {tally.hit_rate:.1%} of {tally.prompt_tokens} tokens cached", file=self._out, flush=True)


def _lost(lost_tokens: dict[str, int]) -> int:
    return sum(lost_tokens.values())


def _table(rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """Return rows as aligned columns under a line: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _write(option: str, name: str, text: str) -> None:
    try:
        Path(name).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name}: cannot be written ({error.strerror})") from None
    _say(f"wrote {name}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
