"""The exception tree: who catches what, and errors that travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from prefixkv import errors
from prefixkv.errors import (
    ConfigError,
    ContextOverflow,
    EngineClosed,
    ExecutionError,
    IntegrityError,
    InvalidRequest,
    PolicyError,
    PrefixKVError,
    QueueFull,
    QuotaExceeded,
    SnapshotError,
    UnknownTenant,
    UnsupportedModel,
)

EXAMPLES = [
    ConfigError("CacheConfig.block_size=0: must be a whole number, 1 to 4096"),
    PolicyError("tenants.a.weight: must be above 0"),
    InvalidRequest("unknown_role", "messages[2].role", "must be system, user, assistant or tool"),
    ContextOverflow(8192, 10_000),
    ContextOverflow(64, 100, "the pool"),
    UnknownTenant("no such tenant"),
    QueueFull("too many wait"),
    QuotaExceeded("too large"),
    QuotaExceeded("too much in a minute", 2.5),
    EngineClosed("closed"),
    ExecutionError("failed"),
    UnsupportedModel("longrope"),
    IntegrityError("a reference is missing"),
    SnapshotError("truncated"),
]


def test_the_examples_cover_every_error() -> None:
    """So that the tests below hold for errors added later."""
    assert {type(error).__name__ for error in EXAMPLES} | {"PrefixKVError"} == set(errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error: PrefixKVError) -> None:
    """A backend may run the engine in another process; type, text and attributes arrive."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_one_base_catches_all(error: PrefixKVError) -> None:
    """And what is the caller's mistake is a ValueError as well."""
    assert isinstance(error, PrefixKVError)
    mistakes = (ConfigError, PolicyError, InvalidRequest, ContextOverflow)
    assert isinstance(error, ValueError) == isinstance(error, mistakes)


def test_attributes_say_what_programs_need() -> None:
    """Text is for people; a web handler reads fields."""
    bad = InvalidRequest("unknown_role", "messages[2].role", "must be one of the known roles")
    assert (bad.code, bad.path, bad.hint) == ("unknown_role", "messages[2].role", "must be one of the known roles")
    assert str(bad) == "messages[2].role: must be one of the known roles [unknown_role]"
    over = ContextOverflow(limit=64, got=100, what="the pool")
    assert (over.limit, over.got) == (64, 100)
    assert "100" in str(over) and "64" in str(over) and "the pool" in str(over)
    assert UnsupportedModel("longrope").reason == "longrope"
