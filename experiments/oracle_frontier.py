"""ORACLE, Fig. 5a, 9a, 10: adaptive against single verification, steady state, on three streams.

Reading: adaptive verification lies above random mixing at the midpoint cost, and above single-verifier feedback at
matched cost on the streams with τ².
"""

from __future__ import annotations

from experiments.cells import PAIRS, STREAMS, arguments_of, list_of, record, run_cell, shown, with_tau2
from loadwise.lab.coupled import COUPLINGS

IDS = ("tau2_constructed+swe+terminal2", "tau2_constructed+swe", "swe+terminal2")
PAPER = {
    "fig5": ("between +3.8 and +7.2 over the widths of Table 6", "about +7"),
    "fig9": ("between +4.0 and +8.4 over the widths of Table 6", "+8.3 [+2.7, +15.1]"),
    "fig10": ("+6.4 [+2.9, +12.5]", "+2 to +5"),
}


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 100)
    settings = {
        "n_orders": arguments.orders,
        "policies": ("linucb",),
        "verifications": ("adaptive", "single"),
    }
    cells = []
    for pair in PAIRS:
        for figure, families in STREAMS.items():
            for coupling in COUPLINGS if "tau2" in families else ("measured",):
                name = f"{figure} {'/'.join(pair)} {coupling}"
                if coupling == "measured":
                    cells.append(run_cell(name, arguments.data, families, pair, ids=list_of(families), **settings))
                    continue
                with with_tau2(arguments.data, pair, coupling) as folder:
                    cells.append(run_cell(name, folder, families, pair, ids=list_of(families), **settings))
    lines = [
        "| stream and pair | τ² | over mixing at midpoint: paper | ours | adaptive over single: paper | ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        figure, pair_name, coupling = cell["cell"].split(" ")
        over = shown(cell, "linucb.adaptive.over_hull_at_midpoint_pp")
        matched = shown(cell, "linucb.adaptive_over_single_at_matched_cost_pp")
        told = f"constructed, {coupling}" if coupling != "measured" else "none"
        papers = PAPER[figure]
        lines.append(f"| {figure} {pair_name} | {told} | {papers[0]} | {over} | {papers[1]} | {matched} |")
    record("oracle_frontier", cells, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
