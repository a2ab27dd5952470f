"""The comparison with random mixing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.compare import Comparison, TaskOutcome, compare, count_luck_mismatches, frontier, summarize
from loadwise.demo.luck import Luck

FAMILIES = ("dates", "units")
COST = {"cheap": 1.0, "dear": 5.0}


def outcome(place: int, model: str, success: float, cost_usd: float | None = None) -> TaskOutcome:
    return TaskOutcome(
        task_id=f"t{place:03d}",
        family=FAMILIES[place % 2],
        model=model,
        success=success,
        cost_usd=COST.get(model, 0.0) if cost_usd is None else cost_usd,
        wait_s=float(place),
    )


def solved(place: int, model: str) -> float:
    """Cheap solves the even places (dates), dear solves three quarters of all."""
    return float(place % 2 == 0 if model == "cheap" else place % 4 != 3)


def row(models: Sequence[str]) -> list[TaskOutcome]:
    return [outcome(place, model, solved(place, model)) for place, model in enumerate(models)]


def compared(routed: Sequence[str], seed: int = 0, draws: int = 200) -> Comparison:
    n = len(routed)
    mixed = [Luck("mixed", place).pick(("cheap", "dear")) for place in range(n)]
    rows = {
        "loadwise": row(routed),
        "random": row(mixed),
        "only-cheap": row(["cheap"] * n),
        "only-dear": row(["dear"] * n),
    }
    singles = {"cheap": "only-cheap", "dear": "only-dear"}
    return compare(rows, singles, "loadwise", "random", seed, draws)


def test_the_gain_by_hand() -> None:
    """Routing dates to cheap (all solved) and the rest to dear (half solved): 75 % for 3 dollars a task.

    Cheap alone solves 50 % for 1, dear alone 75 % for 5; on the line between them 3 dollars buy 62.5 %.
    """
    result = compared([("cheap", "dear")[place % 2] for place in range(80)])
    assert result.gain_over_frontier.pp == pytest.approx(12.5)
    assert result.gain_at_same_shares.pp == pytest.approx(12.5)
    own, by_chance = result.rows[0], result.rows[1]
    assert (own.success, own.cost_usd, own.share) == (0.75, 3.0, {"cheap": 0.5, "dear": 0.5})
    assert result.gain_over_random.pp == pytest.approx(100 * (own.success - by_chance.success))
    low, high = result.gain_over_frontier.ci95
    assert low < 12.5 < high


def test_losses_are_negative() -> None:
    """Routing the wrong way round loses as plainly as the right way gains."""
    result = compared([("dear", "cheap")[place % 2] for place in range(80)])
    assert result.gain_over_frontier.pp == pytest.approx(50.0 - 62.5)
    assert result.gain_over_frontier.ci95[1] < 0


@pytest.mark.parametrize("model", ["cheap", "dear"])
def test_a_single_model_gains_nothing_over_itself(model: str) -> None:
    """A routed row that is one model lies on the frontier in every resample."""
    gain = compared([model] * 40).gain_over_frontier
    assert gain.pp == pytest.approx(0.0, abs=1e-9)
    assert gain.ci95 == pytest.approx((0.0, 0.0), abs=1e-9)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Over 200 worlds of random routing, whose gain at the same shares is 0, about 95 % of intervals hold 0."""
    n, hits = 100, 0
    for world in range(200):
        luck = Luck("world", world)
        chance = {(place, model): float(luck.unit() < 0.5) for place in range(n) for model in COST}
        choice = [luck.pick(("cheap", "dear")) for _ in range(n)]
        rows = {
            policy: [outcome(place, model, chance[place, model]) for place, model in enumerate(models)]
            for policy, models in {
                "loadwise": choice,
                "cheap": ["cheap"] * n,
                "dear": ["dear"] * n,
            }.items()
        }
        singles = {"cheap": "cheap", "dear": "dear"}
        low, high = compare(rows, singles, "loadwise", "cheap", world, 200).gain_at_same_shares.ci95
        hits += low <= 0.0 <= high
    assert 175 <= hits <= 199


