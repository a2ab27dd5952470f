"""Hull, midpoint, frontier and the choice of one who knows everything."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadwise.lab.frontier import best_per_task, frontier_success, hull_success, hull_vertices, midpoint_usd

models = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=8).map(
    lambda points: ([cost / 8.0 for cost, _ in points], [success / 20.0 for _, success in points])
)


@given(models)
def test_no_single_model_lies_above_the_hull(points: tuple[list[float], list[float]]) -> None:
    """The hull is the best that single models reach at each cost."""
    costs, successes = points
    assert (hull_success(costs, successes, np.array(costs)) >= np.array(successes) - 1e-12).all()


@given(models, st.integers(0, 7), st.integers(0, 7), st.floats(0.0, 1.0))
def test_no_mix_of_two_models_lies_above_the_hull(
    points: tuple[list[float], list[float]], one: int, other: int, share: float
) -> None:
    """A lottery gains nothing."""
    costs, successes = points
    one, other = one % len(costs), other % len(costs)
    cost = share * costs[one] + (1.0 - share) * costs[other]
    success = share * successes[one] + (1.0 - share) * successes[other]
    assert success <= hull_success(costs, successes, np.array([cost]))[0] + 1e-9


@given(models)
def test_the_hull_is_made_of_models_and_rises(points: tuple[list[float], list[float]]) -> None:
    """Every vertex is a single model, from the cheapest to the most successful."""
    costs, successes = points
    found = list(zip(*hull_vertices(costs, successes), strict=True))
    assert set(found) <= set(zip(costs, successes, strict=True))
    assert found[0][0] == min(costs)
    assert found[-1][1] == max(successes)
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in itertools.pairwise(found))
    slopes = [(right[1] - left[1]) / (right[0] - left[0]) for left, right in itertools.pairwise(found)]
    assert all(later < earlier + 1e-12 for earlier, later in itertools.pairwise(slopes))


def test_midpoint_is_between_the_ends_of_the_hull() -> None:
    """A dear model that is no better does not move it."""
    assert midpoint_usd(hull_vertices([1.0, 3.0, 100.0], [0.2, 0.6, 0.6])) == 2.0


def test_a_frontier_is_level_beyond_its_ends() -> None:
    """Nothing is extrapolated."""
    costs, successes = np.array([2.0, 1.0]), np.array([0.6, 0.4])
    assert [frontier_success(costs, successes, at) for at in (0.0, 1.5, 9.0)] == [0.4, 0.5, 0.6]


def test_the_best_of_each_task_is_the_cheapest_that_succeeds_or_the_cheapest() -> None:
    """Of equally good models the cheaper one, also where none succeeds."""
    success = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    cost = np.array([[2.0, 1.0], [1.0, 5.0], [1.0, 5.0]])
    assert best_per_task(success, cost).tolist() == [1, 1, 0]
