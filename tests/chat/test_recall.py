"""What was sent before: known to those whose it is, bounded, and gone when it is purged."""

from __future__ import annotations

import threading
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixkv.chat.late import LateNote
from prefixkv.chat.recall import Past, Recall, Reply, Sent
from prefixkv.chat.segment import Segment, SegmentKind
from prefixkv.scope import Principal, Scope, ScopeLevel

TENANT, USER, SESSION, REQUEST = ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION, ScopeLevel.REQUEST
ANN, BOB = Principal("acme", "ann", "1"), Principal("acme", "bob", "1")
STORED = (TENANT, USER, SESSION)


def sent_of(*parts: tuple[str, ScopeLevel], tools: tuple[bytes, ...] = (), kinds: str = "") -> Sent:
    """A prompt of these texts, one token per character."""
    text, segments = "", []
    for i, (piece, level) in enumerate(parts):
        kind = {"t": SegmentKind.TOOLS, "": SegmentKind.SYSTEM}[kinds[i : i + 1].strip()]
        segments.append(Segment(kind, len(text), len(text) + len(piece), level))
        text += piece
    return Sent(text, array("I", map(ord, text)), array("I", range(1, len(text) + 1)), tuple(segments), tools)


def prompts_of(recall: Recall, principal: Principal) -> list[str]:
    return [sent.text for sent in recall.past(principal).prompts]


# -- who knows what ----------------------------------------------------------------------------------------------------


def test_each_scope_knows_its_part_of_a_prompt() -> None:
    recall = Recall()
    recall.remember(ANN, sent_of(("rules ", TENANT), ("for Ann ", USER), ("hi ", SESSION), ("pin", REQUEST)), {})
    assert prompts_of(recall, ANN) == ["rules for Ann hi ", "rules for Ann ", "rules "]
    assert prompts_of(recall, Principal("acme", "ann", "2")) == ["rules for Ann ", "rules "]
    assert prompts_of(recall, BOB) == ["rules "]
    assert prompts_of(recall, Principal("other", "ann", "1")) == []


def test_a_part_that_is_cut_off_takes_along_neither_ids_nor_segments_nor_tools_behind_it() -> None:
    """Which tools a user was given is nobody else's business where the policy keeps tools to the user."""
    recall = Recall()
    recall.remember(ANN, sent_of(("rules ", TENANT), ("a tool", USER), tools=(b"1",), kinds=" t"), {})
    own, shared = recall.past(ANN).prompts
    assert own.tools == (b"1",)
    assert (shared.text, len(shared.token_ids), len(shared.ends), len(shared.segments)) == ("rules ", 6, 6, 1)
    assert shared.tools is None


def test_tools_that_the_tenant_shares_are_known_to_it() -> None:
    recall = Recall()
    recall.remember(
        ANN, sent_of(("rules ", TENANT), ("a tool", TENANT), ("hi", SESSION), tools=(b"1",), kinds=" t"), {}
    )
    assert [sent.tools for sent in recall.past(BOB).prompts] == [(b"1",)]


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_cut_holds_whole_tokens_and_their_text(tokens: int) -> None:
    """The emoji is four tokens of one character: its text comes with the first."""
    sent = Sent("ab🧿cd", array("I", [1, 2, 3, 4, 5, 6, 7, 8]), array("I", [1, 2, 3, 3, 3, 3, 4, 5]), (), (), True)
    cut = sent.cut(tokens)
    assert cut.token_ids == sent.token_ids[:tokens]
    assert cut.text == sent.text[: cut.ends[-1]]
    assert cut.is_spliced
    assert (cut is sent) == (tokens == 8)


def test_the_latest_comes_first_and_the_same_prompt_is_kept_once() -> None:
    recall = Recall()
    for text in ("a", "b", "a"):
        recall.remember(ANN, sent_of((text, SESSION)), {})
    assert prompts_of(recall, ANN) == ["a", "b"]


