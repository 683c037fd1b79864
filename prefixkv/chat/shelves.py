"""What is kept by scope, with room of its own for every tenant: the load of one takes nothing from another."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

from prefixkv.lifetime import Lifetime, end_of_life
from prefixkv.scope import Scope

__all__ = ["Kept", "Shelves"]

_SWEEP_S = 1.0
"""Between two looks at everything that is kept. What is past its time is not handed out before either."""


class Kept:
    """Something kept for one scope.

    Attributes:
        created_s: Since when, by the shelves' clock.
        used_s: When it was last put on a shelf.
    """

    def __init__(self) -> None:
        self.created_s: float | None = None
        self.used_s = 0.0

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        raise NotImplementedError


T = TypeVar("T", bound=Kept)


class Shelves(Generic[T]):
    """Values by scope. What a tenant did not use for longest makes room for what is new of that tenant.

    A value must be taken out before it changes, since it is counted with the size it had when it was put in. Not safe
    to call from several threads at once.

    Args:
        most_bytes: About how much there is of one tenant.
        most_bytes_in_all: About how much there is of all. Only behind that goes the tenant not used for longest.
        lifetime: Seconds without use, and in all, that a value of a scope is kept; None is for ever.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        most_bytes: int,
        most_bytes_in_all: int,
        *,
        lifetime: Callable[[Scope], Lifetime] = lambda scope: (None, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = 0
        self._most_bytes = most_bytes
        self._most_bytes_in_all = most_bytes_in_all
        self._lifetime = lifetime
        self._clock = clock
        self._sweep_s = math.inf
        self._tenants: OrderedDict[str | None, LRUCache[Scope, T]] = OrderedDict()

    def get(self, scope: Scope) -> T | None:
        """Return the value of a scope, or None. Does not make it live longer."""
        shelf = self._tenants.get(scope.tenant)
        if shelf is None:
            return None
        self._tenants.move_to_end(scope.tenant)
        value = shelf.get(scope)
        return None if value is None or self._end(scope, value) <= self._clock() else value

    def take(self, scope: Scope) -> T | None:
        """Remove the value of a scope and return it, or None."""
        shelf = self._tenants.get(scope.tenant)
        if shelf is None:
            return None
        before = shelf.currsize
        value = shelf.pop(scope, None)
        self.size += int(shelf.currsize - before)
        if not shelf:
            del self._tenants[scope.tenant]
        return None if value is None or self._end(scope, value) <= self._clock() else value

    def put(self, scope: Scope, value: T) -> None:
        """Keep a value, if there may be so much of one tenant at all. It is used just now."""
        self.take(scope)
        if value.size > self._most_bytes:
            return
        value.used_s = self._clock()
        value.created_s = value.used_s if value.created_s is None else value.created_s
        self._sweep_s = min(self._sweep_s, max(self._end(scope, value), self._clock() + _SWEEP_S))
        shelf = self._tenants.get(scope.tenant)
        if shelf is None:
            shelf = self._tenants[scope.tenant] = LRUCache(self._most_bytes, getsizeof=lambda value: value.size)
        self._tenants.move_to_end(scope.tenant)
        before = shelf.currsize
        shelf[scope] = value
        self.size += int(shelf.currsize - before)
        while self.size > self._most_bytes_in_all and len(self._tenants) > 1:
            _, oldest = self._tenants.popitem(last=False)
            self.size -= int(oldest.currsize)

    def drop(self, is_meant: Callable[[Scope], bool]) -> None:
        """Remove the values of all scopes that are meant."""
        for scope in [scope for shelf in self._tenants.values() for scope in shelf if is_meant(scope)]:
            self.take(scope)

    def tenants(self) -> list[str | None]:
        """Return the tenants whose values are kept."""
        return list(self._tenants)

    def sweep(self, *, at_once: bool = False) -> None:
        """Remove what is past its time; unless ``at_once``, only when something may be."""
        now = self._clock()
        if now < self._sweep_s and not at_once:
            return
        ends = {scope: self._end(scope, value) for shelf in self._tenants.values() for scope, value in shelf.items()}
        self.drop(lambda scope: ends[scope] <= now)
        self._sweep_s = max(min((end for end in ends.values() if end > now), default=math.inf), now + _SWEEP_S)

    @property
    def next_sweep_s(self) -> float:
        """When something may be past its time, by the clock; infinity if nothing ever is."""
        return self._sweep_s if self._tenants else math.inf

    def _end(self, scope: Scope, value: T) -> float:
        created_s = math.inf if value.created_s is None else value.created_s
        return end_of_life(self._lifetime(scope), used_s=value.used_s, created_s=created_s)
