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
from collections.abc import Sequence

import torch

__all__ = ["Arena", "commit_ahead", "zeros"]

_ALIGNMENT = 64
_HUGE_PAGE = 2**21
_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14: commit pages for writing, leave what they hold."""


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


def commit_ahead(tensors: Sequence[torch.Tensor], *, whole: bool) -> None:
    """Let a thread commit memory that will be written soon, while this one does something else.

    The first touch of a page costs as much as a copy of it. What tensors hold stays; what the system cannot do is left.

    Args:
        tensors: On the CPU.
        whole: All of each tensor, or its first huge page.
    """
    if sys.platform == "linux":
        threading.Thread(target=_commit, args=(list(tensors), whole), name="prefixkv-pages", daemon=True).start()


def _commit(tensors: list[torch.Tensor], whole: bool) -> None:
    madvise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.nbytes
        for place in range(start, end if whole else min(end, start + _HUGE_PAGE), _HUGE_PAGE):
            size = min(_HUGE_PAGE, end - place)
            if madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
                return


class Arena:
    """One stretch of memory for many tensors of known sizes."""

    def __init__(self, size: int) -> None:
        """Reserve ``size`` bytes, to be had from :meth:`empty`."""
        self._pages = _map(max(1, size))
        self._used = 0

    def commit_ahead(self) -> None:
        """Let a thread commit all of it."""
        commit_ahead([torch.frombuffer(self._pages, dtype=torch.uint8)], whole=True)

    @staticmethod
    def room(size: int) -> int:
        """Return the bytes that a tensor of ``size`` bytes takes here."""
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next ``count`` numbers, not written yet."""
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used)
        self._used += self.room(tensor.nbytes)
        return tensor
