"""Which backend runs, and why the others do not."""

from __future__ import annotations

import sys
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


def test_without_numba_the_torch_backend_serves_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional, and a reader learns how to get it."""
    monkeypatch.setattr("prefixkv.kv.views.find_spec", lambda name: None)
    choice = select_backend(SPEC)
    assert choice.backend.name == "torch"
    assert choice.refusals == {"numba": "numba is not installed: pip install prefixkv[cpu]"}


def test_a_broken_numba_is_a_reason_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails, as numba's does beside a numpy that is too new."""
    monkeypatch.setitem(sys.modules, "prefixkv.kernels.numba_build", None)
    choice = select_backend(SPEC)
    assert choice.backend.name == "torch"
    assert "cannot be imported" in choice.refusals["numba"]
