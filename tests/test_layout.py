"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "prefixkv"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MEAN_FILE_LINES = 200
MAX_FUNCTION_LINES = 60


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=_name(path))


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_too_long() -> None:
    assert {_name(path): _num_lines(path) for path in MODULES if _num_lines(path) > MAX_FILE_LINES} == {}


def test_the_mean_file_is_short() -> None:
    assert sum(map(_num_lines, MODULES)) / len(MODULES) < MEAN_FILE_LINES


def test_no_function_is_too_long() -> None:
    long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == {}


def test_there_is_no_module_of_odds_and_ends() -> None:
    """A helper lives beside its only user."""
    assert [_name(path) for path in MODULES if path.stem in {"utils", "util", "helpers", "common", "misc"}] == []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(_tree(path))


def test_nothing_is_unpickled() -> None:
    """A pickle from a disk or a peer runs its author's code."""
    found = [
        f"{_name(path)}: {name}"
        for path in MODULES
        for name in _imports(path)
        if name.split(".")[0] in {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    ]
    assert found == []


def test_every_import_is_a_declared_dependency() -> None:
    """What another package happens to bring may be gone in its next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
        for group in (project["dependencies"], *(project["optional-dependencies"][x] for x in ("cpu", "cuda", "demo")))
        for requirement in group
    }
    distributions = packages_distributions()
    undeclared = {}
    for path in MODULES:
        for name in _imports(path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "prefixkv":
                continue
            names = {x.lower().replace("_", "-") for x in distributions.get(top, [top])}
            if not names & declared:
                undeclared[top] = _name(path)
    assert undeclared == {}


def test_the_path_of_a_request_in_the_readme_exists() -> None:
    """The README opens with the way of one request through the code; every name in it must be there."""
    block = _readme_path()
    if block is None:
        pytest.skip("the README does not show the path of a request yet")
    everything = set(_qualified_names(PACKAGE))
    missing = []
    for line in filter(str.strip, block.splitlines()):
        word = line.split()[0].split("(")[0]
        if "." not in word:
            continue
        folder, _, rest = word.partition(".")
        if word.endswith(".py"):
            exists = (PACKAGE / word).is_file()
        elif (PACKAGE / folder).is_dir() or (PACKAGE / f"{folder}.py").is_file():
            exists = rest in set(_qualified_names(PACKAGE / folder))
        else:
            exists = word in everything
        if not exists:
            missing.append(word)
    assert missing == []


def _readme_path() -> str | None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return next((block for block in blocks if "Segmenter.segment" in block and "ModelRunner.execute" in block), None)


def _qualified_names(place: Path) -> Iterator[str]:
    """Yield `Class`, `Class.method` and the bare `method` of all that is defined in a folder, or a module."""
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        yield path.stem
        for node in _tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.ClassDef):
                yield node.name
                for child in node.body:
                    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from (f"{node.name}.{child.name}", child.name)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
