"""Slots: values go in, their places are known, and they are nothing but text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.messages import check_messages
from prefixkv.chat.slots import FilledMessages, fill_slots
from prefixkv.errors import InvalidRequest
from prefixkv.policy import TenantPolicy
from tests.chat.chats import system, user


def fill(messages: list[dict[str, Any]], slots: Any, **policies: dict[str, Any]) -> FilledMessages:
    return fill_slots(check_messages(messages), slots, TenantPolicy(slots=policies))


def content_of(filled: FilledMessages) -> list[str]:
    return [message["content"] for message in filled.messages]


def places(filled: FilledMessages) -> list[tuple[str, str]]:
    """(name, text) of the slots whose text varies."""
    return [
        (span.name, message["content"][span.start : span.end])
        for message, spans in zip(filled.messages, filled.spans, strict=True)
        for span in spans
    ]


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


# -- placements --------------------------------------------------------------------------------------------------------

TAIL = {"placement": "tail"}


@pytest.mark.parametrize(("unit", "shown"), [("minute", "10:31:00"), ("hour", "10:00:00"), ("day", "00:00:00")])
def test_a_coarsened_value_stays_in_its_place_rounded_down(unit: str, shown: str) -> None:
    filled = fill([system("At {{slot:now}}.")], {"now": "10:31:07"}, now={"placement": "coarsen", "unit": unit})
    assert content_of(filled) == [f"At {shown}."]
    assert places(filled) == [("now", shown)]
    assert (filled.late, filled.warnings) == ((), ())


def test_a_value_without_a_time_cannot_be_coarsened_and_a_warning_says_so() -> None:
    filled = fill([system("At {{slot:now}}, {{slot:now}}.")], {"now": "SECRETWORD"}, now={"placement": "coarsen"})
    assert content_of(filled) == ["At SECRETWORD, SECRETWORD."]
    (warning,) = filled.warnings
    assert "'now'" in warning
    assert "SECRETWORD" not in warning


def test_a_late_value_leaves_a_phrase_and_no_place_that_varies() -> None:
    """So the text behind it is shared as it would be without the slot."""
    messages = [system("I am {{slot:nick}}, {{slot:nick}}. {{slot:now}}"), user("Hi {{slot:nick}}")]
    filled = fill(messages, {"nick": "Ann", "now": "10:31"}, nick=TAIL, now={"placement": "tail", "phrase": "soon"})
    phrase = "[nick: see the last note]"
    assert content_of(filled) == [f"I am {phrase}, {phrase}. soon", f"Hi {phrase}"]
    assert places(filled) == []
    assert filled.late == (("nick", "Ann"), ("now", "10:31"))
    assert filled.warnings == ()


def test_a_phrase_may_be_empty_and_is_never_searched_for_markers() -> None:
    slots = {"a": "x", "b": "y"}
    filled = fill([user("[{{slot:a}}{{slot:b}}]")], slots, a=TAIL | {"phrase": ""}, b=TAIL | {"phrase": "{{slot:a}}"})
    assert content_of(filled) == ["[{{slot:a}}]"]
    assert filled.late == (("a", "x"), ("b", "y"))


def test_the_last_value_of_a_late_slot_is_the_one_that_counts() -> None:
    """Earlier ones went out with the notes of their own turns, so their places must not change."""
    parts = [{"type": "slot", "name": "me", "text": name} for name in ("Ann", "Bob", "Cid")]
    filled = fill([{"role": "user", "content": parts}], None, me=TAIL)
    assert content_of(filled) == ["[me: see the last note]" * 3]
    assert places(filled) == []
    assert filled.late == (("me", "Cid"),)
    assert filled.warnings == ()


def test_without_a_user_turn_a_late_value_stays_in_its_place() -> None:
    filled = fill([system("{{slot:now}}")], {"now": "10:31"}, now=TAIL)
    assert (content_of(filled), places(filled), filled.late) == (["10:31"], [("now", "10:31")], ())
    assert ["no user turn" in warning for warning in filled.warnings] == [True]


def test_patch_is_inline_as_yet_and_says_so() -> None:
    filled = fill([system("{{slot:now}}")], {"now": "10:31"}, now={"placement": "patch"})
    assert places(filled) == [("now", "10:31")]
    assert ["patch" in warning for warning in filled.warnings] == [True]


@given(
    values=st.dictionaries(st.sampled_from("abc"), st.text(max_size=6), min_size=3, max_size=3),
    placements=st.tuples(*(st.sampled_from(("inline", "coarsen", "tail", "patch")) for _ in range(3))),
    around=st.lists(st.text(alphabet="x {}:slota\n🧿", max_size=5), min_size=4, max_size=4),
)
def test_whatever_the_placement_the_text_around_slots_stays(
    values: dict[str, str], placements: tuple[str, ...], around: list[str]
) -> None:
    policies = {name: {"placement": kind} for name, kind in zip("abc", placements, strict=True)}
    text = "".join(f"{piece}{{{{slot:{name}}}}}" for piece, name in zip(around, "abc", strict=False)) + around[3]
    filled = fill([system(text), user("x")], values, **policies)
    (content, _), (spans, _) = content_of(filled), filled.spans
    shown = iter(content[span.start : span.end] for span in spans)
    pieces = [f"[{name}: see the last note]" if name in dict(filled.late) else next(shown) for name in "abc"]
    assert content == "".join(part for pair in zip(around, [*pieces, ""], strict=True) for part in pair)
    assert dict(filled.late) == {name: values[name] for name, p in policies.items() if p["placement"] == "tail"}
