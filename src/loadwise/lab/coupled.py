"""Joint outcomes of models whose results are published apart: constructed, not measured.

A leaderboard publishes for each model how many tasks it solved in 0 to 4 of 4 trials, not which. Three ways to join
such margins bound what a router could gain from them:

    independent   each model's counts are dealt to the tasks by chance
    comonotone    the tasks that one model solves most often the other solves most often too: least to gain
    countermonotone  the other solves them least often: most to gain

The rows say `constructed-…` for an agent, and their tasks have no text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams

from .outcomes import Outcomes, read_outcomes, read_texts
from .stream import AgentChoice, Stream, make_stream

Coupling = Literal["independent", "comonotone", "countermonotone"]
COUPLINGS: tuple[Coupling, ...] = get_args(Coupling)

FAMILY = "tau2"
MARGINS = "tau2_marginals.parquet"
"""In a folder of outcomes: the leaderboard."""
N_TRIALS = 4
ROUNDING_ERROR_MAX = 0.2
"""A margin whose counts do not add up better than this was published too coarsely."""


class Margin(NamedTuple):
    """One model on one domain."""

    domain: str
    n_solved: npt.NDArray[np.int64]
    """Trials solved of each task, falling, shape (n_tasks,)."""
    cost_usd: float
    """Mean per task, the same for every task: nothing else is published."""


def read_margins(path: Path, submission: str, domains: Sequence[str]) -> list[Margin]:
    """The margins of one submission, by domain.

    Raises:
        ConfigError: the file lacks the submission in a domain, its counts are too coarse, or its cost is unknown.
    """
    rows = {(row["submission"], row["domain"]): row for row in _rows(path)}
    margins = []
    for domain in domains:
        row = rows.get((submission, domain))
        if row is None:
            raise ConfigError(f"{str(path)!r} has no submission {submission!r} in domain {domain!r}")
        margins.append(_margin(row, submission, domain))
    return margins


def _margin(row: Mapping[str, Any], submission: str, domain: str) -> Margin:
    error, cost_usd = row["rounding_error"], row["cost_usd"]
    if error is None or not error < ROUNDING_ERROR_MAX:
        raise ConfigError(
            f"{submission!r} in {domain!r}: rounding_error is {error!r}; the limit is {ROUNDING_ERROR_MAX}"
        )
    if cost_usd is None or not cost_usd > 0.0:
        raise ConfigError(f"{submission!r} in {domain!r}: cost_usd is {cost_usd!r}; it must be > 0")
    counts = [round(row[f"tasks_{k}of4"]) for k in range(N_TRIALS + 1)]
    solved = np.repeat(np.arange(N_TRIALS + 1), counts)[::-1].astype(np.int64)
    return Margin(domain, solved, float(cost_usd))


def join(
    margins_by_model: Mapping[str, Sequence[Margin]], family: str, coupling: Coupling, seed: int
) -> list[dict[str, object]]:
    """Rows of the outcomes format for models joined by `coupling`.

    Args:
        margins_by_model: the same domains, in the same order, for every model. With `countermonotone` every second
            model runs against the first.

    Raises:
        ConfigError: the models do not have the same domains with the same number of tasks, or an unknown coupling.
    """
    if coupling not in COUPLINGS:
        raise ConfigError(f"coupling {coupling!r} is unknown; known: {', '.join(COUPLINGS)}")
    shapes = {model: [(one.domain, len(one.n_solved)) for one in found] for model, found in margins_by_model.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ConfigError(f"models have other domains or numbers of tasks: {shapes}")
    streams = Streams(seed)
    rows: list[dict[str, object]] = []
    for place, (model, margins) in enumerate(margins_by_model.items()):
        rng = streams.at("join", place)
        for margin in margins:
            n_solved = margin.n_solved
            if coupling == "independent":
                n_solved = rng.permutation(n_solved)
            elif coupling == "countermonotone" and place % 2:
                n_solved = n_solved[::-1]
            for task, count in enumerate(n_solved.tolist()):
                solved = rng.permutation(np.arange(N_TRIALS) < count)
                for trial, success in enumerate(solved.tolist()):
                    rows.append(
                        {
                            "task_id": f"constructed-{margin.domain}-{task:03}",
                            "family": family,
                            "domain": margin.domain,
                            "model": model,
                            "agent": f"constructed-{coupling}",
                            "trial": trial,
                            "success": float(success),
                            "cost_usd": margin.cost_usd,
                        }
                    )
    return rows


def write_outcomes(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """One outcomes file."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)


