"""`loadwise lab replay`: a stream of measured outcomes through the policies of the stack, and what it shows."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Policy
from loadwise.policy.ridge import REWARD_MAX

from .arms import LINEAR, Arm, is_static, make_arms
from .compiled import compiled_replay, is_compilable
from .coupled import COUPLINGS, FAMILY, Coupling, read_coupled_stream
from .features import make_contexts
from .feedback import FeedbackSpec, Verification, make_episode, misclassified
from .judge import BEST, Judged, Scored, best_counts, judge, score_choices, singles
from .offline import OFFLINE
from .pack import Pack, read_pack, task_mark
from .pack_prior import make_prior
from .replay import Counts, World, count_last_pass, replay_order
from .stream import AgentChoice, Stream, describe_agents, read_stream
from .task_lists import task_digest

COST_WEIGHTS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""a of ORACLE, B.4."""

DECISIONS_MAX = 2_000_000_000
_COMPILE_FROM = 20_000
"""Fewer decisions of a policy are done before the compiler is."""

Say = Callable[[str], None]


class ReplayConfig(Fact, frozen=True, kw_only=True):
    """Everything that a replay is asked for.

    Raises:
        ConfigError: a value is out of its range, or a name is empty or given twice.
    """

    outcomes: str
    """Folder with `outcomes/` and perhaps `tasks/`."""
    families: tuple[str, ...]
    models: tuple[str, ...]
    agents: str | None = None
    """As `AgentChoice.parse` takes it."""
    policies: tuple[str, ...] | None = None
    """None: all registered ones and the default preset."""
    n_passes: int = 8
    n_orders: int = 20
    cost_weights: tuple[float, ...] = COST_WEIGHTS
    verifications: tuple[str, ...] = ("adaptive",)
    feedback: FeedbackSpec = FeedbackSpec()
    """Its verification is replaced by each of `verifications`."""
    packs: tuple[str, ...] = ()
    """Experience packs: each task is scored with the first that was not fitted on it."""
    siblings: dict[str, str] = {}
    """By model the model of the pack that stands for it."""
    submissions: dict[str, str] = {}
    """By model its submission to the leaderboard from which family `tau2` is constructed; empty: nothing is."""
    coupling: Coupling = "independent"
    """How constructed outcomes of two models go together."""
    embedder: str = "hash"
    """As the gateway's default."""
    n_components: int = 16
    n_draws: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("families", "models", "policies", "verifications", "cost_weights"):
            _require_distinct(name, getattr(self, name))
        if len(self.models) < 2:
            raise ConfigError(f"models are {', '.join(self.models)!r}; a router chooses among at least 2")
        if self.packs:
            _require_distinct("packs", self.packs)
        elif self.siblings:
            raise ConfigError(f"siblings of {', '.join(self.siblings)} are named, but no pack is given")
        for name, limit in (("n_passes", 1000), ("n_orders", 100_000), ("n_draws", 1_000_000)):
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"{name[2:]} is {getattr(self, name)!r}; it must be in [1, {limit}]")
        if self.coupling not in COUPLINGS:
            raise ConfigError(f"coupling {self.coupling!r} is unknown; known: {', '.join(COUPLINGS)}")
        for weight in self.cost_weights:
            if not 0.0 <= weight <= 1e6:
                raise ConfigError(f"cost weight {weight!r} must be in [0, 1e6]")
        for verification in self.verifications:
            self.feedback_of(verification)

    def feedback_of(self, verification: str) -> FeedbackSpec:
        """What learners hear under one of the verifiers."""
        return FeedbackSpec(**{**msgspec.structs.asdict(self.feedback), "verification": verification})


class Result(NamedTuple):
    """What a replay found, and of what."""

    config: ReplayConfig
    stream: Stream
    judged: Judged
    scored: list[Scored]
    described: dict[str, Any]
    """The configuration as it is reported."""


def _require_distinct(name: str, values: Sequence[Any] | None) -> None:
    if values is None:
        return
    if not values or any(value == "" for value in values):
        raise ConfigError(f"{name} are {', '.join(map(str, values))!r}; none may be empty")
    if len(set(values)) != len(values):
        raise ConfigError(f"{name} are {', '.join(map(str, values))!r}; each may be given once")


def run_replay(config: ReplayConfig, say: Say = lambda _: None) -> Result:
    """Replay and judge.

    Raises:
        ConfigError: the outcomes do not fit their format or the names asked for.
    """
    arms = make_arms(config.policies, config.models)
    stream = _read(config)
    n_decisions = stream.n_tasks * config.n_passes * config.n_orders * len(config.cost_weights)
    if n_decisions > DECISIONS_MAX:
        raise ConfigError(f"{n_decisions} decisions of each policy are asked for; the limit is {DECISIONS_MAX}")
    _require_learnable(stream, config.cost_weights)
    packs = [read_pack(Path(path)) for path in config.packs]
    worlds = [_make_world(config, stream, pack) for pack in packs] or [_make_world(config, stream, None)]
    say(f"{stream.n_tasks} tasks, {sum(stream.dropped.values())} dropped; agents {describe_agents(stream.agents)}")
    scored: list[Scored] = []
    for verification in config.verifications:
        feedback = config.feedback_of(verification)
        for arm in arms:
            say(f"replaying {arm.label} under {verification} verification")
            found = [_replay_arm(world, config, feedback, arm) for world in _worlds_of(arm, worlds)]
            scored += found[0] if len(found) == 1 else _merged(stream, packs, found)
        scored.append(score_choices(stream, BEST, verification, 0.0, best_counts(stream)))
    judged = judge(stream, scored, config.n_draws, worlds[0].streams.at("bootstrap", 0))
    return Result(config, stream, judged, scored, _describe(config, worlds[0], packs))


