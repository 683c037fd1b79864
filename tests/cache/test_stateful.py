"""Random lives of a pool: whatever happens, in whatever order, what is found is what was committed, and by whom.

Two machines. One drives the real scheduler, the way the engine does. The other calls the manager directly, with texts
that a model would never produce: replies that run into each other's blocks, tails at any moment, pins of anything.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixkv.cache.retire import demote_scope, expire
from prefixkv.cache.scopes import ScopeMap
from prefixkv.scheduler.request import Sequence as Seq
from prefixkv.scheduler.request import SequenceStatus
from prefixkv.scope import Principal, Scope, ScopeLevel
from tests.cache.fakes import REQUEST, SESSION, TENANT, USER, Pool
from tests.cache.oracle import WatchedManager
from tests.scheduler.loop import Loop, cold_reply

TENANTS = ("a", "b", "c")
MAX_TOKENS = 60
# One of them asks often, and often sends what was sent before: where nothing meets, nothing goes wrong.
principals = st.one_of(
    st.just(Principal("a", "u", "s")),
    st.builds(Principal, st.sampled_from(TENANTS), st.sampled_from(("u", "v")), st.sampled_from(("s", "t"))),
)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
numbers = st.integers(0, 9)
cuts = st.one_of(st.just(99), st.integers(0, 40))
levels = st.sampled_from((TENANT, USER, SESSION, REQUEST))
# Spans that many requests have in common, as one template's have, or anything.
spans = st.one_of(
    st.sampled_from((((0, SESSION),), ((0, TENANT), (3, SESSION)), ((0, TENANT), (4, USER), (6, SESSION)))),
    st.lists(st.tuples(st.integers(0, 20), levels), min_size=1, max_size=4).map(
        lambda items: [(0, TENANT), *sorted(items)]
    ),
)
identities = st.tuples(*(st.sampled_from((None, *names)) for names in (TENANTS, ("u", "v"), ("s", "t"))))
sizes = st.sampled_from((1, 2, 3, 4))


class Machine(RuleBasedStateMachine):
    """What both machines do: read, pin, put pressure on the pool, let an allocation fail."""

    pool: Pool
    manager: WatchedManager
    history: list[list[int]]

    def text_like(self, number: int, cut: int, extra: list[int]) -> list[int]:
        """An earlier text up to some token, then something of its own."""
        base = self.history[-1 - number % len(self.history)] if self.history else []
        return [*base[:cut], *extra][:MAX_TOKENS]

    @rule(who=principals, number=numbers, cut=cuts, extra=texts, spans=spans)
    def look_up(self, who: Principal, number: int, cut: int, extra: list[int], spans: list[tuple[int, int]]) -> None:
        """The watched manager compares the match with the oracle."""
        self.manager.match(self.text_like(number, cut, extra), ScopeMap.for_principal(who, spans))

    @rule(tenant=st.sampled_from((None, *TENANTS)), blocks=st.integers(1, 64))
    def press(self, tenant: str | None, blocks: int) -> None:
        """Somebody takes blocks for something else and gives them back; what was idle may be gone."""
        scopes = ScopeMap.for_publication(tenant)
        blocks = min(blocks, self.manager.num_available(tenant))
        tokens = [9] * (blocks * self.manager.block_size + 1)
        if blocks and self.manager.open(-1, self.manager.match(tokens, scopes), scopes, len(tokens) - 1) is not None:
            assert self.manager.num_available(tenant) >= 0
            self.manager.close(-1, (), 0, keep=False)

    @rule(calls=st.integers(0, 5))
    def let_an_allocation_fail(self, calls: int) -> None:
        self.manager.pool.fail_in = calls

    @rule(who=principals)
    def end_session(self, who: Principal) -> None:
        demote_scope(self.manager, Scope.of(who, SESSION))

    @precondition(lambda self: self.manager.pins)
    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        pins = sorted(self.manager.pins)
        self.manager.unpin(pins[number % len(pins)])

    @invariant()
    def every_promise_holds(self) -> None:
        self.pool.carry_out()
        self.pool.check()
        manager = self.manager
        for blocks in manager.sequences.values():
            for block_id in blocks.block_table:
                node = manager.index.node_of(block_id)
                assert node is None or node.scope in blocks.scopes.reach, "a foreign block in a table"
                assert manager.pool.owner(block_id) in (None, blocks.scopes.tenant)
        used = {block_id for blocks in manager.sequences.values() for block_id in blocks.block_table}
        used |= {node.block_id for nodes in manager.pins.values() for node in nodes}
        idle = {node.block_id for node in manager.idle}
        assert not used & idle
        assert len(used) + len(idle) + manager.pool.num_free == manager.pool.num_blocks

    def empty(self) -> None:
        """Purge everything: nothing may be left, not even a row."""
        self.manager.pool.fail_in = None
        self.manager.purge(None, None, None)
        self.pool.carry_out()
        self.pool.check()
        assert self.manager.pool.num_free == self.manager.pool.num_blocks
        assert not self.manager.pool.owned_blocks


class Serving(Machine):
    """The real scheduler over a small pool, with the limits that the engine sets."""

    @initialize(
        block_size=sizes,
        num_blocks=st.integers(8, 64),
        ceilings=st.dictionaries(st.sampled_from(TENANTS), st.integers(4, 20), max_size=2),
        max_num_seqs=st.integers(1, 6),
        max_prefill_tokens=st.integers(1, 24),
        max_new_seqs_per_step=st.integers(1, 3),
    )
    def begin(self, block_size: int, num_blocks: int, ceilings: dict[str, int], **config: int) -> None:
        self.loop = Loop(num_blocks, block_size, ceiling=ceilings.get, make=WatchedManager, **config)
        self.pool, self.ceilings = self.loop.pool, ceilings
        assert isinstance(self.loop.manager, WatchedManager)
        self.manager = self.loop.manager
        if ceilings:
            self.manager.oracle.is_lossless = False
        self.history = []
        self.ended_early: set[Seq] = set()

    def blocks_of(self, seq: Seq) -> int:
        return self.manager.blocks_for(max(seq.num_prompt_tokens, seq.max_tokens_total - 1))

    def num_pinned(self, tenant: str) -> int:
        pinned = self.manager.pinned_nodes()
        return sum(self.manager.pool.owner(node.block_id) == tenant for node in pinned)

    def room(self, tenant: str | None) -> int:
        """Blocks that a tenant can count on when all that is published or will be is pinned."""
        room = self.manager.pool.num_blocks
        coming = [seq for seq in self.loop.live if not seq.generates]
        left = room - len(self.manager.pinned_nodes()) - sum(map(self.blocks_of, coming))
        if tenant is not None and tenant in self.ceilings:
            own = sum(self.blocks_of(seq) for seq in coming if seq.tenant == tenant)
            left = min(left, self.ceilings[tenant] - self.num_pinned(tenant) - own)
        return left

    @rule(
        who=principals,
        number=numbers,
        cut=cuts,
        extra=texts,
        spans=spans,
        max_new=st.integers(1, 12),
        copies=st.sampled_from((1, 1, 1, 3)),
    )
    def submit(
        self,
        who: Principal,
        number: int,
        cut: int,
        extra: list[int],
        spans: list[tuple[int, int]],
        max_new: int,
        copies: int,
    ) -> None:
        prompt = self.text_like(number, cut, extra)
        if self.manager.blocks_for(len(prompt) + max_new - 1) > self.room(who.tenant):
            return
        inside = [(start, level) for start, level in spans if start < len(prompt)]
        for _ in range(copies):
            seq = self.loop.submit(who.tenant, prompt, max_new, who=who, spans=inside)
            self.history.append(seq.token_ids)

    @rule(tenant=st.sampled_from((None, *TENANTS)), number=numbers, cut=cuts, extra=texts)
    def publish(self, tenant: str | None, number: int, cut: int, extra: list[int]) -> None:
        prompt = self.text_like(number, cut, extra)
        needed = self.manager.blocks_for(len(prompt))
        others = [seq for seq in self.loop.live if seq.generates]
        largest = max(map(self.blocks_of, others), default=1)
        own = max((self.blocks_of(seq) for seq in others if seq.tenant == tenant), default=1)
        if needed + largest <= self.room(None) and needed + own <= self.room(tenant):
            self.history.append(self.loop.publish(prompt, tenant).token_ids)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.loop.step()

    @precondition(lambda self: self.loop.live)
    @rule(number=numbers, keep=st.booleans())
    def cancel(self, number: int, keep: bool) -> None:
        seq = self.loop.live[number % len(self.loop.live)]
        self.loop.scheduler.finish(seq, keep=keep)
        self.ended_early.add(seq)

    @precondition(lambda self: self.loop.scheduler.running)
    @rule(number=numbers)
    def preempt(self, number: int) -> None:
        running = self.loop.scheduler.running
        self.loop.scheduler.preempt(running[number % len(running)])

    @rule()
    def fail_a_forward(self) -> None:
        """Rows may be half written; none of them is kept."""
        for chunk in self.loop.schedule():
            seq = chunk.seq
            self.pool.storage.compute(
                self.manager.block_table(seq.seq_id), seq.num_computed_tokens, [7] * (chunk.num_tokens // 2)
            )
            self.loop.scheduler.finish(seq, keep=False)
            self.ended_early.add(seq)

    @rule(identity=identities)
    def purge(self, identity: tuple[str | None, str | None, str | None]) -> None:
        tenant, user, session = identity
        for seq in self.loop.live:
            own = seq.scopes.reach[-1]
            of_publication = user is None and session is None and tenant in (None, seq.tenant)
            if own.is_within(tenant, user, session) or (not seq.generates and of_publication):
                self.loop.scheduler.finish(seq)
                self.ended_early.add(seq)
        self.manager.purge(tenant, user, session)

    @invariant()
    def every_sequence_has_its_own_rows(self) -> None:
        self.loop.check()

    def teardown(self) -> None:
        """All that was accepted ends, with the reply it gives on an empty engine."""
        if not hasattr(self, "loop"):
            return
        self.manager.pool.fail_in = None
        self.loop.run()
        self.loop.check()
        for seq in self.loop.sequences:
            assert seq.status is SequenceStatus.FINISHED
            if seq.generates and seq not in self.ended_early:
                prompt = seq.token_ids[: seq.num_prompt_tokens]
                assert self.loop.reply(seq) == cold_reply(prompt, seq.max_tokens_total - len(prompt))
        self.empty()


class Bookkeeping(Machine):
    """The manager alone, called in every order that its methods allow."""

    @initialize(
        block_size=sizes,
        num_blocks=st.integers(8, 64),
        floors=st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 2), max_size=2),
        strict=st.booleans(),
        lifetimes=st.dictionaries(levels, st.tuples(*[st.one_of(st.none(), st.integers(1, 9))] * 2), max_size=2),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: int,
        floors: dict[str, int],
        strict: bool,
        lifetimes: dict[ScopeLevel, tuple[float | None, float | None]],
    ) -> None:
        partitions = dict(list(floors.items())[:1]) if strict else {}
        self.now_s, self.lifetimes = 0.0, lifetimes
        self.pool = Pool(
            num_blocks,
            block_size,
            make=WatchedManager,
            ceiling=partitions.get,
            floors=lambda: floors,
            partitions=lambda: partitions,
            lifetime=lambda scope: lifetimes.get(scope.level, (None, None)) if scope.tenant else (None, None),
            clock=lambda: self.now_s,
        )
        assert isinstance(self.pool.manager, WatchedManager)
        self.manager = self.pool.manager
        self.history = []
        self.open: dict[int, tuple[list[int], int, ScopeMap]] = {}

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        """What is past its time cannot be found, unless it is pinned."""
        self.now_s += seconds
        if expire(self.manager):
            self.manager.oracle.is_lossless = False
        pinned = {node for nodes in self.manager.pins.values() for node in nodes}
        for node in set(self.manager.index) - pinned:
            assert node.scope is not None
            idle_s, absolute_s = (
                self.lifetimes.get(node.scope.level, (None, None)) if node.scope.tenant else (None, None)
            )
            assert idle_s is None or self.now_s < node.used_s + idle_s
            assert absolute_s is None or self.now_s < node.created_s + absolute_s

    def pick(self, number: int) -> tuple[int, list[int], int, ScopeMap]:
        seq_id = sorted(self.open)[number % len(self.open)]
        return seq_id, *self.open[seq_id]

    @rule(
        who=st.one_of(principals, st.sampled_from((None, *TENANTS))),
        number=numbers,
        cut=cuts,
        extra=texts,
        spans=spans,
    )
    def open_one(
        self, who: Principal | str | None, number: int, cut: int, extra: list[int], spans: list[tuple[int, int]]
    ) -> None:
        text = self.text_like(number, cut, extra)
        scopes = ScopeMap.for_principal(who, spans) if isinstance(who, Principal) else ScopeMap.for_publication(who)
        free, idle = self.manager.pool.num_free, len(self.manager.idle)
        opened = self.pool.open(text, scopes)
        if opened is None:
            assert self.manager.pool.num_free + len(self.manager.idle) == free + idle, "a refusal took something"
            return
        seq_id, cached = opened
        self.open[seq_id] = (text, cached, scopes)
        self.history.append(text)

    @precondition(lambda self: self.open)
    @rule(number=numbers, tokens=st.integers(0, 9), tail=st.booleans())
    def compute(self, number: int, tokens: int, tail: bool) -> None:
        seq_id, text, computed, scopes = self.pick(number)
        end = min(len(text), computed + tokens)
        self.pool.compute(seq_id, text, computed, end, tail=tail)
        self.open[seq_id] = (text, end, scopes)

    @precondition(lambda self: self.open)
    @rule(number=numbers, tokens=texts, tail=st.booleans())
    def go_on(self, number: int, tokens: list[int], tail: bool) -> None:
        """Any tokens may follow, also those that another sequence has in the same place."""
        seq_id, text, computed, scopes = self.pick(number)
        before = len(self.manager.block_table(seq_id))
        if not self.manager.reserve(seq_id, len(text) + len(tokens)):
            assert len(self.manager.block_table(seq_id)) == before, "a refusal took something"
            return
        self.pool.carry_out()
        text.extend(tokens)
        self.pool.compute(seq_id, text, computed, len(text), tail=tail)
        self.open[seq_id] = (text, len(text), scopes)

    @precondition(lambda self: self.open)
    @rule(number=numbers, keep=st.booleans())
    def close(self, number: int, keep: bool) -> None:
        seq_id, text, computed, _ = self.pick(number)
        self.pool.close(seq_id, text, computed, keep=keep)
        del self.open[seq_id]

    @precondition(lambda self: self.history)
    @rule(who=st.one_of(principals, st.sampled_from((None, *TENANTS))), number=numbers, cut=st.integers(1, 40))
    def pin(self, who: Principal | str | None, number: int, cut: int) -> None:
        scopes = (
            ScopeMap.for_principal(who, ((0, SESSION),))
            if isinstance(who, Principal)
            else ScopeMap.for_publication(who)
        )
        self.manager.pin(self.text_like(number, cut, [0])[:cut], scopes)

    @rule(identity=identities)
    def purge(self, identity: tuple[str | None, str | None, str | None]) -> None:
        tenant, user, session = identity
        for seq_id, (text, computed, scopes) in list(self.open.items()):
            who = scopes.reach[-1]
            publication = user is None and session is None and tenant in (None, scopes.tenant)
            if who.is_within(tenant, user, session) or (who.level <= TENANT and publication):
                self.pool.close(seq_id, text, computed)
                del self.open[seq_id]
        self.manager.purge(tenant, user, session)

    @invariant()
    def every_sequence_has_its_own_rows(self) -> None:
        for seq_id, (text, computed, _) in self.open.items():
            rows = self.pool.storage.read(self.manager.block_table(seq_id), computed)
            assert rows == [tuple(text[:end]) for end in range(1, computed + 1)]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for seq_id, (text, computed, _) in self.open.items():
            self.pool.close(seq_id, text, computed)
        self.empty()


Serving.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
Bookkeeping.TestCase.settings = settings(max_examples=250, stateful_step_count=30)
TestServing = Serving.TestCase
TestBookkeeping = Bookkeeping.TestCase


@pytest.mark.slow
class TestServingForLong(Serving.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60)


@pytest.mark.slow
class TestBookkeepingForLong(Bookkeeping.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60)
