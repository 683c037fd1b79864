"""Faults to plant: each is a bug that a cache shared between tenants could have, and that the trials must find.

A fault is a function that patches the engine; :data:`FAULTS` says in which kind of trial it shows. Where an engine has
two defences, such as scopes that are met by the segmenter and again by the cache, a fault breaks both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pytest

from prefixkv.cache import index
from prefixkv.cache.eviction import LRUEviction
from prefixkv.cache.ghosts import Ghosts
from prefixkv.cache.index import BlockIndex, Node, common_prefix
from prefixkv.cache.keys import ScopeKey, ScopeKeys, block_key
from prefixkv.cache.manager import KVCacheManager
from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.table import PrefixMatch, SequenceBlocks
from prefixkv.chat import segmenter
from prefixkv.chat.recall import Past, Recall
from prefixkv.engine.core import EngineCore
from prefixkv.engine.limits import Limits
from prefixkv.errors import QuotaExceeded
from prefixkv.policy import PolicySet, TenantPolicy
from prefixkv.scheduler.fairness import TenantAccount
from prefixkv.scheduler.queue import RequestQueue
from prefixkv.scope import Principal, Scope, ScopeLevel
from tests.audit.program import Kind

__all__ = ["FAULTS", "Fault"]

Tokens = Sequence[int]


class Fault(NamedTuple):
    """A fault.

    Attributes:
        plant: Patches the engine.
        kind: Trials that show it.
        shown_by: What gives it away: what the attacker sees, a wrong row, or the numbers of the victim itself.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    kind: Kind = "tenants"
    shown_by: Literal["difference", "victims_difference", "wrong_rows"] = "difference"


def constant_scope_key(patch: pytest.MonkeyPatch) -> None:
    """Everybody's rows are stored under one key per level."""
    patch.setattr(ScopeKeys, "key", lambda self, scope: ScopeKey(bytes([scope.level])))


def level_left_out_of_key(patch: pytest.MonkeyPatch) -> None:
    """Rows of a session are stored as if they were the tenant's."""
    key = ScopeKeys.key
    patch.setattr(ScopeKeys, "key", lambda self, scope: key(self, Scope(scope.level, scope.tenant)))


def own_label(patch: pytest.MonkeyPatch) -> None:
    """A segment's rows have its own scope, not the narrowest so far."""

    def scoped(layout: Any, length: int, policy: Any, widest: Any, *, is_coarse: bool) -> Any:
        regions = segmenter._merged(layout.starts, length, is_coarse=is_coarse)
        return [(start, label, segmenter._level(label, policy)) for start, label in regions]

    def for_principal(cls: type[ScopeMap], principal: Principal, spans: Any) -> ScopeMap:
        spans = [(start, max(level, ScopeLevel.TENANT)) for start, level in spans]
        reach = (ScopeLevel.PUBLIC, ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)
        return cls(
            tuple(start for start, _ in spans),
            tuple(Scope.of(principal, level) for _, level in spans),
            tuple(Scope.of(principal, level) for level in reach),
            principal.tenant,
        )

    patch.setattr(segmenter, "_scoped", scoped)
    patch.setattr(ScopeMap, "for_principal", classmethod(for_principal))


def block_across_labels(patch: pytest.MonkeyPatch) -> None:
    """A block in which the scope narrows belongs to the wider scope."""

    def publish(self: KVCacheManager, blocks: SequenceBlocks, place: int, *rest: Any) -> Scope:
        return blocks.scopes.scope_at(place * self.block_size)

    patch.setattr(KVCacheManager, "_publish_wider_parts", publish)


def longest_prefix_first(patch: pytest.MonkeyPatch) -> None:
    """Who waits is served by how much of the prompt anybody has in the cache, across tenants."""
    managers: list[KVCacheManager] = []
    assemble = EngineCore.assemble.__func__  # type: ignore[attr-defined]

    def remembering(cls: type[EngineCore], *args: Any, **options: Any) -> EngineCore:
        core: EngineCore = assemble(cls, *args, **options)
        managers[:] = [core.manager]
        return core

    def cached_by_anybody(seq: Any) -> int:
        texts = ([token for link in node.chain() for token in link.tokens] for node in managers[0].index)
        return max((common_prefix(text, list(seq.token_ids)) for text in texts), default=0)

    def rank(self: RequestQueue, tenant: TenantAccount, now: int) -> tuple[bool, int]:
        lines = (seq for user in tenant.users.active.values() for seq in user.line)
        return False, -max((cached_by_anybody(seq) for seq in lines), default=0)

    def first(self: RequestQueue, now: int) -> Any:
        waiting = (tenant for turns in self._turns.values() for tenant, entry in turns._entries.items() if entry >= 0)
        return min(((self.rank(tenant, now), tenant) for tenant in waiting), key=lambda found: found[0], default=None)

    patch.setattr(EngineCore, "assemble", classmethod(remembering))
    patch.setattr(RequestQueue, "rank", rank)
    patch.setattr(RequestQueue, "first", first)


