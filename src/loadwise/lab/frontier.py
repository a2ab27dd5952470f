"""Success against cost: the best mix of single models, the best model for each task, and how far above a policy lies.

A lottery over single models reaches every point below the upper convex hull of their (cost, success) points, so a
policy gains what it lies above that hull at its own cost. The hull ends at the cheapest model on the left: there, where
no mix is as cheap, the cheapest model's success is the measure. It is level to the right of the best model.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Hull = tuple[list[float], list[float]]
"""Costs and successes of its vertices."""


def snapped(costs: Array, unit_usd: float) -> Array:
    """Costs without the dust of sums: what is equally dear stays so, and no mix lies between.

    >>> bool(snapped(np.array([0.1 + 0.2]), 1.0)[0] == snapped(np.array([0.3]), 1.0)[0])
    True
    """
    found: Array = np.round(costs / unit_usd, 12) * unit_usd
    return found


def hull_vertices(costs: Sequence[float], successes: Sequence[float]) -> Hull:
    """The upper convex hull from the cheapest model to the most successful one: costs and successes, both rising.

    >>> hull_vertices([1.0, 2.0, 3.0, 4.0], [0.2, 0.3, 0.6, 0.5])
    ([1.0, 3.0], [0.2, 0.6])
    """
    hull: list[tuple[float, float]] = []
    # Of equally dear models only the best counts.
    for cost, success in sorted(zip(costs, successes, strict=True), key=lambda point: (point[0], -point[1])):
        if hull and success <= hull[-1][1]:
            continue
        while len(hull) >= 2 and _is_below(hull[-1], hull[-2], (cost, success)):
            hull.pop()
        hull.append((cost, success))
    return [cost for cost, _ in hull], [success for _, success in hull]


def _is_below(point: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether `point` is on or below the line from `left` to `right`."""
    return (point[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (point[0] - left[0])


def hull_success(costs: Sequence[float], successes: Sequence[float], at_usd: Array) -> Array:
    """Success of the best mix of single models at each cost of `at_usd`.

    >>> hull_success([1.0, 3.0], [0.2, 0.6], np.array([0.5, 2.0, 9.0])).tolist()
    [0.2, 0.4, 0.6]
    """
    return np.interp(at_usd, *hull_vertices(costs, successes))


def midpoint_usd(hull: Hull) -> float:
    """Halfway between the ends of the hull: the cost at which ORACLE compares (B.4)."""
    ends, _ = hull
    return (ends[0] + ends[-1]) / 2.0


def frontier_success(costs: Array, successes: Array, at_usd: float) -> float:
    """Success of a policy at a cost, linear between the points of its cost weights, level beyond their ends.

    >>> frontier_success(np.array([3.0, 1.0]), np.array([0.6, 0.2]), 2.0)
    0.4
    """
    order = np.lexsort((successes, costs))
    return float(np.interp(at_usd, costs[order], successes[order]))


def best_per_task(success: Array, cost_usd: Array) -> npt.NDArray[np.int64]:
    """The model that knew everything would choose: the most successful of each task, among equals the cheapest.

    Args:
        success: shape (n_tasks, n_models); `cost_usd` alike.
    """
    top = success.max(axis=1, keepdims=True)
    cost = np.where(success >= top - 1e-9, cost_usd, np.inf)
    best: npt.NDArray[np.int64] = cost.argmin(axis=1).astype(np.int64)
    return best
