"""Simulated logs with a known truth: the real stack serves programs of a generative world, and writes its journal.

A world draws programs (task type, components of an embedding) and says how likely each model is to succeed and what it
costs. Verdicts come late, wrong ones not at all; some never come. The stack sees only events, as from any host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.journal.entry import Entry, make_entry
from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind
from loadwise.settings import Config, open_stack, parse_config

Array = npt.NDArray[np.float64]


class WorldSpec(Fact, frozen=True, kw_only=True):
    """A generative world."""

    name: str
    success: dict[str, dict[str, float]]
    """Model -> task type -> mean probability of success."""
    usd_per_million: dict[str, float]
    """Model -> price of a token, in and out alike."""
    tokens: int = 20_000
    """Median tokens of a program."""
    n_components: int = 4
    text_effect: float = 1.0
    """How strongly components move the log-odds of success; their direction differs by model."""
    policy: str = "loadwise"
    """The preset that logs."""
    cost_weight: float = 0.1
    cost_scale_usd: float = 0.1
    in_flight: int = 16
    """Verdicts that are out at once."""
    loss_ratio: float = 0.05
    """Verdicts that never come."""

    @property
    def models(self) -> tuple[str, ...]:
        """In the order of the pool."""
        return tuple(self.success)

    @property
    def task_types(self) -> tuple[str, ...]:
        """In the order of the pool file."""
        return tuple(next(iter(self.success.values())))


class Programs(NamedTuple):
    """n programs of a world, with what every model would do with each."""

    kind: npt.NDArray[np.int64]
    """Index into the task types."""
    components: Array
    probability: Array
    """Of success, shape (n, models)."""
    tokens: Array
    """Shape (n, models), whole."""


def world_config(spec: WorldSpec) -> Config:
    """The pool file under which the world is served."""
    models = {
        name: {"usd_per_million": {"input": price, "output": price}} for name, price in spec.usd_per_million.items()
    }
    backends = [
        {"name": f"b-{name}", "model": name, "engine": "emulator", "slots": 4096} for name in spec.usd_per_million
    ]
    return parse_config(
        {
            "preset": spec.policy,
            "models": models,
            "backends": backends,
            "task_types": {name: {} for name in spec.task_types},
            "router": {
                "context": {"n_components": spec.n_components},
                "cost_weight": spec.cost_weight,
                "cost_scale_usd": spec.cost_scale_usd,
            },
        }
    )


def draw_programs(spec: WorldSpec, n: int, rng: np.random.Generator) -> Programs:
    """Programs as they come."""
    kind = rng.integers(len(spec.task_types), size=n)
    components = rng.normal(size=(n, spec.n_components)) / np.sqrt(max(spec.n_components, 1))
    base = np.array([[spec.success[model][task] for task in spec.task_types] for model in spec.models])
    odds = np.log(base / (1.0 - base))[:, kind].T
    # The same directions whatever the draw: a world is one law, not one per log.
    directions = np.random.default_rng(20_240_601).normal(size=(len(spec.models), spec.n_components))
    odds = odds + spec.text_effect * components @ directions.T
    scale = np.exp(0.5 * rng.normal(size=(n, 1))) * np.exp(0.2 * rng.normal(size=odds.shape))
    return Programs(kind, components, 1.0 / (1.0 + np.exp(-odds)), np.round(spec.tokens * scale))


def write_log(spec: WorldSpec, config: Config, n: int, seed: int) -> list[Entry]:
    """The journal entries of n programs that the real stack served."""
    rng = np.random.default_rng([seed, 1])
    programs = draw_programs(spec, n, rng)
    luck, silence = rng.random((n, len(spec.models))), rng.random(n)
    stack = open_stack(config, seed)
    entries: list[Entry] = []

    def tell(event: e.Event) -> Sequence[c.Command]:
        commands = stack.handle(event)
        entries.append(make_entry(len(entries) + 1, event, commands))
        return commands

    flying: list[tuple[int, str]] = []

    def land(at_s: float) -> None:
        place = int(rng.integers(len(flying)))
        flying[place], flying[-1] = flying[-1], flying[place]
        row, model = flying.pop()
        if silence[row] < spec.loss_ratio:
            return
        is_right = luck[row, spec.models.index(model)] < programs.probability[row, spec.models.index(model)]
        verdict = Verdict(verdict=VerdictKind.PASS if is_right else VerdictKind.FAIL)
        tell(e.VerdictArrived(at_s=at_s, program_id=ProgramId(f"p{row}"), verdict=verdict))

    for row in range(n):
        at_s = float(row)
        arrived = e.TurnArrived(
            at_s=at_s,
            turn_id=TurnId(row + 1),
            program_id=ProgramId(f"p{row}"),
            task_type=spec.task_types[programs.kind[row]],
            components=tuple(programs.components[row].tolist()),
            is_final=True,
        )
        (dispatch,) = (command for command in tell(arrived) if isinstance(command, c.Dispatch))
        usage = Usage(prompt_tokens=int(programs.tokens[row, spec.models.index(dispatch.model)]))
        tell(
            e.AttemptEnded(at_s=at_s, turn_id=TurnId(row + 1), attempt=1, outcome=AttemptOutcome.COMPLETED, usage=usage)
        )
        flying.append((row, dispatch.model))
        if len(flying) > spec.in_flight:
            land(at_s)
    while flying:
        land(float(n))
    stack.check()
    return entries


def outcomes_of(spec: WorldSpec, config: Config, programs: Programs) -> Array:
    """Expected success, cost and reward of every program on every model, shape (n, models, 3)."""
    price = np.array([spec.usd_per_million[model] for model in spec.models])
    cost = programs.tokens * price / 1e6
    reward = config.router.reward
    paid = np.vectorize(lambda usd: reward.reward(0.0, usd))(cost)
    gain = reward.reward(1.0, 0.0) - reward.reward(0.0, 0.0)
    return np.stack([programs.probability, cost, gain * programs.probability + paid], axis=2)
