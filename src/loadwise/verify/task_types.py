"""Which task type a request is of, told by a few examples of each type (ORACLE, section 4.2.1 and appendix B.3).

*Theory of operation.* A request and every example are vectors (`task_types_text.describe`, or the bare embedding), and
all that is ever used of them is their products. Two rules, both linear in the products k_i of a request with the n
examples, and both without a prior: a type gains nothing by having more examples.

    prototype   score_c = cos(x, mean of the examples of c)          the paper's; on embeddings alone
    ridge       score_c = sum_i a_ic k_i + b_c                        ours

The second is ridge regression from vectors to the one-hot type minus 1/C, in its dual form: with the products centred
on the mean of the types' means (A), the weight w_i = n / (C n_c) of an example of c, and Y the targets,

    (A + λ s diag(1/w)) a = Y        s = sum_i w_i A_ii / n,  the mean squared length of a centred example
    b_c = -sum_i a_ic m_i            m_i = the product of example i with the mean of the types' means

It is what linear discriminant analysis with a heavily shrunken covariance becomes when there are fewer examples than
dimensions. Nothing is fitted but to the examples, so nothing has to be shipped; few examples, or examples that look
alike, give small scores, so the margin between the two best scores also says how much the examples know. Below
`margin_min` the selector abstains: no type, no verifier, no credit.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

Rule = Literal["ridge", "prototype", "off"]
Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RIDGE = 6.0
"""λ, in units of the mean squared length of a centred example, each type counting the same."""
MARGIN_MIN: dict[str, float] = {"ridge": 0.02, "prototype": 0.02, "off": 0.0}
"""That of `ridge` was chosen on one half of the tasks (`experiments/results/selector_choice.md`)."""
EXAMPLES_MAX = 128
"""Over all types; beyond it examples are taken evenly from the types."""


class SelectionSpec(Fact, frozen=True, kw_only=True):
    """How the task type of a program is told that names none.

    Raises:
        ConfigError: the margin is out of its range.
    """

    rule: Rule = "ridge"
    """`off`: only by name."""
    margin: float | None = None
    """Between the two best scores; below it, no task type. None takes the rule's own, 0.02."""
    task_type: str | None = None
    """Every program that names none is of this type; nothing is inferred then."""

    def __post_init__(self) -> None:
        if self.margin is not None and not 0.0 <= self.margin <= 2.0:
            raise ConfigError(f"task_selector margin is {self.margin!r}; it must be in [0, 2]")

    @property
    def margin_min(self) -> float:
        """The margin in force."""
        return MARGIN_MIN[self.rule] if self.margin is None else self.margin


class Told(NamedTuple):
    """What the selector says of one request."""

    task_type: str | None
    """None: it abstains."""
    nearest: str | None
    """The type with the best score, however small the margin."""
    margin: float


NOTHING_TOLD = Told(None, None, 0.0)


class Linear(NamedTuple):
    """Scores as a linear function of products: `products @ weights + bias`."""

    weights: Array
    """Shape (n_examples, n_types)."""
    bias: Array
    """Shape (n_types,)."""

    def scores(self, products: Array) -> Array:
        """Shape (..., n_types), of products with the examples, shape (..., n_examples)."""
        found: Array = products @ self.weights + self.bias
        return found


def fit(rule: Rule, gram: Array, owner: Ints, n_types: int) -> Linear:
    """The scores of a rule.

    Args:
        gram: products of the examples with each other, shape (n, n).
        owner: the type of each example, shape (n,); every type has one.

    Returns:
        Scores that are all zero where the examples do not differ.
    """
    counts = np.bincount(owner, minlength=n_types)
    means = np.eye(n_types)[owner] / counts  # (n, C): products @ means are products with the types' means
    if rule == "prototype":
        lengths: Array = np.sqrt(np.maximum(np.einsum("nc,nm,mc->c", means, gram, means), 1e-12))
        return Linear(means / lengths, np.zeros(n_types))
    n = len(owner)
    weight = n / (n_types * counts[owner])
    share = weight / n
    mean = gram @ share
    centred = gram - mean - mean[:, None] + share @ mean
    scale = float(share @ centred.diagonal())
    if scale < 1e-9:
        return Linear(np.zeros((n, n_types)), np.zeros(n_types))
    targets = np.eye(n_types)[owner] - 1.0 / n_types
    ridge = RIDGE * scale * np.diag(1.0 / weight)
    weights = np.asarray(np.linalg.solve(centred + ridge, targets), dtype=np.float64)
    return Linear(weights, -mean @ weights)


