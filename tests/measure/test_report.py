"""The HTML report: whole, self-contained, and nothing in it that a name put there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from prefixkv.chat.explain import CacheReport, MissReason
from prefixkv.measure.findings import Findings, suggest_policy
from prefixkv.measure.report import cached_shares, hit_rates_over_time, render_html
from prefixkv.measure.simulate import BLOCK_CHAIN, GIVEN_POLICIES, OURS, WHOLE_REQUEST, Outcome, SimulatedRequest

HOSTILE = "<script>alert(1)</script>\"' onload='x"


def findings_of(tenant: str, count: int = 3, code: str = "slot_changed", hint: str = "move it") -> Findings:
    findings = Findings((WHOLE_REQUEST, BLOCK_CHAIN, OURS, GIVEN_POLICIES))
    for i in range(count):
        report = CacheReport((), 10, i % 10, MissReason(code, 0, i % 10, 5, hint), (hint,))
        findings.add(SimulatedRequest(tenant, {way: Outcome(10, i % 10, report) for way in findings.ways}, {}))
    return findings


def page(findings: Findings, title: str = "chats.jsonl") -> str:
    return render_html(findings, title, suggest_policy(findings))


class Checker(HTMLParser):
    """Collects tags and text, and raises where a tag closes another than the one that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(text: str) -> Checker:
    parser = Checker()
    parser.feed(text)
    parser.close()
    assert parser._open == []
    return parser


def test_a_tenant_a_hint_a_code_and_a_file_may_be_called_anything() -> None:
    parser = checked(page(findings_of(HOSTILE, code=HOSTILE, hint=HOSTILE), title=HOSTILE))
    tags = {tag for tag, _ in parser.tags}
    assert tags.isdisjoint({"script", "img", "iframe", "link", "object"})
    assert not [name for _, attrs in parser.tags for name in attrs if name.startswith("on")]
    assert parser.text.count("<script>alert(1)</script>") >= 6


def test_it_loads_nothing() -> None:
    text = page(findings_of("acme"))
    parser = checked(text)
    assert not [attrs for _, attrs in parser.tags if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall(r"[a-z]+://", text) == []
    policies = [attrs["content"] for tag, attrs in parser.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_it_shows_every_plot_and_is_readable_in_the_dark() -> None:
    text = page(findings_of("acme", count=30))
    labels = [attrs["aria-label"] for tag, attrs in checked(text).tags if tag == "svg"]
    assert labels == [
        "Hit rate of each way",
        "Hit rate of stretches of requests",
        "Tokens lost by tenant and reason",
        "Requests by cached share",
    ]
    assert "prefers-color-scheme: dark" in text
    assert "slot_changed: 150 tokens" in text
    assert "45.0%" in text


def test_many_tenants_are_all_in_the_table_and_the_first_in_the_plot() -> None:
    findings = findings_of("t0")
    for i in range(1, 30):
        report = CacheReport((), 10, 0, MissReason("c", 0, 0, 1, "h"))
        findings.add(SimulatedRequest(f"t{i}", {way: Outcome(10, 0, report) for way in findings.ways}, {}))
    text = page(findings)
    assert "and 10 more tenants" in text
    assert text.count("<tr>") == 31


def test_where_nothing_is_lost_it_says_so() -> None:
    findings = Findings((OURS,))
    findings.add(SimulatedRequest("t", {OURS: Outcome(10, 9, CacheReport((), 10, 9, None))}, {}))
    assert page(findings).count("is lost before the current turn") + page(findings).count("was lost before") == 2


@pytest.mark.parametrize(("length", "points", "expected"), [(0, 5, 0), (3, 5, 3), (5, 5, 5), (12, 5, 5)])
def test_stretches_of_requests_cover_all_of_them(length: int, points: int, expected: int) -> None:
    history = [(10, i % 3) for i in range(length)]
    rates = hit_rates_over_time(history, points)
    assert len(rates) == expected
    if length == expected:
        assert rates == [cached / 10 for _, cached in history]


def test_a_stretch_weighs_tokens_not_requests() -> None:
    assert hit_rates_over_time([(10, 10), (90, 0)], 1) == [0.1]


def test_shares_are_counted_from_none_to_all() -> None:
    assert cached_shares([(10, 0), (10, 10), (100, 99), (10, 5), (10, 4)], 2) == [2, 3]
