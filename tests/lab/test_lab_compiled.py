"""The compiled replay makes the very choices of the policies of the stack."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from lab_folder import invented

from loadwise.kernel.streams import Streams
from loadwise.lab import kernel
from loadwise.lab.compiled import compiled_replay, make_sparse
from loadwise.lab.features import Contexts, make_contexts
from loadwise.lab.feedback import FeedbackSpec, make_episode
from loadwise.lab.pack import Ability, Baseline, Pack, Provenance
from loadwise.lab.pack_prior import make_prior
from loadwise.lab.replay import World, replay_order
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.policy.context import ContextSpec
from loadwise.policy.fixed import Random
from loadwise.policy.linear import LinUCB
from loadwise.policy.registry import PolicySpec, make_policy

pytest.importorskip("numba")

N_DECISIONS = 10_000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A stream of 250 tasks with components in half of the contexts, 40 times."""
    folder = invented(tmp_path_factory.mktemp("lab"), n_per_family=125, n_trials=3)
    stream = read_stream(folder, ["swe", "chat"], ["small", "big"], AgentChoice.parse(None))
    contexts = make_contexts(stream, "none", 0)
    rng = np.random.default_rng(5)
    components = rng.normal(size=(stream.n_tasks, 6)) * (rng.random((stream.n_tasks, 1)) < 0.5)
    x = np.hstack([contexts.x, components])
    spec = ContextSpec(task_types=contexts.spec.task_types, domains=contexts.spec.domains, n_components=6)
    return World(stream, Contexts(spec, x, contexts.domains, 0), 40, Streams(3))


LATE: dict[str, Any] = {"concurrency": "delayed", "in_flight": 20, "loss": 0.1}


@pytest.mark.parametrize(
    ("name", "options", "feedback"),
    [
        ("linucb", {}, {}),
        ("linucb", {"exploration_floor": 0.1, "alpha": 0.3, "ridge": 0.5}, {"delay": 11}),
        ("linucb", {"gram": "landed"}, {"concurrency": "batch", "in_flight": 32}),
        ("linucb", {"gram": "gram_all_mean"}, LATE),
        ("linucb", {"alpha": 1.5}, {"concurrency": "slots", "in_flight": 5, "verification": "single"}),
        ("linucb", {"component_ridge": 25.0}, LATE),
        ("lints", {}, {}),
        ("lints", {"exploration_floor": 0.0, "scale": 0.1}, LATE),
        ("pacer", {"budget_ratio": 0.3, "prices_usd": {"small": 0.01, "big": 0.1}}, LATE),
        ("table", {}, {}),
        ("table", {"alpha": 2.0, "exploration_floor": 0.05, "prior_count": 0.5}, LATE),
        ("acrouter", {}, LATE),
        ("acrouter", {"n_forced": 3, "exploration_floor": 0.0, "default": "big"}, {"delay": 40}),
        ("epsilon_greedy", {}, LATE),
        ("epsilon_greedy", {"exploration_floor": 0.0, "prior_mean": 0.2}, {"concurrency": "slots", "in_flight": 5}),
        ("knn", {}, {}),
        ("knn", {"capacity": 300, "exploration_floor": 0.1, "n_neighbours": 3, "alpha": 0.2}, LATE),
    ],
)
def test_ten_thousand_decisions_are_the_policys_own(
    world: World, name: str, options: dict[str, Any], feedback: dict[str, Any]
) -> None:
    """Not one choice differs, whatever the policy, its options and the landing of verdicts."""
    spec = FeedbackSpec(**feedback)
    episode = make_episode(world.stream, spec, world.streams, 1, world.n_passes)
    assert len(episode.task) == N_DECISIONS
    make = partial(make_policy, PolicySpec(name=name, options=options), world.contexts.spec)
    replay = compiled_replay(world, make(), spec.n_learners, [3.0, 0.25])
    assert replay is not None
    theirs = replay_order(world, episode, make, spec.n_learners, 0.25, 1)
    assert (replay(episode, 1)[1] == theirs).all()
    assert len(set(theirs.tolist())) == 2


