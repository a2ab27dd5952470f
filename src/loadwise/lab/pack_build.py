"""`loadwise pack build`: an outcome table becomes an experience pack.

Theory of operation. Within each family an item response model (`lab.irt`) tells strong models from easy tasks; log
costs are a level per model plus an effort per task. What a middling model would reach and pay on each task is then
regressed on the task's text by ridge regression over all families (`lab.pack_text`), so that it can be said of a task
never seen. What the text does not explain becomes a baseline of the family and of the domain, each shrunk by how many
tasks speak for it. Models keep, per family, what they reach beyond a middling one, and what they pay.

References: `lab.irt`; ridge and leave-one-out as in A. Hoerl and R. Kennard, Technometrics 12, 1970; shrinkage of
domains to their family as in C. Morris, JASA 78, 1983 (parametric empirical Bayes).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise import __version__
from loadwise.kernel.errors import ConfigError

from .irt import Items, fit_costs, fit_items
from .outcomes import Outcomes
from .pack import (
    DOMAINS_MAX,
    FAMILIES_MAX,
    FORMAT,
    MODELS_MAX,
    VERSION,
    Ability,
    Baseline,
    Pack,
    Provenance,
    task_mark,
)
from .pack_text import TextFit, Vectors, fit_text

Array = npt.NDArray[np.float64]
Task = tuple[str, str]
"""Family and id."""

COST_MIN_USD = 1e-6
"""A cheaper run counts as this: the log of a free one says nothing."""
DOMAIN_COUNT = 12.0
"""Tasks of a family's kind that stand against a domain's own."""
EVIDENCE_COUNT = 2.0
"""Models that a task must have met to weigh half as much as one that all have met."""
LOGIT_MAX = 6.0


class BuildConfig(NamedTuple):
    """What a pack is to be fitted on."""

    families: Sequence[str]
    models: Sequence[str] | None = None
    """None: all."""
    excluded_models: Sequence[str] = ()
    tasks: frozenset[Task] | None = None
    """None: all."""
    licence: str = "unknown"


class Family(NamedTuple):
    """The runs of one family as respondents by tasks."""

    name: str
    task_ids: list[str]
    domains: list[str | None]
    respondents: list[tuple[str, str]]
    """Model and agent."""
    success: Array
    trials: Array
    cost_usd: Array
    """NaN where unknown."""


class Effort(NamedTuple):
    """What tasks and models cost."""

    log_g: dict[str, Array]
    """Per family, shape (T,): log of what each task costs a middling model over the mean."""
    usd: dict[tuple[str, str], float]
    """Per (model, family): dollars per unit of g."""


def build_pack(
    outcomes: Outcomes, texts: Mapping[Task, str], config: BuildConfig, vectors: Vectors | None, embedder: str
) -> Pack:
    """Fit a pack.

    Args:
        vectors: the embedder's vectors of texts; None reads marks and words alone.
        embedder: its version, or `none`.

    Raises:
        ConfigError: nothing is left to fit on, or there is more than a pack holds.
    """
    families = [one for name in config.families if (one := _family(outcomes, config, name)) is not None]
    if not families:
        raise ConfigError(f"no run of {', '.join(config.families)} is left to fit a pack on")
    items = {one.name: fit_items(one.success, one.trials) for one in families}
    effort = _efforts(families)
    success_logit = {name: np.clip(fit.middling_logit(), -LOGIT_MAX, LOGIT_MAX) for name, fit in items.items()}
    text = fit_text(_rows(families, texts, success_logit, effort.log_g), vectors)
    baselines, domains = _baselines(families, texts, success_logit, effort.log_g, text)
    models: dict[str, dict[str, Ability]] = {}
    for one in families:
        for model, ability in _abilities(one, items[one.name], effort).items():
            models.setdefault(model, {})[one.name] = ability
    for what, n, limit in (
        ("families", len(baselines), FAMILIES_MAX),
        ("domains", len(domains), DOMAINS_MAX),
        ("models", len(models), MODELS_MAX),
    ):
        if n > limit:
            raise ConfigError(f"the outcomes have {n} {what}; a pack holds {limit}")
    return Pack(
        format=FORMAT,
        version=VERSION,
        licence=config.licence,
        provenance=_provenance(families, models, config),
        embedder=embedder if text is not None and vectors is not None else "none",
        families=baselines,
        domains=domains,
        models={name: models[name] for name in sorted(models)},
        text=None if text is None else text.model,
    )


def _family(outcomes: Outcomes, config: BuildConfig, family: str) -> Family | None:
    excluded, wanted = set(config.excluded_models), None if config.models is None else set(config.models)
    tasks: dict[str, int] = {}
    domains: list[str | None] = []
    respondents: dict[tuple[str, str], int] = {}
    rows: list[tuple[int, int, float, float]] = []
    columns = (outcomes.family, outcomes.task_id, outcomes.domain, outcomes.model, outcomes.agent)
    numbers = (outcomes.success.tolist(), outcomes.cost_usd.tolist())
    for name, task_id, domain, model, agent, success, cost in zip(*columns, *numbers, strict=True):
        if name != family or model in excluded or (wanted is not None and model not in wanted):
            continue
        if config.tasks is not None and (family, task_id) not in config.tasks:
            continue
        if task_id not in tasks:
            tasks[task_id] = len(tasks)
            domains.append(domain)
        respondent = respondents.setdefault((model, agent), len(respondents))
        rows.append((respondent, tasks[task_id], success, cost))
    if not rows:
        return None
    return _gathered(family, list(tasks), domains, list(respondents), rows)


def _gathered(
    family: str,
    task_ids: list[str],
    domains: list[str | None],
    respondents: list[tuple[str, str]],
    rows: Sequence[tuple[int, int, float, float]],
) -> Family:
    shape = (len(respondents), len(task_ids))
    r, t = (np.array([row[place] for row in rows], dtype=np.int64) for place in (0, 1))
    success, cost = (np.array([row[place] for row in rows], dtype=np.float64) for place in (2, 3))
    wins, trials, spent, paid = (np.zeros(shape) for _ in range(4))
    np.add.at(wins, (r, t), success)
    np.add.at(trials, (r, t), 1.0)
    told = np.isfinite(cost)
    np.add.at(spent, (r[told], t[told]), cost[told])
    np.add.at(paid, (r[told], t[told]), 1.0)
    mean = np.divide(wins, trials, out=np.zeros(shape), where=trials > 0)
    usd = np.divide(spent, paid, out=np.full(shape, np.nan), where=paid > 0)
    return Family(family, task_ids, domains, respondents, mean, trials, usd)


def _efforts(families: Sequence[Family]) -> Effort:
    """log cost = level of the model + its own in the family + level of the family + effort of the task."""
    fits = {one.name: fit_costs(np.log(np.maximum(one.cost_usd, COST_MIN_USD))) for one in families}
    level: dict[tuple[str, str], list[float]] = {}
    for one in families:
        for (model, _), value in zip(one.respondents, fits[one.name].level.tolist(), strict=True):
            if np.isfinite(value):
                level.setdefault((model, one.name), []).append(value)
    means = {key: float(np.mean(values)) for key, values in level.items()}
    of_family = _family_levels(means)
    log_g: dict[str, Array] = {}
    smear: dict[str, float] = {}
    for one in families:
        effort = fits[one.name].effort
        ratio = np.exp(np.log(np.maximum(one.cost_usd, COST_MIN_USD)) - fits[one.name].level[:, None])
        known = np.isfinite(ratio)
        by_task = np.where(known, ratio, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        # The mean of costs, not the median: a few runs cost many times the usual, and are paid all the same.
        paid = by_task[known.any(axis=0)]
        smear[one.name] = float(np.log(paid.mean() / np.exp(effort[known.any(axis=0)]).mean())) if len(paid) else 0.0
        log_g[one.name] = effort + of_family.get(one.name, 0.0) + smear[one.name]
    shift = float(np.log(np.mean([np.exp(values).mean() for values in log_g.values()])))
    usd = {key: float(np.exp(value - of_family.get(key[1], 0.0) + shift)) for key, value in means.items()}
    return Effort({name: values - shift for name, values in log_g.items()}, usd)


def _family_levels(means: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Two-way fit over models that ran several families: what a family costs over the others, in logs."""
    models, names = sorted({model for model, _ in means}), sorted({family for _, family in means})
    if not names:
        return {}
    table = np.full((len(models), len(names)), np.nan)
    for (model, family), value in means.items():
        table[models.index(model), names.index(family)] = value
    fit = fit_costs(table, shrink=0.0)
    return dict(zip(names, fit.effort.tolist(), strict=True))


