"""Orders of held turns: first in, first out, as in the paper; and the production order.

In both, turns of programs that were paused come first: their budgets run, and they have stood in line once.

`FairOrder` serves the others in this sequence:

1. whoever has waited `age_s`, longest first: nobody starves;
2. of the others, the tenant that has been served least for its weight (stride scheduling: every turn served moves its
   tenant's pass forward by 1 / weight; one that was away begins where those are that were not);
3. of that tenant's turns the earliest deadline that can still be met (EDF among feasible: law L13), then the turns
   without one, then those whose deadline is lost, each in order of arrival.

A deadline is lost when less time is left than a program is expected to run: plain EDF serves the most hopeless first
under overload, and everybody is late.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, Protocol

from loadwise.kernel.ids import TurnId

from .config import OrderConfig
from .program import Program, Turn

TENANTS_MAX = 4096
"""Passes remembered (law L15)."""


class Standing(NamedTuple):
    """What an order knows of a held turn."""

    tenant: str = ""
    since_s: float = 0.0
    """When it arrived."""
    deadline_at_s: float | None = None
    is_paused: bool = False
    """Whether its program has had a place that was taken from it."""


def standing(turn: Turn, program: Program) -> Standing:
    """A turn's standing; a higher priority of its own is a deadline no sooner, and no order heeds it yet."""
    return Standing(program.tenant, turn.arrived_at_s, turn.deadline_at_s, turn.is_paused)


class Order(Protocol):
    """Held turns of one model."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TurnId]:
        """Paused ones, then the others, in the order in which they were held."""
        ...

    def __contains__(self, turn_id: TurnId) -> bool: ...

    def head(self, now_s: float, service_s: float) -> TurnId | None:
        """Who is next, or None. Its answer may change with time alone."""
        ...

    def push(self, turn_id: TurnId, standing: Standing) -> None:
        """Hold a turn."""
        ...

    def remove(self, turn_id: TurnId, *, is_served: bool = False) -> None:
        """Take a turn out, wherever it stands; unknown turns are fine."""
        ...

    def dump(self) -> dict[str, float]:
        """What is remembered besides the turns."""
        ...

    def load(self, state: dict[str, float]) -> None:
        """Continue from a dump; the turns have been pushed."""
        ...


class FifoOrder:
    """Turns in the order in which they were held; removal from the middle is constant time.

    >>> order = FifoOrder()
    >>> for turn_id in (3, 1, 2):
    ...     order.push(TurnId(turn_id))
    >>> order.remove(TurnId(3))
    >>> order.head()
    1
    """

    def __init__(self) -> None:
        self._paused: dict[TurnId, None] = {}
        self._others: dict[TurnId, None] = {}

    def __len__(self) -> int:
        return len(self._paused) + len(self._others)

    def __iter__(self) -> Iterator[TurnId]:
        return chain(self._paused, self._others)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._paused or turn_id in self._others

    def head(self, now_s: float = 0.0, service_s: float = 0.0) -> TurnId | None:
        return next(iter(self), None)

    def push(self, turn_id: TurnId, standing: Standing = Standing()) -> None:  # noqa: B008
        (self._paused if standing.is_paused else self._others)[turn_id] = None

    def remove(self, turn_id: TurnId, *, is_served: bool = False) -> None:
        self._paused.pop(turn_id, None)
        self._others.pop(turn_id, None)

    def dump(self) -> dict[str, float]:
        return {}

    def load(self, state: dict[str, float]) -> None:
        pass


class _Line:
    """One tenant's turns."""

    __slots__ = ("due", "plain")

    def __init__(self) -> None:
        self.due: list[tuple[float, int, TurnId]] = []
        """(deadline, serial, turn), sorted."""
        self.plain: dict[TurnId, None] = {}

    def first(self, feasible_from_s: float) -> TurnId:
        """Who is next of the tenant, where deadlines from that instant on can still be met."""
        n_lost = bisect_left(self.due, (feasible_from_s,))
        if n_lost < len(self.due):
            return self.due[n_lost][2]
        if self.plain:
            return next(iter(self.plain))
        return min(self.due, key=lambda entry: entry[1])[2]


class FairOrder:
    """The production order; see the module.

    >>> order = FairOrder(OrderConfig(kind="fair", weights={"gold": 2.0}))
    >>> for n, tenant in enumerate(["tin", "tin", "gold", "gold"]):
    ...     order.push(TurnId(n), Standing(tenant))
    >>> served = []
    >>> while len(order):
    ...     served.append(order.head(0.0, 1.0))
    ...     order.remove(served[-1], is_served=True)
    >>> served
    [2, 0, 3, 1]
    """

    def __init__(self, config: OrderConfig) -> None:
        self._config = config
        self._paused: dict[TurnId, None] = {}
        self._standing: dict[TurnId, Standing] = {}
        """Of the others."""
        self._serial_by_turn: dict[TurnId, int] = {}
        self._lines: dict[str, _Line] = {}
        self._passes: dict[str, float] = {}
        """Of tenants that have turns here, or have been served more than those."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._paused) + len(self._standing)

    def __iter__(self) -> Iterator[TurnId]:
        return chain(self._paused, self._standing)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._paused or turn_id in self._standing

    def push(self, turn_id: TurnId, standing: Standing) -> None:
        if standing.is_paused:
            self._paused[turn_id] = None
            return
        line = self._lines.get(standing.tenant)
        if line is None:
            line = self._lines[standing.tenant] = _Line()
            floor = min((self._passes.get(t, 0.0) for t in self._lines if t != standing.tenant), default=0.0)
            self._passes[standing.tenant] = max(self._passes.get(standing.tenant, 0.0), floor)
        self._serial += 1
        self._standing[turn_id] = standing
        self._serial_by_turn[turn_id] = self._serial
        if standing.deadline_at_s is None:
            line.plain[turn_id] = None
        else:
            insort(line.due, (standing.deadline_at_s, self._serial, turn_id))

    def remove(self, turn_id: TurnId, *, is_served: bool = False) -> None:
        self._paused.pop(turn_id, None)
        standing = self._standing.pop(turn_id, None)
        if standing is None:
            return
        tenant, line = standing.tenant, self._lines[standing.tenant]
        serial = self._serial_by_turn.pop(turn_id)
        if standing.deadline_at_s is None:
            del line.plain[turn_id]
        else:
            del line.due[bisect_left(line.due, (standing.deadline_at_s, serial))]
        if is_served:
            self._passes[tenant] += 1.0 / self._config.weights.get(tenant, 1.0)
        if not (line.due or line.plain):
            del self._lines[tenant]
            floor = min((self._passes[t] for t in self._lines), default=math.inf)
            kept = {t: p for t, p in self._passes.items() if t in self._lines or p > floor}
            self._passes = dict(list(kept.items())[-TENANTS_MAX:]) if self._lines else {}

    def head(self, now_s: float, service_s: float) -> TurnId | None:
        if self._paused:
            return next(iter(self._paused))
        oldest = next(iter(self._standing), None)
        if oldest is None:
            return None
        if now_s - self._standing[oldest].since_s >= self._config.age_s:
            return oldest
        tenant = min(self._lines, key=lambda name: (self._passes[name], name))
        return self._lines[tenant].first(now_s + service_s)

    def dump(self) -> dict[str, float]:
        return dict(self._passes)

    def load(self, state: dict[str, float]) -> None:
        self._passes = {**state, **{tenant: at for tenant, at in self._passes.items() if tenant not in state}}


def make_order(config: OrderConfig) -> Order:
    """An empty order of the configured kind."""
    return FairOrder(config) if config.kind == "fair" else FifoOrder()
