"""Which characters of a rendered prompt come from what: found by rendering, never by parsing markers.

Two ways. *Anchored*: unique words around every content show where the template put it; what stands between two
contents is cut where the chat that ends with the first one stops agreeing. *By prefixes* (``prefixes.py``): where
anchors change what the template renders, each boundary is how far the prompt agrees with the render of its first
messages.

Both keep one promise, on which scopes rest: text labelled with a message, or with anything before it, holds no content
of a later message. In doubt, text belongs to the later, narrower part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefixkv.chat.labels import TOOLS_NOT_SHOWN, Label, Layout
from prefixkv.chat.rendering import Anchors, ChatInput, Rendered, common_prefix, common_suffix
from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.shapes import Tails

__all__ = ["Anchored", "lay_out_with_anchors"]

_MOST_TAILS = 1024
_MOST_EXACT = 4
"""Boundaries between turns of the history that are looked for by rendering, where no known words tell them."""


_STUB_TOOLS = [
    {
        "type": "function",
        "function": {"name": "-", "description": "-", "parameters": {"type": "object", "properties": {}}},
    }
]
_PREAMBLE = Label(SegmentKind.PREAMBLE)
_TOOLS = Label(SegmentKind.TOOLS)
_GENERATION = Label(SegmentKind.GENERATION_PROMPT)


@dataclass(frozen=True, slots=True)
class Anchored:
    """A layout and where the contents were found.

    Attributes:
        layout: The layout.
        places: Message to start and end of its content; empty where one was not found whole, or not in its turn.
    """

    layout: Layout
    places: Mapping[int, tuple[int, int]]


def lay_out_with_anchors(
    chat: ChatInput, labels: Sequence[Label], anchors: Anchors, text: str, tails: Tails
) -> Anchored | None:
    """Return the layout of ``text``, the render of ``chat``; None if anchors change what the template renders.

    Args:
        chat: The chat, with anchors in its messages.
        labels: Of the messages.
        anchors: The anchors.
        text: What the chat renders to without anchors.
        tails: What is known of the template already; more is added.
    """
    marked = chat.try_render()
    full = None if marked is None else anchors.locate(marked)
    if full is None or full.text != text:
        return None
    spans = _spans(full, len(chat.messages))
    if not spans:
        return None
    if len(tails) > _MOST_TAILS:
        tails.clear()
    layout = _Anchored(chat, labels, anchors, full, spans, tails).lay_out()
    shown = [i for i, message in enumerate(chat.messages) if (message["content"] or "").strip()]
    is_whole = [span.message for span in spans] == shown and all(span.is_whole for span in spans)
    return Anchored(layout, {span.message: (span.start, span.end) for span in spans} if is_whole else {})


@dataclass(frozen=True, slots=True, order=True)
class _Span:
    """A content in the prompt. One whose template dropped one end is not whole: the other stands for both."""

    start: int
    end: int
    message: int
    is_whole: bool


def _spans(rendered: Rendered, messages: int) -> list[_Span]:
    """Return the contents in the prompt, as the template orders them."""
    spans = []
    for i in range(messages):
        places = [rendered.at[anchor] for anchor in (2 * i, 2 * i + 1) if anchor in rendered.at]
        if places:
            spans.append(_Span(places[0], places[-1], i, len(places) == 2))
    return sorted(spans)


class _Anchored:
    """One layout in the making: walks the gaps between contents."""

    def __init__(
        self,
        chat: ChatInput,
        labels: Sequence[Label],
        anchors: Anchors,
        full: Rendered,
        spans: list[_Span],
        tails: Tails,
    ) -> None:
        self._chat, self._labels, self._anchors, self._full, self._spans = chat, labels, anchors, full, spans
        self._text = full.text
        self._starts: list[tuple[int, Label]] = []
        self._narrowed: list[tuple[int, Label]] = []
        self._warnings: list[str] = []
        self._prefixes: dict[int, Rendered | None] = {}
        self._tails = tails
        # The same text of the template behind the same roles ends where it ended before.
        self._setting = repr((bool(chat.tools), sorted(chat.template_kwargs.items())))
        self._exact = _MOST_EXACT
        self._tools = self._known_tools()

    def lay_out(self) -> Layout:
        self._head()
        for k, span in enumerate(self._spans):
            self._content(span)
            if k + 1 < len(self._spans):
                self._gap(span, self._spans[k + 1], k + 1)
            else:
                self._tail(span)
        self._unplaced_slots()
        return Layout(self._starts, self._narrowed, self._warnings)

    # -- the parts -----------------------------------------------------------------------------------------------

    def _head(self) -> None:
        """Label what stands before the first content."""
        i, start = self._spans[0].message, self._spans[0].start
        first = self._chat.messages[0]
        if not (self._spans[0].is_whole and _is_plain(first) and (first["content"] or "").strip()):
            # It may show more than text before its text, or be nothing but white space, without anchors.
            self._add(0, self._labels[0])
            self._between(0, start, -1, i)
            return
        alone = self._prefix(0)
        end = 0 if alone is None else min(start, common_prefix(self._text, alone.text))
        content = self._chat.messages[i]["content"]
        if self._labels[i].kind is not SegmentKind.SYSTEM or content[:1].isspace():
            # White space here may be the content's own. Give it up in every request, not only where it is.
            end = len(self._text[:end].rstrip())
        self._add(0, _PREAMBLE)
        if region := self._tools.get(0):
            self._add(min(region[0], end), _TOOLS)
            # Text behind the tools belongs to a system message that is open there; else it is the template's own.
            self._add(min(region[1], end), self._labels[i] if self._labels[i].kind is SegmentKind.SYSTEM else _PREAMBLE)
        self._add(end, self._labels[i])

    def _content(self, span: _Span) -> None:
        """Label a content and the slots in it."""
        start, end, i = span.start, span.end, span.message
        self._add(start, self._labels[i])
        if not span.is_whole:
            self._narrowed.append((self._begin(i), self._labels[i]))
        for message, anchor, name in self._anchors.slots:
            if message != i:
                continue
            places = [self._full.at.get(anchor), self._full.at.get(anchor + 1)]
            first, last = places
            label = Label(SegmentKind.SLOT, self._labels[i].role, i, name)
            if first is not None and last is not None and start <= first <= last <= end:
                self._add(first, label)
                self._add(last, self._labels[i])
            elif places != [None, None]:  # half of it was dropped or moved
                self._narrowed.append((min(self._begin(i), *(place for place in places if place is not None)), label))

    def _gap(self, before: _Span, after: _Span, number: int) -> None:
        """Label what stands between two contents: the end of one message, tools, the head of the next."""
        i, following, end = before.message, after.message, after.start
        is_pure = following == i + 1 and before.is_whole and after.is_whole
        is_pure = is_pure and all(_is_plain(self._chat.messages[m]) for m in (i, following))
        cut = self._cut(before, end, following, is_pure)
        region = self._tools.get(number)
        if region is None:
            self._add(cut, self._labels[following])
            self._between(cut, end, i, following)
        elif is_pure:
            # All of a pure gap is the template's own text: what leads up to the tools may be shared as they are.
            self._add(min(cut, region[0]), _TOOLS)
            self._add(max(cut, region[1]), self._labels[following])
        else:
            self._add(min(region[0], cut), _TOOLS)
            self._add(cut, self._labels[following])
            self._between(cut, end, i, following)

    def _tail(self, span: _Span) -> None:
        """Label what stands behind the last content: the end of its message, messages without text, the header."""
        i, last, end = span.message, len(self._chat.messages) - 1, len(self._text)
        # Behind the text of a message that calls nothing stands the template's own.
        is_closed = i == last and span.is_whole and "tool_calls" not in self._chat.messages[i]
        key = self._key("end", self._text[span.end :], self._labels[i].role)
        known = self._tails.get(key) if is_closed and self._chat.add_generation_prompt else None
        if known is not None:
            shared, is_known = known
            if is_known:
                self._add(span.end + shared, _GENERATION)
            return
        cut = self._cut(span, end, i, False)
        alone = self._prefix(last)
        if i < last:
            self._add(cut, self._labels[i + 1])
            cut = self._between(cut, end, i, last + 1)
            is_complete = alone is not None and cut == min(end, common_prefix(self._text, alone.text))
        else:
            is_complete = span.is_whole and alone is not None and 2 * i + 1 in alone.at
        if is_closed and self._chat.add_generation_prompt:
            self._tails[key] = cut - span.end, int(is_complete)
        if self._chat.add_generation_prompt and is_complete:
            self._add(cut, _GENERATION)

    def _between(self, start: int, end: int, i: int, following: int) -> int:
        """Label the messages between ``i`` and ``following`` that have no content to anchor; return where they end."""
        for m in range(i + 1, following):
            if m + 1 < len(self._labels) and self._is_inner(m, m + 1):
                continue
            alone = self._prefix(m)
            cut = 0 if alone is None else min(end, common_prefix(self._text, alone.text))
            if cut > start:
                self._add(start, self._labels[m])
                start = cut
                self._add(start, self._labels[min(m + 1, len(self._labels) - 1)])
        if start < end and following < len(self._labels):
            self._add(start, self._labels[following])
        return start

    # -- finding places ------------------------------------------------------------------------------------------

    def _cut(self, span: _Span, end: int, following: int, is_pure: bool) -> int:
        """Return where a message ends: as far as the chat that stops there goes on with the same text."""
        i, start = span.message, span.end
        if not span.is_whole:
            return start
        gap = self._text[start:end]
        key = self._key(gap, self._labels[i].role, self._labels[following].role)
        known = self._tails.get(key) if is_pure else None
        if known is not None:  # no need to render again
            return start + known[0]
        if not is_pure and self._is_inner(i, following):
            return start
        alone = self._prefix(i)
        place = None if alone is None else alone.at.get(2 * i + 1)
        shared = 0 if alone is None or place is None else common_prefix(gap, alone.text[place:])
        if is_pure:
            self._tails[key] = shared, 0
        return start + shared

    def _is_inner(self, i: int, following: int) -> bool:
        """Return whether a boundary only parts two turns of the history, and enough of those were looked for.

        Each costs a render of all before it. Without, the words between count as the later turn's; scopes are the same.
        """
        kinds = {self._labels[i].kind, self._labels[following].kind}
        if kinds != {SegmentKind.HISTORY} or i == following:
            return False
        self._exact -= 1
        return self._exact < 0

    def _key(self, *parts: str | None) -> bytes:
        """Return a digest of words of the template and of what else decides what they mean; the words are not kept."""
        return hashlib.blake2b(repr((self._setting, parts)).encode(), digest_size=16).digest()

    def _prefix(self, i: int) -> Rendered | None:
        """Return the render of the chat up to message ``i``.

        Where a template refuses to end there, or leaves the message out, a made-up user turn goes behind it: the
        render still holds nothing of the real messages that follow.
        """
        if i not in self._prefixes:
            alone = self._locate(self._chat.prefix(i + 1))
            if i + 1 < len(self._chat.messages) and (alone is None or 2 * i + 1 not in alone.at):
                stub = [*self._chat.messages[: i + 1], {"role": "user", "content": "-"}]
                followed = self._locate(replace(self._chat.prefix(i + 1), messages=stub))
                if alone is None or (followed is not None and 2 * i + 1 in followed.at):
                    alone = followed
            self._prefixes[i] = alone
        return self._prefixes[i]

    def _locate(self, chat: ChatInput) -> Rendered | None:
        marked = chat.try_render()
        return None if marked is None else self._anchors.locate(marked)

    def _known_tools(self) -> dict[int, tuple[int, int]]:
        """Return where tools are rendered. The same words before the first turn have them where they had them."""
        if not self._chat.tools:
            return {}
        starts, ends = _gaps(self._spans, len(self._text))
        # Behind the system text, or before the first content whatever it is.
        gaps = (0, 1) if self._labels[0].kind is SegmentKind.SYSTEM and len(self._spans) > 1 else (0,)
        keys = {gap: self._key("tools", str(gap), self._text[starts[gap] : ends[gap]]) for gap in gaps}
        for gap, key in keys.items():
            if (known := self._tails.get(key)) is not None:
                start, end = (starts[gap] + place for place in known)
                self._narrowed.append((start, _TOOLS))
                return {gap: (start, end)}
        found = self._find_tools()
        for gap, (start, end) in found.items():
            if len(found) == 1 and gap in gaps and self._narrowed == [(start, _TOOLS)]:
                self._tails[keys[gap]] = start - starts[gap], end - starts[gap]
        return found

    def _find_tools(self) -> dict[int, tuple[int, int]]:
        """Return where tools are rendered: number of the gap -> (start, end). Gap 0 is before the first content."""
        bare = self._locate(replace(self._chat, tools=None))
        if bare is None:  # some templates are for tools only: compare with made-up ones
            bare = self._locate(replace(self._chat, tools=_STUB_TOOLS))
        spans = [] if bare is None else _spans(bare, len(self._chat.messages))
        if bare is None or [span.message for span in spans] != [span.message for span in self._spans]:
            self._narrowed.append((0, _TOOLS))
            self._warnings.append("where the template renders tools could not be found")
            return {}
        found: dict[int, tuple[int, int]] = {}
        ours = zip(*_gaps(self._spans, len(self._text)), *_gaps(spans, len(bare.text)), strict=True)
        for number, (start, end, other_start, other_end) in enumerate(ours):
            gap, other = self._text[start:end], bare.text[other_start:other_end]
            if gap == other:
                continue
            behind = common_suffix(gap, other)
            before = min(common_prefix(gap, other), len(other) - behind, len(gap) - behind)
            if before < len(gap) - behind:
                found[number] = (start + before, end - behind)
            self._narrowed.append((start + before, _TOOLS))
        if not found:
            self._warnings.append(TOOLS_NOT_SHOWN)
        return found

    def _unplaced_slots(self) -> None:
        for i, name in self._anchors.unplaced:
            self._narrowed.append((self._begin(i), Label(SegmentKind.SLOT, self._labels[i].role, i, name)))

    def _begin(self, i: int) -> int:
        """Return where anything of message ``i`` can start."""
        for k, span in enumerate(self._spans):
            if span.message == i:
                return self._spans[k - 1].end if k else 0
        return 0

    def _add(self, start: int, label: Label) -> None:
        if self._starts and start <= self._starts[-1][0]:
            start = self._starts[-1][0]
        self._starts.append((start, label))


def _gaps(spans: Sequence[_Span], length: int) -> tuple[list[int], list[int]]:
    return [0, *(span.end for span in spans)], [*(span.start for span in spans), length]


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether nothing but role and text of a message can be rendered."""
    return set(message) <= {"role", "content"}
