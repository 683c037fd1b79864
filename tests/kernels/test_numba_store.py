"""Rows written by the kernel are, bit for bit, what the codecs in torch write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec
from prefixkv.kv.formats import TORCH_DTYPES
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.writer import NumbaWriter, TorchWriter, choose_writer

pytest.importorskip("numba", reason="the extra `cpu` is not installed")


def bits(storage: KVStorage) -> list[torch.Tensor]:
    """All tensors as raw bytes, so that NaN equals itself and a wrong sign of zero is seen."""
    return [part.view(torch.uint8) for layer in storage.layers for part in (*layer.key, *layer.value)]


@settings(max_examples=80)
@given(
    kv_format=st.sampled_from(sorted(KV_LAYOUTS)),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(32, 32), (64, 64), (80, 96), (24, 40), (256, 16)]),
    block_size=st.sampled_from([1, 7, 32]),
    tokens=st.integers(1, 40),
    spread=st.sampled_from([0.0, 3.0, 12.0]),
    seed=st.integers(0, 1000),
)
def test_the_kernel_writes_what_the_codec_writes(
    kv_format: str,
    dtype: str,
    kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    tokens: int,
    spread: float,
    seed: int,
) -> None:
    """Bit for bit where no row is turned or fitted; there sums round in another order, and a code may be one off."""
    spec = KVCacheSpec((LayerSpec(kv_heads, *dims),), dtype, kv_format, block_size)
    ours, oracle = (KVStorage(spec, 41, "cpu") for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(41 * block_size, generator=generator)[:tokens]
    size = torch.randn(tokens, kv_heads, 1, generator=generator).mul(spread).exp()
    k, v = (
        (torch.randn(tokens, kv_heads, dim, generator=generator) * size).clamp(-2e3, 2e3).to(ours.dtype) for dim in dims
    )
    k[0], v[-1] = 0, 1.5
    NumbaWriter(ours).write(0, slots, k, v)
    TorchWriter(oracle).write(0, slots, k, v)
    written = torch.zeros(41 * block_size, dtype=torch.bool)
    written[slots] = True
    table = torch.arange(41)[None]
    layouts = KV_LAYOUTS[kv_format]
    for part, layout in enumerate(layouts):
        stored = [(storage.layers[0].key, storage.layers[0].value)[part] for storage in (ours, oracle)]
        assert not any(t.transpose(1, 2).flatten(0, 1)[~written].any() for t in stored[0])
        if layout.bits != 4 and not layout.rotate:
            assert all(torch.equal(got, want) for got, want in zip(*stored, strict=True))
            continue
        got, want = (storage.gather(0, table)[part].double() for storage in (ours, oracle))
        size = want.abs().amax(-1, keepdim=True) + 1e-30
        off = (got - want).abs() / size
        assert off.max() <= (0.05 if layout.bits == 8 else 0.4)
        assert (off > 0.005).double().mean() < 0.02


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize(("kv_format", "dim"), [("int4", 64), ("k4v8", 40), ("int4", 24)])
def test_offsets_are_subtracted_as_the_torch_writer_does(kv_format: str, dim: int, dtype: str) -> None:
    """Each head its own; values and rows nobody wrote are left alone."""
    spec = KVCacheSpec((LayerSpec(3, dim, 32),), dtype, kv_format, 7)
    generator = torch.Generator().manual_seed(0)
    away = torch.randn(3, dim, generator=generator) * 20
    ours, oracle = (KVStorage(spec, 8, "cpu", [away]) for _ in range(2))
    slots = torch.randperm(56, generator=generator)[:40]
    k = (torch.randn(40, 3, dim, generator=generator) + away).to(ours.dtype)
    v = torch.randn(40, 3, 32, generator=generator).to(ours.dtype)
    NumbaWriter(ours).write(0, slots, k, v)
    TorchWriter(oracle).write(0, slots, k, v)
    if kv_format == "k4v8":
        assert all(map(torch.equal, ours.layers[0].value, oracle.layers[0].value))
    got, want = (storage.gather(0, torch.arange(8)[None])[0][0].float() for storage in (ours, oracle))
    off = (got - want).abs()
    assert off.max() <= 0.6 and (off > 0.03).double().mean() < 0.02
    exact = (k.float() - away).transpose(0, 1)
    assert (got[:, slots] - exact).abs().mean() < 0.15 < exact.abs().mean()


@pytest.mark.parametrize("value", [65504.0, 65519.9, 65520.0, 1e30, 6e-8, 3e-8, 2.9e-8, 6.1e-5, 1.0004883, 1.0014648])
def test_scales_round_to_float16_as_torch_rounds(value: float) -> None:
    """Ties, subnormal numbers and the end of the range."""
    from prefixkv.kernels.numba_halves import half_bits

    for number in (value, -value):
        want = int(torch.tensor(number).half().view(torch.int16))
        assert np.int16(np.uint16(int(half_bits(np.float32(number))) & 0xFFFF).view(np.int16)) == want


def test_rows_may_come_in_any_layout() -> None:
    """Attention hands over views of a fused projection, and of [1, K, T, D]."""
    spec = KVCacheSpec((LayerSpec(2, 32, 32),), "float32", "int8", 4)
    ours, oracle = (KVStorage(spec, 4, "cpu") for _ in range(2))
    fused = torch.randn(5, 4 * 32, generator=torch.Generator().manual_seed(0))
    k, v = fused[:, :64].view(5, 2, 32), fused[:, 64:].view(5, 2, 32).transpose(0, 1).contiguous().transpose(0, 1)
    slots = torch.tensor([3, 9, 0, 15, 8])
    NumbaWriter(ours).write(0, slots, k, v)
    TorchWriter(oracle).write(0, slots, k, v)
    table = torch.arange(4)[None]
    for got, want in zip(ours.gather(0, table), oracle.gather(0, table), strict=True):
        torch.testing.assert_close(got, want, atol=0.03, rtol=0)
    assert all(map(torch.equal, ours.layers[0].value, oracle.layers[0].value))


def test_a_row_outside_the_pool_is_refused() -> None:
    """The kernel writes to addresses: nothing may be written past the end of the pool."""
    storage = KVStorage(KVCacheSpec((LayerSpec(1, 32, 32),), "float32", "int8", 4), 4, "cpu")
    rows = torch.ones(1, 1, 32)
    for slot in (-1, 16, 2**40):
        with pytest.raises(IndexError, match="outside the pool"):
            storage.write(0, torch.tensor([slot]), rows, rows)
    assert storage.is_zero(range(4))


def test_without_numba_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional."""
    storage = KVStorage(KVCacheSpec((LayerSpec(1, 32, 32),), "float32", "int8", 4), 4, "cpu")
    assert isinstance(choose_writer(storage), NumbaWriter)
    monkeypatch.setattr("prefixkv.kv.views.find_spec", lambda name: None)
    assert isinstance(choose_writer(storage), TorchWriter)
