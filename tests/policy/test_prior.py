"""What a prior does to a linear learner: it speaks first, and evidence has the last word."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, SchemaMismatch, Unprocessable
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.checks import check_policy
from loadwise.policy.linear import LinTS, LinTSOptions, LinUCB, LinUCBOptions
from loadwise.policy.prior import Primed, Prior, shift
from loadwise.policy.registry import PolicySpec, make_policy

POOL = [Candidate(name="good", price_usd=2.0), Candidate(name="bad", price_usd=1.0)]


def prior(d: int = 2, **more: Any) -> Prior:
    """A prior for contexts of `d` features that says nothing but what it is told."""
    blank = (0.0,) * d
    said = {"success": blank, "success_blind": blank, "cost": blank, "cost_blind": blank}
    rest = {"counts": (8.0,) * (d + 2), "mean_of_others": (0.0,) * (d + 2)}
    return Prior(**{**said, **rest, **more})


def wrong(strength: float, h: float = 0.0) -> Prior:
    """A prior that takes the bad candidate for the good one."""
    means = {"good": (-strength, 0.0, h, 0.0), "bad": (strength, 0.0, -h, 0.0)}
    return prior(counts=(20.0,) * 4, means=means)


def context_of(step: int) -> Context:
    """A bias and a second feature that comes and goes."""
    return Context(decision_id=step, x=np.array([1.0, float(step % 2)]))


def replay(policy: Any, n_steps: int, seed: int, rates: tuple[float, float] = (0.8, 0.4)) -> list[int]:
    """Bernoulli rewards; returns what was chosen."""
    streams = Streams(seed)
    chosen = []
    for step in range(n_steps):
        context = context_of(step)
        choice = policy.choose(context, POOL, streams.at("policy", step))
        name = POOL[choice.chosen].name
        policy.observe(step, name, context.x)
        reward = float(streams.at("world", step).random() < rates[choice.chosen])
        policy.learn(Feedback(decision_id=step, candidate=name, x=context.x, reward=reward))
        chosen.append(choice.chosen)
    return chosen


@pytest.mark.parametrize("thompson", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("strength", "h"), [(0.0, 0.0), (0.25, 0.0), (0.6, 0.5), (0.6, -0.5), (3.0, 0.0)])
def test_a_wrong_pack_does_no_lasting_harm(strength: float, h: float, seed: int, thompson: bool) -> None:
    """However wrong it is, and without a floor, the better candidate runs nearly always after 2,000 decisions."""
    said = wrong(strength, h)
    policy = LinTS(LinTSOptions(prior=said, exploration_floor=0.02)) if thompson else LinUCB(LinUCBOptions(prior=said))
    chosen = replay(policy, 2500, seed)
    assert sum(chosen[-500:]) <= 0.1 * 500


@settings(max_examples=20, deadline=None)
@given(strength=st.floats(0.0, 0.6), seed=st.integers(0, 1000))
def test_a_right_pack_is_not_thrown_away(strength: float, seed: int) -> None:
    """Tries and shifts cost little where the pack is right: the first hundred go to the better candidate."""
    said = prior(counts=(20.0,) * 4, means={"good": (0.6, 0.0, 0.0, 0.0), "bad": (0.4 - strength, 0.0, 0.0, 0.0)})
    assert sum(replay(LinUCB(LinUCBOptions(prior=said)), 100, seed)) <= 25


def test_a_pack_that_is_about_right_is_not_moved() -> None:
    """Luck and the pack's own doubt are no evidence against it."""
    assert shift(0.25 * 20, 20, 0.2, 0.04) == 0.0
    assert shift(0.0, 0, 0.2, 0.04) == 0.0


@given(st.floats(-50.0, 50.0), st.integers(1, 10_000), st.floats(1e-6, 10.0), st.floats(1e-6, 10.0))
def test_a_shift_goes_towards_the_evidence_and_not_beyond(total: float, n: int, noise: float, doubt: float) -> None:
    """Between zero and the mean residual."""
    moved, off = shift(total, n, noise, doubt), total / n
    assert min(0.0, off) - 1e-12 <= moved <= max(0.0, off) + 1e-12


@settings(max_examples=30, deadline=None)
@given(
    said=st.lists(st.floats(-3.0, 3.0), min_size=4, max_size=4),
    counts=st.lists(st.floats(0.1, 50.0), min_size=4, max_size=4),
)
def test_evidence_overrules_the_mean(said: list[float], counts: list[float]) -> None:
    """After many verdicts on the same contexts the estimate is their mean reward."""
    policy = LinUCB(LinUCBOptions(prior=prior(counts=tuple(counts), means={"good": tuple(said)})))
    x = np.array([1.0, 1.0])
    for step in range(3000):
        policy.learn(Feedback(decision_id=step, candidate="good", x=x, reward=0.3))
    mean = policy.choose(Context(decision_id=0, x=x), POOL, np.random.default_rng(0)).means[0]
    assert mean == pytest.approx(0.3, abs=0.05 + max(map(abs, said)) * sum(counts) / 3000)


