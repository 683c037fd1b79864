"""What stretches of a prompt are called, and which message is which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.chat.segment import SegmentKind

__all__ = ["TOOLS_NOT_SHOWN", "Label", "Layout", "last_user", "message_labels"]

TOOLS_NOT_SHOWN = "the template does not show the tools to the model"


@dataclass(frozen=True, slots=True)
class Label:
    """What a stretch of the prompt is.

    Attributes:
        kind: Kind of the segment.
        role: Role of the message, or None.
        message: Index of the message, or None.
        name: Name of the slot, or None.
    """

    kind: SegmentKind
    role: str | None = None
    message: int | None = None
    name: str | None = None


@dataclass(slots=True)
class Layout:
    """Labelled stretches of a prompt.

    Attributes:
        starts: (first character, label), in order, from character 0; each goes up to the next.
        narrowed: (character, label): from there on nothing is shared wider than the label's kind or slot.
        warnings: What could not be found out.
    """

    starts: list[tuple[int, Label]]
    narrowed: list[tuple[int, Label]]
    warnings: list[str]


def last_user(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the last user message, or None."""
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "user"), None)


def message_labels(
    messages: Sequence[Mapping[str, Any]], few_shot: int = 0, notes: Mapping[int, str] | None = None
) -> list[Label]:
    """Return the label of each message.

    A system or developer message is ``system`` only in first place; the last user message is ``user``, also where tool
    calls, results or an opened reply follow it; every other turn is ``history``.

    Args:
        messages: The messages.
        few_shot: How many behind the system text are examples, as far as they come before the last user message.
        notes: Index of a message that is nothing but late values, and the slot that stands for them.
    """
    user = last_user(messages)
    has_system = messages[0]["role"] in ("system", "developer")
    examples = range(int(has_system), min(int(has_system) + few_shot, len(messages) if user is None else user))
    labels = []
    for i, message in enumerate(messages):
        role = message["role"]
        if notes and i in notes:
            labels.append(Label(SegmentKind.SLOT, role, i, notes[i]))
        elif i == 0 and has_system:
            labels.append(Label(SegmentKind.SYSTEM, role, i))
        elif i in examples:
            labels.append(Label(SegmentKind.FEW_SHOT, role, i))
        else:
            labels.append(Label(SegmentKind.USER if i == user else SegmentKind.HISTORY, role, i))
    return labels
