"""The batched path against the token-by-token oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefixkv.attention.torch_ref as torch_ref
from prefixkv.attention.base import AttentionMetadata
from prefixkv.attention.torch_ref import TorchBackend, oracle_attention
from prefixkv.cache.spec import KVCacheSpec, LayerSpec
from prefixkv.kv.formats import TORCH_DTYPES
from prefixkv.kv.storage import KVStorage
from prefixkv.model.batch import Chunk, ForwardBatch

CPU = torch.device("cpu")


def scene(
    spans: list[tuple[int, int]],
    *,
    block_size: int,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[KVStorage, AttentionMetadata, torch.Tensor]:
    """A pool with random rows in every block, also behind the sequences' ends, and a step of (start, length) spans."""
    needed = [-(-(start + length) // block_size) for start, length in spans]
    num_blocks = sum(needed) + 1
    spec = KVCacheSpec((LayerSpec(kv_heads, *dims),), dtype, "model", block_size)
    storage = KVStorage(spec, num_blocks, CPU)
    generator = torch.Generator().manual_seed(seed)
    total = num_blocks * block_size
    storage.write(
        0,
        torch.arange(total),
        torch.randn(total, kv_heads, dims[0], generator=generator).to(storage.dtype),
        torch.randn(total, kv_heads, dims[1], generator=generator).to(storage.dtype),
    )
    order = torch.randperm(num_blocks, generator=generator).tolist()
    chunks = []
    for (start, length), blocks in zip(spans, needed, strict=True):
        chunks.append(Chunk([0] * length, start, [order.pop() for _ in range(blocks)], False))
    batch = ForwardBatch.build(chunks, block_size=block_size, num_blocks=num_blocks, device=CPU)
    tokens = sum(length for _, length in spans)
    q = torch.randn(tokens, kv_heads * group, dims[0], generator=generator).to(storage.dtype)
    return storage, batch.attention, q


def both(
    storage: KVStorage,
    meta: AttentionMetadata,
    q: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.linspace(-1, 2, q.shape[1]) if sinks else None
    got = TorchBackend().forward(0, q, storage, meta, scaling=0.3, window=window, softcap=softcap, sinks=logits)
    want = oracle_attention(0, q, storage, meta, scaling=0.3, window=window, softcap=softcap, sinks=logits)
    return got, want


SPANS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    spans=SPANS,
    block_size=st.integers(1, 9),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (16, 16), (24, 16), (5, 7)]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 5),
)
def test_the_batched_path_equals_the_oracle(
    spans: list[tuple[int, int]],
    block_size: int,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    """Any mix of decodes and chunks, any grouping of heads, any block size, window, softcap and sinks."""
    storage, meta, q = scene(spans, block_size=block_size, group=group, kv_heads=kv_heads, dims=dims, seed=seed)
    got, want = both(storage, meta, q, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_pools_stay_close_to_the_oracle(dtype: str) -> None:
    """The result comes in the queries' dtype and differs by rounding only."""
    storage, meta, q = scene([(30, 1), (9, 6), (3, 1)], block_size=8, group=3, kv_heads=2, dims=(16, 16), dtype=dtype)
    for softcap in (None, 5.0):
        got, want = both(storage, meta, q, softcap=softcap)
        assert got.dtype == TORCH_DTYPES[dtype]
        torch.testing.assert_close(got.float(), want, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_long_chunks_are_tiled_without_a_seam(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    """Each tile gathers only the rows that its last query sees."""
    storage, meta, q = scene([(21, 60), (7, 1)], block_size=4, group=2, kv_heads=2, dims=(8, 8))
    whole, want = both(storage, meta, q, window=17, softcap=softcap)
    monkeypatch.setattr(torch_ref, "_TILE_SCORES", 1)
    tiled, _ = both(storage, replace(meta, scratch={}), q, window=17, softcap=softcap)
    torch.testing.assert_close(whole, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(tiled, want, atol=2e-5, rtol=1e-4)


def test_the_visible_length_belongs_to_the_token() -> None:
    """Tokens of one chunk may see fewer rows than their position says, as behind a patched span."""
    storage, meta, q = scene([(10, 4), (12, 1)], block_size=4, group=2, kv_heads=1, dims=(8, 8))
    visible = (3, 14, 5, 9, 2)
    meta = replace(meta, visible_host=visible, visible_tokens=torch.tensor(visible))
    got, want = both(storage, meta, q)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_rows_behind_the_end_do_not_count() -> None:
    """Whatever finite numbers lie in the rest of the last block, the result is the same bit for bit."""
    storage, meta, q = scene([(5, 1), (17, 1), (6, 3)], block_size=8, group=3, kv_heads=2, dims=(8, 8))
    before, _ = both(storage, meta, q)
    for table, length in zip(meta.block_tables_host, meta.kv_lens, strict=True):
        for row in range(length, len(table) * 8):
            slot = torch.tensor([table[row // 8] * 8 + row % 8])
            storage.write(0, slot, torch.full((1, 2, 8), 1e4), torch.full((1, 2, 8), 1e4))
    after, _ = both(storage, replace(meta, scratch={}), q)
    assert torch.equal(before, after)


def test_not_a_number_in_one_sequence_stays_there() -> None:
    """A request whose values overflow must not spoil the others of its batch, which may be another tenant's."""
    storage, meta, q = scene([(30, 1), (3, 1), (26, 1), (4, 5)], block_size=4, group=2, kv_heads=1, dims=(8, 8))
    clean, _ = both(storage, meta, q)
    bad = torch.tensor(meta.block_tables_host[0])[:, None] * 4 + torch.arange(4)
    nan = torch.full((bad.numel(), 1, 8), torch.nan)
    storage.write(0, bad.flatten(), nan, nan)
    for softcap in (None, 50.0):
        got, _ = both(storage, replace(meta, scratch={}), q, softcap=softcap)
        assert got[0].isnan().all()
        assert got[1:].isfinite().all()
    got, _ = both(storage, replace(meta, scratch={}), q)
    assert torch.equal(got[1:], clean[1:])


def test_layers_of_one_step_may_have_different_windows() -> None:
    """Masks are remembered between layers: a full layer must not get a sliding layer's mask."""
    storage, meta, q = scene([(20, 1), (9, 4)], block_size=4, group=2, kv_heads=1, dims=(8, 8))
    for window in (5, None, 5, 3, None):
        got, want = both(storage, meta, q, window=window)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
