"""Sequences that wait: first come first served inside a tenant, fair between tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prefixkv.scheduler.fairness import FairnessCounters
from prefixkv.scheduler.request import Sequence

__all__ = ["RequestQueue"]


class RequestQueue:
    """Waiting sequences by tenant. Preempted ones stand in front of their tenant's line."""

    def __init__(self, fairness: FairnessCounters) -> None:
        self._lines: dict[str | None, deque[Sequence]] = {}
        self._fairness = fairness
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def num_waiting(self, tenant: str | None) -> int:
        """Return how many sequences of a tenant wait."""
        return len(self._lines.get(tenant, ()))

    def tenants(self) -> list[str | None]:
        """Return the tenants with a waiting sequence."""
        return list(self._lines)

    def push(self, seq: Sequence, *, front: bool = False) -> None:
        """Add a sequence at the end, or the front, of its tenant's line."""
        line = self._lines.setdefault(seq.tenant, deque())
        if front:
            line.appendleft(seq)
        else:
            line.append(seq)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its line."""
        line = self._lines[seq.tenant]
        line.remove(seq)
        if not line:
            del self._lines[seq.tenant]
        self._count -= 1

    def candidates(self) -> Iterator[Sequence]:
        """Iterate in the order in which sequences should be admitted. Stop iterating when the queue changes."""
        for tenant in self._fairness.order(self._lines):
            yield from self._lines[tenant]
