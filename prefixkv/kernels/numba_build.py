"""How kernels are compiled and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import torch

__all__ = ["choose_threading_layer", "compiled", "sources_digest", "use_threads"]


def compiled(decorator: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Any:
    """Return a function that numba compiles on first use and keeps on disk, where the disk lets it."""
    try:
        return decorator(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written
        return decorator(**options)(function)


def sources_digest() -> str:
    """Return a digest of all kernel sources.

    numba throws a cached function away when its own file changes, and only then. A kernel is made of functions of
    several files, so each entry closes over this digest, which makes it part of the cache's key.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("numba_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def choose_threading_layer() -> str | None:
    """Return None if parallel kernels may run here, else why not; may choose numba's threading layer.

    Engines call kernels from their own threads, several at once. numba's ``workqueue`` layer ends the process then, so
    where nothing was chosen yet the choice is OpenMP, which torch has loaded anyway and whose threads start in a few
    microseconds. What the user has chosen stays.
    """
    if numba.config.THREADING_LAYER == "default":
        if find_spec("numba.np.ufunc.omppool") is None:
            return "numba has no OpenMP threading layer here"
        numba.config.THREADING_LAYER = "omp"
    if numba.config.THREADING_LAYER == "workqueue":
        return "numba's threading layer is workqueue, which does not bear several engines"
    return None


def use_threads() -> int:
    """Let the parallel kernels that this thread starts use as many threads as torch; returns how many."""
    threads: int = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    return threads