def test_cost_weights_do_not_touch_each_other(world: World) -> None:
    """A weight gives the same choices alone and among others."""
    episode = make_episode(world.stream, FeedbackSpec(), world.streams, 0, 4)
    for policy in (LinUCB(), make_policy(PolicySpec(name="table")), make_policy(PolicySpec(name="knn"))):
        alone, among = (compiled_replay(world, policy, 1, weights) for weights in ([0.5], [2.0, 0.5, 0.0]))
        assert alone is not None
        assert among is not None
        assert (alone(episode, 0)[0] == among(episode, 0)[1]).all()


def test_a_fresh_inverse_is_the_inverse(world: World) -> None:
    """What is made from counts equals the inverse of the sum."""
    x, ridge = world.contexts.x, 0.7
    counts = np.random.default_rng(0).integers(0, 3, size=len(x))
    inverse = np.zeros((x.shape[1], x.shape[1]))
    kernel.refresh(inverse, counts, *make_sparse(x), ridge)
    expected = np.linalg.inv(ridge * np.eye(x.shape[1]) + (x * counts[:, None]).T @ x)
    assert np.allclose(inverse, expected, atol=1e-10)


def test_only_the_policies_themselves_are_replaced(world: World) -> None:
    """A user's class that derives from ours is replayed as it is."""

    class Mine(LinUCB):
        pass

    assert compiled_replay(world, LinUCB(), 1, [0.0]) is not None
    assert compiled_replay(world, Mine(), 1, [0.0]) is None
    assert compiled_replay(world, Random(), 1, [0.0]) is None


@pytest.mark.parametrize(
    ("name", "options", "feedback"),
    [
        ("linucb", {}, LATE),
        ("lints", {"prior_strength": 0.1}, {}),
        ("linucb", {"gram": "gram_all_mean", "component_ridge": 9.0}, LATE),
        ("pacer", {"budget_ratio": 0.3, "prices_usd": {"small": 0.01, "big": 0.1}}, LATE),
    ],
)
def test_ten_thousand_decisions_with_a_pack_are_the_policys_own(
    world: World, name: str, options: dict[str, Any], feedback: dict[str, Any]
) -> None:
    """The same from a prior, which is another for each cost weight; this one takes the worse model for the better."""
    same = {"n_tasks": 9, "success": 0.2, "success_blind": -0.1, "cost": 0.5, "cost_blind": -0.5}
    wrong = {"small": -0.2, "big": 0.3}
    pack = Pack(
        format="loadwise-pack",
        version=1,
        licence="none",
        provenance=Provenance(n_runs=1, n_tasks=1, models=("small", "big")),
        embedder="none",
        families={name: Baseline(**same) for name in ("swe", "chat")},
        domains={"swe/d0": Baseline(**same)},
        models={name: {"chat": Ability(n_tasks=9, success=value, cost_usd=0.02)} for name, value in wrong.items()},
    )
    primed = world._replace(prior=make_prior(pack, world.contexts.spec, ["small", "big"]))
    assert primed.prior is not None
    spec = FeedbackSpec(**feedback)
    episode = make_episode(world.stream, spec, world.streams, 1, world.n_passes)
    priors = [primed.prior.at(1.0, weight / world.stream.scale_usd) for weight in (3.0, 0.25)]
    made = [PolicySpec(name=name, options={**options, "prior": prior}) for prior in priors]
    make = partial(make_policy, made[1], world.contexts.spec)
    replay = compiled_replay(primed, make_policy(made[0], world.contexts.spec), spec.n_learners, [3.0, 0.25])
    assert replay is not None
    theirs = replay_order(primed, episode, make, spec.n_learners, 0.25, 1)
    assert (replay(episode, 1)[1] == theirs).all()
    assert len(set(theirs.tolist())) == 2
