"""The bound on what diverts give up holds at every moment, whatever comes in which order."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loadwise.router.forgone import MEMORY, Forgone

shares = st.floats(0.0, 1.0)
steps = st.lists(st.tuples(shares, st.floats(-1.0, 1.0)), max_size=80)


@given(steps=steps, most=shares)
def test_what_is_given_up_never_exceeds_its_share(steps, most):
    """Each program is routed, then diverted if the bound allows; neither a gain nor time ever makes room beyond it."""
    forgone = Forgone()
    for success, gap in steps:
        forgone.learn_routed(success)
        if forgone.allows(gap, most):
            forgone.learn_diverted(gap)
        assert 0.0 <= forgone.given_up <= most * forgone.expected + 1e-9


@given(steps=steps)
def test_a_gain_is_always_allowed_and_buys_nothing(steps):
    """A move to a better model is no sacrifice, and leaves the account as it was."""
    forgone = Forgone()
    for success, gap in steps:
        forgone.learn_routed(success)
        before = forgone.given_up
        assert forgone.allows(-abs(gap), 0.0)
        forgone.learn_diverted(-abs(gap))
        assert forgone.given_up == before


def test_a_calm_day_is_no_licence_for_the_rush_after_it():
    """However many programs came before, the sum of what was expected stays that of `MEMORY` programs."""
    forgone = Forgone()
    for _ in range(10_000):
        forgone.learn_routed(0.5)
    assert forgone.expected == pytest.approx(0.5 * MEMORY)
    n_diverts = 0
    while forgone.allows(0.25, 0.2):
        forgone.learn_diverted(0.25)
        n_diverts += 1
    assert n_diverts == int(0.2 * 0.5 * MEMORY / 0.25)


@given(steps=steps, most=shares, n_started=st.integers(0, 80))
def test_who_never_starts_leaves_the_bound_where_it_was(steps, most, n_started):
    """Those that go without having started take with them what is left of theirs, however many came after them."""
    forgone, routed = Forgone(), []
    for success, gap in steps:
        forgone.learn_routed(success)
        gap = gap if forgone.allows(gap, most) else 0.0
        forgone.learn_diverted(gap)
        routed.append((success, gap, forgone.n_routed))
    kept = Forgone()
    for success, gap, number in routed:
        kept.learn_routed(success if number <= n_started else 0.0)
        kept.learn_diverted(gap if number <= n_started else 0.0)
    for success, gap, number in routed[n_started:]:
        forgone.take_back(success, gap, number)
    assert forgone.expected == pytest.approx(kept.expected, abs=1e-9)
    assert forgone.given_up == pytest.approx(kept.given_up, abs=1e-9)


def test_nothing_is_given_up_before_anything_was_expected():
    """The share of nothing is none."""
    assert Forgone().ratio == 0.0 and not Forgone().allows(0.1, 1.0) and Forgone().allows(0.0, 0.0)
