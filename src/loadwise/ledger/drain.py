"""How fast a line before some caches is let in: how many of those who wait have a place after t seconds, on average.

Everything is measured on one clock of a program's life, which runs at `rate_per_s`: its context in tokens where that is
counted, for under load programs become slower, not larger; seconds elsewhere. `Lives` says with which chance a program
that has come so far goes on, by Kaplan and Meier from those that ended, those that still run and those that were cut
off; a time budget cuts off whoever is left. A program i of age a_i fills b_i + s_i max(a_i, floor) of its cache. What
all together are expected to fill at time t is the load

    U(t) = sum_i P(i is there at t) (b_i + s_i max(a_i + rate t, floor(t)))

and whenever the load leaves room those who wait are let in, as a fluid: in a step of the grid so many that the limit is
reached, each of which then lives, grows and ends like all others. Where every program fills 1 / K of K places this is
the renewal process of departures; where peaks are reserved the floor is the expected peak, which itself follows those
that end; and under a gate that looks ahead the load may not pass the limit at any later instant either. Hence a
departure may open no place, or several: that is the gate's arithmetic, not an assumption.

The number let in, N(t), is spread about its mean with the variance

    v(t) = sum_i p_i (1 - p_i) + (N - D)^+ max(cv^2, .3) + (gate K)^2 min(t / (life / 12), 1)

of chance (D departures of those there now, the rest of those who come) and of what a gate does beside its rule.
Besides, how fast the clock runs is known only so well, and all share that, so no crowd averages it out: the logarithm
of every instant has the standard error doubt, doubt^2 = cv^2 / n + (DOUBT * PRIOR_WEIGHT / n)^2 + DRIFT^2.

References: Cox, Renewal Theory (1962), chapter 4; Kaplan and Meier (1958).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GRID_STEPS = 28
PRIOR_WEIGHT = 2.0
"""Lives that a prior mean is worth."""
PRIOR_LIVES = (0.4, 0.65, 0.9, 1.15, 1.65)
"""How they spread about it: nearly as gamma distributions of shape 4 do, whose mean is a little larger."""
DOUBT = 0.35
"""Relative standard error of a prior's mean."""
DRIFT = 0.1
"""By how much lives of the near future differ together from those of the past."""
PEAKS_DOUBT, AHEAD_DOUBT = 0.1, 0.22
"""Places, as a share of those taken, by which a gate of reserved peaks, or one that looks ahead, opens more or less."""
FIRST = 0.8
"""Nobody ends sooner than that, in shortest lives known."""
TAIL, TAIL_WEIGHT = 0.5, 4.0
"""Mean of a life beyond the longest known, in means of all; worth so many that ended there."""
SETTLING = 12.0
FADING_MIN = 0.02
"""Of a newcomer's first share: what it fills later is not looked at once less than that is expected."""

SHARE_MIN = 1e-6
"""Of a cache: nobody fills nothing."""

Floats = npt.NDArray[np.float64]


