"""Where contexts begin to be lost: the bound follows the cliff of an engine that says nothing of it."""

from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from loadwise.ledger.residency import (
    BOUND_MAX,
    CALM_SHARE,
    CUT,
    FILL_MIN,
    KEPT_SHARE,
    LOST_SHARE,
    PATIENCE_ROUNDS,
    RAISE,
    RELIEF,
    Residency,
)

N = 20
"""Programs in most of these tests."""


def read(residency: Residency, fill: float, found: float, n_programs: int = N, times: int = 1) -> None:
    """Answers that append a hundredth of the cache each."""
    for _ in range(times):
        residency.read(fill_ratio=fill, found_ratio=found, grown_ratio=0.01, n_programs=n_programs)


def known(bound: float, **more: object) -> Residency:
    """A bound of an engine that has found something once."""
    return Residency(bound_ratio=bound, has_found=True, **more)


def settle(cliff: float, start: float, *, n: int = 8000, seed: int = 0) -> float:
    """The bound after `n` answers of an engine that loses all beyond its cliff, filled about up to the bound."""
    rng, residency = np.random.default_rng(seed), known(start)
    for _ in range(n):
        most = RELIEF * residency.bound_ratio if residency.is_thrashing else residency.bound_ratio
        fill = most * float(rng.uniform(0.9, 1.05))
        read(residency, fill, 0.0 if fill > cliff else 1.0)
    return residency.bound_ratio


@pytest.mark.parametrize("cliff", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("start", [0.7, 0.9])
def test_the_bound_finds_the_cliff_from_either_side(cliff, start):
    """Within a fifth of it, whatever it was believed to be, and hardly ever above."""
    assert 0.8 * cliff < settle(cliff, start) < 1.05 * cliff


def test_rare_losses_are_no_cliff():
    """A program that was away for long has lost its context in a cache with room: one in twenty changes nothing."""
    residency, rng = known(0.8), np.random.default_rng(1)
    for _ in range(2000):
        read(residency, 0.6, float(rng.random() > 0.05))
    assert residency.bound_ratio >= CUT * 0.6


def test_the_cliff_cuts_the_bound_once():
    """All is lost at 0.7: within some ten answers the bound is below that, and waits whether the relief helps."""
    residency = known(0.9)
    read(residency, 0.7, 0.0, times=10)
    assert residency.is_thrashing
    assert residency.bound_ratio == pytest.approx(CUT * 0.7)
    read(residency, 0.7, 0.0, times=PATIENCE_ROUNDS * N - 10)
    assert residency.bound_ratio == pytest.approx(CUT * 0.7)
    read(residency, 0.7, 0.0, times=20)
    assert residency.bound_ratio == pytest.approx(CUT * CUT * 0.7), "it did not"


def test_a_loss_is_blamed_on_the_fullest_moment_of_late():
    """What a relief has already taken out must not bring the bound down to what is left."""
    residency = known(1.0)
    read(residency, 0.95, 1.0)
    read(residency, 0.6, 0.0, times=12)
    assert residency.is_thrashing
    assert residency.bound_ratio > 0.7


def test_relief_is_asked_for_while_it_thrashes_and_nobody_is_let_in():
    """Down to a share of the bound; with hardly a loss in a round and a half it is over."""
    residency = known(0.8)
    assert residency.surplus_ratio(2.0) == 0.0
    assert residency.lets_in(2.0)
    read(residency, 0.8, 0.0, times=10)
    bound = residency.bound_ratio
    assert residency.surplus_ratio(0.8) == pytest.approx(0.8 - RELIEF * bound)
    assert residency.surplus_ratio(RELIEF * bound) == 0.0
    assert not residency.lets_in(FILL_MIN)
    assert residency.lets_in(FILL_MIN - 0.01), "else an engine that has nothing to say would stay shut"
    read(residency, 0.5, 1.0, times=50)
    assert residency.lets_in(0.8)
    assert residency.surplus_ratio(0.8) == 0.0


def test_it_is_calm_again_in_a_cache_that_a_relief_has_nearly_emptied():
    """Few large programs: below the fill at which losses count, what is kept ends the thrash all the same."""
    residency = known(0.6)
    read(residency, 0.6, 0.0, times=10)
    assert residency.is_thrashing
    read(residency, 0.5 * FILL_MIN, 1.0, n_programs=1, times=50)
    assert not residency.is_thrashing


def test_it_does_not_rise_without_evidence():
    """A cache that is half empty says nothing of how much it holds."""
    residency = known(0.8)
    read(residency, 0.5, 1.0, times=5000)
    assert residency.bound_ratio == 0.8


def test_beyond_a_cliff_it_rises_slowly():
    """Where it has fallen once, the next generation of programs must not fall again; but engines change."""
    fresh, burnt = known(0.8), known(0.9)
    read(burnt, 0.8 / CUT, 0.0, times=10)
    assert burnt.bound_ratio == pytest.approx(0.8)
    burnt.lost_share, burnt.is_thrashing = 0.0, False
    for residency in (fresh, burnt):
        read(residency, 0.8, 1.0, times=20)
    assert fresh.bound_ratio - 0.8 == pytest.approx(20 * RAISE * 0.01)
    assert burnt.bound_ratio - 0.8 == pytest.approx(2 * RAISE * 0.01)


def test_an_engine_that_never_tells_what_it_found_is_not_believed():
    """Nothing found, ever: it does not report."""
    residency = Residency(bound_ratio=0.8)
    read(residency, 0.9, 0.0, times=500)
    assert residency == Residency(bound_ratio=0.8)


@given(
    readings=st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.integers(0, 50)), max_size=200),
    start=st.floats(0.1, 1.0),
)
def test_the_bound_stays_a_bound(readings, start):
    """Whatever is read: within its limits, raised on evidence alone, never while it thrashes, never all at once."""
    residency = Residency(bound_ratio=start)
    for fill, found, n_programs in readings:
        before = residency.bound_ratio
        read(residency, fill, found, n_programs)
        assert min(start, CUT * FILL_MIN) - 1e-9 <= residency.bound_ratio <= max(BOUND_MAX, start)
        if residency.bound_ratio > before:
            assert not residency.is_thrashing
            assert residency.lost_share < KEPT_SHARE
            assert residency.bound_ratio - before <= RAISE * 0.01 + 1e-9
        if residency.bound_ratio < before:
            assert residency.is_thrashing
            assert residency.lost_share > LOST_SHARE
        assert residency.is_thrashing <= (residency.lost_share >= CALM_SHARE)
        assert 0.0 <= residency.surplus_ratio(fill) <= fill


