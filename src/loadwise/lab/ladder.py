"""Escalation ladders replayed on measured outcomes: a run that the verifier fails may be followed by another one.

The first model of every task is chosen by a policy of the stack, exactly as `lab replay` would choose it (compiled or
not) from the verdicts of first attempts; whether and where to climb is asked of `policy.ladder.Ladder`, the very class
that the router runs, which learns from every attempt. Both hear noisy verdicts only:

    P(fail | right) = false_fail,   P(pass | wrong) = false_pass,   independent over attempts

What is scored is whether the last attempt was right, and what all attempts cost. The first attempt's own luck is taken
out by its expectation: success = s(first) + [right(last) - right(first)], which has the same mean and less noise.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.policy.base import Policy
from loadwise.policy.ladder import AUDIT_PRIOR, RATE_MAX, Ladder, LadderOptions
from loadwise.policy.reward import RewardSpec

from . import kernel_ladder
from .arms import make_arms
from .compiled import _compile, compiled_replay, is_compilable
from .feedback import Episode, FeedbackSpec, make_episode
from .judge import Scored
from .offline import score_cascade
from .replay import World, replay_order, trial_of
from .stream import Stream

Array = npt.NDArray[np.float64]

N_COPIES = 8
"""Verdicts drawn for each trial, of which an attempt meets one."""

AUDIT_DELAY = 50
"""Decisions after which the truth of an audited attempt becomes known."""


class Noise(NamedTuple):
    """The verifier's rates, and what the ladder is told of them."""

    false_pass: float
    false_fail: float
    told: tuple[float, float] | None
    """Rates that the ladder is configured with; None for none."""
    audit_ratio: float = 0.0
    """Share of attempts whose truth is told later."""


class Climbed(NamedTuple):
    """Means over orders of the last pass by task; one row a cost weight, shape (weights, n_tasks)."""

    success: Array
    cost_usd: Array
    n_attempts: Array
    first_success: Array
    """Of the first attempts alone: never escalating."""
    first_cost_usd: Array


class Verdicts(NamedTuple):
    """A stream whose trials are verdicts, and the truth behind each."""

    stream: Stream
    is_right: Array
    """Shape (n_tasks, n_models, copies)."""


def make_verdicts(stream: Stream, noise: Noise, rng: np.random.Generator) -> Verdicts:
    """`N_COPIES` verdicts of each trial; a fractional success is the chance of being right."""
    copied = np.repeat(stream.trial_success, N_COPIES, axis=2)
    is_right = (rng.random(copied.shape) < copied).astype(np.float64)
    flips = rng.random(copied.shape) < np.where(is_right > 0.5, noise.false_fail, noise.false_pass)
    verdict = np.where(flips, 1.0 - is_right, is_right)
    noisy = stream._replace(
        trial_success=verdict,
        trial_cost_usd=np.repeat(stream.trial_cost_usd, N_COPIES, axis=2),
        n_trials=stream.n_trials * N_COPIES,
    )
    return Verdicts(noisy, is_right)


def replay_ladder(
    world: World,
    noise: Noise,
    cost_weights: tuple[float, ...],
    n_orders: int,
    *,
    policy: str = "loadwise",
    attempts_max: int = 2,
    optimism: float | None = None,
    is_compiled: bool = True,
) -> Climbed:
    """Replay every order under every cost weight.

    Args:
        policy: chooses the first model; a name as `lab replay --policies` takes it.
        is_compiled: let the compiled ladder climb, where there is a compiler.
    """
    stream = world.stream
    verdicts = make_verdicts(stream, noise, world.streams.at("verdicts", 0))
    heard = world._replace(stream=verdicts.stream)
    (arm,) = make_arms([policy], list(stream.models))
    make = partial(arm.make, world.contexts.spec, dict(zip(stream.models, world.prices_usd, strict=True)))
    feedback = FeedbackSpec(verification="best")
    first = compiled_replay(heard, make(), 1, cost_weights) if is_compilable() else None
    sums = np.zeros((5, len(cost_weights), stream.n_tasks))
    for order in range(n_orders):
        episode = make_episode(heard.stream, feedback, world.streams, order, world.n_passes)
        if first is not None:
            chosen = first(episode, order)
        else:
            chosen = np.stack([replay_order(heard, episode, make, 1, weight, order) for weight in cost_weights])
        chance = world.streams.at("climb", order).random((len(episode.task), attempts_max + 1))
        for place, weight in enumerate(cost_weights):
            climber = _Climber(world, verdicts, noise, weight, attempts_max, optimism)
            run = climber.run_compiled if is_compiled and is_compilable() else climber.run
            run(episode, chosen[place], chance, sums[:, place])
    return Climbed(*(sums / n_orders))


