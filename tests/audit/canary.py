"""A model without numbers whose rows say which text they were computed from.

A row holds a hash of all tokens up to its position, and of nothing else: not of who asked. Whoever reads a row that is
stale, foreign or in the wrong place reads a hash that its own text does not have, and that is written down at once.

What it says next is one of the tokens that were said before; which one is decided by the *pattern* of the text: for
each token, how far back the same token stood last. So a text whose words are renamed one to one is answered with the
same words renamed one to one: the two worlds of the audit have the same lengths, stops and repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from prefixkv.cache.spec import KVCacheSpec, LayerSpec
from prefixkv.chat.segmenter import Segmenter
from prefixkv.engine.core import EngineCore
from prefixkv.model.batch import Chunk
from tests.support import byte_tokenizer

VOCAB_SIZE = 259
_LETTERS = 256
"""Ids from here on are control tokens: never said but to end a reply."""

_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class CanaryModel:
    """What a request builder asks of a loaded model."""

    tokenizer: Any
    vocab_size: int
    eos_token_ids: frozenset[int]


@lru_cache
def canary_model() -> tuple[CanaryModel, Segmenter]:
    """Return the tokenizer's half of the model and the segmenter; both hold nothing of a request."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    model = CanaryModel(tokenizer, VOCAB_SIZE, frozenset([tokenizer.eos_token_id]))
    return model, Segmenter(tokenizer, vocab_tokens=VOCAB_SIZE)


class CanaryStorage:
    """Rows of hashes; 0 is a row of zeros."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks = [[0] * block_size for _ in range(num_blocks)]

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        block = self.blocks[src]
        self.blocks[dst] = block[:rows] + [0] * (len(block) - rows)

    def zero(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id] = [0] * len(self.blocks[block_id])

    def commit_more(self) -> bool:
        return False


class _Chain:
    """Hashes of every prefix of one sequence, and of every prefix's pattern."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.patterns: list[int] = []
        self._last: dict[int, int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        row, pattern = (self.rows[-1], self.patterns[-1]) if self.rows else (1, 1)
        # Hashes of integers are the same in every process.
        for place in range(len(self.rows), len(token_ids)):
            token = token_ids[place]
            row = hash((row, token)) or 1
            pattern = hash((pattern, place - self._last.get(token, place)))
            self._last[token] = place
            self.rows.append(row)
            self.patterns.append(pattern)


class CanaryRunner:
    """Stands where the model runner stands in the engine.

    Attributes:
        wrong_rows: One line for every read of a row that is not the reader's.
    """

    def __init__(self, num_blocks: int, block_size: int, eos: int) -> None:
        self.num_blocks = num_blocks
        self.spec = KVCacheSpec((LayerSpec(1, 8, 8),), "float32", "model", block_size)
        self.pool_key = b"canary"
        self.storage = CanaryStorage(num_blocks, block_size)
        self.wrong_rows: list[str] = []
        self._eos = eos
        self._core: EngineCore | None = None
        self._chains: dict[int, _Chain] = {}

    def watch(self, core: EngineCore) -> None:
        """Learn whose text a chunk is: the runner itself is only told block tables."""
        self._core = core

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        assert self._core is not None
        held = self._core.manager.sequences
        owners = {id(held[seq.seq_id].block_table): seq for seq in self._core.scheduler.running}
        wanted: list[int] = []
        for chunk in chunks:
            seq = owners[id(chunk.block_table)]
            chain = self._chains.setdefault(seq.seq_id, _Chain())
            chain.extend(seq.token_ids)
            end = chunk.start + len(chunk.token_ids)
            self._read(chunk, chain, seq.seq_id)
            self._write(chunk.block_table, chunk.start, chain.rows[chunk.start : end])
            if chunk.needs_logits:
                wanted.append(self._next_token(seq.token_ids, chain, end))
        logits = torch.zeros(len(wanted), VOCAB_SIZE)
        if wanted:
            logits[range(len(wanted)), wanted] = 1000.0
        return logits

    def _read(self, chunk: Chunk, chain: _Chain, seq_id: int) -> None:
        size = self.spec.block_size
        rows = [row for block in chunk.block_table[: -(-chunk.start // size)] for row in self.storage.blocks[block]]
        if rows[: chunk.start] != chain.rows[: chunk.start]:
            place = next(i for i, row in enumerate(chain.rows) if rows[i] != row)
            self.wrong_rows.append(f"sequence {seq_id} reads a row at position {place} that is not of its text")

    def _write(self, table: Sequence[int], start: int, rows: Sequence[int]) -> None:
        size, blocks = self.spec.block_size, self.storage.blocks
        for place, row in enumerate(rows, start):
            blocks[table[place // size]][place % size] = row

    def _next_token(self, token_ids: Sequence[int], chain: _Chain, end: int) -> int:
        pattern = chain.patterns[end - 1]
        if pattern % 9 == 0:
            return self._eos
        place = (pattern >> 8) % end
        letters = (token_ids[i] for i in range(place, -1, -1) if token_ids[i] < _LETTERS)
        return next(letters, self._eos)