def read_coupled_stream(
    folder: Path,
    families: Sequence[str],
    models: Sequence[str],
    agents: AgentChoice,
    submissions: Mapping[str, str],
    coupling: Coupling,
    seed: int = 0,
) -> Stream:
    """The stream of a folder whose family `tau2` is constructed from `tau2_marginals.parquet` instead of read.

    Args:
        submissions: by model the submission of the leaderboard that stands for it.

    Raises:
        ConfigError: `tau2` is not among the families, a model has no submission, or `read_margins` refuses one.
    """
    if FAMILY not in families:
        raise ConfigError(f"submissions are named, but {FAMILY!r} is not in the stream {', '.join(families)}")
    for model in models:
        if model not in submissions:
            raise ConfigError(f"model {model!r} has no submission; known: {', '.join(sorted(submissions))}")
    for model in submissions:
        if model not in models:
            raise ConfigError(f"submission of {model!r}: the stream has {', '.join(models)}")
    path = folder / MARGINS
    domains = shared_domains(path, [submissions[model] for model in models])
    margins = {model: read_margins(path, submissions[model], domains) for model in models}
    outcomes = _as_outcomes(join(margins, FAMILY, coupling, seed))
    measured = [family for family in families if family != FAMILY]
    if measured:
        outcomes = _joined(read_outcomes(folder, measured, models), outcomes)
    return make_stream(outcomes, read_texts(folder, measured), families, models, agents)


def shared_domains(path: Path, submissions: Sequence[str]) -> list[str]:
    """The domains in which every one of the submissions is published finely enough, with a cost.

    Raises:
        ConfigError: the file cannot be read, a submission is unknown, or there is no such domain.
    """
    rows = _rows(path)
    known = {row["submission"] for row in rows}
    for submission in submissions:
        if submission not in known:
            raise ConfigError(f"{str(path)!r} has no submission {submission!r}; known: {', '.join(sorted(known))}")
    usable = {
        (row["submission"], row["domain"])
        for row in rows
        if row["rounding_error"] is not None and row["rounding_error"] < ROUNDING_ERROR_MAX and row["cost_usd"]
    }
    domains = sorted({row["domain"] for row in rows})
    found = [domain for domain in domains if all((one, domain) in usable for one in submissions)]
    if not found:
        raise ConfigError(f"{str(path)!r} has no domain in which {', '.join(submissions)} are all published finely")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("margins need pyarrow, which is not installed: pip install 'loadwise[lab]'") from error
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist; submissions are read from it")
    names = ["submission", "domain", "rounding_error", "cost_usd", *(f"tasks_{k}of4" for k in range(N_TRIALS + 1))]
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, columns=names).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
    if rows and (missing := [name for name in names if name not in rows[0]]):
        raise ConfigError(f"{str(path)!r} lacks column {missing[0]!r}")
    return rows


def _as_outcomes(rows: Sequence[Mapping[str, Any]]) -> Outcomes:
    return Outcomes(
        task_id=[row["task_id"] for row in rows],
        family=[row["family"] for row in rows],
        domain=[row["domain"] for row in rows],
        model=[row["model"] for row in rows],
        agent=[row["agent"] for row in rows],
        trial=np.array([row["trial"] for row in rows], dtype=np.int64),
        success=np.array([row["success"] for row in rows], dtype=np.float64),
        cost_usd=np.array([row["cost_usd"] for row in rows], dtype=np.float64),
    )


def _joined(one: Outcomes, other: Outcomes) -> Outcomes:
    return Outcomes(
        task_id=one.task_id + other.task_id,
        family=one.family + other.family,
        domain=one.domain + other.domain,
        model=one.model + other.model,
        agent=one.agent + other.agent,
        trial=np.concatenate([one.trial, other.trial]),
        success=np.concatenate([one.success, other.success]),
        cost_usd=np.concatenate([one.cost_usd, other.cost_usd]),
    )
