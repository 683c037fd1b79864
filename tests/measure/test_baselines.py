"""The ways of others, against slow twins that look at tokens instead of hashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cache.index import common_prefix
from prefixkv.measure.baselines import BlockChain, WholeRequest

Prompts = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), min_size=1, max_size=14)), max_size=25)


def chain_hit(seen: list[list[int]], prompt: list[int], size: int) -> int:
    """The longest prefix of full blocks of any earlier prompt, its own full blocks alone, the last token left out."""
    hits = [common_prefix(other[: len(other) // size * size], prompt[:-1]) // size * size for other in seen]
    return max(hits, default=0)


@given(Prompts, st.integers(1, 5))
def test_block_chains_hit_what_comparing_every_pair_of_prompts_finds(
    prompts: list[tuple[str, list[int]]], size: int
) -> None:
    everybody, own = BlockChain(size), BlockChain(size)
    for i, (tenant, prompt) in enumerate(prompts):
        before = prompts[:i]
        assert everybody.ask(prompt) == chain_hit([other for _, other in before], prompt, size)
        assert own.ask(prompt, tenant) == chain_hit([other for name, other in before if name == tenant], prompt, size)


@given(Prompts)
def test_a_whole_request_hits_only_if_the_same_one_was_sent(prompts: list[tuple[str, list[int]]]) -> None:
    cache = WholeRequest()
    for i, (_, prompt) in enumerate(prompts):
        is_known = prompt in [other for _, other in prompts[:i]]
        assert cache.ask(prompt) == (len(prompt) if is_known else 0)


@given(Prompts, st.integers(1, 4), st.integers(0, 30))
def test_a_smaller_room_never_hits_more(prompts: list[tuple[str, list[int]]], size: int, room_tokens: int) -> None:
    """LRU is a stack algorithm: what a small one holds, a larger one holds too."""
    chains = [BlockChain(size, room) for room in (room_tokens, room_tokens + 8, None)]
    wholes = [WholeRequest(room) for room in (room_tokens, None)]
    for _, prompt in prompts:
        small, large, endless = (chain.ask(prompt) for chain in chains)
        assert small <= large <= endless
        assert wholes[0].ask(prompt) <= wholes[1].ask(prompt)


def test_a_full_room_forgets_the_prompt_used_longest_ago_and_its_tail_first() -> None:
    cache = BlockChain(2, 8)
    assert cache.ask([1, 1, 1, 1, 9]) == 0
    assert cache.ask([2, 2, 2, 2, 2, 2, 9]) == 0  # five blocks in a room of four: the tail of the first one goes
    assert cache.ask([1, 1, 1, 1, 9]) == 2
    whole = WholeRequest(5)
    assert [whole.ask(prompt) for prompt in ([1, 2], [3, 4], [1, 2], [5, 6], [1, 2], [3, 4])] == [0, 0, 2, 0, 2, 0]


def test_the_last_token_is_always_computed() -> None:
    cache = BlockChain(4)
    cache.ask([1] * 8)
    assert cache.ask([1] * 8) == 4
    assert cache.ask([1] * 9) == 8
