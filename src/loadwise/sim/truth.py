"""What only the world knows: whether a model would solve a program, and how much it would say.

No machine may see any of this (law L8); verdicts are its only, noisy messenger. Whether program n is solved by model m
depends on the seed, n and m alone, so that every policy meets the same luck (common random numbers).
"""

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams

from .workload import MAX_TURNS, ProgramShape

ANY = "*"


class TruthSpec(Fact, frozen=True, kw_only=True):
    """The `truth:` of a scenario."""

    success: dict[str, dict[str, float]] = {}
    """Model → task type → probability that a finished program is right; `"*"` stands for every other task type."""
    output_ratio: dict[str, float] = {}
    """Model → how many times the workload's output tokens it says; 1 where absent."""
    turns_ratio: dict[str, float] = {}
    """Model → how many times the workload's turns its programs take; 1 where absent. What comes beyond the workload's
    turns repeats them, the first one aside."""

    def __post_init__(self) -> None:
        for model, row in self.success.items():
            for task_type, p in row.items():
                if not 0.0 <= p <= 1.0:
                    raise ConfigError(f"truth success of {model!r} on {task_type!r} is {p!r}; it must be in [0, 1]")
        for model, ratio in self.output_ratio.items():
            if not 0 < ratio <= 1000:
                raise ConfigError(f"truth output_ratio of {model!r} is {ratio!r}; it must be in (0, 1000]")
        for model, ratio in self.turns_ratio.items():
            if not 0 < ratio <= 100:
                raise ConfigError(f"truth turns_ratio of {model!r} is {ratio!r}; it must be in (0, 100]")


class Truth:
    """Answers what would have happened."""

    def __init__(self, spec: TruthSpec, streams: Streams) -> None:
        self._spec = spec
        self._streams = streams

    def success_probability(self, model: str, program: ProgramShape) -> float:
        """The table's entry; 1 where the table does not know the model."""
        row = self._spec.success.get(model)
        if row is None:
            return 1.0
        value = row.get(program.task_type or ANY)
        return row.get(ANY, 0.0) if value is None else value

    def is_solved(self, model: str, program: ProgramShape) -> bool:
        """Whether this model's whole run of this program would be right."""
        luck = float(self._streams.at(f"luck/{model}", program.number).random())
        return luck < self.success_probability(model, program)

    def n_turns(self, model: str, program: ProgramShape) -> int:
        """How many turns the program takes on this model."""
        n = max(1, round(len(program.turns) * self._spec.turns_ratio.get(model, 1.0)))
        return min(n, MAX_TURNS) if len(program.turns) > 1 else 1

    def output_tokens(self, model: str, output_tokens: int, limit_tokens: int | None) -> int:
        """What this model says where the workload drew `output_tokens`."""
        said = max(1, round(output_tokens * self._spec.output_ratio.get(model, 1.0)))
        return said if limit_tokens is None else min(said, limit_tokens)
