"""Properties of the drain of a line: who is let in when, as the gate would do it."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from departures import Departures
from hypothesis import given, settings

from loadwise.ledger.drain import Crowd, Drain, Gate, Lives, Newcomer
from loadwise.ledger.forecast import span_of

CAPACITY = 400_000.0


def drain(ages, *, gate, left_s=math.inf, budget_s=math.inf, prior=22_600.0, ended=(), n_most=40, extra=3000.0):
    """A drain of programs whose contexts grow by 40 tokens a second in a cache of 400 000."""
    ages = np.asarray(ages, dtype=np.float64)
    n = len(ages)
    lives = Lives([prior], list(ended), ages.tolist())
    crowd = Crowd(ages, np.full(n, left_s), np.full(n, extra / CAPACITY), np.full(n, 1.0 / CAPACITY))
    return Drain(crowd, lives, Newcomer(1500.0, 40.0, budget_s, extra / CAPACITY, 1.0 / CAPACITY), gate, n_most)


PEAKS = Gate(limit=0.85, sum_peaks=22_600.0 * 5, n_peaks=5, doubt=0.1)
AHEAD = Gate(limit=0.6, looks_ahead=True, doubt=0.2)
gates = st.sampled_from([PEAKS, AHEAD, AHEAD._replace(n_missing=2.0)])
tokens = st.lists(st.floats(0.0, 1e6), max_size=40)


@settings(deadline=None)
@given(
    ages=tokens,
    ended=tokens,
    gate=gates,
    left_s=st.sampled_from([0.0, 50.0, math.inf]),
    budget_s=st.sampled_from([900.0, math.inf]),
    leave_per_s=st.floats(0.0, 0.1),
)
def test_waits_are_finite_rise_with_the_line_and_lie_in_their_interval(
    ages, ended, gate, left_s, budget_s, leave_per_s
):
    """Law: never negative, never NaN, low <= middle <= high, and who stands further behind never waits less."""
    found = drain(ages, gate=gate, left_s=left_s, budget_s=budget_s, ended=ended)
    spans = [span_of(found, n, leave_per_s) for n in (0, 1, 5, 20, 40)]
    for span in spans:
        assert 0.0 <= span.low_s <= span.middle_s <= span.high_s < math.inf
    middles = [span.middle_s for span in spans]
    assert middles == sorted(middles)


@given(n_places=st.integers(2, 30), run_s=st.floats(10.0, 5000.0), data=st.data())
def test_equal_runs_depart_when_they_must(n_places, run_s, data):
    """Programs that all run equally long, begun at even intervals: the forecast is their timetable."""
    elapsed_s = [(i + 0.5) * run_s / n_places for i in range(n_places)]
    n_ahead = data.draw(st.integers(0, n_places - 1))
    wait_s = Departures(elapsed_s, [run_s] * 200, n_places).wait_s(n_ahead)
    assert wait_s == pytest.approx((n_ahead + 0.5) * run_s / n_places, abs=0.12 * run_s + 0.5 * run_s / n_places)


def test_a_budget_empties_the_room_at_its_end():
    """Programs that live longer than their budget leave all at once when it is used up, and the line starts then."""
    found = drain([5000.0] * 30, gate=PEAKS, left_s=300.0, budget_s=900.0, prior=500_000.0)
    assert found.wait_s(0, 0.0) == pytest.approx(300.0, rel=0.15)
    assert found.wait_s(8, 0.0) == pytest.approx(300.0, rel=0.15)


def test_one_departure_may_open_several_places_or_none():
    """Where those who leave hold more than a newcomer reserves the line starts sooner than by one departure each; where
    contexts have outgrown the room, later."""
    many = PEAKS._replace(sum_peaks=22_600.0 * 500, n_peaks=500)
    large = drain([200_000.0] + [2000.0] * 5, gate=many, ended=[201_000.0] * 200 + [20_000.0] * 400)
    assert large.wait_s(4, 0.0) < 40.0  # one leaves, five start
    over = drain([20_000.0] * 24, gate=AHEAD, ended=[20_500.0] * 40)
    missing = drain([20_000.0] * 24, gate=AHEAD._replace(n_missing=12.0), ended=[20_500.0] * 40)
    assert missing.wait_s(4, 0.0) >= over.wait_s(4, 0.0) > 0.0


def test_those_who_leave_the_line_make_it_shorter():
    """Diverts and cancels count as well as departures do."""
    found = drain([10_000.0] * 28, gate=PEAKS)
    assert span_of(found, 20, 0.01).middle_s < span_of(found, 20).middle_s


def test_old_programs_leave_sooner_than_young_ones():
    """Contexts that are nearly at their peaks: the same number of programs, a shorter wait."""
    ended = [20_000.0] * 60
    old, young = (drain([age] * 28, gate=PEAKS, ended=ended).wait_s(2, 0.0) for age in (19_000.0, 2000.0))
    assert old < 0.3 * young


def test_lives_hear_of_those_that_have_not_ended():
    """Kaplan and Meier: programs that run longer than any that ended make lives longer; priors wear off."""
    assert Lives([], [100.0] * 5, [300.0] * 20).mean > 2.0 * Lives([], [100.0] * 5, []).mean
    assert Lives([1000.0], [100.0] * 200, []).mean == pytest.approx(100.0, rel=0.15)
    assert Lives([1000.0], [], []).mean == pytest.approx(1000.0, rel=0.15)


def test_an_unknown_clock_stretches_every_interval():
    """With a prior alone a long line is known within a factor of two at best; with two hundred lives much better."""
    young, old = drain([10_000.0] * 28, gate=PEAKS), drain([10_000.0] * 28, gate=PEAKS, ended=[22_000.0] * 200)
    wide, narrow = span_of(young, 40), span_of(old, 40)
    assert wide.high_s / wide.low_s > 2.0
    assert narrow.high_s / narrow.low_s < wide.high_s / wide.low_s
    assert young.doubt > old.doubt


@pytest.mark.parametrize("gate", [PEAKS, AHEAD])
def test_who_begins_larger_than_anybody_ever_was_still_has_a_place(gate):
    """Its chance to be there when it begins is one, however unheard-of it is."""
    lives = Lives([1000.0], [], [500.0])
    crowd = Crowd(np.array([500.0]), np.array([math.inf]), np.zeros(1), np.full(1, 1e-3))
    found = Drain(crowd, lives, Newcomer(1e8, 40.0, math.inf, 0.0, 1e-3), gate, 3)
    for n_ahead in range(3):
        assert math.isfinite(found.wait_s(n_ahead, 0.0))