def test_nothing_of_request_scope_is_kept() -> None:
    recall = Recall()
    recall.remember(ANN, sent_of(("secret", REQUEST)), {})
    assert recall.past(ANN) == Past()


# -- a model -----------------------------------------------------------------------------------------------------------

PRINCIPALS = [
    Principal(tenant, user, session) for tenant, user, session in product("AB", (None, "u", "v"), (None, "s", "t"))
]
LEVELS = st.lists(st.sampled_from((TENANT, USER, SESSION, REQUEST)), min_size=1, max_size=4).map(sorted)
FILTERS = st.tuples(*(st.sampled_from(names) for names in ((None, "A", "B"), (None, "u", "v"), (None, "s", "t"))))


class Remembering(RuleBasedStateMachine):
    """Against a plain list of who sent what: never more than that is told, and the latest of it is."""

    def __init__(self) -> None:
        super().__init__()
        self.recall = Recall()
        self.sent: list[Sent] = []
        self.prompts: dict[Scope, list[str]] = {}
        self.replies: dict[Scope, list[tuple[str, str]]] = {}
        self.notes: dict[Scope, dict[bytes, str]] = {}
        self.count = 0

    @rule(who=st.sampled_from(PRINCIPALS), levels=LEVELS, again=st.booleans(), has_note=st.booleans())
    def remember(self, who: Principal, levels: list[ScopeLevel], again: bool, has_note: bool) -> None:
        self.count += not again
        parts = [(f"{self.count}{level.label}{i} ", level) for i, level in enumerate(levels)]
        note = {b"%d" % self.count: LateNote(f"note {self.count}", "now")} if has_note else {}
        self.sent = [sent_of(*parts), *self.sent][:4]
        assert self.recall.remember(who, self.sent[0], note)
        known = 0
        for level in STORED:
            text = "".join(text for text, own in parts if own <= level)
            if len(text) > known:
                self._put(Scope.of(who, level), text)
                known = len(text)
        if who.session is not None:
            self.notes.setdefault(Scope.of(who, SESSION), {}).update({key: value.text for key, value in note.items()})

    def _put(self, scope: Scope, text: str) -> None:
        kept = self.prompts.setdefault(scope, [])
        self.prompts[scope] = [text, *(other for other in kept if other != text)][:6]
        self.replies[scope] = [pair for pair in self.replies.get(scope, []) if pair[0] in self.prompts[scope]]

    @rule(who=st.sampled_from(PRINCIPALS), place=st.integers(0, 3))
    def reply(self, who: Principal, place: int) -> None:
        """To a prompt of one's own, or to the words of another's."""
        if place >= len(self.sent):
            return
        self.count += 1
        sent = self.sent[place]
        self.recall.add_reply(who, sent, Reply(f"reply {self.count}", (self.count,)))
        scope = Scope.of(who, sent.level)
        if sent.level is not REQUEST and sent.text in self.prompts.get(scope, []):
            self.replies.setdefault(scope, []).append((sent.text, f"reply {self.count}"))

    @rule(names=FILTERS)
    def forget(self, names: tuple[str | None, str | None, str | None]) -> None:
        self.recall.forget(*names)
        self._drop([scope for scope in {*self.prompts, *self.notes} if scope.is_within(*names)])

    @rule(who=st.sampled_from(PRINCIPALS), level=st.sampled_from(STORED))
    def end_session(self, who: Principal, level: ScopeLevel) -> None:
        self.recall.forget_scopes(Scope.of(who, level).__eq__)
        self._drop([Scope.of(who, level)])

    def _drop(self, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            for kept in (self.prompts, self.replies, self.notes):
                kept.pop(scope, None)

    @invariant()
    def tells_everybody_what_is_theirs(self) -> None:
        for who in PRINCIPALS:
            scopes = [Scope.of(who, level) for level in reversed(STORED)]
            past = self.recall.past(who)
            assert [sent.text for sent in past.prompts] == [text for s in scopes for text in self.prompts.get(s, [])]
            assert {key: note.text for key, note in past.notes.items()} == self.notes.get(scopes[0], {})
            told = {(sent.text, reply.text) for sent in past.prompts for reply in sent.replies}
            known = {pair for scope in scopes for pair in self.replies.get(scope, [])}
            assert told <= known
            assert bool(told) == bool(known)
            if who.session is None:
                own = past.prompts[: len(self.prompts.get(scopes[0], []))]
                assert not any(reply.token_ids for sent in own for reply in sent.replies)


Remembering.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
test_nobody_is_told_what_was_sent_in_a_scope_that_is_not_theirs = Remembering.TestCase


# -- bounds ------------------------------------------------------------------------------------------------------------


def held_bytes(recall: Recall) -> int:
    return recall.size


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000), st.integers(0, 900)), max_size=40))
def test_it_never_holds_more_than_it_may(sizes: list[tuple[int, int, int]]) -> None:
    recall = Recall(most_bytes=50_000)
    for session, length, reply in sizes:
        who = Principal("acme", "ann", str(session))
        sent = sent_of(("x" * length, SESSION))
        recall.remember(who, sent, {b"%d" % length: LateNote("n" * reply, "now")})
        recall.add_reply(who, sent, Reply("y" * reply, tuple(range(reply))))
        assert held_bytes(recall) <= 50_000 * 5 / 4  # notes have room of their own
        past = recall.past(who)
        assert sum(one.size for one in past.prompts) <= 50_000


