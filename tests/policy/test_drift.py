"""A learner for a world that changes finds what becomes the best, and does not see changes where there are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.drift import Drift, DriftOptions
from loadwise.policy.linear import LinUCB

POOL = [Candidate(name="a"), Candidate(name="b"), Candidate(name="c")]
Rates = Callable[[int], tuple[float, ...]]


def play(policy: Drift | LinUCB, rates: Rates, n_steps: int, seed: int) -> list[int]:
    """Bernoulli rewards with two kinds of tasks; returns what was chosen."""
    streams = Streams(seed)
    chosen = []
    for step in range(n_steps):
        x = np.array([1.0, float(step % 2)])
        choice = policy.choose(Context(decision_id=step, x=x), POOL, streams.at("policy", step))
        name = POOL[choice.chosen].name
        policy.observe(step, name, x)
        reward = float(streams.at("world", step).random() < rates(step)[choice.chosen])
        policy.learn(Feedback(decision_id=step, candidate=name, x=x, reward=reward))
        chosen.append(choice.chosen)
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_what_becomes_the_best_is_found(seed: int) -> None:
    """The worst candidate of 1,500 decisions becomes the best: 1,500 later it runs most tasks."""
    chosen = play(Drift(), lambda step: (0.6, 0.5, 0.1) if step < 1500 else (0.6, 0.5, 0.95), 3000, seed)
    assert chosen[1300:1500].count(2) <= 40
    assert chosen[-300:].count(2) >= 200


@pytest.mark.parametrize("seed", range(5))
def test_what_gets_worse_is_left(seed: int) -> None:
    """The best candidate breaks: 300 decisions later it runs few tasks, and the alarm has told."""
    policy = Drift()
    chosen = play(policy, lambda step: (0.9, 0.6, 0.3) if step < 1500 else (0.1, 0.6, 0.3), 2100, seed)
    assert chosen[1200:1500].count(0) >= 200
    assert chosen[-300:].count(0) <= 60
    assert policy.n_alarms >= 1


@pytest.mark.parametrize("seed", range(4))
def test_no_change_is_seen_where_there_is_none(seed: int) -> None:
    """Two thousand decisions of a world that stays: hardly an alarm, and the best runs most of them."""
    policy = Drift()
    chosen = play(policy, lambda step: (0.8, 0.5, 0.4), 2000, seed)
    assert policy.n_alarms <= 1
    assert chosen[500:].count(0) >= 0.75 * 1500


def test_without_discount_alarm_and_floor_it_is_linucb() -> None:
    """Choice for choice."""
    plain = Drift(DriftOptions(discount=1.0, alarm=0.0, exploration_floor=0.0))
    rates: Rates = lambda step: (0.7, 0.5, 0.3)  # noqa: E731
    assert play(plain, rates, 500, 3) == play(LinUCB(), rates, 500, 3)


def test_an_undone_decision_leaves_nothing_behind() -> None:
    """However many verdicts of others landed in between, and a swap ends it too."""
    x = np.array([1.0, 1.0])
    policy, other = Drift(), Drift()
    for one in (policy, other):
        one.observe(1, "a", x)
        one.learn(Feedback(decision_id=1, candidate="a", x=x, reward=1.0))
    policy.observe(2, "a", x)
    for step in range(10, 40):
        for one in (policy, other):
            one.observe(step, "b", x)
            one.learn(Feedback(decision_id=step, candidate="b", x=x, reward=0.5))
    policy.undo(2, "a", x)
    rng = np.random.default_rng(0)
    context = Context(decision_id=99, x=x)
    mine, theirs = (one.choose(context, POOL, rng) for one in (policy, other))
    assert mine.widths == pytest.approx(theirs.widths, abs=1e-9)
    with pytest.raises(LawBroken):
        policy.undo(2, "a", x)


def test_a_swapped_model_is_new() -> None:
    """Also to verdicts of decisions that were under way."""
    x = np.array([1.0, 0.0])
    policy = Drift()
    for step in range(20):
        policy.observe(step, "a", x)
    for step in range(10):
        policy.learn(Feedback(decision_id=step, candidate="a", x=x, reward=1.0))
    policy.forget("a")
    policy.learn(Feedback(decision_id=10, candidate="a", x=x, reward=1.0))
    policy.undo(11, "a", x)
    choice = policy.choose(Context(decision_id=99, x=x), POOL, np.random.default_rng(0))
    assert choice.means[0] == 0.0
    assert choice.widths[0] == choice.widths[1]


def test_a_dump_goes_on_as_if_nothing_had_been() -> None:
    """Alarms, ages and pending decisions included."""
    x = np.array([1.0, 0.5])
    policy = Drift()
    play(policy, lambda step: (0.7, 0.5, 0.3), 200, 1)
    policy.observe(1000, "a", x)
    other = Drift()
    other.load(policy.dump())
    for one in (policy, other):
        one.observe(1001, "b", x)
        one.learn(Feedback(decision_id=1001, candidate="b", x=x, reward=0.0))
        one.undo(1000, "a", x)
    assert policy.dump() == other.dump()


@pytest.mark.parametrize("wrong", [{"discount": 0.5}, {"discount": 1.1}, {"alarm": -1.0}, {"tolerance": float("nan")}])
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    """Each out of its range."""
    with pytest.raises(ConfigError):
        DriftOptions(**wrong)


def test_a_verdict_taken_back_and_abstained_on_leaves_no_evidence() -> None:
    """Only what it has faded of others stays."""
    x = np.array([1.0, 0.0])
    policy, said = Drift(), Feedback(decision_id=1, candidate="a", x=x, reward=1.0)
    policy.observe(1, "a", x)
    policy.learn(said)
    policy.unlearn(said)
    with pytest.raises(LawBroken, match="never learned"):
        policy.unlearn(said)
    policy.undo(1, "a", x)
    choice = policy.choose(Context(decision_id=2, x=x), POOL, np.random.default_rng(0))
    assert choice.means[0] == pytest.approx(0.0) and choice.widths[0] == pytest.approx(choice.widths[1])


def test_a_correction_of_what_was_forgotten_teaches_nothing() -> None:
    """The model that it speaks of is gone, by an alarm or by an operator's word."""
    x = np.array([1.0, 0.0])
    policy, said = Drift(), Feedback(decision_id=1, candidate="a", x=x, reward=1.0)
    policy.observe(1, "a", x)
    policy.learn(said)
    policy.forget("a")
    policy.unlearn(said)
    policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=0.5))
    choice = policy.choose(Context(decision_id=2, x=x), POOL, np.random.default_rng(0))
    assert choice.means[0] == 0.0 and choice.widths[0] == choice.widths[1]


def test_alarms_are_counted_by_candidate() -> None:
    """And a dump remembers them."""
    policy = Drift()
    play(policy, lambda step: (0.9, 0.6, 0.3) if step < 600 else (0.0, 0.6, 0.3), 900, 1)
    assert policy.alarms["a"] >= 1 and sum(policy.alarms.values()) == policy.n_alarms
    other = Drift()
    other.load(policy.dump())
    assert other.alarms == policy.alarms
