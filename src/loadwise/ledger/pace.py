"""How fast programs go forward on a backend, by how many there are, and how many it should have where time is limited.

One more program makes all others slower. As long as they end in time that costs nothing: throughput rises, at worst it
stands still. Where each may take `budget_s` and is killed then, too many end as none. With K the turns of a program and
t(n) the seconds from answer to answer when n programs are there, those that end in time, per second, are

    g(n) = n P(K t(n) <= budget) / E[min(K t(n), budget)]

and one more is worth having while it brings a fair part (`WORTH`) of g(n) / n. t(n) = a + b n is fitted by least
squares to recent answers, forgotten with time, not with new ones: a slow hour must not slow an empty engine. Where n
hardly changes, the slope leans on a quarter of t's mean over n's, as if on `LEAN` answers at half as many programs.

K is distributed as Kaplan and Meier have it, from programs that ended and those that still run or were cut off.

Reference: Kaplan and Meier (1958), by `ledger.footprint.survival`.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from .demand import PSEUDO_OBSERVATIONS, remember
from .footprint import survival

MEMORY_S = 300.0
"""Answers count 1/e after so long."""
LEAN = 30.0
LEAN_SLOPE = 0.25
"""How much t grows with n, both relative, where nothing is known: engines batch, but not without end."""
READINGS_MIN = 30.0
CYCLE_MIN_S = 1e-3
"""An answer may come at the instant of the one before, where clocks are coarse."""
WORTH = 0.3
"""Who is killed is lost, who waits is not: near the top of g, where one more changes little, let it wait."""


class Pace(msgspec.Struct, kw_only=True):
    """Seconds from answer to answer on one backend.

    >>> pace = Pace()
    >>> for i in range(400):
    ...     pace.read(n_programs=10 + i % 20, cycle_s=4.0 + 0.5 * (10 + i % 20), at_s=float(i))
    >>> round(pace.cycle_s(10)), round(pace.cycle_s(30))
    (10, 18)
    """

    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    """Of 1, n, n², t, nt over readings."""
    read_at_s: float = 0.0
    turns: list[int] = []
    """Of programs that ended here, of late."""
    cut_turns: list[int] = []
    """So far, of programs that ran out of time here, of late."""
    cut_tokens: list[int] = []
    """Contexts of the same: their peaks would have been larger."""

    def read(self, *, n_programs: int, cycle_s: float, at_s: float) -> None:
        """Take one answer: how many programs were there, and how long ago its program's last answer was."""
        kept = math.exp(-max(at_s - self.read_at_s, 0.0) / MEMORY_S)
        self.read_at_s = max(at_s, self.read_at_s)
        n, t = float(n_programs), max(cycle_s, CYCLE_MIN_S)
        self.sums = [kept * old + new for old, new in zip(self.sums, (1.0, n, n * n, t, n * t), strict=True)]

    def learn_end(self, n_turns: int) -> None:
        """A program has ended."""
        remember(self.turns, n_turns)

    def learn_cut(self, n_turns: int, tokens: int) -> None:
        """A program has run out of time."""
        remember(self.cut_turns, n_turns)
        remember(self.cut_tokens, tokens)

    @property
    def is_known(self) -> bool:
        """Whether enough was read of late, seen from the latest reading, and enough programs have ended."""
        return self.sums[0] >= READINGS_MIN and len(self.turns) >= PSEUDO_OBSERVATIONS

    def is_worth_one_more(self, n_programs: int, running: Sequence[float], budget_s: float) -> bool:
        """Whether one more than so many brings at least `WORTH` of what each of them brings.

        Args:
            running: turns so far of those that run.
        """
        there = [*running, *self.cut_turns]
        fewer, more = (
            in_time_per_s(n, self.cycle_s(n), self.turns, there, budget_s) for n in (n_programs, n_programs + 1)
        )
        return more - fewer >= WORTH * fewer / max(n_programs, 1)

    def cycle_s(self, n_programs: float) -> float:
        """Expected seconds from answer to answer with so many programs; at least a tenth of their mean."""
        count, sum_n, sum_nn, sum_t, sum_nt = self.sums
        n, t = sum_n / count, sum_t / count
        leaned = LEAN * (n / 2.0) ** 2
        slope = (sum_nt - n * sum_t + leaned * LEAN_SLOPE * t / n) / (sum_nn - n * sum_n + leaned)
        return max(t + max(slope, 0.0) * (n_programs - n), 0.1 * t)


def in_time_per_s(
    n_programs: int, cycle_s: float, turns: Sequence[float], running: Sequence[float], budget_s: float
) -> float:
    """Programs that end in time, per second: g(n).

    Args:
        turns: of ended programs, shape (m,), m >= 1.
        running: turns so far of programs that run or were cut off, shape (k,).

    >>> g = [in_time_per_s(n, 9.0 + 0.1 * n, [40.0, 50.0, 60.0], [], 900.0) for n in (10, 60, 200)]
    >>> g[0] < g[1], g[1] > g[2]
    (True, True)
    """
    ended = np.sort(np.asarray(turns, dtype=np.float64))
    # Between two known numbers of turns a line: one more program is a small step, smaller than those of a staircase.
    numbers = np.concatenate(([0.0], ended))
    left = survival(ended, np.asarray(running, dtype=np.float64))
    left = np.concatenate(([1.0], left[1:]))
    most = budget_s / cycle_s
    within = np.append(np.minimum(numbers, most), most)
    alive = np.interp(within, numbers, left)
    lasts = float((np.diff(within) * (alive[1:] + alive[:-1])).sum()) / 2.0
    return n_programs * (1.0 - float(alive[-1])) / max(lasts * cycle_s, 1e-9)
