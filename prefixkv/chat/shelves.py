"""What is kept by scope, with room of its own for every tenant: the load of one takes nothing from another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cachetools import LRUCache

from prefixkv.scope import Scope

__all__ = ["Shelves"]


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class Shelves(Generic[T]):
    """Values by scope. What a tenant did not use for longest makes room for what is new of that tenant.

    A value must be taken out before it changes, since it is counted with the size it had when it was put in. Not safe
    to call from several threads at once.

    Args:
        most_bytes: About how much there is of one tenant.
        most_bytes_in_all: About how much there is of all. Only behind that goes the tenant not used for longest.
    """

    def __init__(self, most_bytes: int, most_bytes_in_all: int) -> None:
        self.size = 0
        self._most_bytes = most_bytes
        self._most_bytes_in_all = most_bytes_in_all
        self._tenants: OrderedDict[str | None, LRUCache[Scope, T]] = OrderedDict()

    def get(self, scope: Scope) -> T | None:
        """Return the value of a scope, or None; counts as its use."""
        shelf = self._tenants.get(scope.tenant)
        if shelf is None:
            return None
        self._tenants.move_to_end(scope.tenant)
        return shelf.get(scope)

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
        return value

    def put(self, scope: Scope, value: T) -> None:
        """Keep a value, if there may be so much of one tenant at all."""
        self.take(scope)
        if value.size > self._most_bytes:
            return
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
