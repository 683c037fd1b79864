"""A line of parties in which the least served one is always found first, however many wait."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

__all__ = ["Turns"]


class _Party(Protocol):
    num_waiting: int

    @property
    def key(self) -> tuple[float, int, int]:
        """What parties are ordered by; it grows, but for what is taken back within a step."""


P = TypeVar("P", bound=_Party)


class Turns(Generic[P]):
    """Parties with something waiting, in the order of their keys.

    A heap whose entries are brought up to date when they come to the top: keys grow, so an old entry is never too far
    back. A party that cannot be served now is set aside until :meth:`restore`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], int, P]] = []
        self._entries: dict[P, int] = {}
        self._aside: list[P] = []
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, party: P) -> None:
        """Let a party stand in line; one that does already is left alone."""
        if party not in self._entries:
            self._push(party)

    def discard(self, party: P) -> None:
        """Take a party out of the line."""
        self._entries.pop(party, None)
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> P | None:
        """Return the party whose turn it is, or None."""
        while self._heap:
            key, entry, party = self._heap[0]
            if self._entries.get(party) != entry:
                heapq.heappop(self._heap)
            elif key != party.key:
                heapq.heappop(self._heap)
                self._push(party)
            else:
                return party
        return None

    def set_aside(self, party: P) -> None:
        """Pass a party over until :meth:`restore`; one that is not in line is left alone."""
        if self._entries.get(party) is not None:
            self._entries[party] = -1
            self._aside.append(party)

    def restore(self) -> None:
        """Let those that were set aside stand in line again."""
        for party in self._aside:
            if self._entries.get(party) == -1:
                self._push(party)
        self._aside.clear()

    def _push(self, party: P) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._entries[party] = entry
        heapq.heappush(self._heap, (party.key, entry, party))
