"""Counts and sums of rewards by label and candidate: what policies keep that learn one number per kind of task.

A label is which of the leading features of a context are not zero: the one-hots of task type and domain. Where the
configuration does not say how many features those are, all count.
"""

from typing import Any

import numpy as np

from loadwise.kernel.errors import LawBroken, SchemaMismatch, Unprocessable

from .ridge import CANDIDATES_MAX, REWARD_MAX
from .state import LearnerState

LABELS_MAX = 1024
"""Labels told apart (law L15); later ones share one tally."""

_SHARED = "shared"


class Cell:
    """One candidate under one label."""

    __slots__ = ("n_decisions", "n_verdicts", "total")

    def __init__(self, n_decisions: int = 0, n_verdicts: int = 0, total: float = 0.0) -> None:
        self.n_decisions = n_decisions
        """Observed and not undone."""
        self.n_verdicts = n_verdicts
        self.total = total
        """Sum of rewards."""

    @property
    def mean(self) -> float:
        """Mean reward; zero without a verdict."""
        return self.total / self.n_verdicts if self.n_verdicts else 0.0


_BLANK = Cell()


class Tally:
    """Cells by label and candidate.

    >>> tally = Tally(n_labels=2)
    >>> tally.learn("a", np.array([1.0, 0.0, 0.3]), 0.5)
    >>> tally.cell("a", tally.label(np.array([1.0, 0.0, -7.0]))).mean
    0.5
    """

    def __init__(self, n_labels: int | None) -> None:
        self._n_labels = n_labels
        self._cells: dict[str, dict[str, Cell]] = {}
        self._candidates: set[str] = set()

    def label(self, x: Any) -> str:
        """The label of a context; one that is new where there is no room is `shared`.

        Raises:
            Unprocessable: the context holds a value that is not finite.
        """
        vector = np.asarray(x, dtype=np.float64)
        if not np.isfinite(vector).all():
            raise Unprocessable("a context must be finite", param="x")
        label = np.packbits(vector[: self._n_labels] != 0.0).tobytes().hex()
        return label if label in self._cells or len(self._cells) < LABELS_MAX else _SHARED

    def cell(self, candidate: str, label: str) -> Cell:
        """What is known of a candidate; blank without a decision. Not to be changed."""
        return self._cells.get(label, {}).get(candidate, _BLANK)

    def observe(self, candidate: str, x: Any) -> None:
        """A decision is pending."""
        self._own(candidate, x).n_decisions += 1

    def learn(self, candidate: str, x: Any, reward: float) -> None:
        """Its verdict landed.

        Raises:
            Unprocessable: the reward is not finite or beyond ±10⁶.
        """
        if not abs(reward) <= REWARD_MAX:
            raise Unprocessable(f"a reward of {reward!r}; it must be within ±{REWARD_MAX:g}", param="reward")
        cell = self._own(candidate, x)
        cell.n_verdicts += 1
        cell.total += reward

    def unlearn(self, candidate: str, x: Any, reward: float) -> None:
        """Its verdict was wrong; the decision is pending again.

        Raises:
            LawBroken: no verdict of `candidate` was learned under this label.
        """
        label = self.label(x)
        cell = self.cell(candidate, label)
        if cell.n_verdicts == 0:
            raise LawBroken("L11", f"unlearn for candidate {candidate!r}, which has 0 verdicts under {label!r}")
        cell.n_verdicts -= 1
        cell.total = cell.total - reward if cell.n_verdicts else 0.0

    def undo(self, candidate: str, x: Any) -> None:
        """Its verdict will never come.

        Raises:
            LawBroken: no decision for `candidate` was observed under this label.
        """
        label = self.label(x)
        cell = self.cell(candidate, label)
        if cell.n_decisions <= cell.n_verdicts:
            raise LawBroken("L11", f"undo for candidate {candidate!r}, which has 0 pending decisions under {label!r}")
        cell.n_decisions -= 1

    def _own(self, candidate: str, x: Any) -> Cell:
        if candidate not in self._candidates:
            if len(self._candidates) >= CANDIDATES_MAX:
                raise Unprocessable(f"candidate {candidate!r} is one more than the limit of {CANDIDATES_MAX}")
            self._candidates.add(candidate)
        return self._cells.setdefault(self.label(x), {}).setdefault(candidate, Cell())

    def names(self) -> tuple[str, ...]:
        """`label/candidate` of every cell, in the order of their first decision."""
        return tuple(f"{label}/{candidate}" for label, cells in self._cells.items() for candidate in cells)

    def counts(self) -> dict[str, tuple[int, ...]]:
        """Everything whole, by name, for a dump."""
        cells = [cell for by_candidate in self._cells.values() for cell in by_candidate.values()]
        return {
            "n_decisions": tuple(cell.n_decisions for cell in cells),
            "n_verdicts": tuple(cell.n_verdicts for cell in cells),
        }

    def totals(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Sums of rewards, for a dump, shape (n_cells,)."""
        cells = [cell for by_candidate in self._cells.values() for cell in by_candidate.values()]
        return np.array([cell.total for cell in cells], dtype=np.float64)

    def restore(self, state: LearnerState) -> None:
        """Replace everything by a dumped state; nothing changes where it does not fit.

        Raises:
            SchemaMismatch: damaged content, or more than fits here.
        """
        n = len(state.names)
        n_decisions, n_verdicts = state.count("n_decisions", n), state.count("n_verdicts", n)
        totals: list[float] = state.array("totals", (n,)).tolist()
        cells: dict[str, dict[str, Cell]] = {}
        for name, decisions, verdicts, total in zip(state.names, n_decisions, n_verdicts, totals, strict=True):
            label, slash, candidate = name.partition("/")
            if not slash:
                raise SchemaMismatch(f"dump of policy {state.policy!r}: cell {name!r} is not LABEL/CANDIDATE")
            cells.setdefault(label, {})[candidate] = Cell(decisions, verdicts, total)
        candidates = {candidate for by_candidate in cells.values() for candidate in by_candidate}
        if len(cells) > LABELS_MAX + 1 or len(candidates) > CANDIDATES_MAX:
            raise SchemaMismatch(
                f"dump of policy {state.policy!r} has {len(cells)} labels and {len(candidates)} candidates;"
                f" the limits are {LABELS_MAX + 1} and {CANDIDATES_MAX}"
            )
        self._cells, self._candidates = cells, candidates
