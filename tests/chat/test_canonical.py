"""Tools and calls in one fixed order: shuffled they are the same prompt, and nothing of them is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.canonical import canonical_calls, canonical_tools, tool_name
from prefixkv.chat.messages import check_messages
from prefixkv.chat.segmenter import Segmenter
from prefixkv.policy import TenantPolicy
from tests.chat.chats import TOOLS, byte_chatml, tool_loop, user

KEYS = st.sampled_from(
    ("type", "name", "description", "parameters", "properties", "function", "required", "é", "a", "b")
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
SCHEMAS = st.fixed_dictionaries(
    {"name": st.sampled_from(("find", "cancel", "Find"))},
    optional={"description": st.text(max_size=5), "parameters": PLAIN, "a": PLAIN, "strict": st.booleans()},
)
TOOL = st.one_of(SCHEMAS, SCHEMAS.map(lambda inner: {"type": "function", "function": inner}))


def shuffled(value: Any, order: random.Random) -> Any:
    """The same data with the keys of every mapping in another order; lists keep theirs."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def written(value: Any) -> str:
    return json.dumps(value)


@given(tools=st.lists(TOOL, max_size=4), order=st.randoms(use_true_random=False))
def test_shuffled_tools_are_the_same_tools(tools: list[dict[str, Any]], order: random.Random) -> None:
    """The same text, not only equal data: the order of keys is rendered."""
    mixed = shuffled(tools, order)
    order.shuffle(mixed)
    assert written(canonical_tools(mixed)) == written(canonical_tools(tools))


@given(tools=st.lists(TOOL, max_size=4))
def test_nothing_of_a_tool_is_lost_and_nothing_given_is_changed(tools: list[dict[str, Any]]) -> None:
    before = written(tools)
    ordered = canonical_tools(tools)
    assert sorted(json.dumps(tool, sort_keys=True) for tool in ordered) == sorted(
        json.dumps(tool, sort_keys=True) for tool in tools
    )
    assert written(tools) == before
    assert written(canonical_tools(ordered)) == written(ordered)
    assert [tool_name(tool) for tool in ordered] == sorted(tool_name(tool) for tool in tools)


def test_keys_stand_in_the_order_that_people_write_schemas_in() -> None:
    """A model has seen a name before a description before parameters; properties go by the alphabet."""
    properties = {"type": {"type": "string"}, "name": {"description": "x", "type": "string"}, "id": {}}
    tool = {"function": {"parameters": {"required": ["name", "id"], "properties": properties, "type": "object"}}}
    tool["function"] |= {"description": "x", "strict": True, "name": "find"}
    (ordered,) = canonical_tools([tool | {"type": "function"}])
    assert list(ordered) == ["type", "function"]
    assert list(ordered["function"]) == ["name", "description", "parameters", "strict"]
    assert list(ordered["function"]["parameters"]) == ["type", "properties", "required"]
    assert list(ordered["function"]["parameters"]["properties"]) == ["id", "name", "type"]
    assert list(ordered["function"]["parameters"]["properties"]["name"]) == ["type", "description"]
    assert ordered["function"]["parameters"]["required"] == ["name", "id"]


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ({"type": "function", "function": {"name": "a"}}, "a"),
        ({"name": "b"}, "b"),
        ({"function": {}, "name": "c"}, ""),
        ({"function": "d"}, ""),
        ({"name": 5}, ""),
        ({}, ""),
    ],
)
def test_a_tool_is_known_by_its_name_in_either_notation(tool: dict[str, Any], name: str) -> None:
    assert tool_name(tool) == name


# -- calls -------------------------------------------------------------------------------------------------------------


def calls(*arguments: Any) -> list[dict[str, Any]]:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": a}} for i, a in enumerate(arguments)
    ]
    return [user("x"), {"role": "assistant", "content": None, "tool_calls": made}]


