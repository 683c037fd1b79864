"""One step, and what happens when a step fails. Runs on the engine thread only."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from prefixkv.cache.keys import ScopeKeys
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.retire import demote_scope, destroy_scopes, discard, expire, purge, shrink
from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.table import CopyRows
from prefixkv.chat.explain import CacheReport, build_report
from prefixkv.chat.recall import Recall
from prefixkv.chat.segment import Prompt
from prefixkv.config import EngineConfig
from prefixkv.engine.limits import Limits, PoliciesInForce, TenantLimits
from prefixkv.engine.live import LiveRequest, Reply
from prefixkv.engine.narrowing import narrow, withdraw
from prefixkv.engine.result import Publication, PurgeReceipt
from prefixkv.engine.snapshot import engine_stats, tenant_stats
from prefixkv.errors import ContextOverflow, ExecutionError, IntegrityError, QueueFull, QuotaExceeded
from prefixkv.measure.metrics import EngineStats, Metrics, TenantStats
from prefixkv.model.batch import Chunk
from prefixkv.model.runner import ModelRunner
from prefixkv.model.sampler import sample
from prefixkv.policy import PolicySet
from prefixkv.scheduler.request import Sequence as ScheduledSequence
from prefixkv.scheduler.scheduler import ScheduledChunk, Scheduler
from prefixkv.scope import Principal, Scope, ScopeLevel

__all__ = ["EngineCore"]

logger = logging.getLogger("prefixkv.engine")


class EngineCore:
    """Joins scheduler, cache manager and runner into :meth:`step`.

    Args:
        runner: The model and its pool.
        manager: Bookkeeping of that pool.
        scheduler: Chooses steps.
        limits: Decides what is refused.
        policies: The policies in force.
        recall: What was sent before.
        debug: Check every invariant whenever nothing runs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: KVCacheManager,
        scheduler: Scheduler,
        limits: Limits,
        policies: PoliciesInForce,
        recall: Recall,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.manager = manager
        self.scheduler = scheduler
        self.metrics = Metrics()
        self.limits = limits
        self.recall = recall
        self._policies = policies
        self._debug = debug
        self._live: dict[ScheduledSequence, tuple[LiveRequest, Reply]] = {}
        self._publications: dict[str, int] = {}
        self._num_published: Counter[str | None] = Counter()

    @classmethod
    def assemble(
        cls,
        runner: ModelRunner,
        fingerprint: bytes,
        config: EngineConfig,
        policies: PoliciesInForce,
        clock: Callable[[], float] = time.monotonic,
    ) -> EngineCore:
        """Make a core with all its parts.

        Args:
            runner: The model and its pool.
            fingerprint: Of the model and its tokenizer.
            config: Of the engine.
            policies: The policies in force.
            clock: Seconds that only grow, for what expires.

        Raises:
            PolicyError: If the policies do not fit the pool.
        """
        _check_fits(policies.get(), runner)
        block_size = config.cache.block_size
        tenants = TenantLimits(policies, runner.num_blocks, block_size, runner.spec.bytes_per_block)
        keys = ScopeKeys(config.secret or secrets.token_bytes(32), fingerprint + b"|" + runner.pool_key)
        manager = KVCacheManager(
            runner.num_blocks, block_size, keys, weight=tenants.weight, ceiling=tenants.ceiling_blocks,
            floors=tenants.floors, partitions=tenants.partitions, lifetime=tenants.lifetime, clock=clock,
        )  # fmt: skip
        scheduler = Scheduler(config.scheduler, manager, tenants)
        limits, recall = Limits(tenants, manager, scheduler, clock), Recall(lifetime=tenants.lifetime, clock=clock)
        return cls(runner, manager, scheduler, limits, policies, recall, config.debug)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is a step to run."""
        return self.scheduler.has_work

    def add(self, request: LiveRequest) -> None:
        """Accept a request, or hand its sink the reason why not."""
        try:
            self.limits.check_queue(request)
            self.limits.check_rate(request)
            self.limits.shorten(request, self._live)
            self.limits.check_room(request, self._live)
        except (QueueFull, QuotaExceeded, ContextOverflow) as error:
            request.sink(error)
            return
        if request.tenant is not None:
            narrow(self.manager, request, self._policies.of(request.tenant))  # it may have been made before a reload
        for reply in request.replies:
            self._live[reply.seq] = (request, reply)
            self.scheduler.add(reply.seq)

    def abort(self, request: LiveRequest) -> None:
        """End a request wherever it stands; what it computed stays reusable. A finished one is left alone."""
        open_replies = [reply for reply in request.replies if reply.seq in self._live]
        for reply in open_replies:
            self._release(reply)
        for reply in open_replies:
            request.end(reply, "abort")
        if open_replies:
            self._count(request, aborted=1)
            self._run_ops()

    def fail(self, request: LiveRequest, error: Exception) -> None:
        """End a request with an error; rows of its unfinished blocks are not kept."""
        for reply in request.replies:
            if reply.seq in self._live:
                self._release(reply, keep=False)
        self.metrics.add(request.tenant, failed=1)
        request.sink(error)

    def abandon(self, error: Exception) -> None:
        """Tell every live request that the engine has ended. The books may be what broke, so they are left alone."""
        requests = dict.fromkeys(request for request, _ in self._live.values())
        self._live = {}
        for request in requests:
            request.sink(error)

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one iteration: schedule, move rows, one forward, sample, deliver."""
        self._time_out(time.monotonic())
        shrink(self.manager)
        chunks = self.scheduler.schedule()
        self._fail_stuck()
        self._run_ops()
        if not chunks:
            return
        self._mark_scheduled(chunks)
        batch = [
            Chunk(
                token_ids=chunk.seq.token_ids[chunk.seq.num_computed_tokens :][: chunk.num_tokens],
                start=chunk.seq.num_computed_tokens,
                block_table=self.manager.block_table(chunk.seq.seq_id),
                needs_logits=chunk.seq.generates and chunk.num_tokens == chunk.seq.num_pending_tokens,
            )
            for chunk in chunks
        ]
        try:
            logits = self.runner.execute(batch)
        except Exception as error:
            self._fail_batch(chunks, error)
            return
        self.metrics.steps += 1
        for chunk in chunks:
            self.limits.count(chunk.seq.tenant, self.scheduler.advance(chunk))
        ready = [chunk.seq for chunk, part in zip(chunks, batch, strict=True) if part.needs_logits]
        self._sample(ready, logits)
        for chunk in chunks:
            if not chunk.seq.generates and not chunk.seq.is_prefilling:
                self._finish_publication(*self._live[chunk.seq])
        self._run_ops()
        if self._debug and not self.has_work:
            self.check()

    def use_idle_time(self) -> bool:
        """Do a millisecond of what can wait; return whether there is more of it. Changes no result."""
        return self.runner.storage.commit_more()

    def _sample(self, seqs: Sequence[ScheduledSequence], logits: torch.Tensor) -> None:
        pairs = [self._live[seq] for seq in seqs]
        if not pairs:
            return
        tokens = sample(logits, [reply.sampler for _, reply in pairs])
        for row, ((request, reply), token) in enumerate(zip(pairs, tokens, strict=True)):
            if reply.seq not in self._live:
                continue  # another reply of the same request failed in this step
            if isinstance(token, ExecutionError):
                self.fail(request, token)
                if not logits[row].max().isfinite():
                    # Its rows are indexed already; the next request with this prefix would fail as well.
                    discard(self.manager, reply.seq.token_ids, reply.seq.scopes)
                continue
            try:
                request.append(reply, token)
            except Exception as cause:  # such as a tokenizer that cannot decode every id the model has
                self.fail(request, _failed("turning tokens into text", cause))
                continue
            if reply.finish_reason is not None:
                self._release(reply)
                if request.is_done:
                    self._count(request)

    def _fail_batch(self, chunks: Sequence[ScheduledChunk], cause: Exception) -> None:
        logger.error("a forward of %d sequences failed: %s", len(chunks), type(cause).__name__)
        for request in dict.fromkeys(self._live[chunk.seq][0] for chunk in chunks):
            self.fail(request, _failed("the forward pass", cause))
        self._run_ops()

    def _fail_stuck(self) -> None:
        """Fail what waits for room that its tenant, or a pool where nothing runs, will not have."""
        for seq in self.scheduler.stuck:
            if seq in self._live:
                self.fail(self._live[seq][0], QuotaExceeded("the request no longer fits the room that is left for it"))

    def _time_out(self, now: float) -> None:
        # In order of arrival, not of a set: what is aborted first is evicted first.
        requests = dict.fromkeys(request for request, _ in self._live.values() if request.deadline_s is not None)
        for request in requests:
            if request.deadline_s is not None and now >= request.deadline_s:
                self.abort(request)

    def _mark_scheduled(self, chunks: Sequence[ScheduledChunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            request, _ = self._live[chunk.seq]
            request.scheduled_s = request.scheduled_s or now

    def _release(self, reply: Reply, *, keep: bool = True) -> None:
        del self._live[reply.seq]
        self.scheduler.finish(reply.seq, keep=keep)

    def _count(self, request: LiveRequest, aborted: int = 0) -> None:
        usage = request.usage()
        self.metrics.add(
            request.tenant,
            requests=1,
            aborted=aborted,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.computed_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _run_ops(self) -> None:
        storage = self.runner.storage
        for op in self.manager.take_ops():
            if isinstance(op, CopyRows):
                storage.copy_rows(op.source, op.target, op.rows)
            else:
                storage.zero(op.block_ids)

    # -- cache control ---------------------------------------------------------------------------------------------

    def explain(self, prompt: Prompt, scopes: ScopeMap, principal: Principal) -> CacheReport:
        """Report what of a prompt would hit now. Does not mutate."""
        match = self.manager.match(prompt.token_ids, scopes)
        gone = self.manager.why_missing(prompt.token_ids, scopes, match)
        losses = self.recall.losses(principal, counts=False)
        return build_report(prompt, match.num_tokens, match.diverged, gone, losses)

    def _finish_publication(self, request: LiveRequest, reply: Reply) -> None:
        seq = reply.seq
        self._release(reply)  # before: then there is room for a block of its own
        pin = self.manager.pin(seq.token_ids, seq.scopes)
        # Counted by tenant: a number that all share would tell how much others publish.
        self._num_published[seq.tenant] += 1
        handle = f"pub-{self._num_published[seq.tenant]}" + ("" if seq.tenant is None else f"@{seq.tenant}")
        self._publications[handle] = pin
        blocks = len(self.manager.pins[pin])
        request.sink(Publication(handle, len(seq.token_ids), blocks, blocks * self.runner.spec.bytes_per_block))

    def unpublish(self, handle: str) -> bool:
        """Let a publication's blocks fall idle; return whether there was one."""
        pin = self._publications.pop(handle, None)
        if pin is None or pin not in self.manager.pins:
            return False
        self.manager.unpin(pin)
        return True

    def purge(self, tenant: str | None, user: str | None, session: str | None) -> PurgeReceipt:
        """Abort an identity's requests, destroy its blocks and overwrite them with zeros."""
        doomed = dict.fromkeys(r for r, _ in self._live.values() if _is_of(r, tenant, user, session))
        for request in doomed:
            self.abort(request)
        self.recall.forget(tenant, user, session)
        blocks, tokens = purge(self.manager, tenant, user, session)
        self._publications = {k: v for k, v in self._publications.items() if v in self.manager.pins}
        self._run_ops()
        return PurgeReceipt(blocks, tokens, blocks * self.runner.spec.bytes_per_block, len(doomed))

    def end_session(self, principal: Principal) -> int:
        """Make a session's idle blocks the first to be evicted; return how many there are.

        Under zero retention they are destroyed, and what of the session still runs is aborted.
        """
        scope = Scope.of(principal, ScopeLevel.SESSION)
        self.recall.forget_scopes(lambda other: other == scope)
        if not self._policies.of(principal.tenant).zero_retention:
            return demote_scope(self.manager, scope)
        for request in dict.fromkeys(r for r, _ in self._live.values() if r.principal == principal):
            self.abort(request)
        blocks = destroy_scopes(self.manager, lambda other: other == scope)
        self._run_ops()
        return blocks

    def sweep(self) -> None:
        """Destroy what is past its time, or beyond its partition."""
        if any([expire(self.manager), shrink(self.manager)]):
            self._run_ops()
        self.recall.sweep()

    def next_sweep_s(self) -> float | None:
        """Return the seconds until something cached may be past its time, or None if nothing ever is."""
        times = [s for s in (self.manager.expiry.next_s(), self.recall.next_s()) if s is not None]
        return min(times, default=None)

    def reload(self, policies: PolicySet) -> None:
        """Put other policies in force, between two steps.

        Raises:
            PolicyError: If they do not fit the pool; the former ones stay.
        """
        _check_fits(policies, self.runner)
        served = {*self.manager.pool.owned_blocks, *(seq.tenant for seq in self._live), *self.recall.tenants()}
        former = {tenant: self._policies.of(tenant) for tenant in served if tenant is not None}
        self._policies.replace(policies, former)
        for tenant, rules in former.items():
            withdraw(self.manager, self.recall, tenant, rules, self._policies.of(tenant), self._live.values())
        shrink(self.manager)
        self._run_ops()
        self.manager.expiry.rebuild(self.manager.index)
        self.recall.sweep(at_once=True)

    # -- looking ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``IntegrityError`` unless every invariant holds."""
        self._run_ops()
        self.manager.check()
        running = {seq.seq_id for seq in self.scheduler.running}
        if running != set(self.manager.sequences):
            raise IntegrityError("a finished request still owns blocks, or a running one owns none")
        if {*self.scheduler.running, *self.scheduler.waiting} != set(self._live):
            raise IntegrityError("the scheduler and the engine disagree about what is live")

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine."""
        return engine_stats(self)

    def tenant_stats(self, tenant: str) -> TenantStats:
        """Return a snapshot of one tenant."""
        return tenant_stats(self, tenant)


def _check_fits(policies: PolicySet, runner: ModelRunner) -> None:
    spec = runner.spec
    policies.check_fits(runner.num_blocks, spec.block_size, spec.bytes_per_block, [spec.kv_format])


def _failed(what: str, cause: Exception) -> ExecutionError:
    error = ExecutionError(f"{what} failed with {type(cause).__name__}; see __cause__")
    error.__cause__ = cause
    return error


def _is_of(request: LiveRequest, tenant: str | None, user: str | None, session: str | None) -> bool:
    """Return whether a request belongs to a purged identity; publications belong to a tenant or to everybody."""
    who = request.principal
    if who is None:
        return user is None and session is None and (tenant is None or request.tenant == tenant)
    return tenant in (None, who.tenant) and user in (None, who.user) and session in (None, who.session)
