"""What another policy would have earned, from decisions that a known chance made: IPS, SNIPS and doubly robust.

With π the policy in question, p the recorded propensities, a the model that ran, y its outcome, and c the inverse of
the chance that such a decision is judged at all (zero where it was not):

    w = π(a) c / p(a)
    IPS     mean of w y
    SNIPS   Σ w y / Σ w
    DR      mean over decisions of Σ_k π(k) q(x, k)   +   Σ w (y - q(x, a)) / Σ w

q is a ridge regression on the journaled context, cross-fitted in time: a decision meets a model of what came before its
block, so that every term of DR stays a martingale difference also where the log's policy learned while it logged. DR is
right where the propensities are, whatever q says; a good q makes it narrow.

**Missing verdicts.** c is estimated from the share of judged decisions by model and task type: verdicts are taken to be
missing by chance within these. Where silence tells of failure, all three are wrong, and the share is printed.

**Intervals.** A policy that keeps an exploration floor ε logs bounded weights (at most K/ε), so the martingale central
limit theorem holds for the sum of the terms divided by the root of their quadratic variation, whether or not the log's
policy ever settles. That variation can be measured in two ways: as the terms turned out (*realised*), or as the
propensities say before the draw (*predictable*), Σ_t Σ_k π²/p · σ²_k with σ²_k the variance of the residuals of model
k. Both are consistent. The first is a matter of luck where few explored decisions carry most of the weight (none of
them in a region: no variance seen there), the second where residuals differ between regions; the interval takes their
mean. Its quantile is Student's at the degrees of freedom that the terms' squares have (Satterthwaite): (Σ E z²)² / Σ E
z⁴. And σ²_k begins with `PRIOR_COUNT` decisions of the widest spread that the outcome allows, so that five explored
decisions that all happened to succeed are not taken for certainty; they count among the degrees of freedom.

The value meant is that of the population that the log's programs are drawn from, not of these very programs.

References:
    M. Dudík, J. Langford, L. Li, Doubly Robust Policy Evaluation and Learning, ICML 2011.
    A. Swaminathan, T. Joachims, The Self-Normalized Estimator for Counterfactual Learning, NIPS 2015.
    V. Hadad, D. Hirshberg, R. Zhan, S. Wager, S. Athey, Confidence intervals for policy evaluation in adaptive
    experiments, PNAS 118, 2021. A. Bibaut et al., Post-Contextual-Bandit Inference, NeurIPS 2021.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .whatif_log import OUTCOMES, Logged

Array = npt.NDArray[np.float64]

PRIOR_COUNT = 2.0
"""Decisions' worth of the widest spread that the residuals of a model begin with."""

N_BLOCKS = 16
"""Pieces of the log, each of which meets an outcome model of those before it."""

RIDGE = 1.0


class Estimate(NamedTuple):
    """One figure with its 95 % interval."""

    value: float
    low: float
    high: float


class Sample(NamedTuple):
    """The decisions that are evaluated, as arrays of n rows and one column a model."""

    x: Array
    """Shape (n, d)."""
    chosen: npt.NDArray[np.int64]
    propensities: Array
    """p, shape (n, models)."""
    target: Array
    """π, shape (n, models)."""
    inverse_judged: Array
    """c, shape (n,)."""
    judged_share: Array
    """Of the decisions for a model those that were judged, shape (models,); one where it never ran."""
    outcome: Array
    """`OUTCOMES`, shape (n, 3); zero where there is none."""

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """Shape (n,)."""
        return self.inverse_judged > 0.0

    def of_chosen(self, values: Array) -> Array:
        """Of each row of values, shape (n, models), that of the model that ran."""
        taken: Array = np.take_along_axis(values, self.chosen[:, None], axis=1)[:, 0]
        return taken

    def variation(self, target: Array, power: int) -> Array:
        """Σ_k π^power / (p·judged)^(power - 1), model by model, shape (n, models)."""
        chance = self.propensities * self.judged_share
        return np.divide(target**power, chance ** (power - 1), out=np.zeros_like(target), where=chance > 0.0)

    @property
    def effective_n(self) -> float:
        """n² / Σ_t Σ_k π²/p: how many decisions of the policy itself would say as much, before the draw."""
        total = float(self.variation(self.target, 2).sum())
        return len(self.chosen) ** 2 / total if total > 0.0 else 0.0


class Estimates(NamedTuple):
    """Everything that is estimated of one policy."""

    by_name: dict[str, Estimate]
    """`OUTCOME.ESTIMATOR`; estimators are `ips`, `snips`, `dr`, `logged` (what the log's own policy earned) and `gain`
    (DR minus logged, paired)."""
    effective_n: float
    """See `Sample.effective_n`."""
    kish_n: float
    """As it turned out: (Σ w)² / Σ w²."""
    weight_max: float


