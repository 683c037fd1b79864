"""A pool with raised heads and mean keys left out: every head against a pool of its own format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.cache.spec import KVCacheSpec, LayerSpec, RaisedHead
from prefixkv.errors import ConfigError
from prefixkv.kv.storage import KVStorage

LAYERS = (LayerSpec(3, 32, 32), LayerSpec(2, 16, 32), LayerSpec(4, 32, 16))
RAISED = (RaisedHead(2, 3, "int8"), RaisedHead(0, 1, "int8"), RaisedHead(2, 0, "model"), RaisedHead(2, 1, "int8"))
BLOCKS, SIZE = 6, 4
TABLE = torch.arange(BLOCKS)[None]


@pytest.fixture(params=["numba", "torch"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write with the compiled kernel, and as on a machine without numba."""
    if request.param == "numba":
        pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    else:
        monkeypatch.setattr("prefixkv.kv.views.find_spec", lambda name: None)


def make(kv_format: str = "int4", *raised: RaisedHead, **options: Any) -> KVStorage:
    return KVStorage(KVCacheSpec(LAYERS, "bfloat16", kv_format, SIZE, raised), BLOCKS, "cpu", **options)


def rows(layer: int, count: int = BLOCKS * SIZE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + layer)
    shape = LAYERS[layer]
    return tuple(  # type: ignore[return-value]
        torch.randn(count, shape.num_kv_heads, dim, generator=generator).bfloat16()
        for dim in (shape.key_dim, shape.value_dim)
    )


def fill(storage: KVStorage) -> None:
    for layer in range(len(LAYERS)):
        storage.write(layer, torch.arange(BLOCKS * SIZE), *rows(layer))


def offsets(size: float = 8.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(layer.num_kv_heads, layer.key_dim, generator=generator) * size for layer in LAYERS]


def test_each_head_comes_back_in_its_own_format(writer: None) -> None:
    """Bit for bit as from a pool of that format: also with two formats in one layer, and in layers with none."""
    pools = {name: make(name) for name in ("int4", "int8", "model")}
    mixed = make("int4", *RAISED)
    for storage in (*pools.values(), mixed):
        fill(storage)
    formats = {(one.layer, one.kv_head): one.kv_format for one in RAISED}
    for layer, shape in enumerate(LAYERS):
        got = mixed.gather(layer, TABLE)
        want = {name: storage.gather(layer, TABLE) for name, storage in pools.items()}
        for head in range(shape.num_kv_heads):
            name = formats.get((layer, head), "int4")
            for side in range(2):
                assert torch.equal(got[side][:, head], want[name][side][:, head]), (layer, head)
        assert not torch.equal(want["int4"][0], want["int8"][0])


def test_it_takes_the_bytes_that_the_spec_says() -> None:
    storage = make("int4", *RAISED)
    assert storage.nbytes == BLOCKS * storage.spec.bytes_per_block > make("int4").nbytes


def test_offsets_are_subtracted_before_and_not_added_after(writer: None) -> None:
    """A pool with offsets gives back what one without gives for keys that lack them; raised heads have none."""
    head = RaisedHead(0, 1, "int8")
    moved, plain = make("int4", head, key_offsets=offsets()), make("int4")
    raised = make("int8")
    k, v = rows(0)
    slots = torch.arange(BLOCKS * SIZE)
    moved.write(0, slots, k, v)
    plain.write(0, slots, k.float() - offsets()[0], v)
    raised.write(0, slots, k, v)
    (got, got_v), (want, want_v), (better, _) = (storage.gather(0, TABLE) for storage in (moved, plain, raised))
    for other in (0, 2):
        assert torch.equal(got_v[:, other], want_v[:, other])
        off = (got[:, other] - want[:, other]).abs().float()
        assert off.max() < 2.5 and (off > 0.01).float().mean() < 0.02  # a code may be one off
    assert torch.equal(got[:, 1], better[:, 1])


@given(st.integers(0, SIZE))
@settings(max_examples=10)
def test_copied_rows_are_followed_by_zeros_in_raised_heads_too(count: int) -> None:
    storage = make("int4", *RAISED)
    fill(storage)
    before = [storage.gather(layer, TABLE.T) for layer in range(len(LAYERS))]
    storage.copy_rows(2, 5, count)
    for layer, old in enumerate(before):
        for new, was in zip(storage.gather(layer, TABLE.T), old, strict=True):
            assert torch.equal(new[5, :, :count], was[2, :, :count])
            assert not new[5, :, count:].any()
            assert torch.equal(new[:5], was[:5])


def test_zeroing_clears_raised_heads_and_is_zero_sees_them() -> None:
    """Purge must leave nothing, wherever it lies."""
    storage = make("int4", *RAISED)
    fill(storage)
    storage.zero([1, 4])
    assert [storage.is_zero([block]) for block in range(BLOCKS)] == [False, True, False, False, True, False]
    for part in storage.raised:
        assert [part.storage.is_zero([b]) for b in range(BLOCKS)] == [False, True, False, False, True, False]
    clean = make("int4", *RAISED)
    assert clean.is_zero(range(BLOCKS))
    clean.raised[1].storage.layers[0].value[0][3, 0, 0, 0] = 1
    assert [clean.is_zero([block]) for block in range(BLOCKS)] == [True, True, True, False, True, True]


def test_writers_are_chosen_again_for_raised_heads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may become ready while the engine runs."""
    pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    with monkeypatch.context() as patch:
        patch.setattr("prefixkv.kv.views.find_spec", lambda name: None)
        storage = make("int4", *RAISED)
    kinds = [type(one._writer).__name__ for one in (storage, *(part.storage for part in storage.raised))]
    assert kinds == ["TorchWriter"] * 3
    storage.choose_writer()
    kinds = [type(one._writer).__name__ for one in (storage, *(part.storage for part in storage.raised))]
    assert kinds == ["NumbaWriter"] * 3


def test_offsets_that_do_not_fit_are_refused() -> None:
    """A kernel would read past their end."""
    with pytest.raises(ConfigError, match="4 bits"):
        make("int8", key_offsets=offsets())
    with pytest.raises(ConfigError, match="shape"):
        make("int4", key_offsets=offsets()[:2])
    with pytest.raises(ConfigError, match="shape"):
        make("int4", key_offsets=[one[:, :8] for one in offsets()])
