"""Which characters of a rendered prompt come from what: found by rendering, never by parsing markers.

Two ways. *Anchored*: unique words around every content show where the template put it; what stands between two
contents is cut where the chat that ends with the first one stops agreeing. *By prefixes*: where anchors change what
the template renders, each boundary is how far the whole prompt agrees with the render of its first messages.

Both keep one promise, on which scopes rest: text labelled with a message, or with anything before it, holds no content
of a later message. In doubt, text belongs to the later, narrower part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefixkv.chat.labels import Label, Layout, last_user
from prefixkv.chat.rendering import Anchors, ChatInput, Rendered, common_prefix, common_suffix
from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.shapes import Tails

__all__ = ["Anchored", "lay_out_by_prefixes", "lay_out_with_anchors"]

_MOST_TAILS = 1024


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
        places: Start and end of each content, in the order of the messages; empty where one was not found whole.
    """

    layout: Layout
    places: tuple[tuple[int, int], ...]


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
    in_order = [span.message for span in spans] == list(range(len(chat.messages)))
    is_whole = in_order and all(span.is_whole for span in spans)
    return Anchored(layout, tuple((span.start, span.end) for span in spans) if is_whole else ())


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
        self._setting = (bool(chat.tools), repr(sorted(chat.template_kwargs.items())))
        self._tools = self._find_tools()

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
        is_plain = (
            i == last and span.is_whole and _is_plain(self._chat.messages[i]) and self._chat.add_generation_prompt
        )
        key = (self._text[span.end :], self._labels[i].role, "end", *self._setting)
        if is_plain and key in self._tails:
            shared, is_complete = self._tails[key]
            if is_complete:
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
        if is_plain:
            self._tails[key] = cut - span.end, is_complete
        if self._chat.add_generation_prompt and is_complete:
            self._add(cut, _GENERATION)

    def _between(self, start: int, end: int, i: int, following: int) -> int:
        """Label the messages between ``i`` and ``following`` that have no content to anchor; return where they end."""
        for m in range(i + 1, following):
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
        key = (gap, self._labels[i].role, self._labels[following].role, *self._setting)
        if is_pure and key in self._tails:  # no need to render again
            return start + self._tails[key][0]
        alone = self._prefix(i)
        place = None if alone is None else alone.at.get(2 * i + 1)
        shared = 0 if alone is None or place is None else common_prefix(gap, alone.text[place:])
        if is_pure:
            self._tails[key] = shared, False
        return start + shared

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

    def _find_tools(self) -> dict[int, tuple[int, int]]:
        """Return where tools are rendered: number of the gap -> (start, end). Gap 0 is before the first content."""
        if not self._chat.tools:
            return {}
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
            self._warnings.append("the template does not show the tools to the model")
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


def lay_out_by_prefixes(
    chat: ChatInput, labels: Sequence[Label], slots: Sequence[tuple[int, str]], text: str
) -> Layout:
    """Return a coarser layout of ``text``, the render of ``chat``, without anchors.

    Args:
        chat: The chat.
        labels: Of the messages.
        slots: (message, name) of every slot; from its message on nothing is shared wider than the slot.
        text: What the chat renders to.
    """
    messages = chat.messages
    last, user = len(messages) - 1, last_user(messages)
    wanted = sorted({i for i in (0, (user or 0) - 1, user, last) if i is not None and i >= 0})
    layout = Layout([(0, labels[wanted[0]])], [], [])
    ends: dict[int, int] = {}
    cut = 0
    for i in wanted:
        if i == last and not chat.add_generation_prompt:
            continue
        alone = chat.prefix(i + 1).try_render()
        end = 0 if alone is None else common_prefix(text, alone)
        if end > cut:
            layout.starts[-1] = (cut, labels[i])
            cut = ends[i] = end
            layout.starts.append((cut, labels[min(i + 1, last)]))
        else:
            layout.starts[-1] = (cut, labels[min(i + 1, last)])
    if chat.add_generation_prompt and last in ends:
        layout.starts[-1] = (cut, _GENERATION)
    for i, name in slots:
        begin = max((end for message, end in ends.items() if message < i), default=0)
        layout.narrowed.append((begin, Label(SegmentKind.SLOT, labels[i].role, i, name)))
    if slots:
        layout.warnings.append("the template changes the messages, so slots count from the start of their message")
    if chat.tools:
        _overlay_tools(chat, text, layout, ends.get(0, 0) if labels[0].kind is SegmentKind.SYSTEM else 0)
    return layout


def _overlay_tools(chat: ChatInput, text: str, layout: Layout, system_end: int) -> None:
    """Label the tools inside the system message, and narrow all that follows their start."""
    bare = replace(chat, tools=None).try_render()
    start = 0 if bare is None else common_prefix(text, bare)
    layout.narrowed.append((start, _TOOLS))
    end = 0 if bare is None else min(system_end, len(text) - common_suffix(text[start:], bare[start:]))
    if start < end:
        system = layout.starts[0][1]
        layout.starts[:1] = [(0, system), (start, _TOOLS), (end, system)]
