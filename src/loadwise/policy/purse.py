"""A hard budget of dollars an hour: what may be promised now so that no rolling hour ever costs more.

Theory of operation. A program is promised the most it may cost before it starts; when it ends, the promise becomes what
it really cost. A promise counts as long as it is open, and what was spent counts until an hour after the program ended,
whenever within its life it was spent. All money spent in any hour up to t belongs to programs that were open in that
hour, all of which count at t: as what counts never passes the budget, neither does any rolling hour. Sums are whole
billionths of a dollar, promises rounded up, so no rounding can creep past the limit.

The law holds as long as no run costs more than it was promised; `settle` says where one did, and what it cost beyond is
kept in the window like everything else.

What ended within one second of the clock is one entry, counted from the last instant in it: an hour has 3601 entries at
most, and nothing is counted shorter than it should.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.kernel.fact import Fact

WINDOW_S = 3600.0
ENTRIES_MAX = 1_000_000
"""Open promises (law L15); at the limit nothing more is promised."""
USD_MAX = 1e9
_PARTS = 1_000_000_000


class PurseState(Fact, frozen=True, kw_only=True):
    """A dump of `Purse`."""

    open: dict[str, int]
    """Promised billionths of a dollar by program."""
    ended: tuple[tuple[float, int], ...]
    """When they ended, and what they cost."""
    now_s: float | None = None
    """The latest instant that was heard of."""


class Purse:
    """Dollars of one rolling hour.

    >>> purse = Purse(1.0)
    >>> purse.promise("a", 0.7, at_s=0.0), purse.promise("b", 0.4, at_s=1.0)
    (True, False)
    >>> purse.settle("a", 0.2, at_s=60.0)
    0.0
    >>> purse.promise("b", 0.4, at_s=61.0), round(purse.left_usd(at_s=61.0), 6), round(purse.left_usd(at_s=3660.0), 6)
    (True, 0.4, 0.6)
    """

    def __init__(self, usd_per_hour: float) -> None:
        """An untouched budget.

        Raises:
            ConfigError: it is not a number of dollars.
        """
        if not 0.0 <= usd_per_hour <= USD_MAX:
            raise ConfigError(f"usd_per_hour is {usd_per_hour!r}; it must be in [0, {USD_MAX:g}]")
        self._limit = math.floor(usd_per_hour * _PARTS)
        self._open: dict[str, int] = {}
        self._ended: deque[tuple[float, int]] = deque()
        """By instant, the earliest first."""
        self._promised = 0
        self._counted = 0
        self._now_s = -math.inf

    @property
    def limit_usd(self) -> float:
        """The budget of an hour."""
        return self._limit / _PARTS

    @property
    def promised_usd(self) -> float:
        """What is promised to those that are open."""
        return self._promised / _PARTS

    @property
    def open(self) -> Collection[str]:
        """Who has a promise."""
        return self._open.keys()

    def spent_usd(self, at_s: float) -> float:
        """What those cost that ended within the hour before; changes nothing."""
        return sum(parts for ended_s, parts in self._ended if ended_s + WINDOW_S > at_s) / _PARTS

    def frees_after_s(self, usd_max: float, at_s: float) -> float | None:
        """In how long so much may be promised by time alone; None where only the end of what is open can free it."""
        self._advance(at_s)
        missing = self._counted + _parts(usd_max) - self._limit
        if missing <= 0:
            return 0.0
        for ended_s, parts in self._ended:
            missing -= parts
            if missing <= 0:
                return ended_s + WINDOW_S - self._now_s
        return None

    def left_usd(self, at_s: float) -> float:
        """What may still be promised; negative where runs cost more than they were promised."""
        self._advance(at_s)
        return (self._limit - self._counted) / _PARTS

    def affordable(self, usd_max: Mapping[str, float], at_s: float) -> Sequence[str]:
        """The names whose most expensive run may be promised now, in their order."""
        self._advance(at_s)
        room = self._limit - self._counted
        return [name for name, usd in usd_max.items() if _parts(usd) <= room]

    def promise(self, program: str, usd_max: float, at_s: float) -> bool:
        """Set aside the most that a program may cost; false, and nothing changes, where the budget does not allow it.

        Raises:
            Unprocessable: it is not a number of dollars.
            LawBroken: the program has a promise already.
        """
        parts = _parts(usd_max)
        if program in self._open:
            raise LawBroken("L5", f"program {program!r} is promised money twice")
        self._advance(at_s)
        if self._counted + parts > self._limit or len(self._open) >= ENTRIES_MAX:
            return False
        self._open[program] = parts
        self._promised += parts
        self._counted += parts
        return True

    def settle(self, program: str, usd: float | None, at_s: float) -> float:
        """The program has ended and cost so much. Returns by how many dollars that is more than it was promised.

        Args:
            usd: None where nobody knows: it is taken to have cost all that it was promised.

        Raises:
            Unprocessable: it is not a number of dollars.
            LawBroken: nothing was promised to it.
        """
        known = None if usd is None else _parts(usd)
        if program not in self._open:
            raise LawBroken("L5", f"program {program!r} has no promise to settle")
        self._advance(at_s)
        promised = self._open.pop(program)
        parts = promised if known is None else known
        self._promised -= promised
        self._counted -= promised
        self._count(parts)
        return max(parts - promised, 0) / _PARTS

    def spend(self, usd: float, at_s: float) -> None:
        """Money is gone that was promised to nobody.

        Raises:
            Unprocessable: it is not a number of dollars.
        """
        parts = _parts(usd)
        self._advance(at_s)
        self._count(parts)

    def _count(self, parts: int) -> None:
        """Parts are spent now."""
        if not parts:
            return
        self._counted += parts
        if self._ended and math.floor(self._ended[-1][0]) == math.floor(self._now_s):
            parts += self._ended.pop()[1]
        self._ended.append((self._now_s, parts))

    def _advance(self, at_s: float) -> None:
        """What ended an hour ago counts no longer; a clock that goes back stands still."""
        if not math.isfinite(at_s):
            raise Unprocessable(f"at_s is {at_s!r}; it must be finite", param="at_s")
        self._now_s = max(self._now_s, at_s)
        while self._ended and self._ended[0][0] + WINDOW_S <= self._now_s:
            self._counted -= self._ended.popleft()[1]

    def dump(self) -> PurseState:
        """State as plain values."""
        now_s = self._now_s if math.isfinite(self._now_s) else None
        return PurseState(open=dict(self._open), ended=tuple(self._ended), now_s=now_s)

    def load(self, state: PurseState) -> None:
        """Continue from a dump; a budget that is smaller now is kept from now on.

        Raises:
            SchemaMismatch: negative amounts or times that are not finite.
        """
        if any(parts < 0 for parts in (*state.open.values(), *(parts for _, parts in state.ended))):
            raise SchemaMismatch("dump of a purse holds a negative amount")
        times = [ended_s for ended_s, _ in state.ended] + ([] if state.now_s is None else [state.now_s])
        if not all(map(math.isfinite, times)):
            raise SchemaMismatch("dump of a purse holds a time that is not finite")
        self._open, self._ended = dict(state.open), deque(sorted(state.ended))
        self._promised = sum(self._open.values())
        self._counted = self._promised + sum(parts for _, parts in self._ended)
        self._now_s = max(times, default=-math.inf)


def _parts(usd: float) -> int:
    """Billionths of a dollar, rounded up."""
    if not 0.0 <= usd <= USD_MAX:
        raise Unprocessable(f"an amount of {usd!r} dollars; it must be in [0, {USD_MAX:g}]", param="usd")
    return math.ceil(usd * _PARTS)
