"""Keys: no two places share one by accident or on purpose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.keys import ScopeKey, ScopeKeys, block_key
from prefixkv.scope import Principal, Scope, ScopeLevel

SECRET = b"0123456789abcdef"
ids = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4))
scopes = st.builds(
    lambda tenant, user, session, level: Scope.of(Principal(tenant, user, session), level),
    st.text("ab\0:", min_size=1, max_size=3),
    ids,
    ids,
    st.sampled_from(list(ScopeLevel)),
)


def _keys() -> ScopeKeys:
    return ScopeKeys(SECRET, b"a model")


def test_a_border_between_fields_cannot_be_moved() -> None:
    """Joined without lengths, ("org_1", "2345") and ("org_12345", "") would be one place."""
    keys = _keys()
    one, other = Scope(ScopeLevel.USER, "org_1", "2345"), Scope(ScopeLevel.USER, "org_12345", "")
    assert keys.key(one) != keys.key(other)


@pytest.mark.parametrize("text", ["", "None", "null", "\0", "\xff" * 4, "\U0010ffff"])
def test_no_user_is_not_a_user_of_any_name(text: str) -> None:
    keys = _keys()
    assert keys.key(Scope(ScopeLevel.USER, "a", None)) != keys.key(Scope(ScopeLevel.USER, "a", text))


@given(scopes, scopes)
def test_keys_are_equal_exactly_where_scopes_are(one: Scope, other: Scope) -> None:
    keys = _keys()
    assert (keys.key(one) == keys.key(other)) == (one == other)


def test_a_level_is_part_of_the_key() -> None:
    """A tenant's text is not its unnamed user's."""
    keys = _keys()
    places = [Scope.of(Principal("a"), level) for level in ScopeLevel]
    assert len({keys.key(place) for place in places}) == len(ScopeLevel)


def test_the_secret_and_the_model_are_part_of_the_key() -> None:
    """Nobody without the secret can make a key; rows of another model are no use."""
    scope = Scope(ScopeLevel.TENANT, "a")
    makers = [
        ScopeKeys(SECRET, b"m"),
        ScopeKeys(SECRET + b"x", b"m"),
        ScopeKeys(SECRET, b"n"),
        ScopeKeys(SECRET, b"m\0"),
    ]
    assert len({maker.key(scope) for maker in makers}) == 4


def test_two_engines_with_one_secret_make_the_same_keys() -> None:
    """A snapshot taken by one can be read by the next."""
    scope = Scope(ScopeLevel.SESSION, "a", "u", "s")
    assert _keys().key(scope) == _keys().key(scope)


@given(
    scopes,
    st.tuples(*(st.one_of(st.none(), st.sampled_from(names)) for names in (["a", "b"], ["a", "u"], ["a", "s"]))),
)
def test_a_purge_renews_exactly_the_keys_of_its_identity(
    scope: Scope, identity: tuple[str | None, str | None, str | None]
) -> None:
    """A renewed key never finds old rows; a key that needs no renewal keeps them."""
    keys = _keys()
    before = keys.key(scope)
    keys.bump(*identity)
    assert (keys.key(scope) != before) == scope.is_within(*identity)


def test_generations_never_repeat() -> None:
    keys = _keys()
    scope = Scope(ScopeLevel.SESSION, "a", "u", "s")
    seen = {keys.key(scope)}
    for identity in itertools.product(("a", None), ("u", None), ("s", None)):
        for _ in range(3):
            keys.bump(*identity)
            seen.add(keys.key(scope))
    assert len(seen) == 1 + 8 * 3


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.lists(st.integers(0, 2**32 - 1), max_size=6))
def test_block_keys_differ_where_tokens_do(one: list[int], other: list[int]) -> None:
    scope = ScopeKey(b"k" * 16)
    assert (block_key(scope, 1, one) == block_key(scope, 1, other)) == (one == other)


def test_block_keys_differ_by_scope_and_by_parent() -> None:
    """The same words behind another text, or of another tenant, are other blocks."""
    keys = {block_key(ScopeKey(scope * 16), parent, (1, 2)) for scope in (b"a", b"b") for parent in (0, 1, 2**63)}
    assert len(keys) == 6
