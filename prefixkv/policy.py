"""What each tenant may do: frozen pydantic models, read from YAML, TOML, JSON or Python."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from prefixkv.config import parse_memory
from prefixkv.errors import ConfigError, PolicyError, UnknownTenant
from prefixkv.scope import ScopeLevel

__all__ = [
    "CLOCK_UNITS",
    "DEFAULT_SCOPES",
    "SEGMENT_KINDS",
    "PolicySet",
    "PoolAmount",
    "SlotPolicy",
    "TTLPolicy",
    "TenantPolicy",
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

_Level = Annotated[
    ScopeLevel,
    BeforeValidator(ScopeLevel.parse),
    PlainSerializer(lambda level: level.label, return_type=str),
]


@dataclass(frozen=True, slots=True)
class PoolAmount:
    """Some of the pool, in one of three units.

    Attributes:
        share: Of the pool, over 0 and up to 1.
        tokens: Tokens, rounded down to blocks.
        size_bytes: Bytes, rounded down to blocks.
    """

    share: float | None = None
    tokens: int | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, value: Any) -> PoolAmount:
        """Read bytes, ``"64MiB"``, ``"4000 tokens"``, ``"25%"`` or 0.25.

        Raises:
            ValueError: If it is none of them.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and (found := re.fullmatch(r"([1-9]\d*)\s*tokens", value.strip())):
            return cls(tokens=int(found[1]))
        try:
            amount = parse_memory(value)
        except ConfigError:
            raise ValueError(
                'must be bytes, text ("64MiB"), tokens ("4000 tokens") or a share of the pool ("50%", 0.5)'
            ) from None
        return cls(share=amount) if isinstance(amount, float) else cls(size_bytes=amount)

    def dump(self) -> int | float | str:
        """Return what :meth:`parse` reads as this."""
        if self.share is not None:
            return self.share
        return f"{self.tokens} tokens" if self.tokens is not None else self.size_bytes or 0

    def blocks(self, num_blocks: int, block_size: int, bytes_per_block: int) -> int:
        """Return how many whole blocks of a pool that is, at least 0 and at most all."""
        if self.share is not None:
            return int(self.share * num_blocks)
        per_block = block_size if self.tokens is not None else bytes_per_block
        return min(num_blocks, (self.tokens or self.size_bytes or 0) // per_block)


Pool = Annotated[PoolAmount, BeforeValidator(PoolAmount.parse), PlainSerializer(PoolAmount.dump)]


def _seconds(value: object) -> float:
    """Return seconds from a number of them or from text such as ``"10m"``."""
    number: object = value
    factor = 1
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", value.strip())):
        number, factor = float(found[1]), {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number * factor < 1e9:
        raise ValueError('must be seconds above 0, or text with a unit: "90s", "10m", "24h", "7d"')
    return float(number * factor)


_Seconds = Annotated[float, BeforeValidator(_seconds)]


class _Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise PolicyError(_explain(error, type(self).model_fields)) from None


def _explain(error: ValidationError, known: Iterable[str]) -> str:
    """Return one line per fault: the path of the field, then what is wrong."""
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, PolicyError):
            # A policy inside this one: its lines start with their own paths.
            lines += [f"{path}.{line}" for line in str(cause).splitlines()]
        else:
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = f"there is no such field; there are {', '.join(known)}"
            lines.append(f"{path}: {message}" if path else message)
    return "\n".join(lines)


class SlotPolicy(_Policy):
    """What happens to a declared slot.

    Attributes:
        placement: ``inline`` leaves the value where it is: everything behind it is lost when it changes. ``coarsen``
            rounds a time in it down: the same text, fewer values. ``tail`` binds late: a fixed phrase stays in its
            place, and the value goes to the end, just before the last user turn. ``patch`` is ``inline`` as yet.
        scope: How far the value, and all that follows it, is shared.
        unit: What ``coarsen`` rounds down to.
        phrase: What ``tail`` leaves in the place; None says where the value is found.
    """

    placement: Literal["inline", "coarsen", "tail", "patch"] = "inline"
    scope: _Level = ScopeLevel.SESSION
    unit: Literal["minute", "hour", "day"] = "hour"
    phrase: str | None = Field(default=None, max_length=200, strict=True)


class TTLPolicy(_Policy):
    """How long blocks of a scope live. Past it they are gone, not just colder.

    Attributes:
        idle: Seconds since a request last used them, or text ("10m"); None sets no limit.
        absolute: Seconds since they were computed, or text ("24h"); None sets no limit.
    """

    idle: _Seconds | None = None
    absolute: _Seconds | None = None

    def shortened(self, other: TTLPolicy) -> TTLPolicy:
        """Return the shorter of both, each limit for itself."""
        return TTLPolicy(
            idle=min((s for s in (self.idle, other.idle) if s is not None), default=None),
            absolute=min((s for s in (self.absolute, other.absolute) if s is not None), default=None),
        )


_ZERO_RETENTION = TTLPolicy(idle=300, absolute=3600)


class TenantPolicy(_Policy):
    """The rules of one tenant.

    Attributes:
        weight: Its share of the pool and of the engine's time, relative to the others'.
        priority: Among waiting requests a higher one goes first; waiting raises it, so nobody starves.
        min_pool: Floor: what of the pool nobody can take from it; while it needs less, the rest is lent.
        max_pool: Ceiling: most of the pool it may hold; None sets no limit.
        isolation: ``strict`` makes ``min_pool`` a hard partition of the pool and of each step: nothing is lent or
            borrowed, so how much others do cannot be seen either.
        ttl: Scope level to how long its blocks live; levels left out live until they are evicted.
        zero_retention: Nothing outlives its use for long: memory only, idle for five minutes at most, an hour in all,
            and the end of a session destroys it.
        tenant_scope: ``registered`` shares only what the tenant's backend published among its users; other text of
            tenant scope stays with its user, so an end user who controls the system role can neither plant nor probe.
        kv_format: Of the pools that the engine was given, the one it uses; None takes the only one.
        exact: Whether only rows computed in exactly this context are reused; patched ones are not.
        scopes: Segment kind to scope level; kinds left out keep :data:`DEFAULT_SCOPES`.
        slots: Slot name to its policy; slots left out are ``inline`` and ``session``.
        few_shot_messages: Messages behind the system text that are examples, the same for all; a request may say
            another number.
        tools_order: ``canonical`` sorts tools by name and keys of tools and of calls' arguments in a fixed order, so
            that a shuffled list is the same prompt.
        splice_generated: Where a history brings back a reply of this engine, take the reply's own tokens, not those
            that its text encodes to. The model then sees what it wrote, and the next turn hits all of it.
        template_clock: What a template that writes the date is told: an ISO date or time, or ``hour``, ``day``,
            ``month`` or ``year``, which round the true time down; None tells it the true time.
        max_prompt_tokens: Longest prompt; None sets no limit.
        max_queued_requests: Requests that may wait; None sets no limit of its own.
        max_running_requests: Requests that may run at once; more of them wait. None sets no limit of its own.
        tokens_per_minute: Prompt tokens computed and tokens generated; a minute's worth may come at once. None sets no
            limit.
    """

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False, strict=True)
    priority: int = Field(default=0, ge=-100, le=100, strict=True)
    min_pool: Pool | None = None
    max_pool: Pool | None = None
    isolation: Literal["shared", "strict"] = "shared"
    ttl: dict[_Level, TTLPolicy] = Field(default_factory=dict)
    zero_retention: bool = Field(default=False, strict=True)
    tenant_scope: Literal["system", "registered"] = "system"
    kv_format: str | None = None
    exact: bool = Field(default=True, strict=True)
    scopes: dict[str, _Level] = Field(default_factory=dict)
    slots: dict[str, SlotPolicy] = Field(default_factory=dict)
    few_shot_messages: int = Field(default=0, ge=0, strict=True)
    tools_order: Literal["as_given", "canonical"] = "as_given"
    splice_generated: bool = Field(default=False, strict=True)
    template_clock: str | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_queued_requests: int | None = Field(default=None, ge=1, strict=True)
    max_running_requests: int | None = Field(default=None, ge=1, strict=True)
    tokens_per_minute: int | None = Field(default=None, ge=1, strict=True)

    @field_validator("template_clock", mode="before")
    @classmethod
    def _check_clock(cls, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value in CLOCK_UNITS):
            return value
        if isinstance(value, date):  # YAML and TOML read an unquoted date as one
            return value.isoformat()
        try:
            return datetime.fromisoformat(value).isoformat()
        except (TypeError, ValueError):
            raise ValueError(f"must be an ISO date or time (2026-01-31), or one of {', '.join(CLOCK_UNITS)}") from None

    @field_validator("ttl")
    @classmethod
    def _check_ttl(cls, value: dict[ScopeLevel, TTLPolicy]) -> dict[ScopeLevel, TTLPolicy]:
        for level in value:
            if level in (ScopeLevel.PUBLIC, ScopeLevel.REQUEST):
                raise ValueError(f"{level.label}: has none; there are tenant, user and session")
        return value

    @model_validator(mode="after")
    def _check_partition(self) -> Self:
        if self.isolation == "strict":
            if self.min_pool is None:
                raise ValueError("isolation: strict needs min_pool, the size of the partition")
            if self.max_pool not in (None, self.min_pool):
                raise ValueError("isolation: a strict partition is min_pool; leave max_pool out")
        return self

    @field_validator("scopes")
    @classmethod
    def _check_kinds(cls, value: dict[str, ScopeLevel]) -> dict[str, ScopeLevel]:
        for kind, level in value.items():
            if kind not in DEFAULT_SCOPES:
                raise ValueError(f"{kind!r} is no segment kind; there are {', '.join(SEGMENT_KINDS)}")
            if level is ScopeLevel.PUBLIC:
                raise ValueError(f"{kind}: a request cannot write public scope; publish the text with engine.publish")
        return value

    def scope_level(self, kind: str) -> ScopeLevel:
        """Return how far segments of ``kind`` are shared."""
        return self._writable(self.scopes.get(kind, DEFAULT_SCOPES[kind]))

    def ttl_of(self, level: ScopeLevel) -> TTLPolicy:
        """Return how long blocks of a scope level live."""
        ttl = self.ttl.get(level) or TTLPolicy()
        return ttl.shortened(_ZERO_RETENTION) if self.zero_retention else ttl

    def slot(self, name: str) -> SlotPolicy:
        """Return the policy of a slot."""
        policy = self.slots.get(name) or SlotPolicy()
        level = self._writable(policy.scope)
        return policy if level is policy.scope else policy.model_copy(update={"scope": level})

    def _writable(self, level: ScopeLevel) -> ScopeLevel:
        """Return how far requests may share it: what is registered is written by publish alone."""
        return max(level, ScopeLevel.USER) if self.tenant_scope == "registered" else level


