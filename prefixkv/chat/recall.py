"""What was sent before, by scope: so that text seen again need not be tokenised again, and a miss can be explained.

It holds the users' words, like the cache itself. An entry belongs to one scope and is read by principals of that scope
only; a purge destroys it. It is bounded in all, and the scope that was not used for longest goes first.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from prefixkv.chat.late import LateNote
from prefixkv.chat.segment import Segment, SegmentKind
from prefixkv.chat.shapes import Shapes
from prefixkv.scope import Principal, Scope, ScopeLevel

__all__ = ["Origin", "Past", "Recall", "Reply", "Sent"]

_LEVELS = (ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)
_PROMPTS_PER_SCOPE = 6
_NOTES_PER_SCOPE = 256
_REPLIES_PER_PROMPT = 4
_BYTES_PER_TOKEN = 8
_BYTES_PER_REPLY_TOKEN = 36
_BYTES_PER_SEGMENT = 160
# Of Python's own, without text and tokens.
_BYTES_PER_PROMPT = 400
_BYTES_PER_NOTE = 300
_BYTES_PER_SCOPE = 1200
_MOST_TENANTS = 4096
_MOST_SHAPES = 128


@dataclass(frozen=True, slots=True)
class Reply:
    """What was generated behind a prompt. Frozen.

    Attributes:
        text: The reply.
        token_ids: Its ids without the end token; empty if they do not spell the text exactly.
    """

    text: str
    token_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return sys.getsizeof(self.text) + _BYTES_PER_REPLY_TOKEN * (len(self.token_ids) + 4)


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt, or as much of it as a scope may know. Frozen.

    Attributes:
        text: Rendered.
        token_ids: Its ids.
        ends: For each token, how many characters end with it.
        segments: Its parts.
        tools: A digest of each tool, in their order; None where a scope may not know the tools.
        is_spliced: Whether ids of replies are in it.
        is_marked: Whether control tokens that content spelt were encoded as text.
        replies: What was generated behind it.
    """

    text: str
    token_ids: array[int]
    ends: array[int]
    segments: tuple[Segment, ...]
    tools: tuple[bytes, ...] | None = ()
    is_spliced: bool = False
    is_marked: bool = False
    replies: tuple[Reply, ...] = ()

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        own = _BYTES_PER_PROMPT + sys.getsizeof(self.text) + _BYTES_PER_TOKEN * len(self.token_ids)
        return own + _BYTES_PER_SEGMENT * len(self.segments) + sum(reply.size for reply in self.replies)

    def cut(self, tokens: int) -> Sent:
        """Return as much of it as its first tokens hold."""
        if tokens >= len(self.token_ids):
            return self
        parts = tuple(part for part in self.segments if part.start < tokens)
        characters = self.ends[tokens - 1] if tokens else 0
        # Whoever may not know the text of the tools may not know which they are.
        places = [part.end for part in self.segments if part.kind is SegmentKind.TOOLS]
        tools = self.tools if places and places[-1] <= tokens else None
        return Sent(
            self.text[:characters], self.token_ids[:tokens], self.ends[:tokens], parts, tools, self.is_spliced,
            self.is_marked,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Past:
    """What a principal may know of what was sent before: a snapshot. Frozen.

    Attributes:
        prompts: Prompts and beginnings of prompts, the narrowest scope first, in each the latest first.
        notes: Digest of a conversation to the note that its last user turn was sent with.
        shapes: What the tenant's chats showed of the template.
    """

    prompts: tuple[Sent, ...] = ()
    notes: Mapping[bytes, LateNote] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=Shapes, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """How a prompt came about: what its session shall remember, and what explains a miss. Frozen.

    Attributes:
        sent: The prompt as it shall be remembered; None where its tokens cannot be told apart by characters.
        notes: Notes that its turns were sent with.
        past: What was known when it was made.
        injects_date: The template wrote the true date into it.
        strips_reasoning: The template leaves reasoning out of earlier replies.
    """

    sent: Sent | None
    notes: Mapping[bytes, LateNote]
    past: Past
    injects_date: bool
    strips_reasoning: bool


class Recall:
    """Remembers by scope. Any thread may use it.

    Args:
        most_bytes: About how much it may hold.
    """

    def __init__(self, most_bytes: int = 32 * 2**20) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._scopes: LRUCache[Scope, _Entry] = LRUCache(most_bytes, getsizeof=lambda entry: entry.size)
        self._shapes: LRUCache[str, Shapes] = LRUCache(_MOST_SHAPES)
        self._lost: LRUCache[str, Counter[str]] = LRUCache(_MOST_TENANTS)

    def past(self, principal: Principal) -> Past:
        """Return what this principal may know."""
        with self._lock:
            entries = [entry for scope in _scopes_of(principal) if (entry := self._scopes.get(scope)) is not None]
            notes = {digest: note for entry in reversed(entries) for digest, note in entry.notes.items()}
            shapes = self._shapes.get(principal.tenant)
            if shapes is None:
                shapes = self._shapes[principal.tenant] = Shapes()
            return Past(tuple(sent for entry in entries for sent in entry.prompts), notes, shapes)

    def remember(self, principal: Principal, sent: Sent | None, notes: Mapping[bytes, LateNote]) -> None:
        """Keep a prompt, each part in its scope; what is of request scope is not kept.

        Args:
            principal: Who sent it.
            sent: The prompt, or None if only its notes are kept.
            notes: Notes that its turns were sent with.
        """
        known = 0
        for level in _LEVELS:
            tokens = max((part.end for part in sent.segments if part.scope <= level), default=0) if sent else 0
            own_notes = notes if level is ScopeLevel.SESSION else {}
            # Scopes only narrow: a session's text begins with all that its tenant knows.
            if tokens <= known and not own_notes:
                continue
            scope = Scope.of(principal, level)
            with self._lock:
                entry = self._scopes.pop(scope, None) or _Entry()
                if sent is not None and tokens > known:
                    entry.add(sent.cut(tokens))
                entry.note(own_notes)
                self._put(scope, entry)
            known = max(known, tokens)

    def add_reply(self, principal: Principal, text: str, reply: Reply) -> None:
        """Keep what was generated behind a prompt, in the scope that knows all of the prompt.

        Args:
            principal: Who sent it.
            text: The prompt as rendered.
            reply: The reply.
        """
        with self._lock:
            for scope in _scopes_of(principal):
                entry = self._scopes.get(scope)
                if entry is not None and entry.reply(text, reply):
                    del self._scopes[scope]
                    self._put(scope, entry)
                    return

    def losses(self, principal: Principal, *, counts: bool) -> Callable[[str, int], int]:
        """Return what counts tokens lost to volatile text of the principal's tenant, by kind; see ``build_report``.

        Args:
            principal: Who asked.
            counts: Whether the tokens are added; else the sum is what it would be.
        """

        def count(kind: str, tokens: int) -> int:
            with self._lock:
                lost = self._lost.get(principal.tenant) or Counter()
                total = lost[kind] + tokens
                if counts:
                    lost[kind] = total
                    self._lost[principal.tenant] = lost
                return total

        return count

    def lost_tokens(self, tenant: str | None) -> dict[str, int]:
        """Return the tokens that volatile text has cost a tenant, or all of them, so far, by kind."""
        with self._lock:
            return dict(sum((lost for name, lost in self._lost.items() if tenant in (None, name)), Counter()))

    def forget(self, tenant: str | None, user: str | None, session: str | None) -> None:
        """Forget everything of an identity; without a filter, of everybody."""
        with self._lock:
            if user is None and session is None:
                for by_tenant in (self._lost, self._shapes):
                    for name in [name for name in by_tenant if tenant in (None, name)]:
                        del by_tenant[name]
            for scope in [scope for scope in self._scopes if scope.is_within(tenant, user, session)]:
                del self._scopes[scope]

    def forget_scope(self, scope: Scope) -> None:
        """Forget what one scope sent."""
        with self._lock:
            self._scopes.pop(scope, None)

    def _put(self, scope: Scope, entry: _Entry) -> None:
        while entry.size > self._most_bytes and entry.prompts:
            entry.prompts.pop()
        if entry.size <= self._most_bytes:
            self._scopes[scope] = entry


class _Entry:
    """What one scope sent, the latest first."""

    def __init__(self) -> None:
        self.prompts: list[Sent] = []
        self.notes: OrderedDict[bytes, LateNote] = OrderedDict()

    @property
    def size(self) -> int:
        notes = sum(sys.getsizeof(note.text) + _BYTES_PER_NOTE for note in self.notes.values())
        return _BYTES_PER_SCOPE + sum(sent.size for sent in self.prompts) + notes

    def add(self, sent: Sent) -> None:
        for known in self.prompts:
            if (known.text, known.is_spliced, known.is_marked) == (sent.text, sent.is_spliced, sent.is_marked):
                self.prompts.remove(known)
                sent = replace(sent, replies=known.replies)
                break
        self.prompts.insert(0, sent)
        del self.prompts[_PROMPTS_PER_SCOPE:]

    def note(self, notes: Mapping[bytes, LateNote]) -> None:
        for digest, note in notes.items():
            self.notes[digest] = note
            self.notes.move_to_end(digest)
        while len(self.notes) > _NOTES_PER_SCOPE:
            self.notes.popitem(last=False)

    def reply(self, text: str, reply: Reply) -> bool:
        for place, sent in enumerate(self.prompts):
            if sent.text == text:
                others = (other for other in sent.replies if other.text != reply.text)
                self.prompts[place] = replace(sent, replies=(reply, *others)[:_REPLIES_PER_PROMPT])
                return True
        return False


def _scopes_of(principal: Principal) -> Sequence[Scope]:
    """Return the scopes whose entries a principal may read, the narrowest first."""
    return [Scope.of(principal, level) for level in reversed(_LEVELS)]
