"""ORACLE, E.8, and CodeRouterBench: one pass over tasks never seen before, without and with the tasks' texts.

Reading: with family and domain alone a cold pass is near random mixing (paper: +0.9 [-1.4, +4.3] at the midpoint), and
nowhere more than 0.5 pp below the hull; on CodeRouterBench the context-free gain is at least 6.5 pp.
"""

from __future__ import annotations

from typing import Any

from experiments.cells import CRB_MODELS, PAIRS, STREAMS, arguments_of, list_of, record, run_cell, shown, with_tau2

IDS = ("tau2_constructed+swe+terminal2", "tau2_constructed+swe", "swe+terminal2", "crb")
PAPER = {"fig5": "+0.9 [-1.4, +4.3]", "fig9": "+1.6 [-1.3, +5.7]", "fig10": "-0.8 [-2.1, +2.6]", "crb": ""}
POLICIES = ("linucb", "loadwise", "lints")


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 100)
    cells = []
    for embedder in ("none", "hash"):
        settings: dict[str, Any] = {
            "n_orders": arguments.orders,
            "n_passes": 1,
            "policies": POLICIES,
            "embedder": embedder,
        }
        for pair in PAIRS:
            for figure, families in STREAMS.items():
                with with_tau2(arguments.data, pair, "independent") as folder:
                    name = f"{figure} {'/'.join(pair)} {embedder}"
                    cells.append(run_cell(name, folder, families, pair, ids=list_of(families), **settings))
        cells.append(run_cell(f"crb all-8 {embedder}", arguments.data, ["crb"], CRB_MODELS, ids="crb", **settings))
        pair = ("qwen3-max", "claude-opus-4-6")
        name = f"crb {'/'.join(pair)} {embedder}"
        cells.append(run_cell(name, arguments.data, ["crb"], pair, ids="crb", **settings))
    lines = [
        "One pass. Midpoint: over random mixing at the midpoint cost; cross-fitted: over the hull, the cost weight of"
        " each half of the tasks chosen on the other half; worst: lowest gain over all cost weights. τ² is constructed"
        " (independent).",
        "",
        "| stream, pair, text | paper, midpoint | policy | midpoint | cross-fitted | worst |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for cell in cells:
        for policy in POLICIES:
            worst = min(point["hull_gain_pp"] for point in cell["points"] if point["policy"] == policy)
            midpoint = shown(cell, f"{policy}.adaptive.over_hull_at_midpoint_pp")
            crossed = shown(cell, f"{policy}.adaptive.over_hull_cross_fitted_pp")
            paper = PAPER[cell["cell"].split(" ")[0]]
            lines.append(f"| {cell['cell']} | {paper} | {policy} | {midpoint} | {crossed} | {worst:+.1f} |")
    record("oracle_cold", cells, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
