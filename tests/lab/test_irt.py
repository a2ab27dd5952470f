"""The item response model finds what made the outcomes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.lab.irt import fit_costs, fit_items, sigmoid


def outcomes(seed: int, n_respondents: int = 20, n_tasks: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Abilities, difficulties, and one run of each pair."""
    rng = np.random.default_rng(seed)
    ability, difficulty = rng.normal(size=n_respondents), rng.normal(size=n_tasks)
    chance = sigmoid(ability[:, None] - difficulty)
    return ability, difficulty, (rng.random(chance.shape) < chance).astype(float)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_abilities_and_difficulties_are_found(seed: int) -> None:
    """Up to luck: one run each of 20 respondents at 60 tasks."""
    ability, difficulty, wins = outcomes(seed)
    items = fit_items(wins, np.ones_like(wins))
    assert np.corrcoef(items.ability, ability)[0, 1] > 0.85
    assert np.corrcoef(items.difficulty, difficulty)[0, 1] > 0.6
    assert (items.discrimination > 0).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_rows_and_columns_is_immaterial(seed: int) -> None:
    """Who comes first says nothing."""
    _, _, wins = outcomes(seed, 6, 10)
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(6), rng.permutation(10)
    plain, mixed = fit_items(wins, np.ones_like(wins)), fit_items(wins[rows][:, columns], np.ones_like(wins))
    assert mixed.ability == pytest.approx(plain.ability[rows], abs=1e-3)
    assert mixed.difficulty == pytest.approx(plain.difficulty[columns], abs=1e-3)


def test_little_evidence_stays_near_the_mean() -> None:
    """A task that one has run is less extreme than one that all have failed; one that nobody ran is the mean."""
    _, _, wins = outcomes(3)
    trials = np.ones_like(wins)
    wins[:, 0] = 0.0
    wins[0, 1], trials[1:, 1] = 0.0, 0.0
    trials[:, 2] = 0.0
    items = fit_items(wins, trials)
    assert items.difficulty[0] > items.difficulty[1] > items.difficulty[2]
    assert items.difficulty[2] == pytest.approx(items.difficulty.mean(), abs=0.2)


@pytest.mark.parametrize("wins", [np.ones((2, 3)), np.zeros((1, 1)), np.ones((1, 40))])
def test_everybody_alike_is_finite(wins: np.ndarray) -> None:
    """All solved, none solved, one respondent."""
    items = fit_items(wins, np.ones_like(wins))
    assert np.isfinite(items.chance(0.0)).all()
    assert np.isfinite(items.middling_logit()).all()


def test_costs_are_levels_and_efforts() -> None:
    """Exact on a table that is one; a respondent without a cost has none, a task without one is middling."""
    level, effort = np.array([0.0, 2.0, 1.0]), np.array([-0.5, 0.5, 0.0, 0.0])
    table = level[:, None] + effort
    table[2] = np.nan
    table[:, 3] = np.nan
    table[0, 2] = np.nan
    fit = fit_costs(table, shrink=0.0)
    assert fit.level[1] - fit.level[0] == pytest.approx(2.0, abs=1e-6)
    assert np.isnan(fit.level[2])
    assert fit.effort[1] - fit.effort[0] == pytest.approx(1.0, abs=1e-6)
    assert fit.effort[3] == 0.0
