"""``prefixkv demo``: three tenants, two users each, three turns each, all at once."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from prefixkv.cli.loading import add_model_arguments, load_engine
from prefixkv.cli.scenario import CONVERSATIONS
from prefixkv.config import SamplingParams

if TYPE_CHECKING:
    from prefixkv.cli.conversations import Progress, TurnRow
    from prefixkv.measure.metrics import EngineStats

__all__ = ["ProgressLine", "add_arguments", "format_summary", "format_table", "run"]

_HEADERS = ("tenant", "user", "turn", "prompt", "cached", "computed", "first token", "tokens/s")
_TEXT_COLUMNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="longest reply (24)")


def run(options: argparse.Namespace) -> int:
    """Hold the conversations, print the table and the summary; 0 if every invariant holds at the end."""
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0)
    with load_engine(options, lambda line: print(line, flush=True)) as engine:
        from prefixkv.cli.conversations import hold_conversations

        tenants = len({one.tenant for one in CONVERSATIONS})
        print(f"\n{len(CONVERSATIONS)} users of {tenants} tenants talk at the same time", flush=True)
        started = time.monotonic()
        line = ProgressLine(sys.stdout)
        try:
            rows = hold_conversations(engine, CONVERSATIONS, sampling, line.show)
        finally:
            line.finish()
        elapsed_s = time.monotonic() - started
        print("\n" + format_table(rows))
        stats = engine.stats()
        engine.check()
        print("\n" + format_summary(rows, stats, elapsed_s))
        print("check()     every invariant of the cache holds")
    return 0


class ProgressLine:
    """Shows progress: one line that is rewritten on a terminal, a line every few turns elsewhere.

    Args:
        out: Where to.
        every_turns: Away from a terminal, how many turns lie between two lines.
        every_s: On a terminal, seconds between two rewrites.
    """

    def __init__(self, out: TextIO, every_turns: int = 3, every_s: float = 0.1) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._every_turns = every_turns
        self._every_s = every_s
        self._started = time.monotonic()
        self._shown_s = -1.0
        self._shown_turns = 0

    def show(self, progress: Progress) -> None:
        """Show it if it is time to; the last turn is always shown."""
        now = time.monotonic()
        is_last = progress.turns == progress.total_turns
        if self._is_terminal:
            is_due = is_last or now - self._shown_s >= self._every_s
        else:
            is_due = progress.turns != self._shown_turns and (is_last or progress.turns % self._every_turns == 0)
        if not is_due:
            return
        self._shown_s, self._shown_turns = now, progress.turns
        share = progress.cached_tokens / progress.prompt_tokens if progress.prompt_tokens else 0.0
        text = (
            f"{now - self._started:5.1f} s  {progress.turns:2} of {progress.total_turns} turns, "
            f"{progress.tokens} tokens generated, {share:.0%} of prompts cached"
        )
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="", file=self._out, flush=True)
        else:
            print(text, file=self._out, flush=True)

    def finish(self) -> None:
        """Leave the line."""
        if self._is_terminal and self._shown_s >= 0:
            print(file=self._out, flush=True)


def format_table(rows: Sequence[TurnRow]) -> str:
    """Return the rows as an aligned table."""
    cells: list[Sequence[str]] = [_HEADERS]
    for row in rows:
        numbers = (row.turn, row.prompt_tokens, row.cached_tokens, row.computed_tokens)
        cells.append((row.tenant, row.user, *map(str, numbers), _milliseconds(row.ttft_s), f"{row.tokens_per_s:.1f}"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADERS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < _TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def format_summary(rows: Sequence[TurnRow], stats: EngineStats, elapsed_s: float) -> str:
    """Return what the table adds up to, in a few lines."""
    from prefixkv.cli.conversations import first_of_tenant

    cold = first_of_tenant(rows)
    warm = [row for row in rows if row.turn > 1]
    lines = [
        f"hit rate    {stats.hit_rate:.1%}: {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were cached",
        f"cold        {_milliseconds(_median_ttft_s(cold))} to first token (median of {len(cold)}: "
        "each tenant's first request, all at the same time)",
        f"warm        {_milliseconds(_median_ttft_s(warm))} to first token (median of {len(warm)}: turns 2 and later), "
        f"{statistics.mean(row.computed_tokens for row in warm):.0f} of "
        f"{statistics.mean(row.prompt_tokens for row in warm):.0f} tokens computed on average",
        f"blocks      {stats.blocks} of {stats.blocks_total} used, {stats.blocks * stats.block_bytes / 2**20:.1f} MiB",
        f"time        {elapsed_s:.1f} s for {stats.completion_tokens} tokens in {stats.steps} steps",
    ]
    return "\n".join(lines)


def _median_ttft_s(rows: Sequence[TurnRow]) -> float:
    return statistics.median(row.ttft_s for row in rows)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
