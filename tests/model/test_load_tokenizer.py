"""A tokenizer without its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixkv.errors import ConfigError
from prefixkv.model.load import load_tokenizer
from tests.support import byte_tokenizer, demo_loaded


def test_the_demos_tokenizer_is_the_one_that_comes_with_the_model() -> None:
    whole = demo_loaded().tokenizer
    alone = load_tokenizer("demo")
    assert alone.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    assert alone.chat_template == whole.chat_template


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == byte_tokenizer().get_vocab()
    assert loaded.chat_template == byte_tokenizer().chat_template


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "give"),
        ("./no-such-folder", "no such folder"),
        ("no-such.gguf", "no such file"),
        ("no-such-model-anywhere", "hub id"),
    ],
)
def test_what_is_not_there_is_a_mistake_with_a_name(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(name)


def test_a_folder_or_file_without_a_tokenizer_is_one_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer's files"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        load_tokenizer(str(tmp_path / "x.gguf"))
