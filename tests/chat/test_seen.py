"""Text that began before as it begins now: the same ids as ever, whatever was sent before."""

from __future__ import annotations

from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

from prefixkv.chat.encoding import Encoder
from prefixkv.chat.recall import Recall, Reply, Sent
from prefixkv.chat.seen import encode_seen, longest_beginning
from prefixkv.chat.segment import Segment, SegmentKind
from prefixkv.chat.segmenter import Segmenter
from prefixkv.errors import InvalidRequest
from prefixkv.scope import Principal, ScopeLevel
from tests.chat.chats import POLICY, byte_chatml, forgeable

MARKS = {
    "qwen2": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "phi-3": ("<|user|>", "<|end|>", "<|assistant|>", "<|system|>", "<s>"),
    "gpt-2": ("<|endoftext|>",),
    "starcoder": ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>"),
    "bert-bge": ("[CLS]", "[SEP]", "[MASK]"),
}
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")

_WORDS = (
    *("Hello", " you", "10", " 10:31", "\n", "\n\n", " ", "   ", "\t", "\r\n", ".", "…", "it's", "```py\n"),
    *(
        "👩‍👩‍👧",
        "🧿",
        "e\u0301",
        "\u200b",
        "\u200d",
        "\u202eabc\u202c",
        "שלום \u200f",
        "नमस्ते",
        "你好",
        "ﬁ",
        "＜|end|＞",
    ),
    *(
        "<|im_start",
        "im_end|>",
        "<|",
        "|>",
        "<s",
        "</s>",
        "[SEP",
        "<|end|",
        "<think>",
        "</think>",
        "x<word>y",
        " <wide> ",
    ),
)
CONTENTS = st.one_of(st.lists(st.sampled_from(_WORDS), max_size=6).map("".join), st.text(max_size=12))


@st.composite
def chats(draw: st.DrawFn, marks: tuple[str, ...]) -> tuple[str, list[tuple[str, int]]]:
    """A rendered chat, and texts that were sent before with how many of their tokens are remembered at most."""
    mark = st.sampled_from(marks)
    glue = st.sampled_from(("", "\n", " ", "user\n"))
    turns = draw(st.lists(st.tuples(mark, glue, CONTENTS, mark, glue), min_size=1, max_size=4))
    text = "".join("".join(turn) for turn in turns)
    before = []
    for _ in range(draw(st.integers(1, 3))):
        kept = "".join("".join(turn) for turn in turns[: draw(st.integers(0, len(turns)))])
        place = draw(st.integers(0, len(text)))
        other = draw(st.one_of(st.just(""), CONTENTS, mark))
        edited = text[:place] + other + text[place + draw(st.integers(0, 2)) :]
        known = draw(st.sampled_from((text, kept, kept + other, edited, text[:place], other)))
        before.append((known, draw(st.integers(1, 80))))
    return text, before


def sent_of(encoder: Encoder, text: str, **more: Any) -> Sent:
    encoded = encoder.encode(text)
    assert encoded.ends is not None
    end = len(encoded.token_ids)
    parts = (Segment(SegmentKind.USER, 0, end, ScopeLevel.SESSION),) if end else ()
    return Sent(text, array("I", encoded.token_ids), array("I", encoded.ends), parts, **more)


def check(encoder: Encoder, text: str, before: list[tuple[str, int]]) -> None:
    """What was sent before, whole and cut short, changes neither ids nor ends."""
    prompts = []
    try:
        want = encoder.encode(text)
        for known, tokens in before:
            whole = sent_of(encoder, known)
            if whole.token_ids:
                prompts += [whole, whole.cut(tokens)]
    except InvalidRequest:
        assume(False)
    assume(want.ends is not None)
    got, is_spliced = encode_seen(text, prompts, encoder, splices=False)
    assert got.token_ids == want.token_ids
    assert got.ends == want.ends
    assert not is_spliced


@lru_cache
def encoder_of(folder: Path, name: str) -> Encoder:
    return Encoder(AutoTokenizer.from_pretrained(folder / "tokenizers" / name))


@pytest.mark.data
@pytest.mark.parametrize("name", MARKS)
@settings(max_examples=40)
@given(data=st.data())
def test_ids_and_ends_do_not_depend_on_what_was_sent_before(name: str, data_dir: Path, data: st.DataObject) -> None:
    """Byte-level, SentencePiece and WordPiece tokenizers, and chats that grew, were edited or cut short since."""
    encoder = encoder_of(data_dir, name)
    check(encoder, *data.draw(chats(MARKS[name])))


@lru_cache
def synthetic(name: str) -> Encoder:
    def special(text: str, **options: bool) -> AddedToken:
        return AddedToken(text, special=True, normalized=False, **options)

    merges = (("Ċ", "Ċ"), ("Ġ", "1"), ("1", "0"), ("Ġ", "Ġ"), ("<", "|"))
    makers = {
        "bytes": byte_chatml,
        "merges": lambda: byte_chatml(merges=merges),
        "normaliser": lambda: byte_chatml(normalizer=normalizers.NFKC(), merges=merges),
        "forgeable": forgeable,
        "strips": lambda: byte_chatml(
            extra=(special("<wide>", lstrip=True, rstrip=True), special("<left>", lstrip=True)), merges=merges
        ),
        "whole words": lambda: byte_chatml(extra=(special("<word>", single_word=True),)),
    }
    return Encoder(makers[name]())


@pytest.mark.parametrize("name", ["bytes", "merges", "normaliser", "forgeable", "strips", "whole words"])
@settings(max_examples=40)
@given(data=st.data())
def test_made_up_tokenizers_give_the_same_ids_too(name: str, data: st.DataObject) -> None:
    """Merges over line breaks, a normaliser, control tokens that swallow white space or want to stand alone."""
    extra = {"forgeable": ("<|end|>",), "strips": ("<wide>", "<left>"), "whole words": ("<word>",)}
    check(synthetic(name), *data.draw(chats((*CHATML_MARKS, *extra.get(name, ())))))


SEGMENTER = Segmenter(byte_chatml(merges=(("Ċ", "Ċ"), ("Ġ", "1"), ("1", "0"), ("Ġ", "Ġ"), ("<", "|"))))
PRINCIPALS = [Principal("acme", "ann", "1"), Principal("acme", "bob", "1"), Principal("other", "ann", "1")]


@settings(max_examples=40)
@given(
    contents=st.lists(CONTENTS, min_size=3, max_size=5),
    sent=st.lists(st.tuples(st.sampled_from(PRINCIPALS), st.integers(0, 5), st.integers(0, 4), CONTENTS), max_size=5),
)
def test_a_prompt_is_the_same_whatever_its_scopes_remember(
    contents: list[str], sent: list[tuple[Principal, int, int, str]]
) -> None:
    """Ids, segments and scopes: of chats that grew, of edited ones, of what the tenant shares; through the memory."""
    recall = Recall()
    chat = [{"role": ("system", "user", "assistant")[i and 2 - i % 2], "content": t} for i, t in enumerate(contents)]
    for who, turns, place, other in [*sent, (PRINCIPALS[0], 5, 5, "")]:
        messages = [dict(message) for message in chat[: max(turns, 2)]]
        if place < len(messages):
            messages[place]["content"] = other
        prompt = SEGMENTER.segment(messages, policy=POLICY, past=recall.past(who))
        assert prompt == SEGMENTER.segment(messages, policy=POLICY)
        assert prompt.origin is not None
        recall.remember(who, prompt.origin.sent, {})


# -- how much is known ------------------------------------------------------------------------------------------------

HEAD = "<|im_start|>system\nBe kind.<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
ENCODER = Encoder(byte_chatml(merges=(("H", "i"),)))
LETTER = {letter: ENCODER.encode(letter).token_ids[0] for letter in "Hi"}


def test_what_is_known_ends_where_the_last_control_token_of_the_common_text_starts() -> None:
    """Nothing before it depends on what follows; all of it need not be tokenised again."""
    sent = sent_of(ENCODER, HEAD + "<|im_start|>user\nHello<|im_end|>\n")
    known = longest_beginning(HEAD + "<|im_start|>user\nHelp<|im_end|>\n", [sent], ENCODER, splices=False)
    assert known is not None
    assert (known.characters, known.tokens, known.sent) == (len(HEAD), len(ENCODER.encode(HEAD).token_ids), sent)


def test_the_longest_of_many_beginnings_is_taken() -> None:
    texts = [HEAD[:20], HEAD + OPEN, HEAD, HEAD + OPEN + "Hi<|im_end|>", "<|im_start|>user"]
    known = longest_beginning(
        HEAD + OPEN + "Hi<|im_end|>\n", [sent_of(ENCODER, text) for text in texts], ENCODER, splices=False
    )
    assert known is not None
    assert known.characters == len(HEAD + OPEN + "Hi")
    assert known.sent.text == texts[3]


