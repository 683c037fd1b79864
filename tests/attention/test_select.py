"""Which backend runs, and why the others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixkv.attention.base import AttentionSpec
from prefixkv.attention.select import select_backend
from prefixkv.attention.torch_ref import TorchBackend
from prefixkv.cache.spec import KVCacheSpec, LayerSpec
from prefixkv.errors import UnsupportedModel

SPEC = AttentionSpec(KVCacheSpec((LayerSpec(1, 8, 8),), "float32", "model", 4), (2,), (None,), False, False, "cpu")


class Picky(TorchBackend):
    name = "picky"

    def supports(self, spec: AttentionSpec) -> str | None:
        return f"no {spec.cache.kv_format} pools"


def test_the_torch_backend_is_always_there() -> None:
    """Something runs on every machine, and says why nothing faster does."""
    choice = select_backend(replace(SPEC, device_type="meta"))
    assert choice.backend.name == "torch"
    assert choice.refusals == {"numba": "runs on a CPU only, the model is on meta"}


def test_a_refusal_is_kept_with_its_reason() -> None:
    """A reader must be able to ask why the fast path does not run."""
    choice = select_backend(SPEC, [Picky(), TorchBackend()])
    assert choice.backend.name == "torch"
    assert choice.refusals == {"picky": "no model pools"}


def test_no_backend_is_an_error_that_lists_every_reason() -> None:
    """At load, not at token 900."""
    with pytest.raises(UnsupportedModel, match="picky: no model pools"):
        select_backend(SPEC, [Picky()])
