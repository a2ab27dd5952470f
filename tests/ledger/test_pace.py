"""How many programs are worth having where time is limited."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loadwise.ledger.pace import LEAN, MEMORY_S, Pace, in_time_per_s


def paced(a: float, b: float, counts, *, at_s: float = 0.0) -> Pace:
    """A pace that has seen t(n) = a + b n at these numbers of programs."""
    pace = Pace()
    for i, n in enumerate(counts):
        pace.read(n_programs=n, cycle_s=a + b * n, at_s=at_s + 0.1 * i)
    return pace


def test_the_line_is_found_where_numbers_differ():
    """Least squares over recent answers."""
    pace = paced(5.0, 0.5, [5 + i % 40 for i in range(1000)])
    for n in (5, 20, 60):
        assert pace.cycle_s(n) == pytest.approx(5.0 + 0.5 * n, rel=0.06)


def test_where_numbers_do_not_differ_it_leans_on_a_quarter():
    """At one n only: fewer programs would be somewhat faster, more somewhat slower."""
    pace = paced(10.0, 0.0, [20] * int(10 * LEAN))
    assert pace.cycle_s(20) == pytest.approx(10.0)
    assert pace.cycle_s(10) == pytest.approx(8.75)
    assert pace.cycle_s(40) == pytest.approx(12.5)


def test_a_slow_hour_is_forgotten_by_time():
    """One answer after a pause outweighs hundreds before it: nothing is known anew, and nobody is kept out."""
    pace = paced(100.0, 0.0, [20] * 200)
    pace.learn_end(10)
    for _ in range(5):
        pace.learn_end(10)
    assert pace.is_known
    pace.read(n_programs=1, cycle_s=5.0, at_s=30.0 + 5 * MEMORY_S)
    assert not pace.is_known
    assert pace.cycle_s(1) < 70.0


def test_more_programs_are_worth_it_until_they_run_out_of_time():
    """Turns of 20 to 60 at t(n) = 5 + 0.1 n within 900 s: few programs all end in time, many hardly any."""
    pace = paced(5.0, 0.1, [10 + i % 80 for i in range(1000)])
    for n in range(20, 61, 2):
        pace.learn_end(n)
    worth = [pace.is_worth_one_more(n, [], 900.0) for n in range(1, 300)]
    assert worth[0] and worth[8]
    assert not any(worth[100:])


def test_without_a_limit_in_reach_one_more_is_worth_it_as_long_as_the_engine_scales():
    """No program comes near the budget: only saturation speaks against one more."""
    scales, saturated = (paced(a, b, [10 + i % 20 for i in range(1000)]) for a, b in ((30.0, 0.1), (0.5, 2.0)))
    for pace in (scales, saturated):
        for _ in range(10):
            pace.learn_end(5)
    assert scales.is_worth_one_more(20, [], 1e6)
    assert not saturated.is_worth_one_more(20, [], 1e6)


@given(
    n=st.integers(1, 200),
    cycle_s=st.floats(0.01, 1e4),
    turns=st.lists(st.floats(1.0, 1e3), min_size=1, max_size=30),
    running=st.lists(st.floats(0.0, 1e3), max_size=30),
    budget_s=st.floats(1.0, 1e5),
)
def test_no_more_end_in_time_than_run(n, cycle_s, turns, running, budget_s):
    """g(n) is a rate: not negative, and more time lets no smaller share of them end."""
    rate = in_time_per_s(n, cycle_s, turns, running, budget_s)
    assert 0.0 <= rate <= 2 * n / (min(min(turns), budget_s / cycle_s) * cycle_s) * (1 + 1e-9)
    assert in_time_per_s(2 * n, cycle_s, turns, running, budget_s) == pytest.approx(2 * rate)
