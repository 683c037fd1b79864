"""What is kept by scope: every tenant has room of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.chat.shelves import Kept, Shelves
from prefixkv.scope import Principal, Scope, ScopeLevel


class Box(Kept):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.own = size

    @property
    def size(self) -> int:
        return self.own


def scope_of(tenant: str, session: int) -> Scope:
    return Scope.of(Principal(tenant, "u", str(session)), ScopeLevel.SESSION)


ACTIONS = st.tuples(st.sampled_from("puts gets takes drops".split()), st.sampled_from("abc"), st.integers(0, 4))


@given(st.lists(st.tuples(ACTIONS, st.integers(1, 130)), max_size=60))
def test_it_holds_what_a_list_in_the_order_of_use_would_hold(actions: list[tuple[tuple[str, str, int], int]]) -> None:
    shelves: Shelves[Box] = Shelves(100, 10_000)
    model: dict[Scope, int] = {}
    for (action, tenant, session), size in actions:
        scope = scope_of(tenant, session)
        match action:
            case "puts":
                shelves.put(scope, Box(size))
                model.pop(scope, None)
                if size <= 100:
                    model[scope] = size
                while sum(one for other, one in model.items() if other.tenant == tenant) > 100:
                    del model[next(other for other in model if other.tenant == tenant)]
            case "gets":
                found = shelves.get(scope)
                assert (found and found.size) == model.get(scope)
                if scope in model:
                    model[scope] = model.pop(scope)
            case "takes":
                taken = shelves.take(scope)
                assert (taken and taken.size) == model.pop(scope, None)
            case "drops":
                shelves.drop(lambda other, tenant=tenant: other.tenant == tenant)  # type: ignore[misc]
                model = {other: one for other, one in model.items() if other.tenant != tenant}
        assert shelves.size == sum(model.values())


def test_when_all_of_them_are_too_much_the_tenant_not_used_for_longest_goes() -> None:
    shelves: Shelves[Box] = Shelves(100, 250)
    for tenant in "ab":
        shelves.put(scope_of(tenant, 1), Box(100))
    assert shelves.get(scope_of("a", 1)) is not None
    shelves.put(scope_of("c", 1), Box(100))
    assert [shelves.get(scope_of(tenant, 1)) is None for tenant in "abc"] == [False, True, False]
    assert shelves.size == 200


def test_a_value_past_its_time_is_gone_and_its_use_keeps_it_from_getting_idle() -> None:
    now = [0.0]
    shelves: Shelves[Box] = Shelves(100, 1000, lifetime=lambda scope: (10.0, 25.0), clock=lambda: now[0])
    here, there = scope_of("a", 1), scope_of("a", 2)
    shelves.put(here, Box(10))
    shelves.put(there, Box(10))
    assert shelves.next_sweep_s == 10
    for now[0] in (9.0, 18.0):
        kept = shelves.take(here)
        assert kept is not None
        shelves.put(here, kept)
    assert (shelves.get(there), shelves.take(there)) == (None, None)
    now[0] = 24.0
    assert shelves.get(here) is kept
    shelves.put(here, kept)
    now[0] = 25.0  # it is as old as before
    assert shelves.get(here) is None
    shelves.sweep()
    assert (shelves.size, shelves.next_sweep_s) == (0, float("inf"))


def test_what_is_past_its_time_is_forgotten_without_being_asked_for() -> None:
    now = [0.0]
    shelves: Shelves[Box] = Shelves(100, 1000, lifetime=lambda scope: (5.0, None), clock=lambda: now[0])
    for second in range(20):
        now[0] = float(second)
        shelves.sweep()
        shelves.put(scope_of("a", second), Box(1))
        assert shelves.size <= 7, "five that live, and what the next look will find"
    now[0] += 6
    assert shelves.next_sweep_s <= now[0]
    shelves.sweep()
    assert shelves.size == 0
