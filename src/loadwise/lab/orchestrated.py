"""`loadwise lab orchestrator`: a language model that chooses the model, beside LinUCB on the same tasks and verdicts.

A seeded sample of tasks is split in a probing part and a scored part. Warm, both choosers have seen every model on
every probed task before the first decision, as ACRouter's paper warms its memory; cold, they have seen nothing. Then
each scored task comes once, is decided, run, and its verdict credited (ORACLE, E.6, without its repeated passes).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback, Policy
from loadwise.policy.nearest import NearestOptions
from loadwise.policy.orchestrator import Ask, Orchestrator, parse_answer

from .arms import make_arms
from .bootstrap import interval, task_draws
from .features import Contexts, make_contexts
from .feedback import FeedbackSpec, make_episode
from .frontier import hull_success
from .offline import complexity
from .replay import trial_of
from .stream import AgentChoice, Stream, read_stream
from .task_lists import task_digest

COST_WEIGHTS_PER_USD = (0.1, 50.0)
"""What a dollar takes from a success in [0, 1]: ACRouter's released weight, and ORACLE's second one (E.6)."""
SIMILARITY_MIN = 0.5
TIERS = ("simple", "of medium difficulty", "complex", "in need of reasoning")
PEER = "linucb"
N_DRAWS = 2000


class OrchestratorConfig(Fact, frozen=True, kw_only=True):
    """What is asked for.

    Raises:
        ConfigError: a value is out of its range.
    """

    outcomes: str
    families: tuple[str, ...]
    models: tuple[str, ...]
    agents: str | None = None
    n_tasks: int = 100
    warm_ratio: float = 0.3
    cost_weights_per_usd: tuple[float, ...] = COST_WEIGHTS_PER_USD
    verifications: tuple[str, ...] = ("adaptive", "single")
    embedder: str = "hash"
    n_components: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.models)) < 2 or len(set(self.models)) != len(self.models):
            raise ConfigError(f"models are {', '.join(self.models)!r}; a router chooses among at least 2 distinct ones")
        if not 10 <= self.n_tasks <= 100_000:
            raise ConfigError(f"tasks is {self.n_tasks!r}; it must be in [10, 100000]")
        if not 0.0 < self.warm_ratio < 1.0:
            raise ConfigError(f"warm is {self.warm_ratio!r}; it must be in (0, 1)")
        for weight in self.cost_weights_per_usd:
            if not 0.0 <= weight <= 1e6:
                raise ConfigError(f"cost weight {weight!r} must be in [0, 1e6]")
        for verification in self.verifications:
            FeedbackSpec(verification=verification)  # type: ignore[arg-type]


class Row(NamedTuple):
    """One chooser under one verifier, start and price, over the scored tasks."""

    policy: str
    verification: str
    start: str
    cost_weight_per_usd: float
    success: float
    cost_usd: float
    """Mean per task, the chooser's own calls not counted."""
    hull_gain_pp: float
    ci95: tuple[float, float]
    share: dict[str, float]
    choose_p50_ms: float
    """Of the whole choice; answers that were recorded before make it short."""
    n_unparsed: int
    """Answers that named no model; the cheapest then ran."""


class Compared(NamedTuple):
    """The rows, and of what."""

    config: OrchestratorConfig
    stream: Stream
    rows: list[Row]
    n_scored: int
    scored_ids_sha256: str
    """Of the scored tasks in the order in which they came."""
    probed_ids_sha256: str


class _Field(NamedTuple):
    stream: Stream
    contexts: Contexts
    probed: npt.NDArray[np.int64]
    scored: npt.NDArray[np.int64]
    streams: Streams


def run_orchestrator(config: OrchestratorConfig, ask: Ask, say: Callable[[str], None] = lambda _: None) -> Compared:
    """Every verifier, start and price, the orchestrator and its peer in turn.

    Raises:
        ConfigError: the outcomes do not fit, no task has a text, or `ask` fails.
    """
    stream = read_stream(
        Path(config.outcomes), list(config.families), list(config.models), AgentChoice.parse(config.agents)
    )
    if not any(stream.texts):
        raise ConfigError(f"no task of {', '.join(config.families)} has a text; an orchestrator reads the request")
    contexts = make_contexts(stream, config.embedder, config.n_components)
    streams = Streams(config.seed)
    sample = streams.at("sample", 0).permutation(stream.n_tasks)[: config.n_tasks]
    n_probed = round(config.warm_ratio * len(sample))
    field = _Field(stream, contexts, sample[:n_probed], sample[n_probed:], streams)
    rows = []
    for verification in config.verifications:
        for start in ("cold", "warm"):
            for weight in config.cost_weights_per_usd:
                say(f"{verification} verification, {start}, {weight:g} per dollar")
                rows += [_run(field, config, verification, start, weight, kind, ask) for kind in (None, PEER)]
    scored, probed = (task_digest(stream.tasks[task] for task in part) for part in (field.scored, field.probed))
    return Compared(config, stream, rows, len(field.scored), scored, probed)


