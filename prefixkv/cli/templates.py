"""``prefixkv templates``: the known families of chat templates, and what one template does and costs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from prefixkv.chat.profile import FACTS, TemplateProfile, load_profiles
from prefixkv.chat.segment import Prompt
from prefixkv.chat.segmenter import Segmenter
from prefixkv.cli.template_picture import Piece, as_brackets, as_colours, as_page, as_table
from prefixkv.errors import ConfigError, InvalidRequest
from prefixkv.policy import TenantPolicy

__all__ = ["add_arguments", "run"]

_MEANINGS = {
    "supports_system": "a system message is accepted and shown",
    "tools": "where tool schemas are written",
    "injects_date": "the template writes the current date or time",
    "strips_reasoning": "reasoning is left out of earlier replies",
    "system_anywhere": "a later system message stays at its place",
    "glues_system": "system text is part of the first user turn",
    "date_argument": "the template variable that pins the date",
    "generation_prompt_differs": "a reply is opened with other text than it has as history",
    "trims_content": "white space around messages is dropped",
    "writes_bos": "the template writes the beginning-of-sequence token",
    "prefix_stable": "earlier turns stay as they are while a chat grows",
    "takes_text": "messages may be plain text",
}
_SYSTEM = {"role": "system", "content": "You sell shoes. Be brief."}
_TURNS = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi, what are you looking for?"},
    {"role": "user", "content": "It is {{slot:now}}. Are you open, and do you have boots?"},
]
_SLOTS = {"now": "10:31"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_shoes",
            "description": "Finds shoes in stock.",
            "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]},
        },
    }
]
_SAMPLES: tuple[tuple[str, list[dict[str, str]], Any], ...] = (
    ("", [_SYSTEM, *_TURNS], _TOOLS),
    ("refuses a system message with tools", _TURNS, _TOOLS),
    ("refuses tools", [_SYSTEM, *_TURNS], None),
    ("refuses a system message", _TURNS, None),
    ("refuses all but one turn", _TURNS[2:], None),
)
"""What the template refuses if this is the first conversation that it takes; messages; tools."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="the known families and what their templates have in common")
    check = actions.add_parser("check", help="what one template does, with a picture of a sample conversation")
    check.add_argument("name", metavar="NAME", help='"demo", a .gguf file, a folder, a hub id, or a .jinja file')
    check.add_argument("--tokenizer", metavar="NAME", help="tokenizer for a .jinja file (default: the demo model's)")
    check.add_argument("--html", metavar="FILE", help="write the same as a page to this file")


def run(options: argparse.Namespace) -> int:
    """List the families or check one template; returns 0.

    Raises:
        ConfigError: If there is no such model or file, no template in it, or the template is malformed or refuses
            every conversation.
    """
    if options.action == "list":
        print(_families())
        return 0
    tokenizer = _load(options.name, options.tokenizer)
    segmenter = Segmenter(tokenizer)
    profile = segmenter.profile
    if profile is None:
        raise ConfigError(f"{options.name}: has no chat template; give a chat model or a .jinja file")
    refused, prompt = _sample(segmenter, options.name)
    pieces = _pieces(tokenizer, prompt)
    note = f"The template {refused}, so the sample does without.\n\n" if refused else ""
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    before = [("Template", _summary(options.name, profile)), ("Facts", _facts(profile))]
    after = [
        ("Segments", _segments(pieces)),
        ("Advice", "\n".join(f"- {text}" for text in profile.advice) or "nothing in this template costs reuse"),
    ]
    if options.html:
        _write(Path(options.html).expanduser(), as_page(f"Chat template of {options.name}", pieces, [*before, *after]))
    picture = note + (as_colours if is_coloured else as_brackets)(pieces)
    print("\n\n".join(f"{head}\n\n{text}" for head, text in (*before, ("Sample conversation", picture), *after)))
    return 0


