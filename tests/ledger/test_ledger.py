"""Reservations: check, then act; one account per backend, in its own unit."""

import copy

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.pool import CapacityUnit
from loadwise.ledger.demand import Demand
from loadwise.ledger.ledger import RATE_WINDOW_S, Ledger

KV, SLOTS, RPM = CapacityUnit.KV_TOKENS, CapacityUnit.SLOTS, CapacityUnit.REQUESTS_PER_MINUTE


def ledger(unit=KV, capacity=1000):
    """A ledger with one account, `a`."""
    made = Ledger(admission_ratio=0.85)
    made.add("a", unit, capacity)
    return made


def test_admission_stops_at_its_share_of_the_tokens():
    """850 of 1000 fit, 851 do not; a refused reservation changes nothing (law L4)."""
    made = ledger()
    assert made.reserve("p", "a", 1, at_s=0.0)
    assert not made.reserve("q", "a", 850, at_s=0.0)
    assert made.headroom("a", at_s=0.0) == 999 and not made.holds("q", "a")
    assert made.reserve("q", "a", 849, at_s=0.0)


@pytest.mark.parametrize("unit", [SLOTS, RPM])
def test_slots_and_requests_are_used_up_whole(unit):
    """The admission ratio is about tokens only."""
    made = ledger(unit, 2)
    assert [made.reserve(name, "a", 1, at_s=0.0) for name in "pqr"] == [True, True, False]


@pytest.mark.parametrize("unit", [KV, SLOTS, RPM])
def test_asking_changes_nothing(unit):
    """Headroom is read at any later instant, by anybody, and the account stays as events have made it."""
    made = ledger(unit, 3)
    for n in range(3):
        made.reserve(f"p{n}", "a", 1, at_s=20.0 * n)
    before = copy.deepcopy(made.account_by_backend["a"])
    for at_s in (10.0, 59.0, 60.0, 99.0, 1e6):
        made.headroom("a", at_s=at_s), made.headroom_ratio("a", at_s=at_s)
        made.fits("a", 1, at_s=at_s), made.frees_at_s("a", at_s=at_s)
    assert made.account_by_backend["a"] == before
    if unit is RPM:
        assert [made.headroom("a", at_s=at_s) for at_s in (59.9, 60.0, 80.0, 100.0)] == [0, 1, 2, 3]
        assert [made.frees_at_s("a", at_s=at_s) for at_s in (59.9, 60.0, 99.0, 100.0)] == [60.0, 80.0, 100.0, None]


def test_empty_account_admits_anything():
    """Or what is larger than the limit would wait for ever."""
    made = ledger()
    assert made.reserve("p", "a", 5000, at_s=0.0)
    assert made.headroom("a", at_s=0.0) == -4000
    assert made.headroom_ratio("a", at_s=0.0) < 0


def test_growth_may_pass_the_limit():
    """Nothing is evicted; only admission stops."""
    made = ledger()
    made.reserve("p", "a", 100, at_s=0.0)
    assert made.extend("p", "a", 2000) == 1900
    assert not made.fits("a", 0 + 1, at_s=0.0)
    assert made.extend("p", "a", 50) == -1950
    assert made.fits("a", 800, at_s=0.0)


def test_requests_stay_spent_for_a_minute():
    """Released or not; the oldest leaves exactly 60 s after its grant."""
    made = ledger(RPM, 1)
    made.reserve("p", "a", 1, at_s=10.0)
    made.release("p", "a")
    assert made.frees_at_s("a", at_s=10.0) == 10.0 + RATE_WINDOW_S
    assert not made.fits("a", 1, at_s=69.9) and made.fits("a", 1, at_s=70.0)
    assert made.frees_at_s("a", at_s=70.0) is None


def test_headroom_ratio_is_a_share_of_the_admission_limit():
    """1 when empty, 0 when admission has stopped."""
    made = ledger()
    assert made.headroom_ratio("a", at_s=0.0) == 1.0
    made.reserve("p", "a", 850, at_s=0.0)
    assert made.headroom_ratio("a", at_s=0.0) == 0.0


