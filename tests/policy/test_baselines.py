"""The baselines choose as they say."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.streams import Streams
from loadwise.policy.balance import LeastLoaded, PowerOfTwo, load_key
from loadwise.policy.base import Candidate, Context
from loadwise.policy.fixed import Fixed, FixedOptions, Mixing, MixingOptions, Random, RoundRobin

CONTEXT = Context(decision_id=0, x=np.ones(1))

loads = st.builds(
    lambda n_running, n_held, headroom, price: {
        "n_running": n_running,
        "n_held": n_held,
        "headroom_ratio": headroom,
        "price_usd": price,
    },
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([-0.5, 0.0, 0.5, 1.0]),
    st.sampled_from([0.1, 1.0]),
)
pools = st.lists(loads, min_size=1, max_size=6).map(
    lambda drawn: [Candidate(name=f"m{index}", **fields) for index, fields in enumerate(drawn)]
)


def test_fixed_chooses_its_candidate_or_the_cheapest() -> None:
    """A missing candidate is replaced by the cheapest, then the first name."""
    policy = Fixed(FixedOptions(candidate="b"))
    a, b, c = Candidate(name="a", price_usd=2), Candidate(name="b", price_usd=3), Candidate(name="c", price_usd=2)
    assert policy.choose(CONTEXT, [a, b, c], None).chosen == 1
    assert policy.choose(CONTEXT, [c, a], None).chosen == 1


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1), min_size=1).filter(lambda w: sum(w.values()) > 0))
def test_mixing_is_normalised_over_those_present(weights) -> None:
    """Propensities are proportional to the weights of present candidates, or uniform where none has any."""
    pool = [Candidate(name=name) for name in "acz"]
    choice = Mixing(MixingOptions(weights=weights)).choose(CONTEXT, pool, np.random.default_rng(0))
    present = [weights.get(name, 0.0) for name in "acz"]
    if sum(present) == 0:
        present = [1.0, 1.0, 1.0]
    assert choice.propensities == pytest.approx([weight / sum(present) for weight in present], rel=1e-9, abs=1e-300)
    assert choice.propensities[choice.chosen] > 0


def test_round_robin_takes_turns_through_pool_changes() -> None:
    """Each name in turn; an undone decision gives its turn back; a joining candidate gets no backlog."""
    policy, taken = RoundRobin(), []
    pool = [Candidate(name=name) for name in "bca"]
    for decision_id in range(6):
        name = pool[policy.choose(CONTEXT, pool, None).chosen].name
        policy.observe(decision_id, name, CONTEXT.x)
        taken.append(name)
    assert taken == list("abcabc")
    policy.undo(5, "c", CONTEXT.x)
    assert pool[policy.choose(CONTEXT, pool, None).chosen].name == "c"
    counts = Counter()
    for decision_id in range(40):
        wider = [*pool, Candidate(name="d")]
        name = wider[policy.choose(CONTEXT, wider, None).chosen].name
        policy.observe(decision_id, name, CONTEXT.x)
        counts[name] += 1
    assert set(counts.values()) == {10}


def test_round_robin_never_counts_below_zero() -> None:
    """An undo too many leaves the turn where it was."""
    policy = RoundRobin()
    policy.undo(0, "a", CONTEXT.x)
    assert policy.choose(CONTEXT, [Candidate(name="a"), Candidate(name="b")], None).chosen == 0


@given(pools)
def test_least_loaded_is_minimal(pool) -> None:
    """No candidate has fewer turns; among equals none has more headroom, a lower price or an earlier name."""
    chosen = pool[LeastLoaded().choose(CONTEXT, pool, None).chosen]
    assert all(load_key(chosen) <= load_key(candidate) for candidate in pool)
    assert chosen.n_running + chosen.n_held == min(c.n_running + c.n_held for c in pool)


@given(pools, st.integers(0, 2**31))
def test_power_of_two_never_takes_the_most_loaded(pool, seed: int) -> None:
    """Of two different candidates one is less loaded: the most loaded wins only where it is alone."""
    choice = PowerOfTwo().choose(CONTEXT, pool, np.random.default_rng(seed))
    worst = max(pool, key=load_key).name
    assert len(pool) == 1 or pool[choice.chosen].name != worst


@pytest.mark.parametrize(
    "policy",
    [PowerOfTwo(), Random(), Mixing(MixingOptions(weights={"m0": 0.1, "m1": 0.2, "m3": 0.7}))],
    ids=lambda policy: policy.name,
)
def test_shares_are_the_reported_propensities(policy) -> None:
    """Over 8000 decisions each candidate's share is its propensity, to four standard errors."""
    pool = [Candidate(name=f"m{index}", n_running=(3, 1, 2, 0)[index]) for index in range(4)]
    streams = Streams(3)
    choices = [policy.choose(CONTEXT, pool, streams.at("shares", index)) for index in range(8000)]
    shares = np.bincount([choice.chosen for choice in choices], minlength=4) / 8000
    for share, propensity in zip(shares, choices[0].propensities, strict=True):
        assert abs(share - propensity) <= 4 * np.sqrt(propensity * (1 - propensity) / 8000)
