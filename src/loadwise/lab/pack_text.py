"""How hard and how dear a task is by its text: ridge regression on marks, words and an embedding.

Each block of features (marks, words, vector) is centred and scaled to equal weight, the ridge is the one with the
least leave-one-out error on the pack's own tasks, and the scaling is folded into the weights, so that applying them is
one dot product.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.policy.reading import N_BINS, N_MARKS, VERSION, row

from .pack import TextModel

Array = npt.NDArray[np.float64]
Vectors = Callable[[Sequence[str]], Array]
"""Texts to the embedder's vectors, shape (n, width)."""

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""Candidates; a row has a mean squared length of one for each block."""
TASKS_MIN = 8
"""Fewer texts than these teach nothing."""


class TextFit(NamedTuple):
    """A fitted text model, and what it says of each of its own tasks had it not seen that one."""

    model: TextModel
    left_out: Array
    """Shape (n, 2): logit of success, log cost, each less the mean of all; zero where texts do not help."""


def fit_text(rows: Sequence[tuple[str, float, float, float]], vectors: Vectors | None) -> TextFit | None:
    """Fit both targets.

    Args:
        rows: text, weight, logit of success, log cost.

    Returns:
        None where there are too few texts.
    """
    if len(rows) < TASKS_MIN:
        return None
    features = np.stack([row(text) for text, *_ in rows])
    blocks = [(0, N_MARKS, True), (N_MARKS, N_MARKS + N_BINS, False)]
    if vectors is not None:
        embedded = vectors([text for text, *_ in rows])
        blocks.append((features.shape[1], features.shape[1] + embedded.shape[1], False))
        features = np.concatenate([features, embedded], axis=1)
    scale = _scales(features, blocks)
    centre = features.mean(axis=0)
    weight = np.array([weight for _, weight, _, _ in rows])
    parts = []
    for place in (2, 3):
        target = np.array([told[place] for told in rows])
        parts.append(_ridge((features - centre) * scale, target, weight))
    (success, said_success), (cost, said_cost) = parts
    success, cost = success * scale, cost * scale
    model = TextModel(
        reading=VERSION,
        success=tuple(success.tolist()),
        success_bias=-float(centre @ success),
        cost=tuple(cost.tolist()),
        cost_bias=-float(centre @ cost),
    )
    return TextFit(model, np.stack([said_success, said_cost], axis=1))


def _scales(features: Array, blocks: Sequence[tuple[int, int, bool]]) -> Array:
    """What each feature is multiplied with, shape (d,): blocks get mean squared length one."""
    scale = np.zeros(features.shape[1])
    for begin, end, is_standard in blocks:
        spread = features[:, begin:end].std(axis=0)
        part = np.where(spread > 1e-9, 1.0 / np.maximum(spread, 1e-9) if is_standard else 1.0, 0.0)
        length = float(np.sqrt(((spread * part) ** 2).sum()))
        scale[begin:end] = part / length if length > 0.0 else 0.0
    return scale


def _ridge(x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    """Weights and leave-one-out predictions for the ridge that predicts best so, and for none where that is no better.

    Args:
        x: centred, shape (n, d); y: shape (n,).
    """
    root = np.sqrt(weight / weight.mean())
    middle = float(np.average(y, weights=weight))
    rows, target = x * root[:, None], (y - middle) * root
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else None
    if gram is not None:
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
    else:
        values, basis = np.linalg.eigh(rows.T @ rows)
        values = np.maximum(values, 1e-12)
        vectors = (rows @ basis) / np.sqrt(values)
    projected = vectors.T @ target
    best: tuple[float, float, Array] = (float((target**2).sum()), np.inf, np.zeros(len(y)))
    for ridge in RIDGES:
        shrink = values / (values + ridge)
        hat = (vectors**2 * shrink).sum(axis=1)
        left_out = target - (target - vectors @ (shrink * projected)) / np.maximum(1.0 - hat, 1e-3)
        error = float(((target - left_out) ** 2).sum())
        if error < best[0]:
            best = (error, ridge, left_out)
    if not np.isfinite(best[1]):
        return np.zeros(x.shape[1]), np.zeros(len(y))
    if gram is not None:
        theta = rows.T @ (vectors @ (projected / (values + best[1])))
    else:
        theta = basis @ ((basis.T @ (rows.T @ target)) / (values + best[1]))
    return theta, best[2] / root
