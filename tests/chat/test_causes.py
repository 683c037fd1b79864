"""Why reuse ended: whole conversations through the real segmenter, and a pool that is a plain list."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from prefixkv.chat.causes import HINTS
from prefixkv.chat.explain import CacheReport, build_report
from prefixkv.chat.recall import Recall, Reply
from prefixkv.chat.segment import Prompt
from prefixkv.chat.segmenter import Segmenter
from prefixkv.policy import TenantPolicy
from prefixkv.scope import Principal, Scope, ScopeLevel
from tests.chat.chats import POLICY, TOOLS, assistant, byte_chatml, system, user

ANN, BOB = Principal("acme", "ann", "1"), Principal("acme", "bob", "1")
RULES = (
    "You are the assistant of a shop for shoes called Zebulon. Answer in two sentences, and never promise a refund.\n"
    "Ask for the number of the order before anything is looked up. Do not guess sizes.\n"
)
WITH_TOOLS = (
    "<|im_start|>system\n{{ messages[0].content }}{% if tools %}\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{% endif %}<|im_end|>\n{% for m in messages[1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SECRETS = ("Zebulon", "Quillfish", "Marzipan", "10:31", "Xylo")
"""Words that stand in content of the tests below, and may stand in no report."""


BYTES = byte_chatml(merges=(("H", "i"), ("t", "h")))


@lru_cache
def segmenter_of(tokenizer: Any, template: str) -> Segmenter:
    """A segmenter remembers nothing of a request, so tests may share one."""
    assert tokenizer.chat_template == template
    return Segmenter(tokenizer)


class Shop:
    """One tenant's conversations: what was sent is remembered, and every row of it is cached."""

    def __init__(self, tokenizer: Any, policy: TenantPolicy = POLICY) -> None:
        self.tokenizer = tokenizer
        self.segmenter = segmenter_of(tokenizer, tokenizer.chat_template)
        self.policy = policy
        self.recall = Recall()
        self.rows: list[tuple[Scope, list[int]]] = []

    def send(
        self,
        messages: Sequence[dict[str, Any]],
        reply: str | None = None,
        *,
        who: Principal = ANN,
        reply_ids: list[int] | None = None,
        is_stored: bool = True,
        gone: str | None = None,
        **more: Any,
    ) -> CacheReport:
        past = self.recall.past(who)
        prompt = self.segmenter.segment(messages, policy=self.policy, past=past, **more)
        assert prompt.origin is not None
        cached, diverged = self._match(prompt, who)
        report = build_report(prompt, cached, diverged, gone, self.recall.losses(who, counts=True))
        self.recall.remember(who, prompt.origin.sent, prompt.origin.notes)
        ids = list(prompt.token_ids)
        if reply is not None:
            spelt = self.ids(reply) if reply_ids is None else reply_ids
            assert prompt.origin.sent is not None
            self.recall.add_reply(who, prompt.origin.sent, Reply(reply, tuple(spelt)))
            ids += spelt
        if is_stored:
            self._store(prompt, ids, who)
        for word in SECRETS:
            assert word not in str(report), "a report quotes content"
        assert report.miss is None or report.miss.tokens_lost > 0
        return report

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _store(self, prompt: Prompt, ids: list[int], who: Principal) -> None:
        for level in (ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION):
            end = max((part.end for part in prompt.segments if part.scope <= level), default=0)
            whole = end == len(prompt.token_ids)
            self.rows.append((Scope.of(who, level), ids if whole else ids[:end]))

    def _match(self, prompt: Prompt, who: Principal) -> tuple[int, bool]:
        """How much of the prompt is a prefix of what is stored, and whether any of that goes on differently."""
        reach = {Scope.of(who, level) for level in (ScopeLevel.TENANT, ScopeLevel.USER, ScopeLevel.SESSION)}
        own = list(prompt.token_ids)[:-1]
        cached, longest = 0, 0
        for scope, ids in self.rows:
            if scope not in reach:
                continue
            pairs = enumerate(zip(own, ids, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(own), len(ids)))
            longest = max(longest, len(ids)) if shared == cached else len(ids) if shared > cached else longest
            cached = max(cached, shared)
        return cached, cached < longest and cached < len(own)


@pytest.fixture(scope="module")
def qwen2(data_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "qwen2")


