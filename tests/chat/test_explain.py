"""Reports: where reuse ended, why, and what it cost."""

from __future__ import annotations

import pytest

from prefixkv.chat.explain import build_report
from prefixkv.chat.segment import Prompt, Segment, SegmentKind
from prefixkv.scope import ScopeLevel

K, TENANT, SESSION = SegmentKind, ScopeLevel.TENANT, ScopeLevel.SESSION

PROMPT = Prompt(
    tuple(range(100)),
    (
        Segment(K.PREAMBLE, 0, 2, TENANT),
        Segment(K.SYSTEM, 2, 20, TENANT, "system"),
        Segment(K.SLOT, 20, 25, SESSION, "system", "now"),
        Segment(K.TOOLS, 25, 60, SESSION),
        Segment(K.HISTORY, 60, 80, SESSION, "assistant"),
        Segment(K.USER, 80, 84, SESSION, "user"),
        Segment(K.SLOT, 84, 86, SESSION, "user", "nick"),
        Segment(K.USER, 86, 97, SESSION, "user"),
        Segment(K.GENERATION_PROMPT, 97, 100, SESSION),
    ),
    ("a warning",),
)


@pytest.mark.parametrize(
    ("cached", "code", "segment"),
    [
        (0, "system_changed", 0),
        (19, "system_changed", 1),
        (20, "slot_changed", 2),
        (25, "tools_changed", 3),
        (79, "history_edited", 4),
    ],
)
def test_a_miss_names_the_segment_where_the_prompts_part(cached: int, code: str, segment: int) -> None:
    miss = build_report(PROMPT, cached, True).miss
    assert miss is not None
    assert (miss.code, miss.segment, miss.token, miss.tokens_lost) == (code, segment, cached, 80 - cached)
    assert miss.hint


def test_a_miss_without_anything_known_is_first_seen() -> None:
    miss = build_report(PROMPT, 20, False).miss
    assert miss is not None
    assert miss.code == "first_seen"


@pytest.mark.parametrize("cached", [80, 85, 99])
@pytest.mark.parametrize("diverged", [True, False])
def test_nothing_is_missed_where_all_before_the_users_message_is_cached(cached: int, diverged: bool) -> None:
    """The message starts at 80, before the slot in it."""
    assert build_report(PROMPT, cached, diverged).miss is None


def test_the_marks_that_close_the_last_reply_are_no_miss() -> None:
    """They are computed when the reply comes back as history; every ordinary turn would report a miss otherwise."""
    assert build_report(PROMPT, 77, False).miss is None
    assert build_report(PROMPT, 77, True).miss is not None
    assert build_report(PROMPT, 65, False).miss is not None


def test_segments_say_how_much_of_them_was_cached() -> None:
    report = build_report(PROMPT, 22, True)
    assert [part.cached_tokens for part in report.segments] == [2, 18, 2, 0, 0, 0, 0, 0, 0]
    assert sum(part.tokens for part in report.segments) == report.prompt_tokens == 100
    assert report.cached_tokens == 22
    assert [part.scope for part in report.segments][:3] == ["tenant", "tenant", "session"]


def test_raw_text_misses_until_all_but_its_last_token_is_cached() -> None:
    text = Prompt((1, 2, 3), (Segment(K.TEXT, 0, 3, SESSION),))
    assert build_report(text, 2, False).miss is None
    miss = build_report(text, 1, True).miss
    assert miss is not None
    assert (miss.code, miss.tokens_lost) == ("text_changed", 1)


def test_a_chat_without_a_user_turn_is_measured_up_to_its_generation_prompt() -> None:
    prompt = Prompt(
        tuple(range(10)), (Segment(K.SYSTEM, 0, 7, TENANT, "system"), Segment(K.GENERATION_PROMPT, 7, 10, SESSION))
    )
    assert build_report(prompt, 7, False).miss is None
    assert build_report(prompt, 6, False).miss is not None


def test_a_report_prints_as_an_aligned_table() -> None:
    lines = str(build_report(PROMPT, 22, True)).splitlines()
    table = lines[: len(PROMPT.segments) + 2]
    assert table[0].split() == ["segment", "role", "scope", "tokens", "cached", "start", "end"]
    assert table[2].split() == ["system", "system", "tenant", "18", "18", "2", "20"]
    assert table[-1].split() == ["total", "100", "22"]
    column = table[0].index("tokens") + len("tokens")
    assert all(row[column - 1].isdigit() and row[column : column + 1] in ("", " ") for row in table[1:])
    assert any("slot_changed" in line for line in lines)
    assert lines[-1] == "warning: a warning"
