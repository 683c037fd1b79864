"""Memory that is read from end to end in every step: in large pages, where the system has them.

A step reads all weights and many rows of the pool. With pages of 4 KiB the processor then spends its time looking up
addresses: on the virtual machine where this was measured, huge pages doubled what a thread reads per second.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

__all__ = ["Arena", "zeros"]

_ALIGNMENT = 64


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


class Arena:
    """One stretch of memory for many tensors of known sizes."""

    def __init__(self, size: int) -> None:
        """Reserve ``size`` bytes, to be had from :meth:`empty`."""
        self._pages = _map(max(1, size))
        self._used = 0

    @staticmethod
    def room(size: int) -> int:
        """Return the bytes that a tensor of ``size`` bytes takes here."""
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next ``count`` numbers, not written yet."""
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used)
        self._used += self.room(tensor.nbytes)
        return tensor
