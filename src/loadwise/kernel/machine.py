"""What a machine is: synchronous, without clock, socket, task or global randomness."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .commands import Command, RecordDecision
from .events import Event


class Machine(Protocol):
    """Events in, commands out.

    Time enters as `event.at_s`, chance as named streams fixed by the seed, waiting is `SetTimer` answered by
    `TimerFired`. Equal seeds and equal events give equal commands (laws L6 and L7).
    """

    def handle(self, event: Event) -> list[Command]:
        """Take one event and say what the host must do, in order."""
        ...

    def check(self) -> None:
        """Raise `LawBroken` where a law of docs/laws.md does not hold in the present state."""
        ...

    def dump(self) -> bytes:
        """The whole state, such that `load` continues identically."""
        ...

    def load(self, state: bytes) -> None:
        """Replace the state by a dumped one."""
        ...


@runtime_checkable
class Follower(Protocol):
    """A machine that can decide as it was recorded.

    A journal that is recovered by later software, or under another linear algebra, must not choose anew what was
    carried out long ago.
    """

    def follow(self, decisions: Sequence[RecordDecision]) -> None:
        """Decide in the next event as it was recorded, where that is possible; said before each event, or never."""
        ...
