"""A verdict taken back leaves no trace in any policy of ours."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.guarded import Guarded, unlearner
from loadwise.policy.registry import PolicySpec, make_policy, policy_names

POOL = [Candidate(name="a", price_usd=1.0), Candidate(name="b", price_usd=2.0), Candidate(name="c", price_usd=3.0)]
REQUIRED = {"fixed": {"candidate": "b"}, "mixing": {"weights": {"a": 0.2, "b": 0.5, "c": 0.3}}}


def context(n):
    """The n-th context."""
    return np.random.default_rng([5, n]).normal(size=4)


def feedback(n, reward):
    return Feedback(decision_id=n, candidate=POOL[n % 3].name, x=context(n), reward=reward)


def scores(policy):
    """What the policy thinks of every candidate in a few contexts."""
    found = []
    for n in range(8):
        choice = policy.choose(Context(decision_id=n, x=context(100 + n)), POOL, Streams(1).at("t", n))
        found += [*choice.scores, *choice.means, float(choice.chosen)]
    return np.array(found)


@pytest.mark.parametrize("name", policy_names())
@settings(deadline=None, max_examples=15)
@given(wrong=st.dictionaries(st.integers(0, 29), st.sampled_from([-0.5, 0.0, 1.0]), max_size=8), data=st.data())
def test_wrong_verdicts_taken_back_and_given_anew_are_as_if_they_had_been_right(name, wrong, data):
    """learn(wrong), unlearn(wrong), learn(right) in any order equals learn(right)."""
    plain, detoured = (make_policy(PolicySpec(name=name, options=REQUIRED.get(name, {}))) for _ in range(2))
    for n in range(30):
        for policy in (plain, detoured):
            policy.observe(n, POOL[n % 3].name, context(n))
        plain.learn(feedback(n, 0.25 + (n % 4) / 8)) if n not in wrong else None
        detoured.learn(feedback(n, wrong.get(n, 0.25 + (n % 4) / 8)))
    able = unlearner(detoured)
    assert able is not None
    for n in data.draw(st.permutations(list(wrong))):
        able.unlearn(feedback(n, wrong[n]))
        detoured.learn(feedback(n, 0.25 + (n % 4) / 8))
        plain.learn(feedback(n, 0.25 + (n % 4) / 8))
    assert scores(plain) == pytest.approx(scores(detoured), abs=1e-9)


@pytest.mark.parametrize("name", ["linucb", "epsilon_greedy", "table"])
def test_taking_back_what_was_never_learned_breaks_a_law(name):
    """It would put the learner's sums below nothing."""
    policy = make_policy(PolicySpec(name=name))
    policy.observe(1, "a", context(1))
    with pytest.raises(LawBroken, match="L11"):
        policy.unlearn(feedback(0, 1.0))


class Forgetless:
    """A user's policy without `unlearn`."""

    name, reads, is_deterministic = "mine", (), True

    def unrelated(self):
        return None


def test_a_users_policy_that_cannot_unlearn_says_so():
    """Its first credit stands."""
    assert unlearner(Guarded(Forgetless(), lambda text, is_counted: None)) is None
