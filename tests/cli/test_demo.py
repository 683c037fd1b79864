"""The demo: what it computes, what it shows, how it ends."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
from collections import Counter
from itertools import pairwise

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, SamplingParams, errors
from prefixkv.cli import main
from prefixkv.cli.conversations import Progress, TurnRow, first_of_tenant, hold_conversations
from prefixkv.cli.demo import ProgressLine, format_table
from prefixkv.cli.scenario import CONVERSATIONS, Conversation
from tests.support import byte_tokenizer, tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tiny_engine() -> Engine:
    """A tiny model, for what does not depend on which model it is."""
    config = EngineConfig(cache=CacheConfig(memory="16MiB", block_size=16), debug=True)
    return Engine(tiny_model("llama", max_position_embeddings=8192), byte_tokenizer(), config=config)


def row(tenant: str, user: str, turn: int, cached: int, ttft_s: float = 0.5) -> TurnRow:
    return TurnRow(tenant, user, turn, 100, cached, 100 - cached, 8, ttft_s, 10.0)


def test_the_script_is_three_tenants_two_users_three_turns() -> None:
    assert sorted(Counter(one.tenant for one in CONVERSATIONS).values()) == [2, 2, 2]
    assert len({one.user for one in CONVERSATIONS}) == 6
    assert {len(one.questions) for one in CONVERSATIONS} == {3}
    assert len({(one.tenant, one.system) for one in CONVERSATIONS}) == 3


def test_warm_turns_compute_only_what_is_new(loaded_demo: None) -> None:
    """What the demo claims, on the model it uses: the first tenant computes, the colleague shares, turns go on."""
    with Engine.from_pretrained("demo", config=EngineConfig(cache=CacheConfig(memory="128MiB"))) as engine:
        rows = hold_conversations(engine, CONVERSATIONS, GREEDY)
        engine.check()
    assert [(r.tenant, r.user, r.turn) for r in rows] == [
        (c.tenant, c.user, t) for c in CONVERSATIONS for t in (1, 2, 3)
    ]
    assert all(r.cached_tokens + r.computed_tokens == r.prompt_tokens for r in rows)
    firsts = [r for r in rows if r.turn == 1]
    for first in first_of_tenant(rows):
        assert first.cached_tokens == 0, "tenants share nothing"
        colleague = next(r for r in firsts if r.tenant == first.tenant and r.user != first.user)
        assert colleague.computed_tokens < 40, "the colleague's own words and the reply's header"
    whole = 0
    for before, after in pairwise(rows):
        if after.turn == 1:
            continue
        assert after.cached_tokens >= before.prompt_tokens - 1, "the last prompt is reused"
        # The last token of a reply has no row yet. A reply may also encode to other ids than were generated.
        assert after.cached_tokens <= before.prompt_tokens + before.completion_tokens - 1
        whole += after.cached_tokens == before.prompt_tokens + before.completion_tokens - 1
    assert whole >= 10, "nearly every reply is reused whole"


def test_conversations_run_at_the_same_time(tiny_engine: Engine) -> None:
    running = []
    lock = threading.Lock()

    def report(progress: Progress) -> None:
        with lock:
            running.append(tiny_engine.stats().running)

    with tiny_engine:
        hold_conversations(tiny_engine, CONVERSATIONS, GREEDY, report)
    assert max(running) == len(CONVERSATIONS)


def test_progress_counts_every_turn_and_token_once(tiny_engine: Engine) -> None:
    seen: list[Progress] = []
    with tiny_engine:
        rows = hold_conversations(tiny_engine, CONVERSATIONS, GREEDY, seen.append)
    assert [now.tokens for now in seen] == sorted(now.tokens for now in seen)
    last = seen[-1]
    assert last.turns == last.total_turns == len(rows) == 18
    assert last.tokens == sum(r.completion_tokens for r in rows)
    assert last.cached_tokens == sum(r.cached_tokens for r in rows)


def test_one_bad_conversation_ends_all_with_its_error(tiny_engine: Engine) -> None:
    bad = Conversation("other", "zoe", "system", ("\ud800",))
    with tiny_engine, pytest.raises(errors.InvalidRequest):
        hold_conversations(tiny_engine, [*CONVERSATIONS, bad], SamplingParams(max_tokens=200, temperature=0))


def test_an_interrupt_stops_every_conversation(tiny_engine: Engine) -> None:
    interrupted = threading.Event()

    def interrupt_once(progress: Progress) -> None:
        if not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)

    with tiny_engine:
        with pytest.raises(KeyboardInterrupt):
            hold_conversations(
                tiny_engine, CONVERSATIONS, SamplingParams(max_tokens=900, temperature=0), interrupt_once
            )
        stats = tiny_engine.stats()
        assert stats.running == stats.waiting == 0
        assert stats.requests < 18
        tiny_engine.check()


def test_cold_is_the_first_request_of_a_tenant_that_found_least() -> None:
    rows = [row("a", "x", 1, 60), row("a", "x", 2, 90), row("a", "y", 1, 0), row("b", "z", 1, 0), row("b", "z", 2, 0)]
    assert [(r.tenant, r.user) for r in first_of_tenant(rows)] == [("a", "y"), ("b", "z")]


def test_the_table_is_aligned() -> None:
    lines = format_table([row("a-long-name", "x", 1, 0, 12.3456), row("b", "y", 10, 90)]).splitlines()
    assert lines[0].split()[:3] == ["tenant", "user", "turn"]
    assert len({len(line) for line in lines}) == 1
    assert "12346 ms" in lines[2]


def test_a_terminal_gets_one_line_rewritten() -> None:
    out = _Terminal()
    line = ProgressLine(out, every_s=0)
    for turns in range(3):
        line.show(Progress(turns, 2, 10 * turns, 100, 50))
    line.finish()
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r") == 3
    assert "2 of 2 turns, 20 tokens generated, 50% of prompts cached" in out.getvalue()


def test_the_last_progress_fits_on_a_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, the line would lose the figure that the demo is about."""
    monkeypatch.setenv("COLUMNS", "80")
    out = _Terminal()
    ProgressLine(out).show(Progress(18, 18, 99_999, 100, 100))
    assert out.getvalue().rstrip().endswith("100% of prompts cached")


