"""Cells over seeds: means with bootstrap intervals, paired ratios, checks, one JSON object, one table."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, NamedTuple

import msgspec
import numpy as np

from loadwise import __version__
from loadwise.kernel.errors import ConfigError
from loadwise.sim.compiled import HAS_NUMBA

from .bootstrap import interval
from .disc import Cell, CellResult, Settings, check_cell, run_cell, scenario_of
from .disc_cache import CellCache
from .disc_figures import Check, figures
from .disc_forecast import forecast_object
from .report import commit, machine

N_DRAWS = 2000
N_PROGRAMS_MIN = 100
MAX_CELLS, MAX_PROCESSES = 1_000_000, 256
RATIOS = (
    ("oracle", "thunderagent"),
    ("oracle", "thunderagent_state"),
    ("oracle", "static_cap"),
    ("fast", "oracle"),
    ("quality", "admission_only"),
)
"""Pairs of presets whose programs per hour are compared, seed by seed."""


class Ran(NamedTuple):
    """A cell and its result."""

    cell: Cell
    result: CellResult


def cells(
    worlds: Sequence[str], presets: Sequence[str], loads: Sequence[int], seeds: Iterable[int], settings: Settings
) -> list[Cell]:
    """Every combination once, seed by seed, so that an interrupted run is balanced."""
    return [
        Cell(world=world, preset=preset, load=load, seed=seed, settings=settings)
        for seed in seeds
        for world in dict.fromkeys(worlds)
        for load in dict.fromkeys(loads)
        for preset in dict.fromkeys(presets)
    ]


def run_cells(
    todo: Sequence[Cell],
    n_processes: int,
    tell: Callable[[str], None] = lambda _: None,
    cache: CellCache | None = None,
    limit_s: float = math.inf,
) -> list[Ran]:
    """Run cells in processes of their own, in order.

    Args:
        cache: What is in it is not run again; what is run goes into it.
        limit_s: After so long no cell begins any more; those that did not begin are left out.

    Raises:
        ConfigError: nothing to do, or something that could not run.
        LawBroken: a law does not hold in a cell.
    """
    if not 1 <= len(todo) <= MAX_CELLS:
        raise ConfigError(f"{len(todo)} cells are to be run; it must be 1 to {MAX_CELLS}")
    if not 1 <= n_processes <= MAX_PROCESSES:
        raise ConfigError(f"--processes is {n_processes!r}; it must be in 1..{MAX_PROCESSES}")
    for cell in todo:
        check_cell(cell)
    for cell in {(c.world, c.preset): c for c in todo}.values():
        scenario_of(cell)
    found = [None if cache is None else cache.get(cell) for cell in todo]
    left = [(at, cell) for at, cell in enumerate(todo) if found[at] is None]
    until_s = time.monotonic() + limit_s
    timely = (one for one in left if time.monotonic() < until_s)
    results = _in_turn(timely) if n_processes == 1 else _side_by_side(timely, n_processes)
    for n_ran, (at, result) in enumerate(results, 1):
        found[at] = result
        if cache is not None:
            cache.put(todo[at], result)
        if n_ran % 20 == 0:
            tell(f"{n_ran} of {len(left)} cells")
    return [Ran(cell, result) for cell, result in zip(todo, found, strict=True) if result is not None]


def _in_turn(todo: Iterable[tuple[int, Cell]]) -> Iterator[tuple[int, CellResult]]:
    for at, cell in todo:
        yield at, run_cell(cell)


def _side_by_side(todo: Iterable[tuple[int, Cell]], n_processes: int) -> Iterator[tuple[int, CellResult]]:
    """Results as they come; no more cells are handed out than keep everybody busy."""
    todo = iter(todo)
    running: dict[Future[CellResult], int] = {}
    # Not fork: a child must not inherit locks of a parent's threads.
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        while True:
            while len(running) < 2 * n_processes and (one := next(todo, None)) is not None:
                running[pool.submit(run_cell, one[1])] = one[0]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def by_setting(ran: Sequence[Ran]) -> dict[tuple[str, str, int], list[Ran]]:
    """Runs of one world, preset and load together, in the order in which they were asked for."""
    groups: dict[tuple[str, str, int], list[Ran]] = {}
    for one in ran:
        groups.setdefault((one.cell.world, one.cell.preset, one.cell.load), []).append(one)
    return groups


def cell_object(group: Sequence[Ran], rng: np.random.Generator) -> dict[str, Any]:
    """Means over seeds, and 95 % bootstrap intervals over seeds where there are several."""
    cell = group[0].cell
    values = {name: np.array([getattr(one.result, name) for one in group]) for name in CellResult.__struct_fields__}
    said: dict[str, Any] = {"pool": cell.world, "preset": cell.preset, "n_programs": cell.load, "n_seeds": len(group)}
    if cell.settings.arrivals == "open":
        said |= {"n_programs": None, "arrivals_per_h": cell.load}
    said |= {name: float(column.mean()) for name, column in values.items()}
    said["ci95"] = {}
    if len(group) > 1:
        draws = rng.integers(len(group), size=(N_DRAWS, len(group)))
        said["ci95"] = {name: list(interval(column[draws].mean(axis=1))) for name, column in values.items()}
    return said


def results_of(ran: Sequence[Ran]) -> dict[tuple[str, str, int], dict[int, CellResult]]:
    """Results by world, preset and load, then by seed."""
    return {key: {one.cell.seed: one.result for one in group} for key, group in by_setting(ran).items()}


def checks_of(ran: Sequence[Ran], settings: Settings) -> list[Check]:
    """Figures to reach; they were set for closed loops of one hundred programs and more."""
    is_small = settings.n_programs is not None and settings.n_programs < N_PROGRAMS_MIN
    return [] if settings.arrivals == "open" or is_small else figures(results_of(ran))


def paired_ratios(ran: Sequence[Ran], rng: np.random.Generator) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Programs per hour of one preset over another's, on the same seeds; the interval is a bootstrap over seeds."""
    groups = by_setting(ran)
    values: dict[str, float] = {}
    bounds: dict[str, list[float]] = {}
    for (world, preset, load), group in groups.items():
        for ours, other in RATIOS:
            rivals = groups.get((world, other, load))
            if preset != ours or rivals is None:
                continue
            theirs = {one.cell.seed: one.result.programs_per_h for one in rivals}
            found = [(a.result.programs_per_h, theirs[a.cell.seed]) for a in group if a.cell.seed in theirs]
            pairs = np.array(found).reshape(-1, 2)
            if not len(pairs) or pairs[:, 1].mean() <= 0:
                continue
            key = f"{world}.{load}.{ours}_over_{other}"
            values[key] = float(pairs[:, 0].mean() / pairs[:, 1].mean())
            if len(pairs) > 1:
                drawn = pairs[rng.integers(len(pairs), size=(N_DRAWS, len(pairs)))].mean(axis=1)
                bounds[key] = list(interval(drawn[:, 0] / np.maximum(drawn[:, 1], 1e-9)))
    return values, bounds


