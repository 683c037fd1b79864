"""The format seam: names, sizes, round trips."""

from __future__ import annotations

import pytest
import torch

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec
from prefixkv.config import KV_FORMATS
from prefixkv.errors import ConfigError
from prefixkv.kv.formats import FORMATS, TORCH_DTYPES, get_format, hadamard
from prefixkv.kv.storage import KVStorage


def test_every_format_that_a_config_accepts_exists() -> None:
    """A name that passes CacheConfig must not fail at load."""
    assert set(KV_FORMATS) == set(FORMATS)


def test_an_unknown_format_is_refused_by_name() -> None:
    """There is no silent default: a format that cannot be read back is never chosen."""
    with pytest.raises(ConfigError, match=r"int3.*model"):
        get_format("int3")


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_bytes_per_token_are_what_planning_and_storage_say(name: str, dtype: str) -> None:
    """`plan` computes without torch, storage allocates: both must come to the same number."""
    layers = (LayerSpec(3, 64, 64), LayerSpec(1, 24, 16))
    spec = KVCacheSpec(layers, dtype, name, 8)
    assert KVStorage(spec, 5, "cpu").nbytes == 5 * spec.bytes_per_block


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_the_model_format_gives_back_every_bit(dtype: str) -> None:
    """``model`` is the format that exactness is promised for."""
    layout = get_format("model")
    rows = torch.randn(7, 2, 16).to(TORCH_DTYPES[dtype])
    assert torch.equal(layout.key.decode(layout.key.encode(rows), rows.dtype), rows)
    assert torch.equal(layout.value.decode(layout.value.encode(rows), rows.dtype), rows)


QUANTISED = [name for name in FORMATS if name != "model"]


@pytest.mark.parametrize("dim", [16, 24, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_row_comes_back_within_a_step(name: str, dim: int) -> None:
    """Also rows of zeros, of one value, tiny ones and ones with an outlier."""
    rows = torch.randn(40, 2, dim, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1], rows[2] = 0, 3.25, 1e-4
    rows[3, :, 0] = 500
    for codec, layout in zip((get_format(name).key, get_format(name).value), KV_LAYOUTS[name], strict=True):
        got = codec.decode(codec.encode(rows), torch.float32)
        target = rows @ hadamard(dim, rows.device) if layout.rotate else rows
        back = got @ hadamard(dim, rows.device) if layout.rotate else got
        size = dim if layout.bits == 8 else layout.group_size(dim)
        groups, found = target.unflatten(-1, (-1, size)), back.unflatten(-1, (-1, size))
        low, high = groups.aminmax(dim=-1)
        span = 2 * groups.abs().amax(-1) / 254 if layout.bits == 8 else (high - low) / 15
        # Scales are float16 in the 4-bit formats: a step may be off by a thousandth of the largest number.
        slack = 1e-6 if layout.bits == 8 else 2e-3
        most = span / 2 if layout.bits == 8 else span * 2
        assert ((found - groups).abs() <= (most + slack * groups.abs().amax(-1) + 4e-6)[..., None]).all()


def test_fitting_four_bits_is_better_than_spanning_the_group() -> None:
    """Half a percent of the squared error at least, on rows as a model makes them."""
    rows = torch.randn(200, 4, 64, generator=torch.Generator().manual_seed(0))
    codec = get_format("int4").value
    error = (codec.decode(codec.encode(rows), torch.float32) - rows).square().sum()
    groups = (rows @ hadamard(64, rows.device)).unflatten(-1, (-1, 32))
    low, high = (x[..., None] for x in groups.aminmax(dim=-1))
    step = (high - low) / 15
    spanned = ((((groups - low) / step).round() * step + low) - groups).square().sum()
    assert error < 0.95 * spanned


@pytest.mark.parametrize("name", QUANTISED)
def test_a_row_is_encoded_by_itself(name: str) -> None:
    """Nothing a row is stored with may depend on its neighbours, or a hit would not equal a miss."""
    rows = torch.randn(9, 3, 64)
    rows[4] *= 1000
    for codec in (get_format(name).key, get_format(name).value):
        together = codec.encode(rows)
        for i in range(9):
            for part, alone in zip(together, codec.encode(rows[i : i + 1]), strict=True):
                assert torch.equal(part[i : i + 1], alone)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.54), ("k8v4", 0.43), ("k4v8", 0.46), ("int4", 0.36)])
def test_bytes_against_bfloat16_stay_below_what_is_promised(name: str, most: float) -> None:
    """Scales included, at the demo model's head size."""
    layers = (LayerSpec(3, 64, 64),)
    size = {kind: KVCacheSpec(layers, "bfloat16", kind, 32).bytes_per_token for kind in (name, "model")}
    assert size[name] <= most * size["model"]


def test_a_head_of_odd_size_has_no_four_bit_format() -> None:
    """It is refused when the pool is built, not when the first token comes."""
    with pytest.raises(ConfigError, match="int8"):
        KVStorage(KVCacheSpec((LayerSpec(1, 7, 7),), "float32", "int4", 8), 2, "cpu")


@pytest.mark.parametrize("dim", [1, 2, 24, 64, 96])
def test_the_rotation_is_orthonormal(dim: int) -> None:
    """So scores are the same whether both sides are rotated or neither."""
    turn = hadamard(dim, torch.device("cpu"))
    torch.testing.assert_close(turn @ turn.T, torch.eye(dim))
