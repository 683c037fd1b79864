"""Text that nobody declared and that changes from request to request: found by comparing, named by its look.

Only the head of a prompt, what stands before its turns, is compared, and only with heads that the same scope sent.
What is found is told by its kind, never by its words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefixkv.chat.rendering import common_prefix, common_suffix

__all__ = ["VolatileSpan", "kind_of", "volatile_spans"]

_MOST_SPANS = 8
_MOST_SHARE = 0.25
"""Of a head: where more than this differs, it is another text, not the same one with a clock in it."""

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY = r"\b(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
_DAY = r"\b\d{1,2}(?:st|nd|rd|th)?"
_STAMPS = (
    ("uuid", re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    ("clock", re.compile(r"(?<!\d)\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[ap]\.?m\b)?", re.IGNORECASE)),
    (
        "date",
        re.compile(r"(?<![\w.])(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2}))(?![\d.]\d|\d)"),
    ),
    ("date", re.compile(rf"(?:{_DAY},?[ -]?{_MONTH}|\b{_MONTH}[ -]?{_DAY}\b),?(?:[ -]\d{{4}}\b)?", re.IGNORECASE)),
    ("date", re.compile(rf"{_WEEKDAY}|\b{_MONTH}(?: \d{{4}}\b)?", re.IGNORECASE)),
)
"""Known by the shape of what stands there, also where only a part of it changed."""
_VALUES = (
    ("counter", re.compile(r"[#№]?\d{1,9}")),
    ("clock", re.compile(r"1\d{9}(?:\d{3})?(?:\.\d+)?")),
    ("nonce", re.compile(r"(?=[^\s]*\d)[A-Za-z0-9+/_=-]{6,}")),
    ("name", re.compile(r"[A-ZÀ-Þ][\w'\u2019.-]*(?: [A-ZÀ-Þ][\w'\u2019.-]*){0,3}")),
)
"""Known only where the value is nothing else."""
_WORD = re.compile(r"[\w:+/.@#'\u2019-]")
_EDGES = " .'\u2019-:/"
_NEAR_CHARACTERS = 24
_LONGEST_VALUE = 80
_UNITS = re.compile(r"(?<=\n)|(?<=[.!?;])(?=\s)")
"""Where lines and sentences end."""


@dataclass(frozen=True, slots=True)
class VolatileSpan:
    """A place of a text where requests differ. Frozen.

    Attributes:
        kind: ``clock``, ``date``, ``uuid``, ``counter``, ``nonce``, ``name`` or ``text``.
        start: First character.
        end: One past the last.
    """

    kind: str
    start: int
    end: int


def volatile_spans(text: str, other: str) -> tuple[VolatileSpan, ...]:
    """Return where ``text`` differs from ``other``, if the two are the same text but for a few short places.

    Returns:
        The places in ``text``, in order; none if the texts are equal, or different texts.
    """
    if text == other or not text or not other:
        return ()
    pairs = _changed(text, other)
    if len(pairs) > _MOST_SPANS:
        return ()
    differing = sum(max(end - start, other_end - other_start) for start, end, other_start, other_end in pairs)
    if differing > _MOST_SHARE * len(text):
        return ()
    return tuple(
        VolatileSpan(kind_of(text, start, end, other[other_start:other_end]), start, end)
        for start, end, other_start, other_end in pairs
    )


def kind_of(text: str, start: int, end: int, other: str) -> str:
    """Return what a changing place looks like.

    Args:
        text: All of the text.
        start: First character of the place.
        end: One past its last.
        other: What stood there before.
    """
    value = text[start:end]
    if max(len(value), len(other)) > _LONGEST_VALUE:
        return "text"
    # A clock whose hour stayed the same shows only its minutes as changed: look at what it is a part of.
    first = start
    while first > 0 and start - first < _NEAR_CHARACTERS and _WORD.match(text[first - 1]):
        first -= 1
    last = end
    while last < len(text) and last - end < _NEAR_CHARACTERS and _WORD.match(text[last]):
        last += 1
    whole = text[first:last].strip(_EDGES)
    # So is a date of which only the day changed; its parts have spaces between them.
    low, high = max(0, start - _NEAR_CHARACTERS), min(len(text), end + _NEAR_CHARACTERS)
    for kind, pattern in _STAMPS:
        if any(match.start() < end and match.end() > start for match in pattern.finditer(text, low, high)):
            return kind
    for kind, pattern in _VALUES:
        if pattern.fullmatch(whole) or pattern.fullmatch(value.strip(_EDGES)):
            if kind == "counter" and not re.fullmatch(r"[#№]?\d{1,9}", other.strip(_EDGES) or "0"):
                continue
            return kind
    return "text"


def _changed(text: str, other: str) -> list[tuple[int, int, int, int]]:
    """Return (start, end, start, end) of whole words that differ: one a sentence, or one if there are more sentences.

    Stops once there are more than can count.
    """
    lines, others = _UNITS.split(text), _UNITS.split(other)
    if len(lines) != len(others):
        return [_narrowed(text, other, 0, 0)]
    found = []
    place = other_place = 0
    for line, other_line in zip(lines, others, strict=True):
        if line != other_line:
            found.append(_narrowed(line, other_line, place, other_place))
            if len(found) > _MOST_SPANS:
                break
        place += len(line)
        other_place += len(other_line)
    return found


def _narrowed(line: str, other: str, place: int, other_place: int) -> tuple[int, int, int, int]:
    """Return the words in which two lines differ, from the first such word to the last."""
    before = common_prefix(line, other)
    behind = min(common_suffix(line, other), min(len(line), len(other)) - before)
    first, least = max(0, before - _LONGEST_VALUE), max(0, behind - _LONGEST_VALUE)
    while before > first and _WORD.match(line[before - 1]):
        before -= 1
    while behind > least and _WORD.match(line[len(line) - behind]):
        behind -= 1
    return place + before, place + len(line) - behind, other_place + before, other_place + len(other) - behind
