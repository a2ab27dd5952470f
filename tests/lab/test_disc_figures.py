"""Figures to reach: pairs by seed, bounds from both sides, what chance may have decided, the paper's losses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.lab.disc import CellResult
from loadwise.lab.disc_figures import (
    Check,
    Estimate,
    Judge,
    check_rows,
    checked,
    columns_of,
    difference,
    estimate,
    figures,
    is_monotone,
    quotient,
    verdict_of,
)

Results = dict[tuple[str, str, int], dict[int, CellResult]]
POSITIVE = st.floats(0.1, 1e3)


def result(**said: float) -> CellResult:
    """A result of zeros and what is said."""
    return CellResult(**{**dict.fromkeys(CellResult.__struct_fields__, 0.0), **said})


def results_of(world: str, load: int, rates: dict[str, float], **more: float) -> Results:
    """Presets that differ by a factor alone, on three seeds that differ widely."""
    return {
        (world, preset, load): {
            seed: result(programs_per_h=rate * seed, resolved=rate * seed, resolved_per_h=rate * seed, **more)
            for seed in (1, 2, 4)
        }
        for preset, rate in rates.items()
    }


def check_of(results: Results, key: str) -> Check:
    """The one line with that key."""
    (found,) = [check for check in figures(results) if check.key == key]
    return found


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=12), st.floats(0.5, 2.0))
def test_a_constant_factor_has_no_width(pairs: list[tuple[float, float]], factor: float) -> None:
    """However seeds differ, a preset that is always so much faster is exactly that: the bootstrap is paired."""
    theirs = np.array([pair[0] for pair in pairs])
    found = estimate([factor * theirs, theirs], quotient, np.random.default_rng(0), n_draws=50)
    assert found.value == pytest.approx(factor)
    assert found[1:3] == pytest.approx((factor, factor))


@given(st.lists(POSITIVE, min_size=2, max_size=12))
def test_the_interval_of_a_mean_lies_within_its_values(values: list[float]) -> None:
    """And its value is the mean itself."""
    column = np.array(values)
    found = estimate([column], lambda mean: mean, np.random.default_rng(0), n_draws=50)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.value == pytest.approx(column.mean())


def test_one_seed_says_nothing_about_chance() -> None:
    """A single pair has an interval as wide as the line, and JSON has none."""
    found = estimate([np.array([3.0]), np.array([2.0])], difference, np.random.default_rng(0))
    assert found == Estimate(1.0, -math.inf, math.inf, 1)
    assert found.as_object() == {"value": 1.0, "ci95": [None, None]}


def test_pairs_are_of_shared_seeds() -> None:
    """A run that was interrupted leaves presets with unequal seeds; only common ones count."""
    results: Results = {
        ("w", "fast", 8): {1: result(resolved=1.0), 2: result(resolved=2.0), 3: result(resolved=3.0)},
        ("w", "oracle", 8): {3: result(resolved=30.0), 2: result(resolved=20.0), 9: result(resolved=90.0)},
        ("w", "quality", 8): {5: result()},
    }
    columns = columns_of(results, [("w", "fast", 8), ("w", "oracle", 8)], "resolved")
    assert columns is not None
    assert [column.tolist() for column in columns] == [[2.0, 3.0], [20.0, 30.0]]
    assert columns_of(results, [("w", "fast", 8), ("w", "quality", 8)], "resolved") is None
    assert columns_of(results, [("w", "fast", 8), ("w", "nobody", 8)], "resolved") is None


def test_nothing_over_nothing_is_as_good() -> None:
    """Where nobody resolves anything nobody is behind."""
    assert quotient(np.array([0.0, 1.0, 3.0]), np.array([0.0, 0.0, 2.0])).tolist() == [1.0, math.inf, 1.5]


@pytest.mark.parametrize(
    ("found", "low", "high", "verdict"),
    [
        (Estimate(1.0, 0.99, 1.02, 9), 0.98, math.inf, "holds"),
        (Estimate(1.0, 0.95, 1.02, 9), 0.98, math.inf, "holds ?"),
        (Estimate(0.9, 0.88, 0.97, 9), 0.98, math.inf, "MISSED"),
        (Estimate(0.9, 0.88, 0.99, 9), 0.98, math.inf, "MISSED ?"),
        (Estimate(20.0, 10.0, 29.0, 9), -math.inf, 30.0, "holds"),
        (Estimate(40.0, 31.0, 49.0, 9), -math.inf, 30.0, "MISSED"),
        (Estimate(1.8, 1.6, 2.0, 9), 1.5, 2.1, "holds"),
        (Estimate(1.8, 1.4, 2.0, 9), 1.5, 2.1, "holds ?"),
        (Estimate(2.4, 2.2, 2.6, 9), 1.5, 2.1, "MISSED"),
        (Estimate(1.0, -math.inf, math.inf, 1), 0.98, math.inf, "one seed"),
        (Estimate(0.5, -math.inf, math.inf, 1), 0.98, math.inf, "one seed"),
        (Estimate(9.0, -math.inf, math.inf, 1), 1.5, 2.1, "one seed"),
    ],
)
def test_a_bound_is_met_by_value_and_surely_by_interval(found: Estimate, low: float, high: float, verdict: str) -> None:
    """From below, from above, and within a band."""
    (check,) = checked("key", found, low=low, high=high)
    assert verdict_of(check) == verdict
    assert check_rows([check])[1][-1] == verdict


def test_fast_is_held_against_the_best_peer_at_each_load() -> None:
    """At 48 the cap is best, at 64 `oracle`; two percent behind is allowed, three are not."""
    results = {
        **results_of("qwen-gh200", 48, {"static_cap": 1.0, "oracle": 0.9, "fast": 0.985}),
        **results_of("qwen-gh200", 64, {"static_cap": 0.9, "oracle": 1.0, "fast": 0.97}),
    }
    assert check_of(results, "qwen-gh200.48 fast/static_cap programs/h").holds
    assert check_of(results, "qwen-gh200.48 fast/static_cap resolved/h").sure
    assert check_of(results, "qwen-gh200.64 fast/oracle programs/h").holds is False
    assert check_of(results, "qwen-gh200.64 fast/oracle resolved").holds, "resolved may be four percent behind"


def test_at_32_where_the_paper_loses_fast_may_not() -> None:
    """On the Mistral pair level with the best peer; elsewhere two percent are allowed."""
    for world, holds in (("mistral-h200", False), ("qwen-gh200", True)):
        results = results_of(world, 32, {"thunderagent": 1.0, "oracle": 0.95, "fast": 0.99})
        assert check_of(results, f"{world}.32 fast/thunderagent programs/h").holds is holds


def test_a_simulator_in_which_oracle_always_wins_fails() -> None:
    """The paper's loss at 32 on the Mistral pair is a figure to reach, as is its gain on the Qwen pair."""
    assert not check_of(
        results_of("mistral-h200", 32, {"oracle": 1.2, "thunderagent": 1.0}),
        "mistral-h200.32 oracle/thunderagent programs/h",
    ).holds
    results = results_of("qwen-gh200", 64, {"oracle": 1.8, "thunderagent": 1.0, "thunderagent_state": 1.3})
    assert check_of(results, "qwen-gh200.64 oracle/thunderagent programs/h").holds
    beside = check_of(results, "qwen-gh200.64 oracle/thunderagent_state programs/h")
    assert (beside.holds, verdict_of(beside)) == (None, "")


