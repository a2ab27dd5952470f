"""What the choices of policies are worth: points, gains over the best mix, matched costs, and their intervals."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .bootstrap import interval, task_draws
from .frontier import Hull, best_per_task, frontier_success, hull_vertices, midpoint_usd, snapped
from .replay import Counts
from .stream import Stream

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]
Arm = tuple[str, str]
"""Policy and verification."""

BEST = "per_task_best"
ANY = "chosen"
"""Stands for all policies of a run where the policy, too, is chosen on the other half of the tasks."""
N_SPLITS = 10
"""Halvings of the tasks behind a cross-fitted figure."""


class Scored(NamedTuple):
    """One policy under one verifier and cost weight, by task."""

    policy: str
    verification: str
    cost_weight: float
    share: Array
    """How often each model ran each task: rows sum to one, or to the attempts where a task may run more than once."""
    success: Array
    """Expected success of each task, shape (n_tasks,)."""
    cost_usd: Array
    """Expected cost of each task, shape (n_tasks,)."""


def score_choices(stream: Stream, policy: str, verification: str, cost_weight: float, counts: Counts) -> Scored:
    """A policy that runs each task once, by how often it chose each model for each task, shape (n_tasks, n_models)."""
    share = counts / counts.sum(axis=1, keepdims=True)
    reached, spent = (share * stream.success).sum(axis=1), (share * stream.cost_usd).sum(axis=1)
    return Scored(policy, verification, cost_weight, share, reached, spent)


class Point(NamedTuple):
    """One policy under one verifier and cost weight, as it is reported."""

    policy: str
    verification: str
    cost_weight: float
    cost_usd: float
    """Mean per task."""
    success: float
    hull_gain_pp: float
    """Over the best mix of single models at the same cost, in percentage points."""
    ci95: Interval
    """Of `hull_gain_pp`."""
    share: dict[str, float]
    """Of the tasks, by model."""
    family_success: dict[str, float]
    """Mean success within each family that has a task."""


class Gain(NamedTuple):
    """What an arm is over the hull, in percentage points."""

    value: float
    drawn: Array
    """Shape (n_draws,); row i of every arm is of the same tasks."""


class Judged(NamedTuple):
    """Points of the plane, and figures by name with their intervals."""

    points: list[Point]
    values: dict[str, float]
    ci95: dict[str, Interval]
    gains: dict[Arm, Gain]
    """Cross-fitted; of an arm with one point that point's."""


class _Means(NamedTuple):
    """Means over tasks, of one weighting of the tasks."""

    hull: Hull
    """Of the single models."""
    point_costs: Array
    point_successes: Array


Figure = Callable[[_Means], float]


def best_counts(stream: Stream) -> Counts:
    """The choices of one who knows every outcome, as `score_choices` takes them."""
    counts = np.zeros(stream.success.shape, dtype=np.int64)
    counts[np.arange(stream.n_tasks), best_per_task(stream.success, stream.cost_usd)] = 1
    return counts


def judge(stream: Stream, scored: Sequence[Scored], n_draws: int, rng: np.random.Generator) -> Judged:
    """Everything that is reported of these choices."""
    success = np.stack([point.success for point in scored], axis=1)  # (n_tasks, n_points)
    cost = np.stack([point.cost_usd for point in scored], axis=1)
    crossed = _cross_fits(stream, scored, success, cost, rng)
    figures = _frontier_figures(scored)
    linear = _uninformed(stream, scored, success)
    even = np.full((1, stream.n_tasks), 1.0 / stream.n_tasks)
    whole = _means(stream, success, cost, even)[0]
    values = {name: figure(whole) for name, figure in figures.items()}
    values |= {name: float((even @ vector)[0]) for name, vector in linear.items()}
    gains = (whole.point_successes - _hull(whole)) * 100.0
    drawn: list[Array] = []
    drawn_figures: dict[str, list[float]] = {name: [] for name in figures}
    drawn_arrays: dict[str, list[Array]] = {name: [] for name in (*linear, *crossed)}
    for draw in task_draws(stream.family, n_draws, rng):
        for means in _means(stream, success, cost, draw):
            drawn.append((means.point_successes - _hull(means)) * 100.0)
            for name, figure in figures.items():
                drawn_figures[name].append(figure(means))
        shares = _with_hulls(stream, draw)
        for name, fit in crossed.items():
            drawn_arrays[name].append(_crossed_gain(stream, fit, success, cost, shares))
        for name, vector in linear.items():
            drawn_arrays[name].append(draw @ vector)
    ci95 = {name: interval(np.array(found)) for name, found in drawn_figures.items()}
    all_tasks = _with_hulls(stream, even)
    values |= {name: float(_crossed_gain(stream, fit, success, cost, all_tasks)[0]) for name, fit in crossed.items()}
    ci95 |= {name: interval(np.concatenate(found)) for name, found in drawn_arrays.items()}
    points = _points(stream, scored, success, whole, gains, np.array(drawn))
    gain_by_arm = {}
    for arm, found in _by_arm(scored).items():
        name = _crossed_name(*arm)
        if name in crossed:
            gain_by_arm[arm] = Gain(values[name], np.concatenate(drawn_arrays[name]))
        else:
            gain_by_arm[arm] = Gain(float(gains[found[0]]), np.array(drawn)[:, found[0]])
    return Judged(points, values, ci95, gain_by_arm)


