"""Which backend runs, and why the others do not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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


_BROKEN = """
import sys, types
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba":
            raise {error}
if "{error}":
    sys.meta_path.insert(0, Finder())
from prefixkv.attention.select import prepare_backends, select_backend
from prefixkv.kv.storage import KVStorage
from tests.attention.test_select import SPEC
prepare_backends("cpu")
choice = select_backend(SPEC)
print(choice.backend.name, type(KVStorage(SPEC.cache, 1, "cpu")._writer).__name__, choice.refusals["numba"])
"""


@pytest.mark.parametrize("error", ["", "OSError('no libgomp')", "AttributeError('no core')", "ImportError('blocked')"])
def test_whatever_an_installed_numba_raises_is_a_reason(repo_root: Path, error: str) -> None:
    """A library it cannot load, a numpy it does not fit, or NUMBA_DISABLE_JIT, which leaves functions as they are."""
    pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    setting = {} if error else {"NUMBA_DISABLE_JIT": "1"}
    environment = {**os.environ, "PYTHONPATH": str(repo_root), **setting}
    command = [sys.executable, "-c", _BROKEN.format(error=error)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("torch TorchWriter numba cannot be "), done.stderr
    assert (error[:7] or "NUMBA_DISABLE_JIT") in done.stdout
