"""When does another attempt on another model pay? Ladders learned from noisy verdicts against none and a fixed one.

Reading: at every point of false-pass and false-fail rates the learned ladder is not below never escalating by more than
0.5 pp and at least the fixed cascade, each granted the same mean cost and attempts (the best lottery over its own
operating points that spends no more of either); on the stream that mixes types it is at least 1 pp above both at .1/.1.

Modes: `known` rates are configured as they are; `unknown` none are, the ladder guards against the worst up to .3;
`assumed` .1/.1 is configured whatever they are; `audited` none are, and the truth of 5 % of the attempts is told 50
decisions later. The cost weight is chosen on one half of the tasks and scored on the other, both ways, over ten
halvings.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cells import PAIRS, RESULTS, arguments_of, ids_of, record
from loadwise.kernel.streams import Streams
from loadwise.lab.bootstrap import interval, task_draws
from loadwise.lab.features import make_contexts
from loadwise.lab.judge import halving
from loadwise.lab.ladder import Baselines, Climbed, Noise, best_mix, cascade_of, replay_ladder
from loadwise.lab.replay import World
from loadwise.lab.report import commit
from loadwise.lab.stream import AgentChoice, Stream, read_stream
from loadwise.lab.task_lists import task_digest

IDS = ("swe+terminal2", "swe_mixed+terminal2+bfcl_mixed")
RATES = (0.0, 0.1, 0.2, 0.3)
WEIGHTS = (0.0, 0.1, 0.25, 0.5)
N_HALVINGS, N_DRAWS = 10, 2000

MIXED_TASKS = 300
MIXED = {
    "swe": ("swe_mini", "gpt-5-mini", "claude-sonnet-4.5"),
    "terminal2": ("terminal2", "gpt-5-mini", "claude-sonnet-4.5"),
    "bfcl": ("bfcl", "gemini-1.0-pro", "gpt-4o-2024-08-06"),
}
"""Family -> file, and who plays `small` and `large` there. In the last one the dearer model fails on the format."""


@contextmanager
def mixed_folder(data: Path) -> Iterator[Path]:
    """Measured outcomes under two roles; costs scaled so that `large` costs the same per task in every family.

    Constructed: no two models have run all of these. `MIXED_TASKS` tasks of a family at most, the first by hash.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["task_id", "family", "domain", "model", "agent", "trial", "success", "cost_usd"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "outcomes").mkdir()
        for family, (file, small, large) in MIXED.items():
            role = {small: "small", large: "large"}
            rows = [
                {**row, "model": role[row["model"]]}
                for row in pq.read_table(data / "outcomes" / f"{file}.parquet", columns=columns).to_pylist()
                if row["family"] == family and row["model"] in role
            ]
            ids = sorted(
                {row["task_id"] for row in rows}, key=lambda one: hashlib.sha256(f"{family}\t{one}".encode()).digest()
            )
            kept = frozenset(ids[:MIXED_TASKS])
            rows = [row for row in rows if row["task_id"] in kept]
            costs = [row["cost_usd"] for row in rows if row["model"] == "large" and row["cost_usd"] is not None]
            scale = len(costs) / sum(costs)
            rows = [{**row, "cost_usd": None if row["cost_usd"] is None else row["cost_usd"] * scale} for row in rows]
            pq.write_table(pa.Table.from_pylist(rows), folder / "outcomes" / f"{family}.parquet")
        yield folder


class Held(NamedTuple):
    """A replay and what it is held against, by task."""

    climbed: Climbed
    never: Baselines
    cascade: Baselines


