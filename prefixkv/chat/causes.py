"""Why reuse ended where it did: the prompt against what its own scopes sent before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from prefixkv.chat.recall import Origin, Sent
from prefixkv.chat.rendering import common_prefix
from prefixkv.chat.segment import Prompt, Segment, SegmentKind
from prefixkv.chat.volatile import volatile_spans
from prefixkv.scope import ScopeLevel

__all__ = ["HINTS", "Cause", "find_cause"]

HINTS = {
    "first_seen": "nothing from here on is known in this scope; the next request that begins alike will hit",
    "not_stored": "the same text was sent before, but its rows are not in the pool: that request is still running or "
    "failed, or there was no room to keep them",
    "evicted": "rows of this scope had to make room; give the pool more memory, or this tenant a larger share",
    "purged": "what this scope had stored was purged",
    "expired": "what this scope had stored is past its time to live",
    "scope": "its scope is request: it, and all behind it, is never stored; move it to the end, or widen its scope",
    "slot_changed": "the slot's value changed and stands before text that did not; bind it late: placement tail",
    "tools_changed": "the tools differ from the last request's; keep their names and descriptions the same",
    "tools_reordered": "the same tools came in another order; keep it, or set tools_order: canonical",
    "system_changed": "the system text differs from here on; keep it the same, and declare what must change as a slot",
    "template_date": "the chat template writes the date here, and it changed; pin it with template_clock",
    "history_edited": "an earlier turn differs from what was sent before; send earlier turns back unchanged",
    "reasoning_stripped": "the chat template leaves reasoning out of earlier replies: the last reply is computed again",
    "retokenised": "the reply came back as the same text but encodes to other tokens; set splice_generated: true",
    "text_changed": "the text differs from here on; put what changes at the end",
}
"""Code of a miss to what to do about it; ``volatile_text`` has a hint that says what it is."""

_CODES = {
    SegmentKind.SLOT: "slot_changed",
    SegmentKind.TOOLS: "tools_changed",
    SegmentKind.PREAMBLE: "system_changed",
    SegmentKind.SYSTEM: "system_changed",
    SegmentKind.FEW_SHOT: "system_changed",
    SegmentKind.TEXT: "text_changed",
}
_HEAD = (SegmentKind.PREAMBLE, SegmentKind.SYSTEM, SegmentKind.TOOLS, SegmentKind.FEW_SHOT)
_THINK_MARKS = ("<think", "</think", "<|channel|>analysis", "<reasoning", "<thought")
_NEAR_CHARACTERS = 80
_MOST_HEADS = 6
_VOLATILE_HINT = (
    "a {kind} in the {part} text changes from request to request; write {{{{slot:{kind}}}}} in its place and set "
    "slots: {{{kind}: {{placement: {placement}}}}}"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why reuse ended. Frozen.

    Attributes:
        code: The reason, see :class:`~prefixkv.chat.explain.MissReason`.
        hint: What to do; quotes no content.
        kind: For ``volatile_text`` what it is, else None.
    """

    code: str
    hint: str
    kind: str | None = None


def find_cause(prompt: Prompt, part: Segment, cached_tokens: int, diverged: bool, gone: str | None) -> Cause:
    """Return why no more than its first tokens were cached; changes nothing.

    Args:
        prompt: The prompt, with what its scopes sent before.
        part: The segment in which reuse ended.
        cached_tokens: How many tokens were cached.
        diverged: Whether what is stored in its scopes goes on differently there.
        gone: ``evicted``, ``expired`` or ``purged`` if rows of its scopes are gone, else None.
    """
    if part.scope is ScopeLevel.REQUEST and cached_tokens >= part.start:
        return _plain("scope")
    if gone is not None:
        return _plain(gone)
    origin = prompt.origin
    if origin is None or origin.sent is None:
        return _plain(_CODES.get(part.kind, "history_edited") if diverged else "first_seen")
    found = _in_reply(origin, origin.sent, part, cached_tokens)
    if found is not None:
        return _plain(found)
    prior, shared = _closest(origin, origin.sent)
    if not diverged:
        if prior is None or shared < cached_tokens or (shared == cached_tokens == len(prior.token_ids)):
            return _plain("first_seen")  # behind all that was sent before
        if shared > cached_tokens:
            return _plain("not_stored")
    if prior is None:
        return _plain(_CODES.get(part.kind, "history_edited"))
    if part.kind in _HEAD:
        return _in_head(origin, origin.sent, prior, part, cached_tokens)
    return _plain(_CODES.get(part.kind, "history_edited"))


