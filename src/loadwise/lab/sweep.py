"""A sweep of ORACLE's pair: loads, presets and seeds, each cell a whole run of the stack in virtual time.

A cell is what ORACLE's section 5 runs: a closed loop of N programs in flight until 108 of them are over, over one
Qwen3.6-27B (fp8) and one Qwen3.5-9B, each on a GH200, both hybrid-attention models on the engine with vLLM's scheduler
and blocks. Nothing is left out of it: the router decides, reserves, holds and learns, engines are read every second,
verdicts come late, and the laws are checked at the end. Only the journal is not written, as `loadwise simulate` writes
none unless told to. Success probabilities are assumed; no figure of a paper is claimed here.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from loadwise import __version__
from loadwise.kernel.errors import ConfigError
from loadwise.settings import preset_names
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.scenario import Scenario
from loadwise.sim.simulate import simulate

from .disc_world import with_capacity
from .report import commit, machine

LOADS = (8, 16, 32, 48, 64, 96)
PRESETS = ("loadwise", "oracle", "least_loaded", "round_robin")
N_PROGRAMS = 108
N_CELLS = 1000
MOST_WALL_S = 1200.0
"""For `N_CELLS` on two processes."""
MAX_CELLS, MAX_PROCESSES, MAX_LOAD = 1_000_000, 256, 100_000
_LATE_S = 3600.0
"""Engines under overload answer late; a client that gave up earlier would be another experiment."""


class Cell(NamedTuple):
    """One run."""

    preset: str
    load: int
    """Programs in flight."""
    seed: int


class Outcome(NamedTuple):
    """What became of it."""

    cell: Cell
    programs_per_h: float
    success: float
    hit_ratio: float
    n_turns: int
    core_s: float
    """Processor time of the run itself."""


def scenario_of(cell: Cell) -> Scenario:
    """The world of a cell."""
    backend = {"engine": "vllm", "first_byte_timeout_s": _LATE_S, "idle_timeout_s": _LATE_S}
    document = {
        "scenario": 1,
        "name": f"oracle-pair-{cell.preset}-{cell.load}",
        "n_programs": N_PROGRAMS,
        "pool": {
            "preset": cell.preset,
            "models": {
                "qwen3.6-27b": {"usd_per_million": {"input": 0.6, "output": 3.6}},
                "qwen3.5-9b": {"usd_per_million": {"input": 0.1, "output": 0.4}},
            },
            "backends": [
                backend | {"name": "large", "model": "qwen3.6-27b"},
                backend | {"name": "small", "model": "qwen3.5-9b"},
            ],
            "router": {"hold_max_s": _LATE_S},
        },
        "engines": {
            "large": {"kind": "vllm", "hardware": {"gpu": "gh200", "model": "qwen3.6-27b", "precision": "fp8"}},
            "small": {"kind": "vllm", "hardware": {"gpu": "gh200", "model": "qwen3.5-9b", "precision": "bf16"}},
        },
        "workload": {"preset": "terminus", "arrivals": {"kind": "closed", "n_agents": cell.load}},
        "truth": {"success": {"qwen3.6-27b": {"*": 0.5}, "qwen3.5-9b": {"*": 0.3}}},
        "verdicts": {"source": "agent", "delay_s": {"exponential": 30}},
    }
    return with_capacity(document, "sweep")


def run_cell(cell: Cell) -> Outcome:
    """Run one cell to its end."""
    began_s = time.process_time()
    report = simulate(scenario_of(cell), cell.seed, is_compiled=True)
    core_s = time.process_time() - began_s
    return Outcome(
        cell,
        report.programs_per_h,
        report.success or 0.0,
        report.hit_ratio or 0.0,
        sum(report.turns.values()),
        core_s,
    )


def cells(n: int, presets: Sequence[str] = PRESETS, loads: Sequence[int] = LOADS) -> list[Cell]:
    """The first `n` cells: every preset at every load with seed 0, then with seed 1, and so on."""
    each = len(presets) * len(loads)
    every = (Cell(preset, load, seed) for seed in range(-(-n // each)) for load in loads for preset in presets)
    return list(every)[:n]


class Sweep(NamedTuple):
    """All cells, and what they took."""

    outcomes: list[Outcome]
    wall_s: float
    """From the first process' start to the last cell's end, imports included."""
    n_processes: int

    @property
    def core_s_per_cell(self) -> float:
        """Mean processor seconds of a cell."""
        return sum(outcome.core_s for outcome in self.outcomes) / len(self.outcomes)

    @property
    def wall_s_per_1000_cells(self) -> float:
        """What was measured where a thousand ran, and extrapolated where fewer did."""
        return self.wall_s * N_CELLS / len(self.outcomes)


def run_sweep(todo: Sequence[Cell], n_processes: int, tell: Callable[[str], None] = lambda _: None) -> Sweep:
    """Run cells in processes of their own, one cell after the other in each.

    Raises:
        ConfigError: nothing to do, or numbers beyond their limits.
        LawBroken: a law does not hold in a cell.
    """
    if not todo:
        raise ConfigError("a sweep needs at least one cell")
    for cell in todo:
        check_cell(cell)
    if not 1 <= n_processes <= MAX_PROCESSES:
        raise ConfigError(f"--processes is {n_processes!r}; it must be in 1..{MAX_PROCESSES}")
    began_s = time.perf_counter()
    if n_processes == 1:
        outcomes = _collect(map(run_cell, todo), len(todo), tell)
    else:
        # Not fork: a child must not inherit locks of a parent's threads.
        with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
            outcomes = _collect(pool.map(run_cell, todo), len(todo), tell)
    return Sweep(outcomes, time.perf_counter() - began_s, n_processes)


def check_cell(cell: Cell) -> None:
    """Refuse what could not run, before anything does."""
    if cell.preset not in preset_names():
        raise ConfigError(f"preset {cell.preset!r} is unknown; known: {', '.join(preset_names())}")
    if not 1 <= cell.load <= MAX_LOAD:
        raise ConfigError(f"load is {cell.load!r}; it must be in 1..{MAX_LOAD}")


def _collect(outcomes: Iterable[Outcome], n: int, tell: Callable[[str], None]) -> list[Outcome]:
    found: list[Outcome] = []
    for outcome in outcomes:
        found.append(outcome)
        if len(found) % 100 == 0:
            tell(f"{len(found)} of {n} cells")
    return found


FIGURES = ("programs_per_h", "success", "hit_ratio")


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """The one object of `--json`."""
    values = {
        "n_cells": len(sweep.outcomes),
        "wall_s": sweep.wall_s,
        "core_s_per_cell": sweep.core_s_per_cell,
        "wall_s_per_1000_cells": sweep.wall_s_per_1000_cells,
        "core_s_per_1000_cells_and_process": sweep.core_s_per_cell * N_CELLS / sweep.n_processes,
        "turns_per_core_s": sum(one.n_turns for one in sweep.outcomes) / sum(one.core_s for one in sweep.outcomes),
    }
    return {
        "name": "lab.sweep",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": sorted({one.cell.seed for one in sweep.outcomes}),
        "config": {
            "numba": HAS_NUMBA,
            "n_programs": N_PROGRAMS,
            "processes": sweep.n_processes,
            "load_average": os.getloadavg()[0],
            "is_extrapolated": len(sweep.outcomes) < N_CELLS,
        },
        "values": values,
        "ci95": {},
        "peers": {},
        "checks": [
            {
                "key": "wall_s_per_1000_cells",
                "op": "<=",
                "bound": MOST_WALL_S,
                "holds": sweep.wall_s_per_1000_cells <= MOST_WALL_S,
            }
        ],
        "cells": [_as_object(group) for group in by_setting(sweep.outcomes)],
    }


def by_setting(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes of one preset and load together."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.cell.preset, outcome.cell.load), []).append(outcome)
    return [groups[key] for key in sorted(groups)]


def _as_object(group: Sequence[Outcome]) -> dict[str, Any]:
    """Means over seeds, and twice their standard errors where there are several."""
    n = len(group)
    means = {name: sum(getattr(one, name) for one in group) / n for name in FIGURES}
    cell: dict[str, Any] = {
        "preset": group[0].cell.preset,
        "n_programs": group[0].cell.load,
        "n_seeds": n,
        **means,
        "core_s": sum(one.core_s for one in group) / n,
    }
    if n > 1:
        squares = {name: sum((getattr(one, name) - means[name]) ** 2 for one in group) for name in FIGURES}
        cell["two_standard_errors"] = {name: 2 * math.sqrt(squares[name] / (n - 1) / n) for name in FIGURES}
    return cell


def sweep_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """The table's cells, a heading first."""
    rows: list[tuple[str, ...]] = [("preset", "in flight", "seeds", "programs/h", "success", "hit ratio", "core s")]
    for group in by_setting(sweep.outcomes):
        one = _as_object(group)
        figures = (f"{one['programs_per_h']:.0f}", f"{one['success']:.3f}", f"{one['hit_ratio']:.3f}")
        rows.append((one["preset"], str(one["n_programs"]), str(one["n_seeds"]), *figures, f"{one['core_s']:.2f}"))
    return rows
