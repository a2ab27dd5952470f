"""What a linear learner knows before its first verdict: an experience pack, compiled for one pool and one reward.

A pack (`docs/formats/pack.md`) knows how hard and how dear tasks are, by kind of task and by their text, and how strong
and how dear models are. Compiled, it is a change of variables for a linear learner, and a mean for each candidate:

    difficulty  h(x) = sigmoid(w_h·x)        how likely a middling model is to succeed
    cost        g(x) = exp(w_g·x)            what the task costs a middling model, over the mean
    z           = [x_j / sqrt(λ_j) | h / sqrt(λ_h) | g / sqrt(λ_g)]
    reward      = m_k·[x | h | g] + θ_k·z + noise,     θ_k ~ N(0, 1/ridge)

The learner works on z, and on rewards from which the prior mean m_k is taken; what it says gets the mean back. So λ_j
are pseudo-counts: a coefficient of x_j leaves the pack's word as soon as about λ_j verdicts contradict it. The mean is
linear in [x | h | g], which z spans: whatever the pack says, evidence overrules it in the end, exactly as it would
overrule a mean of zero. Two rules make that quick where a pack is badly wrong:

- Where a candidate's rewards are further off its mean than the pack's own doubt and luck explain (two standard errors),
  the mean moves to them (`shift`, a hard threshold). Two or three verdicts suffice against a gross error.
- A candidate that the pack speaks ill of is tried all the same, `tries_due` times: about log2 of the decisions.

References: D. Donoho and I. Johnstone, Biometrika 81, 1994 (hard threshold); the tries are those that T. Lai and
H. Robbins, Advances in Applied Mathematics 6, 1985, show no consistent rule to do without.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from loadwise.kernel.errors import ConfigError, Unprocessable
from loadwise.kernel.fact import Fact

from .base import Vector

N_ADDED = 2
"""Features that a prior adds to a context: h and g."""
WEIGHT_MAX = 1e6
COUNT_MIN, COUNT_MAX = 1e-6, 1e9
LOG_COST_MAX = 5.0
"""g stays within e^±5 of the mean: a text that looks like no other must not look like a fortune."""
CANDIDATES_MAX = 256
SURPRISE = 4.0
"""Squared standard errors that count as luck."""


class Prior(Fact, frozen=True, kw_only=True):
    """Prior knowledge of one pool, as numbers; made by `loadwise.lab.pack_prior`, put into a policy's options.

    Raises:
        ConfigError: lengths differ, or a value is not finite or out of its range.
    """

    pack: str = ""
    """Hash of the pack it was made from."""
    at_text: int = -1
    """Place in x of the feature that is 1 where the text was read; -1 where there is none."""
    success: tuple[float, ...]
    """w_h where the text was read, shape (d,)."""
    success_blind: tuple[float, ...]
    """w_h where it was not."""
    cost: tuple[float, ...]
    cost_blind: tuple[float, ...]
    counts: tuple[float, ...]
    """λ, shape (d + 2,): pseudo-counts of each coefficient."""
    means: dict[str, tuple[float, ...]] = {}
    """m_k by candidate, shape (d + 2,)."""
    mean_of_others: tuple[float, ...]
    """m of a candidate that is not in `means`."""
    noise: float = 0.2
    """Variance of a reward around its mean."""
    doubt: float = 0.04
    """Variance of what a candidate's rewards may be off the pack's word, on the whole."""

    def __post_init__(self) -> None:
        d = len(self.success)
        if len(self.means) > CANDIDATES_MAX:
            raise ConfigError(f"prior has means of {len(self.means)} candidates; the limit is {CANDIDATES_MAX}")
        for name in ("success", "success_blind", "cost", "cost_blind"):
            _require(name, getattr(self, name), d)
        _require("mean_of_others", self.mean_of_others, d + N_ADDED)
        for name, mean in self.means.items():
            _require(f"means[{name!r}]", mean, d + N_ADDED)
        _require("counts", self.counts, d + N_ADDED, COUNT_MIN, COUNT_MAX)
        for name in ("noise", "doubt"):
            if not COUNT_MIN <= getattr(self, name) <= 1e12:
                raise ConfigError(f"prior {name} is {getattr(self, name)!r}; it must be in [{COUNT_MIN:g}, 1e12]")
        if not -1 <= self.at_text < d:
            raise ConfigError(f"prior at_text is {self.at_text!r}; it must be a place of {d} features, or -1")

    @property
    def n_features(self) -> int:
        """Length of a context before the prior adds to it."""
        return len(self.success)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with any of its numbers."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


def _require(
    name: str, values: tuple[float, ...], length: int, low: float = -WEIGHT_MAX, high: float = WEIGHT_MAX
) -> None:
    if len(values) != length:
        raise ConfigError(f"prior {name} has {len(values)} values; expected {length}")
    for value in values:
        if not low <= value <= high:
            raise ConfigError(f"prior {name} holds {value!r}; it must be in [{low:g}, {high:g}]")


class Primed:
    """A prior ready for use on contexts.

    >>> prior = Prior(
    ...     success=(0.0,),
    ...     success_blind=(0.0,),
    ...     cost=(0.0,),
    ...     cost_blind=(0.0,),
    ...     counts=(4.0, 1.0, 1.0),
    ...     means={"small": (0.1, 1.0, 0.0)},
    ...     mean_of_others=(0.0, 1.0, 0.0),
    ... )
    >>> primed = Primed(prior)
    >>> z, means = primed.seen(np.array([1.0]), ["small", "new"])
    >>> z.tolist(), means
    ([0.5, 0.5, 1.0], [0.6, 0.5])
    """

    def __init__(self, prior: Prior, strength: float = 1.0) -> None:
        self._d = prior.n_features
        self._at_text = prior.at_text
        # Rows: text read, blind; columns: success, cost.
        self._weights = np.array([[prior.success_blind, prior.cost_blind], [prior.success, prior.cost]])
        self._scale = 1.0 / np.sqrt(strength * np.array(prior.counts))
        self._means: Mapping[str, Vector] = {name: np.array(mean) for name, mean in prior.means.items()}
        self._others = np.array(prior.mean_of_others)

    @property
    def n_features(self) -> int:
        """Length of z."""
        return self._d + N_ADDED

    def expanded(self, x: Any) -> Vector:
        """[x | h | g], shape (d + 2,).

        Raises:
            Unprocessable: the context has another shape.
        """
        vector: Vector = np.asarray(x, dtype=np.float64)
        if vector.shape != (self._d,):
            raise Unprocessable(f"a context of shape {vector.shape}; this policy takes ({self._d},)", param="x")
        is_read = self._at_text >= 0 and vector[self._at_text] != 0.0
        at_success, at_cost = (self._weights[int(is_read)] @ vector).tolist()
        return np.append(vector, (_sigmoid(at_success), math.exp(_clipped(at_cost, LOG_COST_MAX))))

    def scaled(self, expanded: Vector) -> Vector:
        """z."""
        z: Vector = expanded * self._scale
        return z

    def mean(self, expanded: Vector, candidate: str) -> float:
        """m_k·[x | h | g]."""
        return float(self._means.get(candidate, self._others).dot(expanded))

    def seen(self, x: Any, names: list[str]) -> tuple[Vector, list[float]]:
        """z, and the prior mean of each candidate."""
        expanded = self.expanded(x)
        return self.scaled(expanded), [self.mean(expanded, name) for name in names]


def shift(total: float, n: int, noise: float, doubt: float) -> float:
    """How far the mean of a candidate moves, whose `n` rewards were `total` off the pack's word.

    >>> shift(0.6, 2, 0.2, 0.04), shift(2.6, 2, 0.2, 0.04)
    (0.0, 1.3)
    """
    if n == 0:
        return 0.0
    off = total / n
    expected = SURPRISE * (noise / n + doubt)
    return off if off * off > expected else 0.0


def tries_due(n_decisions: int, n_candidates: int) -> float:
    """How often each candidate must have been tried after so many decisions.

    >>> [round(tries_due(n, 2), 1) for n in (0, 32, 480)]
    [0.0, 1.0, 4.0]
    """
    return math.log2(1.0 + n_decisions / (16.0 * n_candidates))


def _clipped(value: float, limit: float) -> float:
    # A NaN, which only a context that the learner will refuse can give, becomes the limit.
    return max(-limit, min(limit, value))


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-_clipped(value, 30.0)))
