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

Coupling = Literal["independent", "comonotone", "countermonotone"]
COUPLINGS: tuple[Coupling, ...] = get_args(Coupling)

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
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = {(row["submission"], row["domain"]): row for row in pyarrow.parquet.read_table(path).to_pylist()}
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
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
