"""Replays a stream through policies of the stack, decision by decision: the reference that the compiled replay repeats.

For every order and cost weight a fresh policy sees `n_passes` times all tasks in that order. For each decision it is
asked `choose`, told `observe`, and told `learn` (or `undo`, where the verdict is lost) when the verdict lands:

    r = credit * success - a * cost / $0            ORACLE, B.4: Eq. 3 without the clip, divided by 1 - α

with success and cost those of one seeded trial of the chosen model. Scored is what was chosen in the last pass, by the
mean over the trials.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback, Policy
from loadwise.policy.reward import RewardSpec

from .features import Contexts
from .feedback import Episode
from .pack_prior import PackPrior
from .stream import Stream

Choices = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int64]


class World(NamedTuple):
    """What a replay runs in."""

    stream: Stream
    contexts: Contexts
    n_passes: int
    streams: Streams
    """Chance: orders, trials and the policies' own draws."""
    prior: PackPrior | None = None
    """What linear learners know beforehand, out of a pack."""

    @property
    def prices_usd(self) -> tuple[float, ...]:
        """Mean cost per task of each model: which of two equal candidates is the cheaper one."""
        return tuple(self.stream.cost_usd.mean(axis=0).tolist())


def replay_order(
    world: World, episode: Episode, make: Callable[[], Policy], n_learners: int, cost_weight: float, order: int
) -> Choices:
    """The model chosen at each decision of one order, shape (T,)."""
    stream, x = world.stream, world.contexts.x
    families, domains = stream.families, world.contexts.domains
    policies = [make() for _ in range(n_learners)]
    reads_load = not {"n_running", "n_held", "n_others", "headroom_ratio"}.isdisjoint(policies[0].reads)
    price = RewardSpec(cost_weight=cost_weight, scale_usd=stream.scale_usd, clip="none")
    candidates = _candidates(world, [0] * len(stream.models))
    running = [0] * len(stream.models)
    chosen = np.empty(len(episode.task), dtype=np.int16)
    n_landed = 0
    for step, task in enumerate(episode.task.tolist()):
        while n_landed < episode.landing_end[step]:
            earlier = int(episode.landing[n_landed])
            n_landed += 1
            running[chosen[earlier]] -= 1
            _land(policies[episode.learner[earlier]], world, episode, price, earlier, int(chosen[earlier]))
        if reads_load:
            candidates = _candidates(world, running)
        policy = policies[episode.learner[step]]
        family = families[stream.family[task]]
        context = Context(decision_id=step, x=x[task], at_s=float(step), task_type=family, domain=domains[task])
        choice = policy.choose(context, candidates, world.streams.at(f"policy {order}", step))
        policy.observe(step, stream.models[choice.chosen], x[task])
        chosen[step] = choice.chosen
        running[choice.chosen] += 1
    return chosen


def count_last_pass(chosen: Choices, episode: Episode, n_tasks: int, n_models: int) -> Counts:
    """How often each model was chosen for each task in the last pass, shape (n_tasks, n_models)."""
    counts = np.zeros((n_tasks, n_models), dtype=np.int64)
    np.add.at(counts, (episode.task[-n_tasks:], chosen[-n_tasks:]), 1)
    return counts


def trial_of(stream: Stream, task: int, model: int, draw: float) -> int:
    """The trial that a uniform draw stands for."""
    n = int(stream.n_trials[task, model])
    return min(int(draw * n), n - 1)


def _candidates(world: World, running: Sequence[int]) -> list[Candidate]:
    models = zip(world.stream.models, world.prices_usd, running, strict=True)
    return [Candidate(name=name, price_usd=price, n_running=n) for name, price, n in models]


def _land(policy: Policy, world: World, episode: Episode, price: RewardSpec, step: int, model: int) -> None:
    stream, task = world.stream, int(episode.task[step])
    x, name = world.contexts.x[task], stream.models[model]
    if episode.lost[step]:
        policy.undo(step, name, x)
        return
    trial = trial_of(stream, task, model, float(episode.trial_draw[step]))
    reward = price.reward(
        float(episode.credited[step]) * float(stream.trial_success[task, model, trial]),
        float(stream.trial_cost_usd[task, model, trial]),
    )
    policy.learn(Feedback(decision_id=step, candidate=name, x=x, reward=reward))
