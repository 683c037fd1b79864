"""One trial: both worlds, and the first thing in which the attacker can tell them apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from tests.audit.program import Kind, Program, make_program, make_renaming
from tests.audit.world import Trace, run_world

__all__ = ["Outcome", "run_program", "run_trial"]


@dataclass(frozen=True)
class Outcome:
    """What a trial showed.

    Attributes:
        difference: The first thing that the attacker sees differently, or None.
        victims_difference: The first number that the victim itself gets differently: a step, its cached and computed
            tokens, a reply that is not the renamed one. It must be None too: either the worlds are not what they should
            be, or what is served, kept or evicted depends on words, and the attacker may see that another time.
        wrong_rows: Reads of rows that were not the reader's.
        num_observations: Things that the attacker saw.
    """

    difference: str | None
    victims_difference: str | None
    wrong_rows: tuple[str, ...]
    num_observations: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return self.difference is None and self.victims_difference is None and not self.wrong_rows


def run_trial(seed: int, kind: Kind, *, idle: bool = False, checks: bool = True) -> Outcome:
    """Run the two worlds of a seed; see the README.

    Args:
        seed: Number of the trial.
        kind: Who the attacker is.
        idle: World 2 is the one without the victim, instead of the one with other words.
        checks: Also recompute the invariants of both engines at the end; planted faults break them on purpose.
    """
    return run_program(make_program(seed, kind), make_renaming(seed), idle=idle, checks=checks)


def run_program(program: Program, renaming: dict[int, int], *, idle: bool = False, checks: bool = True) -> Outcome:
    """Run a program in two worlds and compare what the attacker saw."""
    first = run_world(program, {})
    second = run_world(program, {} if idle else renaming, first.guesses, without_victim=idle)
    if checks:
        for world in (first, second):
            world.core.check()
    return Outcome(
        _first_difference(first.trace, second.trace),
        None if idle else _first_difference(first.victims_numbers, second.victims_numbers),
        (*first.runner.wrong_rows, *second.runner.wrong_rows),
        len(first.trace),
    )


def _first_difference(first: Trace, second: Trace) -> str | None:
    for place, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            return f"observation {place}:\n  world 1: {one}\n  world 2: {other}"
    return None
