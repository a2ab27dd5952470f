"""What a percentage point of success is worth in seconds: quality against wait, from hurried to patient.

Reading: as a point is worth more seconds, resolved and the mean wait rise, and programs/h fall, monotonically: no step
goes the other way by more than chance (95 %), under the mechanisms of `fast` and under those of `oracle`. Presets
`fast`, `quality`, `loadwise` and `oracle` as they are stand beside the sweep.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from experiments.disc_cells import (
    RESULTS,
    Arm,
    Grid,
    arguments_of,
    arms_of,
    mean_of,
    record,
    run_grids,
    seeds_of,
    table,
)
from loadwise.lab.disc import Settings
from loadwise.lab.disc_figures import Check, Estimate, Judge, Results, is_monotone

IDS: tuple[str, ...] = ()
PLACES = (("qwen-gh200", 64), ("qwen-gh200-tight", 64), ("mistral-h200", 32))
SECONDS = (1.0, 2.0, 4.0, 6.0, 9.0, 15.0, 30.0, 60.0, 120.0)
SWEPT = ("fast", "oracle")
AS_THEY_ARE = ("fast", "quality", "loadwise", "oracle", "admission_only")
FIELDS = {
    "resolved": "resolved",
    "wait, s": "wait_mean_s",
    "programs/h": "programs_per_h",
    "resolved/h": "resolved_per_h",
    "hit": "hit_ratio",
    "dear": "dear_share",
    "diverts": "diverts",
}


def arms() -> tuple[Arm, ...]:
    """The sweep of both mechanisms, and presets as they are."""
    swept = [
        Arm(f"{preset} {seconds:g}", preset, Settings(seconds_per_point=seconds))
        for preset in SWEPT
        for seconds in SECONDS
    ]
    return (*swept, *arms_of(AS_THEY_ARE))


def trend_checks(results: Results) -> list[Check]:
    """One line for each figure of each sweep: the whole way, and whether any step went back."""
    judge = Judge(results)
    found: list[Check] = []
    for world, load in PLACES:
        for preset in SWEPT:
            names = [f"{preset} {seconds:g}" for seconds in SECONDS]
            for field, rises in (("resolved", True), ("wait_mean_s", True), ("programs_per_h", False)):
                steps = [judge.gain(world, load, later, sooner, field) for sooner, later in pairwise(names)]
                known = [step for step in steps if step is not None]
                whole = judge.gain(world, load, names[-1], names[0], field)
                if whole is not None:
                    found.append(trend(f"{world}.{load} {preset}: {field}, last - first", whole, known, rises))
    return found


def trend(key: str, whole: Estimate, steps: list[Estimate], rises: bool) -> Check:
    """Whether a sweep is monotone; `sure` where the whole way is beyond chance."""
    is_sure = whole.low > 0.0 if rises else whole.high < 0.0
    return Check(key, ">=" if rises else "<=", 0.0, is_monotone(steps, rises=rises), is_sure, whole)


def draw(results: Results, arguments: argparse.Namespace) -> None:
    """Resolved against wait, a panel a world."""
    if arguments.smoke:
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "loadwise"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PLACES), figsize=(5.0 * len(PLACES), 4.0), squeeze=False)
    for panel, (world, load) in zip(axes[0], PLACES, strict=True):
        for preset in SWEPT:
            keys = [(world, f"{preset} {seconds:g}", load) for seconds in SECONDS]
            points = [(mean_of(results, key, "wait_mean_s"), mean_of(results, key, "resolved")) for key in keys]
            panel.plot(*zip(*points, strict=True), "o-", ms=3, label=f"{preset}, 1 to 120 s a point")
        for preset in AS_THEY_ARE:
            key = (world, preset, load)
            panel.plot(mean_of(results, key, "wait_mean_s"), mean_of(results, key, "resolved"), "s", label=preset)
        panel.set(title=f"{world}, {load} in flight", xlabel="mean wait, s", ylabel="resolved of 108")
        panel.legend(fontsize="xx-small")
    figure.tight_layout()
    figure.savefig(RESULTS / "disc_trade.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 10, 201)
    grids = [Grid((world,), arms(), (load,), seeds_of(arguments)) for world, load in PLACES]
    results = run_grids(grids, arguments)
    draw(results, arguments)
    record("disc_trade", results, arguments, table(results, FIELDS), trend_checks(results))


if __name__ == "__main__":
    main()
