"""Orders of held turns. First in, first out is the paper's; other orders arrive with the DISC subsystem."""

from collections.abc import Iterator

from loadwise.kernel.ids import TurnId


class FifoOrder:
    """Turns in the order in which they were held; removal from the middle is constant time.

    >>> order = FifoOrder()
    >>> for turn_id in (3, 1, 2):
    ...     order.push(TurnId(turn_id))
    >>> order.remove(TurnId(3))
    >>> order.head
    1
    """

    def __init__(self) -> None:
        self._turns: dict[TurnId, None] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[TurnId]:
        return iter(self._turns)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._turns

    @property
    def head(self) -> TurnId | None:
        """Who is next, or None."""
        return next(iter(self._turns), None)

    def push(self, turn_id: TurnId) -> None:
        """Hold a turn behind all others."""
        self._turns[turn_id] = None

    def remove(self, turn_id: TurnId) -> None:
        """Take a turn out, wherever it stands; unknown turns are fine."""
        self._turns.pop(turn_id, None)
