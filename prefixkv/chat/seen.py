"""Token ids of text that began before as it begins now: only what is new is tokenised."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from prefixkv.chat.encoding import Encoded, Encoder
from prefixkv.chat.recall import Sent
from prefixkv.chat.rendering import common_prefix

__all__ = ["Beginning", "encode_seen", "longest_beginning"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a text begins, in tokens that do not depend on what follows. Frozen.

    Attributes:
        characters: How much of the text it is.
        sent: The prompt that began alike.
        tokens: How many of the prompt's tokens it is.
        reply_ids: Ids of a reply that follows them.
        is_spliced: Whether ids of replies are among all these.
    """

    characters: int
    sent: Sent
    tokens: int
    reply_ids: tuple[int, ...] = ()
    is_spliced: bool = False


def longest_beginning(text: str, prompts: Iterable[Sent], encoder: Encoder, *, splices: bool) -> Beginning | None:
    """Return the longest beginning of ``text`` whose tokens are known; changes nothing.

    It ends where a control token starts: tokenizers split there, so nothing before it depends on what follows.

    Args:
        text: The rendered prompt.
        prompts: What was sent before.
        encoder: Knows the control tokens.
        splices: Whether a reply keeps the ids that it was generated as.
    """
    best: Beginning | None = None
    for sent in prompts:
        # In marked text control tokens were written as text: its ids are not what plain text encodes to.
        if sent.is_marked or (sent.is_spliced and not splices):
            continue
        shared = common_prefix(sent.text, text)
        if splices and shared == len(sent.text):
            for reply in sent.replies:
                end = shared + len(reply.text)
                if reply.token_ids and text.startswith(reply.text, shared) and encoder.splits_at(text, end):
                    spliced = Beginning(end, sent, len(sent.token_ids), reply.token_ids, True)
                    best = spliced if best is None or end > best.characters else best
        place = encoder.last_split(text, shared)
        if place <= (0 if best is None else best.characters):
            continue
        tokens = bisect_right(sent.ends, place)
        if tokens and sent.ends[tokens - 1] == place:
            best = Beginning(place, sent, tokens, (), sent.is_spliced)
    return best


def encode_seen(text: str, prompts: Iterable[Sent], encoder: Encoder, *, splices: bool) -> tuple[Encoded, bool]:
    """Return the ids of rendered text, and whether ids of replies are among them; changes nothing.

    Without spliced replies they are exactly those of :meth:`~prefixkv.chat.encoding.Encoder.encode`.
    """
    known = longest_beginning(text, prompts, encoder, splices=splices)
    if known is None:
        return encoder.encode(text), False
    rest = encoder.encode(text[known.characters :])
    if rest.ends is None:
        return encoder.encode(text), False
    token_ids = known.sent.token_ids[: known.tokens].tolist()
    ends = known.sent.ends[: known.tokens].tolist()
    # The reply's own tokens need not end where characters do: all count as ending with it.
    token_ids += known.reply_ids
    ends += [known.characters] * len(known.reply_ids)
    token_ids += rest.token_ids
    ends += [known.characters + end for end in rest.ends]
    return Encoded(token_ids, ends), known.is_spliced