def singles(stream: Stream) -> dict[str, dict[str, float]]:
    """Mean success and cost of always the same model."""
    rows = zip(stream.models, stream.success.mean(axis=0), stream.cost_usd.mean(axis=0), strict=True)
    return {model: {"success": float(success), "cost_usd": float(cost)} for model, success, cost in rows}


def _points(
    stream: Stream,
    scored: Sequence[Scored],
    success: Array,
    whole: _Means,
    gains: Array,
    drawn: Array,
) -> list[Point]:
    tasks_by_family = {name: stream.family == index for index, name in enumerate(stream.families)}
    return [
        Point(
            policy=point.policy,
            verification=point.verification,
            cost_weight=point.cost_weight,
            cost_usd=float(whole.point_costs[index]),
            success=float(whole.point_successes[index]),
            hull_gain_pp=_rounded(gains[index]),
            ci95=interval(drawn[:, index]),
            share=dict(zip(stream.models, point.share.mean(axis=0).tolist(), strict=True)),
            family_success={
                name: float(success[tasks, index].mean()) for name, tasks in tasks_by_family.items() if tasks.any()
            },
        )
        for index, point in enumerate(scored)
    ]


def _rounded(value: float) -> float:
    """Without the dust of sums: always the same model gains 0, not -1e-14."""
    return round(float(value), 9) + 0.0


def _means(stream: Stream, success: Array, cost: Array, draws: Array) -> list[_Means]:
    """Means under each row of `draws`, which sums to one."""
    unit = stream.scale_usd
    spent, paid = snapped(draws @ stream.cost_usd, unit), snapped(draws @ cost, unit)
    arrays = (spent, draws @ stream.success, paid, draws @ success)
    return [
        _Means(hull_vertices(costs.tolist(), successes.tolist()), point_costs, point_successes)
        for costs, successes, point_costs, point_successes in zip(*arrays, strict=True)
    ]


def _hull(means: _Means) -> Array:
    return np.interp(means.point_costs, *means.hull)


def _by_arm(scored: Sequence[Scored]) -> dict[tuple[str, str], list[int]]:
    """Places of the points of each (policy, verification)."""
    places: dict[tuple[str, str], list[int]] = {}
    for index, point in enumerate(scored):
        places.setdefault((point.policy, point.verification), []).append(index)
    return places


def _frontier_figures(scored: Sequence[Scored]) -> dict[str, Figure]:
    """Over the best mix at the midpoint cost; adaptive over single at matched cost."""
    figures: dict[str, Figure] = {}
    places = _by_arm(scored)
    for (policy, verification), found in places.items():
        if len(found) < 2:
            continue

        def over_hull(means: _Means, found: list[int] = found) -> float:
            at_usd = midpoint_usd(means.hull)
            best = float(np.interp(at_usd, *means.hull))
            return 100.0 * (frontier_success(means.point_costs[found], means.point_successes[found], at_usd) - best)

        figures[f"{policy}.{verification}.over_hull_at_midpoint_pp"] = over_hull
        other = places.get((policy, "single"))
        if verification == "adaptive" and other is not None:

            def matched(means: _Means, found: list[int] = found, other: list[int] = other) -> float:
                gaps = np.abs(means.point_costs[found] - midpoint_usd(means.hull))
                nearest = found[int(gaps.argmin())]
                single = frontier_success(
                    means.point_costs[other], means.point_successes[other], float(means.point_costs[nearest])
                )
                return 100.0 * (float(means.point_successes[nearest]) - single)

            figures[f"{policy}.adaptive_over_single_at_matched_cost_pp"] = matched
    return figures


def _uninformed(stream: Stream, scored: Sequence[Scored], success: Array) -> dict[str, Array]:
    """Success at cost weight 0 over the uninformed choice of any model (ORACLE, Table 1): of the stream, each family.

    Returns:
        Per figure one weight per task, shape (n_tasks,): under shares of the tasks the figure is their dot product.
    """
    vectors: dict[str, Array] = {}
    for (policy, verification), found in _by_arm(scored).items():
        at = min(found, key=lambda index: scored[index].cost_weight)
        if len(found) < 2 or scored[at].cost_weight != 0.0:
            continue
        gain = 100.0 * (success[:, at] - stream.success.mean(axis=1))
        name = f"{policy}.{verification}.over_uninformed_at_0_pp"
        vectors[name] = gain
        for index, family in enumerate(stream.families):
            tasks = stream.family == index
            if tasks.any():  # draws are stratified: every one has as many tasks of the family
                vectors[f"{name}.{family}"] = np.where(tasks, gain * stream.n_tasks / tasks.sum(), 0.0)
    return vectors


