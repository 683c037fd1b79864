"""The tokenizer's chat template, applied to one request in several ways, and anchors that survive it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from prefixkv.chat.slots import SlotSpan
from prefixkv.errors import InvalidRequest

__all__ = ["Anchors", "ChatInput", "Rendered", "common_prefix", "common_suffix"]

_DIGITS = 7


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Everything a chat template is given.

    Attributes:
        tokenizer: Any object with ``apply_chat_template``.
        messages: Checked messages; content is text or None.
        tools: Checked tool schemas or None.
        template_kwargs: More template variables.
        add_generation_prompt: Whether the assistant's header ends the prompt.
        continue_final_message: Whether the last message is left open.
        template: A template in place of the tokenizer's own, or None.
        in_parts: Whether content is given as a list of parts, for templates that read nothing else.
    """

    tokenizer: Any
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    template: str | None = None
    in_parts: bool = False

    def render(self) -> str:
        """Return the prompt as text.

        Raises:
            InvalidRequest: ``template_rejected`` if the template refuses these messages.
        """
        text = self.try_render()
        if text is None:
            raise InvalidRequest("template_rejected", "messages", self._why_rejected())
        return text

    def try_render(self) -> str | None:
        """Return the prompt as text, or None where the template refuses it."""
        try:
            text = self._apply(tokenize=False)
        except Exception:  # templates raise whatever they like, and what they raise may quote the messages
            return None
        return text if isinstance(text, str) else None

    def reference_ids(self, tokenizer: Any) -> Any:
        """Return the tokenizer's own ids, with control tokens in content written as text."""
        return replace(self, tokenizer=tokenizer)._apply(tokenize=True, return_dict=False, sanitize_control_tokens=True)

    def prefix(self, messages: int) -> ChatInput:
        """Return the same chat with only its first messages, complete and without a generation prompt."""
        return replace(
            self, messages=self.messages[:messages], add_generation_prompt=False, continue_final_message=False
        )

    def _apply(self, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            [_as_parts(message) if self.in_parts else dict(message) for message in self.messages],
            tools=None if self.tools is None else [dict(tool) for tool in self.tools],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **options,
            **({} if self.template is None else {"chat_template": self.template}),
            **self.template_kwargs,
        )

    def _why_rejected(self) -> str:
        roles = [message["role"] for message in self.messages]
        if any(message["content"] is None for message in self.messages):
            texts = [{**message, "content": message["content"] or ""} for message in self.messages]
            if replace(self, messages=texts).try_render() is not None:
                return "the chat template needs text in every turn; send content '' where there is none"
        refused = [role for role in ("system", "developer", "tool") if role in roles]
        for role in refused:
            rest = [message for message in self.messages if message["role"] != role]
            if rest and replace(self, messages=rest).try_render() is not None:
                if role == "tool":
                    return "the chat template refuses the tool turns as they are written; see the model's card"
                return f"the chat template refuses the {role} role; put that text at the start of the first user turn"
        if any(first == second for first, second in pairwise(roles)):
            return "the chat template refuses these roles in this order; user and assistant turns may have to alternate"
        if self.continue_final_message:
            return "the chat template cannot leave the last message open; it needs text to go on from"
        if "system" in refused:
            return "the chat template refuses these messages; it may not know the system role, or needs a user turn"
        return "the chat template refuses these messages; check roles, their order, tool_calls and tool_call_id"


def _as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [] if content is None else [{"type": "text", "text": content}]}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt with its anchors taken out.

    Attributes:
        text: The prompt without anchors.
        at: Anchor to its place in ``text``.
    """

    text: str
    at: Mapping[int, int]


class Anchors:
    """Unique words put around contents and slot values, to see where the template renders them.

    Message ``i`` has the anchors ``2 i`` and ``2 i + 1`` around its content without outer white space (templates trim
    it); the slots' anchors follow after all messages'. Letters and digits alone survive JSON escaping.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], spans: Sequence[Sequence[SlotSpan]]) -> None:
        self._nonce = f"Q{secrets.token_hex(8)}x"
        self._find = re.compile(rf"{self._nonce}(\d{{{_DIGITS}}})Q")
        self.slots: list[tuple[int, int, str]] = []
        """(message, first anchor, name) of each slot that has anchors; the second anchor follows the first."""
        self.unplaced: list[tuple[int, str]] = []
        """(message, name) of each slot that could not be given anchors."""
        self._next = 2 * len(messages)
        self.messages = [self._place(i, message, spans[i]) for i, message in enumerate(messages)]

    def locate(self, marked: str) -> Rendered | None:
        """Return the text without anchors and their places; None if one occurs more than once."""
        pieces: list[str] = []
        at: dict[int, int] = {}
        position = length = 0
        for match in self._find.finditer(marked):
            pieces.append(marked[position : match.start()])
            length += match.start() - position
            position = match.end()
            anchor = int(match[1])
            if anchor in at:
                return None
            at[anchor] = length
        pieces.append(marked[position:])
        return Rendered("".join(pieces), at)

    def _word(self, anchor: int) -> str:
        return f"{self._nonce}{anchor:0{_DIGITS}d}Q"

    def _place(self, i: int, message: Mapping[str, Any], spans: Sequence[SlotSpan]) -> dict[str, Any]:
        content = message.get("content") or ""
        first = len(content) - len(content.lstrip())
        last = len(content.rstrip())
        if first >= last:
            self.unplaced += [(i, span.name) for span in spans]
            return dict(message)
        words = [(first, self._word(2 * i))]
        for span in spans:
            # A value that is, or begins or ends the content with, white space may be trimmed: no anchor marks it.
            if first <= span.start <= span.end <= last:
                self.slots.append((i, self._next, span.name))
                words += [(span.start, self._word(self._next)), (span.end, self._word(self._next + 1))]
                self._next += 2
            else:
                self.unplaced.append((i, span.name))
        words.append((last, self._word(2 * i + 1)))
        pieces: list[str] = []
        position = 0
        for place, word in words:
            pieces += [content[position:place], word]
            position = place
        return {**message, "content": "".join(pieces) + content[position:]}


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many characters two texts, or ids two arrays, share from the start; changes nothing."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(first: str, second: str) -> int:
    """Return how many characters two texts share at the end; changes nothing."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low
