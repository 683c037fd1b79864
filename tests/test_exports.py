"""The public names: all there, loaded on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prefixkv


@pytest.mark.parametrize("name", prefixkv.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(prefixkv, name) is getattr(prefixkv, name)
    assert name in dir(prefixkv)


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Enginge"):
        _ = prefixkv.Enginge  # type: ignore[attr-defined]


def test_checkers_and_the_interpreter_see_the_same_names() -> None:
    """The names are listed twice, for type checkers and for the interpreter; a third time in __all__."""
    tree = ast.parse(Path(prefixkv.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    for_checkers = {(node.module, alias.name) for node in imported for alias in node.names}
    homes = prefixkv._HOMES  # type: ignore[attr-defined]
    at_run_time = {(f"prefixkv.{module}", name) for module, names in homes for name in names.split()}
    assert for_checkers == at_run_time
    assert {name for _, name in at_run_time} | {"errors"} == set(prefixkv.__all__)


@pytest.mark.parametrize(
    "statement",
    [
        "import prefixkv",
        "from prefixkv import Principal, PolicySet, EngineConfig, SamplingParams, CacheReport, ChatRequest, errors",
        "from prefixkv.cli import main\ntry: main(['demo', '--help'])\nexcept SystemExit: pass",
        "from prefixkv.cli import main\ntry: main(['chat', '--help'])\nexcept SystemExit: pass",
        "from prefixkv.cli import main\nassert main(['demo', '--pool', 'nine']) == 2",
    ],
)
def test_values_help_and_wrong_options_need_no_torch(statement: str) -> None:
    """Importing torch takes seconds. A fresh interpreter, since this one has it."""
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
