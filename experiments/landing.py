"""Late verdicts on real outcomes: sequential, delayed, batch-synchronous and per-slot learners at C in flight.

Reading: delayed feedback at 64 in flight loses at most 1 pp of success at cost weight 0 against sequential; per-slot
learners lose more than that, most with one pass.
"""

from __future__ import annotations

from typing import Any

from experiments.cells import CRB_MODELS, PAIRS, arguments_of, list_of, record, run_cell
from loadwise.lab.feedback import FeedbackSpec

IDS = ("swe+terminal2", "crb")
IN_FLIGHT = (16, 64)
ARMS = ("delayed", "batch", "slots")


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 100)
    streams = [
        ("swe+terminal2", ("swe", "terminal2"), PAIRS[0], arguments.orders),
        ("crb", ("crb",), CRB_MODELS, max(arguments.orders // 5, 1)),
    ]
    cells = []
    for name, families, models, n_orders in streams:
        for n_passes in (1, 8) if name != "crb" else (1,):
            for arm, in_flight in (("sequential", 1), *((arm, c) for arm in ARMS for c in IN_FLIGHT)):
                settings: dict[str, Any] = {
                    "n_orders": n_orders,
                    "n_passes": n_passes,
                    "policies": ("linucb", "linucb?gram=landed"),
                    "cost_weights": (0.0, 0.25),
                    "feedback": FeedbackSpec(concurrency=arm, in_flight=in_flight),  # type: ignore[arg-type]
                }
                cell = f"{name} {n_passes} {arm} {in_flight}"
                cells.append(run_cell(cell, arguments.data, families, models, ids=list_of(families), **settings))
    lines = [
        "Success at cost weight 0, %, and its difference to sequential in pp.",
        "",
        "| stream | passes | arm | in flight | LinUCB | difference | landed verdicts only | difference |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    base: dict[tuple[str, str, str], float] = {}
    for cell in cells:
        stream, passes, arm, in_flight = cell["cell"].split(" ")
        parts = []
        for policy in ("linucb", "linucb?gram=landed"):
            points = [one for one in cell["points"] if one["policy"] == policy and one["cost_weight"] == 0.0]
            success = 100.0 * points[0]["success"]
            base.setdefault((stream, passes, policy), success)  # the first arm is sequential
            parts.append(f"{success:.1f} | {success - base[stream, passes, policy]:+.1f}")
        lines.append(f"| {stream} | {passes} | {arm} | {in_flight} | {' | '.join(parts)} |")
    record("landing", cells, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
