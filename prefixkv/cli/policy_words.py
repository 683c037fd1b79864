"""Says in words what policies give to each tenant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefixkv.cli.template_picture import as_table
from prefixkv.errors import PolicyError
from prefixkv.policy import DEFAULT_SCOPES, PolicySet, PoolAmount, SlotPolicy, TenantPolicy, TTLPolicy
from prefixkv.policy.base import shown
from prefixkv.scope import ScopeLevel

__all__ = ["STORED", "PoolSize", "details", "duration", "named", "overview", "title"]

STORED = (ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)
_OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What is known of the pool that policies divide.

    Attributes:
        num_blocks: Blocks in it, or None.
        block_size: Tokens of one.
        block_bytes: Bytes of one, or None.
        size_bytes: Bytes of all where the blocks are not known, or None.
    """

    num_blocks: int | None = None
    block_size: int = 32
    block_bytes: int | None = None
    size_bytes: int | None = None

    def blocks(self, amount: PoolAmount) -> int | None:
        """Return how many blocks an amount is, also where the pool has fewer; None if that is not known."""
        if self.num_blocks is None or (amount.size_bytes is not None and self.block_bytes is None):
            return None
        return amount.wanted_blocks(self.num_blocks, self.block_size, self.block_bytes or 1)

    def words(self, amount: PoolAmount | None) -> str:
        """Return an amount as it is written, and what it comes to as far as that is known."""
        if amount is None:
            return "none"
        blocks = self.blocks(amount)
        if blocks is not None:
            return f"{amount} = {blocks} block{'s' * (blocks != 1)}"
        if amount.share is not None and self.size_bytes is not None:
            return f"{amount} = {PoolAmount(size_bytes=max(1, int(amount.share * self.size_bytes)))}"
        return str(amount)

    def check(self, policies: PolicySet) -> None:
        """Raise ``PolicyError`` if the policies cannot be met in this pool, as far as it is known."""
        amounts = [amount for _, policy in named(policies) for amount in (policy.min_pool, policy.max_pool) if amount]
        if self.num_blocks is not None and all(self.blocks(amount) is not None for amount in amounts):
            policies.check_fits(self.num_blocks, self.block_size, self.block_bytes or 1)
        elif self.size_bytes is not None:
            for path, policy in named(policies):
                floor, most = (_bytes(amount, self.size_bytes) for amount in (policy.min_pool, policy.max_pool))
                if 0 < most < floor:
                    raise PolicyError(
                        f"{path}.min_pool: the floor of {policy.min_pool} is {PoolAmount(size_bytes=floor)} of this "
                        f"pool, above the ceiling, max_pool, of {policy.max_pool}"
                    )
            kept = sum(_bytes(policy.min_pool, self.size_bytes) for _, policy in named(policies))
            if kept > self.size_bytes:
                raise PolicyError(
                    f"tenants: the floors, min_pool, need {PoolAmount(size_bytes=kept)} and the pool has "
                    f"{PoolAmount(size_bytes=self.size_bytes)}"
                )


def _bytes(amount: PoolAmount | None, size_bytes: int) -> int:
    if amount is None:
        return 0
    return int(amount.share * size_bytes) if amount.share is not None else amount.size_bytes or 0


def named(policies: PolicySet) -> Iterator[tuple[str, TenantPolicy]]:
    """Yield the path of each policy and the policy, the default last."""
    for name, policy in policies.tenants.items():
        yield f"tenants.{shown(name)}", policy
    if policies.default is not None:
        yield "default", policies.default


def title(file: str, policies: PolicySet) -> str:
    """Return one line about a file."""
    count = len(policies.tenants)
    others = "others get the default" if policies.default is not None else "others are refused"
    return f"{file}: {count} tenant{'s' * (count != 1)} by name; {others}"


def overview(policies: PolicySet, pool: PoolSize) -> str:
    """Return how the tenants divide time and pool, as a table."""
    rows = [("tenant", "weight", "time", "priority", "floor", "ceiling", "isolation")]
    total = sum(policy.weight for policy in policies.tenants.values() if policy.isolation != "strict")
    for path, policy in named(policies):
        is_default = path == "default"
        share = policy.weight / (total + policy.weight * is_default) if policy.isolation != "strict" else None
        rows.append(
            (
                _OTHERS if is_default else path.removeprefix("tenants."),
                f"{policy.weight:g}",
                "its part" if share is None else f"{share:.1%}" + " each" * is_default,
                str(policy.priority),
                pool.words(policy.min_pool),
                pool.words(policy.min_pool if policy.isolation == "strict" else policy.max_pool),
                policy.isolation,
            )
        )
    lines = [as_table(rows, numbers=(1, 2, 3)), "", *_legend(policies, pool)]
    return "\n".join(lines)


