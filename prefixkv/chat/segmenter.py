"""Messages in, prompt out: exactly the tokenizer's ids, and what each of them is."""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from prefixkv.chat.encoding import Encoded, Encoder
from prefixkv.chat.gaps import words_of
from prefixkv.chat.intake import Intake, take_in
from prefixkv.chat.labels import Label, Layout
from prefixkv.chat.messages import ROLES, check_template_kwargs, check_text, total_characters
from prefixkv.chat.prefixes import lay_out_by_prefixes
from prefixkv.chat.probing import with_clock
from prefixkv.chat.profile import TemplateProfile, recognise
from prefixkv.chat.recall import Origin, Past, Sent
from prefixkv.chat.regions import lay_out_with_anchors
from prefixkv.chat.rendering import Anchors, ChatInput
from prefixkv.chat.seen import encode_seen
from prefixkv.chat.segment import Prompt, Segment, SegmentKind
from prefixkv.chat.shapes import RenderedChat, Shapes
from prefixkv.chat.times import template_clock, words_of_clock
from prefixkv.errors import ContextOverflow, InvalidRequest
from prefixkv.policy import TenantPolicy
from prefixkv.scope import ScopeLevel

__all__ = ["Segmenter"]


class Segmenter:
    """Turns chats into prompts for one tokenizer. Holds nothing of a request; safe to call from many threads.

    The tokenizer is copied, template included, so later changes to it are not seen.

    Args:
        tokenizer: A tokenizer with ``apply_chat_template`` and ``get_vocab``.
        template: Facts of its chat template; None finds them out, by rendering.
        vocab_tokens: Token ids that the model takes are below this; None means as many as the tokenizer knows.

    Attributes:
        profile: Facts of the chat template; None where the tokenizer has none.
    """

    def __init__(
        self, tokenizer: Any, template: TemplateProfile | None = None, *, vocab_tokens: int | None = None
    ) -> None:
        self._encoder = Encoder(tokenizer)
        self._tokenizer = self._encoder.tokenizer
        self._vocab_tokens = self._encoder.vocab_tokens if vocab_tokens is None else vocab_tokens
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        self.profile = (template or recognise(self._tokenizer)) if has_template else None
        self._template_words = words_of(*ROLES, *_sources(self._tokenizer))

    def segment(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        policy: TenantPolicy,
        tools: Sequence[Mapping[str, Any]] | None = None,
        slots: Mapping[str, str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        few_shot: int | None = None,
        past: Past | None = None,
        limit: int | None = None,
    ) -> Prompt:
        """Return the prompt of a chat; changes nothing.

        The ids are those of ``tokenizer.apply_chat_template(messages, tools=..., ...)``, with its
        ``sanitize_control_tokens`` where anything the caller sent spells a control token: content cannot forge one.
        Where the policy moves slots, orders tools, pins the date or splices replies, that is done to the arguments
        or the ids first.

        Args:
            messages: The conversation; see :func:`~prefixkv.chat.messages.check_messages`.
            policy: The tenant's rules: scopes and slots.
            tools: JSON schemas of tools.
            slots: Values of the slots.
            add_generation_prompt: Whether the assistant's header ends the prompt.
            continue_final_message: Leave the last message open, for the model to go on with. Then there is no
                generation prompt, whatever ``add_generation_prompt`` says.
            template_kwargs: More template variables, such as ``enable_thinking``. They are the operator's and are
                shared like system text; only with ``documents`` is everything as narrow as history.
            few_shot: How many messages behind the system text are examples; None asks the policy.
            past: What the principal may know of what was sent before; ids do not depend on it but for spliced replies
                and for notes.
            limit: Most tokens the prompt may have.

        Raises:
            InvalidRequest: ``no_chat_template``, ``template_rejected``, ``control_token``, ``empty_prompt``, or what
                the checks of messages, tools, slots and template_kwargs find.
            ContextOverflow: If the prompt is longer than ``limit`` or the policy's ``max_prompt_tokens``; very long
                text is refused before it is rendered.
        """
        if self.profile is None:
            hint = "the tokenizer has no chat template; use engine.complete or set tokenizer.chat_template"
            raise InvalidRequest("no_chat_template", "messages", hint)
        past = Past() if past is None else past
        intake = take_in(messages, tools, slots, policy=policy, profile=self.profile, past=past, few_shot=few_shot)
        chat = ChatInput(
            self._tokenizer,
            intake.filled.messages,
            intake.tools,
            check_template_kwargs(template_kwargs),
            bool(add_generation_prompt) and not continue_final_message,
            bool(continue_final_message),
            self._clocked_template(policy, intake) if self.profile.injects_date else None,
            not self.profile.takes_text and any(_is_in_parts(message) for message in messages),
        )
        return self._prompt(chat, intake, policy, past, limit)

    def segment_text(self, prompt: str | Sequence[int], *, policy: TenantPolicy, limit: int | None = None) -> Prompt:
        """Return the prompt of raw text or token ids: one segment of kind ``text``; changes nothing.

        Text gets the special tokens that the tokenizer adds by default, and control tokens spelt in it count.

        Raises:
            InvalidRequest: ``empty_prompt``, ``bad_prompt``, ``bad_token_id`` or ``invalid_text``.
            ContextOverflow: If the prompt is longer than ``limit`` or the policy's ``max_prompt_tokens``.
        """
        if isinstance(prompt, str):
            self._refuse_early(len(prompt), policy, limit)
            token_ids = self._encoder.encode_with_special(check_text(str(prompt), "prompt")) if prompt else []
        else:
            token_ids = self._check_ids(prompt)
        if not token_ids:
            raise InvalidRequest("empty_prompt", "prompt", "give text or token ids")
        _refuse(len(token_ids), policy, limit)
        scope = policy.scope_level("text")
        return Prompt(tuple(token_ids), (Segment(SegmentKind.TEXT, 0, len(token_ids), scope),))

    # -- making ----------------------------------------------------------------------------------------------------

    def _prompt(self, chat: ChatInput, intake: Intake, policy: TenantPolicy, past: Past, limit: int | None) -> Prompt:
        self._refuse_early(total_characters(intake.filled.messages), policy, limit)
        inputs = {"messages": list(chat.messages), "tools": chat.tools, "template_kwargs": chat.template_kwargs}
        is_marked = any([self._encoder.spells_control(value, path) for path, value in inputs.items()])
        shown = self._marked(chat) if is_marked else chat
        text = shown.render()
        self._refuse_early(len(text), policy, limit)  # tools and other fields count only now
        if is_marked:
            encoded, is_spliced = self._encode_marked(chat, text), False
        else:
            encoded, is_spliced = encode_seen(text, past.prompts, self._encoder, splices=policy.splice_generated)
        if not encoded.token_ids:
            raise InvalidRequest("empty_prompt", "messages", "the chat template renders nothing for these messages")
        _refuse(len(encoded.token_ids), policy, limit)
        layout = self._lay_out(shown, intake, text, is_marked, past.shapes)
        widest = policy.scope_level("history") if "documents" in chat.template_kwargs else ScopeLevel.PUBLIC
        pieces = _scoped(layout, len(text), policy, widest, is_coarse=encoded.ends is None)
        prompt = self._cut(text, encoded, pieces, is_marked, intake.turn, past.shapes.settled)
        sent = None
        if encoded.ends is not None:
            shown_text, ends = self._encoder.unmarked(text, encoded.ends) if is_marked else (text, encoded.ends)
            sent = Sent(
                shown_text, array("I", encoded.token_ids), array("I", ends), prompt.segments, intake.tool_digests,
                is_spliced=is_spliced, is_marked=is_marked,
            )  # fmt: skip
        return self._with_origin(prompt, sent, intake, layout, policy, past)

    def _with_origin(
        self, prompt: Prompt, sent: Sent | None, intake: Intake, layout: Layout, policy: TenantPolicy, past: Past
    ) -> Prompt:
        profile = self.profile
        injects_date = profile is not None and profile.injects_date and policy.template_clock is None
        warnings = profile.warnings if profile is not None and injects_date else ()
        return replace(
            prompt,
            warnings=(*intake.filled.warnings, *layout.warnings, *warnings),
            origin=Origin(sent, intake.notes, past, injects_date, profile is not None and profile.strips_reasoning),
        )

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise InvalidRequest("bad_prompt", "prompt", "must be text or a list of token ids")
        for i, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_tokens:
                hint = f"must be a whole number from 0 to {self._vocab_tokens - 1}"
                raise InvalidRequest("bad_token_id", f"prompt[{i}]", hint)
        return [int(token) for token in prompt]

    def _refuse_early(self, characters: int, policy: TenantPolicy, limit: int | None) -> None:
        """Refuse text that cannot fit however well it is tokenised, before any work on it."""
        if self._encoder.longest_token_chars is not None:
            _refuse(characters // self._encoder.longest_token_chars, policy, limit)

    def _clocked_template(self, policy: TenantPolicy, intake: Intake) -> str | None:
        moment = template_clock(policy.template_clock)
        return None if moment is None else with_clock(self._tokenizer.get_chat_template(tools=intake.tools), moment)

    # -- layout --------------------------------------------------------------------------------------------------

    def _marked(self, chat: ChatInput, *words: tuple[str, str]) -> ChatInput:
        mark = self._encoder.mark
        return replace(
            chat,
            messages=mark(list(chat.messages), *words),
            tools=mark(chat.tools, *words),
            template_kwargs=mark(chat.template_kwargs, *words),
        )

    def _encode_marked(self, chat: ChatInput, text: str) -> Encoded:
        encoded = self._encoder.encode_marked(text, chat.reference_ids)
        nonce = secrets.token_hex(8)
        words = (f"Q{nonce}a", f"b{nonce}Q")
        self._encoder.check_kept(encoded.token_ids, self._marked(chat, words).render(), words)
        return encoded

    def _lay_out(self, shown: ChatInput, intake: Intake, text: str, is_marked: bool, shapes: Shapes) -> Layout:
        filled, labels = intake.filled, intake.labels
        # What documents say is not the template's own, so nothing is learnt from such a chat.
        known = None if is_marked or "documents" in shown.template_kwargs else shapes
        setting = (
            hashlib.blake2b(repr(sorted(shown.template_kwargs.items())).encode(), digest_size=16).digest(),
            shown.add_generation_prompt, shown.continue_final_message, shown.template, shown.in_parts,
        )  # fmt: skip
        asked = RenderedChat(setting, intake.tool_digests, filled.messages, labels, filled.spans, text)
        if known is not None:
            layout = known.lay_out(asked)
            if layout is not None:
                return layout
        anchors = Anchors(filled.messages, filled.spans)
        placed = self._encoder.mark(anchors.messages) if is_marked else anchors.messages
        chat = replace(shown, messages=placed)
        found = lay_out_with_anchors(chat, labels, anchors, text, {} if known is None else known.tails)
        if found is None:
            slots = [(i, span.name) for i, spans in enumerate(filled.spans) for span in spans]
            slots += [(i, label.name) for i, label in enumerate(labels) if label.name is not None]
            return lay_out_by_prefixes(shown, labels, slots, text)
        if known is not None:
            words = words_of(*_texts(shown.tools), *(words_of_clock() if shown.template is None else [shown.template]))
            known.learn(asked, found.layout, found.places, self._template_words | words)
        return found.layout

    def _cut(
        self,
        text: str,
        encoded: Encoded,
        pieces: Sequence[tuple[int, Label, ScopeLevel]],
        is_marked: bool,
        turn: int | None,
        settled: dict[bytes, int],
    ) -> Prompt:
        """Return the prompt: segments that tile the tokens, each with the narrowest scope so far."""
        places = [
            self._encoder.settled(text, start, encoded, settled if before <= ScopeLevel.TENANT else None)
            if scope > before
            else start
            for (_, _, before), (start, _, scope) in pairwise(pieces)
        ]
        cuts = [0, *self._encoder.cut(text, encoded, places, is_marked), len(encoded.token_ids)]
        for i in range(len(cuts) - 2, 0, -1):  # settling may move a cut before the one in front of it
            cuts[i] = min(cuts[i], cuts[i + 1])
        segments: list[Segment] = []
        owner: tuple[Label, ScopeLevel] | None = None
        turn_start: int | None = None
        for (_, label, scope), start, end in zip(pieces, cuts, cuts[1:], strict=False):
            if turn is not None and label.message is not None and label.message >= turn and turn_start is None:
                turn_start = start
            if start == end:
                continue
            first = segments.pop().start if owner == (label, scope) else start
            segments.append(Segment(label.kind, first, end, scope, label.role, label.name))
            owner = (label, scope)
        return Prompt(tuple(encoded.token_ids), tuple(segments), (), turn_start)


def _scoped(
    layout: Layout, length: int, policy: TenantPolicy, widest: ScopeLevel, *, is_coarse: bool
) -> list[tuple[int, Label, ScopeLevel]]:
    """Return (first character, label, scope) of stretches; scopes only narrow."""
    narrowed = sorted(((place, _level(label, policy)) for place, label in layout.narrowed), key=lambda item: item[0])
    regions = _merged(layout.starts, length, is_coarse=is_coarse)
    pieces: list[tuple[int, Label, ScopeLevel]] = []
    scope = widest
    for i, (start, label) in enumerate(regions):
        end = regions[i + 1][0] if i + 1 < len(regions) else length
        scope = max(scope, _level(label, policy))
        while narrowed and narrowed[0][0] <= start:
            scope = max(scope, narrowed.pop(0)[1])
        pieces.append((start, label, scope))
        while narrowed and narrowed[0][0] < end:
            place, level = narrowed.pop(0)
            scope = max(scope, level)
            pieces.append((place, label, scope))
    return pieces


def _merged(starts: Sequence[tuple[int, Label]], length: int, *, is_coarse: bool) -> list[tuple[int, Label]]:
    """Drop stretches without characters, but keep empty slots: what follows them depends on their being empty.

    Where each cut costs an encoding, turns of the history become one stretch.
    """
    kept: list[tuple[int, Label]] = []
    for i, (start, label) in enumerate(starts):
        end = starts[i + 1][0] if i + 1 < len(starts) else length
        is_turn = label.kind is SegmentKind.HISTORY
        if start == end and label.kind is not SegmentKind.SLOT:
            continue
        if kept and (kept[-1][1] == label or (is_coarse and is_turn and kept[-1][1].kind is SegmentKind.HISTORY)):
            continue
        kept.append((start, label))
    return kept


def _sources(tokenizer: Any) -> list[str]:
    """Return the texts from which a template can take words: its source, and the special tokens."""
    template = getattr(tokenizer, "chat_template", None) or ""
    sources = [template] if isinstance(template, str) else list(template.values())
    # A line break in a text of Jinja is no part of the word behind it.
    sources += [re.sub(r"\\[nrt]", " ", source) for source in sources]
    return [*sources, *map(str, getattr(tokenizer, "all_special_tokens", ()))]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text and key in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_in_parts(message: object) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, Sequence) and not isinstance(content, str)


def _level(label: Label, policy: TenantPolicy) -> ScopeLevel:
    if label.kind is SegmentKind.SLOT and label.name is not None:
        return policy.slot(label.name).scope
    return policy.scope_level(label.kind.value)


def _refuse(tokens: int, policy: TenantPolicy, limit: int | None) -> None:
    if limit is not None and tokens > limit:
        raise ContextOverflow(limit, tokens)
    if policy.max_prompt_tokens is not None and tokens > policy.max_prompt_tokens:
        raise ContextOverflow(policy.max_prompt_tokens, tokens, "this tenant's max_prompt_tokens")
