"""Memory that is read from end to end in every step: in large pages, where the system has them.

A step reads all weights and many rows of the pool. With pages of 4 KiB the processor then spends its time looking up
addresses: on the virtual machine where this was measured, huge pages doubled what a thread reads per second.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence

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


def commit_pages(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Commit memory that is written to sooner or later, a large page at each step, the first of each tensor first.

    The first touch of a page takes longer than all that is then written there. What tensors hold stays. Ends early
    where the system cannot do it.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    spans = [(x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, x.data_ptr() + x.nbytes) for x in tensors]
    for offset in range(0, max(end - start for start, end in spans), _HUGE_PAGE):
        for start, end in spans:
            size = min(_HUGE_PAGE, end - start - offset)
            if size > 0:
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
        """Let a thread commit all of it: the first touch of a page costs as much as a copy of it.

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
