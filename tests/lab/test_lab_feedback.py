"""When verdicts land and what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_folder import invented

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.lab.feedback import Concurrency, Episode, FeedbackSpec, make_episode
from loadwise.lab.stream import AgentChoice, Stream, read_stream


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    """Sixty invented tasks."""
    return read_stream(
        invented(tmp_path_factory.mktemp("lab")), ["swe", "chat"], ["small", "big"], AgentChoice.parse(None)
    )


def episode(stream: Stream, seed: int = 0, order: int = 0, n_passes: int = 2, **values: Any) -> Episode:
    return make_episode(stream, FeedbackSpec(**values), Streams(seed), order, n_passes)


@given(st.sampled_from(["delayed", "batch", "slots"]), st.integers(1, 200), st.integers(0, 3))
def test_a_verdict_lands_once_after_its_decision_and_at_most_c_fly(
    stream: Stream, concurrency: Concurrency, in_flight: int, order: int
) -> None:
    """Whatever the arm: nothing is heard early or twice, and never are more than C programs in flight."""
    found = episode(stream, order=order, concurrency=concurrency, in_flight=in_flight)
    landed: set[int] = set()
    for step in range(len(found.task)):
        before = len(landed)
        landed.update(found.landing[before : found.landing_end[step]].tolist())
        assert len(landed) == found.landing_end[step]
        assert all(earlier < step for earlier in landed)
        assert step - len(landed) < in_flight


def test_sequential_hears_everything_before_the_next_decision(stream: Stream) -> None:
    """And with a delay of N, exactly N decisions later."""
    assert episode(stream).landing_end.tolist() == list(range(120))
    assert episode(stream, delay=7).landing_end.tolist() == [max(step - 7, 0) for step in range(120)]


def test_a_batch_hears_nothing_of_itself(stream: Stream) -> None:
    """All of a batch is decided on what the batches before it showed."""
    ends = episode(stream, concurrency="batch", in_flight=50).landing_end
    assert sorted(set(ends.tolist())) == [0, 50, 100]


def test_slots_share_nothing(stream: Stream) -> None:
    """C learners take turns, and each has heard its own last verdict when it decides again."""
    found = episode(stream, concurrency="slots", in_flight=3)
    assert found.learner[:5].tolist() == [0, 1, 2, 0, 1]
    assert found.landing_end[:5].tolist() == [0, 0, 0, 1, 2]


def test_every_pass_shows_every_task_once_in_the_same_order(stream: Stream) -> None:
    """An order is a permutation that is repeated; another order is another permutation."""
    found = episode(stream, n_passes=3)
    passes = found.task.reshape(3, stream.n_tasks)
    assert (passes == passes[0]).all()
    assert sorted(passes[0].tolist()) == list(range(stream.n_tasks))
    assert (episode(stream, order=1).task[: stream.n_tasks] != passes[0]).any()


def test_the_patch_verifier_reads_one_family(stream: Stream) -> None:
    """Every other family is credited zero; the best fixed verifier of each family reads all."""
    is_patch = stream.family[episode(stream).task] == 0
    assert (episode(stream, verification="single").credited == is_patch).all()
    assert episode(stream, verification="best").credited.all()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_the_selector_errs_as_often_as_told(stream: Stream, ratio: float) -> None:
    """With probability 1 - q a verdict is zero."""
    found = episode(stream, n_passes=100, misclassified=ratio)
    assert abs(1.0 - found.credited.mean() - ratio) < 0.02
    assert ratio not in (0.0, 1.0) or 1.0 - found.credited.mean() == ratio


def test_loss_takes_the_share_it_is_told(stream: Stream) -> None:
    """A share of verdicts never lands."""
    assert not episode(stream).lost.any()
    assert abs(episode(stream, n_passes=100, loss=0.3).lost.mean() - 0.3) < 0.02


def test_what_is_drawn_depends_on_seed_and_order_alone(stream: Stream) -> None:
    """Arms and verifiers meet equal luck: the trials are the same."""
    draws = [episode(stream, verification=kind).trial_draw for kind in ("adaptive", "single", "best")]
    draws.append(episode(stream, concurrency="delayed", in_flight=9, loss=0.5).trial_draw)
    assert all((draw == draws[0]).all() for draw in draws)
    assert (episode(stream, seed=1).trial_draw != draws[0]).any()
    assert np.all((draws[0] >= 0.0) & (draws[0] < 1.0))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"verification": "sometimes"}, "known: adaptive, single, best"),
        ({"concurrency": "parallel"}, "known: sequential, delayed, batch, slots"),
        ({"delay": -1}, "delay is -1"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"misclassified": 1.5}, "misclassified is 1.5"),
        ({"concurrency": "batch", "in_flight": 0}, "in-flight is 0"),
        ({"in_flight": 4}, "'sequential' has 1"),
        ({"concurrency": "slots", "in_flight": 4, "delay": 2}, "sets when verdicts land"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    """The message names the value and the limit."""
    with pytest.raises(ConfigError, match=said):
        FeedbackSpec(**values)
