"""Where tokens end in their text, known from the ids alone: for tokenizers whose tokens are strings of bytes.

A tokenizer that is asked for the characters of tokens works a third longer than for ids alone. Byte-level tokens say it
themselves: each one holds so many first bytes of UTF-8 characters, and the sums of those are where tokens end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

__all__ = ["ByteLevelEncoder"]

_SAMPLES = (
    " A word,\n\n two  spaces  \n",
    "x",
    "na\u00efve caf\u00e9 10:31 \u4e2d\u6587 \u0627\u0644 \U0001f9ff\U0001f468\u200d\U0001f469 don't\t1234 ",
)


def _later_bytes() -> dict[int, None]:
    """Return what deletes the characters of a byte-level vocabulary that stand for later bytes of a character.

    Source: GPT-2's vocabulary: bytes that print stand for themselves, the others are numbered from 256.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printed]
    return dict.fromkeys(byte if byte in printed else 256 + others.index(byte) for byte in range(0x80, 0xC0))


class ByteLevelEncoder:
    """Encodes text with a Rust tokenizer of byte-level tokens.

    Its caller holds a lock: the tokenizer's options are the caller's business.
    """

    def __init__(self, backend: Any, characters: list[int]) -> None:
        """Take what :meth:`of` found: the tokenizer, and how many characters begin in each of its tokens."""
        self._backend = backend
        self._characters = characters
        self._normalises = backend.normalizer is not None

    @classmethod
    def of(cls, backend: Any, vocab: Mapping[str, int], added: Mapping[int, Any]) -> ByteLevelEncoder | None:
        """Return the encoder of a tokenizer, or None where its tokens are no bytes; changes nothing.

        Args:
            backend: Of :mod:`tokenizers`.
            vocab: Token to id.
            added: Id to added token, as transformers lists them.
        """
        if not hasattr(backend, "encode_batch_fast"):
            return None
        # Of other normalisers it is not known what they leave alone.
        if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
            return None
        # A token that does not exist: the sum is then never that of the text.
        characters = [1 << 62] * (max(vocab.values(), default=-1) + 1)
        later = _later_bytes()
        for token, index in vocab.items():
            characters[index] = len(token) if token.isascii() else len(token.translate(later))
        for index, token in added.items():
            if 0 <= index < len(characters):
                characters[index] = len(str(token.content))
        encoder = cls(backend, characters)
        samples = ("".join((*_SAMPLES, *(str(token.content) for token in added.values())))[:4000], *_SAMPLES)
        return encoder if all(encoder._is_right_about(sample) for sample in samples) else None

    def encode(self, text: str) -> tuple[list[int], list[int]] | None:
        """Return ids and ends of text, or None where the ends cannot be told this way."""
        if self._normalises and not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return None
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ends = list(accumulate(map(self._characters.__getitem__, ids)))
        return (ids, ends) if (ends[-1] if ends else 0) == len(text) else None

    def _is_right_about(self, text: str) -> bool:
        """Return whether ids and ends are those of the tokenizer where it says which characters a token has."""
        found, said = self.encode(text), self._backend.encode(text, add_special_tokens=False)
        if found is None or found[0] != said.ids:
            return False
        pairs = zip(found[1], said.offsets, strict=True)
        return all(end == last for end, (first, last) in pairs if first < last)
