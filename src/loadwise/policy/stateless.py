"""What policies share that learn nothing."""

from collections.abc import Mapping
from typing import Any

from loadwise.kernel.streams import Generator

from .base import Choice, Feedback, Vector
from .state import dump_state, load_state


class Stateless:
    """Base of policies without memory: they are told everything and keep nothing."""

    name: str = "stateless"

    def _configuration(self) -> Mapping[str, Any]:
        """What a dump must agree with."""
        return {}

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """The propensities that the choice already carries."""
        return reported(choice)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to remember."""

    def learn(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def unlearn(self, feedback: Feedback) -> None:
        """Nothing to take back."""

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to forget."""

    def dump(self) -> bytes:
        """The name and the configuration."""
        return dump_state(self.name, self._configuration())

    def load(self, state: bytes) -> None:
        """Check that `state` is of this policy and configuration.

        Raises:
            SchemaMismatch: it is not.
        """
        load_state(state, self.name, self._configuration())


def reported(choice: Choice) -> tuple[float, ...]:
    """The propensities that `choice` carries.

    Raises:
        ValueError: it carries none; another policy made it.
    """
    if choice.propensities is None:
        raise ValueError("a choice without propensities was made by another policy")
    return choice.propensities
