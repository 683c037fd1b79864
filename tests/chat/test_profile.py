"""Profiles: facts are what the template was seen to do; names come from files that ship with the package."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixkv.chat.profile import FACTS, load_profiles, recognise, templates_folder
from tests.chat.chats import TOOLS, assistant, byte_chatml, system, user

# family, tools, date_argument, flags; read off renders by hand. S system, A system anywhere, G glued, R strips
# reasoning, D generation prompt differs, T trims, B writes BOS, P prefix stable.
EXPECTED = {
    "other/HuggingFaceTB-SmolLM2-135M-Instruct": ("chatml", "none", "", "SAP"),
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct": ("qwen", "after_system", "", "SAP"),
    "llama.cpp/Qwen-Qwen3-0.6B": ("qwen", "after_system", "", "SAR"),
    "llama.cpp/Qwen3.5-4B": ("qwen", "before_system", "", "SRDT"),
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": ("llama3", "first_user", "", "SATBP"),
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": ("llama3", "first_user", "date_string", "SATBP"),
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "last_user", "", "SB"),
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "last_user", "strftime_now", "SBP"),
    "llama.cpp/google-gemma-2-2b-it": ("gemma", "none", "", "TBP"),
    "trl/gemma3": ("gemma", "none", "", "SGTBP"),
    "llama.cpp/google-gemma-4-31B-it": ("gemma4", "after_system", "", "SARDTBP"),
    "llama.cpp/microsoft-Phi-3.5-mini-instruct": ("phi", "none", "", "SAP"),
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": ("deepseek", "none", "", "SRBP"),
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "none", "", "SRDBP"),
    "llama.cpp/GLM-4.6": ("glm", "before_system", "", "SARTP"),
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct": ("granite", "after_system", "strftime_now", "SAP"),
    "llama.cpp/openai-gpt-oss-120b": ("gpt-oss", "after_system", "strftime_now", "SRP"),
    "llama.cpp/HuggingFaceTB-SmolLM3-3B": ("smollm3", "none", "", "STP"),
    "llama.cpp/Kimi-K2-Instruct": ("kimi", "before_system", "", "SAP"),
    "llama.cpp/MiniMax-M2": ("minimax", "after_system", "", "SRDP"),
    "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "before_system", "", "SABP"),
    "trl/muse_glimmer_training": ("muse", "after_system", "current_date", "SABP"),
    "trl/nemotron_3_nano_training": ("nemotron", "after_system", "", "SARDTP"),
}
LETTERS = {
    "S": "supports_system",
    "A": "system_anywhere",
    "G": "glues_system",
    "R": "strips_reasoning",
    "D": "generation_prompt_differs",
    "T": "trims_content",
    "B": "writes_bos",
    "P": "prefix_stable",
}
FAMILIES = {  # part of the file's name: family; the first that fits
    "qwen2_5_vl": "chatml",
    "SmolLM2": "chatml",
    "deepseek": "deepseek",
    "Hermes": "hermes",
    "nemotron": "nemotron",
    "gemma4": "gemma4",
    "gemma-4": "gemma4",
    "diffusion_gemma": "gemma4",
    "gemma": "gemma",
    "llava": "llama2",
    "idefics": "idefics",
    "smolvlm": "idefics",
    "SmolLM3": "smollm3",
    "gptoss": "gpt-oss",
    "gpt-oss": "gpt-oss",
    **{name: name for name in ("apertus", "cohere", "glm", "kimi", "lfm2", "minimax", "mistral", "granite", "solar")},
    "llama3": "llama3",
    "meta-llama": "llama3",
    "phi": "phi",
    "muse": "muse",
    "qwen": "qwen",
}

# A third of the templates each: the others take their turn among the slow tests.
PARTS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


def read(data_dir: Path, name: str) -> str:
    return (data_dir / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def sources(data_dir: Path) -> dict[str, str]:
    folder = data_dir / "templates"
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/*.jinja"))
    }


def family_of(name: str) -> str:
    return next(family for part, family in FAMILIES.items() if part.lower() in name.split("/")[1].lower())


def tokenizer_for(template: str) -> Any:
    tokenizer = byte_chatml(template)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"  # some templates write them
    return tokenizer


@pytest.mark.data
@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_template_is_recognised_by_what_it_renders(name: str, data_dir: Path) -> None:
    profile = recognise(tokenizer_for(read(data_dir, name)))
    family, tools, date_argument, flags = EXPECTED[name]
    assert (profile.family, profile.source, profile.tools) == (family, "file", tools)
    assert (profile.date_argument, profile.injects_date) == (date_argument, bool(date_argument))
    assert {letter for letter, fact in LETTERS.items() if getattr(profile, fact)} == set(flags)
    assert profile.takes_text


@pytest.mark.data
@pytest.mark.parametrize("tokenizer_name", ["bert-bge", "phi-3"])
def test_every_real_template_has_its_family_with_any_tokenizer(tokenizer_name: str, data_dir: Path) -> None:
    """Bert's tokenizer has no BOS and no EOS token, so that some templates cannot write a reply."""
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / tokenizer_name)
    found = {}
    for name, template in sources(data_dir).items():
        tokenizer.chat_template = template
        found[name] = recognise(tokenizer).family
    assert found == {name: family_of(name) for name in found}
    assert len(found) > 50


