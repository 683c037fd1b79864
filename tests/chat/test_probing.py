"""A chat template whose clock stands still."""

from __future__ import annotations

from datetime import datetime

import pytest

from prefixkv.chat.probing import with_clock
from tests.chat.chats import byte_chatml, user

MOMENT = datetime(2024, 2, 29, 23, 5, 9)


def render(template: str) -> str:
    return str(byte_chatml(template).apply_chat_template([user("Hi")], tokenize=False))


@pytest.mark.parametrize("pattern", ["%Y-%m-%d", "%d %b %Y", "%B %d, %Y", "%A, %-d %B %y %H:%M:%S", "%I %p %j", "now"])
def test_a_stopped_clock_writes_what_strftime_writes(pattern: str) -> None:
    assert render(with_clock(f"{{{{ strftime_now('{pattern}') }}}}", MOMENT)) == MOMENT.strftime(pattern)


def test_a_stopped_clock_is_seen_inside_macros_and_where_it_is_asked_for() -> None:
    body = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    template = f"{{% macro head() %}}{body}{{% endmacro %}}{{{{ head() }}}}"
    assert render(with_clock(template, MOMENT)) == "2024"


@pytest.mark.parametrize(
    "template", ["\n\n  {% if true %}\n x\n  {% endif %}\n", "  {%- set a = 1 %}\n y", "z", " {{ 1 }}\n"]
)
def test_nothing_else_changes(template: str) -> None:
    """White space at the start of a template is part of the prompt."""
    assert render(with_clock(template, MOMENT)) == render(template)
