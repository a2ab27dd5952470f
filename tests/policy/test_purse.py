"""No rolling hour costs more than the budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.policy.purse import WINDOW_S, Purse, PurseState

RUNS = st.lists(
    st.tuples(
        st.floats(0.0, 1500.0),  # seconds to the next start
        st.floats(0.0, 3.0),  # promised
        st.floats(0.0, 1.0),  # share of it that is spent
        st.floats(0.0, 6000.0),  # seconds it takes
        st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),  # when within its life it spends
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(RUNS, st.floats(0.1, 8.0))
def test_no_rolling_hour_ever_exceeds_the_budget(runs: list[tuple], budget: float) -> None:
    """Whenever within their lives programs spend what they were promised, and whenever one looks."""
    purse = Purse(budget)
    ends: list[tuple[float, str, float]] = []
    spent: list[tuple[float, float]] = []
    now = 0.0
    for number, (gap, promised, share, takes, moments) in enumerate(runs):
        now += gap
        for end in sorted(end for end in ends if end[0] <= now):
            ends.remove(end)
            assert purse.settle(end[1], end[2], at_s=end[0]) == 0.0
        if purse.promise(str(number), promised, at_s=now):
            cost = promised * share
            ends.append((now + takes, str(number), cost))
            spent += [(now + moment * takes, cost / len(moments)) for moment in moments]
    for at_s, _ in spent:
        within = math.fsum(usd for when, usd in spent if at_s - WINDOW_S < when <= at_s)
        assert within <= budget + 1e-9


@given(RUNS, st.floats(0.1, 8.0))
def test_a_dump_continues_the_same(runs: list[tuple], budget: float) -> None:
    """Promises and what counts of the last hour."""
    purse, now = Purse(budget), 0.0
    for number, (gap, promised, share, _, _) in enumerate(runs):
        now += gap
        if purse.promise(str(number), promised, at_s=now) and number % 2:
            purse.settle(str(number), promised * share, at_s=now)
    other = Purse(budget)
    other.load(purse.dump())
    for later in (0.0, 1800.0, 3599.0, 3600.0, 7300.0):
        assert other.left_usd(at_s=now + later) == purse.left_usd(at_s=now + later)


def test_what_is_refused_changes_nothing() -> None:
    """And an idle hour gives everything back."""
    purse = Purse(1.0)
    assert purse.promise("a", 1.0, at_s=0.0)
    before = purse.dump()
    assert not purse.promise("b", 1e-9, at_s=0.0)
    assert purse.dump() == before
    assert purse.affordable({"free": 0.0, "dear": 0.1}, at_s=0.0) == ["free"]
    purse.settle("a", 1.0, at_s=10.0)
    assert purse.left_usd(at_s=10.0 + WINDOW_S - 1e-6) == 0.0
    assert purse.left_usd(at_s=10.0 + WINDOW_S) == 1.0


def test_an_overspent_promise_is_told_and_counts() -> None:
    """The budget is then gone for longer, not forgotten."""
    purse = Purse(1.0)
    purse.promise("a", 0.5, at_s=0.0)
    assert purse.settle("a", 1.25, at_s=1.0) == 0.75
    assert purse.left_usd(at_s=2.0) == -0.25
    assert not purse.promise("b", 0.0, at_s=2.0)


def test_a_clock_that_goes_back_frees_nothing() -> None:
    """Time stands still until it has caught up."""
    purse = Purse(1.0)
    purse.promise("a", 1.0, at_s=5000.0)
    purse.settle("a", 1.0, at_s=10.0)
    assert purse.left_usd(at_s=20.0) == 0.0
    assert purse.left_usd(at_s=5000.0 + WINDOW_S) == 1.0


def test_nonsense_is_refused() -> None:
    """Amounts, times, programs, dumps."""
    for amount in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError):
            Purse(amount)
        with pytest.raises(Unprocessable):
            Purse(1.0).promise("a", amount, at_s=0.0)
    with pytest.raises(Unprocessable):
        Purse(1.0).left_usd(at_s=math.nan)
    purse = Purse(1.0)
    purse.promise("a", 0.1, at_s=0.0)
    with pytest.raises(LawBroken):
        purse.promise("a", 0.1, at_s=0.0)
    with pytest.raises(LawBroken):
        purse.settle("b", 0.1, at_s=0.0)
    for state in (PurseState(open={"a": -1}, ended=()), PurseState(open={}, ended=((math.nan, 1),))):
        with pytest.raises(SchemaMismatch):
            purse.load(state)


def test_what_ends_within_a_second_is_one_entry_that_counts_in_full() -> None:
    """Until an hour after the last of it; what nobody counted has cost its promise, and time says when room comes."""
    purse = Purse(1.0)
    for name, at_s in (("a", 10.0), ("b", 10.9), ("c", 11.0)):
        purse.promise(name, 0.25, at_s=at_s)
        purse.settle(name, None, at_s=at_s)
    assert len(purse.dump().ended) == 2
    assert purse.spent_usd(at_s=11.0) == 0.75
    assert purse.frees_after_s(0.25, at_s=20.0) == 0.0
    assert purse.frees_after_s(0.5, at_s=20.0) == pytest.approx(WINDOW_S - 9.1)
    assert purse.left_usd(at_s=10.5 + WINDOW_S) == 0.25 and purse.left_usd(at_s=10.9 + WINDOW_S) == 0.75
    purse.promise("open", 1.0, at_s=8000.0)
    assert purse.frees_after_s(0.5, at_s=8000.0) is None
    purse.spend(0.5, at_s=8000.0)
    assert purse.left_usd(at_s=8000.0) == -0.5 and purse.promised_usd == 1.0
