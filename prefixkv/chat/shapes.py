"""Layouts without a second render: a template's own words around contents, learnt once and checked word for word.

An anchored layout shows what a template writes before the first content, between two contents and behind the last one.
If those words and a new chat's contents, put together, are exactly what the template rendered, each content stands
where its turn came. If they are not, nothing is assumed and the chat is rendered with anchors.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prefixkv.chat.gaps import Gap, Mark, content_of, details, signature, split_gap
from prefixkv.chat.labels import TOOLS_NOT_SHOWN, Label, Layout, last_user
from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.slots import SlotSpan

__all__ = ["RenderedChat", "Shapes", "Tails"]

_MOST_HEADS, _LONGEST_HEAD = 4, 2**16
_MOST_HIDDEN = 8
"""Messages without text between two with text, at most: what a gap costs grows with what it may hold."""
_MOST_GAPS, _LONGEST_GAP, _MOST_CHARACTERS = 512, 2**16, 2**19

Tails = dict[bytes, tuple[int, int]]
"""Digest of words of the template, and of what else decides what they mean, to two places in them: where a message ends
and whether a generation prompt follows, or where the tools start and end."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands before the first content: text, (place, label), and where nothing wider may be shared."""

    text: str
    starts: tuple[tuple[int, Label], ...]
    narrowed: tuple[tuple[int, Label], ...]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat and what it was rendered to. Frozen.

    Attributes:
        setting: All that decides the template's words besides messages and tools.
        tools: Digests of the tools.
        messages: The messages.
        labels: Of the messages.
        spans: Slots in each message.
        text: What they were rendered to.
    """

    setting: tuple[object, ...]
    tools: tuple[bytes, ...]
    messages: Sequence[Mapping[str, Any]]
    labels: Sequence[Label]
    spans: Sequence[Sequence[SlotSpan]]
    text: str


class Shapes:
    """Words of the template as one tenant's chats showed them. Any thread may use it.

    What stands before the first content may hold the tenant's tools, so tenants do not share these.

    Attributes:
        tails: What anchored layouts found out about single gaps.
        settled: What :meth:`~prefixkv.chat.encoding.Encoder.settled` found out about text that the tenant shares.
    """

    def __init__(self) -> None:
        self.tails: Tails = {}
        self.settled: dict[bytes, int] = {}
        self._heads: dict[tuple[object, ...], _Head] = {}
        self._gaps: dict[tuple[object, ...], Gap] = {}
        self._characters = 0

    def lay_out(self, chat: RenderedChat) -> Layout | None:
        """Return the layout of a rendered chat, or None if its shape is not known; changes nothing."""
        found = self._fill(chat)
        if found is None or found[0] != chat.text:
            return None
        return found[1]

    def _fill(self, chat: RenderedChat) -> tuple[str, Layout] | None:
        """Return what a chat renders to if the template does as it did, and the layout of that."""
        messages, labels = chat.messages, chat.labels
        stretches = _stretches(chat)
        head = None if stretches is None else self._heads.get((chat.setting, chat.tools, labels[0]))
        if stretches is None or head is None:
            return None
        pieces, place = [head.text], len(head.text)
        layout = Layout([*head.starts], [*head.narrowed], [])
        for stretch in stretches:
            first, gap = stretch.first, self._gap(stretch)
            filled = None if gap is None else gap.fill(stretch.messages)
            if filled is None:
                return None
            content, before, _ = content_of(messages[first])
            label = labels[first]
            layout.starts.append((place, label))
            for span in chat.spans[first]:
                start, stop = span.start - len(before), span.end - len(before)
                if not 0 <= start <= stop <= len(content):
                    return None  # it is, begins or ends with white space that may be trimmed
                layout.starts.append((place + start, Label(SegmentKind.SLOT, label.role, first, span.name)))
                layout.starts.append((place + stop, label))
            place += len(content)
            words, marks = filled
            for offset, mark in marks:
                marked = mark.label if isinstance(mark.label, Label) else labels[first + mark.label]
                (layout.narrowed if mark.narrows else layout.starts).append((place + offset, marked))
            pieces += [content, words]
            place += len(words)
        if chat.tools and not any(label.kind is SegmentKind.TOOLS for _, label in layout.starts):
            layout.warnings.append(TOOLS_NOT_SHOWN)
        return "".join(pieces), layout

    def learn(
        self, chat: RenderedChat, layout: Layout, places: Mapping[int, tuple[int, int]], words: Container[str]
    ) -> None:
        """Note the words of an anchored layout, if they show what the template always writes.

        Args:
            chat: The chat.
            layout: Where things were found.
            places: Message to start and end of its content without outer white space; empty if not all were found.
            words: That the template can write by itself, and those of the tools. What holds others is not kept where it
                may be a user's: a purge of the user would not find it here.
        """
        stretches = _stretches(chat)
        if stretches is None or not places or any(chat.spans) or {*layout.warnings} - {TOOLS_NOT_SHOWN}:
            return
        if any(chat.text[slice(*places[s.first])] != content_of(chat.messages[s.first])[0] for s in stretches):
            return
        begin, end = places[0]
        if any(begin < place < end or label.message is not None for place, label in layout.narrowed):
            return
        if begin > _LONGEST_HEAD:
            return
        if len(self._heads) >= _MOST_HEADS:
            self._heads = {}
        starts = tuple((place, label) for place, label in layout.starts if place < begin)
        narrowed = tuple((place, label) for place, label in layout.narrowed if place <= begin)
        if all(stretch.is_plain for stretch in stretches) or Gap((chat.text[:begin],)).is_made_of(words):
            self._heads[chat.setting, chat.tools, chat.labels[0]] = _Head(chat.text[:begin], starts, narrowed)
        for stretch in stretches:  # of several that are alike the first counts: it is the most exact
            start = places[stretch.first][1]
            stop = len(chat.text) if stretch.behind is None else places[stretch.behind][0]
            marks = _marks(chat, layout, stretch, start, stop)
            if stop - start > _LONGEST_GAP or self._fits(stretch, chat.text[start:stop]):
                continue
            gap = split_gap(chat.text[start:stop], stretch.messages, marks)
            if stretch.is_plain or gap.is_made_of(words):
                self._keep(stretch.detailed_key if gap.is_detailed else stretch.key, gap)

    def _fits(self, stretch: _Stretch, text: str) -> bool:
        gap = self._gap(stretch)
        filled = None if gap is None else gap.fill(stretch.messages)
        return filled is not None and filled[0] == text

    def _gap(self, stretch: _Stretch) -> Gap | None:
        return self._gaps.get(stretch.key) or self._gaps.get(stretch.detailed_key)

    def _keep(self, key: tuple[object, ...], gap: Gap) -> None:
        self._characters += gap.characters
        if len(self._gaps) >= _MOST_GAPS or self._characters > _MOST_CHARACTERS:
            self._gaps, self._characters = {}, gap.characters
        self._gaps[key] = gap


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A content and what stands behind it. Frozen.

    Attributes:
        first: Which message's content.
        behind: The next message with content, or None.
        messages: From the one to the other.
        key: What decides the words between them.
        is_plain: Whether nothing but the template's words can be between them.
    """

    first: int
    behind: int | None
    messages: Sequence[Mapping[str, Any]]
    key: tuple[object, ...]
    is_plain: bool

    @property
    def detailed_key(self) -> tuple[object, ...]:
        """The same, where it matters what the arguments of calls are."""
        return (self.key, details(self.messages))


