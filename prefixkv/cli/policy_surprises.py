"""Finds what is valid in policies and may still not be what somebody meant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from prefixkv.cli.policy_words import STORED, PoolSize, duration, named
from prefixkv.policy import PolicySet, SlotPolicy, TenantPolicy
from prefixkv.policy.base import shown
from prefixkv.scope import ScopeLevel

__all__ = ["surprises"]

_FEWEST_BYTES = 1024
# In the order of a prompt: what stands further on is never shared further than what stands before it.
_ORDER = (("system", "tools", "few_shot"), ("few_shot", "history", "user"))


def surprises(policies: PolicySet, pool: PoolSize) -> Iterator[str]:
    """Yield one line each: where it is written, and what comes of it."""
    if not policies.tenants and policies.default is None:
        yield "no tenant is named and there is no default: every request is refused"
    for path, policy in named(policies):
        for find in (_of_room, _of_isolation, _of_scopes, _of_examples, _of_time, _of_limits):
            yield from (f"{path}.{line}" for line in find(policy, pool))
        for name, slot in policy.slots.items():
            yield from (f"{path}.slots.{shown(name)}: {line}" for line in _of_slot(slot, policy))
    yield from _of_floors(policies, pool)


def _of_room(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    for field, amount in (("min_pool", policy.min_pool), ("max_pool", policy.max_pool)):
        if amount is None:
            continue
        if amount.size_bytes is not None and amount.size_bytes < _FEWEST_BYTES:
            yield f"{field}: {amount.size_bytes} is a number of bytes; a share is written 50% or 0.5"
        elif pool.blocks(amount) == 0 and policy.isolation != "strict":
            does = "keeps nothing for it" if field == "min_pool" else "still gives it one block, so that it can ask"
            yield f"{field}: {amount} is less than a block of {pool.block_size} tokens; it {does}"


def _of_isolation(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    if policy.isolation == "strict" and policy.weight != 1:
        yield "weight: changes nothing for a strict tenant, whose part of each step is that of its floor"
    if policy.isolation == "strict" and policy.priority:
        yield "priority: orders only its own requests; a strict tenant neither passes others nor waits for them"
    if policy.tenant_scope == "registered":
        yield (
            "tenant_scope: nothing is shared among its users but what engine.publish(..., tenant=) was given; other "
            "system text, tools and examples stay with their user"
        )


def _of_scopes(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    for kind in ("history", "user", "generation_prompt", "text"):
        if policy.scope_level(kind) is ScopeLevel.TENANT:
            yield (
                f"scopes.{kind}: all users of the tenant share it; whoever guesses what another one wrote can tell "
                "from the cached tokens that it was written"
            )
    for before, *behind in _ORDER:
        for kind in behind:
            if kind in policy.scopes and policy.scope_level(kind) < policy.scope_level(before):
                yield (
                    f"scopes.{kind}: {policy.scope_level(kind).label} has no effect behind {before} of scope "
                    f"{policy.scope_level(before).label}: text is shared as far as all that stands before it"
                )


def _of_slot(slot: SlotPolicy, policy: TenantPolicy) -> Iterator[str]:
    system = policy.scope_level("system")
    if slot.scope < system:
        yield f"scope {slot.scope.label} has no effect, since the system text is of scope {system.label}"
    if slot.placement == "coarsen" and slot.scope >= ScopeLevel.SESSION:
        whose = "each session computes" if slot.scope is ScopeLevel.SESSION else "each request computes"
        yield (
            f"is rounded and still private: {whose} what stands behind it anew; add `scope: tenant` if all users may "
            "share the rounded value"
        )
    if slot.placement == "patch":
        yield "patch is inline as yet: all behind it is computed anew when it changes"
    if slot.placement != "coarsen" and slot.unit != SlotPolicy().unit:
        yield f"unit has no effect on {slot.placement}; only coarsen rounds"
    if slot.placement != "tail" and slot.phrase is not None:
        yield f"phrase has no effect on {slot.placement}; only tail leaves one"


def _of_examples(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    count = policy.few_shot_messages
    if count and policy.scope_level("few_shot") <= ScopeLevel.TENANT:
        yield (
            f"few_shot_messages: the {count} messages behind the system text count as examples, whoever wrote them, "
            "and all users of the tenant share them; where a conversation begins without examples, those are a "
            "user's words"
        )


def _of_time(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    for level in STORED:
        written, real = policy.ttl.get(level), policy.ttl_of(level)
        for field in ("idle", "absolute"):
            asked, got = getattr(written, field, None), getattr(real, field)
            if asked is not None and asked > got:
                yield f"ttl.{level.label}.{field}: zero_retention cuts {duration(asked)} to {duration(got)}"
        if real.idle is not None and real.absolute is not None and real.idle >= real.absolute:
            yield f"ttl.{level.label}.idle: has no effect; absolute ends it after {duration(real.absolute)} anyhow"
    for wide, narrow in combinations(STORED, 2):
        first, second = policy.ttl_of(wide).absolute, policy.ttl_of(narrow).absolute
        if first is not None and second is not None and second > first:
            yield (
                f"ttl.{narrow.label}.absolute: {duration(second)} is longer than the {duration(first)} of "
                f"{wide.label}; what stands behind text of {wide.label} scope is lost with it"
            )


def _of_limits(policy: TenantPolicy, pool: PoolSize) -> Iterator[str]:
    rate, prompt = policy.tokens_per_minute, policy.max_prompt_tokens
    if rate is not None and prompt is not None and prompt > rate:
        yield f"max_prompt_tokens: one prompt of {prompt} tokens may cost more than a minute's worth, {rate}"


def _of_floors(policies: PolicySet, pool: PoolSize) -> Iterator[str]:
    floors = {path: policy.min_pool for path, policy in named(policies) if policy.min_pool is not None}
    without = [path for path, _ in named(policies) if path not in floors]
    blocks = [pool.blocks(amount) for amount in floors.values()]
    if pool.num_blocks is not None and None not in blocks:
        is_all = sum(count or 0 for count in blocks) >= pool.num_blocks
    else:
        is_all = sum(amount.share or 0.0 for amount in floors.values()) >= 1 - 1e-9
    if floors and without and is_all:
        strict = all(policy.isolation == "strict" for _, policy in named(policies) if policy.min_pool is not None)
        comes = "never have a block" if strict else "have none while those tenants use theirs"
        who = f"{without[0]} and {len(without) - 1} more" if len(without) > 1 else without[0]
        yield f"tenants: the floors are the whole pool; {who} will {comes}"
