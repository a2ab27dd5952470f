"""How long a program would wait for admission: a point by mean rates, or a distribution from what is known of all.

`mean_wait_s` is ORACLE's: (q + 1) D / max(K, 1), as if K programs left at even intervals and each made room for one.
`drain.Drain` lets the line in as the gate would; the wait's quantile z is the first t at which mean + z deviations of
the number let in reach the place in the line, less those who have left the line otherwise: the median at z = 0, the
interval's ends at z = +-1.28.

How far forecasts were off is learned online (`Errors`), by conformal recalibration: the interval runs between quantiles
of past scores, errors in half widths. That corrects what the model does not know, as far as errors of the past repeat.

References: ORACLE, appendix B.2 (w_m); Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005):
conformal prediction from scores.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from loadwise.kernel.fact import Fact

from .drain import Drain

LOW, HIGH = 0.1, 0.9
"""The interval holds 80 % of waits."""
Z = 1.2816
"""Of the normal distribution at `HIGH`."""
HALF_MIN, HALF_MAX = 0.02, 4.0
"""Half widths of an interval, in logarithms."""
SCORES_MAX = 256
N_PSEUDO = 60


PSEUDO = [NormalDist().inv_cdf((i + 0.5) / N_PSEUDO) / Z for i in range(N_PSEUDO)]
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


def around(wait_s: float, said: Forecast) -> Forecast:
    """The same interval about a point that was found otherwise, and that it then holds.

    >>> around(30.0, certain(10.0)).low_s
    10.0
    """
    return Forecast(wait_s=wait_s, low_s=min(said.low_s, wait_s), high_s=max(said.high_s, wait_s), base=said.base)


def mean_wait_s(n_ahead: int, n_admitted: int, run_s: float) -> float:
    """ORACLE's point forecast.

    >>> round(mean_wait_s(0, 27, 642.0), 1), round(mean_wait_s(10, 27, 642.0), 1)
    (23.8, 261.6)
    """
    return (n_ahead + 1) * run_s / max(n_admitted, 1)


def span_of(drain: Drain, n_ahead: int, leave_per_s: float = 0.0) -> Span:
    """The median and 80 % interval of the wait behind so many others."""
    middle_s, low_s, high_s = (drain.wait_s(n_ahead, z, leave_per_s) for z in (0.0, Z, -Z))
    if not middle_s > 0.0:
        return Span(middle_s=0.0, low_s=0.0, high_s=max(high_s, 0.0))
    below, above = _halves(Span(middle_s=middle_s, low_s=min(low_s, middle_s), high_s=max(high_s, middle_s)))
    below, above = (math.hypot(half, Z * drain.doubt) for half in (below, above))
    return Span(middle_s=middle_s, low_s=middle_s * math.exp(-below), high_s=middle_s * math.exp(above))


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
        scores = sorted([*self.scores, *PSEUDO])
        low, middle, high = (_quantile(scores, q) for q in (LOW, 0.5, HIGH))
        low_s, middle_s, high_s = (
            said.middle_s * math.exp(score * (below if score < 0.0 else above)) for score in (low, middle, high)
        )
        return Forecast(wait_s=middle_s, low_s=low_s, high_s=high_s, base=said)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Between the order statistics; numpy's does the same, and takes twenty times as long for three of them.

    >>> _quantile([0.0, 1.0, 2.0], 0.25)
    0.5
    """
    at = q * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def _halves(said: Span) -> tuple[float, float]:
    """Half widths below and above the median, in logarithms."""
    if not said.middle_s > 0.0:
        return HALF_MIN, HALF_MIN
    below = math.log(said.middle_s / said.low_s) if said.low_s > 0.0 else HALF_MAX
    above = math.log(said.high_s / said.middle_s)
    return min(max(below, HALF_MIN), HALF_MAX), min(max(above, HALF_MIN), HALF_MAX)