def margins(scores: Array) -> Array:
    """The best score minus the second best of each row, shape (n, n_types); zero where there is one type only."""
    if scores.shape[-1] < 2:
        return np.zeros(scores.shape[:-1])
    best = np.partition(scores, -2, axis=-1)
    gap: Array = best[..., -1] - best[..., -2]
    return gap


class TypeSelector:
    """Tells the task type of a request from examples.

    Args:
        examples: vectors by task type, each of shape (n_features,); types without any are not told.

    Raises:
        ConfigError: fewer than two types have an example.
    """

    def __init__(self, spec: SelectionSpec, examples: Mapping[str, Sequence[npt.NDArray[np.float32]]]) -> None:
        self.names = tuple(name for name, vectors in examples.items() if len(vectors))
        if len(self.names) < 2:
            raise ConfigError(
                f"{len(self.names)} task types have examples; a type is told from another, so 2 are needed"
            )
        owner = np.repeat(np.arange(len(self.names)), [len(examples[name]) for name in self.names])
        x = np.stack([vector for name in self.names for vector in examples[name]])
        self._owner = owner
        self._gram = (x @ x.T).astype(np.float64)
        self._rule = spec.rule
        self._margin_min = spec.margin_min
        linear = fit(spec.rule, self._gram, owner, len(self.names))
        self._towards = (x.T @ linear.weights).astype(np.float32)  # (n_features, n_types)
        self._bias = linear.bias

    def tell(self, x: npt.NDArray[np.float32]) -> Told:
        """The type of a request, shape (n_features,); none for a vector that is not finite or of no length."""
        if not x.any():
            return NOTHING_TOLD
        scores = (x @ self._towards).astype(np.float64) + self._bias
        if not np.isfinite(scores).all():
            return NOTHING_TOLD
        nearest = self.names[int(scores.argmax())]
        margin = float(margins(scores[None])[0])
        # A tie decides nothing, even where a margin of zero was asked for.
        return Told(nearest if margin >= self._margin_min and margin > 0.0 else None, nearest, margin)

    def confused(self) -> list[tuple[str, int, str]]:
        """Examples that look like another type to a selector that was not shown them: (type, place, nearest type).

        Where fewer than two others of the type are left, or the margin is below that of the rule, nothing is said.
        """
        found = []
        places = dict.fromkeys(range(len(self.names)), -1)
        for at, own in enumerate(self._owner.tolist()):
            places[own] += 1
            others = np.flatnonzero(np.arange(len(self._owner)) != at)
            if (self._owner[others] == own).sum() < 2:
                continue
            linear = fit(self._rule, self._gram[np.ix_(others, others)], self._owner[others], len(self.names))
            scores = linear.scores(self._gram[at, others])
            told = int(scores.argmax())
            if scores[told] - scores[own] >= max(self._margin_min, 1e-9):
                found.append((self.names[own], places[own], self.names[told]))
        return found


def take_evenly(examples: Mapping[str, Sequence[str]], limit: int = EXAMPLES_MAX) -> dict[str, list[str]]:
    """One text of each type in turn until there are enough, so that no type rules by the number of its examples.

    Empty texts and repetitions are left out.

    >>> take_evenly({"a": ["x", "y", "x"], "b": ["z", " "]}, 2)
    {'a': ['x'], 'b': ['z']}
    """
    texts = {name: list(dict.fromkeys(text for text in of if text.strip())) for name, of in examples.items()}
    taken: dict[str, list[str]] = {name: [] for name in texts}
    for at in range(max(map(len, texts.values()), default=0)):
        for name, of in texts.items():
            if at < len(of) and sum(map(len, taken.values())) < limit:
                taken[name].append(of[at])
    return taken


def require_distinct(examples: Mapping[str, Sequence[str]]) -> None:
    """Refuse a text that is said to be of two types.

    Raises:
        ConfigError: names both.
    """
    owner: dict[str, str] = {}
    for name, texts in examples.items():
        for text in texts:
            other = owner.setdefault(text.strip(), name)
            if other != name and text.strip():
                raise ConfigError(f"task types {other!r} and {name!r} have the same example: {text.strip()[:80]!r}")
