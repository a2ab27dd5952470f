"""What a pack's reader makes of texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.policy.reading import CHARS_MAX, N_BINS, N_MARKS, TOLD_MAX, Reader, bins, clipped, marks, row

TEXTS = st.text(max_size=400)


@given(TEXTS)
def test_any_text_gives_finite_numbers_of_one_shape(text: str) -> None:
    """Also empty ones, and lone surrogates."""
    for said in (text, text + "\ud800"):
        features = row(said)
        assert features.shape == (N_MARKS + N_BINS,)
        assert np.isfinite(features).all()


@given(TEXTS, st.integers(0, 5))
def test_what_is_told_is_the_dot_product(text: str, seed: int) -> None:
    """The reader's short way gives what the fitted weights say."""
    rng = np.random.default_rng(seed)
    weights = 0.1 * rng.normal(size=(2, N_MARKS + N_BINS))
    told = Reader(weights[0], 0.3, weights[1], -0.2).told(text)
    expected = np.clip(weights @ row(text) + [0.3, -0.2], -TOLD_MAX, TOLD_MAX)
    assert told[0] == 1.0
    assert told[1:] == pytest.approx(expected.tolist(), abs=1e-8)


def test_long_texts_are_read_at_both_ends() -> None:
    """The middle of a long text says nothing, its ends do, and its length costs nothing."""
    text = "begin " + "x " * CHARS_MAX + "end"
    assert len(clipped(text)) == CHARS_MAX + 1
    assert set(bins("begin")) | set(bins("end")) <= set(bins(text))
    assert (marks(text)[0], marks("a" * 100_000)[0]) == (pytest.approx(np.log1p(CHARS_MAX + 1)),) * 2


def test_an_extreme_word_is_bounded() -> None:
    """A weight that a fit would never give does not reach the context."""
    huge = np.full(N_MARKS + N_BINS, 1e5)
    assert Reader(huge, 0.0, -huge, 0.0).told("Fix it") == (1.0, TOLD_MAX, -TOLD_MAX)