@pytest.fixture(params=["bytes", pytest.param("qwen2", marks=pytest.mark.data)])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Hardly more than one token per byte, and a real vocabulary; one template."""
    made = BYTES if request.param == "bytes" else request.getfixturevalue("qwen2")
    made.chat_template = WITH_TOOLS
    return made


def code(report: CacheReport) -> str | None:
    return None if report.miss is None else report.miss.code


def chat(*turns: str, rules: str = RULES) -> list[dict[str, Any]]:
    return [system(rules), *((assistant if i % 2 else user)(turn) for i, turn in enumerate(turns))]


def test_what_nobody_sent_before_is_first_seen(tokenizer: Any) -> None:
    report = Shop(tokenizer).send(chat("Quillfish?"))
    assert code(report) == "first_seen"
    assert report.cached_tokens == 0


def test_an_ordinary_next_turn_and_another_users_first_one_miss_nothing(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    shop.send(chat("Hello"), "Hi there.")
    assert code(shop.send(chat("Hello", "Hi there.", "Boots?"), "Yes.")) is None
    assert code(shop.send(chat("Hello", "Hi there.", "Boots?", "Yes.", "Size 7"))) is None
    assert code(shop.send(chat("Marzipan?"), who=BOB)) is None


def test_a_conversation_that_goes_on_elsewhere_is_first_seen_there(tokenizer: Any) -> None:
    """Bob may not learn that Ann said the same."""
    shop = Shop(tokenizer)
    shop.send(chat("Hello"), "Hi there.")
    report = shop.send(chat("Hello", "Hi there.", "Boots?"), who=BOB)
    assert code(report) == "first_seen"


# -- what stands before the turns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now"), [("10:31", "10:32"), ("Marzipan", "Xylo"), ("10:315", "10:31"), ("Marzipan", ""), ("", "Xylo")]
)
def test_a_declared_slot_that_changed_is_named(tokenizer: Any, before: str, now: str) -> None:
    """Also where the new value is how the old one began, or empty."""
    shop = Shop(tokenizer)
    messages = chat("Hello", rules="For {{slot:nick}}: " + RULES)
    shop.send(messages, slots={"nick": before})
    assert code(shop.send(messages, slots={"nick": now})) == "slot_changed"
    assert code(shop.send(messages, slots={"nick": now})) is None


VOLATILE = {
    "clock": ("Now 10:31:07", "Now 10:44:59"),
    "date": ("Today is 30 January 2026", "Today is 31 January 2026"),
    "uuid": ("Id e3e70682-c209-4cac-a29f-6fbed82c07cd", "Id f728b4fa-4248-4e3a-8a5d-2f346baa9455"),
    "counter": ("Request 41", "Request 42"),
    "nonce": ("Trace k3J9ddQ", "Trace p0L1aaX"),
    "name": ("You talk to Marzipan", "You talk to Xylo"),
}


@pytest.mark.parametrize("kind", VOLATILE)
def test_text_that_changes_undeclared_is_named_by_its_look(tokenizer: Any, kind: str) -> None:
    """With the policy that would save it, and what it cost so far; also between users of a tenant."""
    shop = Shop(tokenizer)
    before, now = (chat("Hello", rules=f"{value}.\n{RULES}") for value in VOLATILE[kind])
    shop.send(before)
    reports = [shop.send(now, who=BOB), shop.send(before[:1] + chat("Bye")[1:], who=BOB)]
    miss = reports[0].miss
    assert miss is not None
    assert (miss.code, miss.kind) == ("volatile_text", kind)
    assert f"slot:{kind}" in miss.hint
    assert "placement: tail" in miss.hint
    assert miss.lost_so_far_tokens == miss.tokens_lost
    assert code(reports[1]) is None
    assert shop.recall.lost_tokens("acme") == {kind: miss.tokens_lost}


def test_a_clock_behind_long_text_is_found_where_it_is(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    for now in ("10:31", "10:44"):
        report = shop.send(chat("Hello", rules=f"{RULES}It is {now}.\n{RULES}"))
    assert report.miss is not None
    assert (report.miss.code, report.miss.kind) == ("volatile_text", "clock")
    assert report.cached_tokens >= len(shop.ids(RULES))
    assert report.miss.tokens_lost >= len(shop.ids(RULES))


def test_another_system_text_is_another_system_text(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    shop.send(chat("Hello"))
    report = shop.send(chat("Hello", rules="You are a poet by the name of Quillfish. " * 6))
    assert code(report) == "system_changed"


def test_the_same_tools_in_another_order_are_told_from_other_tools(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    other = [TOOLS[0], {"type": "function", "function": {"name": "Xylo", "description": "Marzipan", "parameters": {}}}]
    shop.send(chat("Hello"), tools=TOOLS)
    assert code(shop.send(chat("Hello"), tools=TOOLS[::-1])) == "tools_reordered"
    assert code(shop.send(chat("Hello"), tools=other)) == "tools_changed"
    assert code(shop.send(chat("Hello"), tools=TOOLS[:1])) == "tools_changed"


def test_in_canonical_order_shuffled_tools_miss_nothing(tokenizer: Any) -> None:
    shop = Shop(tokenizer, TenantPolicy(tools_order="canonical"))
    shop.send(chat("Hello"), tools=TOOLS)
    assert code(shop.send(chat("Hello"), tools=TOOLS[::-1])) is None


def test_tools_of_another_user_are_not_known_where_the_policy_keeps_them_to_the_user(tokenizer: Any) -> None:
    """That they are the same in another order would say which tools the other has."""
    shop = Shop(tokenizer, TenantPolicy(scopes={"tools": "user"}))
    shop.send(chat("Hello"), tools=TOOLS)
    alone = Shop(tokenizer, shop.policy)
    alone.send(chat("Hello"), tools=TOOLS[:1])
    reports = [one.send(chat("Hello"), tools=TOOLS[::-1], who=BOB) for one in (shop, alone)]
    assert [code(report) for report in reports] == ["first_seen", "first_seen"]
    # Not even where the text before them differs.
    reports = [one.send(chat("Hello", rules="Xylo. " + RULES), tools=TOOLS[::-1], who=BOB) for one in (shop, alone)]
    assert code(reports[0]) == code(reports[1]) != "tools_reordered"


def test_a_clock_in_a_tool_is_volatile_text_and_another_name_in_it_another_tool(tokenizer: Any) -> None:
    shop = Shop(tokenizer)

    def tools(text: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "find", "description": text, "parameters": {}}}]

    shop.send(chat("Hello"), tools=tools("Finds an order. It is 10:31."))
    report = shop.send(chat("Hello"), tools=tools("Finds an order. It is 10:44."))
    assert report.miss is not None
    assert (report.miss.code, report.miss.kind) == ("volatile_text", "clock")
    assert code(shop.send(chat("Hello"), tools=tools("Finds an order. It is Marzipan."))) == "tools_changed"


def test_a_clock_that_matched_is_not_blamed_for_what_differs_behind_it(tokenizer: Any) -> None:
    """An older prompt had another clock; the one that agrees longest has the same."""
    shop = Shop(tokenizer)
    rules = "It is {}. Call them {}.\n" + RULES
    shop.send(chat("Hello", rules=rules.format("10:31", "Marzipan")))
    shop.send(chat("Hello", rules="It is 10:44. Call them off.\n" + "You are a poet. " * 20))
    report = shop.send(chat("Hello", rules=rules.format("10:44", "Marzipan")))
    assert code(report) != "volatile_text"


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the day that templates are told."""

    def be(day: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2026, 1, day, 10, 31)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)

    return be


