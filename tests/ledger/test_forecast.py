"""Forecasts, allowances and footprints: what is learned of demand, and how well."""

import heapq

import hypothesis.strategies as st
import numpy as np
import pytest
from departures import Departures
from hypothesis import given

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.pool import CapacityUnit
from loadwise.ledger.demand import Demand
from loadwise.ledger.footprint import projected
from loadwise.ledger.forecast import Errors, Span, mean_wait_s
from loadwise.ledger.ledger import SHARE, Ledger
from loadwise.ledger.overhead import OVERHEAD_MAX_TOKENS, Overhead

KV = CapacityUnit.KV_TOKENS


def test_the_papers_point_forecast():
    """w = (q + 1) D / max(K, 1): 23.8 s and 261.6 s at K = 27, D = 642 s (ORACLE, B.2)."""
    assert mean_wait_s(0, 27, 642.0) == pytest.approx(23.78, abs=0.01)
    assert mean_wait_s(10, 27, 642.0) == pytest.approx(261.6, abs=0.1)
    assert mean_wait_s(3, 0, 100.0) == 400.0


def test_means_start_from_five_observations():
    """Peaks and run times both; the last ones are kept, and no more."""
    demand = Demand(prior_tokens=1000, prior_run_s=100.0)
    for _ in range(5):
        demand.learn(3000)
        demand.learn_run(300.0)
    assert (demand.expected_tokens, demand.expected_run_s) == (2000, 200.0)
    for n in range(1000):
        demand.learn(n)
        demand.learn_run(float(n))
    assert (len(demand.recent_peaks), len(demand.recent_runs_s)) == (256, 256)
    assert demand.recent_peaks[-1] == 999


def realised_wait_s(rng, elapsed_s, runs_s, n_ahead):
    """What really happens: residual lives by their own distribution, every departure replaced at once."""
    ends = []
    for e in elapsed_s:
        longer = runs_s[runs_s > e]
        ends.append(rng.choice(longer) - e if len(longer) else 1.0)
    now_s, left = 0.0, 0
    while left <= n_ahead:
        first = int(np.argmin(ends))
        now_s = ends[first]
        left += 1
        ends[first] = now_s + rng.choice(runs_s)
    return now_s


@pytest.mark.parametrize("n_ahead", [0, 4, 20, 60])
def test_departures_are_forecast_within_a_factor_of_two(n_ahead):
    """From elapsed times: for four departures ahead and more at least 80 % of points are that good."""
    rng = np.random.default_rng(3)
    runs_s = rng.gamma(6.0, 100.0, 400)
    n_good = 0
    for _ in range(100):
        elapsed_s = rng.uniform(0.0, 500.0, 25)
        forecast_s = Departures(elapsed_s.tolist(), runs_s.tolist(), n_ahead).wait_s(n_ahead)
        real_s = realised_wait_s(rng, elapsed_s, runs_s, n_ahead)
        n_good += real_s / 2 <= forecast_s <= real_s * 2
    assert n_good >= (80 if n_ahead >= 4 else 40)


def test_elapsed_times_see_what_a_mean_does_not():
    """Ten programs that have nearly ended leave sooner than ten that have just begun; the mean is the same."""
    runs_s = [95.0, 100.0, 105.0]
    old, young = Departures([90.0] * 10, runs_s, 0), Departures([1.0] * 10, runs_s, 0)
    assert old.wait_s(0) < 12.0 < 80.0 < young.wait_s(0)
    assert mean_wait_s(0, 10, 100.0) == 10.0


