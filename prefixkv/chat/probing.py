"""Facts of a chat template, found out by rendering small conversations with it, never by reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from prefixkv.chat.rendering import ChatInput, common_prefix
from prefixkv.chat.times import CLOCK_CODES

__all__ = ["PROBE_WORDS", "Probe", "with_clock"]

_SYSTEM, _FIRST, _REPLY, _LAST = "probesystem", "probefirst", "probereply", "probelast"
_LATE, _SECOND, _THIRD = "probelate", "probesecond", "probethird"
_TOOL, _THOUGHT = "probetool", "probethought"
PROBE_WORDS = {"system": _SYSTEM, "first": _FIRST, "reply": _REPLY, "last": _LAST}
"""What the turns of the probed conversation say."""

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
_THOUGHTS = {"reasoning_content": "probethoughta", "reasoning": "probethoughtb", "thinking": "probethoughtc"}
_DATE_ARGUMENTS = {
    name: f"probedate{i}x"
    for i, name in enumerate(
        ("date_string", "current_date", "date", "today", "todays_date", "current_datetime", "current_time", "now")
    )
}
_CLOCK = "strftime_now"
_MOMENT, _OTHER_MOMENT = datetime(1987, 6, 5, 4, 3, 2), datetime(2012, 11, 24, 15, 47, 58)
"""Two times that no code of ``strftime`` writes alike."""

_Turns = Sequence[Mapping[str, Any]]


def with_clock(template: str, moment: datetime) -> str:
    """Return a chat template whose clock stands still; changes nothing.

    transformers makes text of a function that is given as a template variable, so the clock is a macro in front.
    """
    filters = "".join(f"|replace({json.dumps(f'%{c}')},{json.dumps(moment.strftime(f'%{c}'))})" for c in CLOCK_CODES)
    # The line break is dropped as the first one after a tag; without it the template would not begin a line.
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


class Probe:
    """Renders small conversations and looks where their words went. Changes nothing.

    A template that refuses a conversation lacks the fact. One that refuses a chat without tools is given tools
    throughout, and one that does not show content given as text is given lists of parts. Where even that is refused,
    only ``plain`` and ``with_tools`` are rendered, of one user turn.

    Args:
        tokenizer: Has a chat template.

    Attributes:
        plain: Render of two user turns with a reply between them; None if refused.
        with_tools: The same with a tool.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._wants_parts = False
        self._tools: Any = None
        self._turns = [_user(_FIRST), _assistant(_REPLY), _user(_LAST)]
        self.plain, self.with_tools = self._base(self._turns)
        self._takes_text = _FIRST in (self.plain or self.with_tools or "")
        if not self._takes_text:
            self._wants_parts = True
            parts = self._base(self._turns)
            self._wants_parts = _FIRST in (parts[0] or parts[1] or "")
            if self._wants_parts:
                self.plain, self.with_tools = parts
        if self.plain is None and self.with_tools is not None:
            self._tools = _TOOLS
        self._text = self.plain or self.with_tools or ""
        if not self._text:
            # Such as where replies end with a token that this tokenizer lacks. One turn still tells the family.
            self.plain, self.with_tools = self._base(self._turns[2:])
            self._takes_text = _LAST in (self.plain or self.with_tools or "")
        self._with_system: str | None = None
        self._with_both: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the facts by the names they have in :class:`~prefixkv.chat.profile.TemplateProfile`."""
        if self._text:
            turns = [_system(_SYSTEM), *self._turns]
            self._with_system, self._with_both = self._render(turns, self._tools), self._render(turns, _TOOLS)
        supports_system = _SYSTEM in (self._with_system or "")
        date_argument = self._date_argument()
        return {
            "supports_system": supports_system,
            "tools": self._tools_placement(supports_system) if self._text else "none",
            "injects_date": bool(date_argument),
            "strips_reasoning": self._strips_reasoning(),
            "system_anywhere": supports_system and self._system_anywhere(),
            "glues_system": supports_system and self._glues_system(),
            "date_argument": date_argument,
            "generation_prompt_differs": self._generation_prompt_differs(),
            "trims_content": self._trims_content(supports_system),
            "writes_bos": self._writes_bos(),
            "prefix_stable": self._prefix_stable(supports_system),
            "takes_text": self._takes_text,
        }

    # -- where things are -----------------------------------------------------------------------------------------

    def _tools_placement(self, supports_system: bool) -> str:
        text, bare = (self._with_both, self._with_system) if supports_system else (self.with_tools, self.plain)
        words = (_TOOL, _FIRST, _REPLY)
        if text is None or any(word not in text for word in words):
            return "none"
        place, first, reply = (text.index(word) for word in words)
        if place > reply:
            return "last_user"
        if place > first:
            return "first_user"
        if supports_system and place < text.find(_SYSTEM):
            return "before_system"
        if bare is None or _FIRST not in bare or (supports_system and _SYSTEM not in text):
            return "after_system" if supports_system else "before_system"
        if not supports_system:
            # With the head of the first user turn before them, tools are in that turn.
            head = bare[: bare.index(_FIRST)]
            return "first_user" if head.strip() and text.startswith(head) else "before_system"
        between = bare[bare.index(_SYSTEM) + len(_SYSTEM) : bare.index(_FIRST)]
        return "first_user" if text[text.index(_SYSTEM) + len(_SYSTEM) :].startswith(between) else "after_system"

    def _glues_system(self) -> bool:
        text, plain = self._with_system or "", self._text
        if _FIRST not in plain or not text.find(_SYSTEM) < text.find(_FIRST):
            return False
        # With the head of the first user turn before it, system text is in that turn.
        head = plain[: plain.index(_FIRST)].rstrip()
        return bool(head) and text.startswith(head)

    def _system_anywhere(self) -> bool:
        text = self._with_system or ""
        before, after = [_system(_SYSTEM), *self._turns[:2]], self._turns[2:]
        late = self._render([*before, _system(_LATE), *after], self._tools)
        if late is None or _LATE not in late or _SYSTEM not in late:
            return False
        if not {_REPLY, _LAST} <= _words(late) & _words(text):
            return False
        kept = text.index(_REPLY) + len(_REPLY)
        if common_prefix(text, late) < kept or not kept <= late.index(_LATE) < late.index(_LAST):
            return False
        # Where it is written as another role's turn, it is no system message any more.
        others = [self._render([*before, turn, *after], self._tools) for turn in (_user(_LATE), _assistant(_LATE))]
        return late not in others

    def _writes_bos(self) -> bool:
        bos = getattr(self._tokenizer, "bos_token", None)
        return isinstance(bos, str) and bool(bos) and self._text.lstrip().startswith(bos)

    # -- what changes as a conversation grows ---------------------------------------------------------------------

    def _generation_prompt_differs(self) -> bool:
        opened = self._render(self._turns[:1], self._tools) if self._text else None
        if opened is None or _FIRST not in opened or not {_FIRST, _REPLY} <= _words(self._text):
            return False
        end = self._text.index(_REPLY)
        return not self._text[:end].partition(_FIRST)[2].startswith(opened.partition(_FIRST)[2])

    def _prefix_stable(self, supports_system: bool) -> bool:
        if not self._text:
            return False
        head = [_system(_SYSTEM)] if supports_system else []
        turns = [*head, *self._turns, _assistant(_SECOND), _user(_THIRD)]
        ends = (_FIRST, _REPLY, _LAST, _SECOND, _THIRD)
        renders = [self._render(turns[: len(head) + i + 1], self._tools, False) for i in range(len(ends))]
        for end, former, later in zip(ends, renders, renders[1:], strict=False):
            if former is None or later is None or end not in former:
                return False
            if not later.startswith(former[: former.rindex(end) + len(end)]):
                return False
        return True

    def _trims_content(self, supports_system: bool) -> bool:
        if not self._text:
            return False
        turns = [*([_system(_SYSTEM)] if supports_system else []), *self._turns]
        padded = [{**turn, "content": f"\n {turn['content']} \n"} for turn in turns]
        text = self._render(padded, self._tools) or ""
        return any(turn["content"].strip() in text and turn["content"] not in text for turn in padded)

    def _strips_reasoning(self) -> bool:
        if not self._text:
            return False
        first, _, last = self._turns
        text = self._render([first, _assistant(f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"), last], self._tools)
        if text is not None and _REPLY in text and _THOUGHT not in text:
            return True
        reply = {**_assistant(_REPLY), **_THOUGHTS}
        if self._is_dropped([first, reply], [last]):
            return True
        return any(
            self._is_dropped([first, *_tool_loop(arguments)], [_assistant(_REPLY), last])
            for arguments in ({"key": "x"}, '{"key": "x"}')  # some templates take one form, some the other
        )

    def _is_dropped(self, turns: _Turns, more: _Turns) -> bool:
        """Return whether reasoning that the first turns show is gone when more follow."""
        now = self._render(turns, _TOOLS if "tool_calls" in turns[1] else self._tools, False) or ""
        shown = [word for word in _THOUGHTS.values() if word in now]
        if not shown:
            return False
        later = self._render([*turns, *more], _TOOLS if "tool_calls" in turns[1] else self._tools)
        return later is not None and any(word not in later for word in shown)

    # -- the clock ------------------------------------------------------------------------------------------------

    def _date_argument(self) -> str:
        """Return the variable that pins an injected date, or "" where none is injected."""
        if not self._text:
            return ""
        turns = [_system(_SYSTEM), *self._turns]
        looks: tuple[tuple[_Turns, Any, str | None], ...] = (
            (self._turns, None, self.plain),
            (self._turns, _TOOLS, self.with_tools),
            (turns, self._tools, self._with_system),
            (turns, _TOOLS, self._with_both),
        )
        for chat, tools, text in looks:
            if text is not None and self._source(tools) and self._render(chat, tools, moment=_OTHER_MOMENT) != text:
                return self._pinning(chat, tools)
        return ""

    def _pinning(self, turns: _Turns, tools: Any) -> str:
        shown = self._render(turns, tools, variables=_DATE_ARGUMENTS) or ""
        for name, word in _DATE_ARGUMENTS.items():
            if word in shown:
                one, other = (
                    self._render(turns, tools, moment=moment, variables={name: word})
                    for moment in (_MOMENT, _OTHER_MOMENT)
                )
                if one is not None and one == other and word in one:
                    return name
        return _CLOCK

    def _source(self, tools: Any) -> str | None:
        """Return the text of the template if it may look at the clock."""
        source = getattr(self._tokenizer, "chat_template", None)
        if isinstance(source, Mapping):
            source = source.get("tool_use" if tools and "tool_use" in source else "default")
        return source if isinstance(source, str) and _CLOCK in source else None

    # -- rendering ------------------------------------------------------------------------------------------------

    def _base(self, turns: _Turns) -> tuple[str | None, str | None]:
        return self._render(turns), self._render(turns, _TOOLS)

    def _render(
        self,
        turns: _Turns,
        tools: Any = None,
        opens_reply: bool = True,
        *,
        moment: datetime = _MOMENT,
        variables: Mapping[str, str] = {},
    ) -> str | None:
        """Render with a clock that stands still."""
        source = self._source(tools)
        if source is not None:
            variables = {**variables, "chat_template": with_clock(source, moment)}
        if self._wants_parts:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return ChatInput(self._tokenizer, turns, tools, variables, opens_reply, False).try_render()


def _words(text: str) -> set[str]:
    return {word for word in (_FIRST, _REPLY, _LAST) if word in text}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _tool_loop(arguments: object) -> list[dict[str, Any]]:
    """Return a call with reasoning and no text (some templates refuse both), and its result."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return [
        {**_assistant(""), **_THOUGHTS, "tool_calls": [call]},
        {"role": "tool", "name": _TOOL, "tool_call_id": "abcdefghi", "content": "x"},
    ]
