"""Who asks, and how far what they bring may be shared.

public > tenant > user > session > request        (widest first; ``request`` is never stored)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from prefixkv.errors import InvalidRequest

__all__ = ["Principal", "Scope", "ScopeLevel"]

_MAX_ID_BYTES = 256


class ScopeLevel(IntEnum):
    """How far cached rows may be shared; a larger number is narrower."""

    PUBLIC = 0
    TENANT = 1
    USER = 2
    SESSION = 3
    REQUEST = 4

    @property
    def label(self) -> str:
        """The word used in policies and reports, such as ``"tenant"``."""
        return self.name.lower()

    @classmethod
    def parse(cls, value: object) -> ScopeLevel:
        """Return the level that a word names.

        Raises:
            ValueError: If there is no such level.
        """
        if isinstance(value, cls):
            return value
        for level in cls:
            if value == level.label:
                return level
        raise ValueError(f"must be one of {', '.join(level.label for level in cls)}")


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller of a request. Take it from your own authentication, never from a request body.

    Ids are compared as UTF-8 bytes, at most 256 each. Requests that name no user (or no session) of a tenant
    share one unnamed user (or session): name them wherever two conversations must not see each other.

    Raises:
        InvalidRequest: If the tenant is missing or an id is empty, too long or not text.
    """

    tenant: str = ""
    user: str | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or not self.tenant:
            raise InvalidRequest("missing_tenant", "principal.tenant", "name the tenant: there is no default")
        for name in ("tenant", "user", "session"):
            value = getattr(self, name)
            if value is None:
                continue
            path = f"principal.{name}"
            if not isinstance(value, str) or not value:
                raise InvalidRequest("bad_principal", path, "must be non-empty text, or None where it may be absent")
            try:
                size = len(value.encode())
            except UnicodeEncodeError:
                raise InvalidRequest("bad_principal", path, "holds a lone surrogate") from None
            if size > _MAX_ID_BYTES:
                raise InvalidRequest("bad_principal", path, f"is {size} bytes long, at most {_MAX_ID_BYTES} fit")


@dataclass(frozen=True, slots=True)
class Scope:
    """One place where rows are shared: a level and whose it is. Fields narrower than the level are None."""

    level: ScopeLevel
    tenant: str | None = None
    user: str | None = None
    session: str | None = None

    @classmethod
    def of(cls, principal: Principal, level: ScopeLevel) -> Scope:
        """Return the scope of ``level`` that ``principal`` belongs to."""
        return cls(
            level,
            principal.tenant if level >= ScopeLevel.TENANT else None,
            principal.user if level >= ScopeLevel.USER else None,
            principal.session if level >= ScopeLevel.SESSION else None,
        )

    def is_within(self, tenant: str | None, user: str | None, session: str | None) -> bool:
        """Return whether everything in this scope belongs to the named identity; a None filter matches all."""
        return (
            (tenant is None or self.tenant == tenant)
            and (user is None or (self.level >= ScopeLevel.USER and self.user == user))
            and (session is None or (self.level >= ScopeLevel.SESSION and self.session == session))
        )