def _plain(code: str) -> Cause:
    return Cause(code, HINTS[code])


def _closest(origin: Origin, ours: Sent) -> tuple[Sent | None, int]:
    """Return the remembered prompt that agrees longest with ours, and for how many tokens."""
    best: Sent | None = None
    length = -1
    for sent in origin.past.prompts:
        shared = common_prefix(sent.token_ids, ours.token_ids)
        if shared > length:
            best, length = sent, shared
    return best, max(length, 0)


def _in_reply(origin: Origin, ours: Sent, part: Segment, cached_tokens: int) -> str | None:
    """Return the code of a miss inside the last reply: left-out reasoning, or the same text in other tokens."""
    place = ours.ends[cached_tokens - 1] if cached_tokens else 0
    for sent in origin.past.prompts:
        for reply in sent.replies:
            before = sent.text + reply.text
            shared = common_prefix(before, ours.text)
            opened = len(sent.text)
            if shared < opened - _NEAR_CHARACTERS:
                continue
            if shared == len(before):
                # It came back word for word. What comes behind it is new.
                first, last = bisect_right(ours.ends, opened), bisect_right(ours.ends, shared)
                if first <= cached_tokens < last and place < shared:
                    return "retokenised"
                continue
            near = before[max(0, shared - _NEAR_CHARACTERS) : shared + _NEAR_CHARACTERS]
            is_near = place <= shared + _NEAR_CHARACTERS and place >= shared - 2 * _NEAR_CHARACTERS
            if origin.strips_reasoning and is_near and any(mark in near for mark in _THINK_MARKS):
                return "reasoning_stripped"
    return _stripped_earlier(origin, ours, place)


def _stripped_earlier(origin: Origin, ours: Sent, place: int) -> str | None:
    """Return ``reasoning_stripped`` where an earlier prompt showed reasoning that this one leaves out."""
    if not origin.strips_reasoning:
        return None
    for sent in origin.past.prompts:
        shared = common_prefix(sent.text, ours.text)
        if shared == len(sent.text) or not place - _NEAR_CHARACTERS <= shared <= place + _NEAR_CHARACTERS:
            continue
        if any(mark in sent.text[max(0, shared - 16) : shared + 16] for mark in _THINK_MARKS):
            return "reasoning_stripped"
    return None


def _in_head(origin: Origin, ours: Sent, prior: Sent, part: Segment, cached_tokens: int) -> Cause:
    """Return the cause of a miss in what stands before all turns."""
    if any(old.kind is SegmentKind.SLOT and old.start <= cached_tokens < old.end for old in prior.segments):
        return _plain("slot_changed")  # the new value is how the old one began, or empty
    tools, known = ours.tools or (), prior.tools
    if known is not None and tools != known and sorted(tools) == sorted(known):
        return _plain("tools_reordered")
    first = ours.ends[cached_tokens - 1] if cached_tokens else 0
    place = ours.ends[cached_tokens] if cached_tokens < len(ours.ends) else len(ours.text)
    for head, other in _heads(origin, ours):
        for span in volatile_spans(head, other):
            if span.start >= place or span.end < first:
                continue
            if origin.injects_date and part.kind is SegmentKind.PREAMBLE and span.kind in ("clock", "date"):
                return _plain("template_date")
            if part.kind is SegmentKind.TOOLS and span.kind in ("name", "text"):
                return _plain("tools_changed")  # another tool
            words = {"placement": "tail", "kind": span.kind, "part": part.kind.value.replace("_", " ")}
            return Cause("volatile_text", _VOLATILE_HINT.format(**words), span.kind)
    if part.kind is SegmentKind.PREAMBLE and origin.injects_date:
        return _plain("template_date")
    if part.kind is SegmentKind.TOOLS or (known is not None and tools != known):
        return _plain("tools_changed")
    return _plain("system_changed")


def _heads(origin: Origin, ours: Sent) -> Iterator[tuple[str, str]]:
    """Yield our head with every other one, the latest of the narrowest scope first."""
    seen = {head := _head_of(ours)}
    for sent in origin.past.prompts:
        other = _head_of(sent)
        if len(seen) > _MOST_HEADS:
            return
        if other not in seen:
            seen.add(other)
            yield head, other


def _head_of(sent: Sent) -> str:
    """Return the text before all turns, or what of it a scope knows."""
    end = 0
    for part in sent.segments:
        if part.kind not in _HEAD and part.kind is not SegmentKind.SLOT:
            break
        end = min(part.end, len(sent.token_ids))
    return sent.text[: sent.ends[end - 1]] if end else ""
