"""What a policy does to a chat before it is rendered: a pinned clock, tools in one order; content in parts."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixkv.chat.rendering import ChatInput
from prefixkv.chat.segmenter import Segmenter
from prefixkv.policy import TenantPolicy
from tests.chat.chats import POLICY, TOOLS, assistant, check_tiling, system, tool_loop, user

DATED = ("llama.cpp/meta-llama-Llama-3.2-3B-Instruct", "llama.cpp/openai-gpt-oss-120b", "trl/gptoss")
IN_PARTS_ONLY = ("trl/idefics3", "trl/smolvlm_training", "trl/llava_next_training")


def load(data_dir: Path, template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "qwen2")
    tokenizer.chat_template = (data_dir / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.mark.data
@pytest.mark.parametrize("template", DATED)
def test_a_pinned_clock_is_what_the_template_writes(template: str, data_dir: Path) -> None:
    """The rest of the prompt is as it was: only the true date is another."""
    tokenizer = load(data_dir, template)
    segmenter = Segmenter(tokenizer)
    messages = [system("You sell shoes."), user("Hi")]
    pinned = segmenter.segment(messages, policy=TenantPolicy(template_clock="2019-03-07"))
    true = segmenter.segment(messages, policy=POLICY)
    words = [tokenizer.decode(prompt.token_ids) for prompt in (pinned, true)]
    shown = next(form for form in ("%d %b %Y", "%Y-%m-%d") if datetime.now().strftime(form) in words[1])
    assert words[0] == words[1].replace(datetime.now().strftime(shown), datetime(2019, 3, 7).strftime(shown))
    assert any("date" in warning for warning in true.warnings)
    assert not any("date" in warning for warning in pinned.warnings)
    check_tiling(pinned)


@pytest.mark.data
@pytest.mark.parametrize("template", ["llama.cpp/Qwen-Qwen3-0.6B", "llama.cpp/meta-llama-Llama-3.2-3B-Instruct"])
def test_shuffled_tools_and_arguments_are_the_same_prompt_in_canonical_order(template: str, data_dir: Path) -> None:
    segmenter = Segmenter(load(data_dir, template))
    draw = random.Random(0)

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            draw.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    call, result = tool_loop("")
    call["tool_calls"][0]["function"]["arguments"] = {"id": "7", "again": True, "name": "x"}
    policy = TenantPolicy(tools_order="canonical")
    prompts, plain = set(), set()
    for _ in range(8):
        tools = [shuffled(tool) for tool in TOOLS]
        draw.shuffle(tools)
        messages = [system("You sell shoes."), user("Order 7?"), shuffled(call), result]
        prompts.add(segmenter.segment(messages, policy=policy, tools=tools).token_ids)
        plain.add(segmenter.segment(messages, policy=POLICY, tools=tools).token_ids)
    assert len(prompts) == 1
    assert len(plain) > 1


@pytest.mark.data
@pytest.mark.parametrize("template", IN_PARTS_ONLY)
def test_templates_that_read_parts_only_are_given_parts(template: str, data_dir: Path) -> None:
    tokenizer = load(data_dir, template)
    segmenter = Segmenter(tokenizer)

    def part(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    messages = [
        {"role": "user", "content": part("Hi")},
        {"role": "assistant", "content": part("Hello.")},
        {"role": "user", "content": part("Do you sell boots?")},
    ]
    prompt = segmenter.segment(messages, policy=POLICY)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(prompt.token_ids) == list(expected)
    assert "boots" in tokenizer.decode(prompt.token_ids)
    check_tiling(prompt)
    assert {part.kind.value for part in prompt.segments} >= {"history", "user"}


@pytest.mark.data
def test_content_in_parts_is_one_text_elsewhere(data_dir: Path) -> None:
    segmenter = Segmenter(load(data_dir, "llama.cpp/Qwen-Qwen3-0.6B"))
    parts = [{"type": "text", "text": "Do you "}, {"type": "text", "text": "sell boots?"}]
    one = segmenter.segment([user("Do you sell boots?"), assistant("Yes."), user("Fine")], policy=POLICY)
    two = segmenter.segment([{"role": "user", "content": parts}, assistant("Yes."), user("Fine")], policy=POLICY)
    assert one.token_ids == two.token_ids


KINDS_OF_TURNS = {
    "tool calls": lambda i: tool_loop("") if i % 2 else tool_loop("Let me see."),
    "names": lambda i: [{**user(f"Hi {i}"), "name": "ada"}, {**assistant(f"Hello {i}"), "name": "bot"}],
    "white space": lambda i: [user("  "), assistant(f"Hello {i}")],
    "plain": lambda i: [user(f"Hi {i}"), assistant(f"Hello {i}")],
}


@pytest.mark.data
@pytest.mark.parametrize("kind", KINDS_OF_TURNS)
@pytest.mark.parametrize("template", ["llama.cpp/Qwen-Qwen3-0.6B", "llama.cpp/google-gemma-4-31B-it"])
def test_a_longer_chat_takes_no_more_renders(
    template: str, kind: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each render costs as much as the chat is long: one for each turn would be quadratic."""
    segmenter = Segmenter(load(data_dir, template))
    renders: list[int] = []
    render = ChatInput.try_render

    def counted(self: ChatInput) -> str | None:
        renders[-1] += 1
        return render(self)

    monkeypatch.setattr(ChatInput, "try_render", counted)
    for turns in (10, 40):
        renders.append(0)
        messages = [system("You sell shoes."), user("Hello")]
        for i in range(turns):
            messages += KINDS_OF_TURNS[kind](i)
        check_tiling(segmenter.segment([*messages, user("And now?")], policy=POLICY, tools=TOOLS))
    assert renders[1] <= renders[0] < 25
