"""Clocks: rounded down in their own notation, and never later than they were."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.times import coarsened, template_clock
from prefixkv.policy import CLOCK_UNITS

UNITS = ("minute", "hour", "day")
FORMATS = (
    *("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p", "%I:%M%p"),
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%f+05:30", "%H:%M (UTC+02:00)"),
    *("%A, %d %B %Y, %H:%M", "%d.%m.%Y %H:%M Uhr", "It is %I:%M %p on %x.", "from %H:%M-23:59"),
)
MOMENTS = st.datetimes(datetime(2005, 1, 1), datetime(2032, 12, 31))


def floor(moment: datetime, unit: str) -> datetime:
    moment = moment.replace(second=0, microsecond=0)
    if unit != "minute":
        moment = moment.replace(minute=0)
    return moment.replace(hour=0) if unit == "day" else moment


@pytest.mark.parametrize("unit", UNITS)
@given(moment=MOMENTS, written=st.sampled_from(FORMATS[:-1]))
def test_a_clock_is_rounded_down_and_nothing_else_changes(unit: str, moment: datetime, written: str) -> None:
    """What stands for it is the same clock at the beginning of the unit: so it is never later, and equal within it."""
    assert coarsened(moment.strftime(written), unit) == floor(moment, unit).strftime(written)


@pytest.mark.parametrize("unit", UNITS)
@given(moment=MOMENTS, written=st.sampled_from(FORMATS), around=st.sampled_from(("", "Now: ", "(", "שעה ", "🧿")))
def test_rounding_twice_changes_nothing_more(unit: str, moment: datetime, written: str, around: str) -> None:
    once = coarsened(around + moment.strftime(written), unit)
    assert once is not None
    assert coarsened(once, unit) == once
    if "%p" not in written:
        assert [char for char in re.sub(r"\d", "0", once)] == [
            char for char in re.sub(r"\d", "0", around + moment.strftime(written))
        ]


@pytest.mark.parametrize("unit", UNITS)
@given(seconds=st.floats(1_000_000_000, 2_999_999_999), digits=st.integers(1, 6), is_thousandths=st.booleans())
def test_unix_time_is_rounded_down(unit: str, seconds: float, digits: int, is_thousandths: bool) -> None:
    size = {"minute": 60, "hour": 3600, "day": 86400}[unit]
    start = int(seconds) // size * size
    if is_thousandths:
        assert coarsened(f"t={int(seconds * 1000)}", unit) == f"t={start}000"
    else:
        assert coarsened(f"t={int(seconds)}", unit) == f"t={start}"
        assert coarsened(f"{int(seconds)}.{'7' * digits}", unit) == f"{start}.{'0' * digits}"


@pytest.mark.parametrize(
    ("text", "hour", "day"),
    [
        ("9:05", "9:00", "0:00"),
        ("9:05 p.m.", "9:00 p.m.", "12:00 a.m."),
        ("12:59 AM", "12:00 AM", "12:00 AM"),
        ("12:59pm", "12:00pm", "12:00am"),
        ("10:31 or 23:59", "10:00 or 23:00", "00:00 or 00:00"),
        ("1:30pm-2:45pm", "1:00pm-2:00pm", "12:00am-12:00am"),
        ("10:31-11:45", "10:00-11:00", "00:00-00:00"),
        ("2026-01-31T10:31-03:30", "2026-01-31T10:00-03:30", "2026-01-31T00:00-03:30"),
        ("2026-01-31T10:31:07+0530", "2026-01-31T10:00:00+0530", "2026-01-31T00:00:00+0530"),
        ("10:31:07-03:30", "10:00:00-03:30", "00:00:00-03:30"),
        ("10:31 (GMT-03:30)", "10:00 (GMT-03:30)", "00:00 (GMT-03:30)"),
        ("1769855467.25 s", "1769853600.00 s", "1769817600.00 s"),
    ],
)
def test_known_notations(text: str, hour: str, day: str) -> None:
    """An offset from UTC is no time of day: rounding it would make another moment of it."""
    assert (coarsened(text, "hour"), coarsened(text, "day")) == (hour, day)
    assert coarsened(hour, "minute") == hour


@pytest.mark.parametrize(
    "text",
    [
        *("", "noon", "2026-01-31", "31.01.2026", "10", "25:00", "10:60", "10:31:60", "1:2:3:4", "100:30", "10.5:30"),
        *("12345", "17698554671", "3769855467", "31769855467", "00:1A:2B:3C", "fe80::1:22:33:44:55", "-"),
    ],
)
@pytest.mark.parametrize("unit", UNITS)
def test_text_without_a_time_is_left_alone(text: str, unit: str) -> None:
    assert coarsened(text, unit) is None


@given(text=st.text(alphabet="0123456789:.TZ+- apmAPM\n٣", max_size=30), unit=st.sampled_from(UNITS))
def test_any_text_is_taken_and_rounding_it_twice_is_rounding_it_once(text: str, unit: str) -> None:
    once = coarsened(text, unit)
    if once is not None:
        assert coarsened(once, unit) == once


# -- the time that a template is told ----------------------------------------------------------------------------------

NOW = datetime(2026, 3, 31, 10, 31, 7, 123456)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (None, None),
        ("hour", datetime(2026, 3, 31, 10)),
        ("day", datetime(2026, 3, 31)),
        ("month", datetime(2026, 3, 1)),
        ("year", datetime(2026, 1, 1)),
        ("2024-07-26", datetime(2024, 7, 26)),
        ("2024-07-26T12:30:00", datetime(2024, 7, 26, 12, 30)),
        ("2024-07-26T12:30:00+02:00", datetime(2024, 7, 26, 12, 30, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_a_template_is_told_the_rounded_time_or_the_one_that_the_policy_names(
    rule: str | None, told: datetime | None
) -> None:
    assert template_clock(rule, lambda: NOW) == told


@given(now=MOMENTS, rule=st.sampled_from(CLOCK_UNITS))
def test_the_clock_of_a_template_stands_still_within_its_unit(now: datetime, rule: str) -> None:
    told = template_clock(rule, lambda: now)
    assert told is not None
    assert told <= now
    assert template_clock(rule, lambda: told) == told


def test_without_a_given_clock_it_is_todays() -> None:
    before = datetime.now().replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    assert template_clock("year") in (
        before,
        datetime.now().replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0),
    )
