"""Threads that wait for each other inside one parallel region.

A step has two hundred places where all threads must have done their share before any goes on. To leave a region and
enter the next one at each of them costs more than the attention between them, so a step is one region, and its threads
meet in memory. That needs all of them to run at the same time, which no threading layer promises: before anything else
each waits until all have come, and if they do not, none begins.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from prefixkv.kernels.numba_ir import I32, I64, atomic_add, read_cycles

__all__ = ["MEETING_BYTES", "all_came", "meet", "share"]

MEETING_BYTES = 128
"""What threads meet in: two lines of memory, zero when a region begins."""

_SECOND = 64
_NEVER = -(2**40)
_PATIENCE = 2_000_000_000
"""Cycles, about a second: threads that have not all come by then are taken not to run at the same time."""

_SPINS = 4096
"""Looks at memory, some 100 microseconds, before a thread lets others have its processor between two looks."""


@intrinsic
def _look(typing_context: Any, address: Any) -> Any:
    """Return an int64 that other threads write, and with it all that they wrote before."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _swap(typing_context: Any, address: Any, former: Any, value: Any) -> Any:
    """Write an int64 if it still is ``former``; return whether it was."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _rest(typing_context: Any) -> Any:
    """Leave the processor's units to the other thread of the core for a moment."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _give_way(typing_context: Any) -> Any:
    """Let another thread have this processor; the C library's ``sched_yield``."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True)
def share(count: Any, thread: Any, threads: Any) -> Any:
    """Return the first of ``count`` that is not before a thread's share."""
    return count * thread // threads


@njit(nogil=True)
def all_came(place: Any, threads: Any) -> Any:
    """Wait until ``threads`` threads have come to a meeting; return whether they did. All return the same."""
    atomic_add(place, 1)
    began = read_cycles()
    while True:
        came = _look(place)
        if came == threads:
            return True
        if came < 0:
            return False
        if read_cycles() - began > _PATIENCE and _swap(place, came, _NEVER):
            return False
        _give_way()


@njit(nogil=True)
def meet(place: Any, met: Any, threads: Any) -> Any:
    """Wait until all threads have met once more than ``met``; return how often they have.

    What any of them wrote before, all see behind it.
    """
    goal = (met + 1) * threads
    if atomic_add(place + _SECOND, 1) + 1 == goal:
        return met + 1
    spins = 0
    while _look(place + _SECOND) < goal:
        spins += 1
        if spins < _SPINS:
            _rest()
        else:
            _give_way()
    return met + 1
