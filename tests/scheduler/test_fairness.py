"""Who got how much: counters of tenants by weight, and of the users inside each."""

from __future__ import annotations

from itertools import count

import pytest

from prefixkv.scheduler.fairness import Account, Accounts, FairnessCounters
from prefixkv.scheduler.request import Sequence
from prefixkv.scope import Principal
from tests.cache.fakes import scopes_of, text
from tests.scheduler.loop import Loop, Rules


class Counters(FairnessCounters):
    """Counters, and a line for each thing a tenant can do."""

    def __init__(self, **weights: float) -> None:
        super().__init__(Rules(weight=lambda tenant: weights.get(tenant, 1.0)))
        self._ids = count()

    def come(self, tenant: str, user: str = "u", now: int = 0) -> Sequence:
        seq = Sequence(next(self._ids), [1], 1, scopes_of(tenant, user), 2)
        self.enter(seq, now)
        return seq

    def order(self, tenant: str | None = None) -> list[str | None]:
        accounts: dict[str | None, Account] = {**self.tenants.active}
        if tenant is not None:
            accounts = {**self.tenants.active[tenant].users.active}
        return [account.name for account in sorted(accounts.values(), key=lambda account: account.key)]


def test_the_least_served_goes_next_and_ties_keep_their_order() -> None:
    counters = Counters()
    seqs = {tenant: counters.come(tenant) for tenant in "abcd"}
    counters.charge(seqs["a"], 10)
    counters.charge(seqs["b"], 5)
    assert counters.order() == ["c", "d", "b", "a"]
    counters.charge(seqs["c"], 11)
    assert counters.order() == ["d", "b", "a", "c"]


def test_service_counts_by_weight() -> None:
    counters = Counters(b=4.0)
    a, b = counters.come("a"), counters.come("b")
    counters.charge(a, 10)
    counters.charge(b, 30)
    assert counters.order() == ["b", "a"]


def test_users_of_a_tenant_are_counted_one_by_one() -> None:
    counters = Counters()
    anna, ben = counters.come("a", "anna"), counters.come("a", "ben")
    other = counters.come("b", "anna")
    counters.charge(anna, 10)
    counters.charge(other, 3)
    assert counters.order("a") == ["ben", "anna"]
    assert counters.order() == ["b", "a"], "both count for their tenant"
    counters.charge(ben, 20)
    assert counters.order("a") == ["anna", "ben"]


def test_a_charge_can_be_taken_back() -> None:
    """For a chunk that was chosen and then not computed, because its sequence was preempted."""
    counters = Counters(a=3.0)
    a, b = counters.come("a"), counters.come("b")
    counters.charge(a, 10)
    counters.charge(a, -10)
    counters.charge(b, 1)
    assert counters.order() == ["a", "b"]


def test_the_operators_own_work_is_free() -> None:
    counters = Counters()
    own = Sequence(0, [1], 1, scopes_of("x"), 2)
    own.scopes = type(own.scopes).for_publication(None)
    counters.enter(own, 0)
    a = counters.come("a")
    counters.charge(own, 10**6)
    counters.charge(a, 1)
    assert counters.order() == [None, "a"]
    late = counters.come("b")
    assert counters.order() == [None, "a", "b"], "nor does it lower where others start"
    counters.leave(late)


def test_who_pauses_saves_nothing_up() -> None:
    """A tenant that was silent for an hour does not own the next hour."""
    counters = Counters()
    a = counters.come("a")
    counters.charge(a, 1000)
    b = counters.come("b")
    counters.charge(b, 1)
    assert counters.order() == ["a", "b"]


def test_a_head_start_is_one_burst_and_is_earned_by_what_others_get() -> None:
    """Else a stream of newcomers, each with its head start, would hold up those that were there before."""
    accounts = Accounts(Account, burst_tokens=100)
    old = accounts.enter("old", 0)
    accounts.charge(old, 1000)
    first = accounts.enter("first", 0, 2.0)
    assert (first.counter, first.credit_tokens) == (950.0, 100.0), "by weight"
    assert accounts.enter("second", 0).counter == 950.0, "nothing is left beyond the lowest"
    accounts.charge(first, 60)
    accounts.leave(first)
    accounts.charge(old, 30)
    late = accounts.enter("late", 0)
    assert late.counter == 950.0 - 70.0, "what was not used came back, and what the others got"