DATED = WITH_TOOLS.replace("system\n", "system\nToday is {{ strftime_now('%d %B %Y') }}.\n", 1)


def test_a_date_that_the_template_writes_is_the_templates(tokenizer: Any, today: Any) -> None:
    tokenizer.chat_template = DATED
    today(30)
    shop, pinned = Shop(tokenizer), Shop(tokenizer, TenantPolicy(template_clock="2026-01-01"))
    first = shop.send(chat("Hello"))
    assert any("template_clock" in warning for warning in first.warnings)
    pinned.send(chat("Hello"))
    today(31)
    assert code(shop.send(chat("Hello"))) == "template_date"
    assert code(pinned.send(chat("Hello"))) is None


# -- turns -------------------------------------------------------------------------------------------------------------


def test_an_earlier_turn_that_came_back_changed_is_named(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    shop.send(chat("Hello, I am Marzipan"), "Hi there.")
    assert code(shop.send(chat("Hello, I am Xylo", "Hi there.", "Boots?"))) == "history_edited"
    assert code(shop.send(chat("Hello, I am Marzipan", "Hi Quillfish.", "Boots?"))) == "history_edited"


def test_a_reply_of_other_tokens_than_its_text_encodes_to_is_retokenised(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    letters = [index for letter in "Hi there, Marzipan." for index in shop.ids(letter)]
    shop.send(chat("Hello"), "Hi there, Marzipan.", reply_ids=letters)
    report = shop.send(chat("Hello", "Hi there, Marzipan.", "Boots?"))
    assert code(report) == "retokenised"


def test_a_spliced_reply_misses_nothing(tokenizer: Any) -> None:
    shop = Shop(tokenizer, TenantPolicy(splice_generated=True))
    letters = [index for letter in "Hi there, Marzipan." for index in shop.ids(letter)]
    shop.send(chat("Hello"), "Hi there, Marzipan.", reply_ids=letters)
    second = chat("Hello", "Hi there, Marzipan.", "Boots?")
    assert code(shop.send(second, "Yes.")) is None
    assert code(shop.send([*second, assistant("Yes."), user("Size 7")])) is None


@pytest.mark.data
@pytest.mark.parametrize("kept", [True, False], ids=["sent back", "left out by the caller"])
def test_reasoning_that_the_template_leaves_out_is_named(qwen2: Any, data_dir: Path, kept: bool) -> None:
    """Everything before the last reply hits."""
    path = data_dir / "templates" / "llama.cpp" / "Qwen-Qwen3-0.6B.jinja"
    qwen2.chat_template = path.read_text(encoding="utf-8")
    shop = Shop(qwen2)
    thought = "<think>\nThey ask for Quillfish, so I shall look for some.\n</think>\n\n"
    answer = "There is none today, but there will be some more in the week that follows."
    shop.send(chat("Hello"), thought + answer)
    report = shop.send(chat("Hello", (thought if kept else "") + answer, "Boots?"))
    assert code(report) == "reasoning_stripped"
    assert report.miss is not None
    assert report.segments[report.miss.segment].role == "assistant"
    before = [part for part in report.segments if part.end <= report.segments[report.miss.segment].start]
    assert all(part.cached_tokens == part.tokens for part in before)


@pytest.mark.data
def test_reasoning_of_a_tool_loop_goes_when_the_next_question_comes(qwen2: Any, data_dir: Path) -> None:
    """It was shown while the loop went on: an earlier prompt holds it, not only a reply."""
    path = data_dir / "templates" / "llama.cpp" / "Qwen-Qwen3-0.6B.jinja"
    qwen2.chat_template = path.read_text(encoding="utf-8")
    shop = Shop(qwen2)
    call = {"type": "function", "function": {"name": "find", "arguments": {"id": "7"}}}
    step: dict[str, Any] = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    step["reasoning_content"] = "They ask for Quillfish, so I shall look for some in every box that there is."
    loop = [*chat("Order 7?"), step, {"role": "tool", "content": "sent"}]
    shop.send(chat("Order 7?"), tools=TOOLS)
    shop.send(loop, "It was sent.", tools=TOOLS)
    assert code(shop.send([*loop, assistant("It was sent."), user("Thanks")], tools=TOOLS)) == "reasoning_stripped"


# -- what is not there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["evicted", "purged", "expired"])
def test_rows_that_are_gone_are_said_to_be_gone(tokenizer: Any, gone: str) -> None:
    shop = Shop(tokenizer)
    shop.send(chat("Hello"))
    shop.rows.clear()
    assert code(shop.send(chat("Hello"), gone=gone)) == gone


def test_text_that_was_sent_before_but_is_not_in_the_pool_is_not_stored(tokenizer: Any) -> None:
    shop = Shop(tokenizer)
    shop.send(chat("Hello"), is_stored=False)
    assert code(shop.send(chat("Hello"))) == "not_stored"


def test_what_is_of_request_scope_is_never_stored_and_says_so(tokenizer: Any) -> None:
    policy = TenantPolicy(slots={"nick": {"scope": "request"}})
    shop = Shop(tokenizer, policy)
    messages = chat("Hello", rules="For {{slot:nick}}: " + RULES)
    shop.send(messages, slots={"nick": "Marzipan"})
    report = shop.send(messages, slots={"nick": "Marzipan"})
    assert code(report) == "scope"
    assert report.cached_tokens > 0


def test_raw_text_that_changed_is_only_that() -> None:
    segmenter = Segmenter(byte_chatml())
    prompt = segmenter.segment_text("Quillfish and chips", policy=POLICY)
    assert code(build_report(prompt, 9, True)) == "text_changed"
    assert code(build_report(prompt, 9, False)) == "first_seen"
    assert "Quillfish" not in str(build_report(prompt, 9, True))


def test_every_hint_says_something_and_ends_without_a_full_stop() -> None:
    """They go into one line of a report."""
    assert all(hint and "\n" not in hint and not hint.endswith(".") for hint in HINTS.values())


@pytest.mark.data
def test_left_out_reasoning_is_named_where_its_marks_are_tokens_of_the_model(data_dir: Path) -> None:
    """As in the published tokenizers of Qwen 3: a history that spells them is encoded another way."""
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "qwen2")
    template = data_dir / "templates" / "llama.cpp" / "Qwen-Qwen3-0.6B.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    segmenter, recall, who = Segmenter(tokenizer), Recall(), Principal("acme", user="u", session="s")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+2?"}]
    first = segmenter.segment(messages, policy=TenantPolicy(), past=recall.past(who))
    assert first.origin is not None
    assert first.origin.sent is not None
    reply = "<think>\nsum\n</think>\n\n4"
    ids = tuple(tokenizer.encode(reply, add_special_tokens=False))
    recall.remember(who, first.origin.sent, {})
    recall.add_reply(who, first.origin.sent, Reply(reply, ids))
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "3+3?"}]
    second = segmenter.segment(messages, policy=TenantPolicy(), past=recall.past(who))
    stored = [*first.token_ids, *ids]
    cached = next(i for i, pair in enumerate(zip(stored, second.token_ids, strict=False)) if pair[0] != pair[1])
    miss = build_report(second, cached, diverged=True).miss
    assert miss is not None
    assert miss.code == "reasoning_stripped"
