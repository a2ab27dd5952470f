"""Every preset at every load on ORACLE's pools (its Fig. 6 and 7a), and the figures that presets of ours must reach.

Reading: preset `oracle` in the paper's bands, losses included; `fast` nowhere more than 2 % behind the best peer and
`quality` nowhere more than 1 % behind admission only; intervals are paired bootstraps over seeds. `arrival` is the same
with budgets that start at arrival, `wide` with a wide gap between the models (86 % prefer the dear one, spread .2).
"""

from __future__ import annotations

import argparse

from experiments.disc_cells import Grid, arguments_of, arms_of, plot, record, run_grids, seeds_of, table, wanted
from loadwise.lab.disc import LOADS, PRESETS, Settings
from loadwise.lab.disc_figures import figures

IDS: tuple[str, ...] = ()
WORLDS = ("qwen-gh200", "qwen-gh200-tight", "mistral-h200")
MORE_WORLDS = ("qwen-h200",)
N_SEEDS_MORE = 6
N_SEEDS_ARRIVAL = 6
N_SEEDS_WIDE = 10
FEW_LOADS = (32, 64, 96)
FIELDS = {
    "programs/h": "programs_per_h",
    "resolved/h": "resolved_per_h",
    "resolved": "resolved",
    "hit": "hit_ratio",
    "wait, s": "wait_mean_s",
    "wait p95, s": "wait_p95_s",
    "call, s": "call_mean_s",
    "tokens out/h": "output_tokens_per_h",
    "dear": "dear_share",
    "preempted": "preemptions",
    "killed": "killed",
}
DRAWN = {"programs/h": "programs_per_h", "resolved/h": "resolved_per_h", "hit": "hit_ratio", "wait, s": "wait_mean_s"}


def main() -> None:
    """Run every cell and record."""
    parts = {"main": run_main, "arrival": run_arrival, "wide": run_wide}
    wanted(parts, arguments_of(__doc__, 20, 101))


def run_main(arguments: argparse.Namespace) -> None:
    """All presets, all loads, budgets from admission."""
    arms = arms_of(PRESETS)
    grids = [
        Grid(WORLDS, arms, LOADS, seeds_of(arguments)),
        Grid(MORE_WORLDS, arms, LOADS, seeds_of(arguments, N_SEEDS_MORE)),
    ]
    results = run_grids(grids, arguments)
    plot("disc_main", results, DRAWN, arguments)
    record("disc_main", results, arguments, table(results, FIELDS), figures(results), budget_starts="admission")


def run_arrival(arguments: argparse.Namespace) -> None:
    """Waiting counts against the budget."""
    arms = arms_of(PRESETS, Settings(budget_starts="arrival"))
    results = run_grids([Grid(WORLDS, arms, FEW_LOADS, seeds_of(arguments, N_SEEDS_ARRIVAL))], arguments)
    record("disc_main_arrival", results, arguments, table(results, FIELDS), budget_starts="arrival")


def run_wide(arguments: argparse.Namespace) -> None:
    """Another gap between the models."""
    arms = arms_of(PRESETS, Settings(prefers=0.86, spread=0.2))
    results = run_grids([Grid(WORLDS, arms, FEW_LOADS, seeds_of(arguments, N_SEEDS_WIDE))], arguments)
    record("disc_main_wide", results, arguments, table(results, FIELDS), figures(results), prefers=0.86, spread=0.2)


if __name__ == "__main__":
    main()