def test_the_seed_moves_the_interval_only() -> None:
    """Equal seeds give equal results; another seed leaves the estimate and shifts the interval a little."""
    models = [("cheap", "dear")[place % 2] for place in range(80)]
    first, again, other = (compared(models, seed) for seed in (-(10**30), -(10**30), 10**30))
    assert first == again
    assert first.gain_over_frontier.pp == other.gain_over_frontier.pp
    assert first.gain_over_frontier.ci95 != other.gain_over_frontier.ci95


def test_the_order_of_rows_does_not_matter() -> None:
    """Programs end in any order; the comparison pairs them by task."""
    routed = row([("cheap", "dear")[place % 2] for place in range(20)])
    singles = {"cheap": "c", "dear": "d"}
    rows = {"l": routed, "c": row(["cheap"] * 20), "d": row(["dear"] * 20)}
    shuffled = {policy: Luck("order", policy).shuffled(outcomes) for policy, outcomes in rows.items()}
    assert compare(rows, singles, "l", "c", 0, 50) == compare(shuffled, singles, "l", "c", 0, 50)


worlds = st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.0, 1.0)), min_size=1, max_size=4)


@given(worlds, st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4))
def test_no_mixture_lies_above_the_frontier(models: list[tuple[float, float]], weights: list[float]) -> None:
    """Whatever the probabilities, a mixture's success is at most the frontier at its cost, which a pair reaches."""
    cost, success = (np.array([values]) for values in zip(*models, strict=True))
    weight = np.array(weights[: len(models)]) / sum(weights[: len(models)])
    at_cost = cost @ weight
    best = frontier(cost, success, at_cost)[0]
    assert (success @ weight)[0] <= best + 1e-9
    assert best <= success.max() + 1e-9


@given(worlds, st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_frontier_never_falls_with_money(models: list[tuple[float, float]], a: float, b: float) -> None:
    """More money never buys less; below the cheapest model it is that model's own success."""
    cost, success = (np.array([values]) for values in zip(*models, strict=True))
    low, high = (frontier(cost, success, np.array([at]))[0] for at in sorted((a, b)))
    assert low <= high + 1e-9
    assert frontier(cost, success, np.array([0.0]))[0] == success[0, cost[0].argmin()]


def test_free_models_are_compared_by_success() -> None:
    """Where nothing costs anything the frontier is the best single model."""
    assert frontier(np.zeros((1, 2)), np.array([[0.2, 0.6]]), np.zeros(1)) == 0.6


def test_programs_that_nobody_served_count_as_failures() -> None:
    """They lower the success and the shares, and belong to no model."""
    summary = summarize("x", [outcome(0, "cheap", 1.0), outcome(1, "", 0.0)])
    assert (summary.success, summary.share) == (0.5, {"cheap": 0.5})


def test_broken_luck_is_counted() -> None:
    """A (task, model) pair that passes in one row and fails in another is found."""
    rows = {"a": [outcome(0, "cheap", 1.0), outcome(1, "", 0.0)], "b": [outcome(0, "cheap", 0.0), outcome(1, "", 1.0)]}
    assert count_luck_mismatches(rows) == 1


def test_rows_that_do_not_match_are_refused() -> None:
    """Missing rows, repeated tasks, other tasks, no tasks: each is named."""
    a, b = row(["cheap"] * 4), row(["dear"] * 3)
    for rows, why in (
        ({"l": a}, "missing"),
        ({"l": a, "c": [*a, a[0]]}, "twice"),
        ({"l": a, "c": b}, "other tasks"),
        ({"l": [], "c": []}, "no row"),
    ):
        with pytest.raises(ValueError, match=why):
            compare(rows, {"cheap": "c"}, "l", "c", 0, 10)
    with pytest.raises(ValueError, match="no single model"):
        compare({"l": a, "c": a}, {}, "l", "c", 0, 10)
    with pytest.raises(ValueError, match="'x' has no outcomes"):
        summarize("x", [])
