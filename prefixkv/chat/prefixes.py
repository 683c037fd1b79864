"""The coarser way to see whose text is whose: how far a prompt agrees with the render of its first messages.

For templates that anchors would make render something else; see :mod:`~prefixkv.chat.regions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefixkv.chat.labels import Label, Layout, last_user
from prefixkv.chat.rendering import ChatInput, common_prefix, common_suffix
from prefixkv.chat.segment import SegmentKind

__all__ = ["lay_out_by_prefixes"]

_TOOLS = Label(SegmentKind.TOOLS)
_GENERATION = Label(SegmentKind.GENERATION_PROMPT)


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
