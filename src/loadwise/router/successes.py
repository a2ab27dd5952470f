"""How often each model succeeds at each kind of task: estimates for selectors that have none of their own.

A cell leans on its model's mean as if on `LEAN` verdicts, and that on one half as if on two.
"""

import msgspec

from loadwise.kernel.ids import ModelId

LEAN = 5.0
OTHER = ""
"""Where kinds are counted that the configuration does not name: clients may write anything."""


class Cell(msgspec.Struct):
    """Verdicts of one model, on one kind or on all."""

    n: int = 0
    total: float = 0.0


class Successes:
    """The table.

    >>> successes = Successes(("math",))
    >>> for success in (1.0, 1.0, 0.0):
    ...     successes.learn("math", "m", success)
    >>> successes.estimate("math", "m"), successes.estimate(None, "other")
    (0.625, 0.5)
    """

    def __init__(self, task_types: tuple[str, ...]) -> None:
        self._task_types = frozenset(task_types)
        self.cells: dict[str, dict[str, Cell]] = {}
        """Model → kind → verdicts; under `OTHER` also those of no kind."""

    def estimate(self, task_type: str | None, model_id: ModelId | str) -> float:
        """Expected success in [0, 1]."""
        row = self.cells.get(model_id, {})
        mean = (1.0 + sum(cell.total for cell in row.values())) / (2.0 + sum(cell.n for cell in row.values()))
        cell = row.get(self._kind(task_type), Cell())
        return (LEAN * mean + cell.total) / (LEAN + cell.n)

    def learn(self, task_type: str | None, model_id: ModelId | str, success: float) -> None:
        """A verdict landed."""
        cell = self.cells.setdefault(str(model_id), {}).setdefault(self._kind(task_type), Cell())
        cell.n += 1
        cell.total += success

    def _kind(self, task_type: str | None) -> str:
        return task_type if task_type in self._task_types and task_type is not None else OTHER
