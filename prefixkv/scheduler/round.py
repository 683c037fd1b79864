"""Shares out what is left of one step behind the decodes: prefill of running sequences, and new ones."""

from __future__ import annotations

from enum import Enum

from prefixkv.cache.index import common_prefix
from prefixkv.cache.table import PrefixMatch
from prefixkv.scheduler.fairness import TenantAccount, UserAccount
from prefixkv.scheduler.lane import Lane
from prefixkv.scheduler.queue import Rank
from prefixkv.scheduler.request import Sequence, SequenceStatus

__all__ = ["Round"]

# A sequence waits for another one's prefill only if that spares it at least this many tokens.
_MIN_SHARED_TOKENS = 16
_MAX_WAITS = 8
# When all places are taken, so many parties are asked at most whether they may take one from another.
_MAX_ASKED = 2


class _Shortage(Enum):
    POOL = "pool"
    OWN = "own"


class Round:
    """One step's prefill budget of a lane, given out turn by turn to the least served tenant, and user inside it.

    A turn is a chunk for the oldest running prompt of the user, or else the admission of one that waits. A sequence
    that is held back for another one's prefill gives that one its turn.
    """

    def __init__(self, lane: Lane, prefills: list[Sequence]) -> None:
        self._lane = lane
        self._manager = lane.manager
        self._budget = lane.share.max_prefill_tokens
        self._admissions = lane.share.max_new_seqs_per_step
        self._asked = 0
        self._closed = not len(lane.waiting)
        self._full: set[str | None] = set()
        self._prefills: dict[TenantAccount, dict[UserAccount, list[Sequence]]] = {}
        for seq in reversed(prefills):  # so that the oldest is the last of each list
            tenant, user = lane.fairness.of(seq)
            self._prefills.setdefault(tenant, {}).setdefault(user, []).append(seq)

    def run(self) -> None:
        """Give turns until the budget is spent or nobody can use it. Mutates the lane."""
        lane = self._lane
        while self._budget > 0 and (chosen := self._next_tenant()):
            rank, tenant = chosen
            if self._serve(tenant, is_overdue=not rank[0]):
                lane.waiting.served(tenant, lane.now)
            else:
                self._prefills.pop(tenant, None)
                lane.waiting.set_aside(tenant)

    @property
    def _admits(self) -> bool:
        return not self._closed and self._admissions > 0 and self._asked < _MAX_ASKED

    def _next_tenant(self) -> tuple[Rank, TenantAccount] | None:
        waiting, now = self._lane.waiting, self._lane.now
        chosen = [(waiting.rank(tenant, now), tenant) for tenant in self._prefills]
        first = waiting.first(now) if self._admits else None
        if first is not None:
            chosen.append(first)
        return min(chosen, key=lambda found: (found[0], found[1].key), default=None)

    def _serve(self, tenant: TenantAccount, *, is_overdue: bool) -> bool:
        """Give a tenant's least served user a turn; False if nobody of the tenant can use one in this step."""
        lane = self._lane
        prefills = self._prefills.get(tenant, {})
        while True:
            users = list(prefills)
            first = tenant.turns.first() if self._admits and tenant.name not in self._full else None
            if first is not None:
                users.append(first)
            user = min(users, key=lambda user: user.key, default=None)
            if user is None:
                return False
            if self._prefill_next(prefills, user) or (user is first and self._admit_from(tenant, user, is_overdue)):
                tenant.last_turn = user.last_turn = lane.now
                return True
            prefills.pop(user, None)
            if user is first:
                lane.waiting.set_aside(tenant, user)

    def _prefill_next(self, prefills: dict[UserAccount, list[Sequence]], user: UserAccount) -> bool:
        own = prefills.get(user, [])
        while own:
            if self._prefill(own.pop()):
                return True
        return False

    def _prefill(self, seq: Sequence) -> bool:
        """Give a running sequence its chunk, once a step."""
        if seq.status is not SequenceStatus.RUNNING or seq in self._lane.step or seq.num_pending_tokens < 1:
            return False
        num_tokens = min(seq.num_pending_tokens, self._budget)
        if not self._lane.give(seq, num_tokens):
            return False
        self._budget -= num_tokens
        return True

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit_from(self, tenant: TenantAccount, user: UserAccount, is_overdue: bool) -> bool:
        """Let one of the first few of a user's line run; False if none of them can."""
        lane = self._lane
        has_slot, victim = lane.find_slot(tenant, user, is_overdue=is_overdue)
        if not has_slot:
            self._asked += len(lane.running) >= lane.share.max_num_seqs
            return False
        head = user.line[0]
        for seq in lane.waiting.in_order(user, lane.now, self._estimate):
            match = None if self._is_led(seq) else self._manager.match(seq.token_ids, seq.scopes)
            if match is None or self._find_leader(seq, match):
                if seq.leader is not None and self._prefill(seq.leader):
                    return True
                continue
            if not self._open(seq, match, victim):
                return False
            head.num_passed += head is not seq
            return True
        return False

    def _open(self, seq: Sequence, match: PrefixMatch, victim: Sequence | None) -> bool:
        """Admit a sequence if there is room; else note what is in its way."""
        lane, manager = self._lane, self._manager
        shortage = self._find_shortage(seq, match)
        while shortage is _Shortage.POOL and (other := self._find_borrower(seq, match)):
            lane.preempt(other)
            match = manager.match(seq.token_ids, seq.scopes)
            shortage = self._find_shortage(seq, match)
        if shortage is None and victim is not None and victim.status is SequenceStatus.RUNNING:
            lane.preempt(victim)
            match = manager.match(seq.token_ids, seq.scopes)
        num_tokens = min(len(seq.token_ids) - match.num_tokens, self._budget)
        target = match.num_tokens + num_tokens
        cached = manager.open(seq.seq_id, match, seq.scopes, target) if shortage is None else None
        if cached is None:
            # Nobody may pass the one that waits for room, or a long prompt would starve; but where it is its own
            # tenant that is in the way, others may.
            alone = not lane.fairness.of(seq)[0].num_running if shortage is _Shortage.OWN else not lane.running
            if alone:
                lane.stuck.append(seq)
            self._closed = self._closed or shortage is not _Shortage.OWN
            self._full.add(seq.tenant)
            return False
        # Where the pool was too small to copy the partial block, more is left to compute than the match promised.
        num_tokens = min(target - cached, self._budget)
        lane.start(seq, cached, match, num_tokens)
        self._budget -= num_tokens
        self._admissions -= 1
        return True

    def _find_shortage(self, seq: Sequence, match: PrefixMatch) -> _Shortage | None:
        """Say what keeps a waiting sequence from getting its cached prefix and blocks for its first chunk."""
        lane, manager = self._lane, self._manager
        # A preempted sequence asks for everything it lost, or it would be admitted and preempted again and again.
        first = match.num_tokens + min(len(seq.token_ids) - match.num_tokens, self._budget)
        target = len(seq.token_ids) if seq.was_preempted else first
        if not lane.running:
            # It gets all there is; only a ceiling that was lowered, or pins, can be in its way.
            if manager.num_available(seq.tenant, match.nodes) >= manager.blocks_for(target) - len(match.nodes):
                return None
            is_own = lane.is_strict or manager.shares.is_limited_by_ceiling(seq.tenant)
            return _Shortage.OWN if is_own else _Shortage.POOL
        needed = manager.blocks_for(target) - len(match.nodes)
        keep = [*match.nodes, match.partial] if match.partial else match.nodes
        own = lane.fairness.of(seq)[0].num_running
        # A spare block is left for each running sequence; of what is inside its floor, and under a ceiling, for each of
        # the same tenant. A strict one looks at nothing beyond its partition.
        if not lane.is_strict:
            inside = not lane.is_over_floor(seq.tenant, len(keep) + needed + own)
            if manager.shares.room(seq.tenant, keep) < needed + (own if inside else len(lane.running)):
                return _Shortage.POOL
        # Alone under its ceiling it gets all there is, also the block that it would have copied from.
        available = manager.num_available(seq.tenant, keep if own else match.nodes)
        return _Shortage.OWN if available < needed + own else None

    def _find_borrower(self, seq: Sequence, match: PrefixMatch) -> Sequence | None:
        """Return who gives way if a tenant asks for its floor that was lent meanwhile."""
        lane = self._lane
        if seq.tenant is None or not lane.rules.floor_blocks(seq.tenant):
            return None
        needed = self._manager.blocks_for(len(seq.token_ids)) - len(match.nodes)
        if lane.is_over_floor(seq.tenant, needed + lane.fairness.of(seq)[0].num_running):
            return None
        return lane.find_over_floor()

    # -- prefixes that are being computed --------------------------------------------------------------------------

    def _estimate(self, seq: Sequence) -> int:
        return self._manager.match(seq.token_ids, seq.scopes).num_tokens

    @staticmethod
    def _is_led(seq: Sequence) -> bool:
        """Return whether the sequence still waits for the one it was held back for."""
        leader = seq.leader
        if leader and leader.status is SequenceStatus.RUNNING and leader.is_prefilling:
            return True
        seq.leader = None
        return False

    def _find_leader(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Hold a sequence back if a running one is computing a prefix that it will be able to reuse."""
        most = len(seq.token_ids) - 1
        worthwhile = min(_MIN_SHARED_TOKENS, max(1, most - match.num_tokens))
        for leader in self._lane.running:
            if seq.num_waits == _MAX_WAITS or not leader.is_prefilling:
                continue
            readable = min(self._manager.shareable_prefix(leader.seq_id, seq.scopes), most)
            if readable - match.num_tokens < worthwhile:
                continue
            shared = min(common_prefix(leader.token_ids, seq.token_ids), readable)
            if shared - match.num_tokens >= worthwhile:
                seq.leader = leader
                seq.num_waits += 1
                return True
        return False
