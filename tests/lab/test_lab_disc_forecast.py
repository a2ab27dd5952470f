"""Coverage, points and calibration of forecasts."""

from types import SimpleNamespace

import numpy as np
import pytest

from loadwise.lab.disc_forecast import Wait, calibration, forecast_object, level


def told(n, covered, near, far):
    """A cell's counts."""
    return SimpleNamespace(forecast_n=n, forecast_covered=covered, forecast_within_2=near, forecast_n_far=far)


def test_counts_are_pooled_and_cells_are_drawn_whole():
    """Waits of one cell tell one story: cells that disagree make the interval wide, however many waits they have."""
    same = forecast_object([told(1000.0, 800.0, 90.0, 100.0)] * 10)
    assert (same["coverage"], same["within_2"], same["n"]) == (0.8, 0.9, 10_000)
    mixed = forecast_object([told(1000.0, 1000.0, 90.0, 100.0), told(1000.0, 600.0, 90.0, 100.0)] * 5)
    low, high = mixed["ci95"]["coverage"]
    assert mixed["coverage"] == 0.8 and high - low > 0.15


def test_nothing_forecast_is_no_figure():
    """A cell where nobody waited has no coverage, rather than a bad one."""
    assert forecast_object([told(0.0, 0.0, 0.0, 0.0)])["coverage"] is None


def test_levels_are_those_of_the_intervals_ends():
    """Low, point and high come out at .1, .5 and .9; who starts at once is at the bottom, and no width is no fault."""
    levels = [level(Wait(100.0, 40.0, 180.0, 4, s)) for s in (40.0, 100.0, 180.0)]
    assert levels == pytest.approx([0.1, 0.5, 0.9])
    assert level(Wait(100.0, 40.0, 180.0, 4, 0.0)) < 0.01
    assert level(Wait(100.0, 100.0, 100.0, 4, 101.0)) > 0.99


def test_waits_drawn_from_their_forecasts_are_calibrated():
    """Law: nominal quantiles and shares agree where forecasts are right."""
    rng = np.random.default_rng(1)
    waits = [Wait(100.0, 50.0, 200.0, 4, 100.0 * 2.0 ** (z / 1.2816)) for z in rng.normal(size=4000).tolist()]
    nominal = (0.1, 0.25, 0.5, 0.75, 0.9)
    assert calibration(waits, nominal) == pytest.approx(list(nominal), abs=0.03)
