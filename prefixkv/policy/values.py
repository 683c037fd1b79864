"""The kinds of a policy's fields, each with its schema: amounts, durations, scope levels, formats, clocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from prefixkv.config import KV_FORMATS, parse_memory
from prefixkv.errors import ConfigError, PolicyError
from prefixkv.scope import ScopeLevel

__all__ = [
    "CLOCK_UNITS",
    "DEFAULT_SCOPES",
    "SEGMENT_KINDS",
    "Clock",
    "Format",
    "Pool",
    "PoolAmount",
    "Scopes",
    "Seconds",
    "StoredLevel",
    "WritableLevel",
]

DEFAULT_SCOPES: dict[str, ScopeLevel] = {
    "preamble": ScopeLevel.TENANT,
    "system": ScopeLevel.TENANT,
    "tools": ScopeLevel.TENANT,
    "few_shot": ScopeLevel.TENANT,
    "history": ScopeLevel.SESSION,
    "user": ScopeLevel.SESSION,
    "slot": ScopeLevel.SESSION,
    "generation_prompt": ScopeLevel.SESSION,
    "text": ScopeLevel.SESSION,
}
"""How far each kind of segment is shared unless a policy says otherwise."""

SEGMENT_KINDS = tuple(DEFAULT_SCOPES)

CLOCK_UNITS = ("hour", "day", "month", "year")
"""What the clock of a template can be rounded down to."""

_STORED = (ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)
_WRITABLE = (*_STORED, ScopeLevel.REQUEST)
_MAX_AMOUNT = 2**62
_LONGEST_S = 1e9
# One pattern each for the reader and for the schema, so that an editor takes what a load takes.
_AMOUNT = r"\s*[0-9]+(\.[0-9]+)?\s*(%|[kKmMgGtT]?[bB]?|[kKmMgGtT][iI][bB]?|tokens)\s*"
_DURATION = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class PoolAmount:
    """Some of the pool, in one of three units.

    Attributes:
        share: Of the pool, over 0 and up to 1.
        tokens: Tokens, rounded down to blocks.
        size_bytes: Bytes, rounded down to blocks.

    Raises:
        PolicyError: If it is not exactly one of them, or out of range.
    """

    share: float | None = None
    tokens: int | None = None
    size_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.share, self.tokens, self.size_bytes) if value is not None]
        if len(given) != 1 or not 0 < given[0] <= (1 if self.share is not None else _MAX_AMOUNT):
            raise PolicyError("an amount of the pool is a share over 0 and up to 1, or tokens, or bytes, above 0")

    @classmethod
    def parse(cls, value: Any) -> PoolAmount:
        """Read bytes, ``"64MiB"``, ``"4000 tokens"``, ``"25%"`` or 0.25.

        Raises:
            ValueError: If it is none of them.
        """
        if isinstance(value, cls):
            return value
        try:
            if isinstance(value, str):
                found = re.fullmatch(_AMOUNT, value)
                if found is None:
                    raise ConfigError("no amount")
                if found[2] == "tokens":
                    return cls(tokens=int(value.strip().removesuffix("tokens")))
            amount = parse_memory(value)
            return cls(share=amount) if isinstance(amount, float) else cls(size_bytes=amount)
        except ValueError:
            raise ValueError(
                'must be bytes, text ("64MiB"), tokens ("4000 tokens") or a share of the pool ("50%", 0.5)'
            ) from None

    def dump(self) -> int | float | str:
        """Return what :meth:`parse` reads as this."""
        if self.share is not None:
            return self.share
        return f"{self.tokens} tokens" if self.tokens is not None else self.size_bytes or 0

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share * 100:.6g} %"
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        size = float(self.size_bytes or 0)
        units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
        while size >= 1024 and len(units) > 1:
            size, units = size / 1024, units[1:]
        return f"{size:.6g} {units[0]}"

    def is_above(self, other: PoolAmount) -> bool:
        """Return whether it is more than another in the same unit; in different units nobody knows without the pool."""
        pairs = ((self.share, other.share), (self.tokens, other.tokens), (self.size_bytes, other.size_bytes))
        return any(mine is not None and theirs is not None and mine > theirs for mine, theirs in pairs)

    def blocks(self, num_blocks: int, block_size: int, bytes_per_block: int) -> int:
        """Return how many whole blocks of a pool that is, at least 0 and at most all."""
        return min(num_blocks, self.wanted_blocks(num_blocks, block_size, bytes_per_block))

    def wanted_blocks(self, num_blocks: int, block_size: int, bytes_per_block: int) -> int:
        """Return how many whole blocks that is, also where the pool has fewer."""
        if self.share is not None:
            return int(round(self.share * num_blocks, 6))  # 29 % of 100 blocks are 29, not 28.999...
        per_block = block_size if self.tokens is not None else bytes_per_block
        return (self.tokens or self.size_bytes or 0) // per_block


def _seconds(value: object) -> float:
    """Return seconds from a number of them or from text such as ``"10m"``."""
    number: object = value
    factor = 1
    if isinstance(value, str) and (found := re.fullmatch(_DURATION, value)):
        number, factor = float(found[1]), _UNITS_S[found[2]]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number * factor < _LONGEST_S:
        raise ValueError('must be seconds above 0, or text with a unit: "90s", "10m", "24h", "7d"')
    return float(number * factor)


def _clock(value: Any) -> str:
    if isinstance(value, str) and value in CLOCK_UNITS:
        return value
    if isinstance(value, date):  # TOML reads an unquoted date as one
        return value.isoformat()
    try:
        return datetime.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        raise ValueError(f"must be an ISO date or time (2026-01-31), or one of {', '.join(CLOCK_UNITS)}") from None


def _format(value: str) -> str:
    if value not in KV_FORMATS:
        raise ValueError(f"there is no such format; there are {', '.join(KV_FORMATS)}")
    return value


def _writable(value: object) -> ScopeLevel:
    level = _level(value, _WRITABLE)
    if level is ScopeLevel.PUBLIC:
        raise ValueError("a request cannot write public scope; publish the text with engine.publish")
    return level


def _stored(value: object) -> ScopeLevel:
    level = _level(value, _STORED)
    if level not in _STORED:
        raise ValueError("has none; there are tenant, user and session")
    return level


def _level(value: object, accepted: tuple[ScopeLevel, ...]) -> ScopeLevel:
    try:
        return ScopeLevel.parse(value)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(level.label for level in accepted)}") from None


def _kinds(value: dict[str, ScopeLevel]) -> dict[str, ScopeLevel]:
    for kind in value:
        if kind not in DEFAULT_SCOPES:
            raise ValueError(f"{kind!r} is no segment kind; there are {', '.join(SEGMENT_KINDS)}")
    return value


def _label(level: ScopeLevel) -> str:
    return level.label


def _words(levels: tuple[ScopeLevel, ...]) -> dict[str, Any]:
    return {"type": "string", "enum": [level.label for level in levels]}


WritableLevel = Annotated[
    ScopeLevel, BeforeValidator(_writable), PlainSerializer(_label), WithJsonSchema(_words(_WRITABLE))
]
StoredLevel = Annotated[ScopeLevel, BeforeValidator(_stored), PlainSerializer(_label), WithJsonSchema(_words(_STORED))]
Scopes = Annotated[
    dict[str, WritableLevel],
    AfterValidator(_kinds),
    WithJsonSchema(
        {"type": "object", "properties": dict.fromkeys(SEGMENT_KINDS, _words(_WRITABLE)), "additionalProperties": False}
    ),
]
Pool = Annotated[
    PoolAmount,
    BeforeValidator(PoolAmount.parse),
    PlainSerializer(PoolAmount.dump),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                {"type": "integer", "minimum": 1, "maximum": _MAX_AMOUNT},
                {"type": "string", "pattern": f"^{_AMOUNT}$"},
            ]
        }
    ),
]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": _LONGEST_S},
                {"type": "string", "pattern": f"^{_DURATION}$"},
            ]
        }
    ),
]
Format = Annotated[str, AfterValidator(_format), WithJsonSchema({"type": "string", "enum": list(KV_FORMATS)})]
# An ISO date has many spellings; the pattern takes them all and still tells a date from a misspelt word.
Clock = Annotated[
    str,
    BeforeValidator(_clock),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "enum": list(CLOCK_UNITS)}, {"type": "string", "pattern": "^[0-9]{4}[-0-9W]"}]}
    ),
]
