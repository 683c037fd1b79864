"""Policy files: plain words, no key twice, nothing endless, and every fault with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import PolicyError
from prefixkv.policy import PolicySet, PoolAmount
from prefixkv.policy.file import parse_file


def fault(path: Path, content: str | bytes) -> str:
    """Return what is wrong with a file, after its name."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PolicyError) as caught:
        PolicySet.load(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return "\n".join(line.removeprefix(f"{path}: ") for line in lines)


TWICE = "stands here twice, and one of the two would be lost"


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("p.yaml", "tenants: {}\ndefault: {}\ntenants: {a: {}}\n", f"line 3, column 1: the key 'tenants' {TWICE}"),
        ("p.yaml", "tenants:\n  a: {}\n  b: {}\n  a: {}\n", f"line 4, column 3: the key 'a' {TWICE}"),
        ("p.yaml", "tenants:\n  a: {weight: 1, weight: 2}\n", f"line 2, column 18: the key 'weight' {TWICE}"),
        ("p.json", '{"tenants": {},\n "tenants": {}}', f"line 2: the key 'tenants' {TWICE}"),
        ("p.json", '{"tenants": {"a{": {},\n"b": {"weight": 1},\n"a\\u007b": {}}}', f"line 3: the key 'a{{' {TWICE}"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, name: str, content: str, want: str) -> None:
    """A second ``tenants:`` would lose the first without a word."""
    assert fault(tmp_path / name, content) == want


def test_toml_refuses_a_table_twice_by_itself(tmp_path: Path) -> None:
    told = fault(tmp_path / "p.toml", "[tenants.a]\nweight = 1.0\n[tenants.a]\n")
    assert told.startswith("line 3, column ") and "twice" in told


def test_the_same_key_in_two_places_is_fine(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"tenants": {"a": {"weight": 1}, "b": {"weight": 2}}, "default": {"weight": 3}}')
    (tmp_path / "p.yaml").write_text("tenants: {a: {weight: 1}, b: {weight: 2}}\ndefault: {weight: 3}")
    assert PolicySet.load(tmp_path / "p.json") == PolicySet.load(tmp_path / "p.yaml")


@pytest.mark.parametrize("name", ["p.yaml", "p.json", "p.toml"])
def test_an_empty_file_says_so(tmp_path: Path, name: str) -> None:
    """TOML's empty document is an empty table, yet nobody means that no tenant may ask."""
    for content in ("", " \n\n", "\ufeff"):
        assert (
            fault(tmp_path / name, content) == "the file is empty; it must hold a mapping with 'tenants' and 'default'"
        )


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("p.yaml", "# nothing\n", "the file is empty"),
        ("p.yaml", "- a\n", "the file holds a list"),
        ("p.yaml", "5", "the file holds a int"),
        ("p.json", "[]", "the file holds a list"),
        ("p.json", "5.5", "the file holds a float"),
        ("p.yaml", "tenants:\n", "tenants: must be a mapping"),
        ("p.yaml", "tenants: {a: }\n", "tenants.a: must be a mapping of fields"),
        ("p.yaml", "a: {}\n---\nb: {}\n", "line 2, column 1: expected a single document"),
        ("p.yaml", "tenants:\n\ta: {}\n", "line 2, column 1: while scanning for the next token, found character '\\t'"),
        ("p.yaml", b"default: {}\n# \x01\n", "line 2: special characters are not allowed"),
        ("p.yaml", b"default: {}\n# caf\xe9\n", "line 2: is no UTF-8 text (byte 0xe9)"),
        ("p.json", '{"default": {},\n}', "line "),
        ("p.toml", "[default]\nweight = yes\n", "line 2, column 10: "),
        ("p.yaml", "default: &a {slots: {x: *a}}", "an alias stands inside what it stands for"),
        ("p.yaml", "default: *a", "found undefined alias 'a'"),
        ("p.yaml", "default: {weight: !!bool maybe}", "a tag does not fit its value"),
        ("p.yaml", "default: {weight: !!int maybe}", "invalid literal"),
        ("p.yaml", "default: {weight: !!timestamp maybe}", "is no tag of a policy file"),
        ("p.yaml", "default: {? [1] : 2}", "line 1, column 13: while constructing a mapping, found unhashable key"),
        ("p.yaml", "default: {weight: " + "9" * 5000 + "}", "digits"),
        ("p.yaml", "default: " + "[" * 5000, "nested too deeply"),
        ("p.json", '{"default": ' + "[" * 200000, "nested too deeply"),
    ],
)
def test_each_fault_of_a_file_is_one_line_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, want: str
) -> None:
    told = fault(tmp_path / name, content)
    assert want in told
    assert len(told.splitlines()) == 1


