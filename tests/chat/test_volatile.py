"""Text that changes from request to request: where it is, and what it looks like."""

from __future__ import annotations

import random
import uuid
from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.volatile import volatile_spans

MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2032, 12, 31))


def written(*formats: str) -> st.SearchStrategy[tuple[str, str]]:
    """Two different times in one notation."""
    return st.tuples(MOMENTS, MOMENTS, st.sampled_from(formats)).map(
        lambda drawn: (drawn[0].strftime(drawn[2]), drawn[1].strftime(drawn[2]))
    )


_NUMBERS = st.integers(0, 999_999_999)
_NONCES = st.text("abcdefABCDEF0123456789_", min_size=8, max_size=24).filter(
    lambda text: any(map(str.isdigit, text)) and not text.isdigit()
)
_NAMES = st.sampled_from(
    ("Marcus", "Simon", "Monica Decker", "Sunil", "Augusta Mayer", "Anna-Maria", "O'Neil", "Çelik", "Zoë", "Friedrich")
)
PAIRS = {
    "clock": written("%H:%M", "%H:%M:%S", "%I:%M %p", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S.%f"),
    "date": written(
        "%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%d %B %Y", "%B %d, %Y", "%b %d", "%A, %d %B %Y", "%B %Y", "%A"
    ),
    "uuid": st.tuples(st.uuids(), st.uuids()).map(lambda drawn: (str(drawn[0]), str(drawn[1]))),
    "counter": st.tuples(_NUMBERS, _NUMBERS, st.sampled_from(("", "#", "№"))).map(
        lambda drawn: (f"{drawn[2]}{drawn[0]}", f"{drawn[2]}{drawn[1]}")
    ),
    "nonce": st.tuples(_NONCES, _NONCES),
    "name": st.tuples(_NAMES, _NAMES),
}
CHANGES = {kind: pairs.filter(lambda pair: pair[0] != pair[1]) for kind, pairs in PAIRS.items()}
FILLER = (
    "You are the assistant of an airline. Follow the rules below; do not guess.\nRefund only unused tickets, and only "
    "to the card that paid.\n\nAsk for the booking before anything is changed.\n"
)


@st.composite
def changed_texts(draw: st.DrawFn) -> tuple[str, str, list[tuple[str, int, int]]]:
    """A long text, the same with new values in a few places, and the places: kind, start and end in the first."""
    kinds = draw(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4))
    text = other = draw(st.sampled_from((FILLER, FILLER * 2, "\n" + FILLER)))
    places = []
    for kind in kinds:
        value, new = draw(CHANGES[kind])
        # An identifier begins a line; else hex letters and words beside it may look like something else.
        label = draw(st.sampled_from(("Value: ", "- ", "(", "שעה: ", "")))
        places.append((kind, len(text) + len(label), len(text) + len(label) + len(value)))
        end = ")\n" if label == "(" else draw(st.sampled_from(("\n", ".\n", " and so on.\n"))) if label else "\n"
        text += label + value + end + FILLER
        other += label + new + end + FILLER
    return text, other, places


@given(changed_texts())
def test_the_spans_cover_what_changed_and_nothing_else(drawn: tuple[str, str, list[tuple[str, int, int]]]) -> None:
    """They are in order and apart; without them both texts are the same."""
    text, other, places = drawn
    spans = volatile_spans(text, other)
    back = volatile_spans(other, text)
    assert len(spans) == len(back) == len(places)
    assert all(span.start < span.end for span in spans)
    assert all(first.end <= second.start for first, second in pairwise(spans))
    for span, (_, start, end) in zip(spans, places, strict=True):
        # Words that both values have in common (a year, a weekday) may be left out; of what surrounds them no more than
        # a full stop may be in.
        assert start <= span.start < span.end <= end + (text[end] == ".")
    assert _without(text, spans) == _without(other, back)


def _without(text: str, spans: object) -> str:
    position, kept = 0, []
    for span in spans:  # type: ignore[attr-defined]
        kept.append(text[position : span.start])
        position = span.end
    return "\0".join([*kept, text[position:]])