def _legend(policies: PolicySet, pool: PoolSize) -> Iterator[str]:
    if pool.num_blocks is not None:
        size = f", {PoolAmount(size_bytes=pool.num_blocks * pool.block_bytes)}" if pool.block_bytes else ""
        yield f"pool: {pool.num_blocks} blocks of {pool.block_size} tokens{size}"
    yield "time: while every tenant named here asks; what one leaves, the others get, by weight"
    if policies.default is not None and policies.tenants:
        yield f"{_OTHERS}: each tenant not named here, if it asks beside all that are"
    if any(policy.isolation == "strict" for policy in policies.tenants.values()):
        yield "its part: a strict tenant has the part of each step that its floor is of the pool; others share the rest"
    if any(policy.min_pool for policy in policies.tenants.values()):
        yield "floor: kept for it; lent while it needs less, unless it is strict"


def details(policies: PolicySet) -> Iterator[tuple[str, list[str]]]:
    """Yield names of tenants with equal rules, and what these rules are besides time and pool."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, policy in named(policies):
        name = _OTHERS if path == "default" else path.removeprefix("tenants.")
        groups.setdefault(tuple(_topics(policy)), []).append(name)
    for lines, names in groups.items():
        yield ", ".join(names), list(lines)


def _topics(policy: TenantPolicy) -> Iterator[str]:
    yield f"kept     {'; '.join(_kept(policy))}"
    yield f"shared   {'; '.join(_shared(policy)) or 'as by default'}"
    for name, slot in policy.slots.items():
        yield f"slot     {shown(name)}: {_slot(slot)}"
    yield f"limits   {', '.join(_limits(policy)) or 'none of its own'}"
    if prompts := list(_prompts(policy)):
        yield f"prompts  {', '.join(prompts)}"


def _kept(policy: TenantPolicy) -> Iterator[str]:
    words: dict[str, list[str]] = {}
    for level in STORED:
        words.setdefault(_ttl(policy.ttl_of(level)), []).append(level.label)
    for text, levels in words.items():
        yield f"{', '.join(levels)}: {text}"
    if policy.zero_retention:
        yield "in memory only, and the end of a session destroys it (zero_retention)"


def _ttl(ttl: TTLPolicy) -> str:
    limits = []
    if ttl.idle is not None:
        limits.append(f"{duration(ttl.idle)} after the last use")
    if ttl.absolute is not None:
        limits.append(f"{duration(ttl.absolute)} after it was computed")
    return f"gone {' and '.join(limits)}" if limits else "until it is evicted"


def _shared(policy: TenantPolicy) -> Iterator[str]:
    for kind, level in policy.scopes.items():
        if level is not DEFAULT_SCOPES[kind]:
            yield f"{kind}: {level.label} instead of {DEFAULT_SCOPES[kind].label}"
    if policy.tenant_scope == "registered":
        yield "tenant scope holds only what the backend published"


def _slot(slot: SlotPolicy) -> str:
    where = {
        "inline": "stays where it is",
        "coarsen": f"its times are rounded down to the {slot.unit}",
        "tail": "goes to the end, before the last user turn",
        "patch": "stays where it is, as yet",
    }[slot.placement]
    return f"{where} ({slot.placement}); scope {slot.scope.label}"


def _limits(policy: TenantPolicy) -> Iterator[str]:
    for value, text in (
        (policy.max_prompt_tokens, "prompts of {} tokens"),
        (policy.max_running_requests, "{} requests run"),
        (policy.max_queued_requests, "{} wait"),
        (policy.tokens_per_minute, "{} tokens a minute"),
    ):
        if value is not None:
            yield text.format(value)


def _prompts(policy: TenantPolicy) -> Iterator[str]:
    if policy.few_shot_messages:
        yield f"the first {policy.few_shot_messages} messages behind the system text are examples, shared like it"
    if policy.tools_order == "canonical":
        yield "tools are sorted"
    if policy.splice_generated:
        yield "replies come back as their own tokens"
    if policy.template_clock is not None:
        yield f"the template's clock: {policy.template_clock}"
    if policy.kv_format is not None:
        yield f"pool of format {policy.kv_format}"
    if not policy.exact:
        yield "patched rows are reused"


def duration(seconds: float) -> str:
    """Return seconds in the largest unit that they are at least one of."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
