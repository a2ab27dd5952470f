"""How long a program would wait for admission: a point by mean rates, or a distribution from who runs how long already.

`mean_wait_s` is ORACLE's: (q + 1) D / max(K, 1), as if K programs left at even intervals. `Departures` looks at
the elapsed times instead. With F_i(t) the chance that admitted program i has left t seconds from now, given how long it
has run, and every departure replaced at once by a fresh program, the expected number of departures is

    m(t) = sum_i [ F_i(t) + integral of M(t - s) dF_i(s) ],   M the renewal function of the run times.

The number that have left is spread about m(t) with the variance

    v(t) = sum_i F_i (1 - F_i) + r(t) max(c^2, 1 - r(t) / K) + (m(t) s)^2,   r replacements gone, c^2 = variance/mean^2

of which the last part is that the run times themselves are known only so well, and drift together:
s^2 = c^2 / n + (doubt * 5 / n)^2 + drift^2 with n runs known, the prior's five among them. All programs share it, so no
crowd averages it out; without it intervals of long lines are far too narrow. The wait's quantile z is the first t with
m(t) + z sqrt(v(t)) = q + 1/2: the median at z = 0, the interval's ends at z = +-1.28.

Run times are estimated by Kaplan and Meier from those that ended and those that still run: the first to end are the
short ones.

How far forecasts were off is learned online (`Errors`), by conformal recalibration: the interval runs between quantiles
of past scores, errors in half widths. That corrects what the model does not know, above all that programs become slower
together, as far as errors of the past repeat.

References: ORACLE, appendix B.2 (w_m); Cox, Renewal Theory (1962), chapter 4; Kaplan and Meier (1958); Vovk, Gammerman
and Shafer, Algorithmic Learning in a Random World (2005): conformal prediction from scores.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.fact import Fact

from .demand import PSEUDO_OBSERVATIONS
from .footprint import survival

GRID_STEPS = 96
LOW, HIGH = 0.1, 0.9
"""The interval holds 80 % of waits."""
Z = 1.2816
"""Of the normal distribution at `HIGH`."""
DOUBT = 0.5
"""Relative standard error of a prior's mean run time."""
DRIFT = 0.08
"""By how much run times of the near future differ together from those of the past."""
HALF_MIN, HALF_MAX = 0.02, 4.0
"""Half widths of an interval, in logarithms."""
SCORES_MAX = 256
N_PSEUDO = 50

Floats = npt.NDArray[np.float64]

PSEUDO: Floats = np.array([NormalDist().inv_cdf((i + 0.5) / N_PSEUDO) / Z for i in range(N_PSEUDO)])
"""Scores of forecasts that are as good as they say."""


class Forecast(Fact, frozen=True, kw_only=True):
    """Seconds until a program would be admitted."""

    wait_s: float
    low_s: float
    high_s: float
    base: "Span"
    """Before what earlier forecasts have taught; errors are counted against it."""


class Span(Fact, frozen=True, kw_only=True):
    """A median and the ends of an interval, in seconds."""

    middle_s: float
    low_s: float
    high_s: float


def certain(wait_s: float) -> Forecast:
    """A forecast without width."""
    return Forecast(wait_s=wait_s, low_s=wait_s, high_s=wait_s, base=Span(middle_s=wait_s, low_s=wait_s, high_s=wait_s))


NO_WAIT = certain(0.0)


def mean_wait_s(n_ahead: int, n_admitted: int, run_s: float) -> float:
    """ORACLE's point forecast.

    >>> round(mean_wait_s(0, 27, 642.0), 1), round(mean_wait_s(10, 27, 642.0), 1)
    (23.8, 261.6)
    """
    return (n_ahead + 1) * run_s / max(n_admitted, 1)


