"""A prompt and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from prefixkv.scope import ScopeLevel

if TYPE_CHECKING:
    from prefixkv.chat.recall import Origin

__all__ = ["Prompt", "Segment", "SegmentKind"]


class SegmentKind(StrEnum):
    """The role of a span of the prompt."""

    PREAMBLE = "preamble"
    SYSTEM = "system"
    TOOLS = "tools"
    FEW_SHOT = "few_shot"
    HISTORY = "history"
    USER = "user"
    SLOT = "slot"
    GENERATION_PROMPT = "generation_prompt"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start`` to ``end`` of the prompt, never empty.

    Attributes:
        kind: What they are.
        start: First token.
        end: One past the last token.
        scope: How far they may be shared: the narrowest scope of this and every earlier segment (the meet).
        role: Role of the message they come from, or None.
        name: Name of the slot, or None.
    """

    kind: SegmentKind
    start: int
    end: int
    scope: ScopeLevel
    role: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the segments that tile them without gap or overlap.

    Attributes:
        token_ids: What the model reads.
        segments: Their parts, in order.
        warnings: What the caller should know about how the prompt was made; never quotes content.
        turn_start: First token of the current turn: the last user message, or the note with late values before it.
        origin: How it came about; None for raw text.
    """

    token_ids: Sequence[int]
    segments: tuple[Segment, ...]
    warnings: tuple[str, ...] = ()
    turn_start: int | None = None
    origin: Origin | None = field(default=None, repr=False, compare=False)
