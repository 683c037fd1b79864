"""A picture of a prompt's segments: coloured in a terminal, in brackets elsewhere, or as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Piece", "as_brackets", "as_colours", "as_page", "as_table"]

# Kind to number of the terminal's 256 colours, and the same colour for a page.
_COLOURS = {
    "preamble": (252, "#d0d0d0"),
    "system": (117, "#87d7ff"),
    "tools": (216, "#ffaf87"),
    "few_shot": (193, "#d7ffaf"),
    "history": (157, "#afffaf"),
    "user": (229, "#ffffaf"),
    "slot": (218, "#ffafd7"),
    "generation_prompt": (183, "#d7afff"),
    "text": (255, "#eeeeee"),
}
# Text of a template may hold escape sequences, and a terminal would obey them.
_PRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment, to be shown. Frozen.

    Attributes:
        kind: Kind of the segment.
        role: Role of its message, or None.
        name: Name of the slot, or None.
        scope: How far it is shared.
        start: Its first token.
        tokens: How many it has.
        text: What they spell.
    """

    kind: str
    role: str | None
    name: str | None
    scope: str
    start: int
    tokens: int
    text: str


def as_colours(pieces: Sequence[Piece]) -> str:
    """Return the prompt with a background per kind (ANSI), and a legend."""
    shown = "".join(_painted(piece.text.translate(_PRINTABLE), piece.kind) for piece in pieces)
    return f"{shown}\n\n{'  '.join(_painted(f' {kind} ', kind) for kind in _kinds(pieces))}"


def as_brackets(pieces: Sequence[Piece]) -> str:
    """Return the prompt as plain text, each segment in brackets after its kind."""
    return "".join(f"[{piece.kind}: {piece.text.translate(_PRINTABLE)}]" for piece in pieces)


def as_table(rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return rows, the first of them headers, in aligned columns; those in ``numbers`` to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_page(title: str, pieces: Sequence[Piece], sections: Sequence[tuple[str, str]]) -> str:
    """Return an HTML page that needs nothing else.

    Args:
        title: Its title.
        pieces: The prompt.
        sections: Headings, and the plain text under each.
    """
    spans = "".join(
        f'<span class="{piece.kind}" title="{piece.kind}, {piece.scope}, {piece.tokens} tokens">'
        f"{html.escape(piece.text)}</span>"
        for piece in pieces
    )
    legend = " ".join(f'<span class="{kind}">&nbsp;{kind}&nbsp;</span>' for kind in _kinds(pieces))
    styles = "".join(f".{kind}{{background:{_COLOURS[kind][1]}}}" for kind in _COLOURS)
    rest = "".join(f"<h2>{html.escape(head)}</h2>\n<pre>{html.escape(text)}</pre>\n" for head, text in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body{font-family:sans-serif;max-width:60em;margin:2em auto;color:#111;background:#fff}"
        f"pre{{white-space:pre-wrap;overflow-wrap:anywhere}}{styles}</style></head>\n<body>"
        f"<h1>{html.escape(title)}</h1>\n<pre>{spans}</pre>\n<p>{legend}</p>\n{rest}</body></html>\n"
    )


def _kinds(pieces: Sequence[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.kind for piece in pieces))


def _painted(text: str, kind: str) -> str:
    """Colour line by line: a background that crosses a line break would fill the rest of the screen's line."""
    on = f"\033[48;5;{_COLOURS[kind][0]};38;5;16m"
    return "\n".join(f"{on}{line}\033[0m" if line else "" for line in text.split("\n"))
