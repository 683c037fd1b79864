"""Words between two contents: taken apart and put together again, for the same messages and for others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.gaps import Field, Gap, Mark, content_of, details, signature, split_gap, words_of
from prefixkv.chat.recall import Past
from prefixkv.chat.segmenter import Segmenter
from prefixkv.chat.shapes import Shapes
from tests.chat.chats import CHATML, POLICY, byte_chatml, system, user


def called(arguments: Any, name: str = "find", call_id: str = "c1", content: str | None = None) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


WAYS = {
    "JSON": ('<call>{"name": "find", "arguments": {"id": "7"}}</call>', '{"id": "7"}', '{"q": "é", "n": [1, true]}'),
    "indented": ('find {\n    "id": "7"\n}', '{"id": "7"}', '{"q": "é", "n": [1, true]}'),
    "as Python writes it": ("find({'id': '7'})", '{"id": "7"}', '{"q": "é", "n": [1, true]}'),
}


@pytest.mark.parametrize("gap", [way[0] for way in WAYS.values()], ids=list(WAYS))
def test_a_gap_fits_other_arguments(gap: str) -> None:
    messages = [user("a"), called({"id": "7"}), result("b")]
    others = [user("x"), called({"q": "é", "n": [1, True]}, name="cancel"), result("y")]
    made = split_gap(gap, messages, [])
    assert made.fill(messages) == (gap, [])
    filled = made.fill(others)
    assert filled is not None
    assert "cancel" in filled[0]
    assert not any(word in filled[0] for word in ("find", "7"))
    assert not made.is_detailed


def test_a_gap_that_writes_each_argument_fits_calls_with_the_same_number_and_types_of_them() -> None:
    messages = [user("a"), called({"id": "7", "n": 3}), result("b")]
    gap = "<f=find><p=id>7</p><p=n>3</p></f>"
    made = split_gap(gap, messages, [])
    assert made.is_detailed
    others = [user("a"), called({"town": "find", "x": 70}), result("b")]
    assert made.fill(others) == ("<f=find><p=town>find</p><p=x>70</p></f>", [])
    assert details(messages) == details(others) != details([called({"id": "7", "n": "3"})])


def test_equal_fields_are_taken_in_their_order() -> None:
    calls = [called({"id": "7"})["tool_calls"][0], called({"id": "7"})["tool_calls"][0]]
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": calls}, result("b")]
    made = split_gap('find{"id": "7"};find{"id": "7"}', messages, [])
    assert [piece.call for piece in made.pieces if isinstance(piece, Field)] == [0, 0, 1, 1]


def test_a_name_is_a_whole_word() -> None:
    made = split_gap("finding: find", [user("a"), called({}), result("b")], [])
    assert made.pieces == ("finding: ", Field(1, "function.name", 0, 0))


def test_a_message_begins_no_later_than_its_first_field() -> None:
    """Even where it was said to: what stands before a mark may be shared wider than what stands behind it."""
    messages = [user("a"), called({"id": "7"}), result("b")]
    made = split_gap("end, call find, end", messages, [(17, Mark(1)), (18, Mark(2))])
    assert made.fill(messages) == ("end, call find, end", [(10, Mark(1)), (18, Mark(2))])


def test_white_space_around_contents_is_a_field_where_the_template_keeps_it() -> None:
    messages = [user("a\n\n"), user(" b")]
    kept, trimmed = split_gap("\n\n<end> ", messages, []), split_gap("<end>", messages, [])
    others = [user("a "), user("\tb")]
    assert (kept.fill(others), trimmed.fill(others)) == ((" <end>\t", []), ("<end>", []))
    assert content_of(user(" \n ")) == ("", "", " \n ")


TEXT = st.text('ab7{}":, \n<é', max_size=8)
MESSAGES = st.lists(
    st.one_of(
        TEXT.map(user),
        TEXT.map(result),
        st.builds(called, st.one_of(TEXT, st.dictionaries(TEXT, st.one_of(TEXT, st.integers(0, 9)), max_size=3)), TEXT),
    ),
    min_size=1,
    max_size=4,
)


@given(TEXT, MESSAGES, st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), max_size=3))
def test_whatever_a_gap_is_it_is_the_same_put_together_again(
    gap: str, messages: list[dict[str, Any]], marks: list[tuple[int, int]]
) -> None:
    places = [(min(place, len(gap)), Mark(number)) for place, number in sorted(marks)]
    filled = split_gap(gap, messages, places).fill(messages)
    assert filled is not None
    assert filled[0] == gap
    assert [mark for _, mark in filled[1]] == [mark for _, mark in places]
    assert all(now <= before for (now, _), (before, _) in zip(filled[1], places, strict=True))


@pytest.mark.parametrize(
    "message",
    [
        {**user("a"), "name": 7},
        {**user("a"), "mood": "good"},
        {**called({}), "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]},
        {**called({}), "tool_calls": [{"id": "c", "function": {"name": "f", "strict": True}}]},
        {**called({}), "tool_calls": ["find"]},
        {**called({}), "tool_calls": "find"},
    ],
)
def test_messages_that_hold_more_than_is_known_have_no_signature(message: dict[str, Any]) -> None:
    assert signature(message) is None


def test_a_call_with_very_many_arguments_is_not_looked_at_one_by_one() -> None:
    many = {f"key{n}": n for n in range(5000)}
    messages = [user("a"), called(many), result("b")]
    assert not split_gap("<key1>", messages, []).is_detailed
    assert split_gap(f"<{many}>", messages, []).fill([user("a"), called({}), result("b")]) == ("<{}>", [])


def test_many_messages_without_text_in_a_row_are_not_learnt() -> None:
    """What it costs to take such a gap apart grows with all that it may hold."""
    segmenter, shapes = Segmenter(byte_chatml()), Shapes()
    chat = [system("Be."), user("Hello"), *[called({}, name="assistant", content="")] * 9, user("Thanks")]
    segmenter.segment(chat, policy=POLICY, past=Past(shapes=shapes))
    assert not shapes._gaps
    segmenter.segment([*chat[:8], chat[-1]], policy=POLICY, past=Past(shapes=shapes))
    assert shapes._gaps


def test_a_slot_without_text_narrows_as_it_does_where_nothing_is_known() -> None:
    """In an example, a message that is nothing but a slot: what stands behind it depends on its being empty."""
    segmenter, shapes = Segmenter(byte_chatml()), Shapes()
    example = [system("Be."), user(""), {"role": "assistant", "content": "A shoe."}, user("Hello")]
    segmenter.segment(example, policy=POLICY, few_shot=2, past=Past(shapes=shapes))
    chat, slots = [example[0], user("{{slot:x}}"), *example[2:]], {"x": ""}
    known = segmenter.segment(chat, policy=POLICY, few_shot=2, slots=slots, past=Past(shapes=shapes))
    assert known.segments == segmenter.segment(chat, policy=POLICY, few_shot=2, slots=slots).segments


def test_a_caller_s_words_in_front_of_all_are_not_kept() -> None:
    template = "{% for m in messages %}{% if m.name is defined %}[{{ m.name }}]{% endif %}{% endfor %}" + CHATML
    segmenter, shapes = Segmenter(byte_chatml(template)), Shapes()
    chat = [system("Be."), {**user("Hello"), "name": "Xyzzy"}, user("Hello?")]
    segmenter.segment(chat, policy=POLICY, past=Past(shapes=shapes))
    assert "Xyzzy" not in repr(shapes._heads)


def test_what_is_kept_of_a_tenant_is_bounded() -> None:
    """Tools stand between the system text and the first turn here, and each chat brings others."""
    template = CHATML.replace("{{ message.content }}", "{{ message.content }}{% if loop.first %}{{ tools }}{% endif %}")
    segmenter, shapes = Segmenter(byte_chatml(template)), Shapes()
    for number in range(40):
        tools = [{"type": "function", "function": {"name": f"find{number}", "description": "x" * 30_000}}]
        segmenter.segment([system("Be."), user("Hello")], tools=tools, policy=POLICY, past=Past(shapes=shapes))
        assert sum(gap.characters for gap in shapes._gaps.values()) < 2**19 + 2**16
    assert any("find39" in repr(gap) for gap in shapes._gaps.values())


def test_words_of_a_caller_are_not_kept() -> None:
    """A purge of the user would not find them here. This template writes arguments in a way of its own."""
    template = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content or '' }}{% for call in message.tool_calls %}"
        "<call>{{ call.function.arguments.note | upper }}</call>{% endfor %}",
    )
    segmenter, shapes = Segmenter(byte_chatml(template)), Shapes()
    chat = [system("Be."), user("Note it."), called({"note": "Xyzzy"}), result("done"), user("Thanks")]
    for _ in range(2):
        prompt = segmenter.segment(chat, policy=POLICY, past=Past(shapes=shapes))
        assert prompt.segments == segmenter.segment(chat, policy=POLICY).segments
    assert "xyzzy" not in repr(shapes._gaps).lower()
    assert shapes._gaps, "of the other turns they are"


def test_what_a_template_can_write_by_itself() -> None:
    words = words_of("{{ '<tool_call>' }}", "assistant")
    assert Gap(("<tool", Mark(1), "_call>", Field(1, "id", 0, 0), "assistant")).is_made_of(words)
    assert not Gap(("<tool_call> 7",)).is_made_of(words)
