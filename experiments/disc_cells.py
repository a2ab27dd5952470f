"""Cells of the experiments on admission and divert: arms, loads and seeds; a record that can be checked.

Cells that ran are kept (`experiments/.cells`, one file for each state of the package), so a run that was interrupted
goes on where it was, and experiments share what they have in common. Recorded are aggregates, with seeds, commit and
the hash of the list of cells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from experiments.cells import NO_IDS
from loadwise.lab.disc import Cell, CellResult, Settings
from loadwise.lab.disc_cache import CellCache, cell_key, package_digest
from loadwise.lab.disc_figures import Check, Judge, Results, check_rows, shown
from loadwise.lab.disc_report import run_cells

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
CELLS = FOLDER / ".cells"
WITH_INTERVALS = ("programs_per_h", "resolved", "resolved_per_h", "hit_ratio", "wait_mean_s")
SMOKE_PROGRAMS = 12
Key = tuple[str, str, int]


class Arm(NamedTuple):
    """What differs between runs of one table: a preset, and what is changed of it."""

    name: str
    preset: str
    settings: Settings = Settings()

    def cell(self, world: str, load: int, seed: int) -> Cell:
        """One run of it."""
        return Cell(world=world, preset=self.preset, load=load, seed=seed, settings=self.settings)


class Grid(NamedTuple):
    """Worlds x arms x loads x seeds."""

    worlds: tuple[str, ...]
    arms: tuple[Arm, ...]
    loads: tuple[int, ...]
    seeds: tuple[int, ...]

    def cells(self) -> list[tuple[Key, Cell]]:
        """Every cell with the key of its table, seed by seed."""
        return [
            ((world, arm.name, load), arm.cell(world, load, seed))
            for seed in self.seeds
            for world in self.worlds
            for load in self.loads
            for arm in self.arms
        ]


def arms_of(presets: Iterable[str], settings: Settings = Settings()) -> tuple[Arm, ...]:  # noqa: B008
    """Presets as they are."""
    return tuple(Arm(preset, preset, settings) for preset in presets)


def arguments_of(description: str | None, n_seeds: int, first_seed: int) -> argparse.Namespace:
    """What every one of these experiments may be told."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--seeds", type=int, default=n_seeds)
    add("--first-seed", type=int, default=first_seed)
    add("--processes", type=int, default=2)
    add("--minutes", type=float, default=math.inf, help="begin no cell after so long; run again to go on")
    add("--only", metavar="PART", help="the parts with this in their name")
    add("--smoke", action="store_true", help="one seed, two loads, twelve programs; nothing is recorded")
    return parser.parse_args()


def seeds_of(arguments: argparse.Namespace, n: int | None = None) -> tuple[int, ...]:
    """The seeds of a run, or the first `n` of them."""
    first = arguments.first_seed
    return tuple(range(first, first + (arguments.seeds if n is None else min(n, arguments.seeds))))


def run_grids(grids: Sequence[Grid], arguments: argparse.Namespace) -> Results:
    """Results of all grids by world, arm and load, then by seed; says how long it took."""
    keyed = [one for grid in grids for one in (smoked(grid) if arguments.smoke else grid).cells()]
    cells = [cell for _, cell in keyed]
    known: dict[str, CellResult] = {}
    began_s = time.monotonic()
    for one in run_cells(cells, arguments.processes, tell, CellCache(CELLS), 60.0 * arguments.minutes):
        known[cell_key(one.cell)] = one.result
    results: dict[Key, dict[int, CellResult]] = {}
    for key, cell in keyed:
        result = known.get(cell_key(cell))
        if result is not None:
            results.setdefault(key, {})[cell.seed] = result
    tell(f"{len(known)} of {len(cells)} cells, {(time.monotonic() - began_s) / 60:.1f} minutes")
    return results


def smoked(grid: Grid) -> Grid:
    """The same, so small that it shows no more than that it runs."""
    arms = tuple(
        arm._replace(settings=msgspec.structs.replace(arm.settings, n_programs=SMOKE_PROGRAMS)) for arm in grid.arms
    )
    return Grid(grid.worlds[:1], arms, grid.loads[:2], grid.seeds[:1])


def tell(text: str) -> None:
    """To whoever watches."""
    print(text, file=sys.stderr, flush=True)


def record(
    name: str,
    results: Results,
    arguments: argparse.Namespace,
    text: str,
    checks: Sequence[Check] = (),
    **more: Any,
) -> None:
    """Write `results/NAME.json` and `.md`; a smoke run prints only."""
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    head = {
        "script": name,
        "ids": NO_IDS,
        "commit": source_commit(),
        "package": package_digest(),
        "seeds": seeds,
        "n_cells": sum(map(len, results.values())),
        "list_sha256": list_digest(results),
        **more,
    }
    body = f"{heading(head)}\n\n{text}"
    if checks:
        body += (
            "\n\nFigures to reach; `?` where the interval lies on both sides of the bound. One seed judges nothing.\n\n"
        )
        body += markdown(check_rows(checks))
    print(body)
    if arguments.smoke:
        return
    RESULTS.mkdir(exist_ok=True)
    lines = [json.dumps(rounded(cell_of(key, by_seed))) for key, by_seed in results.items()]
    checked = [json.dumps(rounded(check.as_object())) for check in checks]
    said = json.dumps(rounded(head))[:-1]
    text_ = f'{said},\n"checks": [\n{_joined(checked)}],\n"cells": [\n{_joined(lines)}]}}\n'
    (RESULTS / f"{name}.json").write_text(text_)
    (RESULTS / f"{name}.md").write_text(body + "\n")


