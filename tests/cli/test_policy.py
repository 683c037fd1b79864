"""``prefixkv policy``: what a file gives to whom, what in it may surprise, and the schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefixkv.cli import main
from prefixkv.policy import PolicySet, TenantPolicy, json_schema

POLICIES = """
tenants:
  acme:
    weight: 2
    priority: 5
    min_pool: 25%
    max_pool: 64 tokens
    max_prompt_tokens: 4000
    max_running_requests: 8
    max_queued_requests: 100
    tokens_per_minute: 60000
    scopes: {few_shot: user, history: user, tools: tenant}
    slots: {now: {placement: coarsen, unit: day, scope: tenant}, nick: {placement: tail}}
    ttl: {session: {idle: 90s, absolute: 36h}}
    few_shot_messages: 4
    tools_order: canonical
    splice_generated: true
    template_clock: month
    kv_format: int8
  vault: {isolation: strict, min_pool: 2MiB, zero_retention: true, ttl: {user: {idle: 1m}}}
  calm: {}
default: {weight: 0.5}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text(POLICIES)
    return path


def check(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str], list[str]]:
    code = main(["policy", "check", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def section(lines: list[str], heading: str) -> list[str]:
    """Return the words under a heading, runs of spaces made one."""
    start = lines.index(heading) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("  ")), len(lines))
    return [" ".join(line.split()) for line in lines[start:end]]


def row(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"{name} ")).split()[1:]


def said(lines: list[str]) -> list[str]:
    return [line.removeprefix("surprising: ") for line in lines if line.startswith("surprising: ")]


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_time_and_pool_are_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, file)
    assert (code, err) == (0, [])
    assert out[0] == f"{file}: 3 tenants by name; others get the default"
    assert row(out, "acme") == "2 66.7% 5 25 % 64 tokens shared".split()
    assert row(out, "vault") == "1 its part 0 2 MiB 2 MiB strict".split()
    assert row(out, "calm") == "1 33.3% 0 none none shared".split()
    assert row(out, "(others)") == "0.5 14.3% each 0 none none shared".split()
    assert said(out) == []


