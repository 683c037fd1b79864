"""Which writer a pool gets: kernels have room for rows of some sizes only, and check nothing themselves."""

from __future__ import annotations

import pytest
import torch

from prefixkv.attention.base import AttentionSpec
from prefixkv.attention.cpu import NumbaBackend
from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec
from prefixkv.errors import ConfigError
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.writer import NumbaWriter, TorchWriter, choose_writer

numba = pytest.importorskip("numba", reason="the extra `cpu` is not installed")


@pytest.mark.parametrize("dim", [64, 512, 520, 1024, 4096])
@pytest.mark.parametrize("kv_format", sorted(KV_LAYOUTS))
def test_rows_of_every_size_are_written_as_the_codecs_write_them(kv_format: str, dim: int) -> None:
    """A kernel without room for a row would write wrong numbers, or over memory that is not its own."""
    spec = KVCacheSpec((LayerSpec(2, dim, dim),), "bfloat16", kv_format, 16)
    ours, oracle = KVStorage(spec, 2, "cpu"), KVStorage(spec, 2, "cpu")
    oracle._writer = TorchWriter(oracle)
    generator = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(32, 2, dim, generator=generator).to(torch.bfloat16) for _ in range(2))
    for storage in (ours, oracle):
        storage.write(0, torch.arange(32), k, v)
    table = torch.arange(2)[None]
    for got, want in zip(ours.gather(0, table), oracle.gather(0, table), strict=True):
        torch.testing.assert_close(got, want, atol=0.5, rtol=0)
        assert (got - want).abs().mean() < 0.003


@pytest.mark.parametrize("dim", [1, 6, 20, 64, 512, 514, 1024])
@pytest.mark.parametrize("kv_format", sorted(KV_LAYOUTS))
def test_kernels_write_where_they_attend(kv_format: str, dim: int) -> None:
    """One question, so that no limit can be known to one of them alone."""
    try:
        spec = KVCacheSpec((LayerSpec(1, dim, dim),), "float32", kv_format, 4)
        storage = KVStorage(spec, 1, "cpu")
    except ConfigError as error:
        pytest.skip(f"no such rows: {error}")
    attends = NumbaBackend().supports(AttentionSpec(spec, (1,), (None,), False, False, "cpu")) is None
    assert isinstance(choose_writer(storage), NumbaWriter if attends else TorchWriter)
    assert attends or dim not in (64, 512)
    assert not attends or dim <= 512


def test_the_layer_that_several_engines_would_crash_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing is parallel as well."""
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "workqueue")
    storage = KVStorage(KVCacheSpec((LayerSpec(1, 64, 64),), "float32", "int8", 4), 1, "cpu")
    assert isinstance(storage._writer, TorchWriter)