def _joined(lines: Sequence[str]) -> str:
    return ",\n".join(lines) + ("\n" if lines else "")


def heading(head: Mapping[str, Any]) -> str:
    """One line on what ran."""
    seeds = head["seeds"]
    span = f"{seeds[0]} to {seeds[-1]}" if seeds else "none"
    return (
        f"{head['n_cells']} cells, seeds {span}, commit {head['commit'] or 'unknown'}, "
        f"list of cells sha256 {head['list_sha256'][:16]}."
    )


def list_digest(results: Results) -> str:
    """Of the list of what ran: `world<TAB>arm<TAB>load<TAB>seed`, one a line, sorted."""
    lines = sorted(f"{world}\t{arm}\t{load}\t{seed}" for (world, arm, load), by in results.items() for seed in by)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cell_of(key: Key, by_seed: Mapping[int, CellResult]) -> dict[str, Any]:
    """Means over seeds, with intervals of the main figures."""
    world, arm, load = key
    fields = CellResult.__struct_fields__
    said: dict[str, Any] = {"world": world, "arm": arm, "load": load, "n_seeds": len(by_seed)}
    said |= {name: float(np.mean([getattr(result, name) for result in by_seed.values()])) for name in fields}
    if len(by_seed) > 1:
        judge = Judge({key: by_seed})
        means = {name: judge.mean(world, load, arm, name) for name in WITH_INTERVALS}
        said["ci95"] = {name: [one.low, one.high] for name, one in means.items() if one is not None}
    return said


def rounded(said: Any) -> Any:
    """Numbers with so many digits as anybody reads."""
    return json.loads(json.dumps(said), parse_float=lambda text: round(float(text), 5))


def source_commit() -> str:
    """The commit, marked where the package or a script differs from it; results may."""
    git = ["git", "-C", str(FOLDER.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        parts = ["status", "--porcelain", "--", "src", "experiments/*.py"]
        changed = subprocess.run([*git, *parts], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, a heading first; numbers are aligned to the right."""
    aligned = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], aligned, *rows[1:]))


def table(results: Results, fields: Mapping[str, str], load_name: str = "in flight") -> str:
    """Means by world, load and arm, of fields under headings of their own; `±` half the 95 % interval."""
    rows: list[list[str]] = [["arm", "world", load_name, *fields]]
    for world, arm, load in sorted(results, key=lambda key: (key[0], key[2])):
        judge = Judge(results)
        cells = []
        for field in fields.values():
            one = judge.mean(world, load, arm, field)
            assert one is not None
            half = f" ± {shown((one.high - one.low) / 2)}" if one.n_seeds > 1 and field in WITH_INTERVALS else ""
            cells.append(shown(one.value) + half)
        rows.append([arm, world, str(load), *cells])
    return markdown(rows)


def plot(name: str, results: Results, fields: Mapping[str, str], arguments: argparse.Namespace) -> None:
    """Figures against load, a row of panels a world, as `results/NAME.svg`; smoke runs draw nothing."""
    if arguments.smoke:
        return
    worlds = list(dict.fromkeys(world for world, _, _ in results))
    with _panels(name, len(worlds), len(fields)) as axes:
        for row, world in zip(axes, worlds, strict=True):
            for panel, (label, field) in zip(row, fields.items(), strict=True):
                for arm in dict.fromkeys(arm for one, arm, _ in results if one == world):
                    loads = sorted(load for one, other, load in results if (one, other) == (world, arm))
                    panel.plot(loads, [mean_of(results, (world, arm, load), field) for load in loads], "o-", ms=3)
                panel.set(title=world, xlabel="load", ylabel=label)
        arms = list(dict.fromkeys(arm for _, arm, _ in results))
        axes[0][0].figure.legend(axes[0][0].lines, arms, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(arms))


def plot_bars(name: str, results: Results, fields: Mapping[str, str], arguments: argparse.Namespace) -> None:
    """Figures of every arm side by side, a row of panels a world and load, as `results/NAME.svg`."""
    if arguments.smoke:
        return
    places = list(dict.fromkeys((world, load) for world, _, load in results))
    with _panels(name, len(places), len(fields)) as axes:
        for row, (world, load) in zip(axes, places, strict=True):
            arms = [arm for one, arm, other in results if (one, other) == (world, load)]
            for panel, (label, field) in zip(row, fields.items(), strict=True):
                panel.barh(arms, [mean_of(results, (world, arm, load), field) for arm in arms])
                panel.invert_yaxis()
                panel.set(title=f"{world}, {load}", xlabel=label)


def mean_of(results: Results, key: Key, field: str) -> float:
    """A figure's mean over seeds."""
    return float(np.mean([getattr(result, field) for result in results[key].values()]))


@contextmanager
def _panels(name: str, n_rows: int, n_columns: int) -> Iterator[Any]:
    """Axes to draw on; what is drawn is equal bytes for equal data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "loadwise"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(n_rows, n_columns, figsize=(4.0 * n_columns, 3.2 * n_rows), squeeze=False)
    yield axes
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def wanted(parts: Mapping[str, Callable[[argparse.Namespace], None]], arguments: argparse.Namespace) -> None:
    """Run the parts that were asked for."""
    for name, part in parts.items():
        if arguments.only is None or arguments.only in name:
            tell(f"part {name}")
            part(arguments)
