"""The plainest line there is: K places that are all alike, as forecasts are tested on."""

import math
from collections.abc import Sequence

import numpy as np

from loadwise.ledger.drain import Crowd, Drain, Gate, Lives, Newcomer
from loadwise.ledger.forecast import Span, span_of


class Departures:
    """The line before K places that are all alike: whoever leaves is replaced at once, and nobody knows of contexts."""

    def __init__(self, elapsed_s: Sequence[float], runs_s: Sequence[float], n_most: int, prior_s: float = 0.0) -> None:
        """
        Args:
            elapsed_s: how long each admitted program has run, shape (K,).
            runs_s: run times of ended programs, shape (m,); m >= 1 where there is no prior.
            n_most: how many departures will be asked for at most.
            prior_s: mean run time that is expected before any is known; 0: none is.
        """
        elapsed = np.asarray(elapsed_s, dtype=np.float64)
        n = len(elapsed)
        lives = Lives([prior_s] if prior_s > 0.0 else [], runs_s, elapsed_s)
        share = np.full(n, 1.0 / max(n, 1))
        crowd = Crowd(elapsed, np.full(n, math.inf), share, np.zeros(n))
        newcomer = Newcomer(age=0.0, rate_per_s=1.0, budget_s=math.inf, base=1.0 / max(n, 1), slope=0.0)
        self._drain = Drain(crowd, lives, newcomer, Gate(limit=1.0), n_most)

    def wait_s(self, n_ahead: int) -> float:
        """The median time until `n_ahead + 1` have left."""
        return self._drain.wait_s(n_ahead, 0.0)

    def span(self, n_ahead: int) -> Span:
        """The median and 80 % interval of the time until `n_ahead + 1` have left."""
        return span_of(self._drain, n_ahead)
