"""The README's promises: its code runs, its policies load, its tables match the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import prefixkv
from prefixkv import CacheConfig, EngineConfig, PolicySet, SamplingParams, SchedulerConfig, ScopeLevel, errors
from prefixkv.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_code_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one namespace and in order, as somebody would paste it; beside the policies it shows."""
    (tmp_path / "policies.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    for number, code in enumerate(blocks("python")):
        exec(compile(code, f"README block {number}", "exec"), names)  # the point of the test
        if number == 0:
            usage = names["result"].usage
            assert 0 < usage.computed_tokens < usage.cached_tokens, "the second turn computes only what is new"
    assert names["receipt"].blocks > 0
    with pytest.raises(errors.EngineClosed):
        names["engine"].check()
    published = re.search(r"^(\d+) of (\d+) published tokens$", capsys.readouterr().out, re.MULTILINE)
    assert published is not None
    assert published[1] == published[2] != "0", "what was published for acme serves ben"


def test_the_policies_say_what_they_seem_to_say(tmp_path: Path) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(blocks("yaml")[0], encoding="utf-8")
    policies = PolicySet.load(path)
    assert policies.get("acme").weight == 2.0
    assert policies.get("acme").scope_level("history").label == "user"
    assert policies.get("acme").slot("now").placement == "tail"
    assert policies.get("acme").template_clock == "month"
    assert policies.get("anybody").max_prompt_tokens == 4000


def test_the_tenants_get_what_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(blocks("yaml")[1], encoding="utf-8")
    assert main(["policy", "check", str(path)]) == 0
    acme, clinic = PolicySet.load(path).get("acme"), PolicySet.load(path).get("clinic")
    assert acme.min_pool is not None and acme.min_pool.share == 0.2
    assert acme.ttl_of(ScopeLevel.SESSION).absolute == 86_400
    assert acme.scope_level("system") is ScopeLevel.USER
    assert clinic.ttl_of(ScopeLevel.TENANT).idle == 300


def test_every_error_is_listed() -> None:
    listed = set(re.findall(r"`(\w+)`", "\n".join(line for line in README.splitlines() if line.startswith("| `"))))
    reserved = {"PrefixKVError", "SnapshotError"}  # the base, and one that nothing raises yet
    assert set(errors.__all__) - reserved <= listed


def test_every_option_is_listed_with_its_default() -> None:
    for kind in (CacheConfig, SchedulerConfig, EngineConfig):
        for field in dataclasses.fields(kind):
            if field.name in ("cache", "scheduler"):
                continue
            default = str(field.default) if not isinstance(field.default, str) else f'"{field.default}"'
            assert f"| `{kind.__name__}.{field.name}` | `{default}` |" in README
    for field in dataclasses.fields(SamplingParams):
        assert f"`{field.name}`" in README


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)
    assert commands
    assert {f"| `prefixkv {name}` |" for name in commands} == set(re.findall(r"\| `prefixkv \w+` \|", README))


def test_the_path_of_a_request_is_the_same_in_the_package() -> None:
    path = next(text for text in blocks("") if "Segmenter.segment" in text)
    assert prefixkv.__doc__ is not None
    shown = [line.strip() for line in prefixkv.__doc__.splitlines()]
    assert [line.strip() for line in path.splitlines() if line.strip() not in shown] == []


def test_links_lead_somewhere() -> None:
    root = Path(__file__).resolve().parent.parent
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in README.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target[1:] in headings if target.startswith("#") else (root / target).exists(), target
