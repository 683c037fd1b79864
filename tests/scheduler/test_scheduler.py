"""What one step holds: budgets, chunks, admission; and how a sequence ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.scheduler.request import Sequence, SequenceStatus
from tests.cache.fakes import scopes_of, text
from tests.scheduler.loop import Loop, cold_reply


def test_a_reply_is_what_it_would_be_alone() -> None:
    loop = Loop(max_prefill_tokens=7)
    seqs = [loop.submit("ab"[n % 2], text(n + 1, seed=n), max_new=9) for n in range(8)]
    loop.run()
    for n, seq in enumerate(seqs):
        assert loop.reply(seq) == cold_reply(text(n + 1, seed=n), 9)
    loop.check()


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 6),
    max_prefill_tokens=st.integers(1, 40),
    max_new_seqs_per_step=st.integers(1, 4),
)
def test_no_step_exceeds_a_budget(lengths: list[int], **config: int) -> None:
    loop = Loop(num_blocks=512, **config)
    for n, length in enumerate(lengths):
        loop.submit("a", text(length, seed=n), max_new=4)
    while loop.scheduler.has_work:
        before = set(loop.scheduler.running)
        prompts = {seq: seq.num_pending_tokens for seq in before}
        chunks = loop.step()
        assert chunks
        assert len({chunk.seq for chunk in chunks}) == len(chunks) <= config["max_num_seqs"]
        new = [chunk.seq for chunk in chunks if chunk.seq not in before]
        assert len(new) <= config["max_new_seqs_per_step"]
        prefill = sum(chunk.num_tokens for chunk in chunks if chunk.seq in new or prompts[chunk.seq] > 1)
        assert prefill <= config["max_prefill_tokens"]
        loop.check()


def test_every_running_sequence_decodes_in_every_step() -> None:
    """A long prompt is cut in chunks so that replies that are being read do not stop."""
    loop = Loop(num_blocks=128, max_prefill_tokens=8)
    talking = [loop.submit("a", text(4, seed=n), max_new=40) for n in range(3)]
    while any(seq.num_generated_tokens == 0 for seq in talking):
        loop.step()
    long = loop.submit("b", text(80, seed=9))
    while long in loop.live:
        chunks = {chunk.seq: chunk.num_tokens for chunk in loop.step()}
        assert [chunks[seq] for seq in talking] == [1, 1, 1]
        assert chunks[long] == 8


def test_a_full_decode_batch_does_not_take_the_prefill_budget() -> None:
    loop = Loop(num_blocks=256, max_prefill_tokens=4, max_new_seqs_per_step=8)
    for n in range(20):
        loop.submit("a", text(1, seed=n), max_new=50)
    for _ in range(6):
        loop.step()
    assert len(loop.scheduler.running) == 20
    loop.submit("a", text(9, seed=99))
    assert sorted(chunk.num_tokens for chunk in loop.step())[-2:] == [1, 4]


def test_a_prompt_of_any_length_is_computed_in_whole_chunks() -> None:
    loop = Loop(max_prefill_tokens=8)
    loop.submit("a", text(21))
    assert [[chunk.num_tokens for chunk in loop.step()] for _ in range(3)] == [[8], [8], [5]]
    assert not loop.live


def test_the_oldest_prompt_is_finished_before_the_next_one_gets_more() -> None:
    """Two half-computed prompts would both be late."""
    loop = Loop(max_prefill_tokens=8)
    first, second = loop.submit("a", text(20)), loop.submit("a", text(20, seed=1))
    steps = [[(chunk.seq, chunk.num_tokens) for chunk in loop.step()] for _ in range(3)]
    assert steps == [[(first, 8)], [(first, 8)], [(first, 4), (second, 4)]]


def test_cached_tokens_are_counted_once_at_the_first_admission() -> None:
    loop = Loop()
    first = loop.submit("a", text(10))
    loop.run()
    again = loop.submit("a", text(10))
    loop.run()
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 9)
    assert loop.computed_tokens == 11


def test_a_publication_ends_with_its_prompt() -> None:
    loop = Loop(max_prefill_tokens=4)
    seq = loop.publish(text(10))
    assert loop.run() == 3
    assert seq.token_ids == text(10)
    assert loop.submit("b", text(12)).num_cached_tokens is None
    loop.step()
    assert loop.sequences[-1].num_cached_tokens == 10


def _advance_to(loop: Loop, seq: Sequence, state: str) -> None:
    match state:
        case "waiting":
            pass
        case "prefilling":
            loop.step()
            assert seq.is_prefilling and seq.num_computed_tokens
        case "decoding":
            while not seq.num_generated_tokens:
                loop.step()
        case "preempted":
            _advance_to(loop, seq, "decoding")
            loop.scheduler.preempt(seq)
            loop.pool.carry_out()
            assert seq.status is SequenceStatus.WAITING
        case "finished":
            loop.run()
        case "scheduled":
            loop.schedule()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("state", ["waiting", "scheduled", "prefilling", "decoding", "preempted", "finished"])
def test_a_sequence_can_end_at_any_moment_and_owns_nothing_after(state: str, keep: bool) -> None:
    loop = Loop(max_prefill_tokens=4)
    seq = loop.submit("a", text(10), max_new=6)
    _advance_to(loop, seq, state)
    for _ in range(2):
        loop.scheduler.finish(seq, keep=keep)
        loop.pool.carry_out()
        assert seq.status is SequenceStatus.FINISHED
        assert not loop.scheduler.has_work
        assert loop.manager.sequences == {}
        loop.check()
    idle, free = len(loop.manager.idle), loop.manager.pool.num_free
    assert idle + free == loop.manager.pool.num_blocks


@pytest.mark.parametrize(("keep", "cached"), [(True, 6), (False, 4)])
def test_what_a_cancelled_sequence_computed_is_reused(keep: bool, cached: int) -> None:
    """To the token. Of one that failed, only the blocks that were full before: others may use them by now."""
    loop = Loop(max_prefill_tokens=6)
    seq = loop.submit("a", text(20))
    loop.step()
    loop.scheduler.finish(seq, keep=keep)
    again = loop.submit("a", text(20))
    loop.step()
    assert again.num_cached_tokens == cached


def test_a_prompt_is_reusable_to_the_token_as_soon_as_it_is_computed() -> None:
    """Its reply goes on in the same block meanwhile."""
    loop = Loop()
    first = loop.submit("a", text(10), max_new=20)
    loop.step()
    second = loop.submit("a", text(10), max_new=20)
    loop.step()
    assert first in loop.live
    assert second.num_cached_tokens == 9


def test_a_sequence_knows_where_it_stands() -> None:
    seq = Sequence(1, [1, 2, 3], 3, scopes_of("a"), 8)
    assert (seq.tenant, seq.is_prefilling, seq.num_pending_tokens, seq.num_generated_tokens) == ("a", True, 3, 0)
    seq.num_computed_tokens = 3
    seq.token_ids.append(4)
    assert (seq.is_prefilling, seq.num_pending_tokens, seq.num_generated_tokens) == (False, 1, 1)