def gains(held: Held, shares: np.ndarray, ours: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """Over never escalating and over the cascade, in pp, under each weighting of tasks; shape (draws, 2)."""
    success, cost, attempts = (shares @ one for one in ours)
    found = []
    for ways in (held.never, held.cascade):
        best = best_mix(shares @ ways.success, shares @ ways.cost_usd, shares @ ways.n_attempts, cost, attempts)
        found.append(100.0 * (success - best))
    return np.column_stack(found)


def crossed(held: Held, stream: Stream, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each halving the tasks under the cost weight that did best on the other half."""
    fits = []
    for _ in range(N_HALVINGS):
        is_second = halving(stream.family, rng)
        place = np.zeros(stream.n_tasks, dtype=int)
        for chosen_on in (is_second, ~is_second):
            share = (chosen_on / chosen_on.sum())[None]
            worth = [gains(held, share, at(held.climbed, k)).min() for k in range(len(WEIGHTS))]
            place[~chosen_on] = int(np.argmax(worth))
        tasks = np.arange(stream.n_tasks)
        parts = (held.climbed.success, held.climbed.cost_usd, held.climbed.n_attempts)
        fits.append(tuple(part[place, tasks] for part in parts))
    return fits


def at(climbed: Climbed, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One cost weight's success, cost and attempts by task."""
    return climbed.success[place], climbed.cost_usd[place], climbed.n_attempts[place]


def run_cell(name: str, world: World, noise: Noise, n_orders: int) -> dict[str, Any]:
    """One replay, judged."""
    stream = world.stream
    climbed = replay_ladder(world, noise, WEIGHTS, n_orders)
    ones = np.ones((stream.n_tasks, len(WEIGHTS) + len(stream.models)))
    never = Baselines(
        np.column_stack([climbed.first_success.T, stream.success]),
        np.column_stack([climbed.first_cost_usd.T, stream.cost_usd]),
        ones,
    )
    held = Held(climbed, never, cascade_of(world, noise))
    even = np.full((1, stream.n_tasks), 1.0 / stream.n_tasks)
    rng = world.streams.at("bootstrap", 0)
    fits = crossed(held, stream, rng)
    value = np.mean([gains(held, even, fit) for fit in fits], axis=0)[0]
    drawn = np.concatenate(
        [np.mean([gains(held, draw, fit) for fit in fits], axis=0) for draw in task_draws(stream.family, N_DRAWS, rng)]
    )
    by_weight = [gains(held, even, at(climbed, place))[0] for place in range(len(WEIGHTS))]
    keys = ("over_never_pp", "over_cascade_pp")
    result = {
        "cell": name,
        "ids": ids_of(IDS["mixed" in name], task_digest(stream.tasks)),
        "commit": commit(),
        "n_tasks": stream.n_tasks,
        "task_ids_sha256": task_digest(stream.tasks),
        "n_orders": n_orders,
        "n_passes": world.n_passes,
        "seed": world.streams.seed,
        "values": dict(zip(keys, value.tolist(), strict=True)),
        "ci95": {key: list(interval(drawn[:, place])) for place, key in enumerate(keys)},
        "points": [
            {
                "cost_weight": weight,
                "success": float(climbed.success[place].mean()),
                "cost_usd": float(climbed.cost_usd[place].mean()),
                "n_attempts": float(climbed.n_attempts[place].mean()),
                "first_success": float(climbed.first_success[place].mean()),
                **dict(zip(keys, by_weight[place].tolist(), strict=True)),
            }
            for place, weight in enumerate(WEIGHTS)
        ],
    }
    shown = ", ".join(f"{key} {result['values'][key]:+.2f} {np.round(result['ci95'][key], 2).tolist()}" for key in keys)
    print(f"{name}: {shown}", flush=True)
    return result


def cells_of(name: str, stream: Stream, n_orders: int) -> Iterator[dict[str, Any]]:
    """Every cell of one stream."""
    contexts = make_contexts(stream, "none", 0)
    diagonal = [(rate, rate) for rate in RATES]
    plan: list[tuple[str, Sequence[tuple[float, float]], int, int]] = [
        (
            "unknown",
            [(p, f) for p in RATES for f in RATES] if name != "mixed" else [*diagonal, (0.0, 0.3), (0.3, 0.0)],
            1,
            1,
        ),
        ("known", [(p, f) for p in RATES for f in RATES] if name != "mixed" else diagonal, 1, 1),
    ]
    if name != "mixed":
        plan += [("assumed", diagonal, 1, 1), ("audited", diagonal, 1, 1), ("known", diagonal, 8, 10)]
    for mode, points, n_passes, fewer in plan:
        world = World(stream, contexts, n_passes, Streams(0))
        for false_pass, false_fail in points:
            told = {"known": (false_pass, false_fail), "assumed": (0.1, 0.1)}.get(mode)
            noise = Noise(false_pass, false_fail, told, 0.05 if mode == "audited" else 0.0)
            cell = f"{name} {n_passes} {mode} {false_pass:g} {false_fail:g}"
            yield run_cell(cell, world, noise, max(n_orders // fewer, 1))


def as_table(cells: Sequence[dict[str, Any]]) -> str:
    """Gains as Markdown."""
    lines = [
        "Success over never escalating and over the fixed cascade, pp, each at no more cost and attempts; the cost",
        "weight is chosen on the other half of the tasks. Worst: the lower of the two at the worst of the cost weights"
        f" {', '.join(f'{weight:g}' for weight in WEIGHTS)}.",
        "",
        "| stream | passes | rates | false pass | false fail | over never | over cascade | worst |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        stream, passes, mode, false_pass, false_fail = cell["cell"].split(" ")
        shown = []
        for key in ("over_never_pp", "over_cascade_pp"):
            low, high = cell["ci95"][key]
            shown.append(f"{cell['values'][key]:+.1f} [{low:+.1f}, {high:+.1f}]")
        worst = min(min(point["over_never_pp"], point["over_cascade_pp"]) for point in cell["points"])
        lines.append(
            f"| {stream} | {passes} | {mode} | {false_pass} | {false_fail} | {' | '.join(shown)} | {worst:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 100)
    RESULTS.mkdir(exist_ok=True)
    cells: list[dict[str, Any]] = []
    pair = read_stream(arguments.data, ["swe", "terminal2"], list(PAIRS[0]), AgentChoice.parse(None))
    with mixed_folder(arguments.data) as folder:
        mixed = read_stream(folder, list(MIXED), ["small", "large"], AgentChoice.parse(None))
    for name, stream in (("mixed", mixed), ("swe+terminal2", pair)):
        for cell in cells_of(name, stream, arguments.orders):
            cells.append(cell)
            record("escalation", cells, as_table(cells))


if __name__ == "__main__":
    main()
