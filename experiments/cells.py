"""Cells of the replay experiments: folders of outcomes, one replay per cell, and a record that can be checked.

Outcomes lie beside the repository and are not part of it; what is recorded here are aggregates, with seed, commit and
the hash of the task list. τ²-bench publishes no joint outcomes: its rows are constructed from published margins.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadwise.lab.coupled import Coupling, join, read_margins, write_outcomes
from loadwise.lab.experiment import ReplayConfig, Result, run_replay
from loadwise.lab.report import as_json
from loadwise.lab.task_lists import TaskLists

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "experiments" / "results"
IDS_FOLDER = ROOT / "experiments" / "ids"

NO_IDS = {"list": None, "why": "programs are drawn by seed; no measured task is in it"}
"""What a result of a simulated world says instead of a list."""

TAU2_DOMAINS = ("airline", "retail", "telecom")
TAU2_SUBMISSION = {
    "gpt-5": "gpt-5_sierra_2025-08-09",
    "claude-sonnet-4.5": "claude-sonnet-4-5_sierra_2026-02-26",
    # The leaderboard has no gpt-5-mini with a cost: GPT-5.2 without reasoning stands in for a small model.
    "gpt-5-mini": "gpt-5-2-none_sierra_2026-02-26",
}
"""Our model names to submissions of the τ²-bench leaderboard."""
PAIRS = (("gpt-5-mini", "claude-sonnet-4.5"), ("gpt-5", "claude-sonnet-4.5"))
CRB_MODELS = [
    "claude-opus-4-6",
    "claude-sonnet-4-6",
    "glm-5",
    "gpt-5.4",
    "kimi-k2.5",
    "minimax-m2.7",
    "qwen3-max",
    "qwen3.5-plus",
]


LIST_BY_FAMILY = {"tau2": "tau2_constructed"}
"""Committed lists that are not named as their family."""


def list_of(families: Sequence[str]) -> str:
    """The committed list of a stream of whole families."""
    return "+".join(LIST_BY_FAMILY.get(family, family) for family in families)


STREAMS = {
    "fig5": ("tau2", "swe", "terminal2"),
    "fig9": ("tau2", "swe"),
    "fig10": ("swe", "terminal2"),
}
"""The paper's streams, by the figure that shows each."""


def arguments_of(description: str | None, n_orders: int) -> argparse.Namespace:
    """What every experiment may be told: where the outcomes are, and how many orders to run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured outcomes")
    parser.add_argument("--orders", type=int, default=n_orders)
    only = "run the cells with this in their name, take the others as they are recorded (where the script can)"
    parser.add_argument("--only", metavar="PART", help=only)
    return parser.parse_args()


@contextmanager
def with_tau2(data: Path, models: Sequence[str], coupling: Coupling) -> Iterator[Path]:
    """A folder with the measured SWE and Terminal-Bench outcomes and τ² constructed under one coupling."""
    margins = {
        model: read_margins(data / "tau2_marginals.parquet", TAU2_SUBMISSION[model], TAU2_DOMAINS) for model in models
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "outcomes").mkdir()
        for file in ("swe_mini", "terminal2"):
            (folder / "outcomes" / f"{file}.parquet").symlink_to((data / "outcomes" / f"{file}.parquet").resolve())
        (folder / "tasks").symlink_to((data / "tasks").resolve())
        write_outcomes(join(margins, "tau2", coupling, 0), folder / "outcomes" / "tau2_constructed.parquet")
        yield folder


def run_cell(
    name: str,
    folder: Path,
    families: Sequence[str],
    models: Sequence[str],
    *,
    ids: str,
    add: Callable[[Result], Mapping[str, Any]] = lambda _: {},
    **more: Any,
) -> dict[str, Any]:
    """One replay as its JSON object, under a name; says what it found.

    Args:
        ids: the committed list of its tasks.
        add: what else is recorded of the replay.
    """
    config = ReplayConfig(outcomes=str(folder), families=tuple(families), models=tuple(models), **more)
    replayed = run_replay(config)
    result = {**as_json(replayed), **add(replayed)}
    result["config"].pop("outcomes")  # a path of this machine
    result["machine"] = {key: result["machine"][key] for key in ("cores", "python")}
    print(f"{name}: {result['n_tasks']} tasks")
    for figure, value in result["values"].items():
        low, high = result["ci95"][figure]
        print(f"  {figure} {value:+.2f} [{low:+.2f}, {high:+.2f}]", flush=True)
    return {"cell": name, "ids": ids_of(ids, result["config"]["task_ids_sha256"]), **result}


def ids_of(name: str, sha256: str) -> dict[str, Any]:
    """What a result says of its committed list: its name, its hash, and the halves that chose settings.

    Other outcomes (`--data`) may have other tasks: then the list is null, and the result is not one to commit.
    """
    lists = TaskLists(IDS_FOLDER)
    if lists.sha256(name) != sha256:
        print(f"these are not the tasks of list {name!r}: their SHA-256 is {sha256}")
        return {"list": None, "sha256": sha256}
    found: dict[str, Any] = {"list": name, "sha256": sha256}
    halvings = lists.index.splits.get(f"{name}.halvings")
    return found if halvings is None else {**found, "halvings_sha256": halvings.sha256}


def record(script: str, cells: Sequence[Mapping[str, Any]], table: str) -> None:
    """Write `results/SCRIPT.json` and `.md`."""
    RESULTS.mkdir(exist_ok=True)
    rounded = json.loads(json.dumps(cells), parse_float=lambda text: round(float(text), 6))
    lines = ",\n".join(json.dumps(cell) for cell in rounded)  # a cell a line: changes of one show as one
    (RESULTS / f"{script}.json").write_text(f"[\n{lines}\n]\n")
    (RESULTS / f"{script}.md").write_text(table)
    print(table)


def recorded(script: str) -> dict[str, dict[str, Any]]:
    """The cells of `results/SCRIPT.json`, by name."""
    return {cell["cell"]: cell for cell in json.loads((RESULTS / f"{script}.json").read_text())}


def shown(cell: Mapping[str, Any], figure: str) -> str:
    """A figure with its interval, for a table."""
    if figure not in cell["values"]:
        return ""
    low, high = cell["ci95"][figure]
    return f"{cell['values'][figure]:+.1f} [{low:+.1f}, {high:+.1f}]"
