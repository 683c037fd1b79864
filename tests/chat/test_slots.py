"""Slots: values go in, their places are known, and they are nothing but text."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.chat.messages import check_messages
from prefixkv.chat.slots import FilledMessages, fill_slots
from prefixkv.errors import InvalidRequest
from prefixkv.policy import TenantPolicy
from tests.chat.chats import system, user


def fill(messages: list[dict[str, Any]], slots: Any) -> FilledMessages:
    return fill_slots(check_messages(messages), slots, TenantPolicy())


def test_markers_and_parts_are_filled_and_located() -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "I am "}, {"type": "slot", "name": "me", "text": "Ann"}],
    }
    filled = fill([system("It is {{slot:now}}, {{slot:now}}!"), parts], {"now": "10:31"})
    assert [message["content"] for message in filled.messages] == ["It is 10:31, 10:31!", "I am Ann"]
    found = [
        [(span.name, message["content"][span.start : span.end]) for span in spans]
        for message, spans in zip(filled.messages, filled.spans, strict=True)
    ]
    assert found == [[("now", "10:31"), ("now", "10:31")], [("me", "Ann")]]
    assert filled.warnings == ()


def test_values_are_never_searched_for_markers() -> None:
    filled = fill([system("{{slot:a}}{{slot:b}}")], {"a": "{{slot:b}}", "b": "{{slot:a}}"})
    assert filled.messages[0]["content"] == "{{slot:b}}{{slot:a}}"


@pytest.mark.parametrize(
    "message",
    [system("{{slot:a}}"), {"role": "user", "content": [{"type": "slot", "name": "a"}]}],
    ids=["text", "part"],
)
def test_an_operators_slot_without_a_value_is_an_error(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fill([message], {"b": "x"})
    assert (caught.value.code, caught.value.path) == ("missing_slot", "messages[0].content")


def test_a_marker_that_an_end_user_types_is_text() -> None:
    """Else anybody could make every later request of a conversation fail by typing one."""
    assert fill([user("what is {{slot:a}}?")], None).messages[0]["content"] == "what is {{slot:a}}?"


def test_a_marker_in_a_user_turn_is_filled_where_the_caller_gives_the_value() -> None:
    assert fill([user("at {{slot:a}}")], {"a": "noon"}).messages[0]["content"] == "at noon"


def test_an_unused_value_is_a_warning() -> None:
    assert len(fill([user("x")], {"a": "SECRETWORD"}).warnings) == 1
    assert "SECRETWORD" not in fill([user("x")], {"a": "SECRETWORD"}).warnings[0]


@pytest.mark.parametrize(
    ("slots", "code"),
    [
        (["a"], "bad_slots"),
        ({"a": 1}, "bad_slots"),
        ({1: "a"}, "bad_slots"),
        ({"a b": "x"}, "bad_slots"),
        ({"a": "\ud800"}, "invalid_text"),
    ],
)
def test_bad_values_are_refused(slots: Any, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fill([user("x")], slots)
    assert caught.value.code == code
