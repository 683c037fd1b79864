"""Python's garbage collector, kept still while much is made that lasts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Let nothing be collected meanwhile; it goes on afterwards if it was on before.

    Importing torch and transformers makes a million objects that stay, and the collector would look at all of them
    again and again: a sixth of the time that imports take.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
