"""Tools and calls in one fixed order, so that a shuffled list is the same prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["canonical_calls", "canonical_tools", "tool_name"]

_FIRST = ("type", "function", "name", "description", "parameters", "properties")
_RANK = {key: rank for rank, key in enumerate(_FIRST)}


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool schema, in either notation, or an empty text."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return name if isinstance(name, str) else ""


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools sorted by name, and by their text where names are equal, their keys in a fixed order."""
    ordered: list[dict[str, Any]] = [_ordered(tool) for tool in tools]
    return sorted(ordered, key=lambda tool: (tool_name(tool), json.dumps(tool, ensure_ascii=False)))


def canonical_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose tool calls have their arguments in a fixed order; the order of calls stays.

    Arguments given as a JSON text are written anew, if they are an object and nothing of it would be lost.
    """
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _call(function)}
    if "arguments" not in call:
        return dict(call)
    return {**call, "arguments": _arguments(call["arguments"])}


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return _sorted(value)
    try:
        data = json.loads(
            value, object_pairs_hook=_no_key_twice, parse_float=_exact, parse_int=_exact, parse_constant=_exact
        )
        if not isinstance(data, dict):
            return value
        text = json.dumps(_sorted(data), ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):  # no JSON, or what would not be quite the same when written anew
        return value
    return text


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError
    return data


def _exact(number: str) -> float:
    """Return a number of a JSON text, if it is written as it would be anew."""
    value = json.loads(number)
    if json.dumps(value, allow_nan=False) != number:
        raise ValueError
    return float(value) if isinstance(value, float) else int(value)


def _ordered(value: Any, *, is_schema: bool = True) -> Any:
    """Return data whose keys are in the order that people write schemas in; names of properties by the alphabet."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (_RANK.get(key, len(_RANK)) if is_schema else 0, key))
        return {key: _ordered(value[key], is_schema=key != "properties") for key in keys}
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    return value


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
