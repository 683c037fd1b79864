"""Options: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.config import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig, parse_memory
from prefixkv.errors import ConfigError, InvalidRequest, PrefixKVError

HUGE = 10**400  # larger than any float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (2**40, 2**40),
        ("1", 1),
        ("4096B", 4096),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("1Gi", 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("500MB", 500_000_000),
        ("2k", 2000),
        ("1T", 10**12),
        ("3TiB", 3 * 2**40),
        (0.25, 0.25),
        (1.0, 1.0),
        ("25%", 0.25),
        (" 12.5 % ", 0.125),
        ("100%", 1.0),
    ],
)
def test_memory_is_bytes_text_or_a_share(value: int | float | str, expected: int | float) -> None:
    """An int is bytes, a float a share: 1 is one byte, 1.0 everything."""
    result = parse_memory(value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("value", [3, True, b"x", "", ["x"]])
def test_a_calibration_is_a_path(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^CacheConfig\.calibration=.*: must be the path of a file, or None$"):
        CacheConfig(kv_format="int4", calibration=value)


def test_a_calibration_needs_a_format_that_loses_something() -> None:
    """Found when the options are built, not when the model is loaded."""
    for path in ("c.json", Path("c.json")):
        assert CacheConfig(kv_format="int8", calibration=path).calibration == path
        with pytest.raises(ConfigError, match=r"^CacheConfig\.calibration: kv_format='model' loses nothing"):
            CacheConfig(kv_format="model", calibration=path)


BAD_MEMORY: list[Any] = [
    "", "lots", "-1GiB", "1 GiB extra", "1XB", "GiB", "0", "0.4", "0%", "101%", "-5%", "%", "x%", "nan%", "inf%",
    "nan", "1e9", "9" * 400 + "GB", "\u0663GiB", 0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, True, None, [], b"1",
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_MEMORY)
def test_other_memory_is_refused(value: Any) -> None:
    """The message repeats what was given and lists every accepted form."""
    with pytest.raises(ConfigError) as caught:
        parse_memory(value)
    assert str(caught.value).startswith(f"memory={value!r}: ")
    assert all(form in str(caught.value) for form in ("1073741824", "1GiB", "25%", "0.25"))


@given(st.text() | st.floats() | st.integers())
def test_memory_is_a_positive_amount_or_an_error(value: Any) -> None:
    """Nothing else comes out, and nothing else is raised."""
    try:
        result = parse_memory(value)
    except ConfigError:
        return
    assert result > 0
    assert isinstance(result, int) or result <= 1


BAD_ENGINE_OPTIONS: list[tuple[type, str, list[Any]]] = [
    (CacheConfig, "kv_format", ["int3", "", None, 8, ["model"]]),
    (CacheConfig, "eviction", ["fifo", None, 1]),
    (CacheConfig, "block_size", [0, -1, 4097, 2.0, "32", True, None]),
    (SchedulerConfig, "max_num_seqs", [0, -1, 1.5, "1", True, None]),
    (SchedulerConfig, "max_prefill_tokens", [0, -1, 1.5, True, None]),
    (SchedulerConfig, "max_new_seqs_per_step", [0, -1, 1.5, True, None]),
    (SchedulerConfig, "max_queued_requests", [0, -1, 1.5, True, None]),
    (EngineConfig, "cache", [None, {}, SchedulerConfig()]),
    (EngineConfig, "scheduler", [None, {}, CacheConfig()]),
    (EngineConfig, "dtype", ["int8", "", None, ["auto"]]),
    (EngineConfig, "device", ["", None, 0]),
    (EngineConfig, "max_context", [0, 1, -1, 2.0, True, "2048"]),
    (EngineConfig, "secret", [b"", b"short", "a text of 16 characters", 7]),
    (EngineConfig, "debug", [None, 1, "yes"]),
]


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(owner, name, value) for owner, name, values in BAD_ENGINE_OPTIONS for value in values]
)
def test_a_bad_engine_option_names_its_field(owner: type, name: str, value: Any) -> None:
    """And the value, except for the secret."""
    with pytest.raises(ConfigError) as caught:
        owner(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{owner.__name__}.{name}")
    assert (repr(value) in message) == (name != "secret")


def test_a_bad_memory_stops_the_cache_config() -> None:
    """Checked when the option is built, not when the pool is."""
    with pytest.raises(ConfigError, match="1GiB"):
        CacheConfig(memory="plenty")


def test_the_secret_is_not_printed() -> None:
    """A config ends up in logs."""
    secret = b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(EngineConfig(secret=secret))


@pytest.mark.parametrize("value", [CacheConfig(), SchedulerConfig(), EngineConfig(), SamplingParams()])
def test_options_are_frozen_values(value: Any) -> None:
    """Equal when built alike, unchangeable, keyword-only, and they travel between processes."""
    kind = type(value)
    assert kind() == value == pickle.loads(pickle.dumps(value))
    name = next(iter(kind.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises(TypeError):
        kind(None)


BAD_BIAS: list[Any] = [
    [1], "x", {1: math.nan}, {1: math.inf}, {1: "2"}, {1: None}, {1: True}, {1: HUGE}, {1: 1e300},
    {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1.0: 1.0},
]  # fmt: skip

BAD_SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "8", True],
    "temperature": [-0.1, 100.1, math.nan, math.inf, "1", None, True, HUGE],
    "top_k": [-1, 1.5, None, True],
    "top_p": [0, 0.0, -0.1, 1.1, math.nan, None, HUGE],
    "min_p": [-0.1, 1.1, math.nan, None],
    "repetition_penalty": [0, 0.0, -1, 101, math.nan, None],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.inf, None],
    "logit_bias": BAD_BIAS,
    "stop": ["", [""], ["a", ""], [1], 5, b"stop", {"a"}, [None]],
    "stop_token_ids": [5, "12", [-1], [1.0], [True], ["1"]],
    "include_stop": [None, 1, "no"],
    "ignore_eos": [None, 0, "yes"],
    "seed": [1.5, "1", True, 2**63, -(2**63) - 1],
    "logprobs": [-1, 21, 1.0, True, "1"],
    "n": [0, -1, 129, 1.0, None, True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SAMPLING.items() for value in values]
)
def test_a_bad_sampling_option_names_its_path(name: str, value: Any) -> None:
    """One code for all of them, the path of the option, and a hint that says what is accepted."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.code, caught.value.path) == ("bad_sampling", f"sampling.{name}")
    assert caught.value.hint.startswith("must ")


