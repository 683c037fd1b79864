"""Principals and scopes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from prefixkv.errors import InvalidRequest
from prefixkv.scope import Principal, Scope, ScopeLevel

ANN = Principal("acme", user="ann", session="s1")


@pytest.mark.parametrize("arguments", [{}, {"tenant": ""}, {"tenant": None}, {"tenant": 7}, {"tenant": b"acme"}])
def test_a_principal_needs_a_tenant(arguments: dict[str, Any]) -> None:
    """There is no default tenant: absence must not be misread as a shared one."""
    with pytest.raises(InvalidRequest) as caught:
        Principal(**arguments)
    assert (caught.value.code, caught.value.path) == ("missing_tenant", "principal.tenant")


@pytest.mark.parametrize("name", ["tenant", "user", "session"])
@pytest.mark.parametrize(
    ("value", "hint"), [("x" * 257, "257 bytes"), ("é" * 129, "258 bytes"), ("a\ud800", "surrogate")]
)
def test_ids_are_bounded_text(name: str, value: str, hint: str) -> None:
    """Ids become part of keys as UTF-8 bytes; the limit counts those, and the message never shows the id."""
    with pytest.raises(InvalidRequest) as caught:
        Principal(**{"tenant": "acme", name: value})
    assert (caught.value.code, caught.value.path) == ("bad_principal", f"principal.{name}")
    assert hint in caught.value.hint
    assert value not in str(caught.value)


@pytest.mark.parametrize("name", ["user", "session"])
@pytest.mark.parametrize("value", ["", 3, b"u", ["u"]])
def test_optional_ids_are_text_or_absent(name: str, value: object) -> None:
    """An empty user would be a second way to say nobody."""
    with pytest.raises(InvalidRequest) as caught:
        Principal("acme", **{name: value})  # type: ignore[arg-type]
    assert caught.value.path == f"principal.{name}"


def test_the_longest_ids_fit() -> None:
    """Exactly 256 bytes."""
    assert Principal("é" * 128, "u" * 256, "s" * 256).tenant == "é" * 128


def test_principals_are_values() -> None:
    """They key dictionaries, so they must not change."""
    assert {ANN: 1}[Principal("acme", "ann", "s1")] == 1
    with pytest.raises(FrozenInstanceError):
        ANN.tenant = "other"  # type: ignore[misc]


def test_levels_run_from_wide_to_narrow() -> None:
    """The meet of scopes is their maximum."""
    assert [level.label for level in sorted(ScopeLevel)] == ["public", "tenant", "user", "session", "request"]
    assert max(ScopeLevel.TENANT, ScopeLevel.SESSION) is ScopeLevel.SESSION


def test_levels_are_parsed_from_their_word_only() -> None:
    """A number, or another spelling, in a policy is a mistake."""
    for level in ScopeLevel:
        assert ScopeLevel.parse(level.label) is level
        assert ScopeLevel.parse(level) is level
    for wrong in ("Tenant", "TENANT", "", 1, None, "private"):
        with pytest.raises(ValueError, match="public, tenant, user, session, request"):
            ScopeLevel.parse(wrong)


@pytest.mark.parametrize(
    ("level", "ids"),
    [
        (ScopeLevel.PUBLIC, (None, None, None)),
        (ScopeLevel.TENANT, ("acme", None, None)),
        (ScopeLevel.USER, ("acme", "ann", None)),
        (ScopeLevel.SESSION, ("acme", "ann", "s1")),
        (ScopeLevel.REQUEST, ("acme", "ann", "s1")),
    ],
)
def test_a_scope_holds_no_id_narrower_than_its_level(level: ScopeLevel, ids: tuple[str | None, ...]) -> None:
    """Otherwise two users of a tenant would not share its system prompt."""
    scope = Scope.of(ANN, level)
    assert (scope.level, (scope.tenant, scope.user, scope.session)) == (level, ids)


def test_equal_scopes_are_exactly_those_that_share() -> None:
    """Over principals that differ in one id each, per level."""
    others = [Principal("acme", "bob", "s1"), Principal("acme", "ann", "s2"), Principal("zeta", "ann", "s1")]
    shares = {level: [Scope.of(other, level) == Scope.of(ANN, level) for other in others] for level in ScopeLevel}
    assert shares[ScopeLevel.PUBLIC] == [True, True, True]
    assert shares[ScopeLevel.TENANT] == [True, True, False]
    assert shares[ScopeLevel.USER] == [False, True, False]
    assert shares[ScopeLevel.SESSION] == [False, False, False]


@pytest.mark.parametrize(
    ("identity", "within"),
    [
        ((None, None, None), ["public", "tenant", "user", "session", "request"]),
        (("acme", None, None), ["tenant", "user", "session", "request"]),
        (("acme", "ann", None), ["user", "session", "request"]),
        ((None, "ann", None), ["user", "session", "request"]),
        (("acme", "ann", "s1"), ["session", "request"]),
        (("acme", "ann", "s2"), []),
        (("acme", "bob", None), []),
        (("zeta", None, None), []),
    ],
)
def test_is_within_selects_what_a_purge_may_destroy(
    identity: tuple[str | None, str | None, str | None], within: list[str]
) -> None:
    """A purge of a user leaves what the tenant shares, and one of a tenant leaves public text."""
    assert [level.label for level in ScopeLevel if Scope.of(ANN, level).is_within(*identity)] == within


def test_an_unnamed_user_is_within_no_named_one() -> None:
    """None in a scope means unnamed, not anybody."""
    scope = Scope.of(Principal("acme"), ScopeLevel.SESSION)
    assert scope.is_within("acme", None, None)
    assert not scope.is_within("acme", "ann", None)
    assert not scope.is_within("acme", None, "s1")
