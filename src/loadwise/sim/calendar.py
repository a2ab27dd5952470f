"""What will happen, in order: by instant, then by kind, then by who came first."""

import enum
import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Rank(enum.IntEnum):
    """Order of kinds at one instant. What ends comes before what begins, and readings after both."""

    FAILURE = 0
    ENGINE = 1
    ATTEMPT_OVER = 2
    TIMER = 3
    AGENT = 4
    VERDICT = 5
    SELECTOR = 6
    PROBE = 7


class Calendar:
    """A heap of (at_s, rank, serial) with a virtual clock.

    *Background* entries (timers, readings, time limits) may go on for ever; foreground entries are work on its way,
    and a world without any has come to rest or is stuck.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.n_foreground = 0
        self._heap: list[tuple[float, int, int, bool, Action]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at_s(self) -> float:
        """Instant of the next entry; the calendar must not be empty."""
        return self._heap[0][0]

    def put(self, at_s: float, rank: Rank, action: Action, *, is_background: bool = False) -> None:
        """Do `action` at `at_s`, or now where that is past."""
        self._serial += 1
        self.n_foreground += not is_background
        heapq.heappush(self._heap, (max(at_s, self.now_s), rank, self._serial, is_background, action))

    def pop(self) -> tuple[Action, bool]:
        """Move the clock to the next entry and hand out its action, and whether it is background."""
        self.now_s, _, _, is_background, action = heapq.heappop(self._heap)
        self.n_foreground -= not is_background
        return action, is_background
