"""A user's policy hears all that ours hear, and cannot change what is remembered."""

from typing import Any

import msgspec
import numpy as np
import pytest

from loadwise.policy.base import Candidate, Choice, Context, Feedback
from loadwise.policy.guarded import Guarded


class Spoiling:
    """Keeps what it is told, and overwrites the features."""

    name, reads, is_deterministic = "spoiling", (), True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def choose(self, context: Context, candidates: Any, rng: Any) -> Choice:
        """The first."""
        self.learn(context)
        return Choice(chosen=0, propensities=(1.0,))

    def learn(self, fact: Any) -> None:
        """Remember, and spoil."""
        self.heard.append(msgspec.structs.replace(fact, x=fact.x.copy()))
        fact.x[:] = 99.0

    unlearn = learn


CONTEXT = Context(decision_id=7, x=np.array([1.0, 2.0]), at_s=3.0, task_type="t", domain="d")
FEEDBACK = Feedback(decision_id=7, candidate="a", x=np.array([1.0, 2.0]), reward=0.5, age=4)


@pytest.mark.parametrize(("method", "fact"), [("choose", CONTEXT), ("learn", FEEDBACK), ("unlearn", FEEDBACK)])
def test_a_users_policy_hears_the_whole_fact_and_spoils_a_copy(method: str, fact: Any) -> None:
    """Every field that is not at its default arrives; the features that are remembered stay."""
    assert all(getattr(fact, f.name) != f.default for f in msgspec.structs.fields(fact) if f.name != "x")
    inner: Any = Spoiling()
    fence = Guarded(inner, lambda *said: pytest.fail(str(said)))
    rest = ([Candidate(name="a")], np.random.default_rng(0)) if method == "choose" else ()
    getattr(fence, method)(fact, *rest)
    (heard,) = inner.heard
    for name in fact.__struct_fields__:
        assert np.array_equal(getattr(heard, name), getattr(fact, name)), name
    assert fact.x.tolist() == [1.0, 2.0]
