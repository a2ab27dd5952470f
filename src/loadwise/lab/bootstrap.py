"""Paired task bootstrap, stratified by family: which tasks are in the stream is the chance that intervals speak of.

A draw takes as many tasks of each family as there are, with replacement; all policies and single models are counted on
the same draw. What the policies chose is fixed: a learner is not run again (ORACLE, B.4).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_CHUNK = 200
"""Draws made at once: bounds the memory whatever the number of tasks."""


def task_draws(family: npt.NDArray[np.int64], n_draws: int, rng: np.random.Generator) -> Iterator[Array]:
    """Shares of each task in each draw, in chunks of shape (draws, n_tasks); each row sums to one."""
    n_tasks = len(family)
    strata = [np.flatnonzero(family == index) for index in np.unique(family)]
    for begin in range(0, n_draws, _CHUNK):
        n = min(_CHUNK, n_draws - begin)
        shares = np.zeros((n, n_tasks))
        for tasks in strata:
            shares[:, tasks] = rng.multinomial(len(tasks), np.full(len(tasks), 1.0 / len(tasks)), size=n)
        yield shares / n_tasks


def interval(values: Array) -> tuple[float, float]:
    """The middle 95 % of draws.

    >>> interval(np.arange(1001.0))
    (25.0, 975.0)
    """
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