@given(
    x=st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=2), m=st.lists(st.floats(-2.0, 2.0), min_size=4, max_size=4)
)
def test_the_first_word_is_the_packs(x: list[float], m: list[float]) -> None:
    """Without a verdict the mean is m·[x | h | g], of a candidate it does not know that of the others."""
    said = prior(success=(0.5, -1.0), success_blind=(0.5, -1.0), cost=(0.1, 0.2), cost_blind=(0.1, 0.2))
    said = msgspec.structs.replace(said, means={"good": tuple(m)}, mean_of_others=(1.0, 0.0, 0.0, 0.0))
    choice = LinUCB(LinUCBOptions(prior=said)).choose(
        Context(decision_id=1, x=np.array(x)), POOL, np.random.default_rng(0)
    )
    h = 1.0 / (1.0 + np.exp(-(0.5 * x[0] - x[1])))
    g = np.exp(0.1 * x[0] + 0.2 * x[1])
    assert choice.means[0] == pytest.approx(m[0] * x[0] + m[1] * x[1] + m[2] * h + m[3] * g, abs=1e-9)
    assert choice.means[1] == pytest.approx(x[0], abs=1e-9)


def test_a_text_that_was_not_read_has_weights_of_its_own() -> None:
    """The place `at_text` decides between the two sets."""
    primed = Primed(prior(at_text=1, success=(0.0, 2.0), success_blind=(-2.0, 0.0)))
    assert primed.expanded(np.array([1.0, 1.0]))[2] == pytest.approx(1.0 / (1.0 + np.exp(-2.0)))
    assert primed.expanded(np.array([1.0, 0.0]))[2] == pytest.approx(1.0 / (1.0 + np.exp(2.0)))


@pytest.mark.parametrize("name", ["linucb", "lints", "pacer"])
def test_the_contract_holds_with_a_prior(name: str) -> None:
    """Every check of the suite: purity, undo, dump and load, propensities, wrong contexts."""
    said = msgspec.to_builtins(prior(d=3, means={"a": (0.1, 0.0, 0.0, 1.0, -0.5)}))

    def make() -> Any:
        return make_policy(PolicySpec(name=name, options={"prior": said, "n_features": 3}))

    for check in check_policy(make, n_features=3):
        check.run()


def test_a_dump_of_another_pack_does_not_load() -> None:
    """What was learned beyond one mean says nothing beyond another."""
    dumped = LinUCB(LinUCBOptions(prior=wrong(0.1), n_features=2)).dump()
    LinUCB(LinUCBOptions(prior=wrong(0.1), n_features=2)).load(dumped)
    for other in (LinUCBOptions(prior=wrong(0.2), n_features=2), LinUCBOptions(n_features=2)):
        with pytest.raises(SchemaMismatch):
            LinUCB(other).load(dumped)


def test_a_context_of_another_length_is_refused() -> None:
    """Also one that is as long as the learner's own variables."""
    policy = LinUCB(LinUCBOptions(prior=prior()))
    for length in (1, 3, 4):
        with pytest.raises(Unprocessable, match=r"takes \(2,\)"):
            policy.observe(1, "good", np.zeros(length))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"counts": (1.0, 1.0)}, "counts has 2 values; expected 4"),
        ({"counts": (1.0, 1.0, 1.0, 0.0)}, "counts holds 0.0"),
        ({"success": (1.0,)}, "success_blind has 2 values; expected 1"),
        ({"cost": (float("nan"), 0.0)}, "cost holds nan"),
        ({"means": {"a": (1e9, 0.0, 0.0, 0.0)}}, r"means\['a'\] holds 1000000000.0"),
        ({"means": {str(i): (0.0,) * 4 for i in range(257)}}, "257 candidates; the limit is 256"),
        ({"at_text": 2}, "at_text is 2"),
    ],
)
def test_a_wrong_prior_is_refused_in_words(wrong: dict[str, Any], said: str) -> None:
    """Lengths, ranges and limits, each named."""
    with pytest.raises(ConfigError, match=said):
        prior(**wrong)


@pytest.mark.parametrize(
    "options", [{"prior_strength": 0.0}, {"component_ridge": 0.0}, {"n_components": -1}, {"n_features": 3}]
)
def test_wrong_options_beside_it_are_refused(options: dict[str, Any]) -> None:
    """A strength of nothing, a ridge of nothing, contexts of another length."""
    with pytest.raises(ConfigError):
        LinUCBOptions(prior=prior(), **options)


def test_strength_multiplies_the_counts() -> None:
    """Ten times the strength moves a tenth as far on one verdict, to first order."""
    moved = []
    for strength in (1.0, 10.0):
        policy = LinUCB(LinUCBOptions(prior=prior(counts=(100.0,) * 4), prior_strength=strength))
        policy.observe(0, "good", np.array([1.0, 0.0]))
        policy.learn(Feedback(decision_id=0, candidate="good", x=np.array([1.0, 0.0]), reward=0.5))
        moved.append(policy.choose(context_of(0), POOL, np.random.default_rng(0)).means[0])
    assert moved[0] == pytest.approx(10.0 * moved[1], rel=0.05)


def test_components_are_believed_later_where_told_so() -> None:
    """A component's coefficient moves 25 times less with `component_ridge` 25; kinds of tasks move as before."""
    x, kind = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    moved = {}
    for ridge in (None, 25.0):
        policy = LinUCB(LinUCBOptions(component_ridge=ridge, n_components=1))
        for step, seen in enumerate((x, kind)):
            policy.observe(step, "good", seen)
            policy.learn(Feedback(decision_id=step, candidate="good", x=seen, reward=1.0))
        rng = np.random.default_rng(0)
        moved[ridge] = [policy.choose(Context(decision_id=9, x=seen), POOL, rng).means[0] for seen in (x, kind)]
    assert moved[None] == pytest.approx([0.5, 0.5])
    assert moved[25.0] == pytest.approx([1 / 26, 0.5])
