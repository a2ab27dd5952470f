"""The weight of waiting at 64 in flight, beside learners of their own per slot (ORACLE, Fig. 7b).

Reading: at beta 0 preset `oracle` reaches .83 ± .1 of the programs/h of per-slot learners in the same stack, at .3 and
.5 between 1.1 and 1.4 (paper: 1.2 to 1.3), and resolved never rises with beta by more than chance. Two selectors: one
that learns from late verdicts as the paper's does, and one that knows every success from the start.
"""

from __future__ import annotations

from itertools import pairwise, product

from experiments.disc_cells import Arm, Grid, arguments_of, plot_bars, record, run_grids, seeds_of, table
from loadwise.lab.disc import Settings
from loadwise.lab.disc_figures import Check, Judge, Results, checked, is_monotone

IDS: tuple[str, ...] = ()
WORLDS = ("qwen-gh200", "qwen-gh200-tight")
LOAD = 64
BETAS = (0.0, 0.2, 0.3, 0.5, 1.0)
LEARNS = {"name": "linucb"}
SLOTS = "slots"
SELECTORS = ("known", "learns")
BANDS = {0.0: (0.73, 0.93, 0.83), 0.2: (0.9, 1.1, 1.0), 0.3: (1.1, 1.4, 1.25), 0.5: (1.1, 1.4, 1.25)}
"""By beta: least and largest ratio to per-slot learners, and the paper's."""
FIELDS = {
    "programs/h": "programs_per_h",
    "resolved": "resolved",
    "wait, s": "wait_mean_s",
    "hit": "hit_ratio",
    "dear": "dear_share",
    "routed to the dear": "routed_dear_share",
    "diverts": "diverts",
}


def arms() -> tuple[Arm, ...]:
    """Both selectors at every weight, and learners per slot behind admission or without any."""
    slots = Settings(selector=LEARNS, router={"feedback": {"arm": "per_slot", "size": LOAD}})
    return (
        *(Arm(f"known {beta:g}", "oracle", Settings(beta=beta)) for beta in BETAS),
        *(Arm(f"learns {beta:g}", "oracle", Settings(beta=beta, selector=LEARNS)) for beta in BETAS),
        Arm(SLOTS, "admission_only", slots),
        Arm(f"{SLOTS}, no admission", "vllm_alone", slots),
    )


def checks_of(results: Results) -> list[Check]:
    """Ratios to per-slot learners."""
    judge = Judge(results)
    found: list[Check] = []
    for world, selector in product(WORLDS, SELECTORS):
        for beta, (low, high, published) in BANDS.items():
            ratio = judge.ratio(world, LOAD, f"{selector} {beta:g}", SLOTS, "programs_per_h")
            key = f"{world} {selector} {beta:g}/{SLOTS} programs/h"
            found += checked(key, ratio, low=low, high=high, published=published)
    return found


def monotone_line(results: Results) -> str:
    """Whether resolved falls and programs/h rise with beta, step by step."""
    judge, lines = Judge(results), []
    for world, selector in product(dict.fromkeys(world for world, _, _ in results), SELECTORS):
        names = [f"{selector} {beta:g}" for beta in BETAS]
        for field, rises in (("resolved", False), ("programs_per_h", True)):
            steps = [judge.gain(world, LOAD, b, a, field) for a, b in pairwise(names)]
            known = [step for step in steps if step is not None]
            word = "rises" if rises else "falls"
            lines.append(
                f"- {world}, {selector}: {field} {word} with beta: {'yes' if is_monotone(known, rises=rises) else 'NO'}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 12, 921)
    results = run_grids([Grid(WORLDS, arms(), (LOAD,), seeds_of(arguments))], arguments)
    plot_bars("disc_beta", results, {"programs/h": "programs_per_h", "resolved": "resolved"}, arguments)
    text = table(results, FIELDS) + "\n\n" + monotone_line(results)
    record("disc_beta", results, arguments, text, checks_of(results))


if __name__ == "__main__":
    main()