def test_the_rest_is_told_in_words(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tenants with the same rules are told together."""
    _, out, _ = check(capsys, file)
    assert section(out, "acme") == [
        "kept tenant, user: until it is evicted; session: gone 1.5 min after the last use and 1.5 d after it was "
        "computed",
        "shared few_shot: user instead of tenant; history: user instead of session",
        "slot now: its times are rounded down to the day (coarsen); scope tenant",
        "slot nick: goes to the end, before the last user turn (tail); scope session",
        "limits prompts of 4000 tokens, 8 requests run, 100 wait, 60000 tokens a minute",
        "prompts the first 4 messages behind the system text are examples, shared like it, tools are sorted, replies "
        "come back as their own tokens, "
        "the template's clock: month, pool of format int8",
    ]
    assert section(out, "vault") == [
        "kept tenant, session: gone 5 min after the last use and 1 h after it was computed; user: gone 1 min after the "
        "last use and 1 h after it was computed; in memory only, and the end of a session destroys it (zero_retention)",
        "shared as by default",
        "limits none of its own",
    ]
    assert section(out, "calm, (others)") == [
        "kept tenant, user, session: until it is evicted",
        "shared as by default",
        "limits none of its own",
    ]


@pytest.mark.parametrize(
    ("options", "acme", "vault", "size"),
    [
        (["--memory", "8MiB"], "25 % = 2 MiB 64 tokens", "2 MiB 2 MiB", None),
        (["--blocks", 80], "25 % = 20 blocks 64 tokens = 2 blocks", "2 MiB 2 MiB", "pool: 80 blocks of 32 tokens"),
        (
            ["--blocks", 80, "--block-bytes", 2**20, "--block-size", 64],
            "25 % = 20 blocks 64 tokens = 1 block",
            "2 MiB = 2 blocks 2 MiB = 2 blocks",
            "pool: 80 blocks of 64 tokens, 80 MiB",
        ),
        (
            ["--memory", "4MiB", "--block-bytes", 2**20],
            "25 % = 1 block 64 tokens = 2 blocks",
            "2 MiB = 2 blocks 2 MiB = 2 blocks",
            "pool: 4 blocks of 32 tokens, 4 MiB",
        ),
    ],
)
def test_amounts_are_told_in_what_is_known_of_the_pool(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[object], acme: str, vault: str, size: str | None
) -> None:
    _, out, _ = check(capsys, file, *options)
    assert " ".join(row(out, "acme")[3:-1]) == acme
    assert " ".join(row(out, "vault")[4:-1]) == vault
    assert [line for line in out if line.startswith("pool: ")] == ([] if size is None else [size])


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("default: {wieght: 2}", "default.wieght: there is no such field, did you mean weight?"),
        ("default: [", "line 1, column "),
        ("tenants: {a: {min_pool: 60%}, b: {min_pool: 60%}}", "tenants: the floors, min_pool, add up to 120 %"),
    ],
)
def test_a_broken_file_is_exit_code_1_and_says_where(
    file: Path, capsys: pytest.CaptureFixture[str], content: str, want: str
) -> None:
    file.write_text(content)
    code, out, err = check(capsys, file)
    assert (code, out, len(err)) == (1, [], 1)
    assert err[0].startswith(f"prefixkv: {file}: {want}")


def test_every_fault_of_a_file_has_a_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("tenants: {a: {weight: 0}, b: {priority: x}}")
    code, _, err = check(capsys, file)
    assert (code, [line.split(": ")[2] for line in err]) == (1, ["tenants.a.weight", "tenants.b.priority"])
    assert check(capsys, file.with_name("absent.yaml"))[0] == 1


@pytest.mark.parametrize(
    ("options", "code", "want"),
    [
        ([], 0, None),
        (["--blocks", 100], 0, None),  # what two mebibytes are in blocks is not known
        (
            ["--blocks", 100, "--block-bytes", 2**20],
            1,
            "tenants.acme.min_pool: the floor of 25 % is 25 blocks, and the ",
        ),
        (["--memory", "2MiB"], 1, "tenants: the floors, min_pool, need 2.5 MiB and the pool has 2 MiB"),
    ],
)
def test_a_pool_that_is_too_small_is_exit_code_1(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[object], code: int, want: str | None
) -> None:
    """The file is explained all the same."""
    found, out, err = check(capsys, file, *options)
    assert (found, bool(out)) == (code, True)
    assert [line.startswith(f"prefixkv: {file}: {want}") for line in err] == [True] * (want is not None)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (["--blocks", "0"], "--blocks 0: must be 1 or more"),
        (["--blocks", "5", "--block-size", "0"], "--block-size 0: must be 1 or more"),
        (["--block-bytes", "5"], "--block-bytes: says nothing without"),
        (["--memory", "50%"], "--memory 50%: must be an amount"),
        (["--memory", "much"], "memory='much'"),
        (["--memory", "1kB", "--block-bytes", "1024"], "--memory 1kB: does not hold one block"),
    ],
)
def test_wrong_options_are_exit_code_2(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], want: str
) -> None:
    code, out, err = check(capsys, file, *options)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(f"prefixkv: {want}")


SURPRISES = [
    ("{}", "no tenant is named and there is no default: every request is refused"),
    ("default: {max_pool: 1}", "default.max_pool: 1 is a number of bytes; a share is written 50% or 0.5"),
    (
        "tenants: {a: {min_pool: 31 tokens}}",
        "tenants.a.min_pool: 31 tokens is less than a block of 32 tokens; it keeps",
    ),
    (
        "tenants: {a: {max_pool: 31 tokens}}",
        "tenants.a.max_pool: 31 tokens is less than a block of 32 tokens; it still",
    ),
    ("tenants: {a: {isolation: strict, min_pool: 50%, weight: 2}}", "tenants.a.weight: changes nothing for a strict"),
    ("tenants: {a: {isolation: strict, min_pool: 50%, priority: 2}}", "tenants.a.priority: orders only its own"),
    ("default: {tenant_scope: registered}", "default.tenant_scope: nothing is shared among its users but what"),
    ("default: {scopes: {history: tenant}}", "default.scopes.history: all users of the tenant share it"),
    ("default: {scopes: {system: user, tools: tenant}}", "default.scopes.tools: tenant has no effect behind system"),
    ("default: {scopes: {few_shot: session, history: user}}", "default.scopes.history: user has no effect behind few_"),
    ("default: {few_shot_messages: 2}", "default.few_shot_messages: the 2 messages behind the system text count as"),
    ("default: {slots: {now: {placement: coarsen}}}", "default.slots.now: is rounded and still private: each session"),
    (
        "default: {slots: {a b: {placement: coarsen, scope: request}}}",
        "default.slots.'a b': is rounded and still priva",
    ),
    ("default: {slots: {x: {scope: tenant}}, scopes: {system: user}}", "default.slots.x: scope tenant has no effect"),
    ("default: {slots: {x: {placement: patch}}}", "default.slots.x: patch is inline as yet"),
    ("default: {slots: {x: {unit: day}}}", "default.slots.x: unit has no effect on inline"),
    ("default: {slots: {x: {phrase: y}}}", "default.slots.x: phrase has no effect on inline"),
    (
        "default: {zero_retention: true, ttl: {user: {idle: 10m}}}",
        "default.ttl.user.idle: zero_retention cuts 10 min to",
    ),
    ("default: {ttl: {user: {idle: 2h, absolute: 1h}}}", "default.ttl.user.idle: has no effect; absolute ends it"),
    (
        "default: {ttl: {tenant: {absolute: 1h}, session: {absolute: 2h}}}",
        "default.ttl.session.absolute: 2 h is longer",
    ),
    ("default: {tokens_per_minute: 10, max_prompt_tokens: 11}", "default.max_prompt_tokens: one prompt of 11 tokens"),
    (
        "tenants: {a: {min_pool: 3200 tokens}, b: {}}",
        "tenants: the floors are the whole pool; tenants.b will have none",
    ),
    (
        "{tenants: {a: {isolation: strict, min_pool: 100%}, b: {}}, default: {}}",
        "tenants: the floors are the whole pool; tenants.b and 1 more will never have a block",
    ),
]


@pytest.mark.parametrize(("content", "want"), SURPRISES)
def test_what_may_surprise_is_told_and_is_no_error(
    file: Path, capsys: pytest.CaptureFixture[str], content: str, want: str
) -> None:
    file.write_text(content)
    code, out, _ = check(capsys, file, "--blocks", 100)
    assert code == 0
    assert len(said(out)) == 1 and said(out)[0].startswith(want)


def test_plain_policies_surprise_nobody(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a set as it is dumped, where every field is written."""
    for policies in (PolicySet(default=TenantPolicy()), PolicySet.load(file)):
        path = file.with_suffix(".json")
        path.write_text(json.dumps(policies.model_dump()))
        assert said(check(capsys, path)[1]) == []


def test_a_terminal_is_told_no_escape_sequence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenant may have any name; colours are for terminals alone."""
    file.write_text('tenants: {"a\\e[2Jb": {slots: {"\\e[31m": {placement: coarsen}}, weight: 2}}')
    code, out, _ = check(capsys, file)
    assert code == 0 and "\x1b" not in "".join(out)
    file.write_text('tenants: {"a\\e[2Jb": {weight: 0}}')
    code, _, err = check(capsys, file)
    assert code == 1 and "\x1b" not in "".join(err)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_headings_and_surprises_are_coloured_on_a_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    file.write_text("default: {max_pool: 1}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", no_color)
    _, out, _ = check(capsys, file)
    assert (f"\x1b[1m{file}" in out[0]) == ("\x1b[33msurprising:" in out[-1]) == (not no_color)


def test_the_command_needs_no_torch(file: Path) -> None:
    code = (
        f"import sys\nfrom prefixkv.cli import main\nassert main(['policy', 'check', {str(file)!r}]) == 0\n"
        "assert main(['policy', 'schema']) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_floor_above_a_ceiling_in_another_unit_is_found_once_the_memory_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("tenants: {acme: {min_pool: 20%, max_pool: 64MiB}}", encoding="utf-8")
    assert main(["policy", "check", str(path)]) == 0
    assert main(["policy", "check", str(path), "--memory", "320MiB"]) == 0
    assert main(["policy", "check", str(path), "--memory", "1GiB"]) == 1
    assert "tenants.acme.min_pool: the floor of 20 % is 204.8 MiB of this pool" in capsys.readouterr().err
