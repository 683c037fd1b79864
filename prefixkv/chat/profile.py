"""What is known of a chat template: files for the families, probing for the facts and for everything else."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prefixkv.chat.probing import PROBE_WORDS, Probe

__all__ = ["TOOLS_PLACEMENTS", "FamilyFile", "TemplateProfile", "load_profiles", "recognise", "templates_folder"]

TOOLS_PLACEMENTS = ("none", "before_system", "after_system", "first_user", "last_user")


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
        strips_reasoning: Reasoning in earlier replies is left out: where it was shown in a field of the message
            before, or wherever ``<think>`` in the text is cut away.
        system_anywhere: A second system message just before the last user turn is rendered there, and no text before
            it changes.
        glues_system: System text is rendered inside the first user turn.
        date_argument: Name of the template variable that pins an injected date, ``"strftime_now"`` where only the
            clock itself does, ``""`` where no date is injected.
        generation_prompt_differs: The generation prompt is not how the same reply begins once it is history, so the
            prefix breaks at each reply.
        trims_content: White space around content is dropped, in at least one role.
        writes_bos: The template itself writes the tokenizer's BOS token.
        prefix_stable: As a conversation of plain turns grows, nothing changes up to the end of what its last turn
            said.
        takes_text: Content given as text is rendered; else only lists of parts are.
    """

    family: str
    source: str
    supports_system: bool
    tools: str
    injects_date: bool
    strips_reasoning: bool
    system_anywhere: bool
    glues_system: bool
    date_argument: str
    generation_prompt_differs: bool
    trims_content: bool
    writes_bos: bool
    prefix_stable: bool
    takes_text: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """What every request's report should say, if anything."""
        if self.injects_date:
            return (
                "the chat template writes the current date: what follows it is computed anew when it changes; "
                "pin it with template_clock in the policy",
            )
        return ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What costs hits, and what to do about it; for someone who chooses or sets up a model."""
        found = (
            (
                not self.takes_text,
                "content given as text is left out or refused: the template reads lists of parts only",
            ),
            (
                not self.supports_system,
                "system messages are refused or left out: put that text at the start of the first user turn",
            ),
            (
                self.tools == "last_user",
                "tools stand before the last user turn and move with every turn: they, the turn before and its reply "
                "are computed again each time; keep the tools short",
            ),
            (
                self.strips_reasoning,
                "reasoning is taken out of earlier replies: with each user turn the reply before it is computed again",
            ),
            (
                self.generation_prompt_differs,
                "a reply is opened with other text than it has as history: each reply is computed again in the next "
                "turn; a template variable such as enable_thinking may change how it is opened",
            ),
            (
                not self.prefix_stable,
                "earlier turns are written differently once the conversation goes on: reuse ends where they differ",
            ),
        )
        return (*self.warnings, *(text for applies, text in found if applies))


FACTS = tuple(field.name for field in fields(TemplateProfile))[2:]


@dataclass(frozen=True, slots=True)
class FamilyFile:
    """A file of ``templates/``: how to recognise a family, and what its templates have in common. Frozen.

    White space in markers and renders does not count. ``{system}``, ``{first}``, ``{reply}`` and ``{last}`` in a
    marker stand for what the turns of the probed conversation say.

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

    def fits(self, plain: str, with_tools: str) -> bool:
        """Return whether renders without and with tools hold all markers; changes nothing."""
        texts = ((self.markers, plain), (self.tool_markers, with_tools))
        return all(_bare(_filled(marker)) in _bare(text) for markers, text in texts for marker in markers)


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
    seen = Probe(tokenizer)
    facts = seen.facts()
    with_tools = seen.with_tools or ""
    plain = seen.plain or with_tools  # a template may refuse to go without tools
    for file in load_profiles() if families is None else families:
        if file.fits(plain, with_tools):
            is_typical = all(facts[name] == value for name, value in file.facts.items())
            return TemplateProfile(file.family, "file" if is_typical else "probed", **facts)
    return TemplateProfile("unknown", "probed", **facts)


def _filled(marker: str) -> str:
    for name, word in PROBE_WORDS.items():
        marker = marker.replace(f"{{{name}}}", word)
    return marker


def _bare(text: str) -> str:
    return "".join(text.split())


def _read(path: Path) -> FamilyFile:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        facts = data["facts"]
        for name, value in facts.items():
            kind = str if name in ("tools", "date_argument") else bool
            if name not in FACTS or not isinstance(value, kind):
                raise ValueError(f"[facts] {name}: there is no such fact, or it is no {kind.__name__}")
        if facts.get("tools", "none") not in TOOLS_PLACEMENTS:
            raise ValueError(f"[facts] tools: must be one of {', '.join(TOOLS_PLACEMENTS)}")
        markers, tool_markers = data["markers"], data.get("tool_markers", [])
        if not all(isinstance(marker, str) and marker.strip() for marker in (*markers, *tool_markers)):
            raise ValueError("markers: must be texts, none of them empty")
        return FamilyFile(str(data["family"]), tuple(markers), tuple(tool_markers), facts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from None
