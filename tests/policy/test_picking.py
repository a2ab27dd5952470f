"""Who explores plays what is reported, whatever the policy, and within the same limits."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.policy.base import Candidate, Context
from loadwise.policy.drift import Drift, DriftOptions
from loadwise.policy.greedy import EpsilonGreedy, EpsilonGreedyOptions
from loadwise.policy.known import Known, KnownOptions
from loadwise.policy.labelled import ACRouter, ACRouterOptions, Table, TableOptions
from loadwise.policy.linear import LinTS, LinTSOptions, LinUCB, LinUCBOptions
from loadwise.policy.nearest import Nearest, NearestOptions
from loadwise.policy.pacer import Pacer, PacerOptions
from loadwise.policy.picking import best_index, best_or_any

POOL = [Candidate(name=name, price_usd=price) for name, price in (("b", 2.0), ("a", 1.0), ("c", 1.0))]
EXPLORING: list[tuple[Any, Any]] = [
    (Drift, DriftOptions),
    (EpsilonGreedy, EpsilonGreedyOptions),
    (Known, KnownOptions),
    (Table, TableOptions),
    (ACRouter, ACRouterOptions),
    (LinUCB, LinUCBOptions),
    (Nearest, NearestOptions),
    (Pacer, PacerOptions),
]
"""All but Thompson sampling, whose choice is random before it explores."""


@pytest.mark.parametrize(("policy", "options"), EXPLORING, ids=lambda one: one.__name__)
def test_every_floor_is_played_as_it_is_reported(policy: Any, options: Any) -> None:
    """Of 4,000 choices without evidence, each candidate gets its reported share to within four standard deviations."""
    chooser, rng, n = policy(options(exploration_floor=0.3)), np.random.default_rng(5), 4000
    choices = [chooser.choose(Context(decision_id=d, x=np.ones(2)), POOL, rng) for d in range(n)]
    (shares,) = {choice.propensities for choice in choices}
    assert sorted(shares) == pytest.approx([0.1, 0.1, 0.8])
    played = Counter(choice.chosen for choice in choices)
    for index, share in enumerate(shares):
        assert abs(played[index] - n * share) <= 4.0 * (n * share * (1.0 - share)) ** 0.5, (index, played)


@pytest.mark.parametrize("floor", [-0.01, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("options", [*(options for _, options in EXPLORING), LinTSOptions], ids=lambda o: o.__name__)
def test_a_floor_out_of_range_is_refused(options: Any, floor: float) -> None:
    """By name, value and limit."""
    with pytest.raises(ConfigError, match=r"exploration_floor is .*; it must be in \[0, 1\)"):
        options(exploration_floor=floor)


@given(st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=3), st.floats(0.0, 0.99), st.integers(0, 2**32))
def test_the_best_or_any_carries_what_it_was_given(scores: list[float], floor: float, seed: int) -> None:
    """Scores, means and widths stay as they are; shares sum to one; without a floor the best is taken undrawn."""
    pool, rng = POOL[: len(scores)], np.random.default_rng(seed)
    before = rng.bit_generator.state
    choice = best_or_any(scores, scores, pool, floor, rng, [1.0] * len(scores))
    assert (choice.scores, choice.means, choice.widths) == (tuple(scores), tuple(scores), (1.0,) * len(scores))
    assert choice.propensities is not None and sum(choice.propensities) == pytest.approx(1.0)
    best = best_index(scores, pool)
    assert choice.propensities[best] == max(choice.propensities)
    assert choice.propensities[choice.chosen] > 0.0
    if floor == 0.0:
        assert choice.chosen == best and rng.bit_generator.state == before


def test_thompson_sampling_without_widths_explores_as_reported() -> None:
    """Nothing is left to sample at scale 0: the floor alone is chance."""
    choice = LinTS(LinTSOptions(scale=0.0, exploration_floor=0.3)).choose(
        Context(decision_id=1, x=np.ones(2)), POOL, np.random.default_rng(1)
    )
    assert choice.propensities == pytest.approx((0.1, 0.8, 0.1))
