"""What a template writes between two contents: its own words, and fields of the messages around them.

A gap is taken apart by looking for what the messages hold besides their text (names, ids and arguments of calls,
reasoning, white space around contents) in the ways in which templates write it. That is a guess; who uses it puts the
gap together again for other messages and compares the outcome with what the template rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.chat.labels import Label

__all__ = ["Field", "Gap", "Mark", "content_of", "details", "signature", "split_gap", "words_of"]

_MOST_CALLS, _MOST_ARGUMENTS = 8, 32
_WORD = re.compile(r"\w+")
_OF_CALLS = ("function.arguments", "function.name", "id")
_OF_MESSAGES = ("reasoning_content", "tool_call_id", "name")
_AROUND = ("before", "behind")
_ITEMS = ("key ", "value ")
_KNOWN = {"role", "content", "tool_calls", *_OF_MESSAGES}
_CALL, _FUNCTION, _TEXTS = {"id", "type", "function"}, {"name", "arguments"}, {str, type(None)}
_WORDS = ("function.name", "id", "tool_call_id", "name")
"""Fields that are whole words: ``find`` is not the beginning of ``finding``."""


def _in_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_FORMS: tuple[Callable[[Any], str], ...] = (
    str,  # text as it is; a mapping as Python writes it
    _in_json,
    lambda value: json.dumps(value, ensure_ascii=False, indent=4),
    lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True),
    json.dumps,
    lambda value: _in_json(_in_json(value)),
    lambda value: str(value).strip(),
)
"""The ways in which templates write a field."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message in a gap.

    Attributes:
        message: Which message: 0 is the one whose content stands before the gap.
        name: Which of its fields.
        call: Of which of its tool calls.
        form: How it is written.
    """

    message: int
    name: str
    call: int
    form: int

    def text(self, message: Mapping[str, Any]) -> str | None:
        """Return what is written for a message, or None if it has no such field."""
        value = _value(message, self.name, self.call)
        return None if value is None else _FORMS[self.form](value)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a gap from which on something counts.

    Attributes:
        label: What the text is from there on: a number is the label of that message; see :class:`Field`.
        narrows: Whether it is that nothing behind it is shared wider than the label.
    """

    label: int | Label
    narrows: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands between two contents, or behind the last: the template's words, fields and marks. Frozen."""

    pieces: tuple[str | Field | Mark, ...]

    @property
    def characters(self) -> int:
        """How many characters of the template's words it holds."""
        return sum(len(piece) for piece in self.pieces if isinstance(piece, str))

    @property
    def is_detailed(self) -> bool:
        """Whether it writes each argument of a call by itself; then it fits only calls of the same :func:`details`."""
        return any(isinstance(piece, Field) and piece.name.startswith(_ITEMS) for piece in self.pieces)

    def is_made_of(self, words: Container[str]) -> bool:
        """Return whether the template's words are really that, and none of them is a caller's."""
        pieces = (piece for piece in self.pieces if not isinstance(piece, Mark))
        text = "".join(piece if isinstance(piece, str) else "\n" for piece in pieces)
        return all(word in words for word in _WORD.findall(text))

    def fill(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, Mark]]] | None:
        """Return the words for other messages, and the place of each mark; None if a field lacks."""
        texts: list[str] = []
        marks: list[tuple[int, Mark]] = []
        place = 0
        for piece in self.pieces:
            if isinstance(piece, Mark):
                marks.append((place, piece))
                continue
            text = piece if isinstance(piece, str) else piece.text(messages[piece.message])
            if text is None:
                return None
            texts.append(text)
            place += len(text)
        return "".join(texts), marks


def words_of(*texts: str) -> frozenset[str]:
    """Return the words in texts: those that a template can write by itself."""
    return frozenset(word for text in texts for word in _WORD.findall(text))


def content_of(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a message's content without outer white space, which templates trim, and that before and behind it."""
    content = message["content"] or ""
    bare = content.strip()
    before = len(content) - len(content.lstrip()) if bare else 0
    return bare, content[:before], content[before + len(bare) :]


def signature(message: Mapping[str, Any]) -> tuple[object, ...] | None:
    """Return what kind of message it is, so that a template writes the same words around it; None if unknown."""
    role, content = message["role"], message["content"]
    if len(message) == 2 and content and not (content[0].isspace() or content[-1].isspace()):
        return (role,)
    if not message.keys() <= _KNOWN:
        return None
    calls = message.get("tool_calls") or ()
    kinds = tuple(map(_call_kind, calls)) if isinstance(calls, list | tuple) and len(calls) <= _MOST_CALLS else (None,)
    texts = tuple([type(message.get(name)) for name in _OF_MESSAGES])
    if None in kinds or not _TEXTS.issuperset(texts):
        return None
    bare, before, behind = content_of(message)
    return (role, bool(bare), content is None, bool(before), bool(behind), kinds, texts)


def details(messages: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    """Return of which types the arguments of each call are, for templates that write each by itself."""
    calls = [call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or ()]
    return tuple(tuple(map(type, found.values())) for found in calls if isinstance(found, Mapping))


def split_gap(gap: str, messages: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, Mark]]) -> Gap:
    """Take a gap apart.

    Args:
        gap: The text.
        messages: From the one before it to the one behind it.
        marks: Places in it, in order.
    """
    pieces: list[str | Field | Mark] = []
    waiting = list(marks)
    place = 0
    for text, field in _parts(gap, messages):
        end = place + len(text)
        while waiting and waiting[0][0] < end:
            start, mark = waiting.pop(0)
            if field is None and start > place:
                pieces.append(gap[place:start])
                place = start
            pieces.append(mark)  # where it was inside a field, it is before it
        while waiting and field is not None and any(_is_due(mark, field) for _, mark in waiting):
            pieces.append(waiting.pop(0)[1])
        pieces.append(gap[place:end] if field is None else field)
        place = end
    return Gap((*pieces, *(mark for _, mark in waiting)))


