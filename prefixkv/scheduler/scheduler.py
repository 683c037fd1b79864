"""Who runs in the next step. Owns the sequences; asks the cache manager for room; never sees a tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from prefixkv.cache.index import common_prefix
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.table import PrefixMatch
from prefixkv.config import SchedulerConfig
from prefixkv.scheduler.fairness import FairnessCounters
from prefixkv.scheduler.queue import RequestQueue
from prefixkv.scheduler.request import Sequence, SequenceStatus

__all__ = ["ScheduledChunk", "Scheduler"]

logger = logging.getLogger("prefixkv.scheduler")

# A sequence waits for another one's prefill only if that spares it at least this many tokens.
_MIN_SHARED_TOKENS = 16
_MAX_WAITS = 8


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A step is a list of these: compute ``num_tokens`` more tokens of ``seq``."""

    seq: Sequence
    num_tokens: int


class _Shortage(Enum):
    POOL = "pool"
    CEILING = "ceiling"


class Scheduler:
    """Continuous batching with chunked prefill.

    Running sequences go first, the oldest first, each with one decode token or a prefill chunk; then new ones are
    admitted while the prefill budget and the pool allow. When a running sequence needs a block and none is to be
    had, the youngest running one is preempted and computed again later; the oldest is never preempted, so any set of
    requests that fit one by one ends.

    Source: iteration-level scheduling (Orca), chunked prefill with separate budgets (Sarathi-Serve), preemption by
    recomputation (vLLM). Waiting for a prefix that another sequence is computing is ours.
    """

    def __init__(
        self, config: SchedulerConfig, manager: KVCacheManager, weight: Callable[[str], float] = lambda tenant: 1.0
    ) -> None:
        self.config = config
        self.manager = manager
        self.fairness = FairnessCounters(weight)
        self.waiting = RequestQueue(self.fairness)
        self.running: list[Sequence] = []
        self.stuck: list[Sequence] = []
        """Waiting sequences that, in the last step, did not fit under their tenant's ceiling though it ran nothing."""
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running) or len(self.waiting) > 0

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait for admission."""
        active = {*(other.tenant for other in self.running), *self.waiting.tenants()}
        if seq.tenant not in active:
            self.fairness.activate(seq.tenant, active)
        self.waiting.push(seq)

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the next step and reserve its blocks. Mutates queues and the pool; may be empty when nothing fits."""
        step: list[ScheduledChunk] = []
        budget = self.config.max_prefill_tokens
        for seq in sorted(self.running, key=lambda seq: seq.seq_id):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted a moment ago for an older one
            num_tokens = seq.num_pending_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens and self._make_room(seq, seq.num_computed_tokens + num_tokens):
                step.append(ScheduledChunk(seq, num_tokens))
        self._admit(step, budget)
        return step

    def advance(self, chunk: ScheduledChunk) -> None:
        """Note that a chunk was computed, charge its tenant and make its rows reusable."""
        seq = chunk.seq
        decoding = not seq.is_prefilling
        seq.num_computed_tokens += chunk.num_tokens
        self.fairness.charge(seq.tenant, chunk.num_tokens * (FairnessCounters.OUTPUT_COST if decoding else 1))
        prompt_done = seq.num_computed_tokens == seq.num_prompt_tokens
        self.manager.commit(seq.seq_id, seq.token_ids, seq.num_computed_tokens, tail=prompt_done)

    def finish(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it stands, and give its blocks back.

        Args:
            seq: A waiting or running sequence; a finished one is left alone.
            keep: Whether what it computed may be reused.
        """
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.manager.close(seq.seq_id, seq.token_ids, seq.num_computed_tokens, keep=keep)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        while not self.manager.reserve(seq.seq_id, num_tokens):
            # Under its own ceiling a tenant can only make room for itself.
            pool_is_short = not self.manager.shares.is_limited_by_ceiling(seq.tenant)
            victims = [other for other in self.running if pool_is_short or other.tenant == seq.tenant]
            victim = max(victims, key=lambda other: other.seq_id)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        logger.debug("preempt seq=%d computed=%d", seq.seq_id, seq.num_computed_tokens)
        self.running.remove(seq)
        self.manager.close(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        seq.was_preempted = True
        self.waiting.push(seq, front=True)
        self.num_preemptions += 1

    def _admit(self, step: list[ScheduledChunk], budget: int) -> None:
        admitted = 0
        self.stuck = []
        full: set[str | None] = set()
        for seq in list(self.waiting.candidates()):
            if admitted == self.config.max_new_seqs_per_step or len(self.running) >= self.config.max_num_seqs:
                return
            if budget < 1:
                return
            if seq.tenant in full or self._is_led(seq):
                continue
            match = self.manager.match(seq.token_ids, seq.scopes)
            if self._find_leader(seq, match):
                continue
            num_tokens = min(len(seq.token_ids) - match.num_tokens, budget)
            shortage = self._find_shortage(seq, match, num_tokens)
            if shortage is _Shortage.POOL:
                return  # Nobody may pass the one that waits for room, or a long prompt would starve.
            if shortage is _Shortage.CEILING:
                full.add(seq.tenant)
                if not any(other.tenant == seq.tenant for other in self.running):
                    self.stuck.append(seq)
                continue
            cached = self.manager.open(seq.seq_id, match, seq.scopes, match.num_tokens + num_tokens)
            if cached is None:
                return
            self.waiting.remove(seq)
            self._start(seq, cached, match)
            # Where the pool was too small to copy the partial block, more is left to compute than the match promised.
            num_tokens = min(match.num_tokens + num_tokens - cached, budget)
            step.append(ScheduledChunk(seq, num_tokens))
            budget -= num_tokens
            admitted += 1

    def _start(self, seq: Sequence, num_cached: int, match: PrefixMatch) -> None:
        self.running.append(seq)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            seq.diverged = match.diverged
            seq.gone = self.manager.why_missing(seq.token_ids, seq.scopes, match)

    def _find_shortage(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> _Shortage | None:
        """Say what keeps a waiting sequence from getting its cached prefix and blocks for its first chunk."""
        manager = self.manager
        if not self.running:
            # It gets all there is; only a ceiling that was lowered, or pins, can be in its way.
            alone = manager.num_available(seq.tenant, match.nodes)
            if alone >= manager.blocks_for(match.num_tokens + num_tokens) - len(match.nodes):
                return None
            return _Shortage.CEILING if manager.shares.is_limited_by_ceiling(seq.tenant) else _Shortage.POOL
        # A preempted sequence asks for everything it lost, or it would be admitted and preempted again and again.
        target = len(seq.token_ids) if seq.was_preempted else match.num_tokens + num_tokens
        needed = manager.blocks_for(target) - len(match.nodes)
        keep = [*match.nodes, match.partial] if match.partial else match.nodes
        # A spare block is left for each running sequence; under a ceiling, for each of the same tenant.
        if manager.shares.room(seq.tenant, keep) < needed + len(self.running):
            return _Shortage.POOL
        own = sum(1 for other in self.running if other.tenant == seq.tenant)
        # Alone under its ceiling it gets all there is, also the block that it would have copied from.
        available = manager.num_available(seq.tenant, keep if own else match.nodes)
        return _Shortage.CEILING if available < needed + own else None

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
        for leader in self.running:
            if seq.num_waits == _MAX_WAITS or not leader.is_prefilling:
                continue
            readable = min(self.manager.shareable_prefix(leader.seq_id, seq.scopes), most)
            if readable - match.num_tokens < worthwhile:
                continue
            shared = min(common_prefix(leader.token_ids, seq.token_ids), readable)
            if shared - match.num_tokens >= worthwhile:
                seq.leader = leader
                seq.num_waits += 1
                return True
        return False
