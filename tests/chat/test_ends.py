"""Ends known from ids are the ends that the tokenizer tells, wherever it tells them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from prefixkv.chat.encoding import Encoder
from prefixkv.chat.ends import ByteLevelEncoder
from prefixkv.model.load import load_tokenizer

BYTE_LEVEL = ("gpt-2", "qwen2", "starcoder")
WORDS = (
    *(" the", "caf\u00e9", "e\u0301", "\u4e2d\u6587", "\U0001f468\u200d\U0001f469", "\n\n", "  ", "\t", "10:31"),
    *("don't", " ", "\u0627"),
)


def encoder_of(tokenizer: Any) -> ByteLevelEncoder | None:
    return ByteLevelEncoder.of(
        tokenizer.backend_tokenizer, tokenizer.get_vocab(), getattr(tokenizer, "added_tokens_decoder", {})
    )


def check(encoder: ByteLevelEncoder, text: str) -> bool:
    """Compare with the offsets; return whether there was something to compare, or there need not be."""
    found, said = encoder.encode(text), encoder._backend.encode(text, add_special_tokens=False)
    if found is None:  # there are characters that a vocabulary cannot spell
        return bool(encoder._backend.decode(said.ids, skip_special_tokens=False) != text)
    assert found[0] == said.ids
    assert sorted(found[1]) == found[1]
    assert all(end == last for end, (first, last) in zip(found[1], said.offsets, strict=True) if first < last)
    return True


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def demo_encoder(demo: Any) -> ByteLevelEncoder:
    encoder = encoder_of(demo)
    assert encoder is not None
    return encoder


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=12))
def test_ends_are_those_of_the_offsets(demo_encoder: ByteLevelEncoder, parts: list[str]) -> None:
    assert check(demo_encoder, "".join(parts).encode("utf-8", "ignore").decode())


@pytest.mark.data
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_ends_with_published_tokenizers(data_dir: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / name)
    encoder = encoder_of(tokenizer)
    assert encoder is not None
    specials = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
    for text in ("", "x", "".join(WORDS[:2] + WORDS[3:]), "a".join(specials), *specials, *WORDS):
        assert check(encoder, text) or "\u0301" in text


@pytest.mark.data
@pytest.mark.parametrize("name", ["bert-bge", "phi-3"])
def test_tokens_that_are_no_bytes_are_left_to_the_tokenizer(data_dir: Path, name: str) -> None:
    assert encoder_of(AutoTokenizer.from_pretrained(data_dir / "tokenizers" / name)) is None


def byte_level(normalizer: Any = None, *, prefix_space: bool = False, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(list(added))
    return backend


def of(backend: Tokenizer) -> ByteLevelEncoder | None:
    spelt = json.loads(backend.to_str())["added_tokens"]
    added = {token["id"]: AddedToken(token["content"]) for token in spelt}
    return ByteLevelEncoder.of(backend, backend.get_vocab(), added)


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizers.Lowercase()),
        byte_level(normalizers.NFKC()),
        byte_level(prefix_space=True),
        byte_level(added=(AddedToken("<m>", lstrip=True),)),
    ],
    ids=["lowercase", "NFKC", "space in front", "a token that takes the space before it"],
)
def test_what_changes_the_text_first_is_left_to_the_tokenizer(backend: Tokenizer) -> None:
    encoder = of(backend)
    assert encoder is None or encoder.encode("a <m> b") is None


def test_text_that_is_composed_first_is_left_to_the_tokenizer() -> None:
    encoder = of(byte_level(normalizers.NFC()))
    assert encoder is not None
    assert encoder.encode("e\u0301") is None
    assert encoder.encode("\u00e9 and so on") == (
        [*encoder._backend.encode("\u00e9 and so on").ids],
        [1, 1, *range(2, 12)],
    )


def test_an_encoder_ends_tokens_of_white_space_where_they_end(demo: Any) -> None:
    """The offsets that the tokenizer tells leave white space out; that is not where the next token begins."""
    encoded = Encoder(demo).encode("a  \n\n b")
    assert encoded.ends is not None
    assert encoded.ends[-1] == 7 and len(set(encoded.ends)) == len(encoded.token_ids)
