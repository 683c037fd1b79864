"""The sequences that compete with each other: who runs, who waits, who gives way."""

from __future__ import annotations

import logging

from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.table import PrefixMatch
from prefixkv.scheduler.fairness import FairnessCounters, TenantAccount, UserAccount
from prefixkv.scheduler.queue import RequestQueue
from prefixkv.scheduler.request import Sequence, SequenceStatus
from prefixkv.scheduler.rules import StepShare, TenantRules

__all__ = ["Lane"]

logger = logging.getLogger("prefixkv.scheduler")

# A tenant, or a user, that was away has its next prompt computed ahead of others' for so many steps' budget.
_BURST_STEPS = 4


def _age(seq: Sequence) -> int:
    return seq.seq_id


class Lane:
    """A running set, a queue, and counters of their own. What happens in one lane changes nothing in another.

    Preemption. When the pool is short, the youngest sequence of those tenants gives way that hold more than their
    floor, the one that asks included if it goes beyond its own; if nobody does, the youngest of all. The oldest in the
    lane is never preempted for another, so it ends, then the next oldest is the oldest, and any set of requests that
    fit one by one ends. "Fit" means beside the floors of all other tenants: then a tenant inside its floor is never
    preempted for one outside of its own, since with all others inside theirs the oldest lacks nothing.

    Args:
        share: Its part of each step.
        manager: Bookkeeping of the pool.
        rules: Of its tenants.
        is_strict: Whether it is the lane of one strict tenant, which looks at nothing outside its partition.
    """

    def __init__(self, share: StepShare, manager: KVCacheManager, rules: TenantRules, is_strict: bool) -> None:
        self.share = share
        self.manager = manager
        self.rules = rules
        self.is_strict = is_strict
        self.fairness = FairnessCounters(rules, _BURST_STEPS * share.max_prefill_tokens)
        self.waiting = RequestQueue(self.fairness)
        self.running: list[Sequence] = []
        self.stuck: list[Sequence] = []
        """Sequences that did not get room in the last step though nothing was in their way that could end."""
        self.step: dict[Sequence, int] = {}
        """What was chosen for the next step so far."""
        self.now = 0
        self.num_preemptions = 0
        self.gave_way = False
        """Whether a sequence was preempted in this step."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running) or len(self.waiting) > 0

    def take_share(self, share: StepShare) -> None:
        """Have another part of each step from now on."""
        self.share = share
        self.fairness.set_burst(_BURST_STEPS * share.max_prefill_tokens)

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait for admission."""
        self.fairness.enter(seq, self.now)
        self.waiting.push(seq)

    def absorb(self, other: Lane) -> None:
        """Take over all that runs and waits in another lane, which must not be used any more. Not within a step."""
        for seq in other.running:
            self.fairness.enter(seq, self.now)
            for account in self.fairness.of(seq):
                account.num_running += 1
        self.running += other.running
        for seq in other.waiting:
            seq.estimated_at = None  # by the other lane's steps
            self.add(seq)

    def begin_step(self) -> list[Sequence]:
        """Begin a step: every reply gets its next token; return the running sequences with more to compute."""
        self.now += 1
        self.step, self.stuck, self.gave_way = {}, [], False
        prefills = []
        for seq in sorted(self.running, key=_age):
            if seq.status is SequenceStatus.RUNNING:  # else preempted a moment ago
                pending = seq.num_pending_tokens
                if pending > 1:
                    prefills.append(seq)
                elif pending:
                    self.give(seq, 1)
        self.waiting.begin_step(self.now, {self.fairness.of(seq)[0].priority for seq in prefills})
        return prefills

    def give(self, seq: Sequence, num_tokens: int) -> bool:
        """Put a chunk of a running sequence in the step; False if there was no room and it was preempted."""
        if not self._make_room(seq, seq.num_computed_tokens + num_tokens):
            return False
        self.step[seq] = num_tokens
        self.fairness.charge(seq, self._cost(seq, num_tokens))
        return True

    def start(self, seq: Sequence, num_cached: int, match: PrefixMatch, num_tokens: int) -> None:
        """Let a waiting sequence, whose blocks are reserved, run its first chunk."""
        self.waiting.remove(seq)
        self.running.append(seq)
        for account in self.fairness.of(seq):
            account.num_running += 1
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_billed_tokens = num_cached
            seq.diverged = match.diverged
            seq.gone = self.manager.why_missing(seq.token_ids, seq.scopes, match)
        self.step[seq] = num_tokens
        self.fairness.charge(seq, self._cost(seq, num_tokens))

    def finish(self, seq: Sequence, *, keep: bool) -> None:
        """Take a sequence out, wherever it stands, and give its blocks back; a finished one is left alone."""
        if seq.status is SequenceStatus.RUNNING:
            self._stop(seq, keep=keep)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        else:
            return
        self.fairness.leave(seq)
        seq.status = SequenceStatus.FINISHED

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits in front of its line and is computed again later."""
        logger.debug("preempt seq=%d computed=%d", seq.seq_id, seq.num_computed_tokens)
        num_tokens = self.step.pop(seq, 0)
        if num_tokens:
            self.fairness.charge(seq, -self._cost(seq, num_tokens))
        self._stop(seq, keep=True)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        seq.was_preempted = True
        self.waiting.push(seq, front=True)
        self.num_preemptions += 1
        self.gave_way = True

    # -- who gives way ---------------------------------------------------------------------------------------------

    def is_over_floor(self, tenant: str | None, more_blocks: int = 0) -> bool:
        """Return whether a tenant uses more than its floor, or would with some more blocks. Idle ones do not count."""
        floor = 0 if tenant is None else self.rules.floor_blocks(tenant)
        in_use = self.manager.pool.owned_blocks.get(tenant, 0) - self.manager.idle.num_idle(tenant)
        return in_use + more_blocks > floor

    def find_over_floor(self, seq: Sequence | None = None, more_blocks: int = 0) -> Sequence | None:
        """Return the youngest running sequence, but not the oldest of all, whose tenant is over its floor.

        Args:
            seq: One that asks for ``more_blocks``, which may put its own tenant over its floor.
            more_blocks: How many.
        """
        oldest = min(self.running, key=_age, default=None)
        over = {tenant: self.is_over_floor(tenant) for tenant in {other.tenant for other in self.running}}
        if seq is not None:
            over[seq.tenant] = self.is_over_floor(seq.tenant, more_blocks)
        victims = (other for other in self.running if other is not oldest and over[other.tenant])
        return max(victims, key=_age, default=None)

    def find_slot(self, tenant: TenantAccount, user: UserAccount, *, is_overdue: bool) -> tuple[bool, Sequence | None]:
        """Return whether a waiting sequence of a user can have a place in the running set, and who gives way for it.

        Under a flood all places are taken by long replies of few tenants. One that runs less than its part of the
        places by weight, and was served less, takes one from the tenant that runs most beyond its own; so does a user
        inside its tenant.
        The rows of the one that gives way stay cached, so it mostly loses a few steps.
        """
        limit = None if tenant.name is None else self.rules.max_running(tenant.name)
        slots = self.share.max_num_seqs
        is_full = len(self.running) >= slots
        at_limit = limit is not None and tenant.num_running >= limit
        if not is_full and not at_limit:
            return True, None
        victim: Sequence | None = None
        tenants = self.fairness.tenants
        if at_limit or tenant.num_running + 1 > tenants.part_of(tenant, slots):
            own = tenant.num_running
            if user.num_running + 1 <= tenant.users.part_of(user, own):
                users = {self.fairness.of(seq)[1] for seq in self.running if seq.tenant == tenant.name}
                other = tenant.users.most_over(users, own)
                victim = self._youngest(tenant, other) if other and user.key < other.key else None
        else:
            rival = tenants.most_over({self.fairness.of(seq)[0] for seq in self.running}, slots)
            if rival and (is_overdue or (-tenant.priority, tenant.key) < (-rival.priority, rival.key)):
                victim = self._youngest(rival)
        return victim is not None, victim

    def _youngest(self, tenant: TenantAccount, user: UserAccount | None = None) -> Sequence | None:
        """Return the youngest running sequence of a user, or of the tenant's user who runs most; not the oldest."""
        own = [(self.fairness.of(seq)[1], seq) for seq in self.running if seq.tenant == tenant.name]
        user = user or max((owner for owner, _ in own), key=lambda owner: (owner.num_running, owner.number))
        oldest = min(self.running, key=_age)
        return max((seq for owner, seq in own if owner is user and seq is not oldest), key=_age, default=None)

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        while not self.manager.reserve(seq.seq_id, num_tokens):
            victim = self._find_victim(seq, num_tokens)
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _find_victim(self, seq: Sequence, num_tokens: int) -> Sequence:
        if self.is_strict:
            return max(self.running, key=_age)
        if self.manager.shares.is_limited_by_ceiling(seq.tenant):
            # Under its own ceiling a tenant can only make room for itself.
            return max((other for other in self.running if other.tenant == seq.tenant), key=_age)
        needed = self.manager.blocks_for(num_tokens) - len(self.manager.block_table(seq.seq_id))
        return self.find_over_floor(seq, needed) or max(self.running, key=_age)

    def _stop(self, seq: Sequence, *, keep: bool) -> None:
        self.running.remove(seq)
        for account in self.fairness.of(seq):
            account.num_running -= 1
        self.manager.close(seq.seq_id, seq.token_ids, seq.num_computed_tokens, keep=keep)

    @staticmethod
    def _cost(seq: Sequence, num_tokens: int) -> int:
        # A token that is computed again after a preemption is no new output.
        decodes = not seq.is_prefilling and seq.num_pending_tokens == 1
        return num_tokens * (FairnessCounters.OUTPUT_COST if decodes else 1)