def _run(
    field: _Field, config: OrchestratorConfig, verification: str, start: str, weight: float, peer: str | None, ask: Ask
) -> Row:
    stream, x = field.stream, field.contexts.x
    prices = dict(zip(stream.models, stream.cost_usd.mean(axis=0).tolist(), strict=True))
    candidates = [Candidate(name=model, price_usd=price) for model, price in prices.items()]
    unparsed: list[str] = []

    def heard(prompt: str) -> str:
        answer = ask(prompt)
        if parse_answer(answer, stream.models) is None:
            unparsed.append(answer)
        return answer

    policy: Policy
    if peer is None:
        texts = {index: stream.texts[index] or "" for index in range(stream.n_tasks)}
        options = NearestOptions(similarity_min=SIMILARITY_MIN)
        policy = Orchestrator(heard, lambda context: texts[context.decision_id], options, weight, _tier)
    else:
        policy = make_arms([peer], stream.models)[0].make(field.contexts.spec, prices)
    episode = make_episode(stream, FeedbackSpec(verification=verification), field.streams, 0, 1)  # type: ignore[arg-type]
    step_of = {int(task): step for step, task in enumerate(episode.task)}

    def learn(task: int, model: int) -> None:
        step = step_of[task]
        trial = trial_of(stream, task, model, float(episode.trial_draw[step]))
        success = float(episode.credited[step]) * float(stream.trial_success[task, model, trial])
        reward = success - weight * float(stream.trial_cost_usd[task, model, trial])
        policy.learn(Feedback(decision_id=task, candidate=stream.models[model], x=x[task], reward=reward))

    if start == "warm":
        for task in field.probed.tolist():
            for model in range(len(stream.models)):
                policy.observe(task, stream.models[model], x[task])
                learn(task, model)
    chosen, taken = [], []
    for task in field.scored.tolist():
        context = Context(decision_id=task, x=x[task], at_s=0.0)
        begin = time.perf_counter()
        choice = policy.choose(context, candidates, field.streams.at("policy", task))
        taken.append(time.perf_counter() - begin)
        policy.observe(task, stream.models[choice.chosen], x[task])
        learn(task, choice.chosen)
        chosen.append(choice.chosen)
    name = peer or Orchestrator.name
    return _row(field, name, verification, start, weight, np.array(chosen), taken, len(unparsed))


def _tier(text: str) -> str:
    """The words for a request's complexity, by the rule of `lab.offline`."""
    return TIERS[min(int(complexity(text) * len(TIERS)), len(TIERS) - 1)]


def _row(
    field: _Field,
    policy: str,
    verification: str,
    start: str,
    weight: float,
    chosen: npt.NDArray[np.int64],
    taken: Sequence[float],
    n_unparsed: int,
) -> Row:
    stream, scored = field.stream, field.scored
    success, cost = stream.success[scored], stream.cost_usd[scored]
    own_success, own_cost = success[np.arange(len(scored)), chosen], cost[np.arange(len(scored)), chosen]

    def gains(shares: npt.NDArray[np.float64]) -> list[float]:
        found = []
        for share in shares:
            hull = hull_success((share @ cost).tolist(), (share @ success).tolist(), np.array([share @ own_cost]))
            found.append(100.0 * (float(share @ own_success) - float(hull[0])))
        return found

    even = np.full((1, len(scored)), 1.0 / len(scored))
    rng = field.streams.at("bootstrap", 0)
    drawn = [gain for draws in task_draws(stream.family[scored], N_DRAWS, rng) for gain in gains(draws)]
    shares = np.bincount(chosen, minlength=len(stream.models)) / len(chosen)
    return Row(
        policy=policy,
        verification=verification,
        start=start,
        cost_weight_per_usd=weight,
        success=float(own_success.mean()),
        cost_usd=float(own_cost.mean()),
        hull_gain_pp=round(gains(even)[0], 9) + 0.0,
        ci95=interval(np.array(drawn)),
        share=dict(zip(stream.models, shares.tolist(), strict=True)),
        choose_p50_ms=1e3 * float(np.median(taken)),
        n_unparsed=n_unparsed,
    )


def as_values(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Figures of the rows and intervals of their gains by name; beside them what adaptive verdicts add over single."""
    values: dict[str, float] = {}
    ci95: dict[str, list[float]] = {}
    by_key: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        name = f"{row.policy}.{row.verification}.{row.start}.{row.cost_weight_per_usd:g}"
        values[f"{name}.hull_gain_pp"] = row.hull_gain_pp
        ci95[f"{name}.hull_gain_pp"] = list(row.ci95)
        values[f"{name}.choose_p50_ms"] = row.choose_p50_ms
        by_key[row.policy, row.verification, row.start, row.cost_weight_per_usd] = row
    for (policy, verification, start, weight), row in by_key.items():
        other = by_key.get((policy, "single", start, weight))
        if verification == "adaptive" and other is not None:
            values[f"{policy}.{start}.{weight:g}.adaptive_over_single_pp"] = 100.0 * (row.success - other.success)
    return values, ci95