def test_a_burst_that_was_saved_up_is_no_share_for_ever() -> None:
    """A tenant that comes and goes gets its head start only where it fell behind."""
    accounts = Accounts(Account, burst_tokens=100)
    old = accounts.enter("old", 0)
    for _ in range(50):
        guest = accounts.enter("guest", 0)
        while guest.key < old.key:
            accounts.charge(guest, 10)
        accounts.leave(guest)
        accounts.charge(old, 10)
    assert guest.counter <= old.counter + 10


def test_who_is_ahead_is_not_set_back_by_a_pause() -> None:
    """Nor can a tenant wash off what it got by leaving and coming back."""
    counters = Counters()
    a, b = counters.come("a"), counters.come("b")
    counters.charge(a, 1000)
    counters.charge(b, 10)
    counters.leave(a)
    counters.come("a")
    assert counters.order() == ["b", "a"]


def test_an_idle_engine_is_no_time_to_save_up_either() -> None:
    """What a tenant took while nobody else wanted anything is not held against it."""
    counters = Counters()
    a = counters.come("a")
    counters.charge(a, 1000)
    counters.leave(a)
    b = counters.come("b")
    counters.come("a")
    counters.charge(b, 1)
    assert counters.order() == ["a", "b"]


def test_between_equals_the_one_that_was_just_served_goes_second_once() -> None:
    """So a newcomer goes before those in service, and a stream of newcomers does not hold them up."""
    counters = Counters()
    counters.come("flood", now=0)
    counters.tenants.active["flood"].last_turn = 7
    counters.come("first", now=7)
    assert counters.order() == ["first", "flood"]
    counters.come("second", now=8)
    assert counters.order() == ["first", "flood", "second"]


def test_a_new_weight_counts_from_the_next_request_on() -> None:
    weights = {"a": 1.0}
    counters = FairnessCounters(Rules(weight=lambda tenant: weights.get(tenant, 1.0)))
    seq = Sequence(0, [1], 1, scopes_of("a"), 2)
    counters.enter(seq, 0)
    weights["a"] = 5.0
    counters.charge(seq, 10)
    counters.enter(Sequence(1, [1], 1, scopes_of("a"), 2), 0)
    counters.charge(seq, 10)
    account = counters.tenants.active["a"]
    assert (account.counter, counters.tenants.total_weight) == (12.0, 5.0)


def test_places_are_parted_by_weight_and_everyone_has_one() -> None:
    accounts = Accounts(Account)
    big, small = accounts.enter("big", 0, 6.0), accounts.enter("small", 0, 2.0)
    assert [accounts.part_of(account, 8) for account in (big, small)] == [6.0, 2.0]
    assert accounts.part_of(small, 2) == 1.0
    big.num_running, small.num_running = 7, 1
    assert accounts.most_over([big, small], 8) is big
    big.num_running, small.num_running = 6, 2
    assert accounts.most_over([big, small], 8) is None


def test_memory_is_bounded_by_who_is_there() -> None:
    """However many users a tenant invents, and however many tenants come and go."""
    counters = Counters()
    stays = counters.come("a", "stays")
    counters.charge(stays, 5)
    for n in range(5000):
        passer = counters.come("a", f"user {n}")
        counters.charge(passer, 10)
        counters.leave(passer)
        guest = counters.come(f"tenant {n}")
        counters.leave(guest)
    users = counters.tenants.active["a"].users
    assert (len(users.active), len(counters.tenants.active)) == (1, 1)
    assert len(users._past) <= 1000 and len(counters.tenants._past) <= 1000
    counters.leave(stays)
    assert not counters.tenants.active and not counters.tenants._past and not counters.tenants.total_weight


