"""Compiled once, loaded afterwards; never from sources that are no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

numba = pytest.importorskip("numba", reason="the extra `cpu` is not installed")

_PROBE = """
import torch
from prefixkv.kernels import numba_store
from prefixkv.kernels.numba_layout import view_layer
rows = torch.ones(1, 1, 4, 32)
view = view_layer((rows,), (rows.clone(),), turned=(False, False), most_group=1)
numba_store.store_rows(view, torch.tensor([0]), rows[0, :1, :1], rows[0, :1, :1])
stats = numba_store._store_rows.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def _probe(package: Path, cache: Path) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(package), "NUMBA_OPT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, check=True, cwd=cache
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_changed_helper_is_compiled_anew(tmp_path: Path, repo_root: Path) -> None:
    """numba itself looks only at the file of the function it caches, not at those it calls."""
    shutil.copytree(repo_root / "prefixkv", tmp_path / "prefixkv", ignore=shutil.ignore_patterns("__pycache__"))
    cache = tmp_path / "cache"
    cache.mkdir()
    assert _probe(tmp_path, cache) == "0 1"
    assert _probe(tmp_path, cache) == "1 0"
    with (tmp_path / "prefixkv" / "kernels" / "numba_tiles.py").open("a") as file:
        file.write("# changed\n")
    assert _probe(tmp_path, cache) == "0 1"


def test_the_layer_that_several_engines_would_crash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason at load instead of a process that ends at the second engine."""
    from prefixkv.kernels.numba_build import choose_threading_layer

    assert choose_threading_layer() is None
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "workqueue")
    assert "workqueue" in str(choose_threading_layer())


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting belongs to the process."""
    from prefixkv.kernels.numba_build import choose_threading_layer

    monkeypatch.setattr(numba.config, "THREADING_LAYER", "tbb")
    assert choose_threading_layer() is None
    assert numba.config.THREADING_LAYER == "tbb"


def test_the_number_of_threads_is_the_same_whenever_it_is_asked_for() -> None:
    """Scratch is made for it; numba raises torch's own number in a thread where it starts its threads."""
    program = (
        "from prefixkv.kernels.numba_build import use_threads; import numba\n"
        "first = use_threads(); numba.get_num_threads(); print(first, use_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    first, second = done.stdout.split()
    assert first == second
