"""Chance by name: a draw depends on the names it was asked under, never on who drew before.

Hashing (BLAKE2b) instead of a generator with state: the standard library does not promise that
`random.choice` gives the same sequence in the next Python, and a table that cannot be made again proves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


class Luck:
    """A named sequence of draws.

    >>> Luck(7, "task", "small").integer(1, 6) == Luck(7, "task", "small").integer(1, 6)
    True
    """

    def __init__(self, *names: object) -> None:
        self._name = repr(tuple(str(name) for name in names))
        self._n_drawn = 0

    def _word(self) -> int:
        digest = blake2b(f"{self._name}#{self._n_drawn}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._n_drawn += 1
        return int.from_bytes(digest, "big")

    def unit(self) -> float:
        """Draw uniformly from [0, 1)."""
        return (self._word() >> 11) / 2.0**53

    def integer(self, low: int, high: int) -> int:
        """Draw uniformly from low..high, both included; the span must stay far below 2**64."""
        return low + (self._word() * (high - low + 1) >> 64)

    def pick(self, options: Sequence[T]) -> T:
        """Draw one of the options."""
        return options[self.integer(0, len(options) - 1)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in random order (Fisher and Yates)."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.integer(0, i)
            out[i], out[j] = out[j], out[i]
        return out
