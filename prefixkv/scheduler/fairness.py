"""Whose turn it is: virtual token counters, of tenants by weight and inside each tenant of its users."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachetools import LRUCache

from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.rules import TenantRules
from prefixkv.scheduler.turns import Turns

__all__ = ["Account", "Accounts", "FairnessCounters", "TenantAccount", "UserAccount"]

_MAX_REMEMBERED = 1000
_OPERATORS_PRIORITY = 1000  # above any tenant's


@dataclass(slots=True, eq=False)
class Account:
    """The service that one party got, and what it has in the lane now.

    Attributes:
        name: Tenant or user id.
        number: Order of activation.
        last_turn: Step of its last turn; a new party's is just before the step that is over.
        weight: Its share, relative to the others'.
        counter: Service it got, divided by its weight.
        num_live: Sequences that wait or run.
        num_running: Sequences that run.
        num_waiting: Sequences that wait.
        credit_tokens: How much of its head start is not used up yet.
    """

    name: str | None
    number: int
    last_turn: int
    weight: float = 1.0
    counter: float = 0.0
    num_live: int = 0
    num_running: int = 0
    num_waiting: int = 0
    credit_tokens: float = 0.0

    @property
    def key(self) -> tuple[float, int, int]:
        """What parties are ordered by: least served, then longest without a turn, then first come."""
        return self.counter, self.last_turn, self.number


A = TypeVar("A", bound=Account)


@dataclass(slots=True, eq=False)
class UserAccount(Account):
    """A user of a tenant, and the line of its waiting sequences."""

    line: deque[Sequence] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class TenantAccount(Account):
    """A tenant and its users. ``None`` is the operator, whose own work is free and first."""

    priority: int = 0
    users: Accounts[UserAccount] = field(default_factory=lambda: Accounts(UserAccount))
    turns: Turns[UserAccount] = field(default_factory=lambda: Turns())


class Accounts(Generic[A]):
    """Parties of one level that have a sequence now, and the counters of some that had one.

    A party that comes back is lifted to the lowest counter among those that stayed, less a head start: it saves up
    no more than a burst, so that one that asks for little is answered at once though others flood. All head starts
    together are no more than one burst either, and are earned again by what the others get meanwhile, so a stream of
    newcomers holds nobody up for long. Nor can a party wash off what it got by leaving while others wait. When all
    have gone, all start anew.

    Attributes:
        active: The parties, by name.
        total_weight: The sum of their weights.
        burst_tokens: The most that can be saved up.
    """

    def __init__(self, make: type[A], burst_tokens: int = 0) -> None:
        self.active: dict[str | None, A] = {}
        self.total_weight = 0.0
        self.burst_tokens = burst_tokens
        self._make = make
        self._past: LRUCache[str | None, float] = LRUCache(_MAX_REMEMBERED)
        self._next_number = 0
        self._lent_tokens = 0.0

    def enter(self, name: str | None, now: int, weight: float = 1.0, *, is_free: bool = False) -> A:
        """Count one more sequence of a party, whose weight may have changed; return its account."""
        account = self.active.get(name)
        if account is None:
            counter, credit_tokens = (0.0, 0.0) if is_free else self._lift(self._past.pop(name, 0.0), weight)
            # Between equals the one that had the last step goes second, once: see Account.key.
            account = self.active[name] = self._make(name, self._next_number, now - 1, 0.0, counter)
            account.credit_tokens = credit_tokens
            self._next_number += 1
        weight = 0.0 if is_free else weight
        self.total_weight += weight - account.weight
        account.weight = weight
        account.num_live += 1
        return account

    def _lift(self, counter: float, weight: float) -> tuple[float, float]:
        """Return where a party starts whose counter was ``counter``, and the head start in that."""
        lowest = min((other.counter for other in self.active.values() if other.weight), default=None)
        if lowest is None:
            return max(counter, 0.0), 0.0
        most_tokens = max(0.0, self.burst_tokens - self._lent_tokens)
        start = max(counter, lowest - most_tokens / weight)
        credit_tokens = max(0.0, lowest - start) * weight
        self._lent_tokens += credit_tokens
        return start, credit_tokens

    def charge(self, account: A, cost: int) -> None:
        """Add service to an account; a negative ``cost`` takes some back."""
        if account.weight:
            account.counter += cost / account.weight
            used = min(account.credit_tokens, max(0, cost))
            account.credit_tokens -= used
            self._lent_tokens = max(0.0, self._lent_tokens - (max(0, cost) - used))

    def leave(self, account: A) -> None:
        """Count one sequence less."""
        account.num_live -= 1
        if account.num_live:
            return
        del self.active[account.name]
        self.total_weight -= account.weight
        self._lent_tokens = max(0.0, self._lent_tokens - account.credit_tokens)
        if account.weight:
            self._past[account.name] = account.counter
        if not any(other.weight for other in self.active.values()):
            self._past.clear()
            self.total_weight = self._lent_tokens = 0.0

    def part_of(self, account: Account, slots: int) -> float:
        """Return how many of some slots are a party's by weight, at least one."""
        if not account.weight:
            return float(slots)
        return max(1.0, slots * account.weight / max(self.total_weight, account.weight))

    def most_over(self, accounts: Iterable[A], slots: int) -> A | None:
        """Return the party that runs most sequences beyond its part of some slots, or None."""
        over = [(account.num_running - self.part_of(account, slots), account) for account in accounts]
        beyond, account = max(over, key=lambda found: (found[0], found[1].number), default=(0.0, None))
        return account if beyond > 0 else None


class FairnessCounters:
    """Counts the service each tenant got, divided by its weight, and each of its users; the lowest counter goes next.

    Source: Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models"). We count at two levels,
    charge computed prompt tokens and twice the output tokens, so what the cache saves is free, and charge a chunk when
    it is chosen, so that one step is already shared fairly.
    """

    OUTPUT_COST = 2

    def __init__(self, rules: TenantRules, burst_tokens: int = 0) -> None:
        self._rules = rules
        self._burst_tokens = burst_tokens
        self.tenants = Accounts(TenantAccount, burst_tokens)

    def set_burst(self, tokens: int) -> None:
        """Let so much be saved up from now on; what is saved up already stays."""
        self._burst_tokens = self.tenants.burst_tokens = tokens

    def enter(self, seq: Sequence, now: int) -> None:
        """Open the accounts of a new sequence, or note that they have one more; reads weight and priority anew."""
        name = seq.tenant
        if name is None:
            tenant = self.tenants.enter(None, now, is_free=True)
            tenant.priority = _OPERATORS_PRIORITY
        else:
            tenant = self.tenants.enter(name, now, self._rules.weight(name))
            tenant.priority = self._rules.priority(name)
        tenant.users.burst_tokens = self._burst_tokens
        tenant.users.enter(seq.user, now)

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence has ended."""
        tenant, user = self.of(seq)
        tenant.users.leave(user)
        self.tenants.leave(tenant)

    def of(self, seq: Sequence) -> tuple[TenantAccount, UserAccount]:
        """Return the accounts that a live sequence is charged to."""
        tenant = self.tenants.active[seq.tenant]
        return tenant, tenant.users.active[seq.user]

    def charge(self, seq: Sequence, cost: int) -> None:
        """Add service to a sequence's accounts; a negative ``cost`` takes back what was not carried out."""
        tenant, user = self.of(seq)
        self.tenants.charge(tenant, cost)
        tenant.users.charge(user, cost)
