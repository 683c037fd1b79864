"""The tokenizer's private copy: same ids, no forged tokens, no races, honest bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixkv.chat.encoding import Encoded, Encoder
from prefixkv.errors import InvalidRequest
from tests.chat.chats import byte_chatml, forgeable


def test_a_token_that_straddles_a_place_belongs_to_what_follows() -> None:
    """The emoji is four byte tokens of one character: none of them is before it, all are before the next character."""
    encoder = Encoder(byte_chatml())
    encoded = encoder.encode("ab🧿c")
    assert len(encoded.token_ids) == 7
    assert encoder.cut("ab🧿c", encoded, [0, 1, 2, 3, 4], False) == [0, 1, 2, 6, 7]


def test_places_without_offsets_are_found_by_encoding_what_is_before() -> None:
    encoder = Encoder(byte_chatml())
    text = "ab🧿c<|im_end|>d"
    encoded = encoder.encode(text)
    places = list(range(len(text) + 1))
    blind = Encoded(encoded.token_ids, None)
    assert encoder.cut(text, blind, places, False) == encoder.cut(text, encoded, places, False)


def test_a_key_that_spells_a_control_token_is_refused() -> None:
    """Keys are not marked by the tokenizer, so one in a tool call's arguments would end the turn."""
    encoder = Encoder(byte_chatml())
    with pytest.raises(InvalidRequest) as caught:
        encoder.spells_control([{"arguments": {"<|im_end|>": "x"}}], "messages")
    assert caught.value.code == "control_token"
    assert "im_end" not in str(caught.value)


def test_a_control_token_made_by_the_normaliser_is_refused() -> None:
    encoder = Encoder(forgeable())
    assert not encoder.spells_control("＜|end|＞", "messages")
    with pytest.raises(InvalidRequest) as caught:
        encoder.encode("a ＜|end|＞ b")
    assert caught.value.code == "control_token"
    assert len(encoder.encode("a <|end|> b").token_ids) == 5  # the template's own is fine


def test_splitting_control_tokens_in_one_thread_does_not_touch_another() -> None:
    """The tokenizer's setting is shared: without the copy and the lock, some of these ids come out wrong."""
    shared = byte_chatml()
    first, second = Encoder(shared), Encoder(shared)
    text = "x<|im_end|>y" * 50
    want = first.encode(text).token_ids
    marked = first.mark(text)
    wrong: list[int] = []

    def split() -> None:
        for _ in range(30):
            second.encode_marked(marked, lambda tokenizer: tokenizer(text, split_special_tokens=True)["input_ids"])
            first.encode_marked(marked, lambda tokenizer: tokenizer(text, split_special_tokens=True)["input_ids"])

    def encode() -> None:
        for _ in range(60):
            wrong.extend([1] * (first.encode(text).token_ids != want))

    threads = [threading.Thread(target=target) for target in (split, encode, encode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_longest_token_bounds_the_tokens_of_a_text() -> None:
    encoder = Encoder(byte_chatml())
    assert encoder.longest_token_chars == len("<|im_start|>")
    assert encoder.vocab_tokens == 258


def test_a_tokenizer_that_fuses_characters_gives_no_bound() -> None:
    """Ten megabytes of unknown letters may be one token to it: refusing them by their number would be wrong."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("[UNK]", special=True)])
    assert Encoder(PreTrainedTokenizerFast(tokenizer_object=backend)).longest_token_chars is None


def test_the_cache_of_words_is_emptied_before_each_use() -> None:
    """Else how long rare words take would tell a caller that another one has sent them."""
    encoder = Encoder(byte_chatml())
    emptied: list[bool] = []
    assert encoder._clear_cache is not None, "the tokenizer has such a cache"
    encoder._clear_cache = lambda: emptied.append(True)
    uses: list[Callable[[], object]] = [
        lambda: encoder.encode("some words"),
        lambda: encoder.encode_with_special("some words"),
        lambda: encoder.encode_marked("some words", lambda tokenizer: tokenizer("some words")["input_ids"]),
        lambda: encoder.settled("some words", 4, Encoded([1, 2], [4, 10])),
        lambda: encoder.cut("some words", Encoded([1, 2], None), [4], False),
    ]
    for number, use in enumerate(uses, 1):
        use()
        assert len(emptied) == number
