"""What a request may look like, and how a bad one is answered."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prefixkv.chat.messages import check_messages, check_template_kwargs, check_tools, total_characters
from prefixkv.errors import InvalidRequest

SECRET = "SECRETWORD"

BAD: dict[str, tuple[Any, str, str]] = {
    "none": (None, "no_messages", "messages"),
    "empty": ([], "no_messages", "messages"),
    "a string": (SECRET, "bad_messages", "messages"),
    "one mapping": ({"role": "user", "content": SECRET}, "bad_messages", "messages"),
    "a string inside": ([SECRET], "bad_messages", "messages[0]"),
    "no role": ([{"content": SECRET}], "unknown_role", "messages[0].role"),
    "other role": ([{"role": SECRET, "content": "x"}], "unknown_role", "messages[0].role"),
    "role no text": ([{"role": ["user"], "content": "x"}], "unknown_role", "messages[0].role"),
    "user none": ([{"role": "user", "content": None}], "missing_content", "messages[0].content"),
    "user absent": ([{"role": "user"}], "missing_content", "messages[0].content"),
    "system none": ([{"role": "system", "content": None}], "missing_content", "messages[0].content"),
    "tool none": ([{"role": "tool", "content": None}], "missing_content", "messages[0].content"),
    "assistant none": ([{"role": "assistant", "content": None}], "missing_content", "messages[0].content"),
    "no calls": ([{"role": "assistant", "tool_calls": []}], "missing_content", "messages[0].content"),
    "number": ([{"role": "user", "content": 7}], "bad_content", "messages[0].content"),
    "mapping": ([{"role": "user", "content": {"text": SECRET}}], "bad_content", "messages[0].content"),
    "bytes": ([{"role": "user", "content": SECRET.encode()}], "bad_content", "messages[0].content"),
    "image": (
        [{"role": "user", "content": [{"type": "image", "url": SECRET}]}],
        "bad_content",
        "messages[0].content[0]",
    ),
    "part text": ([{"role": "user", "content": [{"type": "text"}]}], "bad_content", "messages[0].content[0].text"),
    "slot name": (
        [{"role": "user", "content": [{"type": "slot", "name": f"{SECRET} 1", "text": "x"}]}],
        "bad_content",
        "messages[0].content[0].name",
    ),
    "surrogate": ([{"role": "user", "content": f"{SECRET}\ud800"}], "invalid_text", "messages[0].content"),
    "surrogate in a part": (
        [{"role": "user", "content": [{"type": "text", "text": f"{SECRET}\udfff"}]}],
        "invalid_text",
        "messages[0].content[0].text",
    ),
    "surrogate in a field": (
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": f"{SECRET}\ud800"}}]}],
        "invalid_text",
        "messages[0].tool_calls[0]",
    ),
    "object in a field": ([{"role": "user", "content": "x", "meta": object()}], "bad_messages", "messages[0].meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_with_a_code_and_a_path_and_without_their_text(name: str) -> None:
    messages, code, path = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert (caught.value.code, caught.value.path) == (code, path)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None  # a chained error could carry the text


def test_deep_nesting_is_an_error_of_the_request_and_not_of_the_interpreter() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="nested"):
        check_messages([{"role": "user", "content": "x", "extra": nested}])


def test_the_checked_messages_are_a_deep_copy() -> None:
    """The caller may change its list while the request waits."""
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}
    ]
    before = copy.deepcopy(messages)
    checked = check_messages(messages)
    assert checked == before
    checked[0]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
    assert messages == before


def test_text_parts_are_joined_and_slot_parts_stay() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": text}]) == [{"role": "user", "content": "ab"}]
    mixed = [*text, {"type": "slot", "name": "now"}]
    assert check_messages([{"role": "user", "content": mixed}])[0]["content"] == mixed


def test_empty_text_is_content() -> None:
    assert check_messages([{"role": "user", "content": ""}, {"role": "system", "content": []}]) == [
        {"role": "user", "content": ""},
        {"role": "system", "content": ""},
    ]


@pytest.mark.parametrize("tools", ["find", [print], ["find"], {"type": "function"}, [{1: "x"}], [{"name": object()}]])
def test_tools_must_be_a_list_of_schemas(tools: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tools(tools)
    assert caught.value.code == "bad_tools"


def test_no_tools_and_an_empty_list_stay_apart() -> None:
    """Some templates render them differently, and the ids must be the tokenizer's own."""
    assert check_tools(None) is None
    assert check_tools([]) == []


@pytest.mark.parametrize("kwargs", [{"tokenize": False}, {"chat_template": "x"}, {1: 2}, ["a"], {"f": print}])
def test_template_variables_cannot_take_over_the_call(kwargs: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_template_kwargs(kwargs)
    assert caught.value.code == "bad_template_kwargs"


def test_characters_of_content_are_counted_over_all_messages() -> None:
    assert total_characters([{"content": "abc"}, {"content": None}, {"content": "de"}, {}]) == 5


def test_a_number_too_long_to_write_is_refused() -> None:
    """Python itself refuses to write it, with an error of another kind, deep inside a template."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"n": 10**5000}}]}
    with pytest.raises(InvalidRequest, match="whole number of more than"):
        check_messages([message])