@given(
    elapsed_s=st.lists(st.floats(0.0, 5000.0), max_size=40),
    runs_s=st.lists(st.floats(0.1, 2000.0), min_size=1, max_size=40),
    n_most=st.integers(0, 200),
)
def test_forecasts_are_finite_and_rise_with_the_line(elapsed_s, runs_s, n_most):
    """Whatever the past: a longer line never waits less."""
    departures = Departures(elapsed_s, runs_s, n_most)
    waits_s = [departures.wait_s(n) for n in sorted({0, n_most // 2, n_most})]
    assert all(0.0 <= wait_s < 1e9 for wait_s in waits_s)
    assert waits_s == sorted(waits_s)


def test_intervals_become_as_wide_as_errors_are():
    """After some hundred independent waits, whatever the error's distribution: 75 to 85 % of later ones."""
    rng = np.random.default_rng(5)
    said = Span(middle_s=100.0, low_s=60.0, high_s=170.0)
    for off, spread in ((0.0, 0.3), (0.7, 0.5), (-0.4, 0.8)):
        errors, n_covered = Errors(), 0
        for n in range(2000):
            realised_s = 100.0 * float(np.exp(rng.normal(off, spread)))
            forecast = errors.corrected(said)
            if n >= 500:
                n_covered += forecast.low_s <= realised_s <= forecast.high_s
            errors.learn(said, realised_s=realised_s)
        assert 0.75 <= n_covered / 1500 <= 0.87


def queue_waits(seed, *, n_places, n_flight, n_programs, prior_ratio=1.0):
    """(covered, point within a factor of two or None) of every wait in a synthetic queue.

    A closed loop of so many programs before so many places, run times from a gamma of shape 4; the forecaster begins
    with a prior that may be wrong, and hears of a wait when it is over.
    """
    rng = np.random.default_rng(seed)
    now_s, running, line, began_s, found = 0.0, [], [], {}, []
    demand, errors, n = Demand(prior_tokens=1, prior_run_s=600.0 * prior_ratio), Errors(), 0

    def start(i):
        began_s[i] = now_s
        heapq.heappush(running, (now_s + rng.gamma(4.0, 150.0), i))

    while n < n_flight or running:
        if n >= n_flight:
            now_s, ended = heapq.heappop(running)
            demand.learn_run(now_s - began_s.pop(ended))
            if line:
                i, since_s, said, place = line.pop(0)
                wait_s = now_s - since_s
                near = said.wait_s / 2 <= wait_s <= 2 * said.wait_s
                found.append((said.low_s <= wait_s <= said.high_s, near if place >= 4 else None))
                errors.learn(said.base, realised_s=wait_s)
                start(i)
        if n < n_programs:
            n += 1
            if len(running) < n_places and not line:
                start(n)
            else:
                elapsed_s = [now_s - at_s for at_s in began_s.values()]
                departures = Departures(elapsed_s, demand.recent_runs_s, len(line), demand.prior_run_s)
                line.append((n, now_s, errors.corrected(departures.span(len(line))), len(line)))
    return found


@pytest.mark.parametrize("prior_ratio", [1.0, 0.6])
def test_the_interval_covers_80_percent_of_a_queues_waits(prior_ratio):
    """Law: over seeds of runs as short as 108 programs 75 to 85 % of waits lie inside, and of those with four
    departures ahead 80 % of points and more are within a factor of two, or 70 % where the prior is off by 40 %."""
    sizes = ({"n_places": 20, "n_flight": 32}, {"n_places": 12, "n_flight": 32}, {"n_places": 27, "n_flight": 64})
    runs = [queue_waits(seed, **sizes[seed % 3], n_programs=108, prior_ratio=prior_ratio) for seed in range(18)]
    waits = [wait for run in runs for wait in run]
    far = [near for _, near in waits if near is not None]
    assert 0.75 <= sum(covered for covered, _ in waits) / len(waits) <= 0.85
    assert sum(far) / len(far) >= (0.8 if prior_ratio == 1.0 else 0.7)


def test_a_long_line_is_not_known_better_than_the_mean_run_time():
    """By chance alone a hundred departures would be known within a few per cent; all share what is unknown of D."""
    young = Departures([100.0] * 20, [300.0, 600.0, 900.0], 100).span(100)
    old = Departures([100.0] * 20, [300.0, 600.0, 900.0] * 80, 100).span(100)
    assert young.high_s / young.low_s > 2.0 > old.high_s / old.low_s > 1.2


def test_the_first_to_end_are_the_short_ones():
    """Twenty that have run longer than any that ended say that runs are long: Kaplan and Meier, not a mean."""
    ended = [100.0, 110.0, 120.0]
    assert Departures([500.0] * 20, ended, 40).wait_s(40) > 1.3 * Departures([1.0] * 20, ended, 40).wait_s(40)


def test_an_allowance_is_identifiable_only_below_saturation():
    """Usage = tokens / capacity + a constant: found; a saturated pool clamps at what was known (ORACLE, B.2)."""
    calm, full = Overhead(), Overhead()
    for n in range(400):
        n_running = 5 + n % 10
        tokens = 10_000 * n_running
        usage = (tokens + 3200 * n_running) / 400_000
        calm.read(kv_usage_ratio=usage, n_running=n_running, tokens=tokens, capacity=400_000, n_preemptions=0.0)
        full.read(kv_usage_ratio=1.0, n_running=60, tokens=700_000, capacity=400_000, n_preemptions=float(n))
    assert calm.tokens == pytest.approx(3200, rel=0.03)
    assert full.tokens == 0
    assert full.calibrated() is None


def test_a_plain_estimator_is_clamped_by_a_saturated_pool():
    """Believing a full cache, whose calls want more than there is, unlearns what was right (ORACLE, B.2)."""
    plain, careful = Overhead(start_tokens=3000, reads_saturated=True), Overhead(start_tokens=3000)
    for n in range(400):
        for one in (plain, careful):
            one.read(kv_usage_ratio=1.0, n_running=60, tokens=700_000, capacity=400_000, n_preemptions=float(n))
    assert (plain.tokens, careful.tokens) == (0, 3000)


def test_a_preempting_engine_teaches_nothing():
    """Its usage belongs to requests that are no longer there."""
    overhead = Overhead()
    for n in range(50):
        overhead.read(kv_usage_ratio=0.5, n_running=5, tokens=1000, capacity=100_000, n_preemptions=float(n))
    assert overhead.n_read <= 1


@given(st.floats(1e3, 1e6), st.floats(0.0, 6000.0), st.integers(0, 2**31))
def test_capacity_and_allowance_are_told_apart(capacity, overhead_tokens, seed):
    """By least squares over readings of different mixes."""
    rng, found = np.random.default_rng(seed), Overhead()
    for _ in range(100):
        n_running = int(rng.integers(2, 20))
        tokens = int(rng.integers(100, 2000)) * n_running
        usage = (tokens + overhead_tokens * n_running) / capacity
        found.read(kv_usage_ratio=usage, n_running=n_running, tokens=tokens, capacity=10**6, n_preemptions=0.0)
    calibrated = found.calibrated()
    if calibrated is not None:
        assert calibrated[0] == pytest.approx(capacity, rel=0.01)
        assert calibrated[1] <= OVERHEAD_MAX_TOKENS


def test_a_footprint_is_between_what_is_there_and_a_peak_each():
    """Programs at different places: their largest sum is below the sum of their peaks."""
    contexts = [float(c) for c in range(1000, 20_000, 1000)]
    peaks = [20_000.0] * 50
    largest = projected(contexts, peaks).max()
    assert sum(contexts) <= largest < len(contexts) * 20_000
    assert projected([], peaks).max() == 0.0
    assert projected([50_000.0], peaks)[0] == 50_000.0


# --- shared caches ---

steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "extend", "release", "common", "remove"]),
        st.sampled_from("ab"),
        st.integers(0, 5),
        st.integers(0, 4000),
    ),
    max_size=60,
)


