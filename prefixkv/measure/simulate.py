"""Recorded requests replayed through three ways of reusing prompts: what would each have had in its cache?

Ours is the real segmenter and the real bookkeeping without tensors. The other two are what is common elsewhere:
whole requests by hash, and chains of full blocks by hash.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from prefixkv.cache.keys import ScopeKeys
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.scopes import ScopeMap
from prefixkv.chat.explain import CacheReport, build_report
from prefixkv.chat.recall import Recall
from prefixkv.chat.segment import Prompt
from prefixkv.chat.segmenter import Segmenter
from prefixkv.errors import ContextOverflow, InvalidRequest, PrefixKVError, QuotaExceeded, UnknownTenant
from prefixkv.measure.baselines import BlockChain, WholeRequest
from prefixkv.measure.trace import TraceRequest
from prefixkv.policy import PolicySet

__all__ = [
    "BLOCK_CHAIN",
    "BLOCK_CHAIN_PER_TENANT",
    "ENDLESS_BLOCKS",
    "GIVEN_POLICIES",
    "OURS",
    "WHOLE_REQUEST",
    "Outcome",
    "Refusal",
    "ScopedCache",
    "SimulatedRequest",
    "Simulator",
]

WHOLE_REQUEST = "whole_request"
BLOCK_CHAIN = "block_chain"
BLOCK_CHAIN_PER_TENANT = "block_chain_per_tenant"
OURS = "prefixkv"
GIVEN_POLICIES = "prefixkv_policies"

ENDLESS_BLOCKS = 2**20
"""Blocks of a pool without a stated size: 33 million tokens, more than one reads from a file of requests."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request could not be served. Quotes no content.

    Attributes:
        code: Stable word, such as ``"template_rejected"``.
        where: File and line.
        hint: What to do.
    """

    code: str
    where: str
    hint: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request in one way of caching.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Those that would not have been computed.
        report: Where and why reuse ended; None for the ways that cannot say.
    """

    prompt_tokens: int
    cached_tokens: int
    report: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request in all ways.

    Attributes:
        tenant: Whose it is.
        outcomes: Way to outcome; without the ways that refused it.
        refusals: Way to refusal.
    """

    tenant: str
    outcomes: dict[str, Outcome]
    refusals: dict[str, Refusal]


class Simulator:
    """Replays requests one by one and remembers them, as caches would. Not safe to share between threads.

    Args:
        segmenter: Makes prompts.
        policies: Policies to compare with the default policy, or None for the default alone.
        chain_block_size: Tokens per block of the block chains.
        block_size: Tokens per block of ours.
        pool_blocks: Blocks of ours; the other ways get room for as many tokens. None is enough for everything.

    Attributes:
        ways: Names of the ways, those of others first.
        caches: Our caches by way; the baselines are not among them.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        policies: PolicySet | None = None,
        *,
        chain_block_size: int = 16,
        block_size: int = 32,
        pool_blocks: int | None = None,
    ) -> None:
        room_tokens = None if pool_blocks is None else pool_blocks * block_size
        self._whole = WholeRequest(room_tokens)
        self._chain = BlockChain(chain_block_size, room_tokens)
        self._tenant_chain = BlockChain(chain_block_size, room_tokens)
        sets = {OURS: PolicySet.load(None)}
        if policies is not None:
            sets[GIVEN_POLICIES] = policies
        self.caches = {
            way: ScopedCache(segmenter, chosen, block_size=block_size, pool_blocks=pool_blocks)
            for way, chosen in sets.items()
        }
        self.ways = (WHOLE_REQUEST, BLOCK_CHAIN, BLOCK_CHAIN_PER_TENANT, *self.caches)

    def ask(self, request: TraceRequest) -> SimulatedRequest:
        """Return what each way has of a request, then let each remember it.

        A request that the default policy cannot serve, because no prompt can be made of it, is refused in every way.
        """
        tenant = request.principal.tenant
        outcomes: dict[str, Outcome] = {}
        refusals: dict[str, Refusal] = {}
        for way, cache in self.caches.items():
            try:
                prompt = cache.prompt(request)
                if way == OURS:
                    outcomes |= self._ask_others(prompt.token_ids, tenant)
                outcomes[way] = cache.ask(request, prompt)
            except (InvalidRequest, ContextOverflow, UnknownTenant, QuotaExceeded) as error:
                refusals[way] = _refusal(request, error)
                if not outcomes:
                    refusals = dict.fromkeys(self.ways, refusals[way])
                    break
        return SimulatedRequest(tenant, outcomes, refusals)

    def _ask_others(self, token_ids: Sequence[int], tenant: str) -> dict[str, Outcome]:
        cached = {
            WHOLE_REQUEST: self._whole.ask(token_ids),
            BLOCK_CHAIN: self._chain.ask(token_ids),
            BLOCK_CHAIN_PER_TENANT: self._tenant_chain.ask(token_ids, tenant),
        }
        return {way: Outcome(len(token_ids), tokens) for way, tokens in cached.items()}