class _Climber:
    """One ladder on one order."""

    def __init__(
        self,
        world: World,
        verdicts: Verdicts,
        noise: Noise,
        cost_weight: float,
        attempts_max: int,
        optimism: float | None,
    ) -> None:
        self._world, self._verdicts, self._noise = world, verdicts, noise
        self._attempts_max = attempts_max
        told: dict[str, Any] = {}
        if noise.told is not None:
            told = {"false_pass": noise.told[0], "false_fail": noise.told[1]}
        if optimism is not None:
            told["optimism"] = optimism
        reward = RewardSpec(cost_weight=cost_weight, scale_usd=world.stream.scale_usd, clip="none")
        self._options = LadderOptions(n_features=world.contexts.spec.n_features, **told)
        self.ladder = Ladder(self._options, reward)
        self._price = cost_weight / world.stream.scale_usd
        self._audits: list[tuple[int, bool, bool]] = []

    def run(self, episode: Episode, chosen: npt.NDArray[np.int16], chance: Array, sums: Array) -> None:
        """Add the last pass to `sums`, one row a field of `Climbed`."""
        stream = self._world.stream
        n_tasks, total = stream.n_tasks, len(episode.task)
        for step, task in enumerate(episode.task.tolist()):
            self._hear_audits(step)
            model = int(chosen[step])
            rights, costs = self._attempts(step, task, model, float(episode.trial_draw[step]), chance[step])
            if step >= total - n_tasks:
                expected = stream.success[task, model]
                sums[0, task] += expected + rights[-1] - rights[0]
                sums[1, task] += stream.cost_usd[task, model] + sum(costs[1:])
                sums[2, task] += len(costs)
                sums[3, task] += expected
                sums[4, task] += stream.cost_usd[task, model]

    def run_compiled(self, episode: Episode, chosen: npt.NDArray[np.int16], chance: Array, sums: Array) -> None:
        """As `run`, by `kernel_ladder`."""
        stream, noisy, told = self._world.stream, self._verdicts.stream, self._noise.told
        by_name = np.array(sorted(range(len(stream.models)), key=lambda k: stream.models[k]), dtype=np.int64)
        added = np.zeros((len(Climbed._fields), stream.n_tasks))
        _ladder_kernel()(
            added,
            self._world.contexts.x,
            episode.task,
            chosen.astype(np.int64),
            episode.trial_draw,
            chance,
            (self._verdicts.is_right, noisy.trial_success, noisy.trial_cost_usd, noisy.n_trials),
            (stream.success, stream.cost_usd),
            by_name,
            np.array(told if told is not None else (-1.0, -1.0)),
            (self._options.optimism, RATE_MAX, self._price, self._noise.audit_ratio, self._options.ridge),
            (self._attempts_max, stream.n_tasks, AUDIT_DELAY, int(AUDIT_PRIOR)),
            np.zeros((len(episode.task) * self._attempts_max, 3)),
        )
        sums += added

    def _attempts(
        self, step: int, task: int, model: int, draw: float, chance: Array
    ) -> tuple[list[float], list[float]]:
        """Whether each attempt was right, and what it cost."""
        models, x = self._world.stream.models, self._world.contexts.x[task]
        rights, costs, tried = [], [], [model]
        failed: str | None = None
        while True:
            copy = trial_of(self._verdicts.stream, task, model, draw)
            right = float(self._verdicts.is_right[task, model, copy])
            verdict = float(self._verdicts.stream.trial_success[task, model, copy])
            cost = float(self._verdicts.stream.trial_cost_usd[task, model, copy])
            rights.append(right)
            costs.append(cost)
            self.ladder.learn(x, failed, models[model], success=verdict, cost_usd=cost)
            if chance[-1] < self._noise.audit_ratio:
                self._audits.append((step + AUDIT_DELAY, verdict > 0.5, right > 0.5))
            if verdict > 0.5 or len(tried) >= self._attempts_max:
                return rights, costs
            failed = models[model]
            rungs = self.ladder.climb(x, failed, [name for k, name in enumerate(models) if k not in tried])
            if not rungs:
                return rights, costs
            model = models.index(rungs[0].candidate)
            draw = float(chance[len(tried) - 1])
            tried.append(model)

    def _hear_audits(self, step: int) -> None:
        while self._audits and self._audits[0][0] <= step:
            _, passed, is_right = self._audits.pop(0)
            self.ladder.audited(passed=passed, is_right=is_right)