class Departures:
    """When how many of the admitted programs will have left, departures being replaced at once."""

    def __init__(self, elapsed_s: Sequence[float], runs_s: Sequence[float], n_most: int) -> None:
        """
        Args:
            elapsed_s: how long each admitted program has run, shape (K,).
            runs_s: run times of ended programs, the prior's five among them, shape (m,), m >= 1.
            n_most: how many departures will be asked for at most.
        """
        elapsed = np.asarray(elapsed_s, dtype=np.float64)
        lasting = _Lasting(np.asarray(runs_s, dtype=np.float64), elapsed)
        self._n = len(elapsed)
        self._mean_s = lasting.mean_s
        self._doubt = math.sqrt(lasting.cv2 / lasting.n + (DOUBT * PSEUDO_OBSERVATIONS / lasting.n) ** 2 + DRIFT**2)
        self._doubt = min(self._doubt, 1.0)
        self._horizon_s = 3.0 * mean_wait_s(n_most, self._n, self._mean_s) + lasting.last_s
        self._grid = grid = np.linspace(0.0, self._horizon_s, GRID_STEPS + 1)
        self._left = self._variance = np.zeros(GRID_STEPS + 1)
        if self._n:
            gone = lasting.gone(elapsed, grid)
            leaving = gone.sum(axis=0)
            renewals = _renewals(lasting, grid)
            halfway = (renewals[:-1] + renewals[1:]) / 2.0  # a departure within a step falls in its middle
            again = np.concatenate(([0.0], np.convolve(np.diff(leaving), halfway)[: len(grid) - 1]))
            self._left = leaving + again
            known = (gone * (1.0 - gone)).sum(axis=0) + again * np.maximum(lasting.cv2, 1.0 - again / self._n)
            self._variance = known + (self._doubt * self._left) ** 2

    def wait_s(self, n_ahead: int) -> float:
        """The median time until `n_ahead + 1` have left.

        >>> 0.0 < Departures([90.0], [100.0], 3).wait_s(0) < 11.0
        True
        """
        return self._quantile_s(n_ahead, 0.0)

    def span(self, n_ahead: int) -> Span:
        """The median and 80 % interval of the time until `n_ahead + 1` have left."""
        middle_s = self._quantile_s(n_ahead, 0.0)
        low_s, high_s = self._quantile_s(n_ahead, Z), self._quantile_s(n_ahead, -Z)
        return Span(middle_s=middle_s, low_s=min(low_s, middle_s), high_s=max(high_s, middle_s))

    def _quantile_s(self, n_ahead: int, z: float) -> float:
        """The first instant at which mean + z deviations reach `n_ahead` and a half."""
        if not self._n:
            return mean_wait_s(n_ahead, 0, self._mean_s) * math.exp(-z * self._doubt)
        grid, wanted = self._grid, n_ahead + 0.5
        reached = np.maximum.accumulate(self._left + z * np.sqrt(self._variance))
        at = int(np.searchsorted(reached, wanted))
        if at >= len(grid):
            return float(self._horizon_s * wanted / max(float(reached[-1]), 0.5 * min(1.0, wanted)))
        if at == 0:
            return 0.0
        rise = float(reached[at] - reached[at - 1])
        return float(grid[at - 1] + (grid[at] - grid[at - 1]) * (wanted - float(reached[at - 1])) / max(rise, 1e-12))


