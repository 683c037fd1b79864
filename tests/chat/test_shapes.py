"""A layout from known words of the template is the anchored one, for every template, whatever was learnt before."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixkv.chat import regions
from prefixkv.chat.recall import Past
from prefixkv.chat.segmenter import Segmenter
from prefixkv.chat.shapes import RenderedChat, Shapes
from prefixkv.errors import InvalidRequest
from tests.chat.chats import CONVERSATIONS, POLICY, TOOLS, assistant, byte_chatml, system, user

FOLDER = Path(os.environ.get("PREFIXKV_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
TEMPLATES = sorted(str(path.relative_to(FOLDER / "templates")) for path in FOLDER.glob("templates/*/*.jinja")) or [
    "none"
]
# Words of the template in the content, contents that are equal, and white space that templates trim.
TEXTS = ("Hello", "Hello", "<think>", "user", "a\nb", " padded ", "[INST]x", "You sell shoes.", "é\u200b")


def grown() -> list[tuple[list[dict[str, Any]], Any]]:
    """Chats of many lengths and contents, with and without system text and tools."""
    chats: list[tuple[list[dict[str, Any]], Any]] = []
    for shift, (has_system, tools) in product(range(3), product((True, False), (None, TOOLS))):
        messages = [system("You sell shoes.")] if has_system else []
        for turn in range(4):
            messages = [*messages, user(TEXTS[(3 * turn + shift) % len(TEXTS)])]
            chats.append((messages, tools))
            messages = [*messages, assistant(TEXTS[(3 * turn + shift + 1) % len(TEXTS)])]
    return chats + list(CONVERSATIONS.values())


ARGUMENTS = ({"id": "7"}, {"id": "find", "n": 3}, {}, {"q": "the name 7", "all": True, "x": None}, {"id": '\u00e9"<'})


def with_calls() -> list[tuple[list[dict[str, Any]], Any]]:
    """Chats that call tools: other names, arguments and ids, several calls at once, with and without text."""
    chats: list[tuple[list[dict[str, Any]], Any]] = []
    for shift, arguments in enumerate(ARGUMENTS * 2):
        messages = [system("You sell shoes."), user(TEXTS[shift % len(TEXTS)])]
        for turn in range(1 + shift % 2):
            name, other = ("find", "cancel") if (shift + turn) % 3 else ("cancel", "find")
            names = [name, other][: 1 + (shift + turn) % 4 // 3]
            calls = [
                {
                    "id": f"call{shift}{turn}{n}xx",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for n, name in enumerate(names)
            ]
            text = (None, "", "Let me see.", " Let me\n")[(shift + turn) % 4]
            messages = [*messages, {"role": "assistant", "content": text, "tool_calls": calls}]
            for call in calls:
                result = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"]}
                messages = [*messages, {**result, "content": ('{"state": "sent"}', "7", "padded\n")[shift % 3]}]
            chats.append((messages, TOOLS))
        chats.append(([*messages, assistant("Sent."), user("Thanks")], TOOLS))
    return chats


NEVER_KNOWN = (
    "llama.cpp/google-gemma-2-2b-it.jinja",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "trl/idefics3.jinja",
    "trl/llava_next_training.jinja",
    "trl/smolvlm_training.jinja",
)
"""Templates that leave out messages or text, so that nothing can be learnt from where contents stand."""


CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}calls {{ call.function.name }} with {{ call.function.arguments | tojson }};"
    "{% endfor %}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    "words",
    [
        "{{ 'Rules:\\nMind\\tthese\\rwords' }}",
        "{{ strftime_now('%d %B %Y') }}",
        "{% for t in tools %}{{ t }}{% endfor %}",
    ],
)
def test_words_that_a_template_can_write_are_learnt(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words behind an escaped line break, today's date; and where tools are not shown that is said each time."""
    segmenter, shapes = Segmenter(byte_chatml(words + CALLING)), Shapes()
    monkeypatch.setattr(regions, "_MOST_EXACT", 100)
    for messages, tools in with_calls():
        alone = segmenter.segment(messages, policy=POLICY, tools=tools)
        assert alone == segmenter.segment(messages, policy=POLICY, tools=tools, past=Past(shapes=shapes))
    anchored = []
    monkeypatch.setattr("prefixkv.chat.segmenter.lay_out_with_anchors", lambda *args: anchored.append(args))
    for messages, tools in with_calls():
        segmenter.segment(messages, policy=POLICY, tools=tools, past=Past(shapes=shapes))
    assert len(anchored) < len(with_calls()) / 5  # where equal texts may stand in either place, it is looked up again


@pytest.mark.data
@pytest.mark.parametrize(
    "template", [pytest.param(name, marks=[pytest.mark.slow] if i % 6 else []) for i, name in enumerate(TEMPLATES)]
)
def test_known_words_give_the_anchored_layout(template: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "gpt-2")
    tokenizer.chat_template = (data_dir / "templates" / template).read_text(encoding="utf-8")
    segmenter, shapes = Segmenter(tokenizer), Shapes()
    monkeypatch.setattr(regions, "_MOST_EXACT", 100)  # how many turns of a history are told apart is another matter
    taken: dict[bool, list[bool]] = {True: [], False: []}
    lay_out = Shapes.lay_out

    def counted(self: Shapes, chat: RenderedChat) -> Any:
        layout = lay_out(self, chat)
        if shapes is self:
            taken[bool(chat.tools)].append(layout is not None)
        return layout

    monkeypatch.setattr(Shapes, "lay_out", counted)
    for messages, tools in [*grown(), *with_calls(), *with_calls()]:
        try:
            alone = segmenter.segment(messages, policy=POLICY, tools=tools)
        except InvalidRequest:
            continue
        known = segmenter.segment(messages, policy=POLICY, tools=tools, past=Past(shapes=shapes))
        assert known.segments == alone.segments
        assert known.token_ids == alone.token_ids
        assert known.turn_start == alone.turn_start
        assert known.warnings == alone.warnings
    # Else this compares nothing, and each chat costs two renders and more.
    assert template in NEVER_KNOWN or all(sum(found) >= 4 for found in taken.values() if found), taken
