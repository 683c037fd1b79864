"""How kernels are compiled and kept on disk."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import torch

__all__ = ["choose_threading_layer", "compiled", "ready_name", "sources_digest", "use_threads"]


def compiled(decorator: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Any:
    """Return a function that numba compiles on first use and keeps on disk, where the disk lets it."""
    _find_ready_folders()
    try:
        return decorator(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written
        return decorator(**options)(function)


@cache
def _find_ready_folders() -> None:
    """Let numba read from a folder that cannot be written, once all is ready there; changes numba, for us alone.

    Such is a folder of a container that was filled while its image was built. Functions of others are kept as before:
    the file that says ready lies in our folder only.
    """
    from numba.core import caching

    def find_ready(locator_class: Any, function: Any, file: str) -> Any:
        locator = locator_class(function, file)
        return locator if Path(locator.get_cache_path(), ready_name()).exists() else None

    files = caching.CompileResultCacheImpl
    for place in ("UserProvided",) if numba.config.CACHE_DIR else ("UserWide", "InTree"):
        name = f"{place}CacheLocator"
        base = getattr(caching, name, None) or getattr(caching, f"_{name}", None)  # older ones are private
        if base is not None and hasattr(files, "_locator_classes"):
            ready = type(f"Ready{name}", (base,), {"from_function": classmethod(find_ready)})
            files._locator_classes = [ready, *files._locator_classes]


@cache
def ready_name() -> str:
    """Return the name of the file that says: all compiled, by this numba, for this processor, from these sources."""
    parts = (
        sources_digest(),
        numba.__version__,
        platform.python_version(),
        llvmlite.binding.get_host_cpu_name(),
        str(numba.config.CPU_NAME),
        str(numba.config.CPU_FEATURES),
        str(numba.config.OPT),
    )
    return f"ready-{blake2b('|'.join(parts).encode(), digest_size=8).hexdigest()}"


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
    """Let the parallel kernels that this thread starts use as many threads as torch did at first; returns how many.

    Always the same number: scratch is made for it. Torch's own number is no constant: it is kept per thread, and numba
    raises it in a thread where it starts its own.
    """
    threads = _threads_of_torch()
    numba.set_num_threads(threads)
    return threads


@functools.cache
def _threads_of_torch() -> int:
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
