"""What is gone: told to those whose it was, and to nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.ghosts import Ghosts
from prefixkv.cache.index import Node
from prefixkv.cache.keys import ScopeKey, ScopeKeys, block_key
from prefixkv.cache.retire import purge
from prefixkv.cache.scopes import ScopeMap
from prefixkv.cache.table import PrefixMatch
from prefixkv.scope import Scope, ScopeLevel
from tests.cache.fakes import CHAT, SESSION, TENANT, Pool, scopes_of, text


def why(pool: Pool, token_ids: Sequence[int], scopes: ScopeMap) -> str | None:
    return pool.manager.why_missing(token_ids, scopes, pool.manager.match(token_ids, scopes))


def fill(pool: Pool, tenant: str = "filler") -> None:
    """Let another tenant take all of the pool, and give it back."""
    size = pool.manager.pool.num_blocks * pool.manager.block_size
    scopes = scopes_of(tenant)
    pool.close(pool.start(text(size, seed=7), scopes), (), 0, keep=False)


# -- evicted -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 7, 12])
def test_evicted_blocks_are_reported_to_their_own_scope_and_to_nobody_else(length: int) -> None:
    """A tail that was not full is one too."""
    pool = Pool(num_blocks=8)
    mine, others = scopes_of("a"), [scopes_of("b"), scopes_of("a", "v"), scopes_of("a", "u", "t")]
    prompt = [*text(length), 99]
    assert [why(pool, prompt, scopes) for scopes in (mine, *others)] == [None] * 4
    pool.remember(text(length), mine)
    fill(pool)
    assert pool.num_cached(prompt, mine) == 0
    assert [why(pool, prompt, scopes) for scopes in (mine, *others)] == ["evicted", None, None, None]
    pool.check()


def test_others_of_the_tenant_hear_of_what_the_tenant_shares_and_not_of_the_conversation() -> None:
    pool = Pool(num_blocks=8)
    pool.remember(text(12), scopes_of("a", spans=CHAT))
    fill(pool)
    other = scopes_of("a", "v", spans=CHAT)
    assert why(pool, text(12), other) == "evicted"
    pool.remember(text(6), scopes_of("a", "w", spans=CHAT))
    assert pool.num_cached(text(12), other) == 6
    assert why(pool, text(12), other) is None


def test_where_only_the_tail_was_evicted_the_match_ends_there_and_says_so() -> None:
    pool = Pool(num_blocks=6)
    scopes = scopes_of("a")
    pool.remember(text(12), scopes)
    pool.close(pool.start(text(16, seed=7), scopes_of("b")), (), 0, keep=False)
    assert pool.num_cached(text(13), scopes) == 8
    assert why(pool, text(13), scopes) == "evicted"


def test_what_was_stored_again_is_not_missing() -> None:
    pool = Pool(num_blocks=8)
    pool.remember(text(12), scopes_of("a"))
    fill(pool)
    pool.remember(text(12), scopes_of("a"))
    assert pool.num_cached([*text(12), 99], scopes_of("a")) == 12
    assert why(pool, [*text(12), 99], scopes_of("a")) is None


def test_a_prompt_that_goes_on_differently_is_not_said_to_be_evicted() -> None:
    """Its first block is there; what differs was never stored."""
    pool = Pool(num_blocks=6)
    scopes = scopes_of("a")
    pool.remember(text(12), scopes)
    fill(pool)
    other = [*text(2), 50, 51, 52]
    assert why(pool, other, scopes) is None
    pool.remember(text(4), scopes)
    assert pool.num_cached(other, scopes) == 2
    assert why(pool, other, scopes) is None


def test_a_shorter_tail_that_was_evicted_is_no_reason_where_a_longer_one_is_stored_again() -> None:
    """What was evicted holds nothing more than what matched."""
    pool = Pool(num_blocks=8)
    scopes = scopes_of("a")
    pool.remember(text(2), scopes)
    fill(pool)
    pool.remember(text(3), scopes)
    prompt = [*text(4), 99]
    assert pool.num_cached(prompt, scopes) == 3
    assert why(pool, prompt, scopes) is None


def test_nothing_is_missing_where_all_but_the_last_token_is_there() -> None:
    pool = Pool(num_blocks=8)
    pool.remember(text(12), scopes_of("a"))
    fill(pool)
    pool.remember(text(11), scopes_of("a"))
    assert pool.num_cached(text(12), scopes_of("a")) == 11
    assert why(pool, text(12), scopes_of("a")) is None


# -- purged ------------------------------------------------------------------------------------------------------------


def test_a_purged_scope_is_told_so_until_it_stores_again() -> None:
    pool = Pool()
    scopes = scopes_of("a")
    pool.remember(text(12), scopes)
    purge(pool.manager, "a", "u", "s")
    pool.carry_out()
    assert why(pool, text(12), scopes) == "purged"
    assert why(pool, text(12, seed=3), scopes) == "purged", "not even keys are kept of what it was"
    pool.remember(text(5, seed=3), scopes)
    assert why(pool, text(12), scopes) is None


@pytest.mark.parametrize("purged", [(None, None, None), ("a", None, None), ("a", "u", None), (None, None, "s")])
def test_others_hear_nothing_of_a_purge(purged: tuple[str | None, str | None, str | None]) -> None:
    pool = Pool()
    pool.remember(text(12), scopes_of("a"))
    pool.remember(text(12), scopes_of("b", "v", "t"))
    purge(pool.manager, *purged)
    pool.carry_out()
    assert why(pool, text(12), scopes_of("a")) == "purged"
    for stranger in (scopes_of("c"), scopes_of("a", "u", "t"), scopes_of("a", "v", "s")):
        assert why(pool, text(12), stranger) is None
    assert why(pool, text(12), scopes_of("b", "v", "t")) == ("purged" if purged == (None, None, None) else None)


def test_a_scope_that_stored_nothing_has_nothing_purged() -> None:
    pool = Pool()
    purge(pool.manager, "a", None, None)
    assert why(pool, text(12), scopes_of("a")) is None


def test_what_was_evicted_before_a_purge_is_forgotten_with_it() -> None:
    pool = Pool(num_blocks=8)
    scopes = scopes_of("a")
    pool.remember(text(12), scopes)
    fill(pool)
    purge(pool.manager, "a", None, None)
    pool.carry_out()
    assert why(pool, text(12), scopes) is None


def test_the_tenants_shared_text_is_not_purged_with_one_conversation() -> None:
    pool = Pool()
    scopes = scopes_of("a", spans=CHAT)
    pool.remember(text(12), scopes)
    purge(pool.manager, "a", "u", "s")
    pool.carry_out()
    assert pool.num_cached(text(12), scopes) == 6
    assert why(pool, text(12), scopes) == "purged"
    assert why(pool, text(12), scopes_of("a", "v", spans=CHAT)) is None


# -- bounds and isolation ----------------------------------------------------------------------------------------------

KEYS = ScopeKeys(b"a secret of a test", b"a model")
KEY = KEYS.key(Scope(ScopeLevel.TENANT, "a"))
ROOT = Node(0, -1, -1, (), None, ScopeKey(b""), block_key(ScopeKey(b""), 0, ()), None)
NOTHING = PrefixMatch((), None, 0, 0, False)


def ghost(tokens: tuple[int, ...]) -> Node:
    return Node(1, 0, 0, tokens, Scope(ScopeLevel.TENANT, "a"), KEY, block_key(KEY, 0, tokens), ROOT)


def test_only_the_latest_are_remembered() -> None:
    """A block that was evicted again is a late one."""
    ghosts = Ghosts(2, 4)
    for tokens in ((1,), (2,), (1,), (3,)):
        ghosts.evicted(ghost(tokens))
    told = [ghosts.why(NOTHING, (token, 8, 9), KEY, [KEY], ROOT) for token in (1, 2, 3)]
    assert told == ["evicted", None, "evicted"]


def test_scopes_that_were_purged_are_bounded_too() -> None:
    ghosts = Ghosts(2, 4)
    keys = [KEYS.key(Scope(ScopeLevel.SESSION, "a", "u", str(i))) for i in range(5000)]
    for key in keys:
        ghosts.purged(key)
    told = [ghosts.why(NOTHING, (1, 2, 3), key, [key], ROOT) for key in (keys[0], keys[-1])]
    assert told == [None, "purged"]


def test_others_cannot_make_a_partition_forget() -> None:
    """Of the shared part only so much is remembered; a partition has a memory of its own."""
    partitions = {"a": 4}
    pool = Pool(num_blocks=12, floors=lambda: partitions, partitions=lambda: partitions, ceiling=partitions.get)
    pool.remember(text(12), scopes_of("a"))
    pool.remember(text(12), scopes_of("b"))
    pool.remember(text(16, 100), scopes_of("a"))
    for seed in range(200, 220):
        pool.remember(text(32, seed), scopes_of("c"))
    assert why(pool, [*text(12), 99], scopes_of("a")) == "evicted"
    assert why(pool, [*text(12), 99], scopes_of("b")) is None, "the shared part forgot it"
    pool.check()


TENANTS = ("a", "b")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("send", "fill", "purge")),
        st.sampled_from(TENANTS),
        st.integers(0, 2),
        st.integers(1, 14),
    ),
    max_size=12,
)


@given(steps=STEPS, seed=st.integers(0, 2), length=st.integers(2, 14))
def test_what_a_tenant_is_told_does_not_depend_on_what_others_sent(
    steps: list[tuple[str, str, int, int]], seed: int, length: int
) -> None:
    """A pool in which only tenant b's prompts differ tells tenant a the same."""
    told = []
    for shift in (0, 5):
        pool = Pool(num_blocks=8)
        for action, tenant, which, size in steps:
            scopes = scopes_of(tenant, spans=((0, TENANT), (5, SESSION)))
            if action == "send":
                pool.remember(text(size, seed=which + (shift if tenant == "b" else 0)), scopes)
            elif action == "fill":
                fill(pool)
            else:
                purge(pool.manager, tenant, None, None)
                pool.carry_out()
        prompt = text(length, seed=seed)
        scopes = scopes_of("a", spans=((0, TENANT), (5, SESSION)))
        told.append((why(pool, prompt, scopes), pool.num_cached(prompt, scopes)))
    assert told[0] == told[1]