@given(changed_texts())
def test_a_changed_value_is_called_what_it_is(drawn: tuple[str, str, list[tuple[str, int, int]]]) -> None:
    """Also where only a part of it changed: the minutes of a clock, the day of a date."""
    text, other, places = drawn
    assert [span.kind for span in volatile_spans(text, other)] == [kind for kind, _, _ in places]


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ("10:31 AM", "10:31 PM", "clock"),
        ("10:31", "10:32", "clock"),
        ("1769855467", "1769855999", "clock"),
        ("1769855467.123", "1769855999.5", "clock"),
        ("January 30, 2026", "January 31, 2026", "date"),
        ("30 January 2026", "31 January 2026", "date"),
        ("May 2026", "June 2026", "date"),
        ("31Jan", "30Jan", "date"),
        ("Sat", "Sun", "date"),
        ("Marcus", "Decker", "name"),
        ("Ann", "Monica", "name"),
        ("7f3dec21a9bb", "99feb411ccd0", "nonce"),
        ("request #999", "request #1000", "counter"),
        ("42", "x", "text"),
        ("10.0.12.7", "10.0.12.8", "text"),
        ("blue", "green", "text"),
        ("sunny", "marble", "text"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "It is {} here.", "[{}]"])
def test_known_looks(before: str, now: str, kind: str, around: str) -> None:
    text, other = (f"{FILLER}{around.format(value)}\n{FILLER}" for value in (now, before))
    if kind == "text" and before == "42":
        text, other = other, text  # a number now, a word before: nothing counts here
    assert [span.kind for span in volatile_spans(text, other)] == [kind]


def test_equal_texts_and_empty_ones_have_no_volatile_places() -> None:
    assert volatile_spans(FILLER, FILLER) == volatile_spans("", FILLER) == volatile_spans(FILLER, "") == ()


@given(st.text(min_size=20), st.text(min_size=20))
def test_any_two_texts_are_taken(text: str, other: str) -> None:
    """Whatever they are, what is told lies inside the text, in order, and is short."""
    spans = volatile_spans(text, other)
    assert sum(span.end - span.start for span in spans) <= len(text) / 4
    assert all(0 <= span.start <= span.end <= len(text) for span in spans)
    assert all(first.end <= second.start for first, second in pairwise(spans))


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_two_unrelated_texts_have_no_volatile_places(seed: int, lines: int) -> None:
    """They are different texts, not one text with a clock in it."""
    draw = random.Random(seed)
    first, second = (
        "\n".join(" ".join(uuid.UUID(int=draw.getrandbits(128)).hex[:7] for _ in range(9)) for _ in range(lines))
        for _ in range(2)
    )
    assert volatile_spans(first, second) == ()


def test_a_text_that_changes_in_many_places_is_another_text() -> None:
    many = "".join(f"{FILLER}At {i}:00\n" for i in range(9))
    assert volatile_spans(many, many.replace(":00", ":30")) == ()


def test_an_added_line_hides_nothing_but_is_one_place() -> None:
    """Lines no longer correspond: the one stretch from the first difference to the last is looked at."""
    (span,) = volatile_spans(f"{FILLER}At 10:31.\n{FILLER}", f"{FILLER}{FILLER}")
    assert span.kind == "clock"


def test_several_changes_on_one_long_line_are_found_one_by_one() -> None:
    """A system text without line breaks: from the first change to the last is most of it."""
    rules = "Be kind to all who ask. " * 20
    one, other = (
        f"It is {clock}. {rules}You talk to {name}. {rules}" for clock, name in (("10:31", "Ada"), ("10:32", "Ben"))
    )
    assert [span.kind for span in volatile_spans(one, other)] == ["clock", "name"]


def test_a_long_place_is_text_whatever_it_spells() -> None:
    """Looking closer at what end users may have written would take its square in time."""
    one, other = (f"Be kind. {'jan' * 2000} {end}. {'Be fair. ' * 3000}" for end in ("a", "b" * 3000))
    assert {span.kind for span in volatile_spans(one, other)} == {"text"}