@pytest.mark.data
def test_a_slightly_edited_template_keeps_its_family(data_dir: Path) -> None:
    changed = {}
    for name, template in sources(data_dir).items():
        edits = {
            "more line breaks": template.replace("\\n", "\\n\\n"),
            "text in front": "Be kind and brief.\n" + template,
            "other default text": template.replace("You are", "Listen: you are"),
        }
        for edit, source in edits.items():
            family = recognise(tokenizer_for(source)).family
            if family != family_of(name):
                changed[name, edit] = family
    assert changed == {}


def stock_renderer(data_dir: Path, date: datetime) -> Any:
    """A plain jinja2 environment like that of transformers, with a clock of its own: not what the probe uses."""
    spec = importlib.util.spec_from_file_location("hf_env", data_dir / "templates" / "hf_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environment = module.make(date)

    def render(template: str, messages: Any, **variables: Any) -> str | None:
        try:
            compiled = environment.from_string(template)
            return str(compiled.render(messages=messages, bos_token="<s>", eos_token="</s>", **variables))
        except Exception:
            return None

    return render


@pytest.mark.data
@pytest.mark.parametrize("part", PARTS)
def test_dates_are_those_that_differ_between_two_clocks(part: int, data_dir: Path) -> None:
    now, then = (stock_renderer(data_dir, datetime(year, 3, 4)) for year in (2001, 2002))
    turns = [user("One"), assistant("Two"), user("Three")]
    chats = [
        (messages, tools)
        for messages in (turns, [system("Zero"), *turns])
        for tools in (None, TOOLS)  # some templates write the date only beside one of them
    ]
    for name, template in list(sources(data_dir).items())[part::3]:
        profile = recognise(tokenizer_for(template))
        pairs = [
            [render(template, messages, tools=tools, **pinned) for render in (now, then)]
            for pinned in ({}, {profile.date_argument or "x": "Friday"})
            for messages, tools in chats
        ]
        assert profile.injects_date == any(one != other for one, other in pairs[:4]), name
        if profile.date_argument not in ("", "strftime_now"):
            assert all(one == other for one, other in pairs[4:]), name
            assert any("Friday" in (one or "") for one, _ in pairs[4:]), name


@pytest.mark.data
@pytest.mark.parametrize("part", PARTS)
def test_stable_prefixes_are_those_that_growing_chats_share(part: int, data_dir: Path) -> None:
    render = stock_renderer(data_dir, datetime(2001, 3, 4))
    for name, template in list(sources(data_dir).items())[part::3]:
        profile = recognise(tokenizer_for(template))
        if not profile.takes_text:
            continue
        words = ["Alpha", "Beta", "Gamma", "Delta", "Epsilon", "Zeta", "Eta"]
        turns = [(user, assistant)[i % 2](word) for i, word in enumerate(words)]
        head = [system("Omega")] if profile.supports_system else []
        tools = TOOLS if profile.family == "hermes" else None  # refuses to go without
        grown = [render(template, head + turns[: i + 1], tools=tools) for i in range(len(turns))]
        assert None not in grown, name
        cut = [text[: text.index(word) + len(word)] for text, word in zip(grown, words, strict=True)]
        is_stable = all(later.startswith(former) for former, later in zip(cut, grown[1:], strict=False))
        assert profile.prefix_stable == is_stable, name


PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GATHERED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
GLUED = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}"
    "{% for m in messages[start:] %}<{{ m.role }}>{% if loop.first and start %}{{ messages[0].content }} {% endif %}"
    "{{ m.content }}</>{% endfor %}"
)
LATER_AS_USER = (
    "{% for m in messages %}<{{ 'user' if m.role == 'system' and not loop.first else m.role }}>{{ m.content }}</>"
    "{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
TOOLS_TEXT = "{% if tools %}{{ tools | tojson }}{% endif %}"
FIELD = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
FIELD_OF_LAST = PLAIN.replace("{{ m.content }}", "{% if loop.last %}{{ m.reasoning }}{% endif %}{{ m.content }}")
FIELD_IN_LOOP = (
    "{% set u = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set u.at = loop.index %}{% endif %}{% endfor %}"
    + PLAIN.replace(
        "{{ m.content }}",
        "{% if m.tool_calls and loop.index > u.at %}{{ m.thinking }}{{ m.tool_calls[0].function.arguments + '' }}"
        "{% endif %}{{ m.content }}",
    )
)
THINK_CUT = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
DATED = "{{ current_date if current_date is defined else strftime_now('%d %B') }}"


@pytest.mark.parametrize(
    ("fact", "template", "value"),
    [
        ("supports_system", PLAIN, True),
        ("supports_system", NO_SYSTEM, False),
        ("system_anywhere", PLAIN, True),
        ("system_anywhere", GATHERED, False),
        ("system_anywhere", LATER_AS_USER, False),
        ("system_anywhere", NO_SYSTEM, False),
        ("glues_system", GLUED, True),
        ("glues_system", PLAIN, False),
        ("glues_system", GATHERED, False),
        ("date_argument", PLAIN, ""),
        ("date_argument", DATED + PLAIN, "current_date"),
        ("date_argument", DATED.replace("current_date", "date") + PLAIN, "date"),
        ("date_argument", "{{ strftime_now('%Y') }}" + PLAIN, "strftime_now"),
        ("date_argument", "{% set unused = strftime_now('%Y') %}" + PLAIN, ""),
        (
            "date_argument",
            "{% macro head() %}{{ strftime_now('%H') }}{% endmacro %}{{ head() }}" + PLAIN,
            "strftime_now",
        ),
        ("date_argument", "{% if tools %}" + DATED + "{% endif %}" + PLAIN, "current_date"),
        ("date_argument", "{% if messages[0].role == 'system' %}" + DATED + "{% endif %}" + PLAIN, "current_date"),
        (
            "date_argument",
            "{% if tools and messages[0].role == 'system' %}{{ strftime_now('%y') }}{% endif %}" + PLAIN,
            "strftime_now",
        ),
        ("generation_prompt_differs", PLAIN, False),
        ("generation_prompt_differs", PLAIN.replace("<assistant>", "<assistant><think>"), True),
        ("trims_content", PLAIN, False),
        ("trims_content", PLAIN.replace("m.content", "m.content | trim"), True),
        (
            "trims_content",
            PLAIN.replace("m.content", "m.content.rstrip() if m.role == 'assistant' else m.content"),
            True,
        ),
        ("writes_bos", "{{ bos_token }}" + PLAIN, True),
        ("writes_bos", "<s>" + PLAIN, True),
        ("writes_bos", PLAIN, False),
        ("prefix_stable", PLAIN, True),
        ("prefix_stable", "{{ messages | length }} turns" + PLAIN, False),
        ("prefix_stable", FIELD_OF_LAST, True),
        ("strips_reasoning", PLAIN, False),
        ("strips_reasoning", FIELD, False),
        ("strips_reasoning", FIELD_OF_LAST, True),
        ("strips_reasoning", FIELD_IN_LOOP, True),
        ("strips_reasoning", THINK_CUT, True),
        ("takes_text", PLAIN, True),
        ("takes_text", PLAIN.replace("m.content", "m.content[0].text"), False),
        ("tools", PLAIN, "none"),
        ("tools", TOOLS_TEXT + PLAIN, "before_system"),
        ("tools", GATHERED.replace("{% endfor %}{% for", "{% endfor %}" + TOOLS_TEXT + "{% for", 1), "after_system"),
        (
            "tools",
            PLAIN.replace("{{ m.content", "{% if loop.index == 2 %}" + TOOLS_TEXT + "{% endif %}{{ m.content"),
            ...,
        ),
        (
            "tools",
            PLAIN.replace("{{ m.content", "{% if loop.last %}" + TOOLS_TEXT + "{% endif %}{{ m.content"),
            "last_user",
        ),
    ],
)
def test_each_fact_is_seen_where_it_holds_and_only_there(fact: str, template: str, value: object) -> None:
    profile = recognise(tokenizer_for(template))
    assert getattr(profile, fact) == ("first_user" if value is ... else value)
    assert profile.injects_date == bool(profile.date_argument)


def test_a_template_that_needs_tools_is_probed_with_tools() -> None:
    profile = recognise(tokenizer_for("{{ tools[0].function.name + '' }}" + PLAIN))
    assert profile.supports_system
    assert profile.system_anywhere
    assert profile.prefix_stable
    assert profile.tools == "before_system"


@pytest.mark.parametrize("template", [PLAIN, DATED + PLAIN, FIELD_IN_LOOP, "{{ tools[0].x }}{{ strftime_now('%x') }}"])
def test_probing_renders_a_few_times_only(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_for(template)
    count = 0
    render = type(tokenizer).apply_chat_template

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return render(self, *args, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    recognise(tokenizer)
    assert 6 <= count <= 26


def test_advice_names_what_costs_hits_and_warnings_only_the_date() -> None:
    plain = recognise(tokenizer_for(PLAIN))
    assert plain.warnings == plain.advice == ()
    words = {
        "injects_date": (True, "template_clock"),
        "tools": ("last_user", "move with every turn"),
        "strips_reasoning": (True, "the reply before it is computed again"),
        "generation_prompt_differs": (True, "opened"),
        "prefix_stable": (False, "written differently"),
        "supports_system": (False, "first user turn"),
        "takes_text": (False, "lists of parts"),
    }
    for fact, (value, word) in words.items():
        profile = replace(plain, **{fact: value})
        assert [word in text for text in profile.advice] == [True], fact
        assert profile.warnings == (profile.advice if fact == "injects_date" else ())


def test_every_shipped_file_is_read_and_tried_from_the_most_particular_on() -> None:
    names = {path.stem for path in templates_folder().glob("*.toml")}
    order = [file.family for file in load_profiles()]
    assert set(order) == names == set(FAMILIES.values())
    assert order.index("qwen") < order.index("chatml")  # both have ChatML's markers
    assert order.index("mistral") < order.index("llama2")
    assert all(set(file.facts) < set(FACTS) for file in load_profiles())


def test_a_template_that_differs_from_its_family_is_said_to_be_probed() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    profile = recognise(byte_chatml(template))
    assert (profile.family, profile.source, profile.supports_system) == ("chatml", "probed", False)


def test_an_unknown_template_gets_a_profile_made_on_the_spot() -> None:
    profile = recognise(byte_chatml("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"))
    assert (profile.family, profile.source, profile.supports_system, profile.tools) == (
        "unknown",
        "probed",
        True,
        "none",
    )


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "nothing of the chat", "{{ messages[0].role }}"])
def test_a_template_that_shows_no_message_still_has_a_profile(template: str) -> None:
    profile = recognise(byte_chatml(template))
    assert {getattr(profile, fact) for fact in FACTS} == {False, "none", ""}


@pytest.mark.parametrize(
    "text",
    [
        "family = 'x'",
        "x =",
        "family='x'\nmarkers=[]\n[facts]\nfoo=1",
        "family='x'\nmarkers=[]\n[facts]\ntools='elsewhere'",
        "family='x'\nmarkers=[]\n[facts]\nsupports_system='yes'",
        "family='x'\nmarkers=[' ']\n[facts]",
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(ValueError, match=r"odd\.toml"):
        load_profiles(tmp_path)
