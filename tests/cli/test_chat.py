"""The terminal chat, over a tiny model; its words mean nothing, its accounts must be right."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams
from prefixkv.cli import chat as chat_command
from prefixkv.cli import main
from prefixkv.cli.chat import Chat
from tests.support import byte_tokenizer, tiny_model

COSTS = re.compile(r"prompt (\d+)  cached (\d+)  computed (\d+) tokens  first token \d+ ms  \d+\.\d tokens/s")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Checks itself whenever it is idle, and would close on a failure; the command closes it."""
    config = EngineConfig(cache=CacheConfig(memory="8MiB", block_size=16), debug=True)
    with Engine(tiny_model("llama"), byte_tokenizer(), config=config) as engine:
        yield engine


@pytest.fixture
def talk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Feed lines to the command through a pipe and return its exit code and output."""
    monkeypatch.setattr(chat_command, "load_engine", lambda options, say: engine)

    def feed(text: str, *argv: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["chat", "--max-tokens", "8", "--temperature", "0", *argv])
        return code, capsys.readouterr().out

    return feed


def test_each_turn_shows_what_it_reused(talk: Callable[..., tuple[int, str]]) -> None:
    code, out = talk("hello\nand again\n", "--system", "Be brief.")
    assert code == 0, "the end of the input is the end of the chat"
    (first_prompt, first_cached, _), (_, cached, _) = [tuple(map(int, found)) for found in COSTS.findall(out)]
    assert first_cached == 0
    assert cached >= first_prompt - 1


def test_quit_stops_reading(talk: Callable[..., tuple[int, str]]) -> None:
    code, out = talk("hello\n/quit\nnever\n")
    assert (code, len(COSTS.findall(out))) == (0, 1)


def test_explain_shows_the_last_turn(talk: Callable[..., tuple[int, str]]) -> None:
    _, out = talk("/explain\nhello\n/explain\n", "--system", "Be brief.")
    before, after = out.split("prompt ", 1)
    assert "nothing has been asked" in before
    assert re.search(r"^segment +role +scope", after, re.MULTILINE)
    assert re.search(r"^system +system +tenant", after, re.MULTILINE)


def test_reset_begins_a_session_that_reuses_the_system_prompt_only(talk: Callable[..., tuple[int, str]]) -> None:
    _, out = talk("hello\n/reset\nhello\n/stats\n", "--system", "Be brief.")
    (prompt, cached_first, _), (prompt_again, cached, _) = [tuple(map(int, found)) for found in COSTS.findall(out)]
    assert prompt == prompt_again
    assert cached_first == 0 < cached < prompt - 8
    assert "new conversation" in out
    assert re.search(r"^requests +2$", out, re.MULTILINE)


def test_an_unknown_command_shows_the_commands(talk: Callable[..., tuple[int, str]]) -> None:
    _, out = talk("/what\n\n")
    assert "/explain" in out
    assert not COSTS.findall(out)


def test_a_refused_message_is_taken_back(talk: Callable[..., tuple[int, str]]) -> None:
    """Too long a message is answered with the reason; the conversation goes on as if it had not been said."""
    _, out = talk(f"hello\n{'x' * 5000}\nhello\n")
    assert "tokens" in out and "/reset" in out
    (first, _, _), (second, cached, _) = [tuple(map(int, found)) for found in COSTS.findall(out)]
    assert cached >= first - 1
    assert second < 5000


def test_ctrl_c_cancels_the_reply_and_keeps_the_chat(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = SamplingParams(max_tokens=900, temperature=0)
    chat = Chat(engine, Principal("t", user="u"), sampling, None, is_dim=False)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert chat.take("hello") is True
    timer.join()
    assert "(cancelled)" in capsys.readouterr().out
    assert engine.stats().aborted == 1
    chat._sampling = SamplingParams(max_tokens=4, temperature=0)
    assert chat.take("go on") is True
    prompt = int(COSTS.findall(capsys.readouterr().out)[0][0])
    asked = [{"role": "user", "content": text} for text in ("hello", "go on")]
    without_reply = engine.explain(asked, principal=Principal("t")).prompt_tokens
    assert prompt > without_reply, "what was said before the interrupt belongs to the conversation"


def test_a_reply_cannot_steer_the_terminal(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """A model can spell escape sequences; here it must: every token but ESC is forbidden."""
    escape = byte_tokenizer().encode("\x1b", add_special_tokens=False)
    sampling = SamplingParams(max_tokens=3, temperature=0, logit_bias={escape[0]: 100.0})
    assert "\x1b" in engine.chat([{"role": "user", "content": "x"}], principal=Principal("t"), sampling=sampling).text
    Chat(engine, Principal("t"), sampling, None, is_dim=False).take("x")
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_not_the_reply_is_dim_on_a_terminal(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    Chat(engine, Principal("t"), SamplingParams(max_tokens=2), None, is_dim=True).take("hello")
    assert re.search(r"\033\[2m\nprompt .*\033\[0m\n$", capsys.readouterr().out)