# -- in a loop ---------------------------------------------------------------------------------------------------------


def _served(loop: Loop, steps: int) -> dict[str, int]:
    """Service in the currency of the counters: two for an output token."""
    served: dict[str, int] = {}
    for _ in range(steps):
        prefilling = {seq for seq in loop.live if seq.is_prefilling}
        for chunk in loop.step():
            tenant = chunk.seq.tenant or ""
            served[tenant] = served.get(tenant, 0) + chunk.num_tokens * (1 if chunk.seq in prefilling else 2)
    return served


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("lengths", [{"a": 20, "b": 20}, {"a": 40, "b": 10}])
@pytest.mark.parametrize("max_new", [1, 6])
def test_tenants_of_weights_one_and_two_get_one_and_two_shares(
    slots: int, lengths: dict[str, int], max_new: int
) -> None:
    """While both have work, whatever the length of their prompts and replies."""
    loop = Loop(weight={"a": 1.0, "b": 2.0}.__getitem__, num_blocks=256, max_num_seqs=slots, max_prefill_tokens=20)
    for tenant, length in lengths.items():
        for n in range(20000 // length):
            loop.submit(tenant, [n, *([7] * (length - 1))], max_new)
    served = _served(loop, 600)
    assert all(loop.scheduler.waiting.num_waiting(tenant) for tenant in lengths)
    assert served["b"] / served["a"] == pytest.approx(2.0, rel=0.05)


def test_long_prompts_that_run_share_the_budget() -> None:
    """Not the oldest first: a tenant's ten long prompts would be all that is computed."""
    loop = Loop(num_blocks=2048, max_prefill_tokens=16, max_new_seqs_per_step=8)
    for n in range(8):
        loop.submit("a", text(800, seed=n))
    loop.step()
    for n in range(8):
        loop.submit("b", text(800, seed=50 + n))
    served = _served(loop, 200)
    assert served["a"] == pytest.approx(served["b"], abs=32)


def test_users_of_one_tenant_share_what_it_gets() -> None:
    loop = Loop(num_blocks=512, max_num_seqs=4, max_prefill_tokens=16)
    for n in range(400):
        loop.submit("a", text(12, seed=n), 4, who=Principal("a", "many", "s"))
    for n in range(60):
        loop.submit("a", text(12, seed=1000 + n), 4, who=Principal("a", "few", "s"))
        loop.submit("b", text(12, seed=2000 + n), 4)
    ended: dict[tuple[str | None, str | None], int] = {}
    for _ in range(120):
        for seq in {chunk.seq for chunk in loop.step()} - set(loop.live):
            ended[seq.tenant, seq.user] = ended.get((seq.tenant, seq.user), 0) + 1
    assert ended["a", "many"] == pytest.approx(ended["a", "few"], abs=2)
    assert ended["b", "u"] == pytest.approx(ended["a", "many"] + ended["a", "few"], abs=3)


def test_what_the_cache_saves_is_free() -> None:
    """A tenant with a long shared prompt is charged for what it computes, not for what it sends."""
    loop = Loop(num_blocks=128, max_num_seqs=1, max_prefill_tokens=64)
    shared = list(range(100, 160))
    loop.submit("a", shared)
    loop.run()
    for n in range(60):
        loop.submit("a", [*shared, n, 1, 2, 3])
        loop.submit("b", [n, 5, 6, 7])
    finished: dict[str | None, int] = {}
    for _ in range(60):
        for chunk in loop.step():
            finished[chunk.seq.tenant] = finished.get(chunk.seq.tenant, 0) + 1
    assert abs(finished["a"] - finished["b"]) <= 2


def test_many_prompts_of_one_tenant_do_not_delay_another() -> None:
    loop = Loop(num_blocks=128, max_num_seqs=2, max_prefill_tokens=16)
    for n in range(200):
        loop.submit("a", [n, *([3] * 15)])
    for _ in range(10):
        loop.step()
    late = loop.submit("b", [1] * 16)
    for _ in range(2):
        loop.step()
    assert late not in loop.live
