"""Where contexts begin to be lost: the bound follows the cliff of an engine that says nothing of it."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from loadwise.ledger.residency import BELOW_LOSS, BOUND_MAX, FILL_MIN, LOST_SHARE, NEAR, Residency


def settle(cliff: float, start: float, *, n: int = 4000, seed: int = 0) -> float:
    """The bound after `n` answers of an engine that loses all beyond its cliff, filled about up to the bound."""
    rng, residency = np.random.default_rng(seed), Residency(bound_ratio=start)
    residency.read(fill_ratio=0.1, found_ratio=1.0, grown_ratio=0.01, n_programs=20)
    for _ in range(n):
        fill = residency.bound_ratio * float(rng.uniform(0.9, 1.05))
        residency.read(fill_ratio=fill, found_ratio=0.0 if fill > cliff else 1.0, grown_ratio=0.01, n_programs=20)
    return residency.bound_ratio


@pytest.mark.parametrize("cliff", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("start", [0.7, 0.9])
def test_the_bound_finds_the_cliff_from_either_side(cliff, start):
    """Within a tenth of it, whatever it was believed to be."""
    assert settle(cliff, start) == pytest.approx(cliff, rel=0.1)


def test_rare_losses_are_no_cliff():
    """A program that was away for long has lost its context in a cache with room: one in twenty costs a tenth."""
    residency, rng = Residency(bound_ratio=0.8), np.random.default_rng(1)
    for _ in range(2000):
        residency.read(fill_ratio=0.6, found_ratio=float(rng.random() > 0.05), grown_ratio=0.01, n_programs=20)
    assert residency.bound_ratio >= 0.9 * 0.8 - 1e-9


def test_it_falls_within_some_twenty_answers_and_not_below_what_was_too_much():
    """All is lost at 0.7: the bound ends just below that."""
    residency = Residency(bound_ratio=0.9)
    residency.read(fill_ratio=0.5, found_ratio=1.0, grown_ratio=0.01, n_programs=20)
    for _ in range(25):
        residency.read(fill_ratio=0.7, found_ratio=0.0, grown_ratio=0.01, n_programs=20)
    assert residency.bound_ratio == pytest.approx(BELOW_LOSS * 0.7)


def test_it_does_not_rise_without_evidence():
    """A cache that is half empty says nothing of how much it holds."""
    residency = Residency(bound_ratio=0.8)
    for _ in range(5000):
        residency.read(fill_ratio=0.5, found_ratio=1.0, grown_ratio=0.01, n_programs=20)
    assert residency.bound_ratio == 0.8


def test_an_engine_that_never_tells_what_it_found_is_not_believed():
    """Nothing found, ever: it does not report."""
    residency = Residency(bound_ratio=0.8)
    for _ in range(500):
        residency.read(fill_ratio=0.9, found_ratio=0.0, grown_ratio=0.01, n_programs=20)
    assert residency == Residency(bound_ratio=0.8)


@given(readings=st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0)), max_size=200))
def test_the_bound_stays_a_bound(readings):
    """Whatever is read, it stays between what is below any loss that counts and `BOUND_MAX`."""
    residency = Residency(bound_ratio=0.8)
    for fill, found in readings:
        before = residency.bound_ratio
        residency.read(fill_ratio=fill, found_ratio=found, grown_ratio=0.01, n_programs=20)
        assert BELOW_LOSS * FILL_MIN - 1e-9 <= residency.bound_ratio <= BOUND_MAX
        if residency.bound_ratio > before:
            assert fill >= NEAR * before and residency.lost_share < LOST_SHARE


@pytest.mark.parametrize("n_programs", [1, 2, 20])
def test_it_recovers_from_an_hour_in_which_all_was_lost(n_programs):
    """However low it has come, and however few programs are under it, what is kept there lets it rise again."""
    residency = Residency(bound_ratio=0.76)
    residency.read(fill_ratio=0.7, found_ratio=1.0, grown_ratio=0.01, n_programs=n_programs)
    filled = 0.97 * min(0.95, (n_programs + 0.5) / (n_programs + 1))  # one more would not have fitted
    for _ in range(300):
        residency.read(fill_ratio=0.41, found_ratio=0.0, grown_ratio=0.01, n_programs=n_programs)
    assert residency.bound_ratio == pytest.approx(BELOW_LOSS * 0.41)
    for _ in range(3000):
        fill = filled * residency.bound_ratio
        residency.read(fill_ratio=fill, found_ratio=1.0, grown_ratio=0.01, n_programs=n_programs)
    assert residency.bound_ratio > 0.76 - 1e-9
    assert n_programs > 2 or residency.bound_ratio < 0.77, "beyond where it began, gaps are no evidence"


def test_losses_from_a_cache_that_is_half_empty_lower_nothing():
    """They have another cause than want of room; but while there are many of them, the bound does not rise either."""
    residency = Residency(bound_ratio=0.4)
    residency.read(fill_ratio=0.5, found_ratio=1.0, grown_ratio=0.0, n_programs=20)
    for n in range(1000):
        residency.read(fill_ratio=0.38, found_ratio=float(n % 3 > 0), grown_ratio=0.01, n_programs=20)
    assert residency.bound_ratio == pytest.approx(0.4, abs=0.01)
