"""A stream: the tasks that all models have run, with what each model achieved and cost on each.

Tasks come in the order of the families asked for, then by id; models in the order asked for. A task that lacks one of
the models, or whose cost is unknown for one, is dropped and counted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError

from .outcomes import Outcomes, read_outcomes, read_texts

Array = npt.NDArray[np.float64]


class Stream(NamedTuple):
    """n tasks, K models, at most R trials of each pair."""

    families: tuple[str, ...]
    models: tuple[str, ...]
    agents: Mapping[tuple[str, str], str]
    """The agent that was taken, by (family, model)."""
    task_ids: tuple[str, ...]
    family: npt.NDArray[np.int64]
    """Index into `families`, shape (n,)."""
    domains: tuple[str | None, ...]
    texts: tuple[str | None, ...]
    success: Array
    """Mean over the trials, shape (n, K)."""
    cost_usd: Array
    """Mean over the trials whose cost is known, shape (n, K)."""
    trial_success: Array
    """Shape (n, K, R); beyond `n_trials` undefined."""
    trial_cost_usd: Array
    """Shape (n, K, R); the pair's mean where a trial's own cost is unknown."""
    n_trials: npt.NDArray[np.int64]
    """Shape (n, K), each >= 1."""
    dropped: Mapping[str, int]
    """Tasks left out, by reason."""

    @property
    def n_tasks(self) -> int:
        """How many tasks are in it."""
        return len(self.task_ids)

    @property
    def tasks(self) -> tuple[tuple[str, str], ...]:
        """Family and id of each task, in order."""
        return tuple((self.families[at], task_id) for at, task_id in zip(self.family, self.task_ids, strict=True))

    @property
    def scale_usd(self) -> float:
        """$0 of the reward: the mean cost per task of the dearest model; 1 where everything is (next to) free."""
        dearest = float(self.cost_usd.mean(axis=0).max())
        return dearest if dearest >= 1e-12 else 1.0


class AgentChoice(NamedTuple):
    """Which agents may be taken: of a (family, model), of a model, of a family, or any."""

    exact: Mapping[str, str]
    """Agent by 'family/model', 'model' or 'family'."""
    preferred: frozenset[str]
    """Agents that, where they exist, are taken before others."""

    @classmethod
    def parse(cls, text: str | None) -> "AgentChoice":
        """`AGENT`, `MODEL=AGENT`, `FAMILY=AGENT` and `FAMILY/MODEL=AGENT`, separated by commas.

        >>> AgentChoice.parse("terminus-2,swe=mini-swe-agent").exact
        {'swe': 'mini-swe-agent'}

        Raises:
            ConfigError: an empty part, or a key given twice.
        """
        exact: dict[str, str] = {}
        preferred: set[str] = set()
        for part in text.split(",") if text is not None else ():
            key, equals, agent = part.strip().rpartition("=")
            if not agent or (equals and not key) or key in exact:
                raise ConfigError(f"agents {text!r}: {part!r} is not AGENT or, once each, KEY=AGENT")
            if equals:
                exact[key] = agent
            else:
                preferred.add(agent)
        return cls(exact, frozenset(preferred))

    def key_of(self, family: str, model: str) -> str | None:
        """The most particular key that speaks of the pair."""
        return next((key for key in (f"{family}/{model}", model, family) if key in self.exact), None)


def read_stream(folder: Path, families: Sequence[str], models: Sequence[str], agents: AgentChoice) -> Stream:
    """The stream of `families` and `models` in `folder`.

    Raises:
        ConfigError: the folder does not fit its format, a name is unknown, or no task has all models and costs.
    """
    outcomes = read_outcomes(folder, families, models)
    return make_stream(outcomes, read_texts(folder, families), families, models, agents)


def make_stream(
    outcomes: Outcomes,
    texts: Mapping[tuple[str, str], str],
    families: Sequence[str],
    models: Sequence[str],
    agents: AgentChoice,
) -> Stream:
    """The stream of rows already read."""
    agent_by_pair = _take_agents(outcomes, families, models, agents)
    rows_by_cell: dict[tuple[str, str, str], list[int]] = {}
    domain_by_task: dict[tuple[str, str], str | None] = {}
    columns = (outcomes.family, outcomes.task_id, outcomes.model, outcomes.agent, outcomes.domain)
    for row, (family, task_id, model, agent, domain) in enumerate(zip(*columns, strict=True)):
        if domain_by_task.get((family, task_id)) is None:
            domain_by_task[family, task_id] = domain
        if agent_by_pair.get((family, model)) == agent:
            rows_by_cell.setdefault((family, task_id, model), []).append(row)
    kept: list[tuple[str, str]] = []
    dropped = {"model_missing": 0, "cost_missing": 0}
    for family, task_id in sorted(domain_by_task, key=lambda task: (families.index(task[0]), task[1])):
        cells = [rows_by_cell.get((family, task_id, model)) for model in models]
        if any(rows is None for rows in cells):
            dropped["model_missing"] += 1
        elif any(bool(np.isnan(outcomes.cost_usd[rows]).all()) for rows in cells):
            dropped["cost_missing"] += 1
        else:
            kept.append((family, task_id))
    if not kept:
        raise ConfigError(
            f"no task of {', '.join(families)} has an outcome and a cost of every model: {dropped['model_missing']}"
            f" lack a model, {dropped['cost_missing']} a cost (agents: {describe_agents(agent_by_pair)})"
        )
    return _filled(outcomes, texts, families, models, agent_by_pair, kept, domain_by_task, rows_by_cell, dropped)


def describe_agents(agents: Mapping[tuple[str, str], str]) -> str:
    """`family/model=agent, …`, as `--agents` takes it."""
    return ", ".join(f"{family}/{model}={agent}" for (family, model), agent in agents.items())


def _filled(
    outcomes: Outcomes,
    texts: Mapping[tuple[str, str], str],
    families: Sequence[str],
    models: Sequence[str],
    agents: Mapping[tuple[str, str], str],
    kept: Sequence[tuple[str, str]],
    domain_by_task: Mapping[tuple[str, str], str | None],
    rows_by_cell: Mapping[tuple[str, str, str], list[int]],
    dropped: Mapping[str, int],
) -> Stream:
    n_trials = np.array([[len(rows_by_cell[(*task, model)]) for model in models] for task in kept])  # (n, K)
    shape = (*n_trials.shape, int(n_trials.max()))
    trial_success, trial_cost_usd = np.zeros(shape), np.zeros(shape)
    success, cost_usd = np.zeros(n_trials.shape), np.zeros(n_trials.shape)
    for i, task in enumerate(kept):
        for k, model in enumerate(models):
            rows = sorted(rows_by_cell[(*task, model)], key=lambda row: int(outcomes.trial[row]))
            costs = outcomes.cost_usd[rows]
            success[i, k] = outcomes.success[rows].mean()
            cost_usd[i, k] = np.nanmean(costs)
            trial_success[i, k, : len(rows)] = outcomes.success[rows]
            trial_cost_usd[i, k, : len(rows)] = np.where(np.isnan(costs), cost_usd[i, k], costs)
    return Stream(
        families=tuple(families),
        models=tuple(models),
        agents=agents,
        task_ids=tuple(task_id for _, task_id in kept),
        family=np.array([families.index(family) for family, _ in kept], dtype=np.int64),
        domains=tuple(domain_by_task[task] for task in kept),
        texts=tuple(texts.get(task) for task in kept),
        success=success,
        cost_usd=cost_usd,
        trial_success=trial_success,
        trial_cost_usd=trial_cost_usd,
        n_trials=n_trials.astype(np.int64),
        dropped=dropped,
    )


def _take_agents(
    outcomes: Outcomes, families: Sequence[str], models: Sequence[str], agents: AgentChoice
) -> dict[tuple[str, str], str]:
    """Per pair the agent asked for, or the one that covers most tasks; ties to the first name."""
    tasks: dict[tuple[str, str], dict[str, set[str]]] = {}
    for family, model, agent, task_id in zip(
        outcomes.family, outcomes.model, outcomes.agent, outcomes.task_id, strict=True
    ):
        if model in models:
            tasks.setdefault((family, model), {}).setdefault(agent, set()).add(task_id)
    _require_named(agents, families, models, {agent for found in tasks.values() for agent in found})
    taken: dict[tuple[str, str], str] = {}
    for pair in ((family, model) for family in families for model in models):
        found = tasks.get(pair)
        if not found:
            continue
        key = agents.key_of(*pair)
        if key is None:
            among = agents.preferred & found.keys() or found.keys()
            taken[pair] = min(among, key=lambda agent, found=found: (-len(found[agent]), agent))
        elif agents.exact[key] in found:
            taken[pair] = agents.exact[key]
        else:
            raise ConfigError(
                f"agent {agents.exact[key]!r} has no outcome of model {pair[1]!r} in {pair[0]!r};"
                f" known: {', '.join(sorted(found))}"
            )
    return taken


def _require_named(agents: AgentChoice, families: Sequence[str], models: Sequence[str], known: set[str]) -> None:
    keys = {*families, *models, *(f"{family}/{model}" for family in families for model in models)}
    for key in agents.exact:
        if key not in keys:
            raise ConfigError(f"agents: {key!r} is neither a family nor a model of the stream, nor FAMILY/MODEL")
    for agent in sorted({*agents.preferred, *agents.exact.values()}):
        if agent not in known:
            raise ConfigError(f"agent {agent!r} has no outcome of these models; known: {', '.join(sorted(known))}")
