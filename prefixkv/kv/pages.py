"""Memory that is read from end to end in every step: in large pages, where the system has them.

A step reads all weights and many rows of the pool. With pages of 4 KiB the processor then spends its time looking up
addresses: on the virtual machine where this was measured, huge pages doubled what a thread reads per second.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

__all__ = ["Arena", "commit_pages", "zeros"]

_ALIGNMENT = 64
_HUGE_PAGE = 2**21


def _map(size: int) -> mmap.mmap:
    """Return zeroed pages that the system commits when they are first touched."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on the CPU; ``torch.zeros`` would touch every page now, 0.7 s a GiB."""
    return torch.frombuffer(_map(math.prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14: commit pages for writing, leave what they hold."""


def available_memory() -> int | None:
    """Return the bytes that this process could still have, of the machine's or of its container's; None if unknown."""
    found = [_available_here(), *(_left_of(*names) for names in _CGROUP_FILES)]
    return min((size for size in found if size is not None), default=None)


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in both versions of control groups."""


def _available_here() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _left_of(limit: str, used: str) -> int | None:
    try:
        return max(0, int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such limit, or "max"
        return None


_HEADROOM = 2**28
"""Bytes that are left for others, pages being committed without need."""


def commit_pages(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Commit memory that is written to sooner or later, a large page at each step, the first of each tensor first.

    The first touch of a page takes longer than all that is then written there. What tensors hold stays. Ends early
    where the system cannot do it or has little memory left.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    spans = [(x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, x.data_ptr() + x.nbytes) for x in tensors]
    count = 0
    for offset in range(0, max(end - start for start, end in spans), _HUGE_PAGE):
        for start, end in spans:
            size = min(_HUGE_PAGE, end - start - offset)
            if size > 0:
                if count % 64 == 0 and (available_memory() or 0) < _HEADROOM:
                    return
                count += 1
                if madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
                    return
                yield


class Arena:
    """One stretch of memory for many tensors of known sizes."""

    def __init__(self, size: int) -> None:
        """Reserve ``size`` bytes, to be had from :meth:`empty`."""
        self._pages = _map(max(1, size))
        self._used = 0
        self._thread: threading.Thread | None = None

    def commit_ahead(self) -> None:
        """Let a thread touch each large page: the first touch costs as much as a copy of it.

        Parallel work beside that thread would wait for the processor that it holds.
        """
        self._thread = threading.Thread(target=self._touch, name="prefixkv-pages", daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        place = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()
        for offset in range(0, len(self._pages), _HUGE_PAGE):
            ctypes.memset(place + offset, 0, 1)

    def settle(self) -> None:
        """Wait until that is done."""
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def room(size: int) -> int:
        """Return the bytes that a tensor of ``size`` bytes takes here."""
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next ``count`` numbers, not written yet."""
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used)
        self._used += self.room(tensor.nbytes)
        return tensor
