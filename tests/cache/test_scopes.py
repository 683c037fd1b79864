"""The meet rule: nothing is shared further than anything before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.scopes import ScopeMap
from prefixkv.scope import Principal, Scope, ScopeLevel
from tests.cache.fakes import PUBLIC, REQUEST, SESSION, TENANT, USER

WHO = Principal("a", "u", "s")
levels = st.sampled_from(list(ScopeLevel))
spans = st.lists(st.tuples(st.integers(0, 12), levels), max_size=6).map(lambda items: sorted([(0, TENANT), *items]))


def _levels(scopes: ScopeMap, count: int) -> list[ScopeLevel]:
    return [scopes.scope_at(position).level for position in range(count)]


@given(spans)
def test_a_token_has_the_narrowest_scope_of_anything_before_it(spans: list[tuple[int, ScopeLevel]]) -> None:
    scopes = ScopeMap.for_principal(WHO, spans)
    for position in range(16):
        expected = max(TENANT, *(level for start, level in spans if start <= position))
        assert scopes.scope_at(position) == Scope.of(WHO, expected)


def test_a_wide_segment_behind_a_narrow_one_stays_narrow() -> None:
    """A tool schema behind a user's name was computed from that name."""
    scopes = ScopeMap.for_principal(WHO, [(0, TENANT), (2, SESSION), (4, TENANT)])
    assert _levels(scopes, 6) == [TENANT, TENANT, SESSION, SESSION, SESSION, SESSION]


def test_a_request_never_writes_public_text() -> None:
    scopes = ScopeMap.for_principal(WHO, [(0, PUBLIC), (3, SESSION)])
    assert _levels(scopes, 4) == [TENANT, TENANT, TENANT, SESSION]


def test_what_is_generated_has_the_scope_of_the_last_segment() -> None:
    scopes = ScopeMap.for_principal(WHO, [(0, TENANT), (3, SESSION)])
    assert scopes.scope_at(10**6).level is SESSION


def test_empty_segments_do_no_harm() -> None:
    """Of segments that start at the same token, the narrowest wins."""
    scopes = ScopeMap.for_principal(WHO, [(0, TENANT), (0, USER), (3, USER), (3, SESSION), (3, USER)])
    assert _levels(scopes, 4) == [USER, USER, USER, SESSION]


def test_a_reader_reaches_its_own_places_and_no_request_scope() -> None:
    scopes = ScopeMap.for_principal(WHO, [(0, REQUEST)])
    assert scopes.reach == (
        Scope(PUBLIC),
        Scope(TENANT, "a"),
        Scope(USER, "a", "u"),
        Scope(SESSION, "a", "u", "s"),
    )


def test_a_publication_reads_nothing_narrower_than_what_it_writes() -> None:
    """Otherwise public text could rest on a tenant's blocks and vanish when that tenant is purged."""
    assert ScopeMap.for_publication(None).reach == (Scope(PUBLIC),)
    assert ScopeMap.for_publication("a").reach == (Scope(PUBLIC), Scope(TENANT, "a"))
    assert ScopeMap.for_publication(None).tenant is None
    assert ScopeMap.for_publication("a").tenant == "a"


def test_changes_are_those_strictly_inside() -> None:
    scopes = ScopeMap.for_principal(WHO, [(0, TENANT), (4, USER), (6, SESSION)])
    assert scopes.changes_within(0, 4) == []
    assert scopes.changes_within(0, 8) == [4, 6]
    assert scopes.changes_within(4, 7) == [6]
