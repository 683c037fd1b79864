"""Late binding: values of slots as a note before the last user turn, and the notes that earlier turns were sent with.

A note goes where the template allows it: a system message of its own if one there leaves all text before it as it is,
else the beginning of the user turn. When that turn comes back as history it must carry the same note, or nothing behind
it would be a prefix any more; so notes are remembered with the conversation that they were sent in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.chat.slots import FilledMessages, SlotSpan
from prefixkv.policy import TenantPolicy
from prefixkv.scope import ScopeLevel

__all__ = ["LateNote", "Placed", "conversation_digests", "is_remembered", "note_of", "place_notes"]

_TITLE = "Current values:"
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
"""Whatever begins a new line, or may: a value must not look like the next one."""


@dataclass(frozen=True, slots=True)
class LateNote:
    """The values of one turn. Frozen.

    Attributes:
        text: What the model reads.
        name: The slot with the narrowest scope: that is the note's own.
    """

    text: str
    name: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Messages with their notes.

    Attributes:
        filled: The messages and the slots in them.
        notes: Indexes of messages that are nothing but a note, and the note's slot.
    """

    filled: FilledMessages
    notes: Mapping[int, str]


def conversation_digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of the conversation up to each message, it included; slots in them are not filled."""
    running = hashlib.blake2b(digest_size=16)
    digests = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):  # a slot's own text is a value too
            content = [{**part, "text": ""} if part["type"] == "slot" else part for part in content]
        data = json.dumps({**message, "content": content}, sort_keys=True, ensure_ascii=False).encode()
        running.update(len(data).to_bytes(8, "little") + data)
        digests.append(running.copy().digest())
    return digests


def note_of(late: Sequence[tuple[str, str]], policy: TenantPolicy) -> LateNote | None:
    """Return the note of the slots that bind late, or None where there are none."""
    if not late:
        return None
    narrowest = max((name for name, _ in late), key=lambda name: policy.slot(name).scope)
    lines = (f"{name}: {_BREAKS.sub(' ', value)}" for name, value in late)
    return LateNote("\n".join([_TITLE, *lines]), narrowest)


def is_remembered(note: LateNote, policy: TenantPolicy) -> bool:
    """Return whether a note may be kept: a value of request scope is never stored."""
    return policy.slot(note.name).scope is not ScopeLevel.REQUEST


def place_notes(filled: FilledMessages, notes: Mapping[int, LateNote], *, as_messages: bool) -> Placed:
    """Return the messages with each note before its user turn; changes nothing.

    Args:
        filled: The messages.
        notes: Index of a user message to its note.
        as_messages: Whether notes behind other messages are system messages, or the beginning of the user's.
    """
    if not notes:
        return Placed(filled, {})
    messages: list[dict[str, Any]] = []
    spans: list[tuple[SlotSpan, ...]] = []
    alone: dict[int, str] = {}
    for i, (message, own) in enumerate(zip(filled.messages, filled.spans, strict=True)):
        note = notes.get(i)
        if note is not None and as_messages and messages:  # in front of all, it would take the system text's place
            alone[len(messages)] = note.name
            messages.append({"role": "system", "content": note.text})
            spans.append(())
        elif note is not None:
            head = note.text + "\n\n"
            message = {**message, "content": head + message["content"]}
            moved = (SlotSpan(span.name, span.start + len(head), span.end + len(head)) for span in own)
            own = (SlotSpan(note.name, 0, len(head)), *moved)
        messages.append(message)
        spans.append(own)
    return Placed(FilledMessages(messages, tuple(spans), filled.warnings), alone)
