"""What decisions whose verdict is out do under DISC: the share that is routed to the dear model (ORACLE, E.9).

Reading: with the pending term the share routed to the dear model is larger than without at 32 and at 64, and all four
are within .15 of the paper's (.76 and .65 at 32, .53 and .28 at 64). Resolved: more with the term (paper: 71 against
64 and 58 against 54, on one seed).
"""

from __future__ import annotations

from experiments.disc_cells import Arm, Grid, arguments_of, plot_bars, record, run_grids, seeds_of, table
from loadwise.lab.disc import Settings
from loadwise.lab.disc_figures import Check, Judge, Results, checked

IDS: tuple[str, ...] = ()
WORLDS = ("qwen-gh200", "qwen-gh200-tight")
WITH, WITHOUT = "pending counted", "landed only"
SHARES = {(WITH, 32): 0.76, (WITHOUT, 32): 0.65, (WITH, 64): 0.53, (WITHOUT, 64): 0.28}
RESOLVED_MORE = {32: 7.0, 64: 4.0}
FIELDS = {
    "routed to the dear": "routed_dear_share",
    "ran on the dear": "dear_share",
    "resolved": "resolved",
    "programs/h": "programs_per_h",
    "diverts": "diverts",
    "wait, s": "wait_mean_s",
}


def arms() -> tuple[Arm, ...]:
    """Preset `oracle` with its learner, whose widths count all decisions or landed ones."""
    return (
        Arm(WITH, "oracle", Settings(selector={"name": "linucb", "gram": "gram_all"})),
        Arm(WITHOUT, "oracle", Settings(selector={"name": "linucb", "gram": "landed"})),
    )


def checks_of(results: Results) -> list[Check]:
    """Shares beside the paper's, and the two arms against each other."""
    return [check for world in WORLDS for check in world_checks(Judge(results), world)]


def world_checks(judge: Judge, world: str) -> list[Check]:
    """Those of one world."""
    found: list[Check] = []
    for (arm, load), published in SHARES.items():
        share = judge.mean(world, load, arm, "routed_dear_share")
        low, high = published - 0.15, published + 0.15
        found += checked(f"{world}.{load}, {arm}: routed to the dear", share, low=low, high=high, published=published)
    for load, more in RESOLVED_MORE.items():
        gain = judge.gain(world, load, WITH, WITHOUT, "routed_dear_share")
        found += checked(f"{world}.{load}: routed share, with - without", gain, low=0.0)
        gain = judge.gain(world, load, WITH, WITHOUT, "resolved")
        found += checked(f"{world}.{load}: resolved, with - without", gain, low=0.0, published=more)
    return found


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 20, 921)
    results = run_grids([Grid(WORLDS, arms(), (32, 64), seeds_of(arguments))], arguments)
    plot_bars("disc_share", results, {"routed to the dear": "routed_dear_share", "resolved": "resolved"}, arguments)
    record("disc_share", results, arguments, table(results, FIELDS), checks_of(results))


if __name__ == "__main__":
    main()
