"""Token ids to text, as they come. Knows nothing of the model; the engine keeps one :class:`Detokenizer` per reply.

    token -> window of a few ids -> text that no later token can change -> stop strings -> text to show

Text is released only when it is final: characters spread over tokens wait for their last byte, and text that may be
the beginning of a stop string waits until it is one or is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Detokenizer", "TokenDecoder"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_TAIL_TOKENS = 8
"""Ids that decide whether the text ends inside a character: more than the 4 bytes that a character can have."""

_WINDOW_TOKENS = 16
"""Ids kept at most for the sake of tokens that show no text of their own."""


class TokenDecoder(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Return the text of the ids."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Return the vocabulary entry of an id, or None."""


class Detokenizer:
    """The text of one reply. Only the engine thread uses it.

    Without stop strings, all text together is what ``tokenizer.decode`` gives for all ids, special tokens skipped.

    A reply ends at the stop string that begins first in the text, and of several that begin there at the shortest,
    however the tokens cut it. Special tokens are skipped before the search: a stop string that spells one is not found.

    Args:
        tokenizer: Decodes ids.
        stop: Non-empty strings that end the reply.
        include_stop: Whether the stop string stays in the text.
        skip_special_tokens: Whether special tokens are left out.

    Attributes:
        stopped: The stop string that ended the reply, or None.
    """

    def __init__(
        self, tokenizer: TokenDecoder, stop: Sequence[str], include_stop: bool, skip_special_tokens: bool = True
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # A window of ids: first some whose text is known already, then those that are still waiting. The first ones
        # give the others their context, as a tokenizer may treat the beginning of a text in its own way.
        self._window: list[int] = []
        self._num_known_tokens = 0
        self._num_known_chars = 0
        self._stops = _StopSearch(stop, include_stop)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._parts)

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that became final; mutates. Ignores what follows a stop string."""
        if self.stopped is not None:
            return ""
        alone = self._decode([token_id])
        if not alone and self._is_dropped(token_id):
            return ""
        self._window.append(token_id)
        if self._is_open(token_id, alone):
            return ""
        return self._release(self._read())

    def finish(self) -> str:
        """Return all text that was held back; mutates. Bytes of an unfinished character become U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._read())
        if self.stopped is None:
            rest, self.stopped = self._stops.finish()
            self._parts.append(rest)
            text += rest
        return text

    def spells(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether these ids, and no special ones among them, decode to exactly this text."""
        return bool(token_ids) and self._decode(list(token_ids), all_tokens=True) == text

    def _decode(self, token_ids: list[int], *, all_tokens: bool = False) -> str:
        skip = self._skip_special_tokens and not all_tokens
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    def _is_dropped(self, token_id: int) -> bool:
        """Return whether decoding passes over this id, which shows no text alone: it is special, or unknown.

        A token of one space shows none either where a leading space is stripped, and has to stay.
        """
        if self._skip_special_tokens and self._decode([token_id], all_tokens=True):
            return True
        return self._tokenizer.convert_ids_to_tokens(token_id) is None

    def _is_open(self, token_id: int, alone: str) -> bool:
        """Return whether a later token can change what the window's last token shows."""
        if len(alone) <= 1:
            # <0xE4> is one byte of a run that is decoded as a whole: one byte that does not fit spoils all of it.
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if piece is not None and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return True
        if not alone.endswith(_REPLACEMENT):
            return False
        # The token may end a character that it did not begin. A few ids tell, so a long row of stray bytes stays cheap.
        tail = self._window[max(self._num_known_tokens, len(self._window) - _TAIL_TOKENS) :]
        return self._decode(tail).endswith(_REPLACEMENT)

    def _read(self) -> str:
        """Return the text of the waiting ids and count them as known; mutates."""
        waiting = self._window[self._num_known_tokens :]
        if not waiting:
            return ""
        text = self._decode(self._window)
        new = text[self._num_known_chars :]
        own = self._decode(waiting) if self._num_known_tokens else text
        if own or len(self._window) > _WINDOW_TOKENS:
            self._window, text = waiting, own
        self._num_known_tokens, self._num_known_chars = len(self._window), len(text)
        return new

    def _release(self, text: str) -> str:
        text, self.stopped = self._stops.feed(text)
        if text:
            self._parts.append(text)
        return text


class _StopSearch:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be part of one."""

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._patterns = [_Pattern(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self._num_released_chars = 0
        self._num_chars = 0
        self._found: tuple[int, str] | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return the text to release and the stop string that ends it, or None. Mutates."""
        if not self._patterns:
            return text, None
        self._held += text
        begin = self._num_chars
        for char in text:
            self._num_chars += 1
            for pattern in self._patterns:
                if pattern.feed(char):
                    start = self._num_chars - len(pattern.text)
                    if self._found is None or start < self._found[0]:
                        self._found = (start, pattern.text)
            begin = self._num_chars - max(pattern.num_matched for pattern in self._patterns)
            # A stop string that begins earlier may still be on its way: then the one found has to wait.
            if self._found is not None and self._found[0] <= begin:
                return self.finish()
        return self._take(begin) if text else "", None

    def finish(self) -> tuple[str, str | None]:
        """Return the last text and the stop string that ends it, or None. Mutates."""
        if self._found is None:
            return self._take(self._num_chars), None
        start, stop = self._found
        return self._take(start + len(stop) if self._include_stop else start), stop

    def _take(self, end: int) -> str:
        size = end - self._num_released_chars
        taken, self._held = self._held[:size], self._held[size:]
        self._num_released_chars = end
        return taken


class _Pattern:
    """How much of one string the text ends with, in constant time per character.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # _fallback[n]: the longest proper prefix of the first n + 1 characters that they also end with.
        self._fallback = [0] * len(text)
        for place in range(1, len(text)):
            size = self._fallback[place - 1]
            while size and text[size] != text[place]:
                size = self._fallback[size - 1]
            self._fallback[place] = size + (text[size] == text[place])

    def feed(self, char: str) -> bool:
        """Take the next character and return whether the text now ends with the pattern; mutates."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
        if self.num_matched == len(self.text):
            self.num_matched = self._fallback[-1]
            return True
        return False