@given(steps=steps)
def test_l4_a_shared_cache_is_never_promised_beyond_its_share(steps):
    """Law L4 over a pool: a grant keeps all members together under the limit, unless the cache was empty; growth may
    pass it, a refusal changes nothing, and what is released is free again."""
    ledger = Ledger(admission_ratio=0.85)
    ledger.add("a", KV, 10_000, "gpu")
    ledger.add("b", KV, 25_000, "gpu")
    for what, name, number, amount in steps:
        key = f"p{number}"
        account = ledger.account_by_backend.get(name)
        if account is None:
            ledger.add(name, KV, 10_000 if name == "a" else 25_000, "gpu")
            continue
        if what == "reserve" and key not in account.amount_by_key:
            was_empty = not any(a.amount_by_key for a in ledger.account_by_backend.values())
            before = ledger.used_share(name)
            granted = ledger.reserve(key, name, amount, at_s=0.0)
            if not granted:
                assert ledger.used_share(name) == before
            elif not was_empty:
                assert ledger.used_share(name) <= int(SHARE * 0.85)
        elif what == "extend" and key in account.amount_by_key:
            ledger.extend(key, name, amount)
        elif what == "release" and key in account.amount_by_key:
            ledger.release(key, name)
        elif what == "common":
            ledger.set_common(name, amount // 10)
        elif what == "remove":
            ledger.remove(name)
        ledger.check()
    for name, account in list(ledger.account_by_backend.items()):
        for key in list(account.amount_by_key):
            ledger.release(key, name)
    for name, account in ledger.account_by_backend.items():
        assert ledger.headroom(name, at_s=0.0) == account.capacity


def test_pool_members_count_each_others_promises():
    """Half of one model's tokens is half of the cache for the other."""
    ledger = Ledger(admission_ratio=1.0)
    ledger.add("a", KV, 1000, "gpu")
    ledger.add("b", KV, 4000, "gpu")
    ledger.add("c", KV, 1000)
    assert ledger.reserve("p", "a", 500, at_s=0.0)
    assert ledger.headroom("b", at_s=0.0) == 2000
    assert ledger.fits("b", 2000, at_s=0.0)
    assert not ledger.fits("b", 2001, at_s=0.0)
    assert ledger.headroom("c", at_s=0.0) == 1000
    assert ledger.members("a") == ["a", "b"]


def test_a_negative_common_prompt_is_a_broken_law():
    """The books must balance."""
    ledger = Ledger()
    ledger.add("a", KV, 1000)
    ledger.account_by_backend["a"].common = -1
    with pytest.raises(LawBroken, match="L4"):
        ledger.check()


def test_a_usage_next_to_nothing_is_no_capacity():
    """An engine whose usage says that it holds more than any can is not believed."""
    overhead = Overhead()
    for n in range(2, 60):
        tokens = 1000 + n * n
        overhead.read(kv_usage_ratio=tokens * 1e-309, n_running=n, tokens=tokens, capacity=10_000, n_preemptions=None)
    assert overhead.calibrated() is None
