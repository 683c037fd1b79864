"""The format seam: names, sizes, round trips."""

from __future__ import annotations

import pytest
import torch

from prefixkv.cache.spec import KVCacheSpec, LayerSpec
from prefixkv.config import KV_FORMATS
from prefixkv.errors import ConfigError
from prefixkv.kv.formats import FORMATS, TORCH_DTYPES, get_format
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
    assert sum(get_format(name).bytes_per_token(layer, dtype) for layer in layers) == spec.bytes_per_token
    assert KVStorage(spec, 5, "cpu").nbytes == 5 * spec.bytes_per_block


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_the_model_format_gives_back_every_bit(dtype: str) -> None:
    """``model`` is the format that exactness is promised for."""
    layout = get_format("model")
    rows = torch.randn(7, 2, 16).to(TORCH_DTYPES[dtype])
    assert torch.equal(layout.key.decode(layout.key.encode(rows), rows.dtype), rows)
    assert torch.equal(layout.value.decode(layout.value.encode(rows), rows.dtype), rows)
