"""The templates command: the families, one template's facts and picture, and what it refuses."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixkv.chat.profile import FACTS, load_profiles
from prefixkv.cli import main
from prefixkv.cli.template_picture import Piece, as_brackets, as_colours, as_page, as_table
from tests.support import byte_tokenizer

TOOLS_FIRST = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = [
    Piece("system", "system", None, "tenant", 0, 3, "Be <brief>.\nNow."),
    Piece("slot", "user", "now", "session", 3, 1, "10:31\x1b[2J"),
]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the command load a tokenizer of bytes; returns the names it asked for."""
    asked: list[str] = []

    def load_tokenizer(name: str) -> Any:
        asked.append(name)
        return byte_tokenizer()

    monkeypatch.setattr("prefixkv.model.load.load_tokenizer", load_tokenizer)
    return asked


def jinja(folder: Path, source: str) -> str:
    path = folder / "odd.jinja"
    path.write_text(source, encoding="utf-8")
    return str(path)


def section(shown: str, head: str) -> str:
    """The text under a heading."""
    heads = "Template|Facts|Sample conversation|Segments|Advice"
    found = re.search(rf"(?:^|\n\n){head}\n\n(.*?)(?=\n\n(?:{heads})\n\n|\Z)", shown, re.DOTALL)
    assert found is not None, head
    return found[1]


def test_the_list_has_every_family_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "list"]) == 0
    table, meanings = capsys.readouterr().out.split("\n\n")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert list(rows)[1:] == sorted(file.family for file in load_profiles())
    assert {len(row) for name, row in rows.items() if name != "family"} == {len(rows["hermes"])}
    assert rows["hermes"][:2] == ["yes", "before_system"]
    assert "last_user" in rows["mistral"]
    assert "current_date" in rows["muse"]
    assert len(meanings.splitlines()) == len(FACTS) + 1


def test_the_demo_model_is_checked_with_its_own_template(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    if main(["templates", "check", "demo"]) != 0:
        pytest.skip(capsys.readouterr().err)
    shown = capsys.readouterr().out
    assert re.search(r"family +chatml\n", section(shown, "Template"))
    facts = section(shown, "Facts")
    assert all(re.search(rf"^{fact} +(yes|no|none) +\w", facts, re.MULTILINE) for fact in FACTS)
    picture = section(shown, "Sample conversation")
    assert "\033" not in shown
    assert "[system: You sell shoes. Be brief.<|im_end|>\n]" in picture
    assert "[slot: 10:31]" in picture
    assert picture.endswith("[generation_prompt: <|im_start|>assistant\n]")
    assert "nothing in this template costs reuse" in section(shown, "Advice")
    rows = [line.split() for line in section(shown, "Segments").splitlines()[1:]]
    parts, totals = ([row for row in rows if (row[0] == "total") == is_total] for is_total in (False, True))
    assert {row[0] for row in parts} == set(re.findall(r"(?:^|\])\[(\w+): ", picture))
    for _, scope, tokens in totals:
        assert int(tokens) == sum(int(row[4]) for row in parts if row[3] == scope)
    assert {scope for _, scope, _ in totals} == {"tenant", "session"}


def test_a_template_file_is_checked_with_a_stand_in(
    tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = jinja(tmp_path, "{{ strftime_now('%Y') }}" + TOOLS_FIRST)
    assert main(["templates", "check", name]) == 0
    assert main(["templates", "check", name, "--tokenizer", "mine"]) == 0
    assert stand_in == ["demo", "mine"]
    shown = capsys.readouterr().out
    assert re.search(r"^date_argument +strftime_now ", shown, re.MULTILINE)
    assert "pin it with template_clock" in shown
    assert re.search(r"\[tools: .*find_shoes.*\]\[", shown, re.DOTALL)


def test_how_it_was_recognised_names_what_differs(
    tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sources = (
        TOOLS_FIRST,
        "{{ messages | length }}" + TOOLS_FIRST,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    for source in sources:
        assert main(["templates", "check", jinja(tmp_path, source)]) == 0
    first, second, third = capsys.readouterr().out.split("Template\n\n")[1:]
    assert "differs from its file in tools" in first
    assert "differs from its file in tools, system_anywhere, prefix_stable" in second
    assert "no family's file fits" in third
    assert "written differently" in section("Template\n\n" + second, "Advice")


def test_what_a_template_refuses_is_left_out_of_the_sample(
    tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    assert main(["templates", "check", jinja(tmp_path, refusal + TOOLS_FIRST)]) == 0
    shown = capsys.readouterr().out
    assert "refuses a system message with tools" in shown
    assert "[system:" not in shown
    assert re.search(r"^supports_system +no ", shown, re.MULTILINE)


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_it_wants_none(
    no_color: str, is_coloured: bool, tmp_path: Path, stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert main(["templates", "check", jinja(tmp_path, TOOLS_FIRST)]) == 0
    assert ("\033[48;5;" in out.getvalue()) == is_coloured
    assert ("[slot: " in out.getvalue()) != is_coloured


def test_the_page_says_the_same(tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["templates", "check", jinja(tmp_path, TOOLS_FIRST), "--html", str(page)]) == 0
    shown, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert '<span class="slot" title="slot, session, ' in text
    assert "&lt;|im_start|&gt;user" in text
    assert "<|im_start|>" not in text
    for head in ("Template", "Facts", "Segments", "Advice"):
        assert f"<h2>{head}</h2>" in text
        assert section(shown, head).splitlines()[-1].strip()[:20] in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["./no-such-folder"], "no such folder"),
        (["no-such.gguf"], "no such file"),
        (["no-such.jinja"], "cannot be read"),
        (["demo", "--tokenizer", "x"], "for .jinja files"),
    ],
)
def test_a_wrong_name_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "check", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a\n\n{% if x %}\nb", "line "),
        ("a\nb {{ messages[ }}\nc", "line 2 of the template"),
        ("  \n", "is empty"),
        ("{{ raise_exception('SECRET') }}", "refuses these messages"),
    ],
)
def test_a_bad_template_is_one_line(
    source: str, reason: str, tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["templates", "check", jinja(tmp_path, source)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "SECRET" not in line


def test_a_model_without_a_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr("prefixkv.model.load.load_tokenizer", lambda name: tokenizer)
    assert main(["templates", "check", "base"]) == 2
    assert "base: has no chat template" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused(
    tmp_path: Path, stand_in: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["templates", "check", jinja(tmp_path, TOOLS_FIRST), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "--html" in capsys.readouterr().err


def test_colours_end_with_each_line_and_no_escape_of_the_text_gets_through() -> None:
    shown = as_colours(PIECES)
    on = "\033[48;5;117;38;5;16m"
    assert shown.startswith(f"{on}Be <brief>.\033[0m\n{on}Now.\033[0m")
    assert "\033[2J" not in shown
    assert shown.splitlines()[-1].count("\033[0m") == 2
    assert as_brackets(PIECES) == "[system: Be <brief>.\nNow.][slot: 10:31[2J]"


def test_a_page_escapes_what_the_template_writes() -> None:
    page = as_page("a & b", PIECES, [("Facts", "<b>")])
    assert "<title>a &amp; b</title>" in page
    assert "Be &lt;brief&gt;." in page
    assert "<pre>&lt;b&gt;</pre>" in page


def test_numbers_stand_to_the_right() -> None:
    assert as_table([("name", "n"), ("a", "10"), ("b", "7")], numbers=(1,)) == "name   n\na     10\nb      7"
