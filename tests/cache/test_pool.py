"""Block ids and their references."""

from __future__ import annotations

import pytest

from prefixkv.cache.pool import BlockPool
from prefixkv.errors import IntegrityError


def test_every_block_is_handed_out_once_and_then_none_is_left() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate("a") or 0 for _ in range(5)) == [0, 1, 2, 3, 4]
    assert pool.allocate("a") is None
    pool.check()


def test_a_block_comes_back_only_after_its_last_reference() -> None:
    pool = BlockPool(1)
    block = pool.allocate("a")
    assert block is not None
    assert pool.acquire(block) is False, "it was in use already"
    assert pool.drop(block) is False
    assert pool.drop(block) is True
    assert not pool.is_free(block), "an unreferenced block may still be kept for reuse"
    assert pool.acquire(block) is True, "it was idle"
    pool.drop(block)
    pool.release(block)
    assert pool.is_free(block)
    assert pool.allocate("b") == block


def test_shares_follow_the_owner_and_add_up() -> None:
    pool = BlockPool(4)
    mine = [pool.allocate("a"), pool.allocate("a")]
    theirs, public = pool.allocate("b"), pool.allocate(None)
    assert pool.owned_blocks == {"a": 2, "b": 1, None: 1}
    for block in (*mine, theirs, public):
        assert block is not None
        pool.drop(block)
        pool.release(block)
    assert pool.owned_blocks == {}, "a tenant that owns nothing is forgotten"
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda pool, block: (pool.drop(block), pool.drop(block)), id="dropped twice"),
        pytest.param(lambda pool, block: pool.release(block), id="released while in use"),
        pytest.param(
            lambda pool, block: (pool.drop(block), pool.release(block), pool.release(block)), id="freed twice"
        ),
        pytest.param(
            lambda pool, block: (pool.drop(block), pool.release(block), pool.acquire(block)), id="used after free"
        ),
        pytest.param(lambda pool, block: pool.acquire(1 - block), id="used without allocation"),
    ],
)
def test_misuse_is_an_integrity_error(misuse) -> None:  # type: ignore[no-untyped-def]
    """Such a bug must be loud: silently it would hand one tenant's rows to another."""
    pool = BlockPool(2)
    block = pool.allocate("a")
    with pytest.raises(IntegrityError):
        misuse(pool, block)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda pool: pool._free.append(pool._free[0]), id="free list holds a block twice"),
        pytest.param(lambda pool: pool._free.pop(), id="free list lost a block"),
        pytest.param(lambda pool: pool._owners.clear(), id="owners lost"),
        pytest.param(lambda pool: pool.owned_blocks.update(a=2), id="share counted wrong"),
        pytest.param(lambda pool: pool._references.__setitem__(pool._free[0], 1), id="free block with a reference"),
    ],
)
def test_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(4)
    pool.allocate("a")
    pool.check()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check()
