"""How good forecasts of waits were: coverage, points, and calibration, over cells."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np

from .bootstrap import interval

N_DRAWS = 2000
Z = NormalDist().inv_cdf(0.9)
COVERED = (0.75, 0.85)
WITHIN_2 = 0.8


class Wait(NamedTuple):
    """A wait that had been forecast and came to be, in seconds."""

    point_s: float
    low_s: float
    high_s: float
    n_ahead: int
    real_s: float


class Told(Protocol):
    """What a cell's result says of its forecasts: counts."""

    @property
    def forecast_n(self) -> float: ...

    @property
    def forecast_covered(self) -> float: ...

    @property
    def forecast_within_2(self) -> float: ...

    @property
    def forecast_n_far(self) -> float: ...


def forecast_object(results: Sequence[Told]) -> dict[str, object]:
    """Coverage of 80 % intervals and share of points within a factor of two, pooled over cells.

    Waits of one cell tell one story, so the intervals are a bootstrap over cells.
    """
    n, covered, near, far = (
        np.array([getattr(result, name) for result in results], dtype=np.float64)
        for name in ("forecast_n", "forecast_covered", "forecast_within_2", "forecast_n_far")
    )
    said: dict[str, object] = {"n": int(n.sum()), "n_far": int(far.sum()), "n_cells": len(results)}
    bounds: dict[str, list[float]] = {}
    drawn = np.random.default_rng(0).integers(len(results), size=(N_DRAWS, len(results)))
    for name, part, whole in (("coverage", covered, n), ("within_2", near, far)):
        said[name] = float(part.sum() / whole.sum()) if whole.sum() > 0 else None
        if len(results) > 1 and whole.sum() > 0:
            bounds[name] = list(interval(part[drawn].sum(axis=1) / np.maximum(whole[drawn].sum(axis=1), 1.0)))
    said["ci95"] = bounds
    return said


def level(wait: Wait) -> float:
    """The quantile of its forecast at which a wait came out: lognormal on either side of the point.

    >>> round(level(Wait(100.0, 50.0, 150.0, 4, 50.0)), 2), round(level(Wait(100.0, 50.0, 150.0, 4, 150.0)), 2)
    (0.1, 0.9)
    """
    off = math.log(max(wait.real_s, 1e-3) / max(wait.point_s, 1e-3))
    end_s = wait.low_s if off < 0.0 else wait.high_s
    half = abs(math.log(max(end_s, 1e-3) / max(wait.point_s, 1e-3)))
    return NormalDist().cdf(Z * off / max(half, 1e-3))


def calibration(waits: Sequence[Wait], nominal: Sequence[float]) -> list[float]:
    """The share of waits that came out at or below each nominal quantile."""
    levels = np.sort([level(wait) for wait in waits])
    return [float(np.searchsorted(levels, q, side="right") / max(len(levels), 1)) for q in nominal]