class ScopedCache:
    """This library's cache without tensors. Only prompts are stored: replies count once they come back in a prompt.

    A policy's ``max_pool`` counts where it is a share of the pool or in tokens; bytes mean nothing without a model.

    Args:
        segmenter: Makes prompts.
        policies: Everybody's policies.
        block_size: Tokens per block.
        pool_blocks: Blocks of the pool; None is enough for everything.

    Attributes:
        manager: The bookkeeping.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        policies: PolicySet,
        *,
        block_size: int = 32,
        pool_blocks: int | None = None,
    ) -> None:
        self._segmenter = segmenter
        self._policies = policies
        self._recall = Recall()
        self._pool_blocks = ENDLESS_BLOCKS if pool_blocks is None else pool_blocks
        keys = ScopeKeys(secrets.token_bytes(), b"")
        self.manager = KVCacheManager(
            self._pool_blocks, block_size, keys, weight=self._weight, ceiling=self._ceiling_blocks
        )
        self._next_id = 0

    def prompt(self, request: TraceRequest) -> Prompt:
        """Return the prompt of a request under its tenant's policy.

        Raises:
            UnknownTenant: If the policies do not know the tenant.
            InvalidRequest: If no prompt can be made of it.
            ContextOverflow: If the prompt is longer than the policy allows.
        """
        return self._segmenter.segment(
            request.messages,
            policy=self._policies.get(request.principal.tenant),
            tools=request.tools,
            slots=request.slots,
            past=self._recall.past(request.principal),
        )

    def ask(self, request: TraceRequest, prompt: Prompt) -> Outcome:
        """Return how much of a prompt is cached, then store it.

        Raises:
            QuotaExceeded: If the pool, or the tenant's part of it, cannot hold it.
        """
        token_ids, manager = prompt.token_ids, self.manager
        spans = ((segment.start, segment.scope) for segment in prompt.segments)
        scopes = ScopeMap.for_principal(request.principal, spans)
        match = manager.match(token_ids, scopes)
        gone = manager.why_missing(token_ids, scopes, match)
        losses = self._recall.losses(request.principal, counts=True)
        report = build_report(prompt, match.num_tokens, match.diverged, gone, losses)
        cached = manager.open(self._next_id, match, scopes, len(token_ids))
        if cached is None:
            raise QuotaExceeded("the prompt does not fit the pool, or its tenant's part of it")
        manager.close(self._next_id, token_ids, len(token_ids))
        manager.take_ops()  # there are no rows to move
        self._next_id += 1
        if prompt.origin is not None:
            self._recall.remember(request.principal, prompt.origin.sent, prompt.origin.notes)
        return Outcome(len(token_ids), cached, report)

    def _weight(self, tenant: str) -> float:
        return self._policies.get(tenant).weight

    def _ceiling_blocks(self, tenant: str) -> int | None:
        most = self._policies.get(tenant).max_pool
        if most is None or most.size_bytes is not None:
            return None
        return max(1, most.blocks(self._pool_blocks, self.manager.block_size, bytes_per_block=1))


def _refusal(request: TraceRequest, error: PrefixKVError) -> Refusal:
    match error:
        case InvalidRequest():
            return Refusal(error.code, request.where, f"{error.path}: {error.hint}")
        case ContextOverflow():
            return Refusal("too_long", request.where, str(error))
        case UnknownTenant():
            return Refusal("unknown_tenant", request.where, str(error))
    return Refusal("no_room", request.where, str(error))