def test_a_pipe_gets_a_plain_line_now_and_then() -> None:
    out = io.StringIO()
    line = ProgressLine(out, every_turns=2)
    for turns in (0, 0, 1, 2, 2, 3, 4, 5):
        line.show(Progress(turns, 5, 0, 0, 0))
    line.finish()
    assert "\r" not in out.getvalue()
    assert re.findall(r"(\d+) of 5 turns", out.getvalue()) == ["2", "4", "5"]


def test_the_command_prints_loading_progress_table_and_summary(
    loaded_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--max-tokens", "3", "--pool", "128MiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ready in \d+\.\d s: demo", out, re.MULTILINE)
    assert re.search(r"18 of 18 turns", out)
    table = re.findall(r"^(\w+-\w+) +(\w+) +([123]) +(\d+) +(\d+) +(\d+) ", out, re.MULTILINE)
    assert len(table) == 18
    prompt, cached = (sum(int(cells[column]) for cells in table) for column in (3, 4))
    assert f"{cached / prompt:.1%}: {cached} of {prompt} prompt tokens" in out
    for word in ("cold ", "warm ", "blocks ", "check()"):
        assert re.search(f"^{re.escape(word)}", out, re.MULTILINE)


def test_ctrl_c_ends_the_command_with_130(
    loaded_demo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProgressLine, "show", lambda self, progress: os.kill(os.getpid(), signal.SIGINT))
    assert main(["demo", "--max-tokens", "200"]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err
    assert "Traceback" not in out + err
