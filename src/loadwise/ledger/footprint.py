"""How large all admitted programs together will become: their expected contexts, weighted with their survival.

A reservation of one peak each is cautious: programs are at different places, and while one is at its peak another has
ended. What must fit is the largest sum over the horizon of

    sum over programs p of  (c_p + x) * P(peak > c_p + x | peak > c_p)

where c_p is the context now and x what every program appends meanwhile. The clock is the context itself, not seconds:
under load programs become slower, not larger.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HORIZON_STEPS = 24

Floats = npt.NDArray[np.float64]


def projected(contexts: Sequence[float], peaks: Sequence[float]) -> Floats:
    """Expected sum of contexts, now and at steps of growth up to the largest peak that was seen.

    Args:
        contexts: tokens of each program now, shape (n,).
        peaks: peaks of ended programs, shape (m,), m >= 1.

    Returns:
        Shape (HORIZON_STEPS,), tokens; the first is the sum now.

    >>> round(projected([100.0, 300.0], [400.0]).max())
    574
    """
    if not contexts:
        return np.zeros(HORIZON_STEPS)
    now = np.asarray(contexts, dtype=np.float64)
    known = np.sort(np.asarray(peaks, dtype=np.float64))
    growth = np.linspace(0.0, max(float(known[-1]), float(now.max())), HORIZON_STEPS)
    later = now[:, None] + growth[None, :]
    alive = _exceed(known, later) / np.maximum(_exceed(known, now), 1e-12)[:, None]
    total: Floats = (later * np.minimum(alive, 1.0)).sum(axis=0)
    total[0] = now.sum()  # whoever is larger than any peak seen is there all the same
    return total


def _exceed(known: Floats, x: Floats) -> Floats:
    """P(peak >= x), from sorted peaks."""
    n_below = np.searchsorted(known, x, side="left")
    share: Floats = (len(known) - n_below) / len(known)
    return share
