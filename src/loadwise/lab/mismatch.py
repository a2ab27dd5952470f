"""`loadwise lab mismatch`: what is learned under one verifier for all, the adaptive choice, and the best fixed one.

ORACLE's Fig. 2a and 8a replay a mixed stream, its Fig. 8b and Table 1 each family alone at cost weight 0. The arms
meet the same tasks in the same orders with the same luck (`feedback.py`); only what the learner is told differs:

    patch_only   one verifier, the one that runs patches: every run of another family counts as a failure
    adaptive     the verifier of the task type; the wrong one, which credits zero, as often as the selector errs
    best_fixed   for each family the verifier that reads it

Success is averaged over the seeds task by task; intervals are paired task bootstraps, stratified by family.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams

from .bootstrap import interval, task_draws
from .experiment import COST_WEIGHTS, ReplayConfig, run_replay
from .feedback import FeedbackSpec, misclassified, reads_patches
from .judge import Scored
from .stream import Stream
from .task_lists import task_digest

ARMS = {"patch_only": "single", "adaptive": "adaptive", "best_fixed": "best"}
"""Our names, and those of `lab replay --verification`."""
WITHIN_PP = 1.0
"""Adaptive may be so far below the best fixed verifier; patch-only may gain so much where it reads nothing."""

SELECTOR_ACCURACY: Mapping[str, float] = {"swe": 0.972, "tau2": 1.0, "terminal1": 0.859, "terminal2": 0.937}
"""Measured by `lab selector`, three classes, five examples of each (`experiments/results/selector.md`)."""

Array = npt.NDArray[np.float64]
Say = Callable[[str], None]


class MismatchConfig(Fact, frozen=True, kw_only=True):
    """Everything that the experiment is asked for.

    Raises:
        ConfigError: a value is out of its range.
    """

    outcomes: str
    families: tuple[str, ...]
    models: tuple[str, ...]
    agents: str | None = None
    policy: str = "linucb"
    n_passes: int = 8
    n_orders: int = 20
    cost_weights: tuple[float, ...] = COST_WEIGHTS
    """Of the mixed stream; families alone are replayed at 0."""
    seeds: tuple[int, ...] = (0, 1, 2)
    misclassified: dict[str, float] = {}
    """1 - q by family; others as measured, or ORACLE's."""
    embedder: str = "hash"
    n_draws: int = 2000

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds are {self.seeds!r}; at least one, each once")
        if 0.0 not in self.cost_weights:
            raise ConfigError(f"cost weights are {self.cost_weights!r}; 0 must be among them")

    @property
    def feedback(self) -> FeedbackSpec:
        """What the selector gets wrong."""
        known = {family: 1.0 - ratio for family, ratio in SELECTOR_ACCURACY.items()}
        return FeedbackSpec(misclassified_by_family={**known, **self.misclassified})


class Replayed(NamedTuple):
    """One stream under the three arms, averaged over the seeds."""

    stream: Stream
    success: dict[tuple[str, float], Array]
    """By (arm, cost weight): expected success of each task."""
    cost_usd: dict[tuple[str, float], Array]
    share: dict[tuple[str, float], Array]
    """Share of each model, shape (n_models,)."""


class Mismatch(NamedTuple):
    """What was found, and of what."""

    config: MismatchConfig
    mixed: Replayed
    alone: dict[str, Replayed]
    values: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    checks: list[dict[str, Any]]


def run_mismatch(config: MismatchConfig, say: Say = lambda _: None) -> Mismatch:
    """Replay and judge.

    Raises:
        ConfigError: the outcomes do not fit their format or the names asked for.
    """
    mixed = _replay(config, config.families, config.cost_weights, say)
    alone = {family: _replay(config, (family,), (0.0,), say) for family in config.families}
    values: dict[str, float] = {}
    ci95: dict[str, tuple[float, float]] = {}
    streams = Streams(config.seeds[0])

    def judge(prefix: str, replayed: Replayed, vectors: Mapping[str, Array]) -> None:
        even = np.full(replayed.stream.n_tasks, 1.0 / replayed.stream.n_tasks)
        drawn = list(task_draws(replayed.stream.family, config.n_draws, streams.at(f"bootstrap {prefix}", 0)))
        for name, vector in vectors.items():
            values[f"{prefix}.{name}"] = float(even @ vector)
            ci95[f"{prefix}.{name}"] = interval(np.concatenate([draw @ vector for draw in drawn]))

    judge("mixed", mixed, _mixed_figures(mixed))
    for family, replayed in alone.items():
        judge(f"alone.{family}", replayed, _alone_figures(replayed))
    return Mismatch(config, mixed, alone, values, ci95, _checks(config, values))


def _replay(config: MismatchConfig, families: tuple[str, ...], weights: tuple[float, ...], say: Say) -> Replayed:
    found: dict[tuple[str, float], list[Scored]] = {}
    stream: Stream | None = None
    for seed in config.seeds:
        result = run_replay(
            ReplayConfig(
                outcomes=config.outcomes,
                families=families,
                models=config.models,
                agents=_agents_of(config.agents, families),
                policies=(config.policy,),
                n_passes=config.n_passes,
                n_orders=config.n_orders,
                cost_weights=weights,
                verifications=tuple(ARMS.values()),
                feedback=config.feedback,
                embedder=config.embedder,
                n_draws=1,  # intervals are made here, over the seeds
                seed=seed,
            ),
            say,
        )
        stream = result.stream
        for scored in result.scored:
            if scored.policy == config.policy:
                found.setdefault((_arm_of(scored.verification), scored.cost_weight), []).append(scored)
    assert stream is not None
    if not found:
        raise ConfigError(f"policy {config.policy!r} stands for several; name one")
    return Replayed(
        stream,
        {key: _mean([one.success for one in of]) for key, of in found.items()},
        {key: _mean([one.cost_usd for one in of]) for key, of in found.items()},
        {key: _mean([one.share.mean(axis=0) for one in of]) for key, of in found.items()},
    )