class Paired(NamedTuple):
    """A difference of two gains on the same tasks, in percentage points."""

    value: float
    ci95: Interval


def paired_gains(judged: Judged, pairs: Mapping[str, tuple[Arm, Arm]]) -> dict[str, Paired]:
    """Cross-fitted gain over the hull of one arm minus that of another, by name of the pair.

    Both met the same halvings and the same draws of tasks. An arm of one point has nothing to choose: its gain is that
    of the point.
    """
    gains = judged.gains
    return {
        name: Paired(gains[one].value - gains[other].value, interval(gains[one].drawn - gains[other].drawn))
        for name, (one, other) in pairs.items()
    }


def _crossed_name(policy: str, verification: str) -> str:
    return f"{policy}.{verification}.over_hull_cross_fitted_pp"


class _Fit(NamedTuple):
    """One halving of the tasks, and the point chosen on each half for the other."""

    is_second: npt.NDArray[np.bool_]
    point_for_first: int
    point_for_second: int


def _cross_fits(
    stream: Stream,
    scored: Sequence[Scored],
    success: Array,
    cost: Array,
    rng: np.random.Generator,
) -> dict[str, list[_Fit]]:
    """For each arm with several points: halvings, and the point with the highest gain on the other half."""
    halves = [halving(stream.family, rng) for _ in range(N_SPLITS)]
    gains = []
    for is_second in halves:
        weights = np.stack([~is_second, is_second]).astype(np.float64)
        sums = weights.sum(axis=1, keepdims=True)
        # A stream of one task has an empty half, on which nothing can be chosen.
        weights = np.where(sums > 0, weights / np.maximum(sums, 1.0), 1.0 / stream.n_tasks)
        gains.append([means.point_successes - _hull(means) for means in _means(stream, success, cost, weights)])
    crossed: dict[str, list[_Fit]] = {}
    for (policy, verification), found in {**_by_arm(scored), **_by_verification(scored)}.items():
        if len(found) < 2:
            continue
        crossed[_crossed_name(policy, verification)] = [
            _Fit(is_second, found[int(on_second[found].argmax())], found[int(on_first[found].argmax())])
            for is_second, (on_first, on_second) in zip(halves, gains, strict=True)
        ]
    return crossed


def _by_verification(scored: Sequence[Scored]) -> dict[tuple[str, str], list[int]]:
    """Places of the points of all policies together, where there are several: of those that could be run.

    Not of one who knows the outcomes, nor of those that make more attempts than the single models.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for index, point in enumerate(scored):
        if point.policy != BEST and point.share.sum(axis=1).max() <= 1.0 + 1e-9:
            places.setdefault((ANY, point.verification), []).append(index)
    return {key: found for key, found in places.items() if len({scored[index].policy for index in found}) > 1}


def halving(family: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Half of the tasks of each family, drawn, as a mask; settings are chosen on one half and scored on the other."""
    is_second = np.zeros(len(family), dtype=np.bool_)
    for index in np.unique(family):
        tasks = rng.permutation(np.flatnonzero(family == index))
        is_second[tasks[: len(tasks) // 2]] = True
    return is_second


class _Draws(NamedTuple):
    """Shares of the tasks in some draws, and the hull of the single models in each."""

    shares: Array
    """Shape (draws, n_tasks)."""
    hulls: list[Hull]


def _with_hulls(stream: Stream, draws: Array) -> _Draws:
    shares = draws / draws.sum(axis=1, keepdims=True)
    costs, successes = snapped(shares @ stream.cost_usd, stream.scale_usd), shares @ stream.success
    rows = zip(costs.tolist(), successes.tolist(), strict=True)
    return _Draws(shares, [hull_vertices(*row) for row in rows])


def _crossed_gain(stream: Stream, fits: Sequence[_Fit], success: Array, cost: Array, draws: _Draws) -> Array:
    """Gain in points of percentage, each half at the weight chosen on the other, mean over halvings; shape (draws,).

    The two halves form one stream of all tasks: its cost and success are compared with the hull of all tasks.
    """
    shares = draws.shares
    second = np.stack([fit.is_second for fit in fits], axis=1)  # (n_tasks, n_fits)
    point = np.where(second, [fit.point_for_second for fit in fits], [fit.point_for_first for fit in fits])
    at_usd = snapped(shares @ np.take_along_axis(cost, point, axis=1), stream.scale_usd)  # (n_draws, n_fits)
    reached = shares @ np.take_along_axis(success, point, axis=1)
    best = [np.interp(at, *hull) for hull, at in zip(draws.hulls, at_usd, strict=True)]
    mean: Array = 100.0 * (reached - np.array(best)).mean(axis=1)
    return mean
