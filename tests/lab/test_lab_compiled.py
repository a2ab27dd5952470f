"""The compiled replay makes the very choices of the policies of the stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lab_folder import invented

from loadwise.kernel.streams import Streams
from loadwise.lab import kernel
from loadwise.lab.compiled import make_sparse, options_of, replay_order_compiled
from loadwise.lab.features import Contexts, make_contexts
from loadwise.lab.feedback import FeedbackSpec, make_episode
from loadwise.lab.replay import World, replay_order
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.policy.context import ContextSpec
from loadwise.policy.fixed import Random
from loadwise.policy.linear import LinTS, LinTSOptions, LinUCB, LinUCBOptions

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


@pytest.mark.parametrize(
    ("options", "feedback"),
    [
        (LinUCBOptions(), {}),
        (LinUCBOptions(exploration_floor=0.1, alpha=0.3, ridge=0.5), {"delay": 11}),
        (LinUCBOptions(gram="landed"), {"concurrency": "batch", "in_flight": 32}),
        (LinUCBOptions(gram="gram_all_mean"), {"concurrency": "delayed", "in_flight": 20, "loss": 0.1}),
        (LinUCBOptions(alpha=1.5), {"concurrency": "slots", "in_flight": 5, "verification": "single"}),
        (LinTSOptions(), {}),
        (LinTSOptions(exploration_floor=0.0, scale=0.1), {"concurrency": "delayed", "in_flight": 64, "loss": 0.3}),
    ],
)
def test_ten_thousand_decisions_are_the_policys_own(
    world: World, options: LinUCBOptions | LinTSOptions, feedback: dict[str, Any]
) -> None:
    """Not one choice differs, whatever the policy, the Gram mode and the landing of verdicts."""
    spec = FeedbackSpec(**feedback)
    episode = make_episode(world.stream, spec, world.streams, 1, world.n_passes)
    assert len(episode.task) == N_DECISIONS
    kind = LinTS if isinstance(options, LinTSOptions) else LinUCB
    ours = replay_order_compiled(world, episode, options, spec.n_learners, [3.0, 0.25], 1)
    theirs = replay_order(world, episode, lambda: kind(options), spec.n_learners, 0.25, 1)  # type: ignore[arg-type]
    assert (ours[1] == theirs).all()
    assert len(set(theirs.tolist())) == 2


def test_cost_weights_do_not_touch_each_other(world: World) -> None:
    """A weight gives the same choices alone and among others."""
    episode = make_episode(world.stream, FeedbackSpec(), world.streams, 0, 4)
    alone = replay_order_compiled(world, episode, LinUCBOptions(), 1, [0.5], 0)
    among = replay_order_compiled(world, episode, LinUCBOptions(), 1, [2.0, 0.5, 0.0], 0)
    assert (alone[0] == among[1]).all()


def test_a_fresh_inverse_is_the_inverse(world: World) -> None:
    """What is made from counts equals the inverse of the sum."""
    x, ridge = world.contexts.x, 0.7
    counts = np.random.default_rng(0).integers(0, 3, size=len(x))
    inverse = np.zeros((x.shape[1], x.shape[1]))
    kernel.refresh(inverse, counts, *make_sparse(x), ridge)
    expected = np.linalg.inv(ridge * np.eye(x.shape[1]) + (x * counts[:, None]).T @ x)
    assert np.allclose(inverse, expected, atol=1e-10)


def test_only_the_policies_themselves_are_replaced() -> None:
    """A user's class that derives from ours is replayed as it is."""

    class Mine(LinUCB):
        pass

    assert options_of(LinUCB()) == LinUCBOptions()
    assert options_of(Mine()) is None
    assert options_of(Random()) is None
