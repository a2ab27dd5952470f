"""Ladders replayed: the sums are what the attempts were, baselines are the best that a lottery can do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lab_folder import invented

from loadwise.kernel.streams import Streams
from loadwise.lab.features import make_contexts
from loadwise.lab.ladder import Noise, best_mix, cascade_of, make_verdicts, replay_ladder
from loadwise.lab.replay import World
from loadwise.lab.stream import AgentChoice, read_stream


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two families: the dear model is the better one in one of them, the worse in the other."""
    folder: Path = invented(tmp_path_factory.mktemp("lab"), n_per_family=60)
    stream = read_stream(folder, ["swe", "chat"], ["small", "big"], AgentChoice.parse(None))
    return World(stream, make_contexts(stream, "none", 0), 2, Streams(0))


def test_verdicts_are_wrong_as_often_as_the_rates_say(world: World) -> None:
    """Of right attempts a share fails, of wrong ones a share passes."""
    found = make_verdicts(world.stream, Noise(0.3, 0.1, None), np.random.default_rng(0))
    right = found.is_right > 0.5
    passed = found.stream.trial_success > 0.5
    assert float(passed[~right].mean()) == pytest.approx(0.3, abs=0.05)
    assert float(passed[right].mean()) == pytest.approx(0.9, abs=0.05)


def test_without_noise_a_second_attempt_never_loses(world: World) -> None:
    """What passed is right, what failed is wrong: every further attempt can only help, and costs what it costs."""
    found = replay_ladder(world, Noise(0.0, 0.0, (0.0, 0.0)), (0.0, 3.0), 3)
    assert (found.n_attempts >= 1.0).all() and (found.n_attempts <= 2.0).all()
    gain = found.success[0].mean() - found.first_success[0].mean()
    assert gain > 0.05
    assert (found.cost_usd >= found.first_cost_usd - 1e-12).all()
    made = found.n_attempts.mean(axis=1)
    assert made[0] > made[1]  # where cost counts more, fewer attempts pay


def test_a_verifier_that_is_mostly_wrong_about_right_answers_is_not_followed_blindly(world: World) -> None:
    """Where a family's cheap model is the better one, giving up failed attempts of it loses; the ladder learns that."""
    found = replay_ladder(world, Noise(0.0, 0.3, (0.0, 0.3)), (0.0,), 5)
    cascade = cascade_of(world, Noise(0.0, 0.3, None))
    chat = world.stream.family == 1
    assert found.success[0][chat].mean() > cascade.success[chat, 0].mean()


@pytest.mark.parametrize(
    "noise",
    [Noise(0.1, 0.2, (0.1, 0.2)), Noise(0.2, 0.1, None), Noise(0.2, 0.2, None, 0.3), Noise(0.1, 0.1, (0.1, 0.1), 0.3)],
)
def test_the_compiled_ladder_makes_the_same_attempts(world: World, noise: Noise) -> None:
    """On 120 tasks, two passes, six orders, four weights and ways of knowing the rates: 23,040 decisions."""
    weights = (0.0, 0.1, 0.5, 2.0)
    ours, theirs = (replay_ladder(world, noise, weights, 6, is_compiled=compiled) for compiled in (True, False))
    assert np.array_equal(ours.n_attempts, theirs.n_attempts)
    for one, other in zip(ours, theirs, strict=True):
        assert np.allclose(one, other, atol=1e-12)


def test_the_same_seed_gives_the_same_replay(world: World) -> None:
    """All chance comes from named streams."""
    noise = Noise(0.1, 0.1, None, audit_ratio=0.2)
    first, again = (replay_ladder(world, noise, (0.25,), 2) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_the_cascade_is_the_one_of_the_selectors(world: World) -> None:
    """Longest first, then the cheap model alone, then single models with one attempt each."""
    found = cascade_of(world, Noise(0.1, 0.1, None))
    assert found.success.shape[1] == 4
    assert (found.n_attempts[:, 1:] == 1.0).all() and found.n_attempts[:, 0].mean() > 1.0
    assert np.allclose(found.success[:, 2:], world.stream.success)


def test_best_mix_is_the_optimum_of_its_linear_programme() -> None:
    """Never below any feasible lottery that chance finds, and attained by one within the budgets."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        success, cost, attempts = rng.random((1, 5)), rng.random((1, 5)), 1.0 + rng.random((1, 5))
        at_cost, at_attempts = np.array([rng.uniform(cost.min(), 1.0)]), np.array([rng.uniform(attempts.min(), 2.0)])
        best = best_mix(success, cost, attempts, at_cost, at_attempts)[0]
        weights = rng.dirichlet(np.full(5, 0.4), size=4000)
        fits = (weights @ cost[0] <= at_cost) & (weights @ attempts[0] <= at_attempts)
        floor = success[0, cost[0].argmin()]
        found = (weights @ success[0])[fits]
        assert best >= max(found.max(initial=0.0), floor) - 1e-9
        assert best <= success.max() + 1e-9
