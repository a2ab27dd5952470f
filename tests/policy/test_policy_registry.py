"""A configuration names a policy, and every mistake in it is answered in words."""

import sys
import types

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError, SchemaMismatch
from loadwise.policy.base import Candidate, Choice, Context
from loadwise.policy.context import ContextSpec
from loadwise.policy.fixed import Random
from loadwise.policy.linear import LinUCB
from loadwise.policy.registry import (
    PolicySpec,
    make_policy,
    named_candidates,
    policy_names,
    register,
    unregister,
)
from loadwise.settings import import_class


class Dearest(Random):
    """A user's selector: the most expensive candidate, every `skip`-th decision excepted."""

    name = "dearest"
    reads = ("price_usd",)
    is_deterministic = True

    def __init__(self, skip: int = 0) -> None:
        if skip < 0:
            raise ValueError(f"skip is {skip}")
        self.skip = skip

    def choose(self, context, candidates, rng) -> Choice:
        prices = [candidate.price_usd for candidate in candidates]
        chosen = prices.index(max(prices))
        return Choice(chosen=chosen, propensities=tuple(float(i == chosen) for i in range(len(prices))))


@pytest.fixture
def users_module(monkeypatch):
    """A module of a user's, importable as `users_own`."""
    module = types.ModuleType("users_own")
    module.Dearest = Dearest
    module.number = 7
    module.Nothing = type("Nothing", (), {"name": "nothing", "choose": lambda self: None})
    monkeypatch.setitem(sys.modules, "users_own", module)


def chosen(policy) -> int:
    pool = [Candidate(name="a", price_usd=1.0), Candidate(name="b", price_usd=2.0)]
    return policy.choose(Context(decision_id=1, x=np.ones(2)), pool, np.random.default_rng(0)).chosen


def test_names_of_the_issue_are_registered() -> None:
    """The baselines and learners that presets speak of exist under these names."""
    assert set(policy_names()) >= {
        "fixed",
        "least_loaded",
        "lints",
        "linucb",
        "mixing",
        "power_of_two",
        "random",
        "resident",
        "round_robin",
    }
    for name in policy_names():
        options = {"fixed": {"candidate": "a"}, "mixing": {"weights": {"a": 1.0}}}.get(name, {})
        assert make_policy(PolicySpec(name=name, options=options)).name == name


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("linuct", {}, "unknown policy 'linuct'; known are acrouter, drift, epsilon_greedy"),
        ("linucb", {"alfa": 1}, "'linucb' has no option 'alfa'; it has alpha, component_ridge, context_version"),
        ("linucb", {"alpha": "wide"}, r"'linucb': Expected `float`, got `str` - at `\$.alpha`"),
        ("linucb", {"alpha": -1}, "'linucb': alpha is -1"),
        ("linucb", {"gram": "all"}, "'linucb': Invalid enum value 'all'"),
        ("random", {"seed": 1}, "'random' has no option 'seed'; it has none"),
        ("fixed", {"candidate": ""}, "candidate is ''"),
        ("mixing", {"weights": {"a": 1.5}}, r"weights\['a'\] is 1.5; it must be in \[0, 1\]"),
        ("mixing", {"weights": {"a": float("nan")}}, r"weights\['a'\] is nan"),
        ("mixing", {"weights": {"a": 0.0}}, "at least one must be > 0"),
        ("epsilon_greedy", {"exploration_floor": 2}, "exploration_floor is 2"),
        ("epsilon_greedy", {"prior_mean": float("inf")}, "prior_mean is inf"),
        ("no_such_module_at_all:Thing", {}, "cannot be loaded: No module named 'no_such_module_at_all'"),
        ("users_own:Missing", {}, "cannot be loaded: .*'Missing'"),
        ("users_own:number", {}, "is 'int', not a class"),
        ("users_own:", {}, "not of the form 'package.module:Class'"),
        (":Dearest", {}, "not of the form 'package.module:Class'"),
        ("users own:Dearest", {}, "not of the form 'package.module:Class'"),
        ("users_own:Nothing", {}, "lacks propensities, observe, learn, undo, dump, load"),
        ("users_own:Dearest", {"leap": 1}, r"unexpected keyword argument 'leap'; it is called as .*skip: int = 0"),
        ("users_own:Dearest", {"skip": -1}, "skip is -1"),
    ],
)
def test_mistakes_are_answered_in_words(users_module, name: str, options, words: str) -> None:
    """Each wrong name or option is a ConfigError that names the thing and what would be right."""
    with pytest.raises(ConfigError, match=words):
        make_policy(PolicySpec(name=name, options=options), resolve=import_class)


