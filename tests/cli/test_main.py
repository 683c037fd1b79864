"""Dispatch, exit codes and messages of the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import prefixkv
from prefixkv.cli import demo as demo_command
from prefixkv.cli import main
from prefixkv.errors import IntegrityError


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == f"prefixkv {prefixkv.__version__}"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "--max-tokens", "x"]])
def test_a_wrong_command_line_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert "usage: prefixkv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["demo", "--pool", "nine"], "memory"),
        (["demo", "--block-size", "0"], "block_size"),
        (["demo", "--max-tokens", "0"], "max_tokens"),
        (["demo", "--model", "./no-such-folder"], "no such folder"),
        (["chat", "--temperature", "nan"], "temperature"),
        (["chat", "--tenant", ""], "tenant"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "import" not in line and "loading" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("prefixkv: ")
    assert word in lines[0]


def test_a_message_of_many_lines_is_put_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise IntegrityError("first\n  second")

    monkeypatch.setattr(demo_command, "run", fail)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "prefixkv: first second\n"


def test_a_reader_that_stops_early_is_no_crash() -> None:
    """``prefixkv demo | head -1``: no traceback, also not from flushing at exit."""
    code = (
        "import sys\nfrom prefixkv.cli import demo, main\n"
        "demo.run = lambda options: [print('x' * 9999, flush=True) for _ in range(99)] and 0\n"
        "sys.exit(main(['demo']))"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")
