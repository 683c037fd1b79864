"""Clocks: times in a text rounded down, and the time that a template is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

__all__ = ["CLOCK_CODES", "coarsened", "template_clock", "words_of_clock"]

CLOCK_CODES = (*"aAbBcCdDeFgGhHIjklmMpPrRsSTuUVwWxXyYzZ", *(f"-{code}" for code in "dHIjklmMSUVWy"))
"""What ``strftime`` knows."""

_SECONDS = {"minute": 60, "hour": 3600, "day": 86400}
_TIME = re.compile(
    r"(?:(?P<iso>(?<=\d)T)|(?<![\d:.])(?<!UTC[+-])(?<!GMT[+-]))(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)"
    r"(?::(?P<second>[0-5]\d)(?P<fraction>\.\d+)?)?(?P<half>\s?[AaPp]\.?[Mm]\b\.?)?"
    # An offset from UTC is no time; 10:30-11:45 are two.
    r"(?P<zone>\s?(?:\+|(?(iso)-|(?(second)-|(?!))))\d\d:[0-5]\d)?(?![\d:])"
)
_EPOCH = re.compile(r"(?<![\d.])(?P<seconds>1\d{9}|2\d{9})(?P<thousandths>\d{3})?(?P<fraction>\.\d+)?(?!\d)")


def coarsened(text: str, unit: str) -> str | None:
    """Return a text with every time in it rounded down, in the same notation; None where it holds no time.

    Knows hours and minutes, with or without seconds and fractions, on a 12 or 24 hour clock, also inside ISO 8601
    stamps, and Unix time in seconds or thousandths (days are then those of UTC).

    Args:
        text: The text.
        unit: ``minute``, ``hour`` or ``day``.
    """

    def round_time(match: re.Match[str]) -> str:
        hour, half = match["hour"], match["half"] or ""
        if unit == "day":
            # Midnight is 12 on a clock with halves.
            hour = "12" if half else "0".rjust(len(hour), "0")
            half = re.sub("[Pp]", lambda letter: "A" if letter[0] == "P" else "a", half)
        minute = match["minute"] if unit == "minute" else "00"
        second = "" if match["second"] is None else ":00"
        fraction = re.sub(r"\d", "0", match["fraction"] or "")
        return f"{match['iso'] or ''}{hour}:{minute}{second}{fraction}{half}{match['zone'] or ''}"

    def round_epoch(match: re.Match[str]) -> str:
        seconds = int(match["seconds"])
        fraction = re.sub(r"\d", "0", match["fraction"] or "")
        return f"{seconds - seconds % _SECONDS[unit]}{'000' if match['thousandths'] else ''}{fraction}"

    rounded, times = _TIME.subn(round_time, text)
    rounded, stamps = _EPOCH.subn(round_epoch, rounded)
    return rounded if times + stamps else None


def template_clock(rule: str | None, now: Callable[[], datetime] = datetime.now) -> datetime | None:
    """Return the time that a template shall be told, or None for the true one.

    Args:
        rule: ``template_clock`` of a policy.
        now: The true time.
    """
    match rule:
        case None:
            return None
        case "hour":
            return now().replace(minute=0, second=0, microsecond=0)
        case "day":
            return now().replace(hour=0, minute=0, second=0, microsecond=0)
        case "month":
            return now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        case "year":
            return now().replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    return datetime.fromisoformat(rule)


def words_of_clock(now: Callable[[], datetime] = datetime.now) -> list[str]:
    """Return what a template can write of the time, by any code of ``strftime``."""
    moment = now()
    return [moment.strftime(f"%{code}") for code in CLOCK_CODES]