def _stretches(chat: RenderedChat) -> list[_Stretch] | None:
    """Return the contents of a chat in order, or None if there is a message of a kind that is not known."""
    messages, user = chat.messages, last_user(chat.messages) or 0
    signatures = [signature(message) for message in messages]
    if len(messages[0]) > 2 or None in signatures:
        return None
    shown = [i for i, message in enumerate(messages) if message["content"] and not message["content"].isspace()]
    if not shown or shown[0] or messages[0]["content"][0].isspace():
        return None  # white space in front may be the content's own or the template's
    if any(chat.spans[i] for i in set(range(len(messages))).difference(shown)):
        return None  # a slot that cannot be seen: its scope counts all the same
    if any(behind - first > _MOST_HIDDEN for first, behind in pairwise([*shown, len(messages)])):
        return None
    found = []
    for first, behind in zip(shown, [*shown[1:], None], strict=True):
        end = len(messages) if behind is None else behind + 1
        tools = bool(chat.tools) if first else chat.tools  # which may stand behind the system text
        key = (chat.setting, tools, first >= user, behind is None, *signatures[first:end])
        is_plain = all(kind is not None and len(kind) == 1 for kind in signatures[first:end])
        found.append(_Stretch(first, behind, messages[first:end], key, is_plain))
    return found


def _marks(chat: RenderedChat, layout: Layout, stretch: _Stretch, start: int, stop: int) -> list[tuple[int, Mark]]:
    """Return what a layout marks from ``start`` to ``stop``; of several starts at one place the last one counts."""
    labels = {label: number for number, label in enumerate(chat.labels[stretch.first :])}
    followed = zip(layout.starts, [place for place, _ in layout.starts[1:]] + [len(chat.text) + 1], strict=True)
    starts = {place: label for (place, label), following in followed if following > place and start <= place <= stop}
    narrowed = [(place, label) for place, label in layout.narrowed if start <= place <= stop]
    marks = [(place - start, Mark(labels.get(label, label))) for place, label in starts.items()]
    marks += [(place - start, Mark(labels.get(label, label), narrows=True)) for place, label in narrowed]
    return sorted(marks, key=lambda mark: mark[0])
