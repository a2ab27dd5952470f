"""ORACLE, Fig. 2a, Fig. 8 and Table 1: one verifier for all tasks, the adaptive choice, the best fixed one.

Reading: patch-only feedback teaches nothing outside SWE (at most 1 pp over the uninformed choice, families alone);
adaptive verification, with the selector's measured mistakes, is within 1 pp of the best fixed verifier of each family.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from experiments.cells import DATA, PAIRS, RESULTS, ids_of, list_of, record, with_tau2
from loadwise.lab.mismatch import MismatchConfig, read_selector, run_mismatch
from loadwise.lab.mismatch_report import as_json, as_markdown, write_plot

IDS = ("tau2_constructed+swe+terminal2", "tau2_constructed", "swe", "terminal2")
FAMILIES = ("tau2", "swe", "terminal2")
WEIGHTS = (0.0, 0.25, 0.75, 2.0)
PAPER = "Paper, adaptive: tau2 +8.9 [+4.1, +16.4], terminal2 +9.9 [+4.2, +13.8], swe +17.9; patch-only about 0."


def main() -> None:
    """Run both pairs and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--orders", type=int, default=6, help="of each of three seeds")
    parser.add_argument("--selector", type=Path, default=RESULTS / "selector.json")
    arguments = parser.parse_args()
    wrong = read_selector(str(arguments.selector), FAMILIES)
    cells, tables = [], [PAPER]
    for pair in PAIRS:
        with with_tau2(arguments.data, pair, "independent") as folder:
            found = run_mismatch(
                MismatchConfig(
                    outcomes=str(folder),
                    families=FAMILIES,
                    models=pair,
                    n_orders=arguments.orders,
                    cost_weights=WEIGHTS,
                    misclassified=wrong,
                ),
                lambda text: print(text, flush=True),
            )
        result = as_json(found)
        result["config"].pop("outcomes")  # a path of this machine
        result["machine"] = {key: result["machine"][key] for key in ("cores", "python")}
        ids = ids_of(list_of(FAMILIES), result["config"]["task_ids_sha256"])
        cells.append({"cell": "/".join(pair), "ids": ids, **result})
        held = [f"{check['key']} {'holds' if check['holds'] else 'MISSED'}" for check in result["checks"]]
        tables.append(f"## {' / '.join(pair)}\n\n{as_markdown(found)}\n{'; '.join(held)}.")
        write_plot(found, str(RESULTS / f"mismatch_{pair[0]}.svg"))
    record("mismatch", cells, "\n\n".join(tables) + "\n")
    print(json.dumps([cell["checks"] for cell in cells]))


if __name__ == "__main__":
    main()
