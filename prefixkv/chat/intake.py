"""What a caller sends, checked and put in order, before anything is rendered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixkv.chat.canonical import canonical_calls, canonical_tools
from prefixkv.chat.labels import Label, last_user, message_labels
from prefixkv.chat.late import LateNote, Placed, conversation_digests, is_remembered, note_of, place_notes
from prefixkv.chat.messages import check_messages, check_tools
from prefixkv.chat.profile import TemplateProfile
from prefixkv.chat.recall import Past
from prefixkv.chat.slots import FilledMessages, fill_slots
from prefixkv.errors import InvalidRequest
from prefixkv.policy import TenantPolicy

__all__ = ["Intake", "take_in"]


@dataclass(frozen=True, slots=True)
class Intake:
    """A chat as it will be rendered. Frozen.

    Attributes:
        filled: Messages with their slots filled and their notes placed.
        labels: Of the messages.
        tools: Tool schemas in their order, or None.
        tool_digests: One for each.
        notes: Notes that this prompt is sent with and that its session shall remember.
        turn: Index of the message with which the current turn begins, or None.
    """

    filled: FilledMessages
    labels: list[Label]
    tools: list[dict[str, Any]] | None
    tool_digests: tuple[bytes, ...]
    notes: Mapping[bytes, LateNote] = field(default_factory=dict)
    turn: int | None = None


def take_in(
    messages: object,
    tools: object,
    slots: object,
    *,
    policy: TenantPolicy,
    profile: TemplateProfile,
    past: Past,
    few_shot: int | None,
) -> Intake:
    """Return a checked copy of a chat, ordered as the policy says; changes nothing.

    Args:
        messages: The conversation.
        tools: Tool schemas or None.
        slots: Values of slots or None.
        policy: The tenant's rules.
        profile: Facts of the chat template.
        past: Notes that earlier turns were sent with.
        few_shot: How many messages behind the system text are examples; None asks the policy.

    Raises:
        InvalidRequest: What the checks find.
    """
    checked, known_tools = check_messages(messages), check_tools(tools)
    if policy.tools_order == "canonical":
        checked = canonical_calls(checked)
        known_tools = None if known_tools is None else canonical_tools(known_tools)
    filled = fill_slots(checked, slots, policy)
    placed, notes = _with_notes(checked, filled, policy, profile, past)
    labels = message_labels(placed.filled.messages, _examples(few_shot, policy), placed.notes)
    turn = last_user(placed.filled.messages)
    if turn is not None and turn - 1 in placed.notes:
        turn -= 1
    return Intake(placed.filled, labels, known_tools, _digests(known_tools), notes, turn)


def _with_notes(
    checked: Sequence[Mapping[str, Any]],
    filled: FilledMessages,
    policy: TenantPolicy,
    profile: TemplateProfile,
    past: Past,
) -> tuple[Placed, dict[bytes, LateNote]]:
    """Place the note of the last user turn, and those that earlier turns were sent with."""
    note, last = note_of(filled.late, policy), last_user(checked)
    if last is None or not (note or past.notes):
        return place_notes(filled, {}, as_messages=False), {}
    digests = conversation_digests(checked)
    notes = {i: past.notes[digest] for i, digest in enumerate(digests) if digest in past.notes}
    # A turn that goes on, with calls and their results, keeps the values it began with: it is a prefix already.
    if note and (last not in notes or last == len(checked) - 1):
        notes[last] = note
    kept = {digests[last]: notes[last]} if last in notes and is_remembered(notes[last], policy) else {}
    return place_notes(filled, notes, as_messages=profile.system_anywhere), kept


def _examples(few_shot: object, policy: TenantPolicy) -> int:
    if few_shot is None:
        return policy.few_shot_messages
    if isinstance(few_shot, bool) or not isinstance(few_shot, int) or few_shot < 0:
        raise InvalidRequest("bad_few_shot", "few_shot", "must be a number of messages, 0 or more")
    return few_shot


def _digests(tools: Sequence[Mapping[str, Any]] | None) -> tuple[bytes, ...]:
    return tuple(
        hashlib.blake2b(json.dumps(tool, sort_keys=True).encode(), digest_size=8).digest() for tool in tools or ()
    )
