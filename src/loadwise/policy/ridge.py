"""One ridge regression per candidate under delayed feedback, the memory of both linear bandits.

With k a candidate (paper: model m), x the context of a decision and r its reward:

    V_k = λI + Σ x xᵀ     over all decisions for k, judged or pending          (how much was tried)
    L_k = λI + Σ x xᵀ     over the judged decisions
    b_k = Σ r x           over the judged decisions
    θ_k = L_k⁻¹ b_k

The Gram mode says which matrix serves the mean and which the width:

    mode            mean          width
    gram_all        L⁻¹ b         V         pending decisions narrow the width, and do not pull the mean down
    gram_all_mean   V⁻¹ b         V         a pending decision counts as a reward of zero
    landed          L⁻¹ b         L         pending decisions are invisible: simultaneous programs herd

`gram_all` is the reading of ORACLE (E.9) that reproduces its ablation best; the others are kept for comparison. The
first is GP-BUCB's "hallucinated" variance (Desautels, Krause, Burdick, JMLR 15, 2014).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from loadwise.kernel.errors import LawBroken, SchemaMismatch, Unprocessable

from .base import Vector
from .context import N_FEATURES_MAX
from .gram import Array, GramRows, widths
from .state import LearnerState

GramMode = Literal["gram_all", "gram_all_mean", "landed"]

NORM_MAX = 1e6
"""Longest context: the square of its length must leave digits beside λ."""

REWARD_MAX = 1e6
"""Largest magnitude of a reward."""

CANDIDATES_MAX = 256
"""Candidates remembered (law L15); each costs six matrices of d x d."""


class DisjointRidge:
    """V, L, b and θ of every candidate seen; candidates appear with their first decision.

    >>> import numpy as np
    >>> ridge = DisjointRidge(n_features=2, ridge=1.0, gram="gram_all")
    >>> ridge.observe("a", np.array([1.0, 0.0]))
    >>> ridge.learn("a", np.array([1.0, 0.0]), 1.0)
    >>> means, spreads = ridge.estimate(np.array([1.0, 0.0]), ["a", "new"])
    >>> [round(mean, 4) for mean in means], [round(spread, 4) for spread in spreads]
    ([0.5, 0.0], [0.7071, 1.0])
    """

    def __init__(self, *, n_features: int | None, ridge: float, gram: GramMode) -> None:
        self._n_configured = n_features
        self._ridge = ridge
        self._gram = gram
        self._start(n_features or 0)

    def _start(self, n_features: int) -> None:
        self.n_features = n_features
        """Length of a context; 0 until the first one where the configuration does not say."""
        self._row_by_name: dict[str, int] = {}
        self._all = GramRows(n_features, self._ridge)
        self._landed = GramRows(n_features, self._ridge)
        self._credits: Array = np.zeros((0, n_features))
        self._thetas: Array = np.zeros((0, n_features))
        self._n_decisions: list[int] = []
        self._n_verdicts: list[int] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Candidates remembered, in the order of their first decision."""
        return tuple(self._row_by_name)

    def checked(self, x: Any) -> tuple[Vector, float]:
        """A context as a vector, and its squared length.

        Raises:
            Unprocessable: it has the wrong shape, is not finite, or is longer than 10⁶.
        """
        vector: Vector = np.asarray(x, dtype=np.float64)
        n_features = self.n_features or min(max(vector.size, 1), N_FEATURES_MAX)
        if vector.shape != (n_features,):
            raise Unprocessable(f"a context of shape {vector.shape}; this policy takes ({n_features},)", param="x")
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(vector.dot(vector))  # inf or NaN where the context is out of bounds
        if not square <= NORM_MAX * NORM_MAX:
            raise Unprocessable(
                f"a context of squared length {square!r}; it must be finite and <= {NORM_MAX**2:g}", param="x"
            )
        return vector, square

    def estimate(self, x: Any, names: Sequence[str]) -> tuple[list[float], list[float]]:
        """Per name the mean xᵀθ and the spread sqrt(xᵀ V⁻¹ x); a name without decisions has the prior's."""
        vector, square = self.checked(x)
        prior = math.sqrt(square / self._ridge)
        if not self._row_by_name:
            return [0.0] * len(names), [prior] * len(names)
        all_means: list[float] = (self._thetas @ vector).tolist()
        spreads = widths((self._landed if self._gram == "landed" else self._all).quadratics(vector))
        rows = [self._row_by_name.get(name, -1) for name in names]
        return (
            [all_means[row] if row >= 0 else 0.0 for row in rows],
            [spreads[row] if row >= 0 else prior for row in rows],
        )

    def observe(self, candidate: str, x: Any) -> None:
        """A decision for `candidate` is pending: V += x xᵀ.

        Raises:
            Unprocessable: `checked` refuses the context, or there is no room for another candidate.
        """
        vector = self._admit(x)
        row = self._row(candidate)
        self._all.add(row, vector)
        self._n_decisions[row] += 1
        if self._gram == "gram_all_mean":
            self._solve(row)

    def learn(self, candidate: str, x: Any, reward: float) -> None:
        """Its verdict landed: L += x xᵀ, b += r x.

        Raises:
            Unprocessable: `checked` refuses the context, or the reward is not finite or beyond ±10⁶.
        """
        if not abs(reward) <= REWARD_MAX:
            raise Unprocessable(f"a reward of {reward!r}; it must be within ±{REWARD_MAX:g}", param="reward")
        vector = self._admit(x)
        row = self._row(candidate)
        self._landed.add(row, vector)
        self._credits[row] += reward * vector
        self._n_verdicts[row] += 1
        self._solve(row)

    def unlearn(self, candidate: str, x: Any, reward: float) -> None:
        """Its verdict was wrong: L -= x xᵀ, b -= r x; the decision is pending again.

        Raises:
            LawBroken: no verdict of `candidate` was learned.
        """
        vector, _ = self.checked(x)
        row = self._row_by_name.get(candidate, -1)
        if row < 0 or self._n_verdicts[row] == 0:
            raise LawBroken("L11", f"unlearn for candidate {candidate!r}, which has 0 verdicts")
        self._landed.remove(row, vector)
        self._credits[row] -= reward * vector
        self._n_verdicts[row] -= 1
        self._solve(row)

    def undo(self, candidate: str, x: Any) -> None:
        """Its verdict will never come: V -= x xᵀ.

        Raises:
            LawBroken: no decision for `candidate` was observed.
        """
        vector, _ = self.checked(x)
        row = self._row_by_name.get(candidate, -1)
        if row < 0 or self._n_decisions[row] == 0:
            raise LawBroken("L11", f"undo for candidate {candidate!r}, which has 0 observed decisions")
        self._all.remove(row, vector)
        self._n_decisions[row] -= 1
        if self._gram == "gram_all_mean":
            self._solve(row)

    def matrices(self, candidate: str) -> tuple[Array, Array, Vector]:
        """V, L, shape (d, d), and b, shape (d,), as copies; the prior's for a candidate without decisions."""
        row = self._row_by_name.get(candidate)
        if row is None:
            prior = self._ridge * np.eye(self.n_features)
            return prior, prior.copy(), np.zeros(self.n_features)
        return self._all.matrix(row), self._landed.matrix(row), self._credits[row].copy()

    def counts(self, candidate: str) -> tuple[int, int]:
        """Decisions observed (and not undone) and verdicts learned of one candidate."""
        row = self._row_by_name.get(candidate)
        return (0, 0) if row is None else (self._n_decisions[row], self._n_verdicts[row])

    def _row(self, candidate: str) -> int:
        row = self._row_by_name.get(candidate)
        if row is not None:
            return row
        if len(self._row_by_name) >= CANDIDATES_MAX:
            raise Unprocessable(
                f"candidate {candidate!r} would be number {CANDIDATES_MAX + 1}; a linear policy remembers at most"
                f" {CANDIDATES_MAX}"
            )
        self._all.grow()
        self._landed.grow()
        blank = np.zeros((1, self.n_features))
        self._credits = np.concatenate([self._credits, blank])
        self._thetas = np.concatenate([self._thetas, blank])
        self._n_decisions.append(0)
        self._n_verdicts.append(0)
        row = len(self._row_by_name)
        self._row_by_name[candidate] = row
        return row

    def _admit(self, x: Any) -> Vector:
        vector, _ = self.checked(x)
        if self.n_features == 0:
            self._start(vector.size)
        return vector

    def _solve(self, row: int) -> None:
        gram = self._all if self._gram == "gram_all_mean" else self._landed
        self._thetas[row] = gram.project(row, self._credits[row])

    def arrays(self) -> dict[str, Array]:
        """Everything with a fraction, by name, for a dump."""
        return {
            "all_sums": self._all.sums,
            "all_carries": self._all.carries,
            "all_inverses": self._all.inverses,
            "landed_sums": self._landed.sums,
            "landed_carries": self._landed.carries,
            "landed_inverses": self._landed.inverses,
            "credits": self._credits,
            "thetas": self._thetas,
        }

    def tallies(self) -> dict[str, tuple[int, ...]]:
        """Everything whole, by name, for a dump."""
        return {
            "n_features": (self.n_features,),
            "n_decisions": tuple(self._n_decisions),
            "n_verdicts": tuple(self._n_verdicts),
            "all_ages": tuple(self._all.ages),
            "landed_ages": tuple(self._landed.ages),
        }

    def restore(self, state: LearnerState) -> None:
        """Replace everything by a dumped state; nothing changes where it does not fit.

        Raises:
            SchemaMismatch: another number of features, too many candidates, or damaged content.
        """
        n_features = state.count("n_features", 1)[0]
        if self._n_configured not in (None, n_features):
            raise SchemaMismatch(
                f"dump of policy {state.policy!r} has contexts of {n_features} features; here {self._n_configured}"
            )
        if n_features > N_FEATURES_MAX or len(state.names) > CANDIDATES_MAX:
            raise SchemaMismatch(
                f"dump of policy {state.policy!r} has {n_features} features and {len(state.names)} candidates;"
                f" the limits are {N_FEATURES_MAX} and {CANDIDATES_MAX}"
            )
        k = len(state.names)
        square, flat = (k, n_features, n_features), (k, n_features)
        grams = [
            GramRows.restored(
                self._ridge,
                [state.array(f"{which}_{part}", square) for part in ("sums", "carries", "inverses")],
                state.count(f"{which}_ages", k),
            )
            for which in ("all", "landed")
        ]
        credits, thetas = state.array("credits", flat), state.array("thetas", flat)
        n_decisions, n_verdicts = state.count("n_decisions", k), state.count("n_verdicts", k)
        self.n_features = n_features
        self._row_by_name = {name: row for row, name in enumerate(state.names)}
        self._all, self._landed = grams
        self._credits, self._thetas = credits, thetas
        self._n_decisions, self._n_verdicts = n_decisions, n_verdicts
