"""The selectors to compare with: a table by label, ACRouter's memory, nearest outcomes, and a budget pacer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback, Policy
from loadwise.policy.context import ContextSpec
from loadwise.policy.labelled import ACRouter, ACRouterOptions, Table, TableOptions
from loadwise.policy.linear import LinUCB, LinUCBOptions
from loadwise.policy.nearest import Nearest, NearestOptions
from loadwise.policy.pacer import Pacer, PacerOptions
from loadwise.policy.registry import PolicySpec, make_policy
from loadwise.policy.tally import LABELS_MAX, Tally

POOL = [Candidate(name="a", price_usd=2.0), Candidate(name="b", price_usd=1.0)]
PRICES = {"a": 2.0, "b": 1.0}


def chosen(policy: Policy, x: Any, step: int = 0) -> str:
    context = Context(decision_id=step, x=np.asarray(x, dtype=np.float64))
    return POOL[policy.choose(context, POOL, Streams(0).at("test", step)).chosen].name


def tell(policy: Policy, name: str, x: Any, reward: float, step: int = 0) -> None:
    vector = np.asarray(x, dtype=np.float64)
    policy.observe(step, name, vector)
    policy.learn(Feedback(decision_id=step, candidate=name, x=vector, reward=reward))


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1.0), st.booleans()), max_size=40))
def test_the_table_is_linucb_on_nothing_but_the_label(history: list[tuple[int, float, bool]]) -> None:
    """Equal scores and choices for any rewards, whether or not verdicts landed."""
    table, linear = Table(TableOptions(alpha=0.6, prior_count=1.0)), LinUCB(LinUCBOptions(alpha=0.6, ridge=1.0))
    for step, (label, reward, lands) in enumerate(history):
        x = np.eye(3)[label]
        name = chosen(table, x, step)
        assert name == chosen(linear, x, step)
        for policy in (table, linear):
            policy.observe(step, name, x)
            if lands:
                policy.learn(Feedback(decision_id=step, candidate=name, x=x, reward=reward))


def test_components_do_not_tell_labels_apart() -> None:
    """The registry takes the labels' number from the context's specification."""
    spec = ContextSpec(task_types=("t",), domains=("d", "e"), n_components=3)
    for name in ("table", "acrouter"):
        policy = make_policy(PolicySpec(name=name, options={"exploration_floor": 0.0}), spec)
        tell(policy, "a", spec.features("t", "d", (0.5, 0.1, 0.0)), 1.0)
        tell(policy, "b", spec.features("t", "d", (-0.5, 0.0, 0.7)), 0.0)
        assert chosen(policy, spec.features("t", "d", ())) == "a"
        assert chosen(policy, spec.features("t", "e", ())) == "b"  # nothing known: the cheaper


def test_the_released_rule_never_leaves_its_default() -> None:
    """Only candidates with a verdict are compared, so the first one stays, whatever it earns."""
    policy = ACRouter(ACRouterOptions(n_forced=0, exploration_floor=0.0, default="a"))
    for step in range(50):
        assert chosen(policy, [1.0], step) == "a"
        tell(policy, "a", [1.0], 0.0, step)


def test_forced_tries_come_first_and_count_pending_decisions() -> None:
    """Every candidate is tried as often as told under every label, also while verdicts are out."""
    policy = ACRouter(ACRouterOptions(n_forced=2, exploration_floor=0.0))
    tried = []
    for step in range(4):
        tried.append(chosen(policy, [1.0], step))
        policy.observe(step, tried[-1], np.ones(1))
    assert sorted(tried) == ["a", "a", "b", "b"]
    policy.undo(0, "a", np.ones(1))
    assert chosen(policy, [1.0]) == "a"


def test_labels_beyond_the_limit_share_a_tally() -> None:
    """What is kept is bounded, and everything that was learned before stays."""
    tally = Tally(n_labels=None)
    contexts = [np.array([float(bit) for bit in f"{i:012b}"]) for i in range(LABELS_MAX + 50)]
    for x in contexts:
        tally.learn("a", x, 1.0)
    assert len(tally.names()) == LABELS_MAX + 1
    assert tally.cell("a", tally.label(contexts[0])).n_verdicts == 1
    assert tally.cell("a", tally.label(contexts[-1])).n_verdicts == 50


def test_a_tally_refuses_what_cannot_be() -> None:
    """An undo without a decision, a reward or a context that is no number."""
    tally = Tally(n_labels=1)
    with pytest.raises(LawBroken, match="0 pending decisions"):
        tally.undo("a", np.ones(1))
    with pytest.raises(Unprocessable, match="reward of nan"):
        tally.learn("a", np.ones(1), float("nan"))
    with pytest.raises(Unprocessable, match="finite"):
        tally.label(np.array([np.inf]))


def test_a_repeated_task_finds_its_own_outcome() -> None:
    """The nearest neighbour of a task seen before is itself; strangers do not count."""
    policy = Nearest(NearestOptions(n_neighbours=1, alpha=0.0))
    for place in range(4):
        tell(policy, "a", np.eye(4)[place], float(place % 2))
        tell(policy, "b", np.eye(4)[place], float((place + 1) % 2))
    assert [chosen(policy, np.eye(4)[place]) for place in range(4)] == ["b", "a", "b", "a"]


def test_the_oldest_outcome_leaves_first() -> None:
    """With room for two, the first of three is forgotten."""
    policy = Nearest(NearestOptions(capacity=2, alpha=0.0))
    for name, reward in (("a", 1.0), ("b", 0.2), ("b", 0.2)):
        tell(policy, name, [1.0, 1.0], reward)
    assert chosen(policy, [1.0, 1.0]) == "b"


def test_of_equally_near_outcomes_the_latest_counts() -> None:
    """What a candidate does now matters more than what it did."""
    policy = Nearest(NearestOptions(n_neighbours=1, alpha=0.0))
    for reward in (1.0, 0.0):
        tell(policy, "a", [1.0], reward)
    tell(policy, "b", [1.0], 0.5)
    assert chosen(policy, [1.0]) == "b"


def test_a_fresh_policy_is_not_changed_by_choosing() -> None:
    """The first context that is asked about leaves no trace either."""
    for policy in (Nearest(), Table(), ACRouter(), Pacer()):
        before = policy.dump()
        chosen(policy, [1.0, 2.0])
        assert policy.dump() == before


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_pacer_spends_its_budget_and_no_more(ratio: float) -> None:
    """Where the dear candidate is better, the mean price comes to the budget."""
    policy = Pacer(PacerOptions(prices_usd=PRICES, budget_ratio=ratio))
    spent = []
    for step in range(2000):
        name = chosen(policy, [1.0], step)
        tell(policy, name, [1.0], {"a": 0.9, "b": 0.3}[name], step)
        spent.append(PRICES[name])
    assert np.mean(spent) == pytest.approx(1.0 + ratio, abs=0.02)


def test_an_undone_decision_gives_its_money_back() -> None:
    """The price of money is what it was."""
    policy = Pacer(PacerOptions(prices_usd=PRICES, budget_ratio=0.25))
    tell(policy, "a", [1.0], 1.0)
    before = policy.multiplier
    policy.observe(1, "a", np.ones(1))
    assert policy.multiplier > before > 0.0
    policy.undo(1, "a", np.ones(1))
    assert policy.multiplier == before
    with pytest.raises(LawBroken, match="0 observed"):
        policy.undo(2, "b", np.ones(1))


def test_without_prices_the_pacer_is_linucb() -> None:
    """There is nothing to pace."""
    pacer, linear = Pacer(), LinUCB()
    for step in range(30):
        x = np.array([1.0, step % 3 - 1.0])
        name = chosen(pacer, x, step)
        assert name == chosen(linear, x, step)
        for policy in (pacer, linear):
            tell(policy, name, x, float(step % 2), step)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("table", {"alpha": -1}, "alpha is -1"),
        ("table", {"prior_count": 0}, "prior_count is 0"),
        ("table", {"n_labels": -1}, "n_labels is -1"),
        ("acrouter", {"n_forced": -1}, "n_forced is -1"),
        ("acrouter", {"exploration_floor": 1.0}, "exploration_floor is 1.0"),
        ("knn", {"n_neighbours": 0}, "n_neighbours is 0"),
        ("knn", {"capacity": 10**9}, "capacity is 1000000000"),
        ("knn", {"similarity_min": float("nan")}, "similarity_min is nan"),
        ("knn", {"alpha": -0.5}, "alpha is -0.5"),
        ("knn", {"exploration_floor": -1}, "exploration_floor is -1"),
        ("knn", {"n_features": 0}, "n_features is 0"),
        ("pacer", {"prices_usd": {"a": -1}}, r"prices_usd\['a'\] is -1"),
        ("pacer", {"budget_ratio": 2}, "budget_ratio is 2"),
        ("pacer", {"step": float("inf")}, "step is inf"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    """The message names the option and its value."""
    with pytest.raises(ConfigError, match=said):
        make_policy(PolicySpec(name=name, options=options))


def test_a_dump_of_another_size_is_refused() -> None:
    """A memory for other contexts, or of another capacity, does not load."""
    policy = Nearest(NearestOptions(n_features=2))
    tell(policy, "a", [1.0, 0.0], 1.0)
    for other in (NearestOptions(n_features=3), NearestOptions(capacity=16), NearestOptions(context_version="v2")):
        with pytest.raises(SchemaMismatch):
            Nearest(other).load(policy.dump())
    with pytest.raises(Unprocessable, match=r"must be \(2,\)"):
        chosen(policy, [1.0])
