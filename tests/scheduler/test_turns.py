"""The least served of many, found without looking at all."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.scheduler.turns import Turns


@dataclass(eq=False)
class Party:
    number: int
    counter: float = 0.0

    @property
    def key(self) -> tuple[float, int, int]:
        return self.counter, 0, self.number


@given(st.lists(st.tuples(st.sampled_from("add discard charge aside restore".split()), st.integers(0, 5)), max_size=60))
def test_the_first_is_the_least_of_those_in_line(doings: list[tuple[str, int]]) -> None:
    """Compared with a plain set and min()."""
    turns: Turns[Party] = Turns()
    parties = [Party(n) for n in range(6)]
    line: set[Party] = set()
    aside: set[Party] = set()
    for doing, n in doings:
        party = parties[n]
        match doing:
            case "add":
                turns.add(party)
                line.add(party)
            case "discard":
                turns.discard(party)
                line.discard(party)
                aside.discard(party)
            case "charge":
                party.counter += n + 1
            case "aside" if party in line:
                turns.set_aside(party)
                aside.add(party)
            case "restore":
                turns.restore()
                aside.clear()
        assert turns.first() is min(line - aside, key=lambda other: other.key, default=None)
        assert len(turns) == len(line)


def test_who_comes_and_goes_leaves_nothing_behind() -> None:
    turns: Turns[Party] = Turns()
    turns.add(Party(0))
    for n in range(1, 10_000):
        party = Party(n, counter=1.0)
        turns.add(party)
        turns.discard(party)
    assert len(turns) == 1 and len(turns._heap) < 50
