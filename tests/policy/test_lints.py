"""Linear Thompson sampling draws from its posterior and estimates how often."""

import math

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.policy.base import Candidate, Choice, Context, Feedback
from loadwise.policy.linear import LinTS, LinTSOptions

POOL = [Candidate(name="a"), Candidate(name="b")]


def trained() -> LinTS:
    """One success on `a` in each of two directions, one failure on `b`."""
    policy = LinTS(LinTSOptions(exploration_floor=0.1, scale=0.5))
    for decision_id, (name, x, reward) in enumerate(
        [("a", [1.0, 0.0], 1.0), ("a", [1.0, 1.0], 1.0), ("b", [1.0, 0.5], 0.0)]
    ):
        policy.observe(decision_id, name, np.array(x))
        policy.learn(Feedback(decision_id=decision_id, candidate=name, x=np.array(x), reward=reward))
    return policy


def closed_form(choice: Choice, floor: float) -> tuple[float, float]:
    """Of two gaussians the first is larger with probability Φ((m₁-m₂)/sqrt(w₁²+w₂²))."""
    gap = (choice.means[0] - choice.means[1]) / math.hypot(*choice.widths)
    wins = 0.5 * (1.0 + math.erf(gap / math.sqrt(2.0)))
    return (1 - floor) * wins + floor / 2, (1 - floor) * (1 - wins) + floor / 2


def test_estimate_agrees_with_the_closed_form() -> None:
    """Over 200 seeds the estimate is unbiased and its spread is the documented standard error."""
    policy = trained()
    choice = policy.choose(Context(decision_id=9, x=np.array([1.0, 0.3])), POOL, np.random.default_rng(0))
    exact = closed_form(choice, 0.1)
    estimates = np.array([policy.propensities(choice, np.random.default_rng(seed))[0] for seed in range(200)])
    p = (exact[0] - 0.05) / 0.9
    standard_error = 0.9 * math.sqrt(p * (1 - p) / 4000)
    assert abs(estimates.mean() - exact[0]) < 4 * standard_error / math.sqrt(200) + 1 / 4000
    assert estimates.std() == pytest.approx(standard_error, rel=0.2)
    assert standard_error < 0.5 / math.sqrt(4000)


def test_choices_follow_the_closed_form() -> None:
    """Of 5000 choices `a` wins as often as the posterior says, to three standard errors."""
    policy, rng = trained(), np.random.default_rng(1)
    context = Context(decision_id=9, x=np.array([1.0, 0.3]))
    choices = [policy.choose(context, POOL, rng) for _ in range(5000)]
    share = sum(choice.chosen == 0 for choice in choices) / 5000
    assert share == pytest.approx(closed_form(choices[0], 0.1)[0], abs=3 * 0.5 / math.sqrt(5000))


def test_widths_are_the_posterior_deviation() -> None:
    """widths = v·sqrt(xᵀV⁻¹x), means = xᵀL⁻¹b, from the matrices themselves."""
    policy, x = trained(), np.array([1.0, 0.3])
    choice = policy.choose(Context(decision_id=9, x=x), POOL, np.random.default_rng(0))
    for index, name in enumerate("ab"):
        decided, landed, credits = policy.ridge.matrices(name)
        assert choice.widths[index] == pytest.approx(0.5 * math.sqrt(x @ np.linalg.solve(decided, x)))
        assert choice.means[index] == pytest.approx(x @ np.linalg.solve(landed, credits))


def test_order_of_listing_meets_the_same_luck() -> None:
    """Gaussians are dealt by name: the candidate chosen is the same in any order of listing."""
    policy = trained()
    for seed in range(50):
        chosen = {
            pool[policy.choose(Context(decision_id=1, x=np.ones(2)), pool, np.random.default_rng(seed)).chosen].name
            for pool in (POOL, POOL[::-1])
        }
        assert len(chosen) == 1


def test_hopeless_candidates_keep_a_positive_propensity() -> None:
    """Without a floor, a candidate that wins no draw is still reported as possible: it was."""
    policy = LinTS(LinTSOptions(exploration_floor=0.0))
    choice = Choice(chosen=1, means=(5.0, 0.0), widths=(0.1, 0.1), scores=(5.0, 0.0))
    estimate = policy.propensities(choice, np.random.default_rng(0))
    assert 0.0 < estimate[1] < 1 / 4000
    assert sum(estimate) == pytest.approx(1.0, abs=1e-12)


def test_a_zero_context_reports_exact_propensities() -> None:
    """At x = 0 nothing is sampled: the tie rule decides, the floor is all that is random."""
    policy = trained()
    pool = [Candidate(name="dear", price_usd=2.0), Candidate(name="cheap", price_usd=1.0)]
    choice = policy.choose(Context(decision_id=1, x=np.zeros(2)), pool, np.random.default_rng(5))
    assert choice.propensities == pytest.approx((0.05, 0.95))


def test_a_choice_of_another_policy_is_refused() -> None:
    """Propensities cannot be estimated without means and widths."""
    with pytest.raises(ValueError, match="another policy"):
        LinTS().propensities(Choice(chosen=0), np.random.default_rng(0))


@pytest.mark.parametrize("options", [{"scale": -1.0}, {"scale": float("nan")}, {"n_draws": 1999}, {"n_draws": 20_001}])
def test_options_out_of_range_are_refused(options) -> None:
    """The draws behind an estimate are at least 2000; the error names the option."""
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is "):
        LinTSOptions(**options)
