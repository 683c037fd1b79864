"""The findings as one HTML file with plots: it loads nothing, and holds no word of any message."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from prefixkv.measure.findings import LABELS, Findings, TenantFindings

__all__ = ["cached_shares", "hit_rates_over_time", "render_html"]

_NUM_COLOURS = 8
_MOST_TENANTS = 20
_POINTS = 60
_BINS = 10
_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT = 860, 230, 26

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #667; --page: #fff; --line: #d5d9e0;
  --c0: #8d99ae; --c1: #d98324; --c2: #b5524a; --c3: #2a78b8;
  --c4: #2f8f5b; --c5: #7b5ea7; --c6: #a08a1f; --c7: #4aa3a2; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --muted: #9aa3af; --page: #14171c; --line: #39414d;
  --c0: #7d8aa3; --c1: #e39a45; --c2: #d0716a; --c3: #5aa2dd;
  --c4: #55b981; --c5: #a489d0; --c6: #cdb548; --c7: #6fc7c5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.note, figcaption { color: var(--muted); } figure { margin: 0; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; } .t { text-align: left; }
pre { border: 1px solid var(--line); padding: .8rem; overflow-x: auto; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 12px; } svg .m { fill: var(--muted); }
svg line { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2; }
.k { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
""" + "".join(
    f".f{i} {{ fill: var(--c{i}); background: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); }}\n"
    for i in range(_NUM_COLOURS)
)