@pytest.mark.parametrize("n_programs", [1, 2, 20])
def test_it_recovers_from_an_hour_in_which_all_was_lost(n_programs):
    """However low it has come, and however few programs are under it, what is kept there lets it rise again."""
    residency = known(0.76)
    filled = 0.97 * min(0.95, (n_programs + 0.5) / (n_programs + 1))  # one more would not have fitted
    read(residency, 0.41, 0.0, n_programs, times=300)
    assert residency.bound_ratio <= CUT * 0.41
    for _ in range(30_000):
        read(residency, filled * residency.bound_ratio, 1.0, n_programs)
    assert residency.bound_ratio > 0.76 - 1e-9
    assert n_programs > 2 or residency.bound_ratio < 0.77, "beyond where it began, gaps are no evidence"


def test_losses_from_a_cache_that_is_half_empty_lower_nothing():
    """They have another cause than want of room; but while there are many of them, the bound does not rise either."""
    residency = known(0.4)
    for n in range(1000):
        read(residency, 0.38, float(n % 3 > 0))
    assert residency.bound_ratio == pytest.approx(0.4, abs=0.01)


# --- a cache that thrashes ---


class LruCache:
    """Whole contexts, least recently used first; what is read anew leaves as much again behind, as checkpoints do."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens_by_entry: OrderedDict[tuple[int, str], int] = OrderedDict()

    def turn(self, program: int, tokens: int) -> float:
        """Read a context; the share of it that was found."""
        found = (program, "context") in self.tokens_by_entry
        self.tokens_by_entry[program, "context"] = tokens
        self.tokens_by_entry.move_to_end((program, "context"))
        if not found:
            self.tokens_by_entry[program, "rest"] = tokens
            self.tokens_by_entry.move_to_end((program, "rest"))
        while sum(self.tokens_by_entry.values()) > self.capacity:
            self.tokens_by_entry.popitem(last=False)
        return float(found)


@pytest.mark.parametrize("is_relieved", [True, False])
def test_relief_ends_a_collapse_that_goes_on_without_it(is_relieved):
    """Forty programs fit, and 41 came: back at 38, the engine still loses all unless many pause for a round or two."""
    cache, residency, found = LruCache(40_000), known(1.0), []
    there, paused = list(range(41)), []
    for n in range(4000):
        found.append(cache.turn(there[n % len(there)], 1000))
        fill = len(there) / 40
        read(residency, fill, found[-1], len(there))
        surplus = residency.surplus_ratio(fill) if is_relieved else fill - 38 / 40
        while surplus > 0.0:
            surplus -= 1 / 40
            paused.append(there.pop())
        if is_relieved and paused and residency.lets_in(fill) and (len(there) + 1) / 40 <= residency.bound_ratio:
            there.append(paused.pop())
    assert np.mean(found[41:82]) < 0.5
    assert np.mean(found[-400:]) > 0.95 if is_relieved else np.mean(found[-400:]) < 0.05
    assert len(there) >= 33, "and most of them are back"