def make_sample(decisions: tuple[Logged, ...], models: tuple[str, ...], target: Array) -> Sample:
    """The decisions as arrays."""
    place = {name: index for index, name in enumerate(models)}
    propensities = np.zeros((len(decisions), len(models)))
    for row, one in enumerate(decisions):
        for candidate, propensity in zip(one.candidates, one.propensities, strict=True):
            propensities[row, place[candidate.name]] = propensity
    chosen = np.array([place[one.candidates[one.chosen].name] for one in decisions], dtype=np.int64)
    judged = np.array([one.outcome is not None for one in decisions])
    inverse, share = _judging(decisions, chosen, judged, len(models))
    return Sample(
        x=np.array([one.x for one in decisions]),
        chosen=chosen,
        propensities=propensities,
        target=target,
        inverse_judged=inverse,
        judged_share=share,
        outcome=np.array([one.outcome or (0.0,) * len(OUTCOMES) for one in decisions]),
    )


def _judging(
    decisions: tuple[Logged, ...], chosen: npt.NDArray[np.int64], judged: npt.NDArray[np.bool_], n_models: int
) -> tuple[Array, Array]:
    """c by model and task type, shrunk by two decisions to the model's own share; and that share."""
    inverse, shares = np.zeros(len(decisions)), np.ones(n_models)
    kinds = np.unique([one.task_type or "" for one in decisions], return_inverse=True)[1]
    for model in np.unique(chosen):
        of_model = chosen == model
        shares[model] = judged[of_model].mean()
        for kind in np.unique(kinds[of_model]):
            rows = of_model & (kinds == kind)
            ratio = (judged[rows].sum() + 2.0 * shares[model]) / (rows.sum() + 2.0)
            inverse[rows & judged] = 1.0 / ratio if ratio > 0.0 else 0.0
    return inverse, shares


def estimate(sample: Sample) -> Estimates:
    """All figures of all outcomes."""
    reached = sample.of_chosen(sample.target) * sample.inverse_judged
    weight = reached / sample.of_chosen(sample.propensities)
    success, _, reward = sample.outcome.T
    slope = _slope(success[sample.judged], reward[sample.judged])
    spread_by_name = {"success": 0.25, "cost_usd": None, "reward": 0.25 * slope * slope}
    found: dict[str, Estimate] = {}
    for column, name in enumerate(OUTCOMES):
        figures = _Figures(sample, weight, sample.outcome[:, column], spread_by_name[name])
        found |= {f"{name}.{key}": one for key, one in figures.all().items()}
    for key in ("ips", "snips", "dr", "logged"):  # no success lies elsewhere
        value, low, high = found[f"success.{key}"]
        found[f"success.{key}"] = Estimate(value, max(low, 0.0), min(high, 1.0))
    total, square = float(weight.sum()), float((weight * weight).sum())
    kish_n = total * total / square if square else 0.0
    return Estimates(found, sample.effective_n, kish_n, float(weight.max(initial=0.0)))


def _slope(success: Array, reward: Array) -> float:
    """How much of the reward one success is."""
    centred = success - success.mean() if len(success) else success
    square = float(centred @ centred)
    return float(centred @ reward) / square if square > 0.0 else 1.0


