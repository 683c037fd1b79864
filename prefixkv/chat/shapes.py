"""Layouts without a second render: a template's own words around contents, learnt once and checked word for word.

An anchored layout shows what a template writes before the first content, between two contents and behind the last one.
If those words and a new chat's contents, put together, are exactly what the template rendered, each content stands
where its turn came. If they are not, nothing is assumed and the chat is rendered with anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.chat.labels import Label, Layout
from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.slots import SlotSpan

__all__ = ["RenderedChat", "Shapes", "Tails"]

_MOST_HEADS, _LONGEST_HEAD = 4, 2**16
_MOST_GAPS = 512

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
class _Gap:
    """What stands behind a content: text, and from where in it the next label counts; None if it never does."""

    text: str
    cut: int | None


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
    """

    def __init__(self) -> None:
        self.tails: Tails = {}
        self._heads: dict[tuple[object, ...], _Head] = {}
        self._gaps: dict[tuple[object, ...], _Gap] = {}

    def lay_out(self, chat: RenderedChat) -> Layout | None:
        """Return the layout of a rendered chat, or None if its shape is not known; changes nothing."""
        setting, messages, labels, text = chat.setting, chat.messages, chat.labels, chat.text
        head = self._heads.get((setting, chat.tools, _kind(labels[0]))) if _are_plain(messages) else None
        if head is None:
            return None
        pieces, starts, place = [head.text], [*head.starts], len(head.text)
        for i, (message, label) in enumerate(zip(messages, labels, strict=True)):
            content = message["content"]
            starts.append((place, label))
            for span in chat.spans[i]:
                starts.append((place + span.start, Label(SegmentKind.SLOT, label.role, i, span.name)))
                starts.append((place + span.end, label))
            place += len(content)
            following = labels[i + 1] if i + 1 < len(labels) else None
            gap = self._gaps.get(_gap_key(setting, label, following))
            if gap is None:
                return None
            if gap.cut is not None:
                starts.append((place + gap.cut, following or Label(SegmentKind.GENERATION_PROMPT)))
            pieces += [content, gap.text]
            place += len(gap.text)
        if place != len(text) or "".join(pieces) != text:
            return None
        return Layout(starts, list(head.narrowed), [])

    def learn(self, chat: RenderedChat, layout: Layout, places: Sequence[tuple[int, int]]) -> None:
        """Note the words of an anchored layout, if they show what the template always writes.

        Args:
            chat: The chat.
            layout: Where things were found.
            places: Start and end of each content.
        """
        setting, messages, labels, text = chat.setting, chat.messages, chat.labels, chat.text
        if not _are_plain(messages) or len(places) != len(messages) or any(chat.spans) or layout.warnings:
            return
        if any(text[start:end] != message["content"] for (start, end), message in zip(places, messages, strict=True)):
            return
        first = places[0][0]
        if any(label.kind is SegmentKind.TOOLS and place >= first for place, label in layout.starts):
            return
        if any(place > first for place, _ in layout.narrowed):
            return
        if first > _LONGEST_HEAD:
            return
        if len(self._heads) >= _MOST_HEADS:
            self._heads = {}
        if len(self._gaps) + len(messages) > _MOST_GAPS:
            self._gaps = {}
        before = tuple((place, label) for place, label in layout.starts if place < first)
        self._heads[setting, chat.tools, _kind(labels[0])] = _Head(text[:first], before, tuple(layout.narrowed))
        for i, (_, end) in enumerate(places):
            following = labels[i + 1] if i + 1 < len(labels) else None
            behind = places[i + 1][0] if following else len(text)
            wanted = following or Label(SegmentKind.GENERATION_PROMPT)
            found = [place for place, label in layout.starts if label == wanted and end <= place <= behind]
            cut = found[0] - end if found else None
            if following is None or cut is not None:
                self._gaps[_gap_key(setting, labels[i], following)] = _Gap(text[end:behind], cut)


def _kind(label: Label) -> tuple[str, str | None]:
    return label.kind.value, label.role


def _gap_key(setting: tuple[object, ...], label: Label, following: Label | None) -> tuple[object, ...]:
    return (setting, label.role, None if following is None else following.role)


def _are_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every message is a role and a text without outer white space: templates may trim that."""
    return all(
        len(message) == 2 and message["content"] and message["content"].strip() == message["content"]
        for message in messages
    )
