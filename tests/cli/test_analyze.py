"""The analyze command: what it prints, writes and refuses, with a tokenizer that is read from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixkv.cli import main
from prefixkv.errors import ConfigError
from prefixkv.model import load
from prefixkv.policy import PolicySet
from tests.support import byte_tokenizer

SECRET = "hunter2"
BOT = "You are the bot of a shop. Be short, and kind to those who ask the same thing twice."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def line(*turns: str, system: str = BOT, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, **fields}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = [
        line("hello", "Good day.", "what is the time?", "Ten.", tenant="acme"),
        line("hello", "Good day.", f"my word is {SECRET}", "Good.", tenant="acme"),
        line("hello", tenant="<script>alert(1)</script>"),
        *(line("hello", system=f"It is {i} o'clock. {BOT}", tenant="globex", session=str(i)) for i in range(4)),
    ]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def test_it_prints_rates_tenants_advice_and_a_policy_file_that_loads(
    chats: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(chats), "--model", model]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("9 requests of 3 tenants\n")
    rates = {line[:30].strip(): line.split()[-1] for line in out.splitlines() if line.endswith("%")}
    assert len(rates) == 4
    assert rates["prefixkv, default policy"] != "0.0%"
    assert next(row for row in out.splitlines() if row.startswith("globex")).split()[1:3] == ["volatile_text", "4"]
    assert "- volatile_text: " in out
    policy = tmp_path / "p.yaml"
    policy.write_text(out.split("suggested policy file:\n")[1], encoding="utf-8")
    suggested = PolicySet.load(policy)
    assert set(suggested.tenants) == {"acme", "globex", "<script>alert(1)</script>"}
    assert suggested.get("globex").slot("counter").placement == "tail"
    assert f"loading the tokenizer of {model}" in err
    assert SECRET not in out + err


def test_it_writes_figures_and_a_page_without_a_word_of_any_message(
    chats: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures, policies = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "p.yaml"
    policies.write_text("default: {}\ntenants: {acme: {scopes: {history: tenant, user: tenant}}}\n", encoding="utf-8")
    words = ["--html", str(page), "--json", str(figures), "--policies", str(policies), "--model", model]
    assert main(["analyze", str(chats), *words]) == 0
    assert "prefixkv, your policies" in capsys.readouterr().out
    html, data = page.read_text(encoding="utf-8"), json.loads(figures.read_text(encoding="utf-8"))
    ways = data["ways"]
    assert ways["prefixkv_policies"]["cached_tokens"] > ways["prefixkv"]["cached_tokens"]
    assert data["main"] == "prefixkv_policies"
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    for word in (SECRET, "Good day", "kind to those", "o'clock", "o&#x27;clock"):
        assert word not in html + figures.read_text(encoding="utf-8")


def test_a_pool_of_few_blocks_a_limit_and_turns_are_obeyed(
    chats: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "r.json"
    words = ["--json", str(figures), "--model", model, "--blocks", "8", "--limit", "6", "--interleave", "2"]
    assert main(["analyze", str(chats), *words]) == 0
    assert "the pool was full: " in capsys.readouterr().out
    assert json.loads(figures.read_text(encoding="utf-8"))["requests"] == 6


def test_requests_that_cannot_be_served_are_left_out_and_counted(
    chats: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with chats.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line("hi", system="{{slot:now}}")) + "\n")
    assert main(["analyze", str(chats), "--model", model]) == 0
    out = capsys.readouterr().out
    assert out.startswith("10 requests of 4 tenants, 1 left out\n")
    assert "- 1 requests are left out, missing_slot; the first is chats.jsonl:8: " in out


def test_lines_that_look_like_conversations_are_pointed_out(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(line("a", "b", "c")) + "\n", encoding="utf-8")
    assert main(["analyze", str(path), "--model", model]) == 0
    assert "--conversations" in capsys.readouterr().out
    assert main(["analyze", str(path), "--model", model, "--conversations"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests")
    assert "--conversations" not in out


def test_a_tenants_name_cannot_command_the_terminal(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(line("a", tenant="\x1b[2Jx\x9b31m\ny")) + "\n", encoding="utf-8")
    assert main(["analyze", str(path), "--model", model]) == 0
    out = capsys.readouterr().out
    assert "[2Jx31my" in out
    assert not set(out) & {"\x1b", "\x9b"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit", "0"], "--limit 0: must be 1 or more"),
        (["--interleave", "0"], "--interleave 0"),
        (["--block-size", "-1"], "--block-size -1"),
        (["--blocks", "0"], "--blocks 0"),
        (["--html", "/no-such-folder/r.html"], "--html"),
        (["--json", "."], "--json"),
        (["--policies", "none.yaml"], "none.yaml"),
        (["--model", "./no-such-folder"], "no such folder"),
        (["--model", "none.gguf"], "no such file"),
        (["--blocks", "1"], "none of the requests can be served"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    chats: Path, model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(chats), "--model", model, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (message,) = [one for one in err.splitlines() if one.startswith("prefixkv: ")]
    assert said in message


def test_a_bad_line_is_named_and_not_quoted(chats: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with chats.open("a", encoding="utf-8") as file:
        file.write(f'{{"messages": "{SECRET}"\n')
    assert main(["analyze", str(chats), "--model", model]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "prefixkv: chats.jsonl:8: is not a JSON object in UTF-8 [bad_line]\n"


def test_the_demo_model_is_the_default_and_only_its_tokenizer_is_read(
    chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        load.demo_file()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.delattr(load, "read_llama")
    monkeypatch.delattr(load, "AutoModelForCausalLM")
    assert main(["analyze", str(chats)]) == 0
    assert capsys.readouterr().out.startswith("9 requests of 3 tenants\n")