def test_the_scope_that_was_not_used_for_longest_is_forgotten_first() -> None:
    recall = Recall(most_bytes=45_000)
    people = [Principal("acme", name, "1") for name in "abc"]
    for who in people[:2]:
        recall.remember(who, sent_of(("x" * 2000, SESSION)), {})
    assert prompts_of(recall, people[0])
    recall.remember(people[2], sent_of(("x" * 2000, SESSION)), {})
    assert [bool(prompts_of(recall, who)) for who in people] == [True, False, True]


def test_one_prompt_larger_than_all_it_may_hold_is_not_kept() -> None:
    recall = Recall(most_bytes=10_000)
    recall.remember(ANN, sent_of(("x" * 20_000, SESSION)), {})
    assert recall.past(ANN).prompts == ()
    recall.remember(ANN, None, {b"1": LateNote("n" * 20_000, "now")})
    assert recall.past(ANN) == Past()


def test_prompts_notes_and_replies_of_one_scope_are_bounded() -> None:
    recall = Recall()
    for i in range(300):
        recall.remember(ANN, sent_of((f"prompt {i}", SESSION)), {b"%d" % i: LateNote(f"note {i}", "now")})
        recall.add_reply(ANN, sent_of(("prompt 0" if i < 6 else f"prompt {i}", SESSION)), Reply(f"reply {i}", ()))
    past = recall.past(ANN)
    assert [sent.text for sent in past.prompts] == [f"prompt {i}" for i in range(299, 293, -1)]
    assert len(past.notes) == 256
    assert b"299" in past.notes
    for i in range(9):
        recall.add_reply(ANN, sent_of(("prompt 299", SESSION)), Reply(f"again {i}", ()))
    assert [reply.text for reply in recall.past(ANN).prompts[0].replies] == [f"again {i}" for i in range(8, 4, -1)]


@pytest.mark.parametrize("case", ["many sessions", "emoji", "many segments", "long replies"])
def test_what_it_counts_is_about_what_it_takes(case: str) -> None:
    """Short prompts of many sessions, letters of four bytes and replies take memory too."""
    most = 2**20
    recall = Recall(most_bytes=most)
    tracemalloc.start()
    try:
        for who, sent, reply in _load(case):
            recall.remember(who, sent, {})
            recall.add_reply(who, sent, reply)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes(recall) > most / 2, "the case does not fill it"
    assert taken < 2 * most


