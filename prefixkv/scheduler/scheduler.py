"""Who runs in the next step. Owns the sequences; asks the cache manager for room; never sees a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prefixkv.cache.manager import KVCacheManager
from prefixkv.config import SchedulerConfig
from prefixkv.scheduler.lane import Lane
from prefixkv.scheduler.request import Sequence
from prefixkv.scheduler.round import Round
from prefixkv.scheduler.rules import EqualRules, StepShare, TenantRules

__all__ = ["ScheduledChunk", "Scheduler", "Waiting"]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A step is a list of these: compute ``num_tokens`` more tokens of ``seq``."""

    seq: Sequence
    num_tokens: int


class Waiting:
    """What waits, over all lanes."""

    def __init__(self, lanes: Callable[[], list[Lane]]) -> None:
        self._lanes = lanes

    def __len__(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes())

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes():
            yield from lane.waiting

    def num_waiting(self, tenant: str | None) -> int:
        """Return how many sequences of a tenant wait."""
        return sum(lane.waiting.num_waiting(tenant) for lane in self._lanes())


class Scheduler:
    """Continuous batching with chunked prefill, fair between tenants and between the users of each.

    In each step every running reply gets its next token. Then the prefill budget is given out turn by turn, to running
    prompts and to new ones alike, to the least served tenant first; see :class:`~prefixkv.scheduler.round.Round`.
    Whoever is preempted is computed again later; see :class:`~prefixkv.scheduler.lane.Lane` for why all of them end.

    A strict tenant has a lane of its own with a fixed part of everything, as large as its part of the pool: the steps,
    the order and the refusals that it sees do not depend on others. The other tenants share one lane with what is
    left, whether strict ones use their parts or not. A step is what the lanes chose, one after the other. A lane ends
    when it is empty. A tenant whose policy becomes strict moves when it has nothing under way; one that ceases to be
    strict moves at once, with all that it has.

    Source: iteration-level scheduling (Orca), chunked prefill with separate budgets (Sarathi-Serve), preemption by
    recomputation (vLLM), token counters (VTC). Waiting for a prefix that another sequence is computing is ours.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, rules: TenantRules | None = None) -> None:
        self.config = config
        self.manager = manager
        self.rules: TenantRules = EqualRules() if rules is None else rules
        self.waiting = Waiting(self._all_lanes)
        self._whole = StepShare.whole(config)
        self._partitions: Mapping[str, int] = {}
        self._shares: dict[str, StepShare] = {}
        self._open = Lane(self._whole, manager, self.rules, is_strict=False)
        self._strict: dict[str, Lane] = {}
        self._ended_preemptions = 0

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, over all lanes."""
        return [seq for lane in self._all_lanes() for seq in lane.running]

    @property
    def stuck(self) -> list[Sequence]:
        """Waiting sequences that got no room in the last step though nothing was in their way that could end."""
        lanes = self._all_lanes()
        if not any(lane.stuck for lane in lanes):
            return []
        # Where a reload moved the borders, what runs in another lane may hold what is theirs now, until it ends.
        beyond = [lane for lane in lanes if (self._is_beyond_part(lane) if lane.running else lane.gave_way)]
        return [seq for lane in lanes if all(other is lane for other in beyond) for seq in lane.stuck]

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give way."""
        return self._ended_preemptions + sum(lane.num_preemptions for lane in self._all_lanes())

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return any(lane.has_work for lane in self._all_lanes())

    def lane_of(self, tenant: str | None) -> Lane:
        """Return where a tenant's next request goes; changes nothing that can be seen."""
        self._read_partitions()
        if tenant is None or tenant in self._open.fairness.tenants.active:
            return self._open
        lane = self._strict.get(tenant)
        if lane is None and tenant in self._shares:
            return Lane(self._shares[tenant], self.manager, self.rules, is_strict=True)
        return lane or self._open

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait for admission."""
        lane = self.lane_of(seq.tenant)
        lane.add(seq)
        if lane.is_strict and seq.tenant is not None:
            self._strict[seq.tenant] = lane

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the next step and reserve its blocks. Mutates queues and the pool; may be empty when nothing fits."""
        self._read_partitions()
        step: list[ScheduledChunk] = []
        for lane in self._all_lanes():
            Round(lane, lane.begin_step()).run()
            step.extend(ScheduledChunk(seq, num_tokens) for seq, num_tokens in lane.step.items())
        return step

    def advance(self, chunk: ScheduledChunk) -> int:
        """Note that a chunk was computed and make its rows reusable.

        Returns:
            Tokens to count for the tenant's rate: prompt tokens computed and tokens generated, each once, however
            often a preemption made it be computed.
        """
        seq = chunk.seq
        seq.num_computed_tokens += chunk.num_tokens
        self.manager.commit(
            seq.seq_id, seq.token_ids, seq.num_computed_tokens, tail=seq.num_computed_tokens == seq.num_prompt_tokens
        )
        # The last row of a prompt, and each one behind it, yields a token.
        reached = seq.num_computed_tokens + (seq.generates and not seq.is_prefilling)
        new = max(0, reached - seq.num_billed_tokens)
        seq.num_billed_tokens += new
        return new

    def finish(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it stands, and give its blocks back.

        Args:
            seq: A waiting or running sequence; a finished one is left alone.
            keep: Whether what it computed may be reused.
        """
        lane = self._lane_with(seq)
        lane.finish(seq, keep=keep)
        if lane.is_strict and not lane.has_work and seq.tenant is not None:
            self._ended_preemptions += lane.num_preemptions
            self._strict.pop(seq.tenant, None)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits in front of its line and is computed again later."""
        self._lane_with(seq).preempt(seq)

    def _lane_with(self, seq: Sequence) -> Lane:
        lane = self._strict.get(seq.tenant) if seq.tenant is not None else None
        return lane or self._open

    def _all_lanes(self) -> list[Lane]:
        return [self._open, *self._strict.values()]

    def _is_beyond_part(self, lane: Lane) -> bool:
        """Return whether the tenants of a lane hold more than is theirs beside the other lanes' partitions."""
        pool, idle, parts = self.manager.pool, self.manager.idle, self._partitions
        if lane.is_strict:
            tenant = lane.running[0].tenant
            mine: dict[str | None, int] = {tenant: pool.owned_blocks.get(tenant, 0)}
            most = 0
        else:
            mine = {tenant: owned for tenant, owned in pool.owned_blocks.items() if tenant not in self._strict}
            most = pool.num_blocks - sum(parts.values())
        held = 0
        for tenant, owned in mine.items():
            floor = 0 if tenant is None else self.rules.floor_blocks(tenant)
            part = 0 if tenant is None else parts.get(tenant, 0)
            held += max(0, max(owned - idle.num_idle(tenant), min(owned, floor)) - part)
        return held > most

    def _read_partitions(self) -> None:
        """Share the step out anew where policies changed."""
        partitions = self.rules.partitions()
        if partitions is self._partitions:
            return
        self._partitions = partitions
        total = self.manager.pool.num_blocks
        self._shares = {tenant: self._whole.part(blocks, total) for tenant, blocks in partitions.items()}
        self._open.take_share(self._whole.without(self._shares.values()))
        for tenant, lane in list(self._strict.items()):
            if tenant in self._shares:
                lane.take_share(self._shares[tenant])
            else:
                # Without a partition it would stand behind all others for what they leave.
                self._open.absorb(lane)
                self._ended_preemptions += lane.num_preemptions
                del self._strict[tenant]