def _read(config: ReplayConfig) -> Stream:
    folder, agents = Path(config.outcomes), AgentChoice.parse(config.agents)
    families, models = list(config.families), list(config.models)
    if not config.submissions:
        return read_stream(folder, families, models, agents)
    return read_coupled_stream(folder, families, models, agents, config.submissions, config.coupling)


def _make_world(config: ReplayConfig, stream: Stream, pack: Pack | None) -> World:
    contexts = make_contexts(stream, config.embedder, config.n_components, pack)
    prior = None if pack is None else make_prior(pack, contexts.spec, stream.models, config.siblings)
    return World(stream, contexts, config.n_passes, Streams(config.seed), prior)


def _worlds_of(arm: Arm, worlds: list[World]) -> list[World]:
    """Where packs say nothing to a policy, one world is as good as another."""
    return worlds if arm.spec is not None and arm.spec.name in LINEAR else worlds[:1]


def _merged(stream: Stream, packs: Sequence[Pack], found: Sequence[list[Scored]]) -> list[Scored]:
    """Each task as it went with the first pack that was not fitted on it."""
    fresh = np.stack([~_is_told(stream, pack) for pack in packs], axis=1)
    first = np.where(fresh.any(axis=1), fresh.argmax(axis=1), 0)
    rows = np.arange(stream.n_tasks)
    return [
        points[0]._replace(
            share=np.stack([point.share for point in points])[first, rows],
            success=np.stack([point.success for point in points])[first, rows],
            cost_usd=np.stack([point.cost_usd for point in points])[first, rows],
        )
        for points in zip(*found, strict=True)
    ]


def _is_told(stream: Stream, pack: Pack) -> npt.NDArray[np.bool_]:
    """Tasks that a pack was fitted on, shape (n,)."""
    told = frozenset(pack.provenance.tasks)
    return np.array([task_mark(family, task_id) in told for family, task_id in stream.tasks])


def _require_learnable(stream: Stream, cost_weights: Sequence[float]) -> None:
    """Rewards stay where learners keep their digits."""
    dearest = float(stream.trial_cost_usd.max()) / stream.scale_usd
    for weight in cost_weights:
        if weight * dearest > REWARD_MAX:
            raise ConfigError(
                f"cost weight {weight!r} prices the dearest run, {dearest:.4g} times the mean of the dearest model, at"
                f" {weight * dearest:.4g}; the limit of a reward is {REWARD_MAX:g}"
            )


def _replay_arm(world: World, config: ReplayConfig, feedback: FeedbackSpec, arm: Arm) -> list[Scored]:
    """The points of one policy, one for each cost weight; a single one where rewards change nothing."""
    if arm.spec is None:
        return OFFLINE[arm.label](world, feedback)
    price_by_model = dict(zip(world.stream.models, world.prices_usd, strict=True))

    def make(weight: float) -> Policy:
        prior = None if world.prior is None else world.prior.at(1.0, weight / world.stream.scale_usd)
        return arm.make(world.contexts.spec, price_by_model, prior)

    policy = make(0.0)
    static = is_static(policy)
    weights = (0.0,) if static else config.cost_weights
    if static:
        world = world._replace(n_passes=1)
    n_tasks, n_models = world.stream.success.shape
    counts: list[Counts] = [np.zeros((n_tasks, n_models), dtype=np.int64) for _ in weights]
    n_decisions = n_tasks * world.n_passes * config.n_orders * len(weights)
    replay = None
    if n_decisions >= _COMPILE_FROM and is_compilable():
        replay = compiled_replay(world, policy, feedback.n_learners, weights)
    for order in range(config.n_orders):
        episode = make_episode(world.stream, feedback, world.streams, order, world.n_passes)
        if replay is not None:
            chosen = replay(episode, order)
        else:
            chosen = np.stack(
                [
                    replay_order(world, episode, partial(make, weight), feedback.n_learners, weight, order)
                    for weight in weights
                ]
            )
        for total, row in zip(counts, chosen, strict=True):
            total += count_last_pass(row, episode, n_tasks, n_models)
    rows = zip(weights, counts, strict=True)
    return [score_choices(world.stream, arm.label, feedback.verification, weight, total) for weight, total in rows]


def _describe(config: ReplayConfig, world: World, packs: Sequence[Pack]) -> dict[str, Any]:
    stream, contexts = world.stream, world.contexts
    skipped = ("feedback", "seed") if config.submissions else ("feedback", "seed", "submissions", "coupling")
    return {
        **{name: value for name, value in msgspec.structs.asdict(config).items() if name not in skipped},
        **{name: value for name, value in msgspec.structs.asdict(config.feedback).items() if name != "verification"},
        "misclassified_ratio": {family: misclassified(config.feedback, family) for family in stream.families},
        "agent": {f"{family}/{model}": agent for (family, model), agent in stream.agents.items()},
        "scale_usd": stream.scale_usd,
        "tasks_per_family": dict(
            zip(stream.families, np.bincount(stream.family, minlength=len(stream.families)).tolist(), strict=True)
        ),
        "task_ids_sha256": task_digest(stream.tasks),
        **({"constructed": [FAMILY]} if config.submissions else {}),
        "n_embedded": contexts.n_embedded,
        "features": contexts.spec.n_features,
        "packs": [
            {
                "sha256": pack.digest,
                "licence": pack.licence,
                "n_models": len(pack.models),
                "knows_models": sorted(set(stream.models) & pack.models.keys()),
                "n_tasks_told": int(_is_told(stream, pack).sum()),
            }
            for pack in packs
        ],
        "scored": "only pass" if config.n_passes == 1 else "last pass",
    }


__all__ = ["COST_WEIGHTS", "ReplayConfig", "Result", "Verification", "run_replay", "singles"]
