"""ORACLE, Fig. 11 and Table 6: how much the exploration width of LinUCB matters, steady state.

Reading: over random mixing at the midpoint cost every width is above zero, on every stream.
"""

from __future__ import annotations

from experiments.cells import PAIRS, STREAMS, arguments_of, list_of, record, run_cell, shown, with_tau2

IDS = ("tau2_constructed+swe+terminal2", "tau2_constructed+swe", "swe+terminal2")
WIDTHS = (0.1, 0.3, 0.6, 1.0, 1.5)
PAPER = {"fig5": "+3.8 to +7.2", "fig9": "+4.0 to +8.4", "fig10": "+6.1 to +7.0"}


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 20)
    policies = tuple(f"linucb?alpha={width}" for width in WIDTHS)
    cells = []
    for pair in PAIRS:
        for figure, families in STREAMS.items():
            with with_tau2(arguments.data, pair, "independent") as folder:
                name = f"{figure} {'/'.join(pair)}"
                settings = {"n_orders": arguments.orders, "policies": policies}
                cells.append(run_cell(name, folder, families, pair, ids=list_of(families), **settings))
    lines = [
        "Over random mixing at the midpoint cost, pp; τ² is constructed (independent).",
        "",
        f"| stream and pair | paper, over the widths | {' | '.join(f'α {width}' for width in WIDTHS)} |",
        f"| --- | --- | {' | '.join('---' for _ in WIDTHS)} |",
    ]
    for cell in cells:
        figures = [shown(cell, f"{policy}.adaptive.over_hull_at_midpoint_pp") for policy in policies]
        lines.append(f"| {cell['cell']} | {PAPER[cell['cell'].split(' ')[0]]} | {' | '.join(figures)} |")
    record("oracle_width", cells, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
