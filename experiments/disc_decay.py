"""ThunderAgent's decay on and off, on the whole pool and on one of 8 GiB (ORACLE, B.1).

Reading: on the 8 GiB pool at 32 the result does not depend on the decay: hit ratios differ by at most .02 and p95 of
calls by at most 30 % (paper, two seeds: hit .010 and .023 off, .006 and .021 on; p95 106 and 77 s off, 80 and 85 s on).
"""

from __future__ import annotations

from experiments.disc_cells import Arm, Grid, arguments_of, record, run_grids, seeds_of, table
from loadwise.lab.disc import Settings
from loadwise.lab.disc_figures import Check, Judge, Results, checked

IDS: tuple[str, ...] = ()
WORLD = "qwen-gh200"
KV_GIB = 8.0
OFF = {"admission": {"pause": {"has_decay": False}}}
SMALL_ON, SMALL_OFF = "8 GiB, decay on", "8 GiB, decay off"
FIELDS = {
    "hit": "hit_ratio",
    "call p95, s": "call_p95_s",
    "programs/h": "programs_per_h",
    "killed": "killed",
    "preempted": "preemptions",
    "wait, s": "wait_mean_s",
}


def arms() -> tuple[Arm, ...]:
    """Two pools, decay on and off, and `oracle` beside them."""
    return (
        Arm(SMALL_ON, "thunderagent", Settings(kv_gib=KV_GIB)),
        Arm(SMALL_OFF, "thunderagent", Settings(kv_gib=KV_GIB, router=OFF)),
        Arm("8 GiB, oracle", "oracle", Settings(kv_gib=KV_GIB)),
        Arm("whole, decay on", "thunderagent"),
        Arm("whole, decay off", "thunderagent", Settings(router=OFF)),
    )


def checks_of(results: Results) -> list[Check]:
    """On against off."""
    judge = Judge(results)
    hit = judge.gain(WORLD, 32, SMALL_ON, SMALL_OFF, "hit_ratio")
    p95 = judge.ratio(WORLD, 32, SMALL_ON, SMALL_OFF, "call_p95_s")
    return [
        *checked("8 GiB at 32: hit, on - off", hit, low=-0.02, high=0.02, published=-0.003),
        *checked("8 GiB at 32: call p95, on / off", p95, low=0.7, high=1.3, published=0.9),
    ]


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 10, 911)
    results = run_grids([Grid((WORLD,), arms(), (32, 64), seeds_of(arguments))], arguments)
    record("disc_decay", results, arguments, table(results, FIELDS), checks_of(results), kv_gib=KV_GIB)


if __name__ == "__main__":
    main()