def test_every_sampling_option_is_checked() -> None:
    """A field added later needs its line in the table above."""
    assert set(BAD_SAMPLING) == set(SamplingParams.__dataclass_fields__)


def test_sampling_errors_never_quote_stop_strings() -> None:
    """They may hold message content."""
    with pytest.raises(PrefixKVError) as caught:
        SamplingParams(stop=["private words", ""])
    assert "private" not in str(caught.value)


def test_the_edges_of_sampling_options_are_accepted() -> None:
    """Bounds are inclusive where the documentation says so."""
    low: dict[str, Any] = {
        "max_tokens": 1, "temperature": 0, "top_k": 0, "top_p": 1e-9, "min_p": 0, "repetition_penalty": 1e-9, "n": 1
    } | {"presence_penalty": -2, "frequency_penalty": -2.0, "seed": -(2**63), "logprobs": 0}  # fmt: skip
    high: dict[str, Any] = {
        "max_tokens": None, "temperature": 100, "top_k": 10**9, "top_p": 1, "min_p": 1, "repetition_penalty": 100.0
    } | {"n": 128, "presence_penalty": 2, "frequency_penalty": 2.0, "seed": 2**63 - 1, "logprobs": 20}  # fmt: skip
    for options in (low, high):
        params = SamplingParams(**options)
        assert {name: getattr(params, name) for name in options} == options


def test_sampling_lists_are_copied_into_plain_values() -> None:
    """One string is a list of one, None is nothing, and the caller's objects may change later."""
    assert SamplingParams(stop="END").stop == ("END",)
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    empty = SamplingParams(**nothing)
    assert (empty.stop, empty.stop_token_ids, empty.logit_bias) == ((), (), {})
    stop, ids, bias = ["a"], [1], {1: -math.inf, 2: 3}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b"), ids.append(2), bias.clear()
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: -math.inf, 2: 3.0})


def test_zero_temperature_is_greedy() -> None:
    """Also as an int, which JSON bodies send."""
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
