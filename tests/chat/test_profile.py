"""Profiles: facts are what the template was seen to do; names come from files that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixkv.chat.profile import load_profiles, recognise, templates_folder
from tests.chat.chats import byte_chatml

# family, source, supports_system, tools, injects_date, strips_reasoning; read off the templates by hand
EXPECTED = {
    "other/HuggingFaceTB-SmolLM2-135M-Instruct": ("chatml", "file", True, "none", False, False),
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct": ("qwen", "file", True, "after_system", False, False),
    "llama.cpp/Qwen-Qwen3-0.6B": ("qwen", "file", True, "after_system", False, True),
    "llama.cpp/Qwen3.5-4B": ("qwen", "probed", True, "before_system", False, True),
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": ("llama3", "file", True, "first_user", False, False),
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": ("llama3", "file", True, "first_user", True, False),
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "file", True, "last_user", False, False),
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "file", True, "last_user", True, False),
    "llama.cpp/google-gemma-2-2b-it": ("gemma", "file", False, "none", False, False),
    "trl/gemma3": ("gemma", "file", True, "none", False, False),
    "llama.cpp/microsoft-Phi-3.5-mini-instruct": ("phi", "file", True, "none", False, False),
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": ("unknown", "probed", True, "none", False, True),
    "llama.cpp/GLM-4.6": ("unknown", "probed", True, "before_system", False, True),
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct": ("unknown", "probed", True, "after_system", True, False),
}


@pytest.mark.data
@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_template_is_recognised_by_what_it_renders(name: str, data_dir: Path) -> None:
    tokenizer = byte_chatml((data_dir / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"  # some templates write them
    profile = recognise(tokenizer)
    facts = (profile.supports_system, profile.tools, profile.injects_date, profile.strips_reasoning)
    assert (profile.family, profile.source, *facts) == EXPECTED[name]


def test_every_shipped_file_is_read_and_tried_from_the_most_particular_on() -> None:
    names = sorted(path.stem for path in templates_folder().glob("*.toml"))
    assert (
        sorted(file.family for file in load_profiles())
        == names
        == sorted(["chatml", "llama3", "mistral", "gemma", "qwen", "phi"])
    )
    order = [file.family for file in load_profiles()]
    assert order.index("qwen") < order.index("chatml")  # both have ChatML's markers


def test_an_unknown_template_gets_a_profile_made_on_the_spot() -> None:
    profile = recognise(byte_chatml("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"))
    assert (profile.family, profile.source, profile.supports_system, profile.tools) == (
        "unknown",
        "probed",
        True,
        "none",
    )


def test_a_template_that_always_fails_still_has_a_profile() -> None:
    profile = recognise(byte_chatml("{{ raise_exception('no') }}"))
    assert (profile.supports_system, profile.tools, profile.injects_date) == (False, "none", False)


@pytest.mark.parametrize("text", ["family = 'x'", "x =", "family='x'\nmarkers=[]\n[facts]\nfoo=1"])
def test_a_malformed_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(ValueError, match=r"odd\.toml"):
        load_profiles(tmp_path)
