"""Slots: the places of a message whose text changes from request to request, such as a clock or a nickname.

A slot is written ``{{slot:NAME}}`` in a message's text, or as a content part ``{"type": "slot", "name": NAME}``. Its
policy says where the value goes: it stays, it is rounded down, or a phrase stays and the value is handed on to
:mod:`~prefixkv.chat.late`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.chat.messages import SLOT_NAME, check_text
from prefixkv.chat.times import coarsened
from prefixkv.errors import InvalidRequest
from prefixkv.policy import SlotPolicy, TenantPolicy

__all__ = ["FilledMessages", "SlotSpan", "fill_slots"]

_MARKER = re.compile(r"\{\{slot:(" + SLOT_NAME.pattern + r")\}\}")
_OPERATOR_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Where a slot's value stands in the text of its message: characters ``start`` to ``end``."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FilledMessages:
    """Messages whose slots hold their values.

    Attributes:
        messages: The messages; content is text or None.
        spans: For each message, its slots in order.
        warnings: What the caller should know.
        late: Name and last value of the slots that bind late, in the order of their first places.
    """

    messages: list[dict[str, Any]]
    spans: tuple[tuple[SlotSpan, ...], ...]
    warnings: tuple[str, ...]
    late: tuple[tuple[str, str], ...] = ()


def fill_slots(messages: Sequence[Mapping[str, Any]], slots: object, policy: TenantPolicy) -> FilledMessages:
    """Return checked messages with every slot replaced by its value; changes nothing.

    Values are user data: they are inserted as they are and never searched for slots again. In system and developer
    text, which the operator writes, a slot without a value is an error; in other turns, which end users write, it is
    left as the text it is, so that nobody can break a request by typing a marker. Slot parts always need a value.

    Args:
        messages: What :func:`~prefixkv.chat.messages.check_messages` returned.
        slots: Slot name to value (text), or None.
        policy: The placements.

    Raises:
        InvalidRequest: ``bad_slots``, ``missing_slot`` or ``invalid_text``.
    """
    values = _check_slots(slots)
    filled: list[dict[str, Any]] = []
    spans: list[tuple[SlotSpan, ...]] = []
    used: set[str] = set()
    rules = _Rules(policy, can_bind_late=any(message["role"] == "user" for message in messages))
    for i, message in enumerate(messages):
        content = message["content"]
        if content is None:
            filled.append(dict(message))
            spans.append(())
            continue
        builder = _Builder(values, f"messages[{i}].content", message["role"] in _OPERATOR_ROLES, rules)
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "slot":
                builder.add_slot(part["name"], part.get("text"))
            else:
                builder.add_text(part["text"])
        filled.append({**message, "content": "".join(builder.pieces)})
        spans.append(tuple(builder.spans))
        used.update(builder.used)
    unused = [f"slot {name!r} has a value but no message uses it" for name in values if name not in used]
    return FilledMessages(filled, tuple(spans), (*rules.warnings, *unused), tuple(rules.late.items()))


class _Rules:
    """What the policy does with values, and what came of it."""

    def __init__(self, policy: TenantPolicy, *, can_bind_late: bool) -> None:
        self.late: dict[str, str] = {}
        self.warnings: dict[str, None] = {}
        self._policy = policy
        self._can_bind_late = can_bind_late

    def shown(self, name: str, value: str) -> tuple[str, bool]:
        """Return the text that stands in the slot's place, and whether it varies with the value."""
        slot = self._policy.slot(name)
        match slot.placement:
            case "coarsen":
                rounded = coarsened(value, slot.unit)
                if rounded is None:
                    self.warnings[f"slot {name!r} is to be coarsened, but its value holds no time that could be"] = None
                return value if rounded is None else rounded, True
            case "tail":
                if self._can_bind_late:
                    self.late[name] = value  # the last one counts: earlier ones went with the notes of their turns
                    return _phrase(name, slot), False
                self.warnings[f"slot {name!r} is to be bound late, but there is no user turn; it stays"] = None
            case "patch":
                self.warnings[f"slot {name!r}: placement patch is not there yet; it is inline"] = None
        return value, True


def _phrase(name: str, slot: SlotPolicy) -> str:
    return f"[{name}: see the last note]" if slot.phrase is None else slot.phrase


class _Builder:
    """Puts one message's text together and notes where each value lands."""

    def __init__(self, values: Mapping[str, str], path: str, is_operators: bool, rules: _Rules) -> None:
        self.pieces: list[str] = []
        self.spans: list[SlotSpan] = []
        self.used: set[str] = set()
        self._values = values
        self._path = path
        self._is_operators = is_operators
        self._rules = rules
        self._length = 0

    def add_text(self, text: str) -> None:
        position = 0
        for match in _MARKER.finditer(text):
            if match[1] not in self._values and not self._is_operators:
                continue
            self._append(text[position : match.start()])
            self.add_slot(match[1], None)
            position = match.end()
        self._append(text[position:])

    def add_slot(self, name: str, own: str | None) -> None:
        value = self._values.get(name) if own is None else own
        self.used.add(name)
        if value is None:
            raise InvalidRequest("missing_slot", self._path, f"give slot {name!r} a value in slots=")
        text, varies = self._rules.shown(name, value)
        if varies:
            self.spans.append(SlotSpan(name, self._length, self._length + len(text)))
        self._append(text)

    def _append(self, text: str) -> None:
        self.pieces.append(text)
        self._length += len(text)


def _check_slots(slots: object) -> dict[str, str]:
    if slots is None:
        return {}
    if not isinstance(slots, Mapping):
        raise InvalidRequest("bad_slots", "slots", "must map slot names to text")
    checked: dict[str, str] = {}
    for i, (name, value) in enumerate(slots.items()):
        if not isinstance(name, str) or not SLOT_NAME.fullmatch(name) or not isinstance(value, str):
            raise InvalidRequest("bad_slots", f"slots[{i}]", "must map slot names (letters, digits, . _ -) to text")
        checked[str(name)] = check_text(str(value), f"slots[{name}]")
    return checked
