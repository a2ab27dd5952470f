"""How long a program would wait for admission: a point by mean rates, or a distribution from who runs how long already.

`mean_wait_s` is ORACLE's: (q + 1) D / max(K, 1), as if K programs left at even intervals. `Departures` looks at
the elapsed times instead. With F_i(t) the chance that admitted program i has left t seconds from now, given how long it
has run, and every departure replaced at once by a fresh program, the expected number of departures is

    m(t) = sum_i [ F_i(t) + integral of M(t - s) dF_i(s) ],   M the renewal function of the run times,

and the wait is the first t with m(t) = q + 1/2 (the median of a sum of many independent departures).

How far forecasts were off is learned as quantiles of realised / forecast: they make the interval and correct the point.

References: ORACLE, appendix B.2 (w_m); renewal functions: Cox, Renewal Theory (1962), chapter 4. The quantiles follow
Robbins and Monro's stochastic approximation.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.fact import Fact

GRID_STEPS = 64
LOW, HIGH = 0.1, 0.9
"""The interval holds 80 % of waits."""

Floats = npt.NDArray[np.float64]


class Forecast(Fact, frozen=True, kw_only=True):
    """Seconds until a program would be admitted."""

    wait_s: float
    low_s: float
    high_s: float
    base_s: float
    """Before what earlier forecasts have taught; errors are counted against it."""


NO_WAIT = Forecast(wait_s=0.0, low_s=0.0, high_s=0.0, base_s=0.0)


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
            runs_s: run times of ended programs, shape (m,), m >= 1.
            n_most: how many departures will be asked for at most.
        """
        known = np.sort(np.asarray(runs_s, dtype=np.float64))
        self._mean_s = float(known.mean())
        self._n = len(elapsed_s)
        self._horizon_s = 2.0 * mean_wait_s(n_most, self._n, self._mean_s) + float(known[-1])
        self._grid = grid = np.linspace(0.0, self._horizon_s, GRID_STEPS + 1)
        if not self._n:
            self._left = np.zeros(GRID_STEPS + 1)
            return
        leaving = _leaving(np.asarray(elapsed_s, dtype=np.float64), known, grid)
        self._left = leaving + np.convolve(np.diff(leaving, prepend=0.0), _renewals(known, grid))[: len(grid)]

    def wait_s(self, n_ahead: int) -> float:
        """The median time until `n_ahead + 1` have left.

        >>> 0.0 < Departures([90.0], [100.0], 3).wait_s(0) < 11.0
        True
        """
        if not self._n:
            return mean_wait_s(n_ahead, 0, self._mean_s)
        wanted, left, grid = n_ahead + 0.5, self._left, self._grid
        at = int(np.searchsorted(left, wanted))
        if at >= len(grid):
            return self._horizon_s * wanted / max(float(left[-1]), 0.5)
        if at == 0:
            return 0.0
        rise = float(left[at] - left[at - 1])
        return float(grid[at - 1] + (grid[at] - grid[at - 1]) * (wanted - float(left[at - 1])) / max(rise, 1e-12))


def _leaving(elapsed_s: Floats, known: Floats, grid: Floats) -> Floats:
    """Expected number that have left by each instant, of those there now; shape of `grid`.

    Between two known run times the distribution is a line. Who has run longer than any is taken to leave with the rate
    of the mean.
    """
    n = len(known)
    levels = np.arange(1, n + 1) / n
    done = np.interp(elapsed_s, known, levels, left=0.0)
    later = np.interp(elapsed_s[:, None] + grid[None, :], known, levels, left=0.0)
    late = done >= 1.0
    gone = (later - done[:, None]) / np.maximum(1.0 - done, 1e-9)[:, None]
    gone[late] = 1.0 - np.exp(-grid / max(float(known.mean()), 1e-9))
    total: Floats = gone.sum(axis=0)
    return total


def _renewals(known: Floats, grid: Floats) -> Floats:
    """Expected number of departures of one place that is filled anew at each, by each instant; shape of `grid`."""
    levels = np.arange(1, len(known) + 1) / len(known)
    lasting = np.interp(grid, known, levels, left=0.0)
    steps = np.diff(lasting, prepend=0.0)
    found = np.zeros(len(grid))
    for i in range(1, len(grid)):
        found[i] = lasting[i] + float(np.dot(steps[1 : i + 1], found[i - 1 :: -1][:i]))
    return found


class Errors(msgspec.Struct, kw_only=True):
    """Quantiles of log(realised / forecast), moved a little by every wait that has ended.

    >>> errors = Errors()
    >>> for _ in range(300):
    ...     errors.learn(forecast_s=100.0, realised_s=200.0)
    >>> round(errors.corrected(50.0).wait_s, -1)
    100.0
    """

    low: float = -0.7
    middle: float = 0.0
    high: float = 0.7
    n: int = 0

    def learn(self, *, forecast_s: float, realised_s: float) -> None:
        """A wait has ended that had been forecast."""
        if forecast_s <= 0.0:
            return
        self.n += 1
        off = math.log(min(max(realised_s, 1e-3 * forecast_s), 1e3 * forecast_s) / forecast_s)
        gain = max(1.0 / (1.0 + 0.2 * self.n), 0.05)
        self.low += gain * (LOW - (off <= self.low))
        self.middle += gain * (0.5 - (off <= self.middle))
        self.high += gain * (HIGH - (off <= self.high))

    def corrected(self, base_s: float) -> Forecast:
        """The forecast with its interval."""
        low, middle, high = sorted((self.low, self.middle, self.high))
        return Forecast(
            wait_s=base_s * math.exp(middle),
            low_s=base_s * math.exp(low),
            high_s=base_s * math.exp(high),
            base_s=base_s,
        )
