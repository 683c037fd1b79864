"""What a replay adds up to: hit rates by way, tenants, tokens lost by reason, and the policies that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from prefixkv.measure.simulate import (
    BLOCK_CHAIN,
    BLOCK_CHAIN_PER_TENANT,
    GIVEN_POLICIES,
    OURS,
    WHOLE_REQUEST,
    Refusal,
    SimulatedRequest,
)

__all__ = ["LABELS", "Findings", "Tally", "TenantFindings", "suggest_policy"]

LABELS = {
    WHOLE_REQUEST: "whole requests by hash",
    BLOCK_CHAIN: "block chain, all tenants in one",
    BLOCK_CHAIN_PER_TENANT: "block chain, per tenant",
    OURS: "prefixkv, default policy",
    GIVEN_POLICIES: "prefixkv, your policies",
}
"""Way to what people call it."""

_MAX_WARNINGS = 1000
_WORTH_A_RULE = 0.01
"""Share of a tenant's prompt tokens that a reason must have cost for its rule to be suggested."""

_RULES = (
    ("tools_reordered", "tools_order", "canonical"),
    ("retokenised", "splice_generated", True),
    ("template_date", "template_clock", "month"),
)
"""Code of a miss, and the field of a policy with the value that would save its tokens."""


@dataclass(slots=True)
class Tally:
    """Running totals of one way, over all tenants or of one."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache, 0 where there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Add one request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


@dataclass(slots=True)
class TenantFindings:
    """One tenant.

    Attributes:
        ways: Way to totals.
        lost_tokens: Code of a miss to the tokens it cost, in the main way.
        volatile_tokens: Kind of volatile text to the tokens it cost.
    """

    ways: dict[str, Tally]
    lost_tokens: Counter[str] = field(default_factory=Counter)
    volatile_tokens: Counter[str] = field(default_factory=Counter)


class Findings:
    """Collects simulated requests. Holds numbers, names of tenants, codes and hints; no content of any message.

    Args:
        ways: Names of the ways, as :attr:`Simulator.ways`.

    Attributes:
        ways: The same.
        main: The way whose misses are explained: the policies given, or else the default policy.
        requests: Requests collected, refused ones included.
        totals: Way to totals.
        tenants: Tenant to its findings, in order of appearance.
        lost_tokens: Code of a miss to the tokens it cost.
        misses: Code of a miss to how often it was.
        warnings: Warning to how many requests had it.
        refusals: Code to how many requests were refused in the main way.
        first_refusals: Code to the first of them.
        notes: More that the reader should know of how the replay was done; append to it.
        history: Way to prompt and cached tokens of each request, in order.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        self.ways = tuple(ways)
        self.main = GIVEN_POLICIES if GIVEN_POLICIES in ways else OURS
        self.requests = 0
        self.totals = {way: Tally() for way in ways}
        self.tenants: dict[str, TenantFindings] = {}
        self.lost_tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.first_refusals: dict[str, Refusal] = {}
        self.notes: list[str] = []
        self.history: dict[str, list[tuple[int, int]]] = {way: [] for way in ways}
        self._hints: dict[str, Counter[str]] = {}

    def add(self, request: SimulatedRequest) -> None:
        """Collect one request."""
        self.requests += 1
        if request.tenant not in self.tenants:
            self.tenants[request.tenant] = TenantFindings({way: Tally() for way in self.ways})
        tenant = self.tenants[request.tenant]
        for way, outcome in request.outcomes.items():
            self.totals[way].add(outcome.prompt_tokens, outcome.cached_tokens)
            tenant.ways[way].add(outcome.prompt_tokens, outcome.cached_tokens)
            self.history[way].append((outcome.prompt_tokens, outcome.cached_tokens))
        if refusal := request.refusals.get(self.main):
            self.refusals[refusal.code] += 1
            self.first_refusals.setdefault(refusal.code, refusal)
        report = request.outcomes[self.main].report if self.main in request.outcomes else None
        if report is None:
            return
        for warning in report.warnings:
            if warning in self.warnings or len(self.warnings) < _MAX_WARNINGS:
                self.warnings[warning] += 1
        if miss := report.miss:
            self.misses[miss.code] += 1
            self.lost_tokens[miss.code] += miss.tokens_lost
            tenant.lost_tokens[miss.code] += miss.tokens_lost
            if miss.kind is not None:
                tenant.volatile_tokens[miss.kind] += miss.tokens_lost
            self._hints.setdefault(miss.code, Counter())[miss.hint] += miss.tokens_lost

    def hint(self, code: str) -> str:
        """Return what to do about a miss; of several hints the one that most tokens were lost for."""
        return self._hints[code].most_common(1)[0][0]

    def advice(self, most: int = 5) -> list[str]:
        """Return what to do, the most costly reason first, and what the figures leave out. Quotes no content."""
        main = self.totals[self.main]
        lines = [
            f"{code}: {tokens} tokens, {tokens / main.prompt_tokens:.1%} of all, in {self.misses[code]} requests: "
            f"{self.hint(code)}"
            for code, tokens in self.lost_tokens.most_common(most)
            if tokens
        ]
        lines += [f"warning of {count} requests: {text}" for text, count in self.warnings.most_common(most)]
        lines += self.notes
        for code, count in self.refusals.most_common():
            first = self.first_refusals[code]
            lines.append(f"{count} requests are left out, {code}; the first is {first.where}: {first.hint}")
        return lines

    def to_data(self) -> dict[str, Any]:
        """Return the findings as plain data for JSON."""
        return {
            "requests": self.requests,
            "notes": list(self.notes),
            "main": self.main,
            "ways": _plain(self.totals),
            "tenants": {
                name: {"ways": _plain(tenant.ways), "lost_tokens": dict(tenant.lost_tokens)}
                for name, tenant in self.tenants.items()
            },
            "misses": {
                code: {"requests": self.misses[code], "lost_tokens": tokens, "hint": self.hint(code)}
                for code, tokens in self.lost_tokens.most_common()
            },
            "warnings": dict(self.warnings),
            "refusals": {
                code: {"requests": count, "first": self.first_refusals[code].where}
                for code, count in self.refusals.items()
            },
        }


def suggest_policy(findings: Findings) -> str:
    """Return a policy file in YAML that fits what was found: its tenants, and a default for others; changes nothing."""
    tenants = {name: _suggest_tenant(findings, name) for name in findings.tenants}
    text: str = yaml.safe_dump({"default": {}, "tenants": tenants}, sort_keys=False, allow_unicode=True)
    return text


def _suggest_tenant(findings: Findings, tenant: str) -> dict[str, Any]:
    """Return the fields of one tenant's policy that should differ from the default."""
    found = findings.tenants[tenant]
    main = found.ways[findings.main]
    costly = {code for code, tokens in found.lost_tokens.items() if tokens > _WORTH_A_RULE * main.prompt_tokens}
    policy: dict[str, Any] = {}
    if "volatile_text" in costly:
        policy["slots"] = {kind: {"placement": "tail"} for kind, _ in found.volatile_tokens.most_common()}
    policy |= {field: value for code, field, value in _RULES if code in costly}
    return policy


def _plain(ways: dict[str, Tally]) -> dict[str, dict[str, float]]:
    return {
        way: {
            "requests": tally.requests,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "hit_rate": round(tally.hit_rate, 6),
        }
        for way, tally in ways.items()
    }
