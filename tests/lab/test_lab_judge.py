"""Differences between policies are paired: same halvings, same draws of tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lab_folder import invented

from loadwise.lab.experiment import ReplayConfig, Result, run_replay
from loadwise.lab.judge import halving, paired_gains


def replayed(folder: Path) -> Result:
    return run_replay(
        ReplayConfig(
            outcomes=str(invented(folder)),
            families=("swe", "chat"),
            models=("small", "big"),
            policies=("linucb", "linucb?alpha=0.3", "random"),
            verifications=("adaptive", "single"),
            cost_weights=(0.0, 0.5),
            n_passes=2,
            n_orders=2,
            n_draws=200,
        )
    )


def test_paired_differences_are_those_of_the_reported_gains(tmp_path: Path) -> None:
    """The value is the difference of two figures; an arm against itself is zero with no width; order turns the sign."""
    judged = replayed(tmp_path).judged
    one, other, single = ("linucb", "adaptive"), ("linucb?alpha=0.3", "adaptive"), ("linucb", "single")
    found = paired_gains(
        judged, {"self": (one, one), "forth": (one, other), "back": (other, one), "drop_in": (one, single)}
    )
    assert found["self"].value == 0.0 and found["self"].ci95 == (0.0, 0.0)
    named = {key: judged.values[f"{key[0]}.{key[1]}.over_hull_cross_fitted_pp"] for key in (one, other, single)}
    assert found["forth"].value == pytest.approx(named[one] - named[other])
    assert found["drop_in"].value == pytest.approx(named[one] - named[single])
    assert found["back"].ci95 == pytest.approx(tuple(-bound for bound in reversed(found["forth"].ci95)), abs=1e-9)
    assert found["drop_in"].ci95[0] <= found["drop_in"].value <= found["drop_in"].ci95[1]


def test_an_arm_of_one_point_is_paired_as_it_is(tmp_path: Path) -> None:
    """A policy that rewards cannot change has nothing to choose: its point is its gain, with the same draws."""
    judged = replayed(tmp_path).judged
    arm = ("random", "adaptive")
    (point,) = [one for one in judged.points if (one.policy, one.verification) == arm]
    gain = judged.gains[arm]
    assert gain.value == pytest.approx(point.hull_gain_pp) and gain.drawn.shape == (200,)
    assert tuple(np.quantile(gain.drawn, (0.025, 0.975))) == pytest.approx(point.ci95)
    (pair,) = paired_gains(judged, {"p": (("linucb", "adaptive"), arm)}).values()
    assert pair.value == pytest.approx(judged.gains["linucb", "adaptive"].value - point.hull_gain_pp)


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (7, 10, 1)])
def test_a_halving_halves_each_family(sizes: tuple[int, ...]) -> None:
    """The second half holds half of each family's tasks, rounded down."""
    family = np.repeat(np.arange(len(sizes)), sizes)
    is_second = halving(family, np.random.default_rng(0))
    assert [int(is_second[family == at].sum()) for at in range(len(sizes))] == [size // 2 for size in sizes]
