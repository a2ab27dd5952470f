"""How large all admitted programs together will become: their expected contexts, weighted with their survival.

A reservation of one peak each is cautious: programs are at different places, and while one is at its peak another has
ended. What must fit is the largest sum over the horizon of

    sum over programs p of  (c_p + x) * P(peak > c_p + x | peak > c_p)

where c_p is the context now and x what every program appends meanwhile. The clock is the context itself, not seconds:
under load programs become slower, not larger.

That is the mean of a sum which chance spreads; nothing is kept in hand for that. Where it comes out too large, contexts
are lost for a moment, and programs are paused (`residency`).

Reference: Kaplan and Meier, Nonparametric estimation from incomplete observations (1958).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HORIZON_STEPS = 24

Floats = npt.NDArray[np.float64]


def projected(contexts: Sequence[float], peaks: Sequence[float], cut: Sequence[float] = ()) -> Floats:
    """Expected sum of contexts, now and at steps of growth up to the largest peak that was seen.

    Args:
        contexts: tokens of each program now, shape (n,).
        peaks: peaks of ended programs, shape (m,), m >= 1.
        cut: contexts of programs that were cut off before they ended, shape (k,).

    Returns:
        Tokens, shape (HORIZON_STEPS,); the first is the sum now.

    >>> round(projected([100.0, 300.0], [400.0]).max())
    574
    """
    if not contexts:
        return np.zeros(HORIZON_STEPS)
    now = np.asarray(contexts, dtype=np.float64)
    ended = np.sort(np.asarray(peaks, dtype=np.float64))
    left = survival(ended, np.concatenate((now, np.asarray(cut, dtype=np.float64))))
    growth = np.linspace(0.0, max(float(ended[-1]), float(now.max())), HORIZON_STEPS)
    later = now[:, None] + growth[None, :]
    alive = left[np.searchsorted(ended, later)] / np.maximum(left[np.searchsorted(ended, now)], 1e-9)[:, None]
    alive = np.minimum(alive, 1.0)
    alive[:, 0] = 1.0  # whoever is larger than any peak seen is there all the same
    total: Floats = (later * alive).sum(axis=0)
    return total


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