def shared_token_cache(patch: pytest.MonkeyPatch) -> None:
    """What was sent before is remembered for all tenants together."""

    def past(self: Recall, principal: Principal) -> Past:
        own = real(self, principal)
        everybody = [entry for shelf in self._prompts._tenants.values() for entry in shelf.values()]
        sent = tuple(sent for entry in everybody for sent in entry.sent)
        return Past(sent, own.notes, own.shapes, own.generation)

    real = Recall.past
    patch.setattr(Recall, "past", past)


def user_writable_tenant_scope(patch: pytest.MonkeyPatch) -> None:
    """``tenant_scope: registered`` does nothing: what a user writes as system text is its tenant's."""
    patch.setattr(TenantPolicy, "_writable", lambda self, level: level)


class _Unsalted(ScopeKeys):
    def key(self, scope: Scope) -> ScopeKey:
        return super().key(Scope(scope.level))


def salt_dropped_on_reload(patch: pytest.MonkeyPatch) -> None:
    """After a reload of the policies, keys are made without whose they are."""
    reload = EngineCore.reload

    def reloaded(self: EngineCore, policies: PolicySet) -> None:
        reload(self, policies)
        self.manager.keys = _Unsalted(b"", b"")

    patch.setattr(EngineCore, "reload", reloaded)


def ghosts_without_scope(patch: pytest.MonkeyPatch) -> None:
    """Whether text was evicted is remembered without whose it was."""
    why, note = Ghosts.why, Ghosts._note

    def noted(self: Ghosts, node: Node, reason: str) -> None:
        note(self, node, reason)
        self.__dict__.setdefault("_gone", {})[tuple(token for link in node.chain() for token in link.tokens)] = reason

    def asked(self: Ghosts, match: Any, token_ids: Any, scope_key: Any, reach: Any, root: Any) -> str | None:
        start = match.num_tokens - match.partial_rows
        texts = (tuple(token_ids[:end]) for end in range(start + self._block_size, match.num_tokens, -1))
        gone = self.__dict__.get("_gone", {})
        found = next((gone[text] for text in texts if text in gone), None)
        return found or why(self, match, token_ids, scope_key, reach, root)

    patch.setattr(Ghosts, "_note", noted)
    patch.setattr(Ghosts, "why", asked)


def divergence_from_anybody(patch: pytest.MonkeyPatch) -> None:
    """The report says that stored text goes on differently, whoever stored it."""
    match = KVCacheManager.match

    def looked(
        self: KVCacheManager, token_ids: Sequence[int], scopes: ScopeMap, limit: int | None = None
    ) -> PrefixMatch:
        found = match(self, token_ids, scopes, limit)
        parent = found.nodes[-1] if found.nodes else self.index.root
        rest = tuple(token_ids[len(found.nodes) * self.block_size :][: self.block_size])
        children = [node for nodes in parent.children.values() for node in nodes]
        near = max((common_prefix(node.tokens, rest) for node in children), default=0)
        return PrefixMatch(found.nodes, found.partial, found.partial_rows, found.num_tokens, near > found.partial_rows)

    patch.setattr(KVCacheManager, "match", looked)


def waiting_for_strangers(patch: pytest.MonkeyPatch) -> None:
    """A request waits for another tenant's prefill of the same text, though it cannot read it."""
    patch.setattr(ScopeMap, "readable_prefix", lambda self, reader: 2**62)


def reading_all_scopes(patch: pytest.MonkeyPatch) -> None:
    """The index is asked for every scope that has such text behind a block, not for those that may be read."""

    def reach(self: KVCacheManager, scopes: ScopeMap) -> dict[ScopeKey, ScopeLevel]:
        own = {self.keys.key(scope): scope.level for scope in scopes.reach}
        return own | {
            node.scope_key: node.scope.level for node in self.index if node.scope and node.scope_key not in own
        }

    patch.setattr(KVCacheManager, "_reach", reach)