class PolicySet(_Policy):
    """All tenants' policies.

    Attributes:
        tenants: Tenant id to its policy.
        default: Policy of tenants not listed; None refuses them with ``UnknownTenant``.
    """

    tenants: dict[str, TenantPolicy] = Field(default_factory=dict)
    default: TenantPolicy | None = None

    @classmethod
    def load(cls, source: PolicySet | Mapping[str, Any] | str | PathLike[str] | None) -> PolicySet:
        """Read policies from a file (.yaml, .yml, .toml, .json), a mapping, or pass a PolicySet through.

        None gives one permissive default policy.

        Raises:
            PolicyError: If the file cannot be read or a field is wrong; the message starts with where.
        """
        if source is None:
            return cls(default=TenantPolicy())
        if isinstance(source, PolicySet):
            return source
        if isinstance(source, Mapping):
            return cls._from(source)
        if not isinstance(source, str | PathLike):
            raise PolicyError(f"policies: expected a path, a mapping or a PolicySet, got {type(source).__name__}")
        path = Path(source)
        try:
            data = _parse(path)
            if not isinstance(data, Mapping):
                raise PolicyError("the file must hold a mapping with 'tenants' and 'default'")
            return cls._from(data)
        except OSError as error:
            raise PolicyError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, yaml.YAMLError) as error:
            raise PolicyError(f"{path}: {error}") from None

    @classmethod
    def _from(cls, data: Mapping[Any, Any]) -> PolicySet:
        for key in data:
            if not isinstance(key, str):
                raise PolicyError(f"{key!r}: expected 'tenants' or 'default'")
        return cls(**data)

    def get(self, tenant: str) -> TenantPolicy:
        """Return a tenant's policy.

        Raises:
            UnknownTenant: If it is not listed and there is no default.
        """
        policy = self.tenants.get(tenant, self.default)
        if policy is None:
            raise UnknownTenant("this tenant is not in the policies, and they have no default")
        return policy


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    match path.suffix.lower():
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text)
    raise PolicyError("the ending must be .yaml, .yml, .toml or .json")