def disc_json(ran: Sequence[Ran], settings: Settings) -> dict[str, Any]:
    """The one object of `--json`."""
    rng = np.random.default_rng(0)
    values, bounds = paired_ratios(ran, rng)
    checks = checks_of(ran, settings)
    return {
        "name": "lab.disc",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": sorted({one.cell.seed for one in ran}),
        "config": {
            "numba": HAS_NUMBA,
            "load_average": os.getloadavg()[0],
            "selector": "known" if settings.selector is None else settings.selector["name"],
            **{
                name: value
                for name, value in msgspec.structs.asdict(settings).items()
                if value not in (None, {}) and name != "selector"
            },
        },
        "values": values,
        "ci95": bounds,
        "forecast": {
            "all": forecast_object([one.result for one in ran]),
            **{p: forecast_object([o.result for o in ran if o.cell.preset == p]) for p in _presets(ran)},
        },
        "peers": {},
        "checks": [check.as_object() for check in checks if check.holds is not None],
        "cells": [cell_object(group, rng) for group in by_setting(ran).values()],
    }


def _presets(ran: Sequence[Ran]) -> list[str]:
    """Presets that ran, in their order."""
    return list(dict.fromkeys(one.cell.preset for one in ran))


def disc_rows(ran: Sequence[Ran]) -> list[tuple[str, ...]]:
    """The table's cells, a heading first."""
    rng = np.random.default_rng(0)
    heading = (
        "pool",
        "arrive/h" if ran and ran[0].cell.settings.arrivals == "open" else "in flight",
        "preset",
        "programs/h",
        "resolved",
        "resolved/h",
        "hit",
        "call s",
        "p95 s",
        "wait s",
        "p95 s",
    )
    rows: list[tuple[str, ...]] = [(*heading, "diverts", "preempted", "killed", "dear")]
    for group in by_setting(ran).values():
        one = cell_object(group, rng)
        numbers = [f"{one[name]:.1f}" for name in ("programs_per_h", "resolved", "resolved_per_h")]
        numbers += [f"{one['hit_ratio']:.3f}"]
        numbers += [
            f"{one[name]:.1f}" for name in ("call_mean_s", "call_p95_s", "wait_mean_s", "wait_p95_s", "diverts")
        ]
        numbers += [f"{one['preemptions']:.0f}", f"{one['killed']:.1f}", f"{one['dear_share']:.2f}"]
        rows.append((one["pool"], str(group[0].cell.load), one["preset"], *numbers))
    return rows
