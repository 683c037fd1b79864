"""What the scheduler knows of a request: the sequences (one per reply) that run for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prefixkv.cache.scopes import ScopeMap

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence stands. ``WAITING`` ones own nothing in the pool."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one reply, its prompt included. Only the scheduler and the engine core write it.

    Attributes:
        seq_id: Order of arrival; a smaller number is older and is never preempted for a larger one.
        token_ids: Prompt and generated ids.
        num_prompt_tokens: How many of them are the prompt.
        scopes: Whose each token is.
        max_tokens_total: Length at which the reply ends, prompt included.
        generates: False for a publication, which ends when its prompt is computed.
        num_computed_tokens: Tokens whose rows are in the pool.
        num_cached_tokens: Prompt tokens found in the cache when it was first admitted; None before that.
        was_preempted: Whether it lost its blocks to an older sequence and must compute them again.
        leader: The sequence it is held back for because that one computes the same prefix.
        num_waits: How often it was held back so far.
        num_passed: How often a later one of its user went before it while it was the first in line.
        num_expected_tokens: Cached tokens it would have had, when it was last looked at in line.
        estimated_at: The step in which that was; None before.
        num_billed_tokens: How far its prompt and reply were counted for its tenant's rate, what was cached included.
        diverged: Whether, when it was first admitted, a readable block went on differently where its match ended.
        gone: ``evicted`` or ``purged`` if, at that time, it ended because rows of its principal were destroyed.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    scopes: ScopeMap
    max_tokens_total: int
    generates: bool = True
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    was_preempted: bool = False
    leader: Sequence | None = None
    num_waits: int = 0
    num_passed: int = 0
    num_expected_tokens: int = 0
    estimated_at: int | None = None
    num_billed_tokens: int = 0
    diverged: bool = False
    gone: str | None = None

    @property
    def tenant(self) -> str | None:
        """Tenant it is charged to; None for the operator."""
        return self.scopes.tenant

    @property
    def user(self) -> str | None:
        """User of its tenant; None where the request named none, and for publications."""
        return self.scopes.reach[-1].user

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not yet computed: 1 while decoding, more while its prompt is prefilled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether part of its prompt is still to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens
