"""Text to token ids, and characters to tokens, with control tokens kept out of the content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from prefixkv.chat.ends import ByteLevelEncoder
from prefixkv.chat.private import own_backend, private_copy
from prefixkv.chat.rendering import common_prefix
from prefixkv.errors import InvalidRequest

__all__ = ["Encoded", "Encoder"]

# The tokenizer's own marks around control tokens in content. Using the same two means that whatever it does with
# them (it drops them from content, and breaks the text where one stands alone) happens here too.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_MARKS = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")
# Runs of one character that tokenizers shorten: if one of them takes fewer tokens than the longest token explains,
# characters are dropped or fused, and their number says nothing about the number of tokens.
_RUNS = (" ", "\n", "\t", "a", "\u0301", "\ue123", "\U0001f9ff", "\x01", "\u200b", "\u4e2d")
_RUN_LENGTH = 2000
# What is tried behind a place to see whether the tokens before it depend on it, and how many of them are looked at.
_FOLLOWERS = (*map(chr, range(32, 127)), *"\n\t\r\u00a0éß中あ한א\u0627नд🧿\u0301\u200d")
_WINDOW_TOKENS = 16
_MOST_SETTLED = 512
_SPLIT_WINDOW = 1024
"""Characters in which a control token is looked for first: there is one in nearly every turn."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text.

    Attributes:
        token_ids: The ids.
        ends: For each token, how many characters of the text end with it at the latest; None if unknown.
    """

    token_ids: list[int]
    ends: list[int] | None


class Encoder:
    """A private copy of a tokenizer, safe to call from many threads.

    Encoding text with its control tokens split changes a setting of the tokenizer for a moment, so other threads, and
    other engines on the same tokenizer, would now and then get wrong ids: hence the copy, and a lock around it.

    Attributes:
        tokenizer: The copy. Only this class may encode with it; rendering and decoding are free.
        vocab_tokens: One more than the highest token id.
        longest_token_chars: Most characters that a token of running text stands for, or None where the tokenizer
            drops or fuses characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = private_copy(tokenizer)
        self._lock = threading.Lock()
        self._has_offsets = bool(getattr(self.tokenizer, "is_fast", False))
        self._backend = own_backend(self.tokenizer, tokenizer)
        model = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "model", None)
        self._clear_cache: Callable[[], None] | None = getattr(model, "_clear_cache", None)
        vocab: Mapping[str, int] = self.tokenizer.get_vocab()
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self._byte_level = None if self._backend is None else ByteLevelEncoder.of(self._backend, vocab, added)
        self.vocab_tokens = max(vocab.values(), default=-1) + 1
        self._controls = _control_tokens(self.tokenizer)
        # Longer tokens first: one token may be the beginning of another.
        spelt = sorted(self._controls, key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, spelt)) or "(?!)")
        self._first_chars = tuple(sorted({token[0] for token in spelt}))
        self._are_kept_by_json = all(json.dumps(token, ensure_ascii=False) == f'"{token}"' for token in spelt)
        self.longest_token_chars = self._longest(vocab)

    # -- control tokens ------------------------------------------------------------------------------------------

    def spells_control(self, value: Any, path: str) -> bool:
        """Return whether any text in plain data spells a control token; changes nothing.

        Raises:
            InvalidRequest: ``control_token`` if a key of a mapping does: keys cannot be marked.
        """
        # One look at all of it is nearly always enough.
        if self._are_kept_by_json and not self._spells(json.dumps(value, ensure_ascii=False)):
            return False
        return self._spells_somewhere(value, path)

    def _spells(self, text: str) -> bool:
        return any(char in text for char in self._first_chars) and bool(self._control_re.search(text))

    def _spells_somewhere(self, value: Any, path: str) -> bool:
        if isinstance(value, str):
            return self._spells(value)
        if isinstance(value, dict):
            if any(self._spells(key) for key in value):
                raise InvalidRequest("control_token", path, "a key spells a control token of the model; rename it")
            return any([self._spells_somewhere(item, path) for item in value.values()])
        if isinstance(value, list):
            return any([self._spells_somewhere(item, path) for item in value])
        return False

    def mark(self, value: Any, words: tuple[str, str] = (_OPEN, _CLOSE)) -> Any:
        """Return plain data with every control token spelt in it between two marks; changes nothing."""
        if isinstance(value, str):
            bare = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._control_re.sub(lambda match: f"{words[0]}{match[0]}{words[1]}", bare)
        if isinstance(value, Mapping):
            return {key: self.mark(item, words) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, words) for item in value]
        return value

    @staticmethod
    def unmarked(text: str, ends: Sequence[int]) -> tuple[str, list[int]]:
        """Return marked text without its marks, and the same ends in it; changes nothing."""
        marks = [place for place, char in enumerate(text) if char in (_OPEN, _CLOSE)]
        bare = text.replace(_OPEN, "").replace(_CLOSE, "")
        return bare, [end - bisect_left(marks, end) for end in ends]

    def check_kept(self, token_ids: Sequence[int], text: str, words: tuple[str, str]) -> None:
        """Refuse ids with more control tokens than the template wrote; changes nothing.

        A template that prints a list or a mapping as Python would escapes the tokenizer's marks away and leaves the
        control token they stood around. Words of letters survive that.

        Args:
            token_ids: The ids.
            text: The same chat, rendered from content marked with ``words``.
            words: Two unique words.

        Raises:
            InvalidRequest: ``control_token``.
        """
        own = Counter(
            match[0]
            for match in self._control_re.finditer(text)
            if not (text.endswith(words[0], 0, match.start()) and text.startswith(words[1], match.end()))
        )
        made = Counter(token_ids)
        if any(made[index] > own[token] for token, (index, _) in self._controls.items()):
            hint = "spells a control token of the model where the chat template cannot keep it as text; remove it"
            raise InvalidRequest("control_token", "messages", hint)

    # -- encoding ------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> Encoded:
        """Return the ids of rendered text; no special tokens are added."""
        with self._own_cache():
            encoded = self._encode(text)
        self._check_forged(text, encoded)
        return encoded

    def encode_marked(self, text: str, reference: Callable[[Any], Any]) -> Encoded:
        """Return the ids of text rendered from marked content, control tokens in it as plain text.

        Args:
            text: The rendered text with its marks.
            reference: Called with the tokenizer, returns the ids that it makes itself. They are what counts; the
                ends come from our own encoding, piece by piece, and only if it makes the same ids.

        Raises:
            InvalidRequest: ``control_token`` if the tokenizer cannot write a control token as text.
        """
        with self._own_cache():
            try:
                token_ids = list(reference(self.tokenizer))
            except ValueError:  # its message quotes the token, so it is not passed on
                raise InvalidRequest(
                    "control_token", "messages", "spells a control token that this tokenizer cannot write as plain text"
                ) from None
            mine = self._encode_pieces(text)
        encoded = Encoded(token_ids, mine.ends if mine.token_ids == token_ids else None)
        self._check_forged(_MARKS.sub("\0", text), encoded)
        return encoded

    def encode_with_special(self, text: str) -> list[int]:
        """Return the ids of raw text with the special tokens that the tokenizer adds by default."""
        with self._own_cache():
            return list(self.tokenizer(text, padding=False, truncation=False, verbose=False)["input_ids"])

    def cut(self, text: str, encoded: Encoded, positions: Iterable[int], is_marked: bool) -> list[int]:
        """Return, for each position in the text, how many tokens hold nothing from there on.

        A token that straddles a position is not counted: it holds later text. Without ends, the text up to the
        position is encoded alone, and the tokens that it shares with the whole count.
        """
        if encoded.ends is not None:
            return [bisect_right(encoded.ends, position) for position in positions]
        return [self._shared_tokens(text, encoded.token_ids, position, is_marked) for position in positions]

    def settled(self, text: str, position: int, encoded: Encoded, known: dict[bytes, int] | None = None) -> int:
        """Return up to where the tokens before a place are the same whatever character stands there.

        A tokenizer may group the last characters before a place by what follows: `` 10`` is one token, two line breaks
        are one or two. If such tokens were shared, others could see a trace of the text behind them. Where a control
        token follows, they cannot: tokenizers split there. One character of context is tried, and some tokens of
        the text before; without ends the place itself is returned.

        Args:
            text: The text.
            position: The place.
            encoded: Its tokens.
            known: What was found before, by digest of the text before a place; more is added.
        """
        if encoded.ends is None or self._control_re.match(text, position):
            return position
        first = bisect_right(encoded.ends, position) - _WINDOW_TOKENS
        start = max(encoded.ends[first - 1] if first > 0 else 0, text.rfind(_CLOSE, 0, position) + 1)
        window = text[start:position]
        key = hashlib.blake2b(window.encode(), digest_size=16).digest()
        place = None if known is None else known.get(key)  # other threads change it
        if place is None:
            place = self._settled(window)
            if known is not None:
                if len(known) >= _MOST_SETTLED:
                    known.clear()
                known[key] = place
        return start + place

    def _settled(self, window: str) -> int:
        texts = [window, *(window + char for char in _FOLLOWERS)]
        with self._own_cache():
            encoded = self._encode(window)
            ids = self._ids_of(texts)
        shared = ids[0]
        for other in ids[1:]:
            shared = shared[: common_prefix(shared, other)]
        return encoded.ends[len(shared) - 1] if shared and encoded.ends else 0

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        if self._backend is not None and hasattr(self._backend, "encode_batch_fast"):
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        out = self.tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)
        return list(out["input_ids"])

    def splits_at(self, text: str, position: int) -> bool:
        """Return whether a control token starts at a place whatever is around it: tokenizers split there."""
        match = self._control_re.match(text, position)
        return match is not None and not self._controls[match[0]][1]

    def last_split(self, text: str, limit: int) -> int:
        """Return where the last such control token that ends by ``limit`` starts, or 0."""
        size = _SPLIT_WINDOW
        while True:
            start = max(0, limit - size)
            found = self._control_re.finditer(text, start, limit)
            places = [match.start() for match in found if not self._controls[match[0]][1]]
            if places or not start:
                return places[-1] if places else 0
            size *= 8

    def _shared_tokens(self, text: str, token_ids: list[int], position: int, is_marked: bool) -> int:
        if position >= len(text):
            return len(token_ids)
        with self._own_cache():
            alone = (self._encode_pieces if is_marked else self._encode)(text[:position]).token_ids
        return common_prefix(alone, token_ids)

    def _encode(self, text: str, **kwargs: Any) -> Encoded:
        if self._backend is not None and not kwargs:
            # What transformers would do, without its copies: a fifth less for a long prompt.
            self._backend.no_padding()
            self._backend.no_truncation()
            self._backend.encode_special_tokens = False
            found = None if self._byte_level is None else self._byte_level.encode(text)
            if found is not None:
                return Encoded(*found)
            encoding = self._backend.encode(text, add_special_tokens=False)
            return Encoded(encoding.ids, _ends(encoding.offsets))
        out = self.tokenizer(
            text,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_offsets_mapping=self._has_offsets,
            verbose=False,
            **kwargs,
        )
        return Encoded(list(out["input_ids"]), _ends(out["offset_mapping"]) if self._has_offsets else None)

    def _encode_pieces(self, text: str) -> Encoded:
        """Encode marked text: what is marked as plain text, the rest as it is.

        Source: ``sanitize_control_tokens`` of transformers, whose ids this must reproduce; we add the ends.
        """
        newline = self._encode("\n").token_ids
        token_ids: list[int] = []
        ends: list[int] | None = [] if self._has_offsets else None
        position = 0
        for start, end, is_text in _pieces(text):
            options = {"split_special_tokens": True} if is_text else {}
            # After the first piece, a newline in front keeps SentencePiece from adding its leading space.
            piece, skip, shift = self._encode(text[start:end], **options), 0, 0
            if position:
                behind = self._encode("\n" + text[start:end], **options)
                if behind.token_ids[: len(newline)] == newline:
                    piece, skip, shift = behind, len(newline), 1
            token_ids += piece.token_ids[skip:]
            if ends is not None and piece.ends is not None:
                ends += [start + end_ - shift for end_ in piece.ends[skip:]]
            position = end
        return Encoded(token_ids, ends)

    def _check_forged(self, text: str, encoded: Encoded) -> None:
        """Refuse a control token made by the tokenizer's normaliser from text that does not spell it."""
        suspects = {index: token for token, (index, is_touched) in self._controls.items() if is_touched}
        if not suspects:
            return
        spelt = {token: text.count(token) for token in suspects.values()}
        made = dict.fromkeys(suspects, 0)
        for index in encoded.token_ids:
            if index in made:
                made[index] += 1
        if any(made[index] > spelt[token] for index, token in suspects.items()):
            raise InvalidRequest("control_token", "messages", "text that the tokenizer turns into a control token")

    @contextlib.contextmanager
    def _own_cache(self) -> Iterator[None]:
        """Use the tokenizer alone, with its cache of words empty.

        It keeps the tokens of the words that it met, whoever sent them: how long rare words take would tell a caller
        that another one has used them.
        """
        with self._lock:
            if self._clear_cache is not None:
                self._clear_cache()
            yield

    # -- bounds --------------------------------------------------------------------------------------------------

    def _longest(self, vocab: Mapping[str, int]) -> int | None:
        longest = max(map(len, vocab), default=1)
        for char in _RUNS:
            with self._own_cache():
                tokens = len(self._encode(char * _RUN_LENGTH).token_ids)
            if tokens * longest < _RUN_LENGTH:
                return None
        return longest


def _control_tokens(tokenizer: Any) -> dict[str, tuple[int, bool]]:
    """Return the control tokens' text -> (id, whether a normaliser or the letters beside it decide what matches)."""
    declared = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    template = getattr(tokenizer, "chat_template", None)
    written = template if isinstance(template, str) else "\0".join((template or {}).values())
    found: dict[str, tuple[int, bool]] = {}
    for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        text = str(token.content)
        if text and (token.special or text in declared or (text in written and not text.isspace())):
            is_touched = bool(getattr(token, "normalized", False) or getattr(token, "single_word", False))
            found[text] = (int(index), is_touched)
    return found


def _pieces(text: str) -> list[tuple[int, int, bool]]:
    """Return (start, end, is marked) of the pieces of marked text that hold anything."""
    pieces: list[tuple[int, int, bool]] = []
    position = 0
    for match in _MARKS.finditer(text):
        pieces.append((position, match.start(), False))
        if match[1] is not None:
            pieces.append((match.start(1), match.end(1), True))
        position = match.end()
    pieces.append((position, len(text), False))
    return [piece for piece in pieces if piece[0] < piece[1]]


def _ends(offsets: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return each token's end, or None if the offsets do not run forward.

    A token without characters of its own (a lone space whose offsets were trimmed) takes the end of the next token,
    so that it never counts as earlier than it is.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    if any(map(eq, starts, ends)):
        for i in range(len(ends) - 2, -1, -1):
            if starts[i] == ends[i]:
                ends[i] = ends[i + 1]
    return ends if ends == sorted(ends) else None
