"""Conversations, tokenizers and checks that the tests of this folder share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixkv.chat.segment import Prompt
from prefixkv.policy import TenantPolicy

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POLICY = TenantPolicy()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.title()} an order.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        },
    }
    for name in ("find", "cancel")
]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool_loop(content: str | None = None) -> list[dict[str, Any]]:
    function = {"name": "find", "arguments": {"id": "7"}}
    call: dict[str, Any] = {"role": "assistant", "content": content}
    call["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
    return [call, {"role": "tool", "name": "find", "tool_call_id": "abcdefghi", "content": '{"state": "sent"}'}]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([system("You sell shoes."), user("Do you have boots?")], None),
    "plain": ([system("You sell shoes."), user("Hello"), assistant("Hi there"), user("Do you have boots?")], None),
    "no system": ([user("Hello"), assistant("Hi there"), user("Do you have boots?")], None),
    "two users in a row": ([system("You sell shoes."), user("Hello"), user("Anyone?")], None),
    "tools": ([system("You sell shoes."), user("Where is order 7?")], TOOLS),
    "tools, no system": ([user("Where is order 7?")], TOOLS),
    "tool loop": ([system("You sell shoes."), user("Where is order 7?"), *tool_loop()], TOOLS),
    "tool loop with text": ([system("You sell shoes."), user("Order 7?"), *tool_loop("Let me see.")], TOOLS),
    "tool loop, empty text, next turn": (
        [system("You sell shoes."), user("Order 7?"), *tool_loop(""), assistant("Sent."), user("Thanks")],
        TOOLS,
    ),
    "reasoning": ([system("Be."), user("2+2?"), assistant("<think>\nsum\n</think>\n\n4"), user("3+3?")], None),
    "white space": ([system("  You sell shoes.\n"), user("\n Hello "), assistant(" Hi\n\n"), user(" boots? ")], None),
    "other scripts": (
        [system("כן \u200f שלום"), user("नमस्ते 👩‍👩‍👧 \u200b\u202eabc"), assistant("ok"), user("你好")],
        None,
    ),
}


def byte_chatml(
    template: str = CHATML,
    *,
    normalizer: Any = None,
    extra: tuple[AddedToken, ...] = (),
    merges: tuple[tuple[str, str], ...] = (),
) -> Any:
    """A tokenizer whose tokens are bytes (and ``merges`` of them), with the two ChatML tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens(list(extra))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def forgeable() -> Any:
    """A tokenizer whose normaliser turns full-width signs into a control token."""
    return byte_chatml(normalizer=normalizers.NFKC(), extra=(AddedToken("<|end|>", special=True, normalized=True),))


def check_tiling(prompt: Prompt) -> None:
    """Segments tile the tokens, none is empty, and scopes only narrow."""
    assert prompt.segments[0].start == 0
    assert prompt.segments[-1].end == len(prompt.token_ids)
    assert all(first.end == second.start for first, second in pairwise(prompt.segments))
    assert all(part.start < part.end for part in prompt.segments)
    assert all(first.scope <= second.scope for first, second in pairwise(prompt.segments))


def texts(tokenizer: Any, prompt: Prompt) -> list[tuple[str, str]]:
    """(kind, text) of the segments."""
    return [(part.kind.value, tokenizer.decode(prompt.token_ids[part.start : part.end])) for part in prompt.segments]


def wider_than_user(prompt: Prompt) -> list[int]:
    """The ids that all users of the tenant share."""
    return [i for part in prompt.segments if part.scope <= 1 for i in prompt.token_ids[part.start : part.end]]
