"""Selectors that do not learn while they serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lab_folder import invented, row, write, write_texts

from loadwise.kernel.streams import Streams
from loadwise.lab.features import make_contexts
from loadwise.lab.feedback import FeedbackSpec
from loadwise.lab.offline import complexity, fit_logistic, score_cascade, score_threshold, score_tiers
from loadwise.lab.replay import World
from loadwise.lab.stream import AgentChoice, read_stream

BEST = FeedbackSpec(verification="best")


def world_of(folder: Path, *families: str, models: tuple[str, ...] = ("small", "big")) -> World:
    stream = read_stream(folder, list(families) or ["swe", "chat"], list(models), AgentChoice.parse(None))
    return World(stream, make_contexts(stream, "none", 0), 1, Streams(0))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two families, each better with another model."""
    return world_of(invented(tmp_path_factory.mktemp("lab"), n_per_family=60))


def test_the_threshold_learns_which_tasks_need_the_strong_model(world: World) -> None:
    """At half of the tasks it sends nearly all of the family that gains and nearly none of the other."""
    points = {point.cost_weight: point for point in score_threshold(world, BEST)}
    shares = [points[weight].share[:, 1].mean() for weight in sorted(points)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1.0, 0.0)
    half = points[4.0].share[:, 1]
    assert half[world.stream.family == 0].mean() > 0.8
    assert half[world.stream.family == 1].mean() < 0.2


def test_the_logistic_fit_has_no_slope_left() -> None:
    """At θ the gradient of the penalised likelihood is zero; without a pair θ is zero."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(80, 3)), rng.random(80)
    wins = rng.random(80) < 1.0 / (1.0 + np.exp(-x @ np.array([2.0, -1.0, 0.0])))
    theta = fit_logistic(x, wins, weights, ridge=0.5)
    slope = x.T @ (weights * (wins - 1.0 / (1.0 + np.exp(-x @ theta)))) - 0.5 * theta
    assert np.abs(slope).max() < 1e-8
    assert theta[0] > 0.0 > theta[1]
    assert fit_logistic(x[:0], wins[:0], weights[:0]).tolist() == [0.0, 0.0, 0.0]


def test_a_cascade_with_a_perfect_verifier_fails_only_where_every_model_fails(world: World) -> None:
    """Success is 1 - Π(1 - s), and the dear model runs where the cheap one failed."""
    full, first = score_cascade(world, BEST, false_pass=0.0, false_fail=0.0)
    stream = world.stream
    assert full.success == pytest.approx(1.0 - np.prod(1.0 - stream.success, axis=1))
    assert full.share[:, 1] == pytest.approx(1.0 - stream.success[:, 0])
    assert full.cost_usd == pytest.approx((full.share * stream.cost_usd).sum(axis=1))
    assert first.success == pytest.approx(stream.success[:, 0])


def test_a_blind_verifier_makes_a_cascade_the_dear_model_at_the_price_of_all(world: World) -> None:
    """Under patch-only verification nothing of the other family passes."""
    full, _ = score_cascade(world, FeedbackSpec(verification="single"))
    chat = world.stream.family == 1
    assert full.success[chat] == pytest.approx(world.stream.success[chat, 1])
    assert full.cost_usd[chat] == pytest.approx(world.stream.cost_usd[chat].sum(axis=1))


def test_a_false_pass_costs_success_and_a_false_fail_costs_money(world: World) -> None:
    """Each error of the verifier hurts in its own way."""
    exact, passes, fails = (score_cascade(world, BEST, *rates)[0] for rates in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3)))
    assert passes.success.mean() < exact.success.mean()
    assert passes.cost_usd.mean() < exact.cost_usd.mean() < fails.cost_usd.mean()


def test_tiers_send_what_looks_harder_to_dearer_models(tmp_path: Path) -> None:
    """By price, whatever the order the models were asked for; without a text to the middle."""
    models = {"mid": 0.02, "small": 0.01, "big": 0.1}
    rows = [
        row(name, model=model, cost_usd=price) for name in ("easy", "hard", "mute") for model, price in models.items()
    ]
    folder = write(tmp_path, rows)
    hard = "Debug, refactor and design the algorithm; prove why.\n" + "1. def f(): return {};\n" * 100
    write_texts(folder, {"easy": "Say hello.", "hard": hard})
    (point,) = score_tiers(world_of(folder, "swe", models=tuple(models)), BEST)
    assert [tuple(models)[k] for k in point.share.argmax(axis=1)] == ["small", "big", "mid"]


def test_complexity_is_a_ratio_that_grows_with_a_text() -> None:
    """Between 0 and 1, and nothing that is added makes a text look easier."""
    parts = ["Fix it.", " Explain why.", "\n1. First\n2. Then", "\n```\ndef f(): return 1\n```", " Prove it." * 300]
    found = [complexity("".join(parts[: i + 1])) for i in range(len(parts))]
    assert found == sorted(found)
    assert 0.0 <= found[0] < found[-1] <= 1.0