@cache
def _ladder_kernel() -> Callable[..., None]:
    return _compile(kernel_ladder, kernel_ladder.LADDER)


class Baselines(NamedTuple):
    """Fixed ways to serve each task, as columns: shape (n_tasks, ways)."""

    success: Array
    cost_usd: Array
    n_attempts: Array


def cascade_of(world: World, noise: Noise) -> Baselines:
    """The fixed cascade from cheap to dear at every length, and every single model."""
    stream = world.stream
    feedback = FeedbackSpec(verification="best")
    ways: list[Scored] = score_cascade(world, feedback, noise.false_pass, noise.false_fail)
    success = np.column_stack([*(way.success for way in ways), stream.success])
    cost = np.column_stack([*(way.cost_usd for way in ways), stream.cost_usd])
    attempts = np.column_stack([*(way.share.sum(axis=1) for way in ways), np.ones_like(stream.success)])
    return Baselines(success, cost, attempts)


def best_mix(success: Array, cost: Array, attempts: Array, at_cost: Array, at_attempts: Array) -> Array:
    """The most success that a lottery over ways reaches at no more than a mean cost and a mean number of attempts.

    A linear programme with three rows: its best corner mixes at most three ways, and all triples are tried.

    >>> at = np.array([1.5]), np.array([2.0])
    >>> ways = np.array([[0.2, 0.6]]), np.array([[1.0, 2.0]]), np.array([[1.0, 1.0]])
    >>> best_mix(*ways, *at).round(3).tolist()
    [0.4]

    Args:
        success: mean of each way in each draw, shape (draws, ways); `cost` and `attempts` alike.
        at_cost: shape (draws,); `at_attempts` alike.

    Returns:
        Shape (draws,). Where no way is as cheap, the cheapest one's success.
    """
    n_draws, n_ways = success.shape
    slack = 1e-9
    cheapest = cost.argmin(axis=1)
    best = np.take_along_axis(success, cheapest[:, None], axis=1)[:, 0]

    def offer(weights: Array, ways: list[int]) -> None:
        nonlocal best
        reached = (weights * success[:, ways]).sum(axis=1)
        spent, made = (weights * cost[:, ways]).sum(axis=1), (weights * attempts[:, ways]).sum(axis=1)
        fits = (weights >= -slack).all(axis=1) & (spent <= at_cost + slack) & (made <= at_attempts + slack)
        best = np.where(fits & np.isfinite(reached), np.maximum(best, reached), best)

    for i in range(n_ways):
        offer(np.ones((n_draws, 1)), [i])
        for j in range(i + 1, n_ways):
            for values, at in ((cost, at_cost), (attempts, at_attempts)):
                share = _share(values[:, i], values[:, j], at)
                offer(np.column_stack([share, 1.0 - share]), [i, j])
            for k in range(j + 1, n_ways):
                offer(_corner(cost[:, [i, j, k]], attempts[:, [i, j, k]], at_cost, at_attempts), [i, j, k])
    return best


def _share(first: Array, second: Array, at: Array) -> Array:
    """The weight of the first of two at which their mix is worth `at`; NaN where they are alike."""
    gap = first - second
    return np.divide(at - second, gap, out=np.full_like(gap, np.nan), where=np.abs(gap) > 1e-12)


def _corner(cost: Array, attempts: Array, at_cost: Array, at_attempts: Array) -> Array:
    """Weights of three ways whose mix has both means, shape (draws, 3); NaN where there is none."""
    a, b = cost[:, :2] - cost[:, 2:], attempts[:, :2] - attempts[:, 2:]
    c, d = at_cost - cost[:, 2], at_attempts - attempts[:, 2]
    determinant = a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]
    safe = np.where(np.abs(determinant) > 1e-12, determinant, np.nan)
    first, second = (c * b[:, 1] - a[:, 1] * d) / safe, (a[:, 0] * d - c * b[:, 0]) / safe
    return np.column_stack([first, second, 1.0 - first - second])


__all__ = ["Baselines", "Climbed", "Noise", "Policy", "best_mix", "cascade_of", "make_verdicts", "replay_ladder"]
