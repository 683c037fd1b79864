"""How tenants divide the pool: amounts, floors that must fit together, and floors that must fit a pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.config import KV_FORMATS
from prefixkv.errors import PolicyError
from prefixkv.policy import PolicySet, PoolAmount, TenantPolicy

POOL = (100, 32, 1000)
"""Blocks, tokens of one, bytes of one."""


@pytest.mark.parametrize(
    ("written", "amount", "blocks", "told"),
    [
        ("25%", PoolAmount(share=0.25), 25, "25 %"),
        (" 29 % ", PoolAmount(share=0.29), 29, "29 %"),
        (1.0, PoolAmount(share=1.0), 100, "100 %"),
        (1, PoolAmount(size_bytes=1), 0, "1 bytes"),
        ("8KiB", PoolAmount(size_bytes=8192), 8, "8 KiB"),
        ("1GiB", PoolAmount(size_bytes=2**30), 100, "1 GiB"),
        ("320 tokens", PoolAmount(tokens=320), 10, "320 tokens"),
        ("31tokens", PoolAmount(tokens=31), 0, "31 tokens"),
    ],
)
def test_amounts_are_read_told_and_rounded_down_to_blocks(
    written: Any, amount: PoolAmount, blocks: int, told: str
) -> None:
    assert PoolAmount.parse(written) == amount
    assert amount.blocks(*POOL) == blocks
    assert str(amount) == told
    assert PoolAmount.parse(amount.dump()) == amount


@pytest.mark.parametrize("fields", [{}, {"share": 0.0}, {"share": 1.5}, {"tokens": 0}, {"share": 0.5, "tokens": 5}])
def test_an_amount_made_in_python_is_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="an amount of the pool"):
        PoolAmount(**fields)


def floors(**amounts: Any) -> PolicySet:
    return PolicySet.load({"tenants": {name: {"min_pool": amount} for name, amount in amounts.items()}})


def test_floors_over_the_whole_pool_are_refused_with_how_much() -> None:
    with pytest.raises(PolicyError) as caught:
        floors(a="20%", b=0.5, c="40%", d="12.5%")
    assert str(caught.value) == (
        "tenants: the floors, min_pool, add up to 122.5 % of the pool (b 50 %, c 40 %, a 20 %, ...); "
        "lower them by 22.5 points"
    )


def test_percentages_that_add_up_to_a_hundred_are_not_refused_for_their_last_bit() -> None:
    shares = ["1.0%", "9.3%", "16.8%", "72.9%"]
    assert math.fsum(PoolAmount.parse(share).share or 0 for share in shares) > 1
    floors(**{f"t{i}": share for i, share in enumerate(shares)}).check_fits(1000, 32, 1000)


@given(st.integers(1, 40), st.integers(1, 5000))
def test_equal_floors_that_add_up_to_the_whole_pool_fit_any_pool(tenants: int, num_blocks: int) -> None:
    """Neither the sum of ten tenths nor the rounding of each may say that there is too little."""
    floors(**{f"t{i}": 1 / tenants for i in range(tenants)}).check_fits(num_blocks, 32, 1000)


@pytest.mark.parametrize(
    ("default", "path"),
    [({"min_pool": "10%"}, "default.min_pool"), ({"min_pool": "10%", "isolation": "strict"}, "default.isolation")],
)
def test_floors_and_partitions_need_a_name(default: dict[str, Any], path: str) -> None:
    """Anybody may come up with a new name, and each would have one."""
    TenantPolicy(**default)
    with pytest.raises(PolicyError) as caught:
        PolicySet.load({"default": default})
    assert str(caught.value).startswith(f"{path}: ")
    assert "needs a tenant's name" in str(caught.value)


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_a_name_that_no_caller_can_have_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="no caller can have this name"):
        PolicySet.load({"tenants": {name: {}}})


def test_a_name_cannot_forge_a_line_of_a_message() -> None:
    with pytest.raises(PolicyError) as caught:
        PolicySet.load({"tenants": {"a\nb: fine\x1b[2J": {"weight": 0}}})
    assert str(caught.value) == r"tenants.'a\nb: fine\x1b[2J'.weight: Input should be greater than 0"


def test_floors_that_fit_are_accepted() -> None:
    policies = PolicySet.load(
        {
            "tenants": {
                "a": {"min_pool": "50%", "max_pool": "64KiB"},
                "b": {"min_pool": "960 tokens", "isolation": "strict"},
                "c": {"min_pool": 20000, "kv_format": "int8"},
                "d": {"min_pool": 1},
            },
            "default": {"max_pool": 1},
        }
    )
    policies.check_fits(*POOL, kv_formats=["int8"])
    PolicySet.load(None).check_fits(1, 1, 1, kv_formats=[])


@pytest.mark.parametrize(
    ("tenants", "want"),
    [
        ({"a": {"min_pool": "50%"}, "b": {"min_pool": "1632 tokens"}}, ["tenants: ", "need 101 blocks", "has 100"]),
        ({"a": {"min_pool": "101kB"}}, ["tenants.a.min_pool: ", "is 101 blocks, and the pool has 100"]),
        (
            {"a": {"min_pool": "31 tokens", "isolation": "strict"}},
            ["tenants.a.min_pool: ", "31 tokens is less than one block (32 tokens, 1000 bytes)"],
        ),
        (
            {"a": {"min_pool": "20%", "max_pool": "608 tokens"}},
            ["tenants.a.min_pool: ", "20 % is 20 blocks, and the ceiling, max_pool, of 608 tokens has 19"],
        ),
        ({"a": {"kv_format": "int4"}}, ["tenants.a.kv_format: ", "no pool of int4; it has int8, model"]),
        ({"a b": {"kv_format": "int4"}}, ["tenants.'a b'.kv_format: "]),
    ],
)
def test_what_does_not_fit_a_pool_is_named(tenants: dict[str, Any], want: list[str]) -> None:
    policies = PolicySet.load({"tenants": tenants})
    with pytest.raises(PolicyError) as caught:
        policies.check_fits(*POOL, kv_formats=["int8", "model"])
    assert str(caught.value).startswith(want[0])
    assert all(part in str(caught.value) for part in want)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    policies = PolicySet.load(
        {"tenants": {"a": {"min_pool": "90%"}, "b": {"min_pool": "6400 tokens"}}, "default": {"kv_format": "int4"}}
    )
    with pytest.raises(PolicyError) as caught:
        policies.check_fits(*POOL, kv_formats=["int8"])
    paths = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert paths == ["tenants.b.min_pool", "default.kv_format", "tenants"]
    PolicySet.load({"default": {"kv_format": "int4"}}).check_fits(*POOL)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_format_of_a_pool_can_be_asked_for(name: str) -> None:
    assert TenantPolicy(kv_format=name).kv_format == name