def _rows(
    families: Sequence[Family], texts: Mapping[Task, str], logit: Mapping[str, Array], log_g: Mapping[str, Array]
) -> list[tuple[str, float, float, float]]:
    """Text, weight, and both targets of each task whose text is known."""
    rows = []
    for one in families:
        met = (one.trials > 0).sum(axis=0)
        weight = met / (met + EVIDENCE_COUNT)
        for place, task_id in enumerate(one.task_ids):
            text = texts.get((one.name, task_id))
            if text is not None and text.strip():
                told = (float(weight[place]), float(logit[one.name][place]), float(log_g[one.name][place]))
                rows.append((text, *told))
    return rows


def _baselines(
    families: Sequence[Family],
    texts: Mapping[Task, str],
    logit: Mapping[str, Array],
    log_g: Mapping[str, Array],
    text: TextFit | None,
) -> tuple[dict[str, Baseline], dict[str, Baseline]]:
    """What families, and domains beyond their families, are worth beyond what their texts say."""
    of_family: dict[str, Baseline] = {}
    of_domain: dict[str, Baseline] = {}
    at = 0
    for one in families:
        is_read = np.array([bool((texts.get((one.name, task_id)) or "").strip()) for task_id in one.task_ids])
        said = np.zeros((2, len(one.task_ids)))
        if text is not None:
            n_read = int(is_read.sum())
            said[:, is_read] = text.left_out[at : at + n_read].T
            at += n_read
        targets = np.stack([logit[one.name], log_g[one.name]])
        everywhere = np.ones(len(is_read), dtype=np.bool_)
        read = is_read if text is not None and is_read.any() else everywhere
        bases = [(targets - said)[:, read].mean(axis=1), targets.mean(axis=1)]
        # The mean of costs again, for what is predicted varies less than what happens.
        for base, seen, where in ((bases[0], said, read), (bases[1], np.zeros_like(said), everywhere)):
            predicted = np.exp(seen[1, where] + base[1]).mean()
            base[1] += float(np.log(np.exp(targets[1, where]).mean() / predicted))
        of_family[one.name] = _baseline(int(everywhere.sum()), *bases)
        for domain in sorted({name for name in one.domains if name is not None}):
            inside = np.array([name == domain for name in one.domains])
            parts = []
            for base, seen, where in ((bases[0], said, read), (bases[1], np.zeros_like(said), everywhere)):
                found = (targets - seen - base[:, None])[:, inside & where]
                parts.append(found.sum(axis=1) / (found.shape[1] + DOMAIN_COUNT))
            of_domain[f"{one.name}/{domain}"] = _baseline(int(inside.sum()), *parts)
    return of_family, of_domain


