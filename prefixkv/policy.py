"""What each tenant may do: frozen pydantic models, read from YAML, TOML, JSON or Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, field_validator

from prefixkv.config import parse_memory
from prefixkv.errors import ConfigError, PolicyError, UnknownTenant
from prefixkv.scope import ScopeLevel

__all__ = ["CLOCK_UNITS", "DEFAULT_SCOPES", "SEGMENT_KINDS", "PolicySet", "SlotPolicy", "TenantPolicy"]

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


class TenantPolicy(_Policy):
    """The rules of one tenant.

    Attributes:
        weight: Its share of the pool and of the engine's time, relative to the others'.
        max_pool: Most of the pool it may hold: bytes, ``"64MiB"`` or a share of the pool; None sets no limit.
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
    """

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False, strict=True)
    max_pool: int | float | str | None = None
    scopes: dict[str, _Level] = Field(default_factory=dict)
    slots: dict[str, SlotPolicy] = Field(default_factory=dict)
    few_shot_messages: int = Field(default=0, ge=0, strict=True)
    tools_order: Literal["as_given", "canonical"] = "as_given"
    splice_generated: bool = Field(default=False, strict=True)
    template_clock: str | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_queued_requests: int | None = Field(default=None, ge=1, strict=True)

    @field_validator("max_pool", mode="before")
    @classmethod
    def _check_pool(cls, value: Any) -> int | float | None:
        if value is None:
            return None
        try:
            return parse_memory(value)
        except ConfigError:
            raise ValueError('must be bytes, text ("64MiB") or a share of the pool ("50%", 0.5)') from None

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
        return self.scopes.get(kind, DEFAULT_SCOPES[kind])

    def slot(self, name: str) -> SlotPolicy:
        """Return the policy of a slot."""
        return self.slots.get(name) or SlotPolicy()


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