def _is_due(mark: Mark, field: Field) -> bool:
    """Return whether a message is marked to begin that has begun: no later than with its first field."""
    return isinstance(mark.label, int) and mark.label <= field.message


def _parts(gap: str, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Field | None]]:
    """Return the stretches of a gap in order, each with the field that it is."""
    wanted: dict[str, list[Field]] = {}
    whole: set[tuple[int, int]] = set()
    for number, message in enumerate(messages):
        for name, call, value in _fields(message):
            if value is None or (name.startswith(_ITEMS) and (number, call) in whole):
                continue
            seen = set()
            for form, write in enumerate(_FORMS):
                text = write(value)
                if text and text not in seen and text in gap:
                    seen.add(text)
                    wanted.setdefault(text, []).append(Field(number, name, call, form))
            if name == "function.arguments" and seen:
                whole.add((number, call))
    first, last = 0, len(gap)
    front: list[tuple[str, Field | None]] = []
    back: list[tuple[str, Field | None]] = []
    behind, before = content_of(messages[0])[2], content_of(messages[-1])[1] if len(messages) > 1 else ""
    if behind and gap.startswith(behind):  # else the template trims it
        front, first = [(behind, Field(0, "behind", 0, 0))], len(behind)
    if before and gap.endswith(before, first):
        back, last = [(before, Field(len(messages) - 1, "before", 0, 0))], last - len(before)
    middle: list[tuple[str, Field | None]] = []
    while first < last:
        found = [(place, -len(text), text) for text in wanted if (place := _find(gap, text, first, last, wanted)) >= 0]
        place, _, text = min(found, default=(last, 0, ""))
        if place > first:
            middle.append((gap[first:place], None))
        if text:
            fields = wanted[text]
            middle.append((text, fields.pop(0) if len(fields) > 1 else fields[0]))  # equal ones in their order
        first = place + len(text)
    return [*front, *middle, *back]


def _find(gap: str, text: str, start: int, end: int, wanted: Mapping[str, Sequence[Field]]) -> int:
    """Return where a field's text stands from ``start`` on, or -1; names only as whole words."""
    place = gap.find(text, start, end)
    if not wanted[text][0].name.startswith((*_WORDS, *_ITEMS)):
        return place
    while place >= 0:
        around = gap[place - 1 : place] + gap[place + len(text) : place + len(text) + 1]
        if not any(char.isalnum() or char == "_" for char in around):
            return place
        place = gap.find(text, place + 1, end)
    return -1


def _fields(message: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield what a message holds besides role and text: name, number of the call, value."""
    if len(message) > 2:
        for call in range(len(message.get("tool_calls") or ())):
            for name in _OF_CALLS:
                yield name, call, _value(message, name, call)
            arguments = _value(message, "function.arguments", call)
            is_short = isinstance(arguments, Mapping) and len(arguments) <= _MOST_ARGUMENTS
            for number in range(len(arguments) if is_short else 0):
                for name in (f"key {number}", f"value {number}"):
                    yield name, call, _value(message, name, call)
        for name in _OF_MESSAGES:
            yield name, 0, message.get(name)


def _value(message: Mapping[str, Any], name: str, call: int) -> Any:
    if name in _OF_MESSAGES:
        return message.get(name)
    if name in _AROUND:
        return content_of(message)[_AROUND.index(name) + 1] or None
    tool_call = message["tool_calls"][call]
    if name in _OF_CALLS:
        return tool_call.get("id") if name == "id" else tool_call["function"].get(name.removeprefix("function."))
    what, _, number = name.partition(" ")
    arguments = tool_call["function"]["arguments"]
    return (list(arguments) if what == "key" else list(arguments.values()))[int(number)]


def _call_kind(call: object) -> tuple[type, ...] | None:
    """Return the types of what a tool call holds; None if it holds more than :func:`_fields` knows."""
    if not isinstance(call, dict) or not call.keys() <= _CALL or call.get("type") not in (None, "function"):
        return None
    function = call.get("function")
    if not isinstance(function, dict) or not function.keys() <= _FUNCTION:
        return None
    return type(function.get("arguments")), type(function.get("name")), type(call.get("id"))
