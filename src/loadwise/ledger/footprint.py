"""How large all admitted programs together will become: their expected contexts, weighted with their survival.

A reservation of one peak each is cautious: programs are at different places, and while one is at its peak another has
ended. What must fit is the largest sum over the horizon of

    sum over programs p of  (c_p + x) * P(peak > c_p + x | peak > c_p)

where c_p is the context now and x what every program appends meanwhile. The clock is the context itself, not seconds:
under load programs become slower, not larger.

The sum is spread about its mean. Which programs are still there at x is chance, independent among them; how long
programs live is known only as well as the mean of m peaks is, and that doubt they share:

    variance(x) = sum of (c_p + x)^2 s (1 - s)  +  (doubt * what is to be appended yet)^2
    doubt^2     = cv^2 / m  +  (PRIOR_DOUBT * 5 / m)^2,   the prior's five among the m peaks

so that a crowd which finds an idle pool is let in with more care than the same crowd an hour later.

Reference: Kaplan and Meier, Nonparametric estimation from incomplete observations (1958).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .demand import PSEUDO_OBSERVATIONS

HORIZON_STEPS = 24
PRIOR_DOUBT = 0.5
"""Relative standard error of what a pool file says of peaks."""

Floats = npt.NDArray[np.float64]


class Projection(NamedTuple):
    """Sums of contexts, now and at steps of growth up to the largest peak that was seen; shape (HORIZON_STEPS,)."""

    mean: Floats
    """Tokens; the first is the sum now."""
    variance: Floats
    """Tokens squared, of chance alone."""
    doubt: Floats
    """Tokens: one standard error of the mean, because peaks are known only so well."""


NOTHING = Projection(np.zeros(HORIZON_STEPS), np.zeros(HORIZON_STEPS), np.zeros(HORIZON_STEPS))


def projected(contexts: Sequence[float], peaks: Sequence[float], cut: Sequence[float] = ()) -> Projection:
    """Expected sum of contexts, now and later, and how sure that is.

    Args:
        contexts: tokens of each program now, shape (n,).
        peaks: peaks of ended programs, shape (m,), m >= 1.
        cut: contexts of programs that were cut off before they ended, shape (k,).

    >>> round(projected([100.0, 300.0], [400.0]).mean.max())
    574
    """
    if not contexts:
        return NOTHING
    now = np.asarray(contexts, dtype=np.float64)
    ended = np.sort(np.asarray(peaks, dtype=np.float64))
    left = survival(ended, np.concatenate((now, np.asarray(cut, dtype=np.float64))))
    growth = np.linspace(0.0, max(float(ended[-1]), float(now.max())), HORIZON_STEPS)
    later = now[:, None] + growth[None, :]
    alive = left[np.searchsorted(ended, later)] / np.maximum(left[np.searchsorted(ended, now)], 1e-9)[:, None]
    alive = np.minimum(alive, 1.0)
    alive[:, 0] = 1.0  # whoever is larger than any peak seen is there all the same
    expected = later * alive
    total = expected.sum(axis=0)
    variance = (later * expected * (1.0 - alive)).sum(axis=0)
    cv2, m = (float(ended.std()) / max(float(ended.mean()), 1e-9)) ** 2, len(ended)
    relative = math.sqrt(cv2 / m + (PRIOR_DOUBT * PSEUDO_OBSERVATIONS / m) ** 2)
    doubt = relative * np.maximum(total - (now[:, None] * alive).sum(axis=0), 0.0)
    return Projection(total, variance, doubt)


def survival(ended: Floats, running: Floats) -> Floats:
    """P(peak >= x) by Kaplan and Meier: those that run have shown only that their peaks are not below what they hold.

    Without them a young past would lie: the first programs to end are the small ones.

    Args:
        ended: sorted peaks, shape (m,).
        running: contexts of programs that have not ended, shape (n,).

    Returns:
        Shape (m + 1,); entry i holds beyond `ended[i - 1]` up to `ended[i]`.

    >>> survival(np.array([1.0, 2.0]), np.array([5.0, 5.0])).round(2).tolist()
    [1.0, 0.75, 0.5]
    """
    n_at_risk = len(ended) - np.arange(len(ended)) + (running[None, :] >= ended[:, None]).sum(axis=1)
    left: Floats = np.concatenate(([1.0], np.cumprod(1.0 - 1.0 / n_at_risk)))
    return left
