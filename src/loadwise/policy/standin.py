"""What stands for a user's policy class that may not be imported: it keeps what was learned, and decides nothing."""

from collections.abc import Sequence
from typing import Any

from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context
from .guarded import fall_back
from .stateless import Stateless


class StandIn(Stateless):
    """Takes any options, loads any state and gives it back unchanged; chooses by the rule of `guarded.fall_back`."""

    name = "stand_in"
    reads: tuple[str, ...] = ("price_usd",)
    is_deterministic = True

    def __init__(self, **options: Any) -> None:
        self._state = b""

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The cheapest candidate, named as a fallback."""
        return fall_back(candidates)

    def dump(self) -> bytes:
        """What was loaded last."""
        return self._state

    def load(self, state: bytes) -> None:
        """Keep it."""
        self._state = state
