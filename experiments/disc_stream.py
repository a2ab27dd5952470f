"""The long open stream: 2,000 programs arrive at random, at several shares of what the pool can do.

Capacity is measured first: programs/h of preset `oracle` in a closed loop of 64 on three seeds of their own. Reading:
below capacity (.5 and .7) `fast` and `quality` finish within 1 % of the best peer's programs/h at a median wait below
30 s; at .9 and 1.1 `fast` resolves at least as many an hour as every peer, less 2 %.
"""

from __future__ import annotations

import argparse

from experiments.disc_cells import Grid, arguments_of, arms_of, mean_of, plot, record, run_grids, seeds_of, table
from loadwise.lab.disc import PRESETS, Settings
from loadwise.lab.disc_figures import PEERS, Check, Judge, Results, checked

IDS: tuple[str, ...] = ()
WORLDS = ("qwen-gh200-tight", "mistral-h200")
SHARES = (0.5, 0.7, 0.9, 1.1)
N_PROGRAMS = 2000
CAPACITY_SEEDS = (301, 302, 303)
FIELDS = {
    "programs/h": "programs_per_h",
    "resolved/h": "resolved_per_h",
    "resolved": "resolved",
    "wait, s": "wait_mean_s",
    "p50": "wait_p50_s",
    "p95": "wait_p95_s",
    "hit": "hit_ratio",
    "killed": "killed",
    "dear": "dear_share",
}
DRAWN = {
    "programs/h": "programs_per_h",
    "resolved/h": "resolved_per_h",
    "wait p95, s": "wait_p95_s",
    "hit": "hit_ratio",
}


def capacity_per_h(world: str, arguments: argparse.Namespace) -> float:
    """Programs an hour that preset `oracle` gets through in a closed loop of 64."""
    results = run_grids([Grid((world,), arms_of(("oracle",)), (64,), CAPACITY_SEEDS)], arguments)
    return mean_of(results, (world, "oracle", 64), "programs_per_h")


def checks_of(results: Results, rates: dict[str, list[int]]) -> list[Check]:
    """Below capacity nobody need wait; at it and beyond the best share of what comes is resolved."""
    judge = Judge(results)
    found: list[Check] = []
    for world, loads in rates.items():
        for share, load in zip(SHARES, loads, strict=True):
            field = "programs_per_h" if share < 0.9 else "resolved_per_h"
            peer = judge.best(world, load, PEERS, field)
            for preset in ("fast", "quality") if share < 0.9 else ("fast",):
                if peer is None:
                    continue
                ratio = judge.ratio(world, load, preset, peer, field)
                found += checked(
                    f"{world} {share:g}: {preset}/{peer} {field}", ratio, low=0.99 if share < 0.9 else 0.98
                )
                if share < 0.9:
                    wait = judge.mean(world, load, preset, "wait_p50_s")
                    found += checked(f"{world} {share:g}: {preset} median wait, s", wait, high=30.0)
    return found


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 1, 311)
    arms = arms_of(PRESETS, Settings(arrivals="open", n_programs=N_PROGRAMS))
    rates: dict[str, list[int]] = {}
    grids = []
    for world in WORLDS[:1] if arguments.smoke else WORLDS:
        per_h = capacity_per_h(world, arguments)
        rates[world] = [round(share * per_h) for share in SHARES]
        grids.append(Grid((world,), arms, tuple(rates[world]), seeds_of(arguments)))
    results = run_grids(grids, arguments)
    plot("disc_stream", results, DRAWN, arguments)
    text = table(results, FIELDS, "arrivals/h")
    record("disc_stream", results, arguments, text, checks_of(results, rates), rates=rates, n_programs=N_PROGRAMS)


if __name__ == "__main__":
    main()
