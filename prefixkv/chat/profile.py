"""What is known of a chat template: files for the families, probing for the facts and for everything else."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from prefixkv.chat.rendering import ChatInput

__all__ = ["TemplateProfile", "load_profiles", "recognise", "templates_folder"]

TOOLS_PLACEMENTS = ("none", "before_system", "after_system", "first_user", "last_user")

_SYSTEM, _FIRST, _REPLY, _LAST = "probesystem", "probefirst", "probereply", "probelast"
_TOOL, _THOUGHT = "probetool", "probethought"
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """Facts of a chat template. Frozen.

    Attributes:
        family: Name of the family, or ``"unknown"``.
        source: ``"file"`` if this template does all that the family's file says, ``"probed"`` if it differs or no
            file fits. The facts are in either case what the template was seen to do.
        supports_system: A system message is accepted and rendered.
        tools: Where tools are rendered: ``none``, ``before_system``, ``after_system``, ``first_user`` (inside or
            directly before that turn), ``last_user``.
        injects_date: The template writes the clock's time or date.
        strips_reasoning: Reasoning in earlier replies is left out.
    """

    family: str
    source: str
    supports_system: bool
    tools: str
    injects_date: bool
    strips_reasoning: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user of the template should know, if anything."""
        if self.injects_date:
            return ("the chat template writes the current date: what follows it is computed anew when it changes",)
        return ()


@dataclass(frozen=True, slots=True)
class FamilyFile:
    """A file of ``templates/``: how to recognise a family, and what its templates have in common. Frozen.

    Attributes:
        family: Name of the family.
        markers: Texts that a rendered conversation of this family holds, all of them.
        tool_markers: Texts that it holds when tools are given.
        facts: Fields of :class:`TemplateProfile` and their values in this family.
    """

    family: str
    markers: tuple[str, ...]
    tool_markers: tuple[str, ...]
    facts: Mapping[str, bool | str]


def templates_folder() -> Path:
    """Return the folder of profile files: in the installed package, or beside it in a source checkout.

    Raises:
        FileNotFoundError: If the installation lacks it.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "templates", package.parent / "templates"):
        if (folder / "chatml.toml").is_file():
            return folder
    raise FileNotFoundError("prefixkv was installed without its templates folder; install it again")


def load_profiles(folder: Path | None = None) -> tuple[FamilyFile, ...]:
    """Read all profile files, the most particular (most markers) first.

    Raises:
        FileNotFoundError: If the installation lacks them.
        ValueError: If a file is malformed; the message names it.
    """
    files = [_read(path) for path in sorted((folder or templates_folder()).glob("*.toml"))]
    return tuple(sorted(files, key=lambda file: -len(file.markers) - len(file.tool_markers)))


def recognise(tokenizer: Any, families: Sequence[FamilyFile] | None = None) -> TemplateProfile:
    """Return the profile of a tokenizer's chat template, by what it renders; changes nothing.

    Args:
        tokenizer: Has a chat template.
        families: What to compare with; None reads the shipped files.
    """
    seen = _Probe(tokenizer)
    supports_system = seen.supports_system()
    probed = TemplateProfile(
        family="unknown",
        source="probed",
        supports_system=supports_system,
        tools=seen.tools_placement(supports_system),
        injects_date=seen.injects_date(),
        strips_reasoning=seen.strips_reasoning(),
    )
    plain, with_tools = seen.plain or "", seen.with_tools or ""
    for file in load_profiles() if families is None else families:
        fits = all(marker in plain for marker in file.markers)
        if fits and all(marker in with_tools for marker in file.tool_markers):
            is_typical = all(getattr(probed, name) == value for name, value in file.facts.items())
            return replace(probed, family=file.family, source="file" if is_typical else "probed")
    return probed


class _Probe:
    """Renders of one conversation."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._turns = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": _LAST},
        ]
        self._system = [{"role": "system", "content": _SYSTEM}]
        self.plain = self._render(self._turns)
        self.with_tools = self._render(self._turns, tools=_PROBE_TOOLS)

    def supports_system(self) -> bool:
        return _SYSTEM in (self._render(self._system + self._turns) or "")

    def tools_placement(self, supports_system: bool) -> str:
        turns = self._system + self._turns if supports_system else self._turns
        text, bare = self._render(turns, tools=_PROBE_TOOLS), self._render(turns)
        if text is None or bare is None or _TOOL not in text:
            return "none"
        place, first, reply = text.index(_TOOL), text.index(_FIRST), text.index(_REPLY)
        if place > reply:
            return "last_user"
        if place > first:
            return "first_user"
        if not supports_system:
            # With the head of the first user turn before them, tools are in that turn.
            head = bare[: bare.index(_FIRST)]
            return "first_user" if text.startswith(head) and len(head.split()) > 0 else "before_system"
        system = text.index(_SYSTEM)
        if place < system:
            return "before_system"
        between = bare[bare.index(_SYSTEM) + len(_SYSTEM) : bare.index(_FIRST)]
        return "first_user" if text[system + len(_SYSTEM) :].startswith(between) else "after_system"

    def injects_date(self) -> bool:
        # A clock that is no function makes a template fail that calls it, and is nothing to one that does not.
        return self.plain is not None and self._render(self._turns, strftime_now="") is None

    def strips_reasoning(self) -> bool:
        turns = [dict(turn) for turn in self._turns]
        turns[1]["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"
        text = self._render(turns)
        return text is not None and _REPLY in text and _THOUGHT not in text

    def _render(self, messages: list[dict[str, str]], tools: Any = None, **kwargs: Any) -> str | None:
        return ChatInput(self._tokenizer, messages, tools, kwargs, True, False).try_render()


def _read(path: Path) -> FamilyFile:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        facts = data["facts"]
        names = {field.name for field in fields(TemplateProfile)} - {"family", "source"}
        if not set(facts) <= names or facts.get("tools", "none") not in TOOLS_PLACEMENTS:
            raise ValueError(f"[facts] may state {', '.join(sorted(names))}")
        return FamilyFile(str(data["family"]), tuple(data["markers"]), tuple(data.get("tool_markers", ())), facts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from None
