"""What the scheduler has to know about tenants, and what part of a step each lane may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from prefixkv.config import SchedulerConfig

__all__ = ["EqualRules", "StepShare", "TenantRules"]


class TenantRules(Protocol):
    """Numbers of a tenant's policy. Asked anew each time, since policies may be reloaded."""

    def weight(self, tenant: str) -> float:
        """Return a tenant's share of the engine's time, relative to the others'."""

    def priority(self, tenant: str) -> int:
        """Return a tenant's priority; higher ones go first."""

    def max_running(self, tenant: str) -> int | None:
        """Return how many sequences of a tenant may run at once, or None."""

    def floor_blocks(self, tenant: str) -> int:
        """Return how many blocks nobody can take from a tenant."""

    def partitions(self) -> Mapping[str, int]:
        """Return the blocks of each strict tenant; the same object until policies change."""


class EqualRules:
    """No policies: all tenants are alike and nothing is kept for any of them."""

    def __init__(self) -> None:
        self._nobody: Mapping[str, int] = {}

    def weight(self, tenant: str) -> float:
        """Return 1."""
        return 1.0

    def priority(self, tenant: str) -> int:
        """Return 0."""
        return 0

    def max_running(self, tenant: str) -> int | None:
        """Return None."""
        return None

    def floor_blocks(self, tenant: str) -> int:
        """Return 0."""
        return 0

    def partitions(self) -> Mapping[str, int]:
        """Return nobody."""
        return self._nobody


@dataclass(frozen=True, slots=True)
class StepShare:
    """The part of :class:`~prefixkv.config.SchedulerConfig` that one lane may use."""

    max_num_seqs: int
    max_prefill_tokens: int
    max_new_seqs_per_step: int
    max_queued_requests: int

    @classmethod
    def whole(cls, config: SchedulerConfig) -> StepShare:
        """Return all of it."""
        return cls(
            config.max_num_seqs, config.max_prefill_tokens, config.max_new_seqs_per_step, config.max_queued_requests
        )

    def part(self, blocks: int, total_blocks: int) -> StepShare:
        """Return the part of a partition of ``blocks``: as large as its part of the pool, at least 1 of each."""

        def part(number: int) -> int:
            return max(1, number * blocks // total_blocks)

        return StepShare(
            part(self.max_num_seqs),
            part(self.max_prefill_tokens),
            part(self.max_new_seqs_per_step),
            part(self.max_queued_requests),
        )

    def without(self, parts: Iterable[StepShare]) -> StepShare:
        """Return what is left beside other lanes' parts, at least 1 of each."""
        taken = list(parts)
        return StepShare(
            max(1, self.max_num_seqs - sum(part.max_num_seqs for part in taken)),
            max(1, self.max_prefill_tokens - sum(part.max_prefill_tokens for part in taken)),
            max(1, self.max_new_seqs_per_step - sum(part.max_new_seqs_per_step for part in taken)),
            max(1, self.max_queued_requests - sum(part.max_queued_requests for part in taken)),
        )
