"""How long something that is kept lives: without use, and in all."""

from __future__ import annotations

import math

__all__ = ["Lifetime", "end_of_life"]

Lifetime = tuple[float | None, float | None]
"""Seconds without use, and seconds since it was made, that something lives; None is for ever."""


def end_of_life(lifetime: Lifetime, *, used_s: float, created_s: float) -> float:
    """Return when it ends, by the clock of the other two times; infinity if never."""
    idle_s, absolute_s = lifetime
    return min(
        math.inf if idle_s is None else used_s + idle_s,
        math.inf if absolute_s is None else created_s + absolute_s,
    )