class _Figures:
    """The estimates of one outcome."""

    def __init__(self, sample: Sample, weight: Array, y: Array, variance_max: float | None) -> None:
        self._sample = sample
        self._n = len(y)
        self._y = y
        self._weight = weight
        self._normed = weight / max(float(weight.mean()), 1e-300)
        self._fitted = fit_outcomes(sample, y)
        self._residual = np.where(sample.judged, y - sample.of_chosen(self._fitted), 0.0)
        self._variance_max = variance_max
        """The largest variance that the outcome can have; None where it has no bounds."""

    def all(self) -> dict[str, Estimate]:
        sample, y = self._sample, self._y
        ips = self._weight * y
        snips = float((self._normed * y).mean())
        snips_residual = np.where(sample.judged, y - snips, 0.0)
        policy = self._doubly_robust(sample.target, self._normed)
        own_weight = sample.inverse_judged / max(float(sample.inverse_judged.mean()), 1e-300)
        logged = self._doubly_robust(sample.propensities, own_weight)
        values = {"dr": policy, "logged": logged, "gain": (policy[0] - logged[0], policy[1] - logged[1])}
        weights = {"dr": sample.target, "logged": sample.propensities, "gain": sample.target - sample.propensities}
        found = {
            "ips": self._interval(float(ips.mean()), ips - ips.mean(), sample.target, y, self._fitted),
            "snips": self._interval(snips, self._normed * snips_residual, sample.target, snips_residual, None),
        }
        for key, (value, terms) in values.items():
            found[key] = self._interval(value, terms, weights[key], self._residual, self._fitted)
        return found

    def _doubly_robust(self, target: Array, normed: Array) -> tuple[float, Array]:
        """A value, and the terms whose mean is its error, shape (n,)."""
        direct = (target * self._fitted).sum(axis=1)
        correction = float((normed * self._residual).mean())
        off = np.where(self._sample.judged, self._residual - correction, 0.0)
        return float(direct.mean()) + correction, direct - direct.mean() + normed * off

    def _interval(self, value: float, terms: Array, target: Array, residual: Array, fitted: Array | None) -> Estimate:
        """Student's interval at the mean of realised and predictable variation."""
        sample, n = self._sample, self._n
        variances = self._variances(residual)
        between = 0.0
        if fitted is not None:
            direct = (target * fitted).sum(axis=1)
            between = float(((direct - direct.mean()) ** 2).sum())
        within = float((sample.variation(target, 2) @ variances).sum())
        quartic = float((np.abs(sample.variation(target, 4)) @ variances**2).sum())
        realised = float((terms * terms).sum())
        freedom = PRIOR_COUNT + within * within / quartic if quartic > 0.0 else n - 1.0
        half = student_quantile(freedom) * math.sqrt((within + between + realised) / 2.0) / n
        return Estimate(value, value - half, value + half)

    def _variances(self, residual: Array) -> Array:
        """Mean square of the residuals of each model, shape (models,)."""
        sample = self._sample
        squares = residual[sample.judged] ** 2
        prior = self._variance_max
        if prior is None:
            prior = float(squares.mean()) if len(squares) else 0.0
        n_models = sample.target.shape[1]
        chosen = sample.chosen[sample.judged]
        totals = np.bincount(chosen, squares, n_models) + PRIOR_COUNT * prior
        means: Array = totals / (np.bincount(chosen, minlength=n_models) + PRIOR_COUNT)
        return means


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution (G. W. Hill, Communications of the ACM 13, 1970).

    >>> [round(student_quantile(n), 2) for n in (2, 3, 10, 30, 1e6)]
    [4.3, 3.18, 2.23, 2.04, 1.96]
    """
    n = max(freedom, 2.0)
    a = 1.0 / (n - 0.5)
    b = (48.0 / a) / a
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * n
    y = (d * 0.05) ** (2.0 / n)
    if y > a + 0.05:
        z = -1.959963984540054
        y = z * z
        if n < 5.0:
            c += 0.3 * (n - 4.5) * (z + 0.6)
        c = (((0.05 * d * z - 5.0) * z - 7.0) * z - 2.0) * z + b + c
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * z
        y = math.expm1(a * y * y)
    else:
        tail = (1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)) * y - 1.0
        y = tail * (n + 1.0) / (n + 2.0) + 1.0 / y
    return math.sqrt(n * abs(y))


def fit_outcomes(sample: Sample, y: Array) -> Array:
    """q at every decision and model, each block from those before it; shape (n, models).

    Two ridges: one over all models, and one a model for what it leaves. The first block, which has nothing before it,
    meets the mean of the others in it.
    """
    n, n_models = sample.target.shape
    seen = sample.judged
    fitted = np.zeros((n, n_models))
    if not seen.any():
        return fitted
    ends = np.unique(np.linspace(0, n, N_BLOCKS + 1).round().astype(int))
    first = np.flatnonzero(seen[: ends[1]])
    total = float(y[first].sum())
    others = (total - np.where(seen, y, 0.0)[: ends[1]]) / np.maximum(len(first) - seen[: ends[1]], 1)
    fitted[: ends[1]] = others[:, None]
    for begin, end in itertools.pairwise(ends[1:]):
        past = np.flatnonzero(seen[:begin])
        if not len(past):
            continue
        block = _predict(sample, y, past, slice(begin, end))
        fitted[begin:end] = np.clip(block, y[past].min(), y[past].max())
    return fitted


def _predict(sample: Sample, y: Array, past: npt.NDArray[np.int64], block: slice) -> Array:
    mean = float(y[past].mean())
    shared = _ridge(sample.x[past], y[past] - mean)
    left = y[past] - mean - sample.x[past] @ shared
    found = np.repeat((mean + sample.x[block] @ shared)[:, None], sample.target.shape[1], axis=1)
    for model in np.unique(sample.chosen[past]):
        rows = sample.chosen[past] == model
        found[:, model] += sample.x[block] @ _ridge(sample.x[past][rows], left[rows])
    return found.astype(np.float64)


def _ridge(x: Array, y: Array) -> Array:
    return np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y).astype(np.float64)