def test_a_file_is_bounded(tmp_path: Path) -> None:
    """A wrong path, such as a log of gigabytes, is not read to its end."""
    path = tmp_path / "p.yaml"
    path.write_bytes(b"default: {}\n#".ljust(2**20, b"x"))
    assert PolicySet.load(path).default is not None
    assert "is larger than 1048576 bytes" in fault(path, b"default: {}\n#".ljust(2**20 + 1, b"x"))


@pytest.mark.parametrize(
    "levels",
    [
        [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)],
        [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)],
    ],
    ids=["lists", "merges"],
)
def test_a_few_lines_that_stand_for_billions_of_values_are_refused(tmp_path: Path, levels: list[str]) -> None:
    told = fault(tmp_path / "p.yaml", "\n".join(["a0: &a0 {x: 1}", *levels]))
    assert "with its aliases resolved it has over 1000000 values" in told


def test_anchors_and_merges_let_tenants_share_rules(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "tenants:\n  a: &base {weight: 2, max_pool: 50%}\n  b: *base\n  c:\n    <<: *base\n    weight: 3\n"
        "default: {<<: *base, max_pool: 1MiB}\n"
    )
    policies = PolicySet.load(path)
    assert policies.get("a") == policies.get("b")
    assert (policies.get("c").weight, policies.get("c").max_pool) == (3, PoolAmount(share=0.5))
    assert (policies.get("x").weight, policies.get("x").max_pool) == (2, PoolAmount(size_bytes=2**20))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("On", "On"),
        ("1_000", "1_000"),
        ("24:00", "24:00"),
        ("2026-01-31", "2026-01-31"),
        ("0x1f", "0x1f"),
        ("010", 10),
        ("-5", -5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'true'", "true"),
        ("!!str 5", "5"),
    ],
)
def test_plain_words_of_yaml_are_what_they_look_like(written: str, read: Any) -> None:
    """YAML 1.1 reads ``no`` as False, ``010`` as 8 and ``24:00`` as 1440."""
    found = parse_file(Path("p.yaml"), f"key: {written}".encode())["key"]
    assert (found, type(found)) == (read, type(read))


def test_a_tenant_may_be_called_no_and_a_number_needs_quotes(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("tenants: {no: {weight: 2}, '47': {weight: 3}}")
    assert (PolicySet.load(path).get("no").weight, PolicySet.load(path).get("47").weight) == (2, 3)
    assert fault(path, "tenants: {47: {}}") == "tenants.47: a name must be text; put it in quotes"
    assert "weight: Input should be a valid number" in fault(path, "default: {weight: yes}")
    assert "splice_generated: Input should be a valid boolean" in fault(path, "default: {splice_generated: yes}")


def test_an_editors_marks_are_passed_over(tmp_path: Path) -> None:
    """The byte order mark of some, and the key by which others find the schema."""
    path = tmp_path / "p.json"
    path.write_bytes(b'\xef\xbb\xbf{"$schema": "policies.schema.json", "default": {"weight": 2}}')
    assert PolicySet.load(path).get("x").weight == 2


@pytest.mark.parametrize("ending", [".yaml", ".json", ".toml"])
@given(data=st.data())
def test_any_bytes_are_policies_or_a_policy_error(ending: str, data: st.DataObject) -> None:
    words = 'tenants default : a b weight 1 0.5 "x" \' { } [ ] , = - & * << !! !!int !!set | > # %YAML \\ \x00 \xe9 ?'
    pieces = st.sampled_from([*words.split(), " ", "\n", "\t", "\n  "])
    content = "".join(data.draw(st.lists(pieces, max_size=30))).encode()
    try:
        PolicySet.from_content(Path(f"p{ending}"), content)
    except PolicyError as error:
        assert str(error).startswith(f"p{ending}: ")