def _baseline(n_tasks: int, read: Array, blind: Array) -> Baseline:
    return Baseline(
        n_tasks=n_tasks,
        success=float(read[0]),
        cost=float(read[1]),
        success_blind=float(blind[0]),
        cost_blind=float(blind[1]),
    )


def _abilities(one: Family, items: Items, effort: Effort) -> dict[str, Ability]:
    """Per model the mean over its agents."""
    middling = items.chance(0.0).mean()
    found: dict[str, list[tuple[float, int]]] = {}
    for (model, _), ability, trials in zip(one.respondents, items.ability.tolist(), one.trials, strict=True):
        beyond = float(items.chance(ability).mean() - middling)
        found.setdefault(model, []).append((beyond, int((trials > 0).sum())))
    return {
        model: Ability(
            n_tasks=max(n for _, n in parts),
            success=float(np.clip(np.average([v for v, _ in parts], weights=[n for _, n in parts]), -1.0, 1.0)),
            cost_usd=effort.usd.get((model, one.name)),
        )
        for model, parts in found.items()
    }


def _provenance(families: Sequence[Family], models: Mapping[str, object], config: BuildConfig) -> Provenance:
    marks = sorted(task_mark(one.name, task_id) for one in families for task_id in one.task_ids)
    return Provenance(
        n_runs=int(sum(one.trials.sum() for one in families)),
        n_tasks=len(marks),
        models=tuple(sorted(models)),
        excluded_models=tuple(sorted(config.excluded_models)),
        tasks=tuple(marks),
        made_by=f"loadwise {__version__}",
    )