def evicting_by_content(patch: pytest.MonkeyPatch) -> None:
    """Of a tenant's idle blocks the one goes first whose tokens come first."""

    def victim(self: LRUEviction, tenant: str | None) -> Node | None:
        leaves = [node for node in self._idle.get(tenant, ()) if node.is_leaf]
        return min(leaves, key=lambda node: node.tokens, default=None)

    patch.setattr(LRUEviction, "victim", victim)


def ties_broken_by_content(patch: pytest.MonkeyPatch) -> None:
    """Of blocks that agree equally far with a prompt the one is used, and kept, that is next in order of tokens.

    The engine did this until the trials found it.
    """
    patch.setattr(
        index,
        "_oldest",
        lambda children, beginning: max(
            children, key=lambda node: (node.tokens[: len(beginning)] == beginning, node.tokens)
        ),
    )


def counting_every_tenants_hits(patch: pytest.MonkeyPatch) -> None:
    """A tenant's counters take in what any tenant could have hit."""
    count = EngineCore._count

    def counted(self: EngineCore, request: Any, aborted: int = 0) -> None:
        count(self, request, aborted)
        key = block_key(ScopeKey(b""), 0, tuple(request.prompt.token_ids[: self.manager.block_size]))
        asked = self.__dict__.setdefault("_asked", set())
        if key in asked:
            self.metrics.add(request.tenant, cached_tokens=self.manager.block_size)
        asked.add(key)

    patch.setattr(EngineCore, "_count", counted)


def refusing_what_others_sent(patch: pytest.MonkeyPatch) -> None:
    """A request is refused because somebody else's like it is being served."""
    check = Limits.check_queue

    def checked(self: Limits, request: Any) -> None:
        check(self, request)
        beginning = tuple(request.prompt.token_ids[:40])
        if any(tuple(seq.token_ids[:40]) == beginning for seq in self._scheduler.running):
            raise QuotaExceeded("the same request is being served already")

    patch.setattr(Limits, "check_queue", checked)


def hash_alone(patch: pytest.MonkeyPatch) -> None:
    """A hit counts when the short hash agrees; the tokens are not compared."""

    def find(self: BlockIndex, scope_key: ScopeKey, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        bucket = parent.children.get(scope_key, [])
        return next(
            (n for n in bucket if len(n.tokens) == len(tokens) and sum(n.tokens) % 16 == sum(tokens) % 16), None
        )

    patch.setattr(BlockIndex, "find", find)


def rows_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A block changes hands with the rows that it held: one row more is taken for cached than was copied."""
    match = KVCacheManager.match

    def looked(
        self: KVCacheManager, token_ids: Sequence[int], scopes: ScopeMap, limit: int | None = None
    ) -> PrefixMatch:
        found = match(self, token_ids, scopes, limit)
        if found.partial is None or found.num_tokens + 1 >= len(token_ids) or found.partial_rows + 1 >= self.block_size:
            return found
        return PrefixMatch(found.nodes, found.partial, found.partial_rows + 1, found.num_tokens + 1, found.diverged)

    patch.setattr(KVCacheManager, "match", looked)


FAULTS: dict[str, Fault] = {
    "constant scope key": Fault(constant_scope_key),
    "users left out of the key": Fault(level_left_out_of_key, "users"),
    "own label instead of the meet": Fault(own_label, "users"),
    "block across two labels": Fault(block_across_labels, "users"),
    "prefix-length ordering across tenants": Fault(longest_prefix_first),
    "token cache shared across tenants": Fault(shared_token_cache),
    "user-writable tenant scope": Fault(user_writable_tenant_scope, "users"),
    "salt dropped on reload": Fault(salt_dropped_on_reload),
    "memory of evictions without scope": Fault(ghosts_without_scope),
    "divergence from anybody's text": Fault(divergence_from_anybody),
    "waiting for strangers": Fault(waiting_for_strangers),
    "reading all scopes": Fault(reading_all_scopes),
    "evicting by content": Fault(evicting_by_content, "tenants", "victims_difference"),
    "ties broken by content": Fault(ties_broken_by_content, "tenants", "victims_difference"),
    "counting every tenant's hits": Fault(counting_every_tenants_hits),
    "an error that tells of others": Fault(refusing_what_others_sent),
    "hash without comparison": Fault(hash_alone, "users", "wrong_rows"),
    "row that was not copied": Fault(rows_left_behind, "users", "wrong_rows"),
}
"""Name to fault."""
