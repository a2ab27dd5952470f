"""The contract suite catches what it says: every check has a broken policy that fails it."""

import numpy as np
import pytest

from loadwise.kernel.errors import LawBroken
from loadwise.policy.base import Candidate, Choice, Context
from loadwise.policy.checks import check_policy, check_propensities
from loadwise.policy.linear import LinTS, LinUCB


def failures(factory) -> set[str]:
    """Names of the checks that `factory`'s policies fail."""
    failed = set()
    for check in check_policy(factory):
        try:
            check.run()
        except (AssertionError, LawBroken, ValueError, KeyError, FloatingPointError):
            failed.add(check.name)
    return failed


class CountsChoices(LinUCB):
    """Learns from being asked."""

    def choose(self, context, candidates, rng) -> Choice:
        choice = super().choose(context, candidates, rng)
        self.ridge.observe(candidates[choice.chosen].name, np.asarray(context.x))
        return choice


class SumsToLess(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        choice = super().choose(context, candidates, rng)
        return Choice(chosen=choice.chosen, propensities=(0.3,) * len(candidates))


class DeniesItsChoice(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        choice = super().choose(context, candidates, rng)
        n = len(candidates)
        return Choice(chosen=choice.chosen, scores=choice.scores, propensities=(1.0 / n,) * n)


class DrawsElsewhere(LinTS):
    """Ignores the generator that it is given."""

    elsewhere = np.random.default_rng(1)

    def choose(self, context, candidates, rng) -> Choice:
        return super().choose(context, candidates, self.elsewhere)


class FirstListed(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        return Choice(chosen=0, propensities=(1.0,) + (0.0,) * (len(candidates) - 1))


class WantsTwo(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        if len(candidates) < 2:
            raise ValueError("two at least")
        return super().choose(context, candidates, rng)


class KnowsNoStranger(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        if any(candidate.name == "new" for candidate in candidates) and len(candidates) == 4:
            raise KeyError("new")
        return super().choose(context, candidates, rng)


class Divides(LinUCB):
    def choose(self, context, candidates, rng) -> Choice:
        if not np.any(context.x):
            raise FloatingPointError("0/0")
        return super().choose(context, candidates, rng)


class ForgetsToUndo(LinUCB):
    def undo(self, decision_id, candidate, x) -> None:
        pass


class ForgetsToLoad(LinUCB):
    def load(self, state: bytes) -> None:
        super().load(state)
        self.__init__()


class LoadsAnything(LinUCB):
    def load(self, state: bytes) -> None:
        if len(state) > 10_000 or state.startswith(b"\x86"):
            super().load(state)


class Hoards(LinUCB):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def observe(self, decision_id, candidate, x) -> None:
        super().observe(decision_id, candidate, x)
        self.seen.append(float(x[0]))


class LearnsBackwards(LinUCB):
    def learn(self, feedback) -> None:
        self.ridge.learn(feedback.candidate, feedback.x, -feedback.reward)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (CountsChoices, "choose_does_not_mutate"),
        (SumsToLess, "propensities_sum_to_one"),
        (DeniesItsChoice, "deterministic_reports_one"),
        (DrawsElsewhere, "equal_seed_equal_choices"),
        (FirstListed, "order_of_candidates_is_immaterial"),
        (WantsTwo, "survives_one_candidate"),
        (KnowsNoStranger, "survives_new_and_removed_candidates"),
        (Divides, "survives_huge_and_zero_contexts"),
        (ForgetsToUndo, "undo_is_exact"),
        (ForgetsToLoad, "dump_and_load_continue_identically"),
        (LoadsAnything, "refuses_a_foreign_dump"),
        (Hoards, "memory_does_not_grow"),
        (LearnsBackwards, "beats_random"),
    ],
)
def test_a_broken_policy_fails_its_check(broken, expected: str) -> None:
    """The check named after the fault fails."""
    assert expected in failures(broken)


def test_every_check_has_a_broken_policy() -> None:
    """A new check comes with a policy that fails it."""
    covered = {args[1] for args in test_a_broken_policy_fails_its_check.pytestmark[0].args[1]}
    assert covered == {check.name for check in check_policy(LinUCB)}


def test_a_sound_policy_fails_none() -> None:
    """The suite has no false alarm on the policy that the broken ones are made of."""
    assert failures(LinUCB) == set()


@pytest.mark.parametrize(
    ("propensities", "chosen"),
    [
        ((0.5, 0.5), 2),
        ((0.5, 0.5), -1),
        ((1.0,), 0),
        ((0.5, 0.6), 0),
        ((1.5, -0.5), 0),
        ((0.0, 1.0), 0),
        ((float("nan"), 1.0), 1),
        ((float("inf"), 0.0), 0),
    ],
)
def test_unlawful_propensities_are_named(propensities: tuple[float, ...], chosen: int) -> None:
    """A vector that breaks L12 raises, naming the law."""
    with pytest.raises(LawBroken, match="L12"):
        check_propensities(propensities, chosen, 2)


def test_empty_pool_is_refused_in_words() -> None:
    """Choosing among nothing says so instead of failing on an index."""
    with pytest.raises(ValueError, match="0 candidates"):
        LinUCB().choose(Context(decision_id=1, x=np.ones(2)), [], np.random.default_rng(0))
    assert LinUCB().choose(Context(decision_id=1, x=np.ones(2)), [Candidate(name="a")], None).chosen == 0
