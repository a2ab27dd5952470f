"""A selector that knows how often each model succeeds at each kind of task, and learns nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context
from .picking import best_or_any, check_floor
from .stateless import Stateless

ANY = "*"


class KnownOptions(Fact, frozen=True, kw_only=True):
    """Configuration of `Known`.

    Raises:
        ConfigError: a value is out of its range.
    """

    success: dict[str, dict[str, float]] = {}
    """Model → task type → expected success in [0, 1]; `"*"` for every other type, one half where nothing is said."""
    exploration_floor: float = 0.0
    """ε: the probability of a uniform choice, in [0, 1)."""

    def __post_init__(self) -> None:
        check_floor(self.exploration_floor)
        for model, row in self.success.items():
            for task_type, p in row.items():
                if not 0.0 <= p <= 1.0:
                    raise ConfigError(f"success of {model!r} on {task_type!r} is {p!r}; it must be in [0, 1]")


class Known(Stateless):
    """The candidate with the highest expected success: a = argmax_k p(k, task type).

    Ties go to the cheaper candidate, then to the first name. With ε = `exploration_floor` a uniform candidate is taken.

    Reads:
        price_usd, and the context's task type.

    Assumes:
        The table is true: a benchmark's, a pack's, or a scenario's own.
    """

    name = "known"
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: KnownOptions = KnownOptions()) -> None:  # noqa: B008
        self._options = options
        self._success = options.success
        self._floor = options.exploration_floor
        self.is_deterministic = self._floor == 0.0

    def _configuration(self) -> Mapping[str, Any]:
        return {"success": self._options.success, "exploration_floor": self._floor}

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The best by the table."""
        scores = tuple(self._expected(candidate.name, context.task_type) for candidate in candidates)
        return best_or_any(scores, scores, candidates, self._floor, rng)

    def _expected(self, model: str, task_type: str | None) -> float:
        row = self._success.get(model, {})
        return row.get(task_type or ANY, row.get(ANY, 0.5))
