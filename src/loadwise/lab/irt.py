"""Item response model: how strong each respondent is and how hard each task, from who solved what.

    logit P(respondent r solves task t) = s_t·(a_r - d_t)

with ability a_r ~ N(0, 1.5²), difficulty d_t ~ N(mean of all, 1.5²) and log discrimination log s_t ~ N(0, 0.25²). The
priors are the shrinkage: a task that one model has run stays near the mean, one that a hundred have run speaks for
itself. The most likely values are found by Newton steps on each kind in turn, each step damped by its prior.

Reference: A. Birnbaum in F. Lord and M. Novick, Statistical Theories of Mental Test Scores, 1968 (two-parameter
logistic model); maximum a posteriori estimates as in R. Mislevy, Psychometrika 51, 1986.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SPREAD_ABILITY = 1.5
SPREAD_DIFFICULTY = 1.5
SPREAD_LOG_DISCRIMINATION = 0.25
TRIALS_MAX = 5.0
"""More trials than these of one pair count as these: they share the pair's luck."""
_ROUNDS = 60
_STEP_MAX = 1.0
_TOLERANCE = 1e-5


class Items(NamedTuple):
    """The fit of one family."""

    ability: Array
    """Shape (R,); zero is a middling respondent."""
    difficulty: Array
    """Shape (T,)."""
    discrimination: Array
    """Shape (T,), around 1."""

    def middling_logit(self) -> Array:
        """Logit of the chance of a respondent of ability zero, shape (T,)."""
        return -self.discrimination * self.difficulty

    def chance(self, ability: float) -> Array:
        """The chance of a respondent of that ability at each task, shape (T,)."""
        return sigmoid(self.discrimination * (ability - self.difficulty))


def sigmoid(values: Array) -> Array:
    """1 / (1 + e^-v) without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)))


def fit_items(successes: Array, trials: Array) -> Items:
    """Fit one family.

    Args:
        successes: mean success of respondent r at task t, in [0, 1], shape (R, T); ignored where `trials` is zero.
        trials: how many runs that is, shape (R, T).

    >>> wins = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    >>> items = fit_items(wins, np.ones_like(wins))
    >>> bool(items.ability[0] > items.ability[1] > items.ability[2]), bool(items.difficulty[1] > items.difficulty[0])
    (True, True)
    """
    weight = np.minimum(trials, TRIALS_MAX)
    seen = np.where(weight > 0, successes, 0.0)
    n_respondents, n_tasks = weight.shape
    ability, log_slope = np.zeros(n_respondents), np.zeros(n_tasks)
    share = (seen * weight).sum() / max(float(weight.sum()), 1.0)
    middle = -float(np.log((share + 0.01) / (1.01 - share)))
    difficulty = np.full(n_tasks, middle)
    for _ in range(_ROUNDS):
        before = ability.copy()
        slope = np.exp(log_slope)
        miss, doubt = _residuals(seen, weight, ability, difficulty, slope)
        ability += _step(miss @ slope - ability / SPREAD_ABILITY**2, doubt @ slope**2 + SPREAD_ABILITY**-2)
        ability -= _middle(ability, weight)
        miss, doubt = _residuals(seen, weight, ability, difficulty, slope)
        pull = (difficulty - middle) / SPREAD_DIFFICULTY**2
        difficulty += _step(-slope * miss.sum(axis=0) - pull, slope**2 * doubt.sum(axis=0) + SPREAD_DIFFICULTY**-2)
        middle = float(difficulty.mean())
        miss, doubt = _residuals(seen, weight, ability, difficulty, slope)
        reach = slope * (ability[:, None] - difficulty)  # derivative of the logit by the log slope
        log_slope += _step(
            (miss * reach).sum(axis=0) - log_slope / SPREAD_LOG_DISCRIMINATION**2,
            (doubt * reach**2).sum(axis=0) + SPREAD_LOG_DISCRIMINATION**-2,
        )
        if np.abs(ability - before).max(initial=0.0) < _TOLERANCE:
            break
    return Items(ability, difficulty, np.exp(log_slope))


def _residuals(seen: Array, weight: Array, ability: Array, difficulty: Array, slope: Array) -> tuple[Array, Array]:
    """Weighted residual and weighted variance of each pair."""
    chance = sigmoid(slope * (ability[:, None] - difficulty))
    return weight * (seen - chance), weight * chance * (1.0 - chance)


def _step(gradient: Array, curvature: Array) -> Array:
    return np.asarray(np.clip(gradient / curvature, -_STEP_MAX, _STEP_MAX))


def _middle(ability: Array, weight: Array) -> float:
    """Mean ability of those that ran enough to tell."""
    told = weight.sum(axis=1)
    return float((ability * told).sum() / told.sum()) if told.sum() > 0 else 0.0


class Costs(NamedTuple):
    """Two-way fit of log cost: respondents by tasks."""

    level: Array
    """Log cost of each respondent at a middling task, shape (R,); NaN without a known cost."""
    effort: Array
    """Log of what each task costs over a middling one, shape (T,); zero where nothing is known."""


def fit_costs(log_cost: Array, shrink: float = 0.5) -> Costs:
    """log cost of r at t = level_r + effort_t + noise, efforts shrunk by `shrink` pseudo-runs.

    Args:
        log_cost: shape (R, T), NaN where unknown.
    """
    known = np.isfinite(log_cost)
    filled = np.where(known, log_cost, 0.0)
    n_by_row, n_by_task = known.sum(axis=1), known.sum(axis=0)
    effort = np.zeros(log_cost.shape[1])
    level = np.zeros(log_cost.shape[0])
    for _ in range(30):
        level = (np.where(known, filled - effort, 0.0)).sum(axis=1) / np.maximum(n_by_row, 1)
        effort = np.where(known, filled - level[:, None], 0.0).sum(axis=0) / np.maximum(n_by_task + shrink, 1e-9)
        if known.any():
            effort = np.where(n_by_task > 0, effort - effort[n_by_task > 0].mean(), 0.0)
    return Costs(np.where(n_by_row > 0, level, np.nan), effort)
