"""What agents bring: when programs arrive and how their turns are shaped.

A program's shape is drawn from the seed and the program's number alone, so that two policies meet the same programs.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator, Streams

from .bounds import (
    N_AGENTS_MAX,
    N_PROGRAMS_MAX,
    RATE_MAX_PER_S,
    RATE_MIN_PER_S,
    SECONDS_MAX,
    TOKENS_MAX,
    require_within,
)
from .draw import (
    Draw,
    LogNormal,
    Quantity,
    require_quantity,
    sample_count,
    sample_seconds,
    scaled,
    to_count,
    to_seconds,
)
from .programs import Programs, pack
from .traces import Recorded, read_trace

MAX_TURNS = 4096
"""Most turns of one program; also the stride of the engines' luck index."""


class Poisson(Fact, frozen=True, kw_only=True, tag_field="kind", tag="poisson"):
    """An open stream: programs arrive whatever the pool does."""

    programs_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.programs_per_s < float("inf"):
            raise ConfigError(f"arrivals programs_per_s is {self.programs_per_s!r}; it must be a finite number > 0")
        require_within("arrivals programs_per_s", self.programs_per_s, RATE_MIN_PER_S, RATE_MAX_PER_S)


class Bursty(Fact, frozen=True, kw_only=True, tag_field="kind", tag="bursty"):
    """An open stream whose gaps are gamma distributed: the less `burstiness`, the more come at once.

    The parameter is that of vLLM's own load generator: 1 is Poisson, 0.25 has twice its coefficient of variation.
    """

    programs_per_s: float
    burstiness: float = 0.25

    def __post_init__(self) -> None:
        for name in ("programs_per_s", "burstiness"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"arrivals {name} is {getattr(self, name)!r}; it must be a finite number > 0")
        require_within("arrivals programs_per_s", self.programs_per_s, RATE_MIN_PER_S, RATE_MAX_PER_S)
        require_within("arrivals burstiness", self.burstiness, 1e-3, 1e6)


