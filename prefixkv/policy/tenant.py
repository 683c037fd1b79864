"""The rules of one tenant, and of what it declares: slots and how long blocks live."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from prefixkv.policy.base import PolicyModel
from prefixkv.policy.values import (
    DEFAULT_SCOPES,
    Clock,
    Format,
    Pool,
    Scopes,
    Seconds,
    StoredLevel,
    WritableLevel,
)
from prefixkv.scope import ScopeLevel

__all__ = ["SlotPolicy", "TTLPolicy", "TenantPolicy"]


class SlotPolicy(PolicyModel):
    """What happens to a declared slot.

    Attributes:
        placement: ``inline`` leaves the value where it is: everything behind it is lost when it changes. ``coarsen``
            rounds a time in it down: the same text, fewer values. ``tail`` binds late: a fixed phrase stays in its
            place, and the value goes to the end, just before the last user turn. ``patch`` is ``inline`` as yet.
        scope: How far the value, and all that follows it, is shared.
        unit: What ``coarsen`` rounds down to.
        phrase: What ``tail`` leaves in the place; None says where the value is found.
    """

    placement: Literal["inline", "coarsen", "tail", "patch"] = "inline"
    scope: WritableLevel = Field(default=ScopeLevel.SESSION, json_schema_extra={"default": "session"})
    unit: Literal["minute", "hour", "day"] = "hour"
    phrase: str | None = Field(default=None, max_length=200, strict=True)


class TTLPolicy(PolicyModel):
    """How long blocks of a scope live. Past it they are gone, not just colder.

    Attributes:
        idle: Seconds since a request last used them, or text ("10m"); None sets no limit.
        absolute: Seconds since they were computed, or text ("24h"); None sets no limit.
    """

    idle: Seconds | None = None
    absolute: Seconds | None = None

    def shortened(self, other: TTLPolicy) -> TTLPolicy:
        """Return the shorter of both, each limit for itself."""
        return TTLPolicy(
            idle=min((s for s in (self.idle, other.idle) if s is not None), default=None),
            absolute=min((s for s in (self.absolute, other.absolute) if s is not None), default=None),
        )


_ZERO_RETENTION = TTLPolicy(idle=300, absolute=3600)


class TenantPolicy(PolicyModel):
    """The rules of one tenant.

    Attributes:
        weight: Its share of the pool and of the engine's time, relative to the others'.
        priority: Among waiting requests a higher one goes first; waiting raises it, so nobody starves.
        min_pool: Floor: what of the pool nobody can take from it; while it needs less, the rest is lent.
        max_pool: Ceiling: most of the pool it may hold; None sets no limit.
        isolation: ``strict`` makes ``min_pool`` a hard partition of the pool and of each step: nothing is lent or
            borrowed, so how much others do cannot be seen either.
        ttl: Scope level to how long its blocks live; levels left out live until they are evicted.
        zero_retention: Nothing outlives its use for long: memory only, idle for five minutes at most, an hour in all,
            and the end of a session destroys it.
        tenant_scope: ``registered`` shares only what the tenant's backend published among its users; other text of
            tenant scope stays with its user, so an end user who controls the system role can neither plant nor probe.
        kv_format: Of the pools that the engine was given, the one it uses; None takes the only one.
        exact: Whether only rows computed in exactly this context are reused; patched ones are not.
        scopes: Segment kind to scope level; kinds left out keep :data:`DEFAULT_SCOPES`.
        slots: Slot name to its policy; slots left out are ``inline`` and ``session``.
        few_shot_messages: Messages behind the system text that are examples, the same for all; a request may say
            another number.
        tools_order: ``canonical`` sorts tools by name and keys of tools and of calls' arguments in a fixed order, so
            that a shuffled list is the same prompt.
        splice_generated: Where a history brings back a reply of this engine, take the reply's own tokens, not those
            that its text encodes to. The model then sees what it wrote, and the next turn hits all of it.
        template_clock: What a template that writes the date is told: an ISO date or time, or ``hour``, ``day``,
            ``month`` or ``year``, which round the true time down; None tells it the true time.
        max_prompt_tokens: Longest prompt; None sets no limit.
        max_queued_requests: Requests that may wait; None sets no limit of its own.
        max_running_requests: Requests that may run at once; more of them wait. None sets no limit of its own.
        tokens_per_minute: Prompt tokens computed and tokens generated; a minute's worth may come at once. None sets no
            limit.
    """

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False, strict=True)
    priority: int = Field(default=0, ge=-100, le=100, strict=True)
    min_pool: Pool | None = None
    max_pool: Pool | None = None
    isolation: Literal["shared", "strict"] = "shared"
    ttl: dict[StoredLevel, TTLPolicy] = Field(default_factory=dict)
    zero_retention: bool = Field(default=False, strict=True)
    tenant_scope: Literal["system", "registered"] = "system"
    kv_format: Format | None = None
    exact: bool = Field(default=True, strict=True)
    scopes: Scopes = Field(default_factory=dict)
    slots: dict[str, SlotPolicy] = Field(default_factory=dict)
    few_shot_messages: int = Field(default=0, ge=0, strict=True)
    tools_order: Literal["as_given", "canonical"] = "as_given"
    splice_generated: bool = Field(default=False, strict=True)
    template_clock: Clock | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_queued_requests: int | None = Field(default=None, ge=1, strict=True)
    max_running_requests: int | None = Field(default=None, ge=1, strict=True)
    tokens_per_minute: int | None = Field(default=None, ge=1, strict=True)

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        if self.isolation == "strict":
            if self.min_pool is None:
                raise ValueError("isolation: strict needs min_pool, the size of the partition")
            if self.max_pool not in (None, self.min_pool):
                raise ValueError("isolation: a strict partition is min_pool; leave max_pool out")
        low, high = self.min_pool, self.max_pool
        if low is not None and high is not None and low.is_above(high):
            raise ValueError(f"min_pool: the floor of {low} is above the ceiling, max_pool, of {high}")
        return self

    def scope_level(self, kind: str) -> ScopeLevel:
        """Return how far segments of ``kind`` are shared."""
        return self._writable(self.scopes.get(kind, DEFAULT_SCOPES[kind]))

    def ttl_of(self, level: ScopeLevel) -> TTLPolicy:
        """Return how long blocks of a scope level live."""
        ttl = self.ttl.get(level) or TTLPolicy()
        return ttl.shortened(_ZERO_RETENTION) if self.zero_retention else ttl

    def slot(self, name: str) -> SlotPolicy:
        """Return the policy of a slot."""
        policy = self.slots.get(name) or SlotPolicy()
        level = self._writable(policy.scope)
        return policy if level is policy.scope else policy.model_copy(update={"scope": level})

    def narrowed_since(self, former: TenantPolicy) -> tuple[ScopeLevel, ScopeLevel] | None:
        """Compare with former rules what is shared with fewer now.

        Returns:
            The widest scope that such text had and the narrowest that it has, or None if there is none.
        """
        levels = [(former.scope_level(kind), self.scope_level(kind)) for kind in DEFAULT_SCOPES]
        levels += [(former.slot(name).scope, self.slot(name).scope) for name in {**former.slots, **self.slots}]
        if self.few_shot_messages < former.few_shot_messages:  # what were examples are turns of a history
            levels.append((former.scope_level("few_shot"), self.scope_level("history")))
        narrowed = [(before, after) for before, after in levels if after > before]
        return (min(before for before, _ in narrowed), max(after for _, after in narrowed)) if narrowed else None

    def _writable(self, level: ScopeLevel) -> ScopeLevel:
        """Return how far requests may share it: what is registered is written by publish alone."""
        return max(level, ScopeLevel.USER) if self.tenant_scope == "registered" else level
