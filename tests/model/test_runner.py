"""Through the pool, in chunks, among strangers: the tokens that ``model.generate`` gives."""

from __future__ import annotations

import pytest
import torch

from prefixkv.config import CacheConfig
from prefixkv.errors import ConfigError, IntegrityError
from prefixkv.model.batch import Chunk
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import SERVED, byte_tokenizer, demo_loaded, pooled_greedy, random_ids, stock_greedy, tiny_model

PROMPT = random_ids(41, 5)


def make(arch: str = "llama", block_size: int = 8, memory: str = "2MiB", dtype: str = "float32") -> ModelRunner:
    model = tiny_model(arch).to(getattr(torch, dtype))
    return ModelRunner.build(
        wrap(model, byte_tokenizer()), CacheConfig(kv_format="model", memory=memory, block_size=block_size)
    )


@pytest.mark.parametrize("arch", sorted(SERVED))
def test_greedy_tokens_equal_generate(arch: str) -> None:
    """Chunks of three sizes, blocks scattered, alone and packed behind a stranger."""
    model = tiny_model(arch)
    want = stock_greedy(model, PROMPT, 16)
    assert len(set(want)) > 4  # else the comparison would say little
    runner = ModelRunner.build(
        wrap(model, byte_tokenizer()), CacheConfig(kv_format="model", memory="2MiB", block_size=8)
    )
    table, other = [17, 3, 11, 0, 8, 14, 2, 5], [1, 4, 6, 7, 9, 10]
    assert pooled_greedy(runner, PROMPT, 16, chunk=64, table=table) == want
    for chunk in (1, 7, 16):
        stranger = (random_ids(40, 9), other)
        assert pooled_greedy(runner, PROMPT, 16, chunk=chunk, table=table, stranger=stranger) == want


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_the_block_size_changes_nothing(block_size: int) -> None:
    """Prompts end inside, at and across block borders."""
    runner = make("mistral", block_size)
    want = stock_greedy(runner._model, PROMPT, 12)
    table = list(range(-(-60 // block_size)))[::-1]
    assert pooled_greedy(runner, PROMPT, 12, chunk=16, table=table) == want


def test_a_prefix_that_another_sequence_wrote_is_as_good_as_its_own() -> None:
    """Two sequences read the same blocks: this is what a hit is."""
    runner = make()
    shared, tails = PROMPT[:16], [random_ids(9, 1), random_ids(5, 2)]
    runner.execute([Chunk(shared, 0, [6, 7], False)])
    hits = runner.execute([Chunk(tail, 16, [6, 7, 10 + i, 12 + i], True) for i, tail in enumerate(tails)])
    for i, tail in enumerate(tails):
        cold = runner.execute([Chunk(shared + tail, 0, [20, 21, 22, 23], True)])
        torch.testing.assert_close(hits[i], cold[0], atol=1e-4, rtol=1e-4)


def test_copied_rows_continue_exactly() -> None:
    """A block is copied up to the point of divergence and the sequence goes on in the copy."""
    runner = make()
    runner.execute([Chunk(PROMPT[:20], 0, [0, 1, 2], False)])
    runner.storage.copy_rows(2, 9, 3)
    want = runner.execute([Chunk([*PROMPT[:19], 7, 8], 0, [4, 5, 6], True)])
    got = runner.execute([Chunk([7, 8], 19, [0, 1, 9], True)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_logits_come_in_order_and_only_where_wanted() -> None:
    """[R, V] float32, one row per chunk that needs it."""
    runner = make()
    chunks = [Chunk(random_ids(n, n), 0, [i], i != 1) for i, n in enumerate((3, 5, 1, 8))]
    got = runner.execute(chunks)
    assert got.shape == (3, 320)
    assert got.dtype == torch.float32
    for row, chunk in zip(got, [chunks[0], chunks[2], chunks[3]], strict=True):
        alone = runner.execute([Chunk(chunk.token_ids, 0, [9], True)])
        torch.testing.assert_close(row, alone[0], atol=1e-4, rtol=1e-4)
    assert runner.execute([Chunk([1, 2], 0, [0], False)]).shape == (0, 320)


def test_the_pool_is_untouched_after_building() -> None:
    """The self-test works in a pool of its own."""
    runner = make()
    assert runner.storage.is_zero(range(runner.num_blocks))
    assert runner.storage.nbytes == runner.num_blocks * runner.spec.bytes_per_block <= 2 * 2**20
    better = ("numba",)  # than torch; refused where the extra is not installed
    assert (runner.backend, *runner.refusals) in (better, ("torch", *better))
    assert runner.self_test_error < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "gemma2", "gpt_oss"])
def test_sixteen_bit_models_pass_their_self_test(arch: str, dtype: str) -> None:
    """The tolerance allows rounding, also where it changes which expert a token goes to."""
    runner = make(arch, dtype=dtype)
    assert runner.spec.dtype == dtype
    assert runner.execute([Chunk(PROMPT, 0, [0, 1, 2, 3, 4, 5], True)]).isfinite().all()


def test_too_little_memory_is_refused_and_the_model_released() -> None:
    """Before anything is allocated."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="one block of 8 tokens takes"):
        ModelRunner.build(wrap(model, byte_tokenizer()), CacheConfig(memory=100, block_size=8))
    assert model.config._attn_implementation == "sdpa"


def test_more_memory_than_there_is_is_refused_and_the_model_released() -> None:
    """A slip of a unit is the usual cause: the message names the option and the size."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"CacheConfig\.memory: cpu does not give \d+\.\d GiB"):
        ModelRunner.build(wrap(model, byte_tokenizer()), CacheConfig(memory="100000TiB", block_size=8))
    assert model.config._attn_implementation == "sdpa"


def test_a_wrong_block_table_raises_before_anything_is_written() -> None:
    """The scheduler's mistake must not become somebody's wrong answer."""
    runner = make()
    with pytest.raises(IntegrityError):
        runner.execute([Chunk([1], 0, [0], True), Chunk([1] * 9, 0, [1], True)])
    assert runner.storage.is_zero(range(runner.num_blocks))


@pytest.mark.timeout(300)
def test_the_demo_model_gives_stock_tokens() -> None:
    """A real model with a real template, fp32: 12 tokens cold, in two chunkings."""
    loaded = demo_loaded("float32")
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours of autumn leaves."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    want = stock_greedy(loaded.model, ids, 12)
    runner = ModelRunner.build(loaded, CacheConfig(kv_format="model", memory="64MiB", block_size=32))
    table = [5, 1, 7, 3]
    assert pooled_greedy(runner, ids, 12, chunk=512, table=table) == want
    assert pooled_greedy(runner, ids, 12, chunk=13, table=table, stranger=(PROMPT, [0, 2])) == want
    runner.close()