class Trace(Fact, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """What was recorded: programs and turns come from a file (`traces`), other settings of their shape do not count."""

    path: str
    time_ratio: float = 1.0
    """2 spreads arrivals over twice the time; gaps within a program stay."""
    max_programs: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.time_ratio < float("inf"):
            raise ConfigError(f"arrivals time_ratio is {self.time_ratio!r}; it must be a finite number > 0")
        require_within("arrivals time_ratio", self.time_ratio, 1e-9, 1e6)
        if self.max_programs is not None and self.max_programs < 1:
            raise ConfigError(f"arrivals max_programs is {self.max_programs!r}; it must be >= 1")
        if self.max_programs is not None:
            require_within("arrivals max_programs", self.max_programs, 1, N_PROGRAMS_MAX)


class Joint(Fact, frozen=True, kw_only=True):
    """How strongly a program's quantities rise and fall together.

    Every program draws one z from N(0, 1), and each of its quantities is multiplied by exp(s z - s²/2) with its own s:
    means stay, and long programs append and say more in each turn, as measured ones do.
    """

    turns: float = 0.0
    growth_tokens: float = 0.0
    output_tokens: float = 0.0
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not -3 <= getattr(self, name) <= 3:
                raise ConfigError(f"joint {name} is {getattr(self, name)!r}; it must be in [-3, 3]")

    def factor(self, name: str, z: float) -> float:
        """What a quantity of a program with this z is multiplied by."""
        s = float(getattr(self, name))
        return math.exp(s * z - s * s / 2)


class Closed(Fact, frozen=True, kw_only=True, tag_field="kind", tag="closed"):
    """A closed loop: so many agents, each starting its next program when its last one is over."""

    n_agents: int
    think_s: Quantity = 0.0
    """Between two programs of one agent."""
    stagger_s: Quantity = 0.0
    """Before an agent's first program."""

    def __post_init__(self) -> None:
        if self.n_agents < 1:
            raise ConfigError(f"arrivals n_agents is {self.n_agents!r}; it must be >= 1")
        require_within("arrivals n_agents", self.n_agents, 1, N_AGENTS_MAX)
        for name in ("think_s", "stagger_s"):
            require_quantity(f"arrivals {name}", getattr(self, name))


class WorkloadSpec(Fact, frozen=True, kw_only=True):
    """The `workload:` of a scenario."""

    arrivals: Poisson | Bursty | Closed | Trace
    task_types: dict[str, float] = {}
    """Weight by task type; empty means that programs name none."""
    domains: dict[str, float] = {}
    turns: Quantity = 1.0
    first_prompt_tokens: Quantity = Draw(lognormal=LogNormal(median=1000.0, sigma=0.5))
    growth_tokens: Quantity = 200.0
    """What a tool's answer adds to the context between two turns."""
    output_tokens: Quantity = Draw(lognormal=LogNormal(median=150.0, sigma=0.5))
    tool_s: Quantity = 1.0
    """Between an answer and the next turn."""
    joint: Joint = Joint()
    shared_tokens: int = 0
    """Leading tokens of the first prompt that all programs have in common: the harness's system prompt."""
    context_limit_tokens: int = 100_000
    """A program stops growing here: it says its last turn early."""
    max_output_tokens: int | None = None
    """What clients put into `max_tokens`; caps the output."""
    ends: Literal["finish", "final", "idle"] = "finish"
    """How a program's end is told: by a finish call, on its last turn, or not at all."""
    patience_s: Quantity | None = None
    """A client leaves when no first byte has come for so long; absent means never."""
    budget_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("task_types", "domains"):
            check_weights(name, getattr(self, name))
        for name in ("turns", "first_prompt_tokens", "growth_tokens", "output_tokens", "tool_s", "patience_s"):
            require_quantity(name, getattr(self, name))
        if self.shared_tokens < 0:
            raise ConfigError(f"shared_tokens is {self.shared_tokens!r}; it must be >= 0")
        if self.context_limit_tokens < 2:
            raise ConfigError(f"context_limit_tokens is {self.context_limit_tokens!r}; it must be >= 2")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens is {self.max_output_tokens!r}; it must be >= 1")
        if self.budget_s is not None and not 0 < self.budget_s < float("inf"):
            raise ConfigError(f"budget_s is {self.budget_s!r}; it must be a finite number > 0")
        for name in ("shared_tokens", "context_limit_tokens", "max_output_tokens"):
            require_within(name, getattr(self, name) or 0, 0, TOKENS_MAX)
        require_within("budget_s", self.budget_s or 0.0, 0, SECONDS_MAX)


class TurnShape(msgspec.Struct, frozen=True, gc=False):
    """One turn before any model has seen it."""

    growth_tokens: int
    """Added to the context before this turn (the whole prompt at the first)."""
    output_tokens: int
    """At an output ratio of one."""
    gap_s: float
    """Since the previous answer; 0 at the first turn."""
    prefix_tokens: int | None = None
    """Leading tokens that repeat the context so far; None where all of it is repeated."""
    prefix_ids: tuple[int, ...] = ()
    """A trace's names of the prompt's blocks."""


class ProgramShape(msgspec.Struct, frozen=True):
    """One program before any model has seen it."""

    number: int
    task_type: str | None
    domain: str | None
    turns: tuple[TurnShape, ...]
    patience_s: float | None = None


def check_weights(name: str, weights: Mapping[str, float]) -> None:
    """Refuse weights that are no distribution after scaling."""
    bad = {k: v for k, v in weights.items() if not 0 <= v < float("inf")}
    if bad:
        raise ConfigError(f"{name} has the weights {bad!r}; each must be a finite number >= 0")
    if weights and sum(weights.values()) <= 0:
        raise ConfigError(f"{name} has no weight above 0")


def pick(weights: Mapping[str, float], rng: Generator) -> str | None:
    """One name by weight, in the file's order; None where there are no names. Draws once in either case."""
    u = float(rng.random())
    if not weights:
        return None
    total = sum(weights.values())
    for name, weight in weights.items():
        u -= weight / total
        if u < 0:
            return name
    return [name for name, weight in weights.items() if weight > 0][-1]


class Workload:
    """Draws programs and the times between them."""

    def __init__(
        self, spec: WorkloadSpec, streams: Streams, most_tokens: float = math.inf, output_ratio: float = 1.0
    ) -> None:
        """
        Args:
            most_tokens: Prompt and answer that the largest engine takes; a recorded call beyond it is an error.
            output_ratio: What the tersest model says of a recorded answer.
        """
        self.spec = spec
        self._streams = streams
        self._recorded: tuple[Recorded, ...] = ()
        if isinstance(spec.arrivals, Trace):
            least_ratio = min(output_ratio, 1.0) if spec.max_output_tokens is None else 0.0
            self._recorded = read_trace(spec.arrivals.path, most_tokens, least_ratio)
        if isinstance(spec.arrivals, Trace):
            self._recorded = self._recorded[: spec.arrivals.max_programs]

    @property
    def n_programs(self) -> int | None:
        """How many there are; None where they never end."""
        return len(self._recorded) if isinstance(self.spec.arrivals, Trace) else None

    def shape(self, number: int) -> ProgramShape:
        """Program `number` (from 1): always the same for one seed."""
        spec, rng = self.spec, self._streams.at("shape", number)
        task_type, domain = pick(spec.task_types, rng), pick(spec.domains, rng)
        patience_s = None if spec.patience_s is None else sample_seconds(spec.patience_s, rng)
        if isinstance(spec.arrivals, Trace):
            turns = tuple(TurnShape(*turn) for turn in self._recorded[number - 1].turns)
            return ProgramShape(number, task_type, domain, turns, patience_s)
        joint = spec.joint
        z = float(rng.standard_normal()) if joint != Joint() else 0.0
        n_turns = to_count(scaled(spec.turns, joint.factor("turns", z), rng), least=1, most=MAX_TURNS)
        factors = {name: joint.factor(name, z) for name in ("growth_tokens", "output_tokens", "tool_s")}
        return ProgramShape(number, task_type, domain, self._turns(n_turns, factors, rng), patience_s)

    def _turns(self, n_turns: int, factors: Mapping[str, float], rng: Generator) -> tuple[TurnShape, ...]:
        spec = self.spec
        turns: list[TurnShape] = []
        context_tokens = 0
        for i in range(n_turns):
            if i:
                growth = to_count(scaled(spec.growth_tokens, factors["growth_tokens"], rng), least=0)
            else:
                growth = sample_count(spec.first_prompt_tokens, rng, least=max(spec.shared_tokens + 1, 1))
            output = to_count(scaled(spec.output_tokens, factors["output_tokens"], rng), least=1)
            gap_s = to_seconds(scaled(spec.tool_s, factors["tool_s"], rng)) if i else 0.0
            if turns and context_tokens + growth + output > spec.context_limit_tokens:
                break
            growth = min(growth, spec.context_limit_tokens - 1)
            output = min(output, spec.context_limit_tokens - growth)
            context_tokens += growth + output
            turns.append(TurnShape(growth, output, gap_s))
        return tuple(turns)

    def programs(self, n: int) -> Programs:
        """The first `n` programs as arrays, for runs without a router."""
        shapes = [self.shape(number).turns for number in range(1, n + 1)]
        return pack(
            [
                (
                    [turn.growth_tokens for turn in turns],
                    [turn.output_tokens for turn in turns],
                    [turn.gap_s for turn in turns[1:]] + [0.0],
                )
                for turns in shapes
            ],
            self.spec.shared_tokens,
        )

    def until_next_s(self, number: int) -> float:
        """Seconds between the arrivals of programs `number - 1` and `number` of an open stream."""
        arrivals = self.spec.arrivals
        if isinstance(arrivals, Closed):
            raise TypeError("a closed loop has no arrival times of its own")
        if isinstance(arrivals, Trace):
            before_s = self._recorded[number - 2].arrives_at_s if number > 1 else 0.0
            return (self._recorded[number - 1].arrives_at_s - before_s) * arrivals.time_ratio
        if isinstance(arrivals, Bursty):
            mean_s = 1.0 / arrivals.programs_per_s
            shape = arrivals.burstiness
            return float(self._streams.at("arrival", number).gamma(shape, mean_s / shape))
        return float(self._streams.at("arrival", number).exponential(1.0 / arrivals.programs_per_s))

    def think_s(self, number: int, is_first: bool) -> float:
        """Seconds an agent of a closed loop waits before it starts program `number`."""
        arrivals = self.spec.arrivals
        if not isinstance(arrivals, Closed):
            raise TypeError("an open stream has no agents that think")
        quantity = arrivals.stagger_s if is_first else arrivals.think_s
        return sample_seconds(quantity, self._streams.at("think", number))