def _load(name: str, tokenizer_name: str | None) -> Any:
    is_file = name.endswith((".jinja", ".jinja2", ".j2"))
    if tokenizer_name is not None and not is_file:
        raise ConfigError(f"--tokenizer {tokenizer_name}: is for .jinja files; {name} has a tokenizer of its own")
    source = _read(Path(name).expanduser()) if is_file else None
    from prefixkv.model.load import load_tokenizer  # imports torch: after a wrong name has been refused

    tokenizer = load_tokenizer(name if source is None else tokenizer_name or "demo")
    if source is not None:
        tokenizer.chat_template = source
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{name}: line {error.lineno} of the template: {error.message}") from None
        except Exception:  # what a template refuses is among the facts
            pass
    return tokenizer


def _read(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    if not source.strip():
        raise ConfigError(f"{path}: is empty, so it is no chat template")
    return source


def _sample(segmenter: Segmenter, name: str) -> tuple[str, Prompt]:
    """Return the fullest sample that the template takes, and what it refused."""
    for refused, messages, tools in _SAMPLES:
        try:
            return refused, segmenter.segment(messages, policy=TenantPolicy(), tools=tools, slots=_SLOTS)
        except InvalidRequest as error:
            hint = error.hint
    raise ConfigError(f"{name}: {hint}")


def _pieces(tokenizer: Any, prompt: Prompt) -> list[Piece]:
    return [
        Piece(
            part.kind.value,
            part.role,
            part.name,
            part.scope.label,
            part.start,
            part.end - part.start,
            str(tokenizer.decode(list(prompt.token_ids[part.start : part.end]), clean_up_tokenization_spaces=False)),
        )
        for part in prompt.segments
    ]


def _summary(name: str, profile: TemplateProfile) -> str:
    file = next((file for file in load_profiles() if file.family == profile.family), None)
    if file is None:
        how = "no family's file fits; the facts were found by rendering"
    elif profile.source == "file":
        how = "it renders the family's markers and does all that the family's file says"
    else:
        differs = [fact for fact, value in file.facts.items() if getattr(profile, fact) != value]
        how = f"it renders the family's markers but differs from its file in {', '.join(differs)}"
    return as_table([("name", name), ("family", profile.family), ("recognised", how)])


def _facts(profile: TemplateProfile) -> str:
    rows = [(fact, _shown(getattr(profile, fact)), _MEANINGS[fact]) for fact in FACTS]
    return as_table([("fact", "value", "meaning"), *rows])


def _segments(pieces: list[Piece]) -> str:
    header = ("segment", "role", "slot", "scope", "tokens", "start")
    rows = [(p.kind, p.role or "-", p.name or "-", p.scope, str(p.tokens), str(p.start)) for p in pieces]
    scopes = dict.fromkeys(piece.scope for piece in pieces)
    sums = [("total", "", "", scope, str(sum(p.tokens for p in pieces if p.scope == scope)), "") for scope in scopes]
    return as_table([header, *rows, *sums], numbers=(4, 5))


def _families() -> str:
    files = sorted(load_profiles(), key=lambda file: file.family)
    rows = [(file.family, *(_shown(file.facts.get(fact, "-")) for fact in FACTS)) for file in files]
    kept = [i for i in range(len(FACTS) + 1) if i == 0 or any(row[i] != "-" for row in rows)]
    header = ("family", *(fact.replace("_", " ") for fact in FACTS))
    table = as_table([tuple(row[i] for i in kept) for row in (_short(header), *rows)])
    meanings = as_table([(name, _MEANINGS[fact]) for fact, name in zip(FACTS, _short(header)[1:], strict=True)])
    return f"{table}\n\n{meanings}\n-  differs between the family's templates, or depends on the tokenizer"


def _short(header: tuple[str, ...]) -> tuple[str, ...]:
    names = {
        "supports system": "system",
        "injects date": "date",
        "strips reasoning": "strips",
        "system anywhere": "anywhere",
        "glues system": "glued",
        "date argument": "pinned by",
        "generation prompt differs": "differs",
        "trims content": "trims",
        "writes bos": "bos",
        "prefix stable": "stable",
        "takes text": "text",
    }
    return tuple(names.get(name, name) for name in header)


def _shown(value: bool | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value or "none"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror})") from None