@pytest.mark.parametrize(
    ("act", "law"),
    [
        (lambda made: made.reserve("p", "a", 1, at_s=0.0), "L5"),
        (lambda made: made.reserve("q", "a", -1, at_s=0.0), "L4"),
        (lambda made: made.add("a", SLOTS, 4), "L4"),
    ],
)
def test_misuse_is_a_bug_of_ours(act, law):
    """A second reservation, a negative one, another unit under live ones."""
    made = ledger()
    made.reserve("p", "a", 10, at_s=0.0)
    with pytest.raises(LawBroken, match=law):
        act(made)
    made.check()


def test_account_takes_a_new_capacity_and_an_empty_one_a_new_unit():
    """What is reserved stays."""
    made = ledger()
    made.reserve("p", "a", 10, at_s=0.0)
    made.add("a", KV, 500)
    assert made.headroom("a", at_s=0.0) == 490
    made.release("p", "a")
    made.add("a", SLOTS, 4)
    assert made.unit("a") is SLOTS and made.limit("a") == 4


def test_check_sees_a_sum_that_is_wrong():
    """The account is added up, not believed."""
    made = ledger()
    made.reserve("p", "a", 10, at_s=0.0)
    made.account_by_backend["a"].reserved = 9
    with pytest.raises(LawBroken, match="L4"):
        made.check()


def test_removed_account_is_gone():
    """Releasing from it is no error: the backend went first."""
    made = ledger()
    made.reserve("p", "a", 10, at_s=0.0)
    made.remove("a")
    made.release("p", "a")
    assert not made.holds("p", "a")


@settings(deadline=None, derandomize=True)
@given(prior=st.integers(1, 10**6), peaks=st.lists(st.integers(0, 10**6), max_size=30))
def test_demand_is_a_mean_with_a_prior_worth_five(prior, peaks):
    """(5 c0 + sum of peaks) / (5 + n), rounded (ORACLE, B.2)."""
    demand = Demand(prior_tokens=prior)
    for peak in peaks:
        demand.learn(peak)
    assert demand.expected_tokens == round((5 * prior + sum(peaks)) / (5 + len(peaks)))


class Accounts(RuleBasedStateMachine):
    """Any course of reservations agrees with a list of promises, and ends at exactly zero."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(admission_ratio=0.85)
        self.units = {"kv": (KV, 1000), "slots": (SLOTS, 3), "rpm": (RPM, 2)}
        for name, (unit, capacity) in self.units.items():
            self.ledger.add(name, unit, capacity)
        self.held = {}
        self.grants = []
        self.now_s = 0.0
        self.n = 0

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.9, 60.0]))
    def pass_time(self, seconds):
        self.now_s += seconds

    @rule(backend=st.sampled_from(["kv", "slots", "rpm"]), amount=st.integers(0, 1500))
    def reserve(self, backend, amount):
        unit, capacity = self.units[backend]
        amount = amount if unit is KV else 1
        mine = [a for (_, b), a in self.held.items() if b == backend]
        if unit is RPM:
            expected = sum(1 for at_s in self.grants if at_s + RATE_WINDOW_S > self.now_s) < capacity
        else:
            limit = 850 if unit is KV else capacity
            expected = not mine or sum(mine) + amount <= limit
        self.n += 1
        assert self.ledger.fits(backend, amount, at_s=self.now_s) == expected
        assert self.ledger.reserve(f"k{self.n}", backend, amount, at_s=self.now_s) == expected
        if expected:
            self.held[f"k{self.n}", backend] = amount
            if unit is RPM:
                self.grants.append(self.now_s)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), amount=st.integers(0, 3000))
    def extend(self, data, amount):
        key, backend = data.draw(st.sampled_from(sorted(self.held)))
        if self.units[backend][0] is KV:
            assert self.ledger.extend(key, backend, amount) == amount - self.held[key, backend]
            self.held[key, backend] = amount

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        key, backend = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[key, backend]
        self.ledger.release(key, backend)

    @invariant()
    def headroom_is_capacity_minus_what_is_reserved(self):
        self.ledger.check()
        for name in ("kv", "slots"):
            reserved = sum(a for (_, b), a in self.held.items() if b == name)
            assert self.ledger.headroom(name, at_s=self.now_s) == self.units[name][1] - reserved
        assert all(self.ledger.holds(key, backend) for key, backend in self.held)

    def teardown(self):
        for key, backend in sorted(self.held):
            self.ledger.release(key, backend)
        assert all(not a.amount_by_key and a.reserved == 0 for a in self.ledger.account_by_backend.values())


Accounts.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestAccounts = Accounts.TestCase