class _Lasting:
    """The distribution of run times; between two known ones a line, beyond the last the rate of the mean."""

    def __init__(self, runs_s: Floats, elapsed_s: Floats) -> None:
        self._known = known = np.sort(runs_s)
        self._levels = 1.0 - survival(known, elapsed_s)[1:]
        self.n = len(known)
        self.last_s = float(known[-1])
        self._tail_s = max(float(known.mean()), 1e-9)
        weights = np.diff(self._levels, prepend=0.0)
        left = 1.0 - float(self._levels[-1])
        self.mean_s = float((weights * known).sum()) + left * (self.last_s + self._tail_s)
        spread = float((weights * (known - self.mean_s) ** 2).sum()) + left * (
            (self.last_s + self._tail_s - self.mean_s) ** 2 + self._tail_s**2
        )
        self.cv2 = min(spread / max(self.mean_s, 1e-9) ** 2, 4.0)

    def ended(self, at_s: Floats) -> Floats:
        """Chance that a run is over after so long; shape of `at_s`."""
        within = np.interp(at_s, self._known, self._levels, left=0.0)
        beyond = np.exp(-np.maximum(at_s - self.last_s, 0.0) / self._tail_s)
        over: Floats = np.where(at_s <= self.last_s, within, 1.0 - (1.0 - self._levels[-1]) * beyond)
        return over

    def gone(self, elapsed_s: Floats, grid: Floats) -> Floats:
        """Chance that each program that has run so long has left by each instant; shape (K, of `grid`)."""
        done = self.ended(elapsed_s)[:, None]
        gone = (self.ended(elapsed_s[:, None] + grid[None, :]) - done) / np.maximum(1.0 - done, 1e-9)
        late = done[:, 0] >= 1.0 - 1e-9
        gone[late] = 1.0 - np.exp(-grid / self._tail_s)
        found: Floats = np.clip(gone, 0.0, 1.0)
        return found


def _renewals(lasting: _Lasting, grid: Floats) -> Floats:
    """Expected number of departures of one place that is filled anew at each, by each instant; shape of `grid`."""
    ended = lasting.ended(grid)
    steps = np.diff(ended, prepend=0.0)
    found = np.zeros(len(grid))
    for i in range(1, len(grid)):
        later = (
            found[i - 1 :: -1][:i] + found[i:0:-1][:i]
        ) / 2.0  # found[i] itself is 0 as yet: half of a step's share
        found[i] = (ended[i] + float(np.dot(steps[1 : i + 1], later))) / (1.0 - steps[1] / 2.0)
    return found


class Errors(msgspec.Struct, kw_only=True):
    """How far off forecasts were, in half widths of their intervals, and what follows for the next one.

    Scores are log(realised / median) over the half width on that side, so that the model's own interval is [-1, 1].
    The corrected interval runs between the 10 % and 90 % quantiles of the last scores and of `PSEUDO` more that lie as
    the model has them: waits overlap, and dozens of scores in a row may tell of one and the same slow hour.

    >>> errors, said = Errors(), Span(middle_s=100.0, low_s=80.0, high_s=125.0)
    >>> for _ in range(300):
    ...     errors.learn(said, realised_s=200.0)
    >>> errors.corrected(said).wait_s > 150.0
    True
    """

    scores: list[float] = []
    n: int = 0

    def learn(self, said: Span, *, realised_s: float) -> None:
        """A wait has ended that had been forecast."""
        if not said.middle_s > 0.0:
            return
        below, above = _halves(said)
        off = math.log(min(max(realised_s / said.middle_s, 1e-3), 1e3))
        self.n += 1
        self.scores.append(off / (below if off < 0.0 else above))
        if len(self.scores) > SCORES_MAX:
            del self.scores[0]

    def corrected(self, said: Span) -> Forecast:
        """The forecast with its interval."""
        below, above = _halves(said)
        scores = np.sort(np.concatenate((np.asarray(self.scores, dtype=np.float64), PSEUDO)))
        low, middle, high = (float(score) for score in np.quantile(scores, (LOW, 0.5, HIGH)))
        low_s, middle_s, high_s = (
            said.middle_s * math.exp(score * (below if score < 0.0 else above)) for score in (low, middle, high)
        )
        return Forecast(wait_s=middle_s, low_s=low_s, high_s=high_s, base=said)


def _halves(said: Span) -> tuple[float, float]:
    """Half widths below and above the median, in logarithms."""
    if not said.middle_s > 0.0:
        return HALF_MIN, HALF_MIN
    below = math.log(said.middle_s / said.low_s) if said.low_s > 0.0 else HALF_MAX
    above = math.log(said.high_s / said.middle_s)
    return min(max(below, HALF_MIN), HALF_MAX), min(max(above, HALF_MIN), HALF_MAX)