def _load(case: str) -> Iterator[tuple[Principal, Sent, Reply]]:
    emoji = sent_of(("🧿" * 4000, SESSION))
    for i in range(1000 if case == "many sessions" else 100):
        who = Principal("acme", f"user {i}", f"session {i}")
        match case:
            case "many sessions":
                yield who, sent_of((f"rule {i}", TENANT), ("a", USER), ("b", SESSION)), Reply("", ())
            case "emoji":
                yield who, replace(emoji, text=f"{i}" + "🧿" * 4000, ends=emoji.ends[:]), Reply("", ())
            case "many segments":
                yield who, sent_of(*((f"{i} ", SESSION) for _ in range(300))), Reply("", ())
            case "long replies":
                yield who, sent_of((f"rule {i}", SESSION)), Reply("y" * 3000, tuple(range(i * 1000, i * 1000 + 2000)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4000)), min_size=30, max_size=120), st.booleans())
def test_the_load_of_one_tenant_takes_nothing_from_another(load: list[tuple[int, int]], ends: bool) -> None:
    """A note decides what a prompt says: it must not depend on what other tenants do meanwhile."""
    recall = Recall(most_bytes=40_000)
    recall.remember(ANN, sent_of(("hi", SESSION)), {b"1": LateNote("at noon", "now")})
    before = recall.past(ANN)
    for i, (session, length) in enumerate(load):
        other = Principal("busy", "ann", str(session))
        recall.remember(other, sent_of(("x" * length, SESSION)), {b"%d" % i: LateNote("n" * length, "now")})
        if ends:
            recall.forget_scopes(Scope.of(other, SESSION).__eq__)
    assert recall.past(ANN) == before


def test_prompts_take_no_room_from_notes_of_their_tenant() -> None:
    recall = Recall(most_bytes=40_000)
    recall.remember(ANN, None, {b"1": LateNote("at noon", "now")})
    for i in range(50):
        recall.remember(Principal("acme", "bob", str(i)), sent_of(("x" * 3000, SESSION)), {})
    assert recall.past(ANN).notes == {b"1": LateNote("at noon", "now")}


def test_long_notes_of_a_session_push_out_its_own_older_ones_only() -> None:
    recall = Recall(most_bytes=40_000)
    for i in range(8):
        recall.remember(ANN, None, {b"%d" % i: LateNote("n" * 3000, "now")})
    assert list(recall.past(ANN).notes) == [b"6", b"7"]


def test_so_many_tenants_as_memory_cannot_hold_are_bounded_too() -> None:
    recall = Recall(most_bytes=40_000)
    people = [Principal(f"tenant {i}", "ann", "1") for i in range(300)]
    for who in people:
        recall.remember(who, sent_of(("x" * 2500, SESSION)), {})
        assert held_bytes(recall) <= 16 * 40_000
    known = [bool(prompts_of(recall, who)) for who in people]
    assert known == sorted(known), "the latest are known"
    assert any(known)
    assert not all(known)


# -- what is nobody's, and what was forgotten meanwhile ------------------------------------------------------------


@pytest.mark.parametrize("user", [None, "ann"])
def test_without_a_session_neither_notes_nor_ids_of_replies_are_kept(user: str | None) -> None:
    """Another caller's words would get into the prompt: the unnamed session is everybody's."""
    recall, who = Recall(), Principal("acme", user)
    sent = sent_of(("hi", SESSION))
    recall.remember(who, sent, {b"1": LateNote("at noon", "now")})
    recall.add_reply(who, sent, Reply("hello", (1, 2)))
    past = recall.past(who)
    assert past.notes == {}
    assert past.prompts[0].replies == (Reply("hello", ()),)


@pytest.mark.parametrize("level", [TENANT, USER, SESSION, REQUEST])
def test_a_reply_is_kept_where_all_of_its_prompt_is_known_and_nowhere_else(level: ScopeLevel) -> None:
    """The same text was sent with other scopes too; what a secret was answered with is not theirs."""
    recall = Recall()
    for other in STORED:
        recall.remember(ANN, sent_of(("the same text", other)), {})
    sent = sent_of(("the same ", TENANT), ("text", level))
    recall.add_reply(ANN, sent, Reply("hello", ()))
    told = [bool(sent.replies) for sent in recall.past(ANN).prompts]
    assert told == [own is level for own in reversed(STORED)]