@pytest.mark.parametrize("text", ["", "no control token at all", "other<|im_start|>", HEAD[:30] + "<|im_end|>"])
def test_text_that_begins_otherwise_is_not_known(text: str) -> None:
    assert longest_beginning(text, [sent_of(ENCODER, HEAD)], ENCODER, splices=False) is None


def test_a_beginning_is_found_however_far_back_its_last_control_token_is() -> None:
    """It is looked for in a small window first."""
    text = HEAD + OPEN + "x" * 5000
    known = longest_beginning(text + "y", [sent_of(ENCODER, text)], ENCODER, splices=False)
    assert known is not None
    assert known.characters == len(HEAD)


# -- spliced replies --------------------------------------------------------------------------------------------------


def spelt_out(reply: str = "Hi", **more: Any) -> Sent:
    """A prompt with a reply that came letter by letter, though its text encodes to one token."""
    return sent_of(ENCODER, HEAD + OPEN, replies=(Reply(reply, (LETTER["H"], LETTER["i"])),), **more)


@pytest.mark.parametrize("splices", [True, False])
def test_a_reply_keeps_the_ids_it_was_generated_as_only_where_the_policy_says_so(splices: bool) -> None:
    text = HEAD + OPEN + "Hi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    own = ENCODER.encode(text)
    got, is_spliced = encode_seen(text, [spelt_out()], ENCODER, splices=splices)
    assert is_spliced is splices
    assert ENCODER.tokenizer.decode(got.token_ids) == text
    assert got.ends is not None and own.ends is not None
    assert got.ends[-1] == own.ends[-1] == len(text)
    if not splices:
        assert got == own
        return
    place = len(ENCODER.encode(HEAD + OPEN).token_ids)
    assert got.token_ids == [*own.token_ids[:place], LETTER["H"], LETTER["i"], *own.token_ids[place + 1 :]]
    assert got.ends == [*own.ends[:place], own.ends[place], own.ends[place], *own.ends[place + 1 :]]


@pytest.mark.parametrize(
    "behind", ["Hi", "Hi there<|im_end|>", "Ho<|im_end|>", "hHi<|im_end|>"], ids=["open", "longer", "other", "later"]
)
def test_a_reply_is_spliced_only_where_it_came_back_word_for_word_and_a_control_token_ends_it(behind: str) -> None:
    """Else its last tokens could have been grouped with what follows."""
    text = HEAD + OPEN + behind
    assert encode_seen(text, [spelt_out()], ENCODER, splices=True) == (ENCODER.encode(text), False)


def test_a_reply_without_ids_is_not_spliced() -> None:
    sent = sent_of(ENCODER, HEAD + OPEN, replies=(Reply("Hi", ()),))
    text = HEAD + OPEN + "Hi<|im_end|>"
    assert encode_seen(text, [sent], ENCODER, splices=True) == (ENCODER.encode(text), False)


def test_a_prompt_with_spliced_ids_is_no_beginning_once_the_policy_stops_splicing() -> None:
    """Else turning it off would change nothing for conversations that are going on."""
    text = HEAD + OPEN + "Hi<|im_end|>\n"
    encoded, _ = encode_seen(text, [spelt_out()], ENCODER, splices=True)
    assert encoded.ends is not None
    sent = Sent(text, array("I", encoded.token_ids), array("I", encoded.ends), (), is_spliced=True)
    longer = text + "<|im_start|>user\nBye<|im_end|>\n"
    assert encode_seen(longer, [sent], ENCODER, splices=False) == (ENCODER.encode(longer), False)
    got, is_spliced = encode_seen(longer, [sent], ENCODER, splices=True)
    assert is_spliced
    assert got.token_ids[: len(encoded.token_ids)] == encoded.token_ids


@settings(max_examples=40)
@given(data=st.data())
def test_splicing_changes_ids_but_never_what_they_spell(data: st.DataObject) -> None:
    encoder = ENCODER
    text, before = data.draw(chats(CHATML_MARKS))
    prompts = []
    for known, _ in before:
        reply = data.draw(st.one_of(CONTENTS, st.just(text[len(known) : len(known) + data.draw(st.integers(0, 9))])))
        letters = [index for letter in reply for index in encoder.encode(letter).token_ids]
        prompts.append(sent_of(encoder, known, replies=(Reply(reply, tuple(letters)),)))
    got, is_spliced = encode_seen(text, prompts, encoder, splices=True)
    decode = encoder.tokenizer.decode
    assert decode(got.token_ids) == decode(encoder.encode(text).token_ids)
    assert is_spliced or got == encoder.encode(text)
    assert got.ends is not None
    assert got.ends == sorted(got.ends)
