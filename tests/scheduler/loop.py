"""The engine's loop without a model: schedule, move rows, compute, advance, draw the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.scopes import ScopeMap
from prefixkv.config import SchedulerConfig
from prefixkv.scheduler.request import Sequence as Seq
from prefixkv.scheduler.request import SequenceStatus
from prefixkv.scheduler.scheduler import ScheduledChunk, Scheduler
from prefixkv.scope import Principal
from tests.cache.fakes import SESSION, Pool, Spans, prefixes


def next_token(row: Sequence[int]) -> int:
    """The fake model: one of four tokens, decided by all tokens before it."""
    return hash(tuple(row)) >> 5 & 3


def cold_reply(prompt: Sequence[int], max_new: int) -> list[int]:
    """What a request is answered when nothing else ever ran."""
    tokens = list(prompt)
    for _ in range(max_new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Rules:
    """What the scheduler asks about tenants, in mappings; who is not in one is like everybody."""

    def __init__(
        self,
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        priority: Mapping[str, int] | None = None,
        max_running: Mapping[str, int] | None = None,
        floors: Mapping[str, int] | None = None,
        partitions: Mapping[str, int] | None = None,
    ) -> None:
        self.weight = weight
        self.priorities = {} if priority is None else priority
        self.most_running = {} if max_running is None else max_running
        self.floors = {} if floors is None else floors
        self.strict = {} if partitions is None else partitions

    def priority(self, tenant: str) -> int:
        return self.priorities.get(tenant, 0)

    def max_running(self, tenant: str) -> int | None:
        return self.most_running.get(tenant)

    def floor_blocks(self, tenant: str) -> int:
        return self.strict.get(tenant, self.floors.get(tenant, 0))

    def partitions(self) -> Mapping[str, int]:
        return self.strict


class Loop:
    """A scheduler over a :class:`Pool`; each step checks that every row it reads is the right one."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        ceiling: Callable[[str], int | None] = lambda tenant: None,
        make: type[KVCacheManager] = KVCacheManager,
        rules: Rules | None = None,
        **config: int,
    ) -> None:
        rules = rules or Rules(weight=weight)
        self.pool = Pool(
            num_blocks,
            block_size,
            weight=rules.weight,
            ceiling=lambda tenant: rules.strict.get(tenant, ceiling(tenant)),
            make=make,
            floors=lambda: {**rules.floors, **rules.strict},
            partitions=rules.partitions,
        )
        self.manager = self.pool.manager
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.config, self.manager, rules)
        self.sequences: list[Seq] = []
        self.pins: dict[int, Seq] = {}
        self.computed_tokens = 0

    @property
    def live(self) -> list[Seq]:
        return [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]

    def submit(
        self,
        tenant: str,
        prompt: Sequence[int],
        max_new: int = 1,
        *,
        who: Principal | None = None,
        spans: Spans = ((0, SESSION),),
    ) -> Seq:
        scopes = ScopeMap.for_principal(who or Principal(tenant, "u", "s"), spans)
        return self._add(Seq(len(self.sequences), list(prompt), len(prompt), scopes, len(prompt) + max_new))

    def publish(self, prompt: Sequence[int], tenant: str | None = None) -> Seq:
        scopes = ScopeMap.for_publication(tenant)
        return self._add(Seq(len(self.sequences), list(prompt), len(prompt), scopes, len(prompt), generates=False))

    def _add(self, seq: Seq) -> Seq:
        self.sequences.append(seq)
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> list[ScheduledChunk]:
        chunks = self.scheduler.schedule()
        self.pool.carry_out()
        return chunks

    def step(self) -> list[ScheduledChunk]:
        chunks = self.schedule()
        for chunk in chunks:
            seq, table = chunk.seq, self.manager.block_table(chunk.seq.seq_id)
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens
            assert self.pool.storage.read(table, start) == prefixes(seq.token_ids[:start])
            self.pool.storage.compute(table, start, seq.token_ids[start:end])
            self.computed_tokens += chunk.num_tokens
        for chunk in chunks:
            self._after(chunk)
        self.pool.carry_out()
        return chunks

    def _after(self, chunk: ScheduledChunk) -> None:
        seq = chunk.seq
        self.scheduler.advance(chunk)
        if seq.num_pending_tokens:
            return
        if not seq.generates:
            self.scheduler.finish(seq)
            self.pins[self.manager.pin(seq.token_ids, seq.scopes)] = seq
            return
        rows = self.pool.storage.read(self.manager.block_table(seq.seq_id), seq.num_computed_tokens)
        seq.token_ids.append(next_token(rows[-1] or ()))
        if len(seq.token_ids) == seq.max_tokens_total:
            self.scheduler.finish(seq)

    def run(self, max_steps: int = 2000) -> int:
        """Step until nothing is left; return the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            assert self.step(), "sequences are left and none of them can run"
        raise AssertionError(f"{len(self.live)} sequences are still not done after {max_steps} steps")

    def reply(self, seq: Seq) -> list[int]:
        return seq.token_ids[seq.num_prompt_tokens :]

    def check(self) -> None:
        """What must hold between any two steps."""
        self.pool.check()
        running = {seq.seq_id for seq in self.scheduler.running}
        assert running == set(self.manager.sequences)
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.live)
        for seq in self.scheduler.running:
            table = self.manager.block_table(seq.seq_id)
            rows = self.pool.storage.read(table, len(table) * self.manager.block_size)
            assert rows[: seq.num_computed_tokens] == prefixes(seq.token_ids[: seq.num_computed_tokens])
            # A masked row of a former owner still spoils the sum if it holds a NaN.
            assert not any(rows[seq.num_computed_tokens :])