def _agents_of(agents: str | None, families: tuple[str, ...]) -> str | None:
    """The parts that speak of these families: others would be refused as unknown."""
    if agents is None:
        return None
    parts = []
    for part in agents.split(","):
        key = part.rpartition("=")[0].strip()
        family, slash, _ = key.partition("/")
        if not slash or family in families:
            parts.append(part)
    return ",".join(parts) or None


def _arm_of(verification: str) -> str:
    return next(arm for arm, name in ARMS.items() if name == verification)


def _mean(arrays: list[Array]) -> Array:
    mean: Array = np.mean(arrays, axis=0)
    return mean


def _of_family(stream: Stream, index: int, vector: Array) -> Array:
    """The vector whose mean over all tasks is that of one family: draws have as many tasks of it as the stream."""
    tasks = stream.family == index
    found: Array = np.where(tasks, vector * stream.n_tasks / tasks.sum(), 0.0)
    return found


def _mixed_figures(mixed: Replayed) -> dict[str, Array]:
    """At cost weight 0: success of the stream and of each family, and what adaptive is above patch-only."""
    stream = mixed.stream
    arms: dict[str, Array] = {"uninformed": stream.success.mean(axis=1)}
    arms |= {arm: mixed.success[arm, 0.0] for arm in ARMS}
    figures = {f"{arm}.success": vector for arm, vector in arms.items()}
    gaps = {
        "adaptive_over_patch_only_pp": 100.0 * (arms["adaptive"] - arms["patch_only"]),
        "adaptive_minus_best_fixed_pp": 100.0 * (arms["adaptive"] - arms["best_fixed"]),
    }
    figures |= gaps
    for index, family in enumerate(stream.families):
        if (stream.family == index).any():
            figures |= {f"{family}.{arm}.success": _of_family(stream, index, vector) for arm, vector in arms.items()}
            figures |= {f"{family}.{name}": _of_family(stream, index, vector) for name, vector in gaps.items()}
    return figures


def _alone_figures(replayed: Replayed) -> dict[str, Array]:
    """Table 1: gain over the uninformed choice, and what adaptive is below the best fixed verifier."""
    uninformed = replayed.stream.success.mean(axis=1)
    figures = {f"{arm}.gain_pp": 100.0 * (replayed.success[arm, 0.0] - uninformed) for arm in ARMS}
    figures["adaptive_minus_best_fixed_pp"] = figures["adaptive.gain_pp"] - figures["best_fixed.gain_pp"]
    return figures


def _checks(config: MismatchConfig, values: Mapping[str, float]) -> list[dict[str, Any]]:
    checks = []
    for family in config.families:
        key = f"alone.{family}.adaptive_minus_best_fixed_pp"
        checks.append({"key": key, "op": ">=", "bound": -WITHIN_PP, "holds": values[key] >= -WITHIN_PP})
        if not reads_patches(family):
            key = f"alone.{family}.patch_only.gain_pp"
            checks.append({"key": key, "op": "<=", "bound": WITHIN_PP, "holds": values[key] <= WITHIN_PP})
    return checks


def described(found: Mismatch) -> dict[str, Any]:
    """The configuration as it is reported."""
    config, stream = found.config, found.mixed.stream
    counts = np.bincount(stream.family, minlength=len(stream.families)).tolist()
    return {
        **{name: value for name, value in msgspec.structs.asdict(config).items() if name != "misclassified"},
        "misclassified_ratio": {family: misclassified(config.feedback, family) for family in config.families},
        "agent": {f"{family}/{model}": agent for (family, model), agent in stream.agents.items()},
        "tasks_per_family": dict(zip(stream.families, counts, strict=True)),
        "dropped": dict(stream.dropped),
        "task_ids_sha256": task_digest(stream.tasks),
    }


def read_selector(path: str, families: tuple[str, ...], k: int = 5) -> dict[str, float]:
    """1 - q of each family from the JSON of `lab selector`: among ORACLE's three classes where it is in one, else all.

    Raises:
        ConfigError: the file cannot be read, or measures none of the families.
    """
    from .selector import GROUPS

    try:
        values = msgspec.json.decode(Path(path).read_bytes())["values"]
        found = {}
        for family in families:
            group = next((name for name, members in GROUPS.items() if family in members), family)
            keys = [f"{of}.k{k}.{name}.accuracy" for of in ("three", "all") for name in (f"family.{family}", group)]
            ratio = next((float(values[key]) for key in keys if key in values), None)
            if ratio is not None:
                found[family] = 1.0 - ratio
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"selector {path!r} is no result of `lab selector --json`: {error}") from error
    if not found:
        raise ConfigError(f"selector {path!r} measures none of {', '.join(families)} with k={k}")
    return found
