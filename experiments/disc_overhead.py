"""The learned allowance for state blocks, under DISC's admission and added to ThunderAgent without it (ORACLE, B.2).

Reading: under `oracle` the allowance is 3.0 to 3.4k tokens while the loop is full, whatever it began with; in the
saturated pool of ThunderAgent (8 GiB, 32 in flight) it is clamped to next to nothing (below 500) where saturated
readings are believed, as a plain estimator does, and the arm's hit ratio is within .05 of ThunderAgent's without it.
Beside it: our estimator, which passes saturated readings over, added to ThunderAgent.
"""

from __future__ import annotations

from experiments.disc_cells import Arm, Grid, arguments_of, record, run_grids, seeds_of, table
from loadwise.lab.disc import Settings
from loadwise.lab.disc_figures import Check, Judge, Results, checked

IDS: tuple[str, ...] = ()
WORLD = "qwen-gh200"
KV_GIB = 8.0
START_TOKENS = 3000
FIELDS = {
    "allowance, tokens": "overhead_mean_tokens",
    "at the end": "overhead_tokens",
    "hit": "hit_ratio",
    "programs/h": "programs_per_h",
    "preempted": "preemptions",
}


def learning(start_tokens: int, *, saturated: bool) -> dict[str, dict[str, int | bool]]:
    """Keys of the router."""
    return {
        "admission": {"learns_overhead": True, "learns_saturated": saturated, "overhead_tokens": start_tokens},
    }


def arms() -> tuple[Arm, ...]:
    """Two pools; with and without the ledger; saturated readings believed or not."""
    found = []
    for pool, kv_gib in (("8 GiB", KV_GIB), ("whole", None)):
        plain, careful = learning(START_TOKENS, saturated=True), learning(START_TOKENS, saturated=False)
        found += [
            Arm(f"{pool}, ThunderAgent", "thunderagent", Settings(kv_gib=kv_gib)),
            Arm(f"{pool}, ThunderAgent learns", "thunderagent", Settings(kv_gib=kv_gib, router=plain)),
            Arm(f"{pool}, ThunderAgent learns unsaturated", "thunderagent", Settings(kv_gib=kv_gib, router=careful)),
        ]
        found += [
            Arm(
                f"{pool}, DISC from {start}", "oracle", Settings(kv_gib=kv_gib, router=learning(start, saturated=False))
            )
            for start in (0, START_TOKENS)
        ]
    return tuple(found)


def checks_of(results: Results) -> list[Check]:
    """What is learned where."""
    judge = Judge(results)
    found: list[Check] = []
    for pool in ("8 GiB", "whole"):
        tokens = judge.mean(WORLD, 32, f"{pool}, DISC from {START_TOKENS}", "overhead_mean_tokens")
        found += checked(f"{pool} at 32: DISC's allowance", tokens, low=3000.0, high=3400.0, published=3200.0)
    arm, plain = "8 GiB, ThunderAgent learns", "8 GiB, ThunderAgent"
    tokens = judge.mean(WORLD, 32, arm, "overhead_mean_tokens")
    hit = judge.gain(WORLD, 32, arm, plain, "hit_ratio")
    found += checked("8 GiB at 32: ThunderAgent's allowance", tokens, high=500.0, published=0.0)
    return found + checked("8 GiB at 32: ThunderAgent's hit, learns - plain", hit, low=-0.05, high=0.05, published=0.0)


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 10, 911)
    results = run_grids([Grid((WORLD,), arms(), (32, 64), seeds_of(arguments))], arguments)
    record("disc_overhead", results, arguments, table(results, FIELDS), checks_of(results), kv_gib=KV_GIB)


if __name__ == "__main__":
    main()