def render_html(findings: Findings, title: str, policy: str) -> str:
    """Return the report; changes nothing. Every name in it is escaped.

    Args:
        findings: What was found.
        title: Name of what was analysed, such as the file's.
        policy: The suggested policy file.
    """
    main, left_out = findings.totals[findings.main], findings.refusals.total()
    sections = [
        f"<h1>How much of {escape(title)} repeats</h1>",
        f'<p class="note">{findings.requests} requests of {len(findings.tenants)} tenants, {left_out} left out; '
        f"{main.prompt_tokens} prompt tokens. Replies are not counted until they come back in a prompt.</p>",
        _section("Hit rate by way of caching", _way_bars(findings)),
        _section("Hit rate over the requests", _lines(findings)),
        _section(f"Tokens lost, by reason ({escape(LABELS[findings.main])})", _lost_bars(findings)),
        _section("Cached share of a request", _histograms(findings)),
        _section("Tenants", _tenant_table(findings)),
        _section("What to do", _advice(findings)),
        _section("Suggested policy file", f"<pre>{escape(policy)}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width">'
        f"<title>prefixkv analyze: {escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def hit_rates_over_time(history: Sequence[tuple[int, int]], points: int = _POINTS) -> list[float]:
    """Return hit rates of at most ``points`` stretches of requests, in order, all about equally long; changes nothing.

    Args:
        history: Prompt and cached tokens of each request.
        points: Most stretches.
    """
    number = min(points, len(history))
    edges = [i * len(history) // number for i in range(number + 1)] if number else [0]
    rates = []
    for start, end in pairwise(edges):
        prompt = sum(tokens for tokens, _ in history[start:end])
        rates.append(sum(cached for _, cached in history[start:end]) / prompt)
    return rates


def cached_shares(history: Sequence[tuple[int, int]], bins: int = _BINS) -> list[int]:
    """Return how many requests had a cached share in each of ``bins`` equal parts of 0 to 1; changes nothing."""
    counts = [0] * bins
    for prompt, cached in history:
        counts[min(bins - 1, cached * bins // prompt)] += 1
    return counts


# -- plots ---------------------------------------------------------------------------------------------------------


def _way_bars(findings: Findings) -> str:
    most = _WIDTH - _LABEL_WIDTH - 60
    rows = []
    for i, (way, tally) in enumerate(findings.totals.items()):
        y, width = i * _ROW_HEIGHT, tally.hit_rate * most
        rows.append(
            _text(_LABEL_WIDTH - 8, y + 17, LABELS[way], "end")
            + _bar(_LABEL_WIDTH, y + 4, width, _colour(findings, way))
            + _text(_LABEL_WIDTH + width + 6, y + 17, f"{tally.hit_rate:.1%}")
        )
    return _svg(len(rows) * _ROW_HEIGHT, "Hit rate of each way", rows)


def _lines(findings: Findings) -> str:
    left, top, height = 44, 10, 220
    width = _WIDTH - left - 10
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{share:.0%}", "end", "m"))
    for way, history in findings.history.items():
        rates = hit_rates_over_time(history)
        step = width / max(1, len(rates) - 1)
        points = " ".join(f"{left + i * step:.1f},{top + height * (1 - rate):.1f}" for i, rate in enumerate(rates))
        parts.append(f'<polyline class="s{_colour(findings, way)}" points="{points}"/>')
    total = max(len(history) for history in findings.history.values())
    parts.append(_text(left, top + height + 18, "first request", "start", "m"))
    parts.append(_text(_WIDTH - 10, top + height + 18, f"request {total}", "end", "m"))
    legend = _legend([(LABELS[way], _colour(findings, way)) for way in findings.ways])
    return _svg(top + height + 24, "Hit rate of stretches of requests", parts) + legend


def _lost_bars(findings: Findings) -> str:
    tenants = sorted(findings.tenants.items(), key=lambda item: -item[1].lost_tokens.total())
    tenants = [(name, tenant) for name, tenant in tenants if tenant.lost_tokens.total()]
    if not tenants:
        return '<p class="note">Nothing was lost before the current turn.</p>'
    codes = [code for code, _ in findings.lost_tokens.most_common()]
    longest = tenants[0][1].lost_tokens.total()
    rows = [_lost_row(i, name, tenant, codes, longest) for i, (name, tenant) in enumerate(tenants[:_MOST_TENANTS])]
    legend = _legend([(code, i % _NUM_COLOURS) for i, code in enumerate(codes)])
    hidden = len(tenants) - _MOST_TENANTS
    more = f'<p class="note">and {hidden} more tenants</p>' if hidden > 0 else ""
    return _svg(len(rows) * _ROW_HEIGHT, "Tokens lost by tenant and reason", rows) + legend + more


def _lost_row(i: int, name: str, tenant: TenantFindings, codes: Sequence[str], longest: int) -> str:
    y, x = i * _ROW_HEIGHT, float(_LABEL_WIDTH)
    shown = name if len(name) <= 32 else name[:31] + "…"
    parts = [_text(_LABEL_WIDTH - 8, y + 17, shown, "end")]
    for k, code in enumerate(codes):
        tokens = tenant.lost_tokens[code]
        width = tokens / longest * (_WIDTH - _LABEL_WIDTH - 80)
        parts.append(_bar(x, y + 4, width, k % _NUM_COLOURS, f"{code}: {tokens} tokens") if tokens else "")
        x += width
    parts.append(_text(x + 6, y + 17, str(tenant.lost_tokens.total())))
    return "".join(parts)


def _histograms(findings: Findings) -> str:
    gap, top, height = 14, 24, 110
    width = (_WIDTH - gap * (len(findings.ways) - 1)) / len(findings.ways)
    parts = []
    for i, (way, history) in enumerate(findings.history.items()):
        left = i * (width + gap)
        counts = cached_shares(history)
        most = max(*counts, 1)
        parts.append(_text(left, 14, LABELS[way].removesuffix(" in one"), "start", "m"))
        for k, count in enumerate(counts):
            tall = count / most * height
            x, bar = left + k * width / _BINS, width / _BINS - 2
            about = f"{k / _BINS:.0%} to {(k + 1) / _BINS:.0%} cached: {count} requests"
            parts.append(
                f'<rect class="f{_colour(findings, way)}" x="{x:.1f}" y="{top + height - tall:.1f}" '
                f'width="{bar:.1f}" height="{tall:.1f}"><title>{about}</title></rect>'
            )
        parts.append(f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{top + height}" y2="{top + height}"/>')
        parts.append(_text(left, top + height + 16, "0%", "start", "m"))
        parts.append(_text(left + width, top + height + 16, "100%", "end", "m"))
    caption = "<figcaption>Number of requests by the share of their prompt that was cached.</figcaption>"
    return _svg(top + height + 22, "Requests by cached share", parts) + caption


# -- text ----------------------------------------------------------------------------------------------------------


def _tenant_table(findings: Findings) -> str:
    rows = []
    for name, tenant in findings.tenants.items():
        tally = tenant.ways[findings.main]
        reason = next((code for code, _ in tenant.lost_tokens.most_common(1)), "-")
        cells = (tally.requests, tally.prompt_tokens, f"{tally.hit_rate:.1%}", tenant.lost_tokens.total())
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><td class="t">{escape(name)}</td>{numbers}<td class="t">{escape(reason)}</td></tr>')
    heads = "".join(f"<th>{word}</th>" for word in ("requests", "prompt tokens", "hit rate", "tokens lost"))
    return f'<table><tr><th class="t">tenant</th>{heads}<th class="t">main reason</th></tr>{"".join(rows)}</table>'


def _advice(findings: Findings) -> str:
    lines = findings.advice() or ["Nothing is lost before the current turn."]
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n<figure>{body}</figure>"


def _svg(height: float, about: str, parts: Sequence[str]) -> str:
    label = escape(about)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "n") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: int, about: str = "") -> str:
    title = f"<title>{escape(about)}</title>" if about else ""
    return f'<rect class="f{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW_HEIGHT - 8}">{title}</rect>'


def _legend(items: Sequence[tuple[str, int]]) -> str:
    keys = "".join(f'<span class="k f{colour}"></span>{escape(label)}' for label, colour in items)
    return f"<figcaption>{keys}</figcaption>"


def _colour(findings: Findings, way: str) -> int:
    return findings.ways.index(way) % _NUM_COLOURS
