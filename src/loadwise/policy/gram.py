"""Regularised Gram matrices, one per candidate, with their inverses at hand.

Theory of operation. Row k holds V_k = λI + Σ x xᵀ twice: as an exact sum and as a cached inverse.

- The sum is kept in two floats per entry (the rounding error of every addition is itself added up), so taking a term
  out again leaves what was there before, and the order of terms does not matter, even where terms differ by twelve
  orders of magnitude.
- The inverse follows by the Sherman-Morrison identity, (V + x xᵀ)⁻¹ = V⁻¹ - u uᵀ / (1 + xᵀu) with u = V⁻¹x, which
  costs d² where a fresh inverse costs d³. Its rounding errors pile up, so it is made afresh from the exact sum after
  every 200 updates, after an update that takes away more than three digits, and after every removal.

References: W. Hager, Updating the Inverse of a Matrix, SIAM Review 31(2), 1989; A. Neumaier's compensated summation,
ZAMM 54, 1974.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Vector

Array = npt.NDArray[np.float64]

REFRESH_UPDATES = 200
"""Updates after which a cached inverse is made afresh."""

_SHRINK_MAX = 1e3
"""Sherman-Morrison loses the digits of 1 + xᵀV⁻¹x; beyond this the inverse is made afresh."""


class GramRows:
    """K matrices of d x d features; rows are added and never leave."""

    def __init__(self, n_features: int, ridge: float) -> None:
        self.n_features = n_features
        self._ridge = ridge
        empty = np.zeros((0, n_features, n_features))
        self._restore(empty, empty.copy(), empty.copy(), [])

    def _restore(self, sums: Array, carries: Array, inverses: Array, ages: list[int]) -> None:
        self.sums, self.carries, self.inverses, self.ages = sums, carries, inverses, ages
        # A view for one matrix-vector product over all rows: (K * d, d) @ (d,).
        self._stacked = inverses.reshape(len(inverses) * self.n_features, self.n_features)

    @classmethod
    def restored(cls, ridge: float, arrays: Sequence[Array], ages: list[int]) -> "GramRows":
        """Rows as they were when `sums`, `carries` and `inverses`, each (K, d, d), were read off."""
        sums, carries, inverses = arrays
        rows = cls(sums.shape[-1], ridge)
        rows._restore(sums, carries, inverses, ages)
        return rows

    def grow(self) -> None:
        """Add a row: no term yet, λI."""
        eye = np.eye(self.n_features)[None]
        self._restore(
            np.concatenate([self.sums, self._ridge * eye]),
            np.concatenate([self.carries, np.zeros_like(eye)]),
            np.concatenate([self.inverses, eye / self._ridge]),
            [*self.ages, 0],
        )

    def matrix(self, row: int) -> Array:
        """V of a row, shape (d, d)."""
        total: Array = self.sums[row] + self.carries[row]
        return total

    def project(self, row: int, vector: Vector) -> Vector:
        """V⁻¹ @ vector, shape (d,)."""
        product: Vector = self.inverses[row] @ vector
        return product

    def quadratics(self, x: Vector) -> list[float]:
        """xᵀ V⁻¹ x of every row."""
        projected = (self._stacked @ x).reshape(len(self.ages), self.n_features)
        values: list[float] = (projected @ x).tolist()
        return values

    def add(self, row: int, x: Vector) -> None:
        """V += x xᵀ."""
        self._accumulate(row, np.multiply.outer(x, x))
        inverse = self.inverses[row]
        u = inverse @ x
        shrink = 1.0 + float(x.dot(u))
        self.ages[row] += 1
        # Written so that a NaN refreshes too.
        if self.ages[row] >= REFRESH_UPDATES or not 1.0 <= shrink <= _SHRINK_MAX:
            self._refresh(row)
            return
        u /= math.sqrt(shrink)
        inverse -= np.multiply.outer(u, u)

    def remove(self, row: int, x: Vector) -> None:
        """V -= x xᵀ for an x that was added."""
        self._accumulate(row, -np.multiply.outer(x, x))
        self._refresh(row)

    def _accumulate(self, row: int, term: Array) -> None:
        # Knuth's two-sum: `total` and its rounding error, exactly.
        before = self.sums[row]
        total = before + term
        added = total - before
        term -= added
        added -= total
        added += before
        term += added
        self.carries[row] += term
        before[...] = total

    def _refresh(self, row: int) -> None:
        inverse = np.linalg.inv(self.matrix(row))
        self.inverses[row] = (inverse + inverse.T) * 0.5
        self.ages[row] = 0


def widths(quadratics: Sequence[float]) -> list[float]:
    """Square roots; a quadratic form that rounding made negative is zero."""
    return [math.sqrt(value) if value > 0.0 else 0.0 for value in quadratics]
