"""A verdict taken back leaves no trace in any policy of ours."""

import msgspec
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


PRIOR = {
    **dict.fromkeys(("success", "success_blind", "cost", "cost_blind"), [0.1] * 4),
    "counts": [3.0] * 6,
    "means": {"a": [2.0, 0.0, 0.0, 0.0, 1.0, -1.0]},
    "mean_of_others": [0.0] * 6,
}
PRIMED = {"with prior": ("linucb", {"prior": PRIOR}), "late": ("lints", {"component_ridge": 9.0, "n_components": 2})}


@pytest.mark.parametrize("name", [*(name for name in policy_names() if name != "drift"), *PRIMED])
@settings(deadline=None, max_examples=15)
@given(wrong=st.dictionaries(st.integers(0, 29), st.sampled_from([-0.5, 0.0, 1.0]), max_size=8), data=st.data())
def test_wrong_verdicts_taken_back_and_given_anew_are_as_if_they_had_been_right(name, wrong, data):
    """learn(wrong), unlearn(wrong), learn(right) in any order equals learn(right)."""
    kind, options = PRIMED.get(name, (name, REQUIRED.get(name, {})))
    plain, detoured = (make_policy(PolicySpec(name=kind, options=options)) for _ in range(2))
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


@settings(deadline=None, max_examples=30)
@given(wrong=st.dictionaries(st.integers(0, 29), st.sampled_from([-0.5, 0.0, 1.0]), max_size=8), data=st.data())
def test_where_evidence_fades_a_corrected_verdict_has_the_weight_of_its_day(wrong, data):
    """As if it had been right at once, with verdicts of others in between and over a dump."""
    spec = PolicySpec(name="drift", options={"alarm": 0.0, "discount": 0.95})
    plain, detoured = make_policy(spec), make_policy(spec)
    right = lambda n: 0.25 + (n % 4) / 8  # noqa: E731
    for n in range(30):
        for policy in (plain, detoured):
            policy.observe(n, POOL[n % 3].name, context(n))
    for n in range(30):
        plain.learn(feedback(n, right(n)))
        detoured.learn(feedback(n, wrong.get(n, right(n))))
    for n in data.draw(st.permutations(list(wrong))):
        detoured.unlearn(msgspec.structs.replace(feedback(n, wrong[n]), age=29 - n))
        if data.draw(st.booleans()):
            state, detoured = detoured.dump(), make_policy(spec)
            detoured.load(state)
        detoured.learn(feedback(n, right(n)))
    assert scores(plain) == pytest.approx(scores(detoured), abs=1e-9)
