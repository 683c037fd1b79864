"""The only place where keys are made.

A scope key says who may share; it is a keyed BLAKE2b, so nobody without the engine's secret can make one. A block
key finds candidates in the index; it is a plain xxh3_128, whose collisions can be made on purpose, so a hit counts
only after the index has compared tokens and parent.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NewType

import xxhash

from prefixkv.scope import Scope

__all__ = ["BlockKey", "ScopeKey", "ScopeKeys", "block_key"]

ScopeKey = NewType("ScopeKey", bytes)
BlockKey = NewType("BlockKey", bytes)

_Identity = tuple[str | None, str | None, str | None]


def _field(value: str | None) -> bytes:
    """Length-prefixed, so no two different lists of fields give the same bytes; None differs from every text."""
    if value is None:
        return b"\xff" * 4
    data = value.encode()
    return struct.pack("<I", len(data)) + data


class ScopeKeys:
    """Makes scope keys for one engine and remembers which identities were purged.

    Args:
        secret: The engine's secret.
        fingerprint: Everything that must be equal for rows to be interchangeable: weights, tokenizer, template, KV
            format, block size, RoPE.
    """

    def __init__(self, secret: bytes, fingerprint: bytes) -> None:
        self._secret = hashlib.blake2b(secret, digest_size=32).digest()
        self._fingerprint = fingerprint
        self._generations: dict[_Identity, int] = {}

    def key(self, scope: Scope) -> ScopeKey:
        """Return the key under which rows of ``scope`` are stored now."""
        hashed = hashlib.blake2b(key=self._secret, digest_size=16, person=b"prefixkv-scope")
        hashed.update(struct.pack("<I", len(self._fingerprint)) + self._fingerprint)
        hashed.update(struct.pack("<I", scope.level))
        for name in (scope.tenant, scope.user, scope.session):
            hashed.update(_field(name))
        for identity in _ancestry(scope):
            hashed.update(struct.pack("<Q", self._generations.get(identity, 0)))
        return ScopeKey(hashed.digest())

    def bump(self, tenant: str | None, user: str | None, session: str | None) -> None:
        """Begin a new generation of an identity: rows stored before can never be found again."""
        identity = (tenant, user, session)
        self._generations[identity] = self._generations.get(identity, 0) + 1


def _ancestry(scope: Scope) -> tuple[_Identity, ...]:
    """Every identity whose purge must change this scope's key, in a fixed order."""
    tenant, user, session = scope.tenant, scope.user, scope.session
    return tuple(
        (t, u, s)
        for t in dict.fromkeys((None, tenant))
        for u in dict.fromkeys((None, user))
        for s in dict.fromkeys((None, session))
    )


def block_key(scope_key: ScopeKey, parent_uid: int, token_ids: Sequence[int]) -> BlockKey:
    """Return the index key of a block: its scope, the identity of the block before it, and its token ids.

    Source: chained block hashes as in vLLM's prefix caching; the scope and the parent's identity in place of the
    parent's hash are ours.
    """
    hashed = xxhash.xxh3_128(scope_key)
    hashed.update(struct.pack("<Q", parent_uid))
    hashed.update(array("I", token_ids).tobytes())
    return BlockKey(hashed.digest())
