"""How prompts are reused elsewhere: whole requests by hash, and chains of full blocks by hash. No tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

__all__ = ["BlockChain", "WholeRequest"]


class WholeRequest:
    """Remembers whole prompts by hash: all of a prompt is cached or nothing.

    Args:
        room_tokens: Tokens of the prompts it can remember, the least recently used go first; None sets no limit.
    """

    def __init__(self, room_tokens: int | None = None) -> None:
        self._room_tokens = room_tokens
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._held_tokens = 0

    def ask(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens are cached, then remember the prompt."""
        key = _chained(b"", token_ids)
        known = self._seen.pop(key, 0)
        self._seen[key] = len(token_ids)
        self._held_tokens += len(token_ids) - known
        while self._room_tokens is not None and self._held_tokens > self._room_tokens:
            self._held_tokens -= self._seen.popitem(last=False)[1]
        return known


class BlockChain:
    """Remembers full blocks by a hash of all tokens up to their end. The last token of a prompt is always computed.

    Args:
        block_size: Tokens per block.
        room_tokens: Tokens of the blocks it can remember; None sets no limit. The least recently used block goes
            first, and the tail of a prompt before its head.

    Source: prefix caching as in vLLM: chained block hashes, one pool for all. Blocks freed in reverse order there are
    blocks touched in reverse order here.
    """

    def __init__(self, block_size: int = 16, room_tokens: int | None = None) -> None:
        self._block_size = block_size
        self._room_blocks = None if room_tokens is None else room_tokens // block_size
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, token_ids: Sequence[int], owner: str = "") -> int:
        """Return how many tokens are cached, then remember the prompt.

        Args:
            token_ids: The prompt.
            owner: Prompts of different owners share nothing.
        """
        size = self._block_size
        keys: list[bytes] = []
        key = owner.encode()
        for start in range(0, len(token_ids) - size + 1, size):
            key = _chained(key, token_ids[start : start + size])
            keys.append(key)
        usable = max(0, len(token_ids) - 1) // size
        known = next((i for i, key in enumerate(keys[:usable]) if key not in self._seen), usable)
        for key in reversed(keys):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while self._room_blocks is not None and len(self._seen) > self._room_blocks:
            self._seen.popitem(last=False)
        return known * size


def _chained(before: bytes, token_ids: Sequence[int]) -> bytes:
    hashed = xxhash.xxh3_128(before)
    hashed.update(array("I", token_ids).tobytes())
    return hashed.digest()
