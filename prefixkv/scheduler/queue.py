"""Sequences that wait: a line per user, users and tenants in the order of the service they got."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prefixkv.scheduler.fairness import FairnessCounters, TenantAccount, UserAccount
from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.turns import Turns

__all__ = ["Rank", "RequestQueue"]

_PATIENCE_STEPS = 64
_REACH = 64
_WINDOW = 8
_MAX_PASSED = 8
_ESTIMATE_STEPS = 32

Rank = tuple[bool, int]
"""What tenants are ordered by before their counters: whether their turn is not overdue, and minus their priority."""


class RequestQueue:
    """Waiting sequences.

    Between tenants priority and the counters alone decide, never what is cached, which would tell one tenant of
    another's text. Inside one user's line the one with the longest cached prefix goes first, among the first few;
    after it passed the first in line a few times, that one goes.

    Priorities wait for each other only so long: when tenants of one priority had no turn for 64 steps though
    something of theirs waited, the next turn is theirs. So each priority has a turn in a bounded number of steps,
    and with counters inside it each tenant, and each user.
    """

    def __init__(self, fairness: FairnessCounters) -> None:
        self._fairness = fairness
        self._turns: dict[int, Turns[TenantAccount]] = {}
        self._last_turn: dict[int, int] = {}
        self._touched: list[TenantAccount] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._fairness.tenants.active.values():
            for user in tenant.users.active.values():
                yield from user.line

    def num_waiting(self, tenant: str | None) -> int:
        """Return how many sequences of a tenant wait."""
        account = self._fairness.tenants.active.get(tenant)
        return account.num_waiting if account else 0

    def push(self, seq: Sequence, *, front: bool = False) -> None:
        """Add a sequence, whose accounts are open, at the end or the front of its user's line."""
        tenant, user = self._fairness.of(seq)
        if front:
            user.line.appendleft(seq)
        else:
            user.line.append(seq)
        self._count += 1
        user.num_waiting += 1
        tenant.num_waiting += 1
        tenant.turns.add(user)
        for priority, turns in self._turns.items():
            if priority != tenant.priority:
                turns.discard(tenant)  # a reload changed it
        self._turns.setdefault(tenant.priority, Turns()).add(tenant)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its line."""
        tenant, user = self._fairness.of(seq)
        user.line.remove(seq)
        self._count -= 1
        user.num_waiting -= 1
        tenant.num_waiting -= 1
        if not user.num_waiting:
            tenant.turns.discard(user)
        if not tenant.num_waiting:
            for turns in self._turns.values():
                turns.discard(tenant)

    def begin_step(self, now: int, running: Iterable[int]) -> None:
        """Let all that were set aside stand in line again, and note since when each priority waits.

        Args:
            now: The step that begins.
            running: Priorities of running prompts, which wait for their turns as well.
        """
        for turns in self._turns.values():
            turns.restore()
        for tenant in self._touched:
            tenant.turns.restore()
        self._touched.clear()
        self._turns = {priority: turns for priority, turns in self._turns.items() if turns}
        self._last_turn = {priority: self._last_turn.get(priority, now) for priority in {*self._turns, *running}}

    def first(self, now: int) -> tuple[Rank, TenantAccount] | None:
        """Return the waiting tenant whose turn it is, and its rank; or None."""
        best: tuple[Rank, TenantAccount] | None = None
        for turns in self._turns.values():
            tenant = turns.first()
            if tenant is not None:
                rank = self.rank(tenant, now)
                if best is None or (rank, tenant.key) < (best[0], best[1].key):
                    best = rank, tenant
        return best

    def rank(self, tenant: TenantAccount, now: int) -> Rank:
        """Return what a tenant is ordered by before its counter; the lowest goes first."""
        waited_steps = now - self._last_turn.get(tenant.priority, now)
        return waited_steps < _PATIENCE_STEPS, -tenant.priority

    def served(self, tenant: TenantAccount, now: int) -> None:
        """Note that a tenant had a turn."""
        self._last_turn[tenant.priority] = now

    def set_aside(self, tenant: TenantAccount, user: UserAccount | None = None) -> None:
        """Pass over a tenant, or a user of it, for the rest of this step."""
        if user is not None:
            tenant.turns.set_aside(user)
            self._touched.append(tenant)
            return
        for turns in self._turns.values():
            turns.set_aside(tenant)

    @staticmethod
    def in_order(user: UserAccount, now: int, estimate: Callable[[Sequence], int]) -> list[Sequence]:
        """Return the first few of a user's line in the order in which they should be admitted.

        Args:
            user: Whose line.
            now: This step.
            estimate: Counts the cached tokens of a sequence. What it says is used for a while.
        """
        line = user.line
        few = list(islice(line, _REACH))
        if len(few) == 1 or few[0].was_preempted or few[0].num_passed >= _MAX_PASSED:
            return few
        looked = 0
        for seq in few:
            if seq.leader is None and looked < _WINDOW:
                looked += 1
                if seq.estimated_at is None or now - seq.estimated_at >= _ESTIMATE_STEPS:
                    seq.estimated_at, seq.num_expected_tokens = now, estimate(seq)
        few.sort(key=lambda seq: -seq.num_expected_tokens)
        return few
