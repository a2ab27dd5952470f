"""What independent learners per slot cost on SWE-bench Verified: 1 to 96 slots, streams of 100 and of 800 tasks.

Reading: at 96 slots a stream of 100 tasks loses much of the gap between the models and one of 800 less (ORACLE,
Fig. 2b: -32 and -11 pp); delayed feedback to one learner loses little at any number in flight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from experiments.cells import PAIRS, arguments_of, record, run_cell
from loadwise.lab.feedback import FeedbackSpec

IDS = tuple(f"slots_{sample}_{n_tasks}" for sample in range(3) for n_tasks in (100, 800))
N_TASKS = 100
N_COPIES = (1, 8)
IN_FLIGHT = (1, 4, 12, 24, 48, 96)
SAMPLES = range(3)
"""Seeds of the hundred tasks drawn."""


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 30)
    cells = []
    for pair in (extreme_pair(arguments.data), PAIRS[0]):
        for n_copies in N_COPIES:
            for sample in SAMPLES:
                with drawn(arguments.data, sample, n_copies, pair) as folder:
                    for arm in ("slots", "delayed"):
                        for in_flight in IN_FLIGHT:
                            settings: dict[str, Any] = {
                                "n_orders": arguments.orders,
                                "n_passes": 1,
                                "policies": ("linucb",),
                                "cost_weights": (0.0,),
                                "seed": sample,
                                "feedback": FeedbackSpec(concurrency=arm, in_flight=in_flight),  # type: ignore[arg-type]
                            }
                            name = f"{'/'.join(pair)} {n_copies * N_TASKS} {sample} {arm} {in_flight}"
                            ids = f"slots_{sample}_{n_copies * N_TASKS}"
                            cells.append(run_cell(name, folder, ("swe",), pair, ids=ids, **settings))
    record("slots", cells, table(cells))


def extreme_pair(data: Path) -> tuple[str, str]:
    """The models of lowest and of highest mean success, so that a wrong choice costs most."""
    rows = pq.read_table(data / "outcomes" / "swe_mini.parquet", columns=["model", "success", "cost_usd"])
    rows = rows.filter(pc.is_valid(rows["cost_usd"]))
    means = rows.group_by("model").aggregate([("success", "mean")]).sort_by([("success_mean", "ascending")])
    names = means["model"].to_pylist()
    return names[0], names[-1]


@contextmanager
def drawn(data: Path, sample: int, n_copies: int, pair: Sequence[str]) -> Iterator[Path]:
    """A folder with `N_TASKS` seeded tasks of SWE-bench Verified, each `n_copies` times under a name of its own."""
    outcomes = pq.read_table(data / "outcomes" / "swe_mini.parquet")
    outcomes = outcomes.filter(pc.is_in(outcomes["model"], pa.array(pair)))
    tasks = pq.read_table(data / "tasks" / "swe.parquet")
    ids = np.array(sorted(set(outcomes["task_id"].to_pylist())))
    chosen = pa.array(np.random.default_rng(sample).choice(ids, N_TASKS, replace=False).tolist())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for place, table in (("outcomes", outcomes), ("tasks", tasks)):
            (folder / place).mkdir()
            pq.write_table(
                copies(table.filter(pc.is_in(table["task_id"], chosen)), n_copies), folder / place / "swe.parquet"
            )
        yield folder


def copies(table: pa.Table, n_copies: int) -> pa.Table:
    """The rows `n_copies` times; a task's copies are tasks of their own."""
    at = table.column_names.index("task_id")
    ids = table["task_id"].cast(pa.string())
    found = [
        table.set_column(at, "task_id", pc.binary_join_element_wise(ids, f"{copy}", "#")) for copy in range(n_copies)
    ]
    return pa.concat_tables(found)


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Mean success over the samples, and what is lost against one in flight."""
    found: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for cell in cells:
        pair, n_tasks, _, arm, in_flight = cell["cell"].split(" ")
        success = next(100.0 * one["success"] for one in cell["points"] if one["policy"] == "linucb")
        found.setdefault((pair, n_tasks, arm), {}).setdefault(int(in_flight), []).append(success)
    lines = [
        f"Success over the whole stream at cost weight 0, %, mean of {len(SAMPLES)} samples of tasks; in brackets the"
        " difference to 1 in flight, pp.",
        "",
        f"| models | tasks | arm | {' | '.join(map(str, IN_FLIGHT))} |",
        "| --- | ---: | --- |" + " ---: |" * len(IN_FLIGHT),
    ]
    for (pair, n_tasks, arm), by_flight in found.items():
        first = float(np.mean(by_flight[IN_FLIGHT[0]]))
        shown = [f"{np.mean(by_flight[c]):.1f} ({np.mean(by_flight[c]) - first:+.1f})" for c in IN_FLIGHT]
        lines.append(f"| {pair} | {n_tasks} | {arm} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