def test_a_users_class_joins_by_its_path(users_module) -> None:
    """`package.module:Class` with its own options is a policy like any other."""
    policy = make_policy(PolicySpec(name="users_own:Dearest", options={"skip": 3}), resolve=import_class)
    assert policy.skip == 3
    assert chosen(policy) == 1


def test_a_path_is_refused_where_nobody_may_import() -> None:
    """Without a resolver nothing is looked for; with one, what is no policy class is never called."""
    with pytest.raises(ConfigError, match="'os:mkdir' is a class outside loadwise, and importing one is not allowed"):
        make_policy(PolicySpec(name="os:mkdir", options={"path": "x"}))
    called = []
    with pytest.raises(ConfigError, match="'a:b' is 'builtin_function_or_method', not a class"):
        make_policy(PolicySpec(name="a:b"), resolve=lambda path: called.append)
    trap = type("Trap", (), {"__init__": lambda self, **options: called.append(options)})
    with pytest.raises(ConfigError, match="'a:b' lacks choose, propensities"):
        make_policy(PolicySpec(name="a:b", options={"x": 1}), resolve=lambda path: trap)
    assert called == []


def test_a_class_that_raises_when_made_is_a_config_error() -> None:
    """Whatever it raises."""

    class Sulking(Random):
        def __init__(self) -> None:
            raise RuntimeError("not today")

    with pytest.raises(ConfigError, match="not today"):
        make_policy(PolicySpec(name="a:b"), resolve=lambda path: Sulking)


def test_a_users_class_joins_by_registration() -> None:
    """`register` makes a name known once; a second owner of the name is refused."""
    register("dearest", Dearest)
    try:
        register("dearest", Dearest)
        assert chosen(make_policy(PolicySpec(name="dearest"))) == 1
        with pytest.raises(ConfigError, match="'dearest' is taken"):
            register("dearest", Random)
        with pytest.raises(ConfigError, match="'linucb' is taken"):
            register("linucb", Dearest)
    finally:
        unregister("dearest")
    assert "dearest" not in policy_names()
    for name in ("", "a:b"):
        with pytest.raises(ConfigError, match="must be non-empty and without ':'"):
            register(name, Dearest)


def test_learners_are_bound_to_the_context() -> None:
    """With a context given, a learner's dump of another context version does not load, even of equal length."""
    spec = PolicySpec(name="linucb")
    here = make_policy(spec, ContextSpec(task_types=("a", "b")))
    there = make_policy(spec, ContextSpec(task_types=("b", "a")))
    with pytest.raises(SchemaMismatch, match="context_version"):
        there.load(here.dump())
    assert isinstance(here, LinUCB)
    assert here.ridge.n_features == 19
    assert make_policy(PolicySpec(name="random"), ContextSpec()).name == "random"


def test_a_dump_of_another_policy_is_refused() -> None:
    """The error names both policies."""
    with pytest.raises(SchemaMismatch, match="'linucb'; this is policy 'random'"):
        make_policy(PolicySpec(name="random")).load(make_policy(PolicySpec(name="linucb")).dump())


def test_candidates_named_by_options_can_be_checked() -> None:
    """The configuration's reader learns which names must be in the pool."""
    assert named_candidates(PolicySpec(name="fixed", options={"candidate": "a"})) == ("a",)
    assert named_candidates(PolicySpec(name="mixing", options={"weights": {"b": 0.5, "a": 0.5}})) == ("a", "b")
    assert named_candidates(PolicySpec(name="mixing", options={"weights": 3})) == ()
    assert named_candidates(PolicySpec(name="linucb")) == ()