def test_quality_is_held_against_admission_only_and_the_better_of_two() -> None:
    """One percent behind is allowed."""
    results = results_of("w", 16, {"admission_only": 1.0, "static_cap": 1.02, "quality": 1.0})
    assert check_of(results, "w.16 quality/admission_only resolved").holds
    assert not check_of(results, "w.16 quality/static_cap programs/h").holds


@pytest.mark.parametrize(("wait_s", "n"), [(49.0, 0), (51.0, 4)])
def test_short_waits_are_asked_for_where_oracle_waits_long(wait_s: float, n: int) -> None:
    """In a cell of 32 in which it waits 50 s or more."""
    results = results_of("w", 32, {"oracle": 1.0, "fast": 1.0}, wait_mean_s=wait_s, hit_ratio=0.9)
    found = [check for check in figures(results) if "long waits" in check.key]
    assert len(found) == n
    assert [check.holds for check in found] == [False, True, True, True][:n]


@pytest.mark.parametrize(("n", "n_lines"), [(30.0, 0), (50.0, 2)])
def test_forecasts_are_judged_where_there_are_enough_of_them(n: float, n_lines: int) -> None:
    """By all waits of all seeds together."""
    waits = {"forecast_n": n, "forecast_covered": 0.9 * n, "forecast_n_far": n / 2, "forecast_within_2": 0.45 * n}
    found = [check for check in figures(results_of("w", 8, {"fast": 1.0}, **waits)) if "waits within" in check.key]
    assert [check.holds for check in found] == [False, True][:n_lines]
    assert [check.estimate.value for check in found] == pytest.approx([0.9, 0.9][:n_lines])


def test_no_two_lines_have_one_key() -> None:
    """Or a reader, and JSON, would take one for the other."""
    presets = dict.fromkeys(("oracle", "thunderagent", "static_cap", "admission_only", "fast", "quality"), 1.0)
    for world in ("qwen-gh200", "mistral-h200"):
        results = results_of(world, 32, presets, wait_mean_s=60.0) | results_of(world, 64, presets)
        keys = [check.key for check in figures(results)]
        assert len(set(keys)) == len(keys) > 10


def test_figures_do_not_depend_on_which_others_there_are() -> None:
    """The same interval with and without another load."""
    rng = np.random.default_rng(3)
    results: Results = {
        ("w", preset, load): {seed: result(programs_per_h=float(rng.uniform(1, 2))) for seed in range(9)}
        for preset in ("fast", "oracle")
        for load in (8, 16)
    }
    alone = {key: by_seed for key, by_seed in results.items() if key[2] == 16}
    key = "w.16 fast/oracle programs/h"
    assert check_of(results, key) == check_of(alone, key)
    assert 0.0 < check_of(results, key).estimate.low < check_of(results, key).estimate.high


def test_a_step_back_beyond_chance_is_not_monotone() -> None:
    """Within chance it is; and the whole way must go right."""
    up, wobble, back = Estimate(3.0, 2.0, 4.0, 9), Estimate(-0.2, -1.0, 0.5, 9), Estimate(-2.0, -3.0, -1.0, 9)
    assert is_monotone([up, wobble], rises=True)
    assert not is_monotone([up, back], rises=True)
    assert not is_monotone([wobble], rises=True)
    assert is_monotone([back, wobble], rises=False)


def test_judge_has_a_mean_of_what_ran_only() -> None:
    """And no best of nothing."""
    judge = Judge(results_of("w", 8, {"oracle": 2.0}))
    mean = judge.mean("w", 8, "oracle", "resolved")
    assert mean is not None and mean.value == pytest.approx(14.0 / 3.0) and mean.n_seeds == 3
    assert judge.mean("w", 16, "oracle", "resolved") is None
    assert judge.best("w", 16, ("oracle",), "resolved") is None