class Lives:
    """The distribution of how far programs come, in units of their clock.

    >>> lives = Lives([], [100.0] * 50, [])
    >>> lives.lasting(np.array([50.0, 150.0])).round(2).tolist()
    [1.0, 0.0]
    """

    def __init__(self, prior_means: Sequence[float], ended: Sequence[float], running: Sequence[float]) -> None:
        """
        Args:
            prior_means: each worth `PRIOR_WEIGHT` lives.
            ended: lives that are over, shape (m,).
            running: ages of programs that run, or were cut off: their lives are not shorter than that.
        """
        prior = [mean * spread for mean in prior_means for spread in PRIOR_LIVES]
        known = np.concatenate((np.asarray(prior, dtype=np.float64), np.asarray(ended, dtype=np.float64)))
        weights = np.concatenate((np.full(len(prior), PRIOR_WEIGHT / len(PRIOR_LIVES)), np.ones(len(ended))))
        order = np.argsort(known, kind="stable")
        known, weights = known[order], weights[order]
        there = np.sort(np.asarray(running, dtype=np.float64))
        longer = len(there) - np.searchsorted(there, known)
        left = np.cumprod(1.0 - weights / (np.cumsum(weights[::-1])[::-1] + longer))
        before = np.concatenate(([1.0], left[:-1]))
        self._ages = np.concatenate(([0.0, FIRST * known[0]], known))
        middles = (left + before) / 2.0  # half of a step lies on either side
        self._left = np.concatenate(([1.0, 1.0], middles))
        self._last, self._rest = float(known[-1]), float(self._left[-1])
        self.n = float(weights.sum())
        excess = float(np.maximum(there - self._last, 0.0).sum()) / TAIL_WEIGHT
        self.tail = max(TAIL * float((weights * known).sum()) / self.n + excess, 1e-9)
        share = -np.diff(self._left)
        middle = (self._ages[1:] + self._ages[:-1]) / 2.0
        self.mean = float((share * middle).sum()) + self._rest * (self._last + self.tail)
        spread = float((share * (middle - self.mean) ** 2).sum())
        spread += self._rest * ((self._last + self.tail - self.mean) ** 2 + self.tail**2)
        self.cv2 = min(spread / max(self.mean, 1e-9) ** 2, 4.0)

    def lasting(self, ages: Floats) -> Floats:
        """Chance that a life is longer; shape of `ages`."""
        within = np.interp(ages, self._ages, self._left)
        beyond = self._rest * np.exp((self._last - np.maximum(ages, self._last)) / self.tail)
        over: Floats = np.where(ages <= self._last, within, beyond)
        return over

    def going_on(self, ages: Floats, later: Floats) -> Floats:
        """Chance that programs of these ages are still there when they are older; shape (K,), (K, T) -> (K, T)."""
        now = self.lasting(ages)
        chance = self.lasting(later) / np.maximum(now, 1e-12)[:, None]
        late = now < 1e-6
        if late.any():
            chance[late] = np.exp(-(later[late] - ages[late, None]) / self.tail)
        found: Floats = np.minimum(chance, 1.0)
        return found


class Crowd(NamedTuple):
    """Programs that have a place; arrays of shape (K,)."""

    ages: Floats
    left_s: Floats
    """Until their budget ends."""
    base: Floats
    """Share of a cache that each fills besides what grows."""
    slope: Floats
    """Share of a cache for each unit of age."""


class Newcomer(NamedTuple):
    """Who waits, on average."""

    age: float
    rate_per_s: float
    budget_s: float
    base: float
    slope: float


class Gate(NamedTuple):
    """When somebody is let in."""

    limit: float
    """Load that may be reached; caches may each be filled to 1."""
    looks_ahead: bool = False
    sum_peaks: float = 0.0
    n_peaks: float = 0.0
    """Whose mean is the floor of what is reserved for each; 0: what programs fill is all that counts."""
    n_missing: float = 0.0
    """Places by which it is known to be over the limit now."""
    doubt: float = 0.0