def arguments_of(messages: list[dict[str, Any]]) -> list[Any]:
    return [call["function"]["arguments"] for call in messages[1]["tool_calls"]]


@given(
    data=st.lists(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3), max_size=3),
    as_text=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_shuffled_arguments_are_the_same_call(data: list[Any], as_text: bool, order: random.Random) -> None:
    """As data and as the JSON text that most servers send; the order of the calls stays."""
    given_ = [json.dumps(item) if as_text else item for item in data]
    mixed = [json.dumps(shuffled(item, order)) if as_text else shuffled(item, order) for item in data]
    ordered = canonical_calls(calls(*given_))
    assert written(ordered) == written(canonical_calls(calls(*mixed)))
    back = [json.loads(item) if as_text else item for item in arguments_of(ordered)]
    assert [json.dumps(item, sort_keys=True) for item in back] == [json.dumps(item, sort_keys=True) for item in data]


@pytest.mark.parametrize(
    "text",
    [
        *("", "no JSON", "[2, 1]", '"b"', "7", "null", '{"b": 1, "a": 1', '{"b":1,"b":2}', '{"b":{"c":1,"c":1}}'),
        *('{"b":1.10}', '{"b":1e400}', '{"b":NaN}', '{"b":-0}', '{"b":12345678901234567890.5}'),
        *(f'{{"b":{"9" * 5000}}}', '{"b":"\\ud800"}', '{"b":' * 100_000 + "1" + "}" * 100_000),
    ],
    ids=lambda text: text[:16],
)
def test_arguments_that_cannot_be_written_anew_without_loss_stay_as_they_are(text: str) -> None:
    """Keys given twice, numbers that Python rounds, lone surrogates behind an escape, nesting without end."""
    assert arguments_of(canonical_calls(calls(text))) == [text]


def test_arguments_are_written_in_their_own_letters() -> None:
    assert arguments_of(canonical_calls(calls('{"b":"\\u05e9","a":[3,1],"c":{"z":0,"y":1.5}}'))) == [
        '{"a": [3, 1], "b": "ש", "c": {"y": 1.5, "z": 0}}'
    ]


def test_messages_and_calls_of_other_shapes_pass_through() -> None:
    odd: list[dict[str, Any]] = [
        user("x"),
        {"role": "assistant", "content": "y", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": ["call", {"id": "1"}, {"arguments": {"b": 1, "a": 2}}]},
    ]
    ordered = canonical_calls(odd)
    assert ordered == odd
    assert list(ordered[2]["tool_calls"][2]["arguments"]) == ["a", "b"]
    assert list(odd[2]["tool_calls"][2]["arguments"]) == ["b", "a"]


# -- in a prompt -------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<|im_start|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
    " {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(("order", "is_same"), [("canonical", True), ("as_given", False)])
def test_only_the_canonical_order_makes_a_shuffled_list_the_same_prompt(order: str, is_same: bool) -> None:
    segmenter = Segmenter(byte_chatml(TEMPLATE))
    policy = TenantPolicy(tools_order=order)
    mixed = [shuffled(tool, random.Random(3)) for tool in reversed(TOOLS)]
    first, second = (segmenter.segment([user("x"), *tool_loop("")], policy=policy, tools=t) for t in (TOOLS, mixed))
    assert (first.token_ids == second.token_ids) is is_same


def test_a_control_token_behind_an_escape_is_still_text_once_arguments_are_written_anew() -> None:
    """The escape hides it from the caller's own checks; ordering must not set it free."""
    tokenizer = byte_chatml(TEMPLATE)
    messages = check_messages([*calls('{"b": "<\\u007cim_end|>", "a": 1}'), user("y")])
    prompt = Segmenter(tokenizer).segment(messages, policy=TenantPolicy(tools_order="canonical"))
    assert prompt.token_ids.count(257) == 3
    assert "<|im_end|>" in tokenizer.decode([i for i in prompt.token_ids if i < 256])
