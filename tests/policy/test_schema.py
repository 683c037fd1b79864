"""The schema of a policy file: it takes what a load takes, and flags what somebody mistyped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import PolicyError
from prefixkv.policy import SEGMENT_KINDS, PolicySet, SlotPolicy, TenantPolicy, TTLPolicy, json_schema
from tests.policy.test_policies import BAD_TENANTS, CHAT, DATA

SCHEMA = json_schema()
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
}
_NOTES = {"$schema", "$defs", "title", "description", "default"}


def accepts(value: Any, schema: dict[str, Any] = SCHEMA) -> bool:
    """Check a value as an editor would: the part of JSON Schema that our schema uses, and no other."""
    return all(_holds(rule, known, schema, value) for rule, known in schema.items() if rule not in _NOTES)


def _holds(rule: str, known: Any, schema: dict[str, Any], value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match rule:
        case "$ref":
            return accepts(value, SCHEMA["$defs"][known.removeprefix("#/$defs/")])
        case "type" if known == "integer":
            return is_number and value == value // 1
        case "type":
            return isinstance(value, _TYPES[known]) and (known == "boolean" or not isinstance(value, bool))
        case "anyOf":
            return any(accepts(value, one) for one in known)
        case "enum":
            return value in known
        case "pattern":
            return not isinstance(value, str) or re.search(known, value) is not None
        case "maxLength":
            return not isinstance(value, str) or len(value) <= known
        case "minimum":
            return not is_number or value >= known
        case "maximum":
            return not is_number or value <= known
        case "exclusiveMinimum":
            return not is_number or value > known
        case "exclusiveMaximum":
            return not is_number or value < known
        case "properties":
            return not isinstance(value, dict) or all(
                accepts(value[name], known[name]) for name in known if name in value
            )
        case "propertyNames":
            return not isinstance(value, dict) or all(accepts(name, known) for name in value)
        case "additionalProperties":
            names = value if isinstance(value, dict) else {}
            rest = [value[name] for name in names if name not in schema.get("properties", {})]
            return not rest if known is False else all(accepts(one, known) for one in rest)
    raise AssertionError(f"the checker does not know {rule!r}")


FULL: dict[str, Any] = {
    **CHAT,
    "weight": 2,
    "priority": -5,
    "min_pool": "25%",
    "max_pool": 0.5,
    "isolation": "shared",
    "ttl": {"tenant": {"idle": "1h", "absolute": 86400}, "session": {"idle": "1.5m"}, "user": {}},
    "zero_retention": True,
    "tenant_scope": "registered",
    "kv_format": "int8",
    "exact": False,
    "scopes": dict.fromkeys(SEGMENT_KINDS, "user"),
    "max_prompt_tokens": 1,
    "max_queued_requests": 2,
    "max_running_requests": 3,
    "tokens_per_minute": 4,
}


def test_a_file_that_uses_every_field_is_accepted() -> None:
    assert set(FULL) == set(TenantPolicy.model_fields), "the example has to show each of them"
    for data in (DATA, {"tenants": {"acme": FULL}, "default": CHAT, "$schema": "x.json"}, {}, {"default": None}):
        PolicySet.from_content(Path("p.json"), json.dumps(data).encode())
        assert accepts(data)


def _is_loaded(data: dict[str, Any]) -> bool:
    try:
        PolicySet.load(data)
    except PolicyError:
        return False
    return True


def test_what_a_load_refuses_is_flagged() -> None:
    """All but what no schema sees: amounts that must fit together, the calendar, zero in words."""
    unseen = [(path, data[path]) for path, data, _ in BAD_TENANTS if accepts({"tenants": {"a": data}})]
    assert unseen == [
        ("template_clock", "2026-02-30"),
        ("min_pool", "0%"),
        ("min_pool", "0 tokens"),
        ("min_pool", "50%"),
        ("min_pool", "2 tokens"),
        ("min_pool", "2GiB"),
        ("isolation", "strict"),
        ("isolation", "strict"),
    ]


@pytest.mark.parametrize("name", [*TenantPolicy.model_fields])
def test_a_typo_in_any_field_is_flagged(name: str) -> None:
    assert not accepts({"default": {name[:-1] + "_": FULL[name]}})


@pytest.mark.parametrize("model", [TenantPolicy, SlotPolicy, TTLPolicy, PolicySet])
def test_an_editor_can_show_what_each_field_means(model: type[Any]) -> None:
    """Taken from the docstrings, without their marks."""
    schema = SCHEMA if model is PolicySet else SCHEMA["$defs"][model.__name__]
    words = {name: schema["properties"][name]["description"] for name in model.model_fields}
    assert all(text[-1] in ".)" and "``" not in text and ":data:" not in text for text in words.values()), words
    assert "Attributes" not in schema["description"]


def test_the_schema_is_json_and_defaults_in_it_are_valid() -> None:
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA
    for schema in SCHEMA["$defs"].values():
        for field in schema["properties"].values():
            assert "default" not in field or accepts(field["default"], field)


_WORDS = (
    ",1,5%,100 %, 64 MiB ,1.5gb,12 tokens,10m,1.5 h,7 d,90,tenant,user,request,public,strict,system,inline,int8,"
    "canonical,hour,2026-01-31,20260131T10:30,2026-W05-6"
)
_VALUES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 1.5, 0.25, 2**63, 10**9, {}, [], {"tenant": {}}, {"session": {"idle": "10m"}}),
        *({"history": "user"}, {"a": {}}, {"a": {"scope": "user"}}),
        *_WORDS.split(","),
    ]
)


@given(st.dictionaries(st.sampled_from([*TenantPolicy.model_fields, "wieght"]), _VALUES, max_size=4))
def test_every_file_that_loads_is_accepted(data: dict[str, Any]) -> None:
    if _is_loaded({"tenants": {"a": data}}):
        assert accepts({"tenants": {"a": data}})


@given(st.sampled_from([*TenantPolicy.model_fields]), _VALUES)
def test_one_field_alone_is_accepted_just_where_it_loads(name: str, value: Any) -> None:
    data = {"tenants": {"a": {name: value}}}
    if value != "strict":  # needs another field
        assert accepts(data) == _is_loaded(data)