FORGETS = {
    "all": (lambda recall: recall.forget(None, None, None), True),
    "the tenant": (lambda recall: recall.forget("acme", None, None), True),
    "the session": (lambda recall: recall.forget("acme", "ann", "1"), True),
    "the session ends": (lambda recall: recall.forget_scopes(Scope.of(ANN, SESSION).__eq__), True),
    "another session": (lambda recall: recall.forget("acme", "ann", "2"), False),
    "another session ends": (lambda recall: recall.forget_scopes(Scope.of(BOB, SESSION).__eq__), False),
    "another tenant": (lambda recall: recall.forget("other", None, None), False),
}


@pytest.mark.parametrize("what", FORGETS)
def test_what_was_made_before_a_purge_is_not_kept_behind_it(what: str) -> None:
    """Else the words that were purged would be back."""
    forget, is_meant = FORGETS[what]
    recall, sent = Recall(), sent_of(("hi", SESSION))
    past = recall.past(ANN)
    forget(recall)
    assert recall.remember(ANN, sent, {b"1": LateNote("at noon", "now")}, past) is not is_meant
    assert (recall.past(ANN) == Past()) == is_meant
    assert recall.remember(ANN, sent, {}, recall.past(ANN))
    past = recall.past(ANN)
    forget(recall)
    recall.remember(ANN, sent, {})
    recall.add_reply(ANN, sent, Reply("hello", ()), past)
    assert bool(recall.past(ANN).prompts[0].replies) is not is_meant


def test_of_what_was_made_long_ago_nobody_knows_any_more_whether_it_was_purged() -> None:
    recall = Recall()
    past = recall.past(ANN)
    for i in range(2000):
        recall.forget_scopes(Scope.of(Principal("other", "x", str(i)), SESSION).__eq__)
    assert not recall.remember(ANN, sent_of(("hi", SESSION)), {}, past)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_losses_add_up_by_tenant_and_kind_and_only_where_they_are_to_count() -> None:
    recall = Recall()
    look, count = recall.losses(ANN, counts=False), recall.losses(BOB, counts=True)
    assert (look("clock", 5), look("clock", 5)) == (5, 5)
    assert (count("clock", 5), count("clock", 7), look("clock", 1), count("name", 2)) == (5, 12, 13, 2)
    assert recall.lost_tokens("acme") == {"clock": 12, "name": 2}
    assert recall.lost_tokens("other") == {}
    recall.forget("acme", "bob", None)
    assert recall.lost_tokens("acme") == {"clock": 12, "name": 2}
    recall.forget("other", None, None)
    assert recall.lost_tokens("acme") == {"clock": 12, "name": 2}
    recall.forget("acme", None, None)
    assert recall.lost_tokens("acme") == {}


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_may_remember_and_forget_at_once() -> None:
    """Nobody sees half an entry, or another's."""
    recall = Recall(most_bytes=100_000)
    faults: list[object] = []

    def work(name: str) -> None:
        who = Principal("acme", name, "1")
        try:
            for i in range(400):
                sent = sent_of(("rules ", TENANT), (f"{name} {i} " + "x" * (i % 50), SESSION))
                recall.remember(who, sent, {name.encode(): LateNote(name, "now")})
                recall.add_reply(who, sent, Reply(name, (i,)))
                past = recall.past(who)
                words = {one.text[6:].split(" ")[0] for one in past.prompts} | {
                    note.text for note in past.notes.values()
                }
                words |= {reply.text for one in past.prompts for reply in one.replies}
                faults.extend(words - {name, ""})
                if i % 50 == 0:
                    recall.forget("acme", name, None)
                elif i % 70 == 0:
                    recall.forget_scopes(Scope.of(who, SESSION).__eq__)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("ann", "bob", "cem")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert 0 < held_bytes(recall) <= 125_000
    recall.forget(None, None, None)
    assert held_bytes(recall) == 0
