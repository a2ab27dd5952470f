"""The comparison at the demo's end: routed programs against random mixing and each single model.

Every row ran the same tasks with the same luck, so differences are taken task by task.

Definitions. A row's success s and cost c are means over all tasks; a program that failed for any reason
counts as a failure with the cost it had. Random mixing ignores the task: it gives a program to model m with a
fixed probability, so in (cost, success) it can reach the straight lines between the single models, and no
more. The *mixing frontier* at a cost is the highest success on those lines (and on single models that cost
less: nobody has to spend). Below the cheapest single model the frontier is that model's own success, which
favours mixing.

    gain over the frontier   = s(routed) - frontier(c(routed))                  the headline, `gain_pp`
    gain at the same shares  = s(routed) - sum over m of share(m) * s(m alone)
    gain over uniform mixing = s(routed) - s(the random row that ran)           costs differ: see the table

The first asks whether the money could have been spent as well without looking at the task, the second whether
the same use of every model could have. All are in percentage points and may be negative.

Intervals are a paired bootstrap over tasks within each family, 2.5th to 97.5th percentile: a resampled task
brings all its rows, and the frontier is drawn again in every resample. Decisions stay as they fell, so the
interval speaks of the tasks' luck, not of what the learner would have done on another stream. (The ORACLE
paper's evaluation, with 2,000 draws for its 200.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadwise.kernel.fact import Fact

DRAWS = 2_000
_FLOATS = NDArray[np.float64]


class TaskOutcome(Fact, frozen=True, kw_only=True):
    """How one program of a row ended."""

    task_id: str
    family: str
    model: str
    """Model that served it; empty if none did."""
    success: float
    cost_usd: float
    wait_s: float


class Row(Fact, frozen=True, kw_only=True):
    """One policy on the whole stream: means per program."""

    policy: str
    success: float
    cost_usd: float
    wait_s: float
    share: dict[str, float]
    """Part of the programs that each model served; programs that none served are missing from the sum."""


class Gain(Fact, frozen=True, kw_only=True):
    """A difference in percentage points with its 95 % interval."""

    pp: float
    ci95: tuple[float, float]


class Comparison(Fact, frozen=True, kw_only=True):
    """The table and the gains of its routed row."""

    rows: tuple[Row, ...]
    gain_over_frontier: Gain
    gain_at_same_shares: Gain
    gain_over_random: Gain
    luck_mismatches: int
    """(task, model) pairs that passed in one row and failed in another: 0 unless an engine is moody."""


def summarize(policy: str, outcomes: Sequence[TaskOutcome]) -> Row:
    """Average a row.

    Raises:
        ValueError: the row is empty.
    """
    if not outcomes:
        raise ValueError(f"row {policy!r} has no outcomes")
    n = len(outcomes)  # fsum below: programs end in any order, and the mean must not depend on it
    models = sorted({outcome.model for outcome in outcomes} - {""})
    return Row(
        policy=policy,
        success=math.fsum(o.success for o in outcomes) / n,
        cost_usd=math.fsum(o.cost_usd for o in outcomes) / n,
        wait_s=math.fsum(o.wait_s for o in outcomes) / n,
        share={model: sum(o.model == model for o in outcomes) / n for model in models},
    )


def compare(
    rows: Mapping[str, Sequence[TaskOutcome]],
    singles: Mapping[str, str],
    routed: str,
    random: str,
    seed: int,
    draws: int = DRAWS,
) -> Comparison:
    """Compute the table and the gains.

    Args:
        rows: outcomes by policy, all over the same tasks in any order.
        singles: model -> the policy of the row in which it served alone.
        routed: policy of the row whose gain is asked.
        random: policy of the uniformly random row.
        seed: seed of the bootstrap, any integer.
        draws: resamples, at least 1.

    Raises:
        ValueError: a named row is missing, a row repeats a task, or rows differ in tasks.
    """
    missing = {routed, random, *singles.values()} - set(rows)
    if missing or not singles:
        raise ValueError(f"rows {sorted(missing)} are missing" if missing else "no single model was run")
    task_ids = _common_tasks(rows)
    ordered = {policy: _in_order(outcomes, task_ids) for policy, outcomes in rows.items()}
    samples = _resamples([o.family for o in ordered[routed]], seed, draws)
    gains = _gains(ordered, singles, routed, random, samples)
    return Comparison(
        rows=tuple(summarize(policy, outcomes) for policy, outcomes in ordered.items()),
        gain_over_frontier=gains[0],
        gain_at_same_shares=gains[1],
        gain_over_random=gains[2],
        luck_mismatches=count_luck_mismatches(ordered),
    )


def count_luck_mismatches(rows: Mapping[str, Sequence[TaskOutcome]]) -> int:
    """Count the (task, model) pairs that passed in one row and failed in another."""
    seen: dict[tuple[str, str], set[float]] = {}
    for outcomes in rows.values():
        for outcome in outcomes:
            if outcome.model:
                seen.setdefault((outcome.task_id, outcome.model), set()).add(outcome.success)
    return sum(len(successes) > 1 for successes in seen.values())


def frontier(cost: _FLOATS, success: _FLOATS, at_cost: _FLOATS) -> _FLOATS:
    """Evaluate the mixing frontier, one world per row.

    Args:
        cost: (n_worlds, n_models) mean cost of each single model.
        success: (n_worlds, n_models) its mean success.
        at_cost: (n_worlds,) what may be spent per program.

    Returns:
        (n_worlds,) the highest success that random mixing reaches.

    >>> frontier(np.array([[1.0, 3.0]]), np.array([[0.2, 0.6]]), np.array([2.0]))
    array([0.4])
    """
    at_cost = at_cost * (1.0 + 1e-12)  # a mean of equal costs may come out a rounding below them
    cheapest = cost.argmin(axis=1, keepdims=True)
    best: _FLOATS = np.take_along_axis(success, cheapest, axis=1)[:, 0]  # (n_worlds,)
    n_models = cost.shape[1]
    for i in range(n_models):
        best = np.where(cost[:, i] <= at_cost, np.maximum(best, success[:, i]), best)
        for j in range(n_models):
            inside = (cost[:, i] <= at_cost) & (at_cost < cost[:, j])
            part = (at_cost - cost[:, i]) / np.where(inside, cost[:, j] - cost[:, i], 1.0)
            mixed = success[:, i] + part * (success[:, j] - success[:, i])
            best = np.where(inside, np.maximum(best, mixed), best)
    return best


def _common_tasks(rows: Mapping[str, Sequence[TaskOutcome]]) -> list[str]:
    wanted: list[str] | None = None
    for policy, outcomes in rows.items():
        ids = sorted(outcome.task_id for outcome in outcomes)
        if len(set(ids)) != len(ids):
            raise ValueError(f"row {policy!r} has a task twice")
        if wanted is not None and ids != wanted:
            raise ValueError(f"row {policy!r} ran other tasks than the rows before it")
        wanted = ids
    if not wanted:
        raise ValueError("no row has outcomes")
    return wanted


def _in_order(outcomes: Sequence[TaskOutcome], task_ids: Sequence[str]) -> list[TaskOutcome]:
    by_task = {outcome.task_id: outcome for outcome in outcomes}
    return [by_task[task_id] for task_id in task_ids]


def _resamples(families: Sequence[str], seed: int, draws: int) -> _FLOATS:
    """Draw how often each task enters each resample, as parts of one; row 0 is the stream itself."""
    n = len(families)
    rng = np.random.Generator(np.random.Philox(abs(seed) * 2 + (seed < 0)))
    counts = np.zeros((draws + 1, n))
    counts[0] = 1.0
    for family in sorted(set(families)):
        places = np.flatnonzero([f == family for f in families])
        drawn = rng.multinomial(len(places), np.full(len(places), 1.0 / len(places)), size=draws)
        counts[1:, places] = drawn
    return counts / n


def _gains(
    rows: Mapping[str, Sequence[TaskOutcome]],
    singles: Mapping[str, str],
    routed: str,
    random: str,
    samples: _FLOATS,
) -> tuple[Gain, Gain, Gain]:
    def means(policy: str, field: str) -> _FLOATS:
        values: _FLOATS = np.array([getattr(outcome, field) for outcome in rows[policy]], dtype=float)
        return np.asarray(samples @ values, dtype=np.float64)

    cost = np.stack([means(policy, "cost_usd") for policy in singles.values()], axis=1)
    success = np.stack([means(policy, "success") for policy in singles.values()], axis=1)
    own = means(routed, "success")
    served = np.array([[o.model == model for o in rows[routed]] for model in singles], dtype=float)
    shares = samples @ served.T  # (n_worlds, n_models)
    return (
        _gain(own - frontier(cost, success, means(routed, "cost_usd"))),
        _gain(own - (shares * success).sum(axis=1)),
        _gain(own - means(random, "success")),
    )


def _gain(differences: _FLOATS) -> Gain:
    """Take world 0 as the estimate and the others as its spread."""
    low, high = np.percentile(differences[1:], (2.5, 97.5))
    return Gain(pp=100.0 * float(differences[0]), ci95=(100.0 * float(low), 100.0 * float(high)))
