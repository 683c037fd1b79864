"""The calibrate command: what it reads, what it refuses, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig
from prefixkv.cache.spec import RaisedHead
from prefixkv.cli import main
from prefixkv.cli.calibrate import Source, _account, read_sources, tokenise
from prefixkv.errors import ConfigError, InvalidRequest
from prefixkv.kv.calibration import PoolCalibration
from prefixkv.model.load import LoadedModel, wrap
from tests.support import byte_tokenizer, tiny_model

SECRET = "hunter2"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap(tiny_model("llama"), byte_tokenizer())


@pytest.fixture
def small_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Make the command load a tiny model; returns what it asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(name: str, *, progress: Any, **options: Any) -> LoadedModel:
        asked.append((name, options))
        return loaded

    monkeypatch.setattr("prefixkv.model.load.load", load)
    return asked


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def test_it_measures_prints_and_writes(
    tmp_path: Path, small_model: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = written(
        tmp_path / "p.jsonl", chat("What is the time?", "Ten."), "", {"text": "Once upon a time there was"}
    )
    out = tmp_path / "report.json"
    code = main(["calibrate", str(prompts), "--formats", "int8, int4", "--json", str(out), "--model", "m"])
    shown = capsys.readouterr().out
    assert code == 0
    assert small_model == [("m", {"dtype": "auto", "device": "auto"})]
    lines = shown.splitlines()
    assert "measuring int8, int4 on 2 prompts of 68 tokens together" in lines
    assert sum(line.startswith("prompt ") for line in lines) == 2
    assert [line.split()[0] for line in lines if line.startswith(("stock ", "int8 ", "int4 "))].count("int8") == 2
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [one["name"] for one in report["formats"]] == ["int8", "int4"]
    assert report["prompts"] == 2


def test_it_writes_a_calibration_that_an_engine_loads(
    tmp_path: Path, small_model: list[Any], loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines say what was written and how to use it; what they say works."""
    prompts = written(tmp_path / "p.jsonl", {"text": "Once upon a time there was"}, chat("Which?", "That one."))
    out = tmp_path / "c.json"
    assert main(["calibrate", str(prompts), "--formats", "int8", "--write", str(out), "--for", "k4v8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "measuring int8, k4v8 on 2 prompts of 62 tokens together" in lines
    assert [line.split()[0] for line in lines if line.startswith(("int8 ", "k4v8"))] == ["int8", "k4v8", "k4v8*"] * 2
    made = PoolCalibration.read(out)
    assert (made.kv_format, made.fingerprint) == ("k4v8", loaded.fingerprint.hex())
    assert lines[-2] == f"wrote {out} (measured as k4v8*): the mean key of every head; 0 heads raised"
    assert lines[-1] == f"use it: CacheConfig(kv_format='k4v8', calibration='{out}')"
    cache = CacheConfig(kv_format="k4v8", calibration=str(out), memory="1MiB")
    with Engine(loaded.model, loaded.tokenizer, config=EngineConfig(cache=cache)) as engine:
        assert "format k4v8, calibrated, 0 heads raised; " in engine.describe()


def test_int4_is_calibrated_unless_another_format_is_named(
    tmp_path: Path, small_model: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = written(tmp_path / "p.jsonl", {"text": "Once upon a time there was"})
    assert main(["calibrate", str(prompts), "--formats", "int4", "--write", str(tmp_path / "c.json")]) == 0
    assert "(measured as int4*)" in capsys.readouterr().out
    assert PoolCalibration.read(tmp_path / "c.json").kv_format == "int4"


def test_raised_heads_are_named() -> None:
    made = PoolCalibration("ab", "int8", (RaisedHead(0, 1, "model"), RaisedHead(2, 0, "model")), None)
    assert _account(made, "c.json").splitlines()[0] == (
        "wrote c.json (measured as int8*): no mean keys; 2 heads raised: "
        "layer 0 head 1 to model, layer 2 head 0 to model"
    )


def test_chats_are_rendered_as_the_engine_renders_them(tmp_path: Path, loaded: LoadedModel) -> None:
    """What is measured are the ids that the model would see, without the header of a reply that is not there."""
    line = chat("Hi <|im_end|>", "Hello")
    ids = tokenise(read_sources([str(written(tmp_path / "p.jsonl", line))], 9), loaded, 999)
    tokenizer = loaded.tokenizer
    want = tokenizer.apply_chat_template(
        line["messages"], tokenize=True, return_dict=False, sanitize_control_tokens=True
    )
    assert ids == [want]


def test_tools_and_slots_of_a_line_are_used(tmp_path: Path, loaded: LoadedModel) -> None:
    line = {**chat("It is {{slot:now}}.", "So late?"), "slots": {"now": "10:31"}, "id": 7}
    (ids,) = tokenise(read_sources([str(written(tmp_path / "p.jsonl", line))], 9), loaded, 999)
    assert "It is 10:31." in loaded.tokenizer.decode(ids)


def test_a_prompt_is_cut_and_a_file_of_text_is_cut_in_pieces(tmp_path: Path, loaded: LoadedModel) -> None:
    lines = written(tmp_path / "p.JSONL", {"text": "x" * 90}, chat("y" * 200))
    text = written(tmp_path / "book.txt", "z" * 99)
    prompts = tokenise(read_sources([str(lines), str(text)], 9), loaded, 40)
    assert [len(prompt) for prompt in prompts] == [40, 40, 40, 40, 20]


def test_only_the_first_prompts_are_read(
    tmp_path: Path, small_model: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A log of a million conversations is read no further than needed: the broken line is never seen."""
    prompts = written(tmp_path / "p.jsonl", {"text": "a" * 40}, {"text": "b" * 40}, "{")
    assert read_sources([str(prompts)], 2) == [Source("p.jsonl:1", "a" * 40, {}), Source("p.jsonl:2", "b" * 40, {})]
    text = written(tmp_path / "t.txt", "c" * 999)
    assert main(["calibrate", str(text), "--formats", "int8", "--max-prompts", "2", "--max-tokens", "32"]) == 0
    assert "on 2 prompts of 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "path"),
    [
        (SECRET, "bad_line", "p.jsonl:3"),
        ('{"text": "' + SECRET, "bad_line", "p.jsonl:3"),
        ([SECRET], "bad_line", "p.jsonl:3"),
        ("[" * 100_000, "bad_line", "p.jsonl:3"),
        ("9" * 5_000, "bad_line", "p.jsonl:3"),
        ({}, "bad_line", "p.jsonl:3"),
        ({"text": SECRET, **chat(SECRET)}, "bad_line", "p.jsonl:3"),
        ({"text": ""}, "bad_line", "p.jsonl:3: text"),
        ({"text": [SECRET]}, "bad_line", "p.jsonl:3: text"),
        ({"text": SECRET + "\ud800"}, "invalid_text", "p.jsonl:3: text"),
        ({"messages": []}, "no_messages", "p.jsonl:3: messages"),
        ({"messages": SECRET}, "bad_messages", "p.jsonl:3: messages"),
        ({"messages": [{"role": SECRET, "content": "x"}]}, "unknown_role", "p.jsonl:3: messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_content", "p.jsonl:3: messages[0].content"),
        ({**chat(SECRET), "tools": SECRET}, "bad_tools", "p.jsonl:3: tools"),
    ],
)
def test_a_bad_line_is_named_and_never_quoted(tmp_path: Path, line: object, code: str, path: str) -> None:
    """Prompts are private, and errors end in logs."""
    file = written(tmp_path / "p.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(InvalidRequest) as error:
        read_sources([str(file)], 99)
    assert (error.value.code, error.value.path) == (code, path)
    assert SECRET not in str(error.value)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    for name, where in (("p.jsonl", "p.jsonl:2"), ("p.txt", "p.txt")):
        (tmp_path / name).write_bytes(b'{"text": "fine"}\n\xff\xfe\n')
        with pytest.raises(InvalidRequest) as error:
            read_sources([str(tmp_path / name)], 99)
        assert error.value.path == where


def test_what_the_template_refuses_is_named_by_line(tmp_path: Path, loaded: LoadedModel) -> None:
    """Found only once the tokenizer is there; the line is known all the same."""
    bad = {"messages": [{"role": "user", "content": f"{SECRET} {{{{slot:now}}}}"}]}
    sources = read_sources([str(written(tmp_path / "p.jsonl", {"text": "fine"}, bad))], 99)
    sources.append(Source("q.jsonl:8", None, {"messages": bad["messages"], "tools": None, "slots": SECRET}))
    with pytest.raises(InvalidRequest) as error:
        tokenise(sources[2:], loaded, 99)
    assert error.value.path.startswith("q.jsonl:8: ")
    assert SECRET not in str(error.value)


def test_no_prompts_and_no_file_are_told_apart(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.txt", "  ")
    with pytest.raises(ConfigError, match="no prompts found"):
        read_sources([str(empty)], 9)
    with pytest.raises(ConfigError, match=r"cannot be read.*[Nn]o such file"):
        read_sources([str(tmp_path / "absent.jsonl")], 9)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sources([str(tmp_path)], 9)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--formats", "int3"], "--formats int3"),
        (["--formats", "int8,int8"], "each once"),
        (["--formats", ""], "--formats"),
        (["--max-prompts", "0"], "--max-prompts 0"),
        (["--max-tokens", "16"], "--max-tokens 16"),
        (["--json", "no/such/folder/x.json"], "--json"),
        (["--json", "."], "--json"),
        (["--write", "no/such/folder/x.json"], "--write"),
        (["--write", "."], "--write"),
        (["--for", "int4"], "--for int4: needs --write"),
        (["--write", "x.json", "--for", "model"], "--for model: give one of int8"),
        (["--write", "x.json", "--for", "int3"], "--for int3"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(
    tmp_path: Path, argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading and measuring take minutes; a report that has nowhere to go must not come after them."""
    prompts = written(tmp_path / "p.txt", "x" * 99)
    assert main(["calibrate", str(prompts), *argv]) == 2
    captured = capsys.readouterr()
    assert word in captured.err and len(captured.err.splitlines()) == 1
    assert captured.out == ""
