"""Which scope each token of a sequence belongs to, and which scopes its principal may read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixkv.scope import Principal, Scope, ScopeLevel

__all__ = ["ScopeMap"]


@dataclass(frozen=True, slots=True)
class ScopeMap:
    """Scopes by position, narrowing from left to right. The last one also covers what will be generated.

    Attributes:
        starts: First token of each span; the first is 0.
        scopes: Scope of each span, each narrower than the one before.
        reach: Scopes whose rows this sequence may read, widest first.
        tenant: Tenant whose share of the pool the blocks count against; None for the operator's public text.
    """

    starts: tuple[int, ...]
    scopes: tuple[Scope, ...]
    reach: tuple[Scope, ...]
    tenant: str | None
    _levels: tuple[ScopeLevel, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_levels", tuple(scope.level for scope in self.scopes))

    @classmethod
    def for_principal(cls, principal: Principal, spans: Iterable[tuple[int, ScopeLevel]]) -> ScopeMap:
        """Build the map of a request.

        Args:
            principal: Who asks.
            spans: ``(first token, level)`` of each segment in order. Levels are met with all before them, so a
                wider one behind a narrower one stays narrow.
        """
        starts: list[int] = []
        levels: list[ScopeLevel] = []
        for start, level in spans:
            # Requests never write public scope, whatever they ask for.
            met = max(level, ScopeLevel.TENANT)
            if not levels or met > levels[-1]:
                if starts and starts[-1] == start:
                    levels[-1] = met
                else:
                    starts.append(start)
                    levels.append(met)
        reach = (ScopeLevel.PUBLIC, ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)
        return cls(
            tuple(starts),
            tuple(Scope.of(principal, level) for level in levels),
            tuple(Scope.of(principal, level) for level in reach),
            principal.tenant,
        )

    @classmethod
    def for_publication(cls, tenant: str | None) -> ScopeMap:
        """Build the map of text that the operator publishes, to everybody or to one tenant."""
        public = Scope(ScopeLevel.PUBLIC)
        if tenant is None:
            return cls((0,), (public,), (public,), None)
        own = Scope(ScopeLevel.TENANT, tenant)
        return cls((0,), (own,), (public, own), tenant)

    def narrowed(self, widest: Scope) -> ScopeMap:
        """Return the same map with nothing in it wider than a scope of the same principal."""
        spans: dict[Scope, int] = {}
        for start, scope in zip(self.starts, self.scopes, strict=True):
            spans.setdefault(max(scope, widest, key=lambda scope: scope.level), start)
        return ScopeMap(tuple(spans.values()), tuple(spans), self.reach, self.tenant)

    def scope_at(self, position: int) -> Scope:
        """Return the scope of one token."""
        return self.scopes[bisect_right(self.starts, position) - 1]

    def readable_prefix(self, reader: ScopeMap) -> int:
        """Return how many leading positions ``reader`` may read; all of them is a number beyond any length."""
        for start, scope in zip(self.starts, self.scopes, strict=True):
            if scope not in reader.reach:
                return start
        return 2**62

    def changes_within(self, start: int, end: int) -> list[int]:
        """Return the positions strictly inside (start, end) where a narrower scope begins."""
        return [position for position in self.starts if start < position < end]
