"""What was sent before, by scope: so that text seen again need not be tokenised again, and a miss can be explained.

It holds the users' words, like the cache itself. An entry belongs to one scope and is read by principals of that scope
only; a purge destroys it. It is bounded for every tenant, and the scope that was not used for longest goes first. Notes
decide what a prompt says, so they have room of their own, which prompts do not take.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from prefixkv.chat.late import LateNote
from prefixkv.chat.segment import Segment, SegmentKind
from prefixkv.chat.shapes import Shapes
from prefixkv.chat.shelves import Kept, Shelves
from prefixkv.lifetime import Lifetime
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
_MOST_FORGETS = 1024
_TENANTS_IN_FULL = 16
_NOTES_SHARE = 4


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

    @property
    def level(self) -> ScopeLevel:
        """The level of the scope that knows all of it."""
        return max((part.scope for part in self.segments), default=ScopeLevel.TENANT)

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
        generation: How much had been forgotten when it was taken.
    """

    prompts: tuple[Sent, ...] = ()
    notes: Mapping[bytes, LateNote] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=Shapes, repr=False, compare=False)
    generation: int = field(default=0, compare=False)


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
        most_bytes: About how much it may hold of one tenant's prompts. Of notes it is a quarter of that, of all tenants
            together 16 times as much.
        lifetime: Seconds without use, and in all, that what one scope sent is kept; None is for ever.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        most_bytes: int = 16 * 2**20,
        *,
        lifetime: Callable[[Scope], Lifetime] = lambda scope: (None, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._clock = clock
        self._note_bytes = note_bytes = most_bytes // _NOTES_SHARE
        self._prompts: Shelves[_Prompts] = Shelves(
            most_bytes, most_bytes * _TENANTS_IN_FULL, lifetime=lifetime, clock=clock
        )
        self._notes: Shelves[_Notes] = Shelves(
            note_bytes, note_bytes * _TENANTS_IN_FULL, lifetime=lifetime, clock=clock
        )
        self._shapes: LRUCache[str, Shapes] = LRUCache(_MOST_SHAPES)
        self._lost: LRUCache[str, Counter[str]] = LRUCache(_MOST_TENANTS)
        self._forgets: deque[Callable[[Scope], bool]] = deque(maxlen=_MOST_FORGETS)
        self._generation = 0

    @property
    def size(self) -> int:
        """About how many bytes it holds."""
        return self._prompts.size + self._notes.size

    def past(self, principal: Principal) -> Past:
        """Return what this principal may know."""
        with self._lock:
            entries = [entry for scope in _scopes_of(principal) if (entry := self._prompts.get(scope)) is not None]
            notes = self._notes.get(Scope.of(principal, ScopeLevel.SESSION))
            shapes = self._shapes.get(principal.tenant)
            if shapes is None:
                shapes = self._shapes[principal.tenant] = Shapes()
            prompts = tuple(sent for entry in entries for sent in entry.sent)
            return Past(prompts, dict(notes.notes) if notes else {}, shapes, self._generation)

    def remember(
        self, principal: Principal, sent: Sent | None, notes: Mapping[bytes, LateNote], past: Past | None = None
    ) -> bool:
        """Keep a prompt, each part in its scope; what is of request scope is not kept.

        Without a session there is nobody whose notes they would be, so notes are not kept.

        Args:
            principal: Who sent it.
            sent: The prompt, or None if only its notes are kept.
            notes: Notes that its turns were sent with.
            past: What it was made from.

        Returns:
            False if something of the principal's was forgotten since ``past`` was taken; then nothing is kept, and the
            prompt may say what was forgotten.
        """
        with self._lock:
            if past is not None and self._is_outdated(principal, past):
                return False
            known = 0
            for level in _LEVELS:
                tokens = max((part.end for part in sent.segments if part.scope <= level), default=0) if sent else 0
                # Scopes only narrow: a session's text begins with all that its tenant knows.
                if sent is None or tokens <= known:
                    continue
                scope = Scope.of(principal, level)
                entry = self._prompts.take(scope) or _Prompts()
                entry.add(sent.cut(tokens))
                self._put(scope, entry)
                known = tokens
            if notes and principal.session is not None:
                scope = Scope.of(principal, ScopeLevel.SESSION)
                kept = self._notes.take(scope) or _Notes()
                kept.add(notes, self._note_bytes)
                self._notes.put(scope, kept)
            return True

    def add_reply(self, principal: Principal, sent: Sent, reply: Reply, past: Past | None = None) -> None:
        """Keep what was generated behind a prompt, in the scope that knows all of the prompt, if there is one.

        Without a session its ids are not kept: they would be spliced into other callers' prompts.

        Args:
            principal: Who sent it.
            sent: The prompt.
            reply: The reply.
            past: What the prompt was made from; nothing is kept if something of the principal's was forgotten since.
        """
        level = max(sent.level, ScopeLevel.TENANT)
        if level is ScopeLevel.REQUEST:
            return
        scope = Scope.of(principal, level)
        if principal.session is None:
            reply = replace(reply, token_ids=())
        with self._lock:
            if past is not None and self._is_outdated(principal, past):
                return
            entry = self._prompts.take(scope)
            if entry is not None:
                entry.reply(sent.text, reply)
                self._put(scope, entry)

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
        self.forget_scopes(lambda scope: scope.is_within(tenant, user, session))

    def forget_scopes(self, is_meant: Callable[[Scope], bool]) -> None:
        """Forget what the scopes that are meant sent. It must say the same of a scope whenever it is asked."""
        with self._lock:
            self._forgot(is_meant)
            self._prompts.drop(is_meant)
            self._notes.drop(is_meant)

    def tenants(self) -> set[str]:
        """Return the tenants of whom something is remembered."""
        with self._lock:
            return {tenant for tenant in (*self._prompts.tenants(), *self._notes.tenants()) if tenant is not None}

    def sweep(self, *, at_once: bool = False) -> None:
        """Forget what is past its time; unless ``at_once``, only when something may be."""
        with self._lock:
            self._prompts.sweep(at_once=at_once)
            self._notes.sweep(at_once=at_once)

    def next_s(self) -> float | None:
        """Return the seconds until something may be past its time, or None if nothing ever is."""
        with self._lock:
            end = min(self._prompts.next_sweep_s, self._notes.next_sweep_s)
        return None if end == math.inf else max(0.0, end - self._clock())

    def _forgot(self, is_meant: Callable[[Scope], bool]) -> None:
        self._generation += 1
        self._forgets.append(is_meant)

    def _is_outdated(self, principal: Principal, past: Past) -> bool:
        """Return whether anything of the principal's was forgotten since; of what is too long ago it may have been."""
        since = self._generation - past.generation
        if since > len(self._forgets):
            return True
        newer = itertools.islice(reversed(self._forgets), since)
        return any(is_meant(scope) for is_meant in newer for scope in _scopes_of(principal))

    def _put(self, scope: Scope, entry: _Prompts) -> None:
        while entry.size > self._most_bytes and entry.sent:
            entry.sent.pop()
        if entry.sent:
            self._prompts.put(scope, entry)


class _Prompts(Kept):
    """Prompts of one scope, the latest first."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    @property
    def size(self) -> int:
        return _BYTES_PER_SCOPE + sum(sent.size for sent in self.sent)

    def add(self, sent: Sent) -> None:
        for known in self.sent:
            if (known.text, known.is_spliced, known.is_marked) == (sent.text, sent.is_spliced, sent.is_marked):
                self.sent.remove(known)
                sent = replace(sent, replies=known.replies)
                break
        self.sent.insert(0, sent)
        del self.sent[_PROMPTS_PER_SCOPE:]

    def reply(self, text: str, reply: Reply) -> None:
        for place, sent in enumerate(self.sent):
            if sent.text == text:
                others = (other for other in sent.replies if other.text != reply.text)
                self.sent[place] = replace(sent, replies=(reply, *others)[:_REPLIES_PER_PROMPT])
                return


class _Notes(Kept):
    """Notes of one session, the latest last."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: OrderedDict[bytes, LateNote] = OrderedDict()

    @property
    def size(self) -> int:
        return _BYTES_PER_SCOPE + sum(sys.getsizeof(note.text) + _BYTES_PER_NOTE for note in self.notes.values())

    def add(self, notes: Mapping[bytes, LateNote], most_bytes: int) -> None:
        for digest, note in notes.items():
            self.notes[digest] = note
            self.notes.move_to_end(digest)
        while self.notes and (len(self.notes) > _NOTES_PER_SCOPE or self.size > most_bytes):
            self.notes.popitem(last=False)


def _scopes_of(principal: Principal) -> Sequence[Scope]:
    """Return the scopes whose entries a principal may read, the narrowest first."""
    return [Scope.of(principal, level) for level in reversed(_LEVELS)]