class Drain:
    """When how many of those who wait will have been let in."""

    def __init__(self, crowd: Crowd, lives: Lives, newcomer: Newcomer, gate: Gate, n_most: int) -> None:
        """
        Args:
            n_most: how many let in before will be asked for at most.
        """
        self._n_places = n_places = len(crowd.ages)
        life_s = max(lives.mean - newcomer.age, 0.2 * lives.mean) / newcomer.rate_per_s
        self.life_s = life_s = max(min(life_s, newcomer.budget_s), 1e-6)
        self.horizon_s = life_s * (2.0 * (n_most + 2) / max(n_places, 1) + 1.0)
        self.grid = self.horizon_s * (np.arange(GRID_STEPS + 1) / GRID_STEPS) ** 2
        self.doubt = math.sqrt(lives.cv2 / lives.n + (DOUBT * PRIOR_WEIGHT / lives.n) ** 2 + DRIFT**2)
        if n_places:
            self._fill(crowd, lives, newcomer, gate)

    def _fill(self, crowd: Crowd, lives: Lives, newcomer: Newcomer, gate: Gate) -> None:
        grid, rate = self.grid, newcomer.rate_per_s
        later = crowd.ages[:, None] + rate * grid
        there = lives.going_on(crowd.ages, later)
        cut = grid[None, :] >= crowd.left_s[:, None]
        there[cut] = 0.0
        gone = self._n_places - there.sum(axis=0)
        ended = -np.diff(there, axis=1) * ~(cut[:, 1:] & ~cut[:, :-1])  # who is cut off teaches no peak
        n_ended = np.concatenate(([0.0], np.cumsum(ended.sum(axis=0))))
        floor = np.zeros(len(grid))
        if gate.n_peaks:
            sums = np.concatenate(([0.0], np.cumsum((ended * later[:, 1:]).sum(axis=0))))
            floor = (gate.sum_peaks + sums) / (gate.n_peaks + n_ended)
        ages = newcomer.age + rate * np.maximum(grid[None, :] - grid[:, None], 0.0)
        begins = float(lives.lasting(np.array([newcomer.age]))[0])
        stays = lives.lasting(ages) / begins if begins >= 1e-6 else np.exp(-(ages - newcomer.age) / lives.tail)
        if math.isfinite(newcomer.budget_s):
            stays[grid[None, :] - grid[:, None] >= newcomer.budget_s] = 0.0
        is_floored = bool(gate.n_peaks) and not gate.looks_ahead
        reserved = np.maximum(later, floor) if gate.n_peaks else later
        load = (there * (crowd.base[:, None] + crowd.slope[:, None] * (reserved if is_floored else later))).sum(axis=0)
        filled = newcomer.base + newcomer.slope * (np.maximum(ages, floor) if is_floored else ages)
        shares = stays * np.maximum(filled, SHARE_MIN)
        if gate.looks_ahead:
            let_in = self._let_in_ahead(load, shares, gone, gate)
        else:
            let_in = self._let_in(load, shares, gone, gate)
        self._let = np.cumsum(let_in)
        chance = (there * (1.0 - there)).sum(axis=0) + max(lives.cv2, 0.3) * np.maximum(self._let - gone, 0.0)
        settled = np.minimum(grid * (SETTLING / self.life_s), 1.0)
        self._variance = chance + (gate.doubt * self._n_places) ** 2 * settled

    def _limits(self, room: float, share: float, gate: Gate) -> Floats:
        """The limit over time: nobody is let in now, so it is lower than it looks; that wears off with a life."""
        over = max(room + gate.n_missing, 0.0) * share
        limits: Floats = gate.limit - over * np.exp(-self.grid / self.life_s)
        return limits

    def _let_in(self, load: Floats, shares: Floats, gone: Floats, gate: Gate) -> Floats:
        """How many are let in at each step, where only the instant counts."""
        n, let_in = len(load), [0.0] * len(load)
        first = float(shares[0, 0])
        free = self._limits((gate.limit - float(load[0])) / first, first, gate) - load
        for j in range(int(np.searchsorted(gone, 0.5)), n):
            if free[j] > 0.0:
                let_in[j] = float(free[j] / shares[j, j])
                free[j:] -= let_in[j] * shares[j, j:]
        return np.array(let_in)

    def _let_in_ahead(self, load: Floats, shares: Floats, gone: Floats, gate: Gate) -> Floats:
        """The same where the load may not pass the limit at any later instant."""
        n, let_in = len(load), [0.0] * len(load)
        counts = shares > FADING_MIN * np.diagonal(shares)[:, None]
        ends = (n - np.argmax(counts[:, ::-1], axis=1)).tolist()
        places = 1.0 / np.maximum(shares, 1e-9 * float(shares[0, 0]))
        room = float(((gate.limit - load) * places[0])[: ends[0]].min())
        limits = self._limits(room, float(shares[0, 0]), gate)
        free = limits - load
        for j in range(int(np.searchsorted(gone, 0.5)), n):
            ahead = slice(j, ends[j])
            found = float((free[ahead] * places[j, ahead]).min())
            if found > 0.0:
                let_in[j] = found
                free[j:] -= found * shares[j, j:]
        return np.array(let_in)

    def wait_s(self, n_ahead: int, z: float, leave_per_s: float = 0.0) -> float:
        """The first instant at which mean + z deviations let in whoever has `n_ahead` before them, were the clock sure.

        Args:
            leave_per_s: rate at which each of those gives up its place in the line.
        """
        if not self._n_places:
            return self.life_s * (n_ahead + 1)
        grid = self.grid
        wanted = n_ahead * np.exp(-leave_per_s * grid) + 0.5
        reached = np.maximum.accumulate(self._let + z * np.sqrt(self._variance)) - wanted
        at = int(np.searchsorted(reached, 0.0))
        if at >= len(grid):
            last = float(reached[-1] + wanted[-1])
            return float(self.horizon_s * wanted[-1] / max(last, 0.5 * min(1.0, float(wanted[-1]))))
        if at == 0:
            return 0.0
        rise = float(reached[at] - reached[at - 1])
        return float(grid[at - 1] - (grid[at] - grid[at - 1]) * float(reached[at - 1]) / max(rise, 1e-12))
