"""Why a prompt hit or missed: per segment, in words, without a word of its content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prefixkv.chat.causes import find_cause
from prefixkv.chat.segment import Prompt, SegmentKind

__all__ = ["CacheReport", "Losses", "MissReason", "SegmentReport", "build_report"]

_MOST_CLOSING_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment and how much of it was cached. Frozen.

    Attributes:
        kind: Kind of the segment, such as ``"system"``.
        role: Role of its message, or None.
        start: First token.
        end: One past the last token.
        tokens: Its tokens.
        cached_tokens: Those that were not computed.
        scope: How far it is shared, such as ``"tenant"``.
    """

    kind: str
    role: str | None
    start: int
    end: int
    tokens: int
    cached_tokens: int
    scope: str


@dataclass(frozen=True, slots=True)
class MissReason:
    """Where and why reuse ended before the current turn. Frozen.

    Attributes:
        code: ``first_seen``; ``slot_changed``, ``volatile_text`` (undeclared text that changes), ``tools_changed``,
            ``tools_reordered``, ``system_changed``, ``template_date``, ``history_edited``, ``reasoning_stripped``,
            ``retokenised``, ``text_changed``; ``evicted``, ``purged``, ``not_stored``; ``scope`` (of request scope).
        segment: Index of the segment where it ended.
        token: First token that was not cached.
        tokens_lost: Tokens from there to the current turn, all of which had to be computed.
        hint: What to do. Quotes no content.
        kind: What ``volatile_text`` looks like: ``clock``, ``date``, ``uuid``, ``counter``, ``nonce``, ``name``,
            ``text``. None for other codes.
        lost_so_far_tokens: What such text has cost the tenant in all, for ``volatile_text``; else None.
    """

    code: str
    segment: int
    token: int
    tokens_lost: int
    hint: str
    kind: str | None = None
    lost_so_far_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What of a prompt was cached. Frozen; ``str(report)`` is a table.

    Attributes:
        segments: Its segments.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those that were not computed.
        miss: Why no more, or None where everything before the current turn was cached, up to the end of the last reply.
        warnings: What the caller should know; quotes no content.
    """

    segments: tuple[SegmentReport, ...]
    prompt_tokens: int
    cached_tokens: int
    miss: MissReason | None
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("segment", "role", "scope", "tokens", "cached", "start", "end")]
        for part in self.segments:
            numbers = (part.tokens, part.cached_tokens, part.start, part.end)
            rows.append((part.kind, part.role or "-", part.scope, *map(str, numbers)))
        rows.append(("total", "", "", str(self.prompt_tokens), str(self.cached_tokens), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        if self.miss is not None:
            miss = self.miss
            lines.append(
                f"miss: {miss.code} at token {miss.token} (segment {miss.segment}), {miss.tokens_lost} tokens lost"
                + ("" if miss.lost_so_far_tokens is None else f", {miss.lost_so_far_tokens} so far")
            )
            lines.append(f"      {miss.hint}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


Losses = Callable[[str, int], int]
"""Takes the kind of volatile text and the tokens it cost this request; returns what it has cost so far, these too."""


def build_report(
    prompt: Prompt, cached_tokens: int, diverged: bool, gone: str | None = None, losses: Losses | None = None
) -> CacheReport:
    """Return the report of a prompt; changes nothing.

    Args:
        prompt: The prompt.
        cached_tokens: How many of its first tokens were cached.
        diverged: Whether what the principal can reach in the cache goes on differently there. It must not depend on
            anything the principal cannot reach.
        gone: ``evicted`` or ``purged`` if it ended because rows of the principal's own are gone.
        losses: Counts what volatile text costs.
    """
    total = len(prompt.token_ids)
    parts = tuple(
        SegmentReport(
            part.kind.value,
            part.role,
            part.start,
            part.end,
            part.end - part.start,
            min(max(cached_tokens - part.start, 0), part.end - part.start),
            part.scope.label,
        )
        for part in prompt.segments
    )
    miss = _miss(prompt, cached_tokens, diverged, gone)
    if miss is not None and miss.kind is not None and losses is not None:
        miss = replace(miss, lost_so_far_tokens=losses(miss.kind, miss.tokens_lost))
    return CacheReport(parts, total, cached_tokens, miss, prompt.warnings)


def _miss(prompt: Prompt, cached_tokens: int, diverged: bool, gone: str | None) -> MissReason | None:
    turn = _current_turn(prompt)
    if cached_tokens >= turn:
        return None
    index = next(i for i, part in enumerate(prompt.segments) if cached_tokens < part.end)
    part = prompt.segments[index]
    is_reply = part.role == "assistant" and part.end == turn and cached_tokens > part.start
    if is_reply and not diverged and turn - cached_tokens <= _MOST_CLOSING_TOKENS:
        # The last token of a reply and the marks that close it are computed first when they come back as history.
        return None
    cause = find_cause(prompt, part, cached_tokens, diverged, gone)
    return MissReason(cause.code, index, cached_tokens, turn - cached_tokens, cause.hint, cause.kind)


def _current_turn(prompt: Prompt) -> int:
    """Return where the current turn starts: the last user message, or the generation prompt, or the last token."""
    last_token = len(prompt.token_ids) - 1
    if prompt.turn_start is not None:
        return min(prompt.turn_start, last_token)
    parts = prompt.segments
    users = [i for i, part in enumerate(parts) if part.kind is SegmentKind.USER]
    if users:
        first = users[-1]
        # Slots cut a message in pieces; they carry its role.
        while (
            first and parts[first - 1].kind in (SegmentKind.USER, SegmentKind.SLOT) and parts[first - 1].role == "user"
        ):
            first -= 1
        return min(parts[first].start, last_token)
    if parts and parts[-1].kind is SegmentKind.GENERATION_PROMPT:
        return min(parts[-1].start, last_token)
    return last_token
