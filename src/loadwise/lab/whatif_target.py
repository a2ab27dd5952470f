"""How likely the policy in question would have made each logged choice.

- A policy without memory is asked at every decision, with the context, prices and load that the log shows: exact, but
  for the load, which would have been another one under it.
- A policy that takes turns takes its own, whatever the log's policy chose: exact.
- A policy that learns is *frozen*: it learns from the judged decisions of the first part of the log and is evaluated,
  as it then is, on the rest. That is a statement about what it would do from here on, not about what it would have
  become had it served from the start: a log that another learner steered cannot tell that.

What a policy does at a decision depends only on what lies before the part that is evaluated, so the propensities of
that part stay true given it, and each decision adds a martingale difference.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Context, Feedback, Policy
from loadwise.policy.context import ContextSpec
from loadwise.policy.fixed import RoundRobin
from loadwise.policy.prior import Prior
from loadwise.policy.registry import PolicySpec, named_candidates
from loadwise.policy.stateless import Stateless

from .arms import Arm, make_arms
from .whatif_log import Log, Logged, Refusal

Array = npt.NDArray[np.float64]


class Target(NamedTuple):
    """The policy in question on the decisions that are evaluated."""

    label: str
    policy: Policy
    """As it is evaluated."""
    mode: str
    """`stateless`, `own turn`, or `frozen`."""
    n_learned: int
    """Judged decisions that it learned from, none of which is evaluated."""
    decisions: tuple[Logged, ...]
    probabilities: Array
    """Shape (n, models of the log); zero where a model was no candidate."""


def parse_target(said: str, models: Sequence[str]) -> Arm:
    """One policy as `lab replay --policies` takes it, or as JSON: `{"name": "mixing", "weights": {"a": 0.5}}`.

    Raises:
        ConfigError: it is no policy, or several.
    """
    if said.lstrip().startswith("{"):
        said = _from_json(said)
    arms = make_arms([said], models)
    if len(arms) != 1:
        known = ", ".join(arm.label for arm in arms)
        raise ConfigError(f"policy {said!r} stands for several: name one of {known}")
    if arms[0].spec is None:
        raise ConfigError(f"policy {said!r} chooses by outcomes of whole tasks, which a journal does not hold")
    for name in named_candidates(arms[0].spec):
        if name not in models:
            raise ConfigError(f"policy {said!r} names {name!r}, which is no model of the journal: {', '.join(models)}")
    return arms[0]


def _from_json(said: str) -> str:
    try:
        spec: Any = msgspec.json.decode(said)
    except msgspec.DecodeError as error:
        raise ConfigError(f"policy {said!r} is not JSON: {error}") from error
    name = spec.pop("name", None)
    nested = spec.pop("options", {})
    if not isinstance(name, str) or not isinstance(nested, dict):
        raise ConfigError(f"policy {said!r} must have a name, and options beside it or under options")
    parts = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in {**nested, **spec}.items()]
    return f"{name}?{'&'.join(parts)}" if parts else name


def prior_of(policy: PolicySpec) -> Prior | None:
    """What the journal's own policy was told by an experience pack; None where there was none."""
    told = policy.options.get("prior")
    return told if told is None or isinstance(told, Prior) else msgspec.convert(told, Prior)


def make_target(
    log: Log, arm: Arm, context: ContextSpec, learn_ratio: float, seed: int, prior: Prior | None = None
) -> Target:
    """Ask the policy about every decision that is evaluated.

    Args:
        context: of the journal's configuration.
        learn_ratio: share of the log that a learning policy learns from, in (0, 1).
        prior: of the journal's pack, with which any policy that takes one would have begun.

    Raises:
        Refusal: nothing is left to learn from or to evaluate.
    """
    policy = arm.make(context, _mean_costs_usd(log), prior)
    streams = Streams(seed)
    if isinstance(policy, RoundRobin):  # it has a memory of its own, whatever it inherits
        return Target(arm.label, policy, "own turn", 0, log.decisions, _take_turns(policy, log, streams))
    if isinstance(policy, Stateless):
        return Target(arm.label, policy, "stateless", 0, log.decisions, _ask(policy, log, log.decisions, streams))
    n_first = round(learn_ratio * len(log.decisions))
    first, rest = log.decisions[:n_first], log.decisions[n_first:]
    n_learned = _teach(policy, first)
    if not n_learned or not rest:
        raise Refusal(
            f"policy {arm.label!r} learns: of {len(log.decisions)} decisions the first {n_first} have {n_learned}"
            f" verdicts to learn from, and {len(rest)} are left to evaluate it on"
        )
    return Target(arm.label, policy, "frozen", n_learned, rest, _ask(policy, log, rest, streams))


def _mean_costs_usd(log: Log) -> dict[str, float]:
    costs: dict[str, list[float]] = {name: [] for name in log.models}
    for one in log.decisions:
        if one.outcome is not None:
            costs[one.candidates[one.chosen].name].append(one.outcome[1])
    return {name: float(np.mean(found)) if found else 0.0 for name, found in costs.items()}


def _teach(policy: Policy, decisions: Sequence[Logged]) -> int:
    n_learned = 0
    for one in decisions:
        name = one.candidates[one.chosen].name
        if one.outcome is not None:
            policy.observe(one.decision_id, name, one.x)
            policy.learn(Feedback(decision_id=one.decision_id, candidate=name, x=one.x, reward=one.outcome[2]))
            n_learned += 1
    return n_learned


def _ask(policy: Policy, log: Log, decisions: Sequence[Logged], streams: Streams) -> Array:
    place = {name: index for index, name in enumerate(log.models)}
    found = np.zeros((len(decisions), len(log.models)))
    for row, one in enumerate(decisions):
        choice = policy.choose(_context(one), one.candidates, streams.at("policy", one.decision_id))
        propensities = choice.propensities
        if propensities is None:
            propensities = policy.propensities(choice, streams.at("propensity", one.decision_id))
        for candidate, probability in zip(one.candidates, propensities, strict=True):
            found[row, place[candidate.name]] = probability
    return found


def _take_turns(policy: RoundRobin, log: Log, streams: Streams) -> Array:
    place = {name: index for index, name in enumerate(log.models)}
    found = np.zeros((len(log.decisions), len(log.models)))
    for row, one in enumerate(log.decisions):
        choice = policy.choose(_context(one), one.candidates, streams.at("policy", one.decision_id))
        name = one.candidates[choice.chosen].name
        policy.observe(one.decision_id, name, one.x)
        found[row, place[name]] = 1.0
    return found


def _context(one: Logged) -> Context:
    return Context(decision_id=one.decision_id, x=one.x, at_s=one.at_s, task_type=one.task_type, domain=one.domain)
