"""What a machine is: synchronous, without clock, socket, task or global randomness."""

from typing import Protocol

from .commands import Command
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
