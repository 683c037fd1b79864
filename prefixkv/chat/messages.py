"""Messages and tools as they come from a caller: copied, checked, never changed in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefixkv.errors import InvalidRequest

__all__ = [
    "ROLES",
    "SLOT_NAME",
    "check_messages",
    "check_template_kwargs",
    "check_text",
    "check_tools",
    "total_characters",
]

ROLES = ("system", "developer", "user", "assistant", "tool")

SLOT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

_MAX_DEPTH = 64
_MOST_BITS = 4096
# Arguments of the tokenizer's own method: passing them as template variables would change what is rendered, or how.
_RESERVED = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "sanitize_control_tokens".split()
)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a checked copy of the messages; changes nothing.

    Content made of text parts is joined into one string. Content that holds a slot part stays a list of parts, each
    ``{"type": "text", "text": ...}`` or ``{"type": "slot", "name": ..., "text": ...}``. Fields other than role and
    content (``tool_calls``, ``tool_call_id``, ``reasoning_content``, ...) are copied as they are: plain data only.

    Args:
        messages: A list of mappings with ``role`` and ``content``.

    Raises:
        InvalidRequest: ``no_messages``, ``bad_messages``, ``unknown_role``, ``missing_content``, ``bad_content`` or
            ``invalid_text``.
    """
    if messages is None or (isinstance(messages, Sequence) and not messages):
        raise InvalidRequest("no_messages", "messages", "give at least one message")
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequest("bad_messages", "messages", "must be a list of mappings with 'role' and 'content'")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return a checked copy of the tool schemas, or None where there are none; changes nothing.

    Raises:
        InvalidRequest: ``bad_tools`` or ``invalid_text``.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InvalidRequest("bad_tools", "tools", "must be a list of JSON schemas (mappings)")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest("bad_tools", f"tools[{i}]", "must be a JSON schema (a mapping)")
    return [_plain(tool, f"tools[{i}]", "bad_tools", 0) for i, tool in enumerate(tools)]


def check_template_kwargs(kwargs: object) -> dict[str, Any]:
    """Return a checked copy of the extra template variables; changes nothing.

    Raises:
        InvalidRequest: ``bad_template_kwargs`` or ``invalid_text``.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidRequest("bad_template_kwargs", "template_kwargs", "must map names to plain data")
    for key in kwargs:
        if key in _RESERVED:
            raise InvalidRequest("bad_template_kwargs", f"template_kwargs.{key}", "is not a template variable")
    copied: dict[str, Any] = _plain(kwargs, "template_kwargs", "bad_template_kwargs", 0)
    return copied


def check_text(text: str, path: str) -> str:
    """Return ``text`` if it can be encoded; changes nothing.

    Raises:
        InvalidRequest: ``invalid_text`` if it holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("invalid_text", path, "holds a lone surrogate; send valid Unicode text") from None
    return text


def total_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many characters of content the messages hold; changes nothing."""
    return sum(len(content) for message in messages if isinstance(content := message.get("content"), str))


def _check_message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise InvalidRequest("bad_messages", path, "must be a mapping with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest("unknown_role", f"{path}.role", f"must be one of {', '.join(ROLES)}")
    checked = {
        key: _plain(value, f"{path}.{key}", "bad_messages", 0)
        for key, value in message.items()
        if key not in ("role", "content")
    }
    checked = {"role": role, "content": _check_content(message.get("content"), f"{path}.content"), **checked}
    if checked["content"] is None and not (role == "assistant" and checked.get("tool_calls")):
        hint = "an assistant turn needs text or tool_calls" if role == "assistant" else f"a {role} turn needs text"
        raise InvalidRequest("missing_content", f"{path}.content", hint)
    return checked


def _check_content(content: object, path: str) -> str | list[dict[str, str]] | None:
    if content is None:
        return None
    if isinstance(content, str):
        return check_text(str(content), path)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest("bad_content", path, "must be text, or a list of text and slot parts")
    parts = [_check_part(part, f"{path}[{i}]") for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _check_part(part: object, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "slot"):
        raise InvalidRequest("bad_content", path, "a part must be of type 'text' or 'slot'")
    text, name = part.get("text"), part.get("name")
    checked = {"type": str(kind)}
    if kind == "slot":
        if not isinstance(name, str) or not SLOT_NAME.fullmatch(name):
            raise InvalidRequest(
                "bad_content", f"{path}.name", "a slot's name is a letter, then letters, digits, . _ -"
            )
        checked["name"] = str(name)
        if text is None:
            return checked
    if not isinstance(text, str):
        raise InvalidRequest("bad_content", f"{path}.text", "must be text")
    return {**checked, "text": check_text(str(text), f"{path}.text")}


def _plain(value: Any, path: str, code: str, depth: int) -> Any:
    """Return a deep copy of JSON-like data. Paths name indexes, not keys: keys may be the model's or a user's words."""
    try:
        return _copied(value, depth)
    except _OddError:
        return _named(value, path, code, depth)


class _OddError(Exception):
    """There is something in a value that has to be looked at more closely."""


def _copied(value: Any, depth: int) -> Any:
    """Return a deep copy of plain data of the most common types; for all else use :func:`_named`."""
    kind = type(value)
    if kind is str:
        if not value.isascii() and not _is_unicode(value):
            raise _OddError
        return value
    if depth > _MAX_DEPTH:
        raise _OddError
    if kind is dict:
        if not all(type(key) is str and (key.isascii() or _is_unicode(key)) for key in value):
            raise _OddError
        return {key: _copied(item, depth + 1) for key, item in value.items()}
    if kind is list:
        return [_copied(item, depth + 1) for item in value]
    if value is None or kind is bool or kind is float or (kind is int and value.bit_length() <= _MOST_BITS):
        return value
    raise _OddError


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(value: Any, path: str, code: str, depth: int) -> Any:
    """Do the same for all types of plain data, and name the place of what is none."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(code, path, f"is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise InvalidRequest(code, path, f"holds a whole number of more than {_MOST_BITS} bits")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return check_text(str(value), path)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest(code, path, "keys must be text")
        return {check_text(str(key), path): _named(item, path, code, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_named(item, f"{path}[{i}]" if depth < 2 else path, code, depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(code, path, f"must be plain data (text, numbers, lists, mappings), not {type(value).__name__}")
