"""Law L12: the chosen candidate's propensity is positive and the vector sums to one, in every state of every policy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.checks import check_propensities
from loadwise.policy.registry import PolicySpec, make_policy, policy_names

OPTIONS = {
    "fixed": st.fixed_dictionaries({"candidate": st.sampled_from("abz")}),
    "mixing": st.fixed_dictionaries(
        {"weights": st.dictionaries(st.sampled_from("abcz"), st.floats(0.01, 1.0), min_size=1)}
    ),
    "linucb": st.fixed_dictionaries(
        {
            "exploration_floor": st.sampled_from([0.0, 0.02, 0.5]),
            "gram": st.sampled_from(["gram_all", "gram_all_mean", "landed"]),
        }
    ),
    "lints": st.fixed_dictionaries({"exploration_floor": st.sampled_from([0.0, 0.02])}),
    "epsilon_greedy": st.fixed_dictionaries({"exploration_floor": st.sampled_from([0.0, 0.1])}),
}

candidates = st.builds(
    Candidate,
    name=st.sampled_from("abcdef"),
    price_usd=st.floats(0.0, 10.0),
    n_running=st.integers(0, 5),
    n_held=st.integers(0, 5),
    headroom_ratio=st.floats(-1.0, 1.0),
)
pools = st.lists(candidates, min_size=1, max_size=6, unique_by=lambda candidate: candidate.name)
steps = st.lists(
    st.tuples(pools, st.sampled_from(["learn", "undo", "pending"]), st.floats(0.0, 1.0), st.integers(0, 2**31)),
    max_size=8,
)


@pytest.mark.parametrize("name", policy_names())
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_l12_holds_in_every_state(name: str, data) -> None:
    """After any history, with any pool, the propensities of a choice are lawful; deterministic policies report one."""
    options = data.draw(OPTIONS.get(name, st.just({})))
    policy = make_policy(PolicySpec(name=name, options=options))
    streams = Streams(5)
    for decision_id, (pool, fate, reward, seed) in enumerate(data.draw(steps)):
        x = np.random.default_rng(seed).normal(size=3)
        choice = policy.choose(Context(decision_id=decision_id, x=x), pool, streams.at("policy", decision_id))
        vector = choice.propensities
        if vector is None:
            vector = policy.propensities(choice, streams.at("propensities", decision_id))
            assert vector == policy.propensities(choice, streams.at("propensities", decision_id))
        check_propensities(vector, choice.chosen, len(pool))
        if policy.is_deterministic:
            assert vector[choice.chosen] == 1.0
        chosen = pool[choice.chosen].name
        policy.observe(decision_id, chosen, x)
        if fate == "learn":
            policy.learn(Feedback(decision_id=decision_id, candidate=chosen, x=x, reward=reward))
        elif fate == "undo":
            policy.undo(decision_id, chosen, x)


@pytest.mark.parametrize("name", ["linucb", "lints"])
@given(pool=pools, seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_floor_gives_every_candidate_its_share(name: str, pool, seed: int) -> None:
    """With ε = .02, as preset `loadwise` has it, every candidate keeps at least ε/K, whatever was learned."""
    rng = np.random.default_rng(seed)
    policy = make_policy(PolicySpec(name=name, options={"exploration_floor": 0.02}))
    for decision_id in range(20):
        x = rng.normal(size=3)
        policy.observe(decision_id, "a", x)
        policy.learn(Feedback(decision_id=decision_id, candidate="a", x=x, reward=float(rng.integers(2))))
    choice = policy.choose(Context(decision_id=99, x=rng.normal(size=3)), pool, rng)
    vector = choice.propensities or policy.propensities(choice, rng)
    check_propensities(vector, choice.chosen, len(pool))
    assert min(vector) >= 0.02 / len(pool) - 1e-12
