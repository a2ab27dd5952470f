"""Waits of every system, DISC taken apart, and other pools: ORACLE's Tables 3, 4 and 5.

Reading: `oracle` waits 86 to 130 s on average (Table 3: its range; its values are not published as text). At 96 on the
GH200 pair the three systems that reserve or cap keep a hit ratio above .75 where vLLM and ThunderAgent fall below .3,
and `oracle` resolves 1.38 ± .3 times as many an hour as admission only and 1.30 ± .3 times as many as the cap (Table 4:
130 : 94 : 100). On every other pool `oracle` resolves more an hour than ThunderAgent and vLLM (Table 5: 1.3 to 1.5
times on the H200 Qwen pair, 1.2 to 1.3 on the Mistral pair, 41 against 22 and 23 tasks on one GH200 at 32).
"""

from __future__ import annotations

import argparse

from experiments.disc_cells import Grid, arguments_of, arms_of, record, run_grids, seeds_of, table, wanted
from loadwise.lab.disc import PRESETS
from loadwise.lab.disc_figures import Check, Judge, Results, checked

IDS: tuple[str, ...] = ()
PAIRS = ("qwen-gh200", "qwen-gh200-tight")
WAITING = ("thunderagent", "static_cap", "admission_only", "oracle", "fast", "quality", "loadwise")
FIVE = ("vllm_alone", "thunderagent", "static_cap", "admission_only", "oracle")
POOLS = (("qwen-h200", 96), ("mistral-h200", 96), ("qwen-shared-gh200", 32))
PUBLISHED = {"qwen-h200": {"thunderagent": 1.4, "vllm_alone": 1.4}, "mistral-h200": {"thunderagent": 1.25}}


def main() -> None:
    """Run every cell and record."""
    parts = {"table3": run_waits, "table4": run_five, "table5": run_pools}
    wanted(parts, arguments_of(__doc__, 10, 911))


def run_waits(arguments: argparse.Namespace) -> None:
    """Table 3."""
    results = run_grids([Grid(PAIRS, arms_of(WAITING), (32, 64, 96), seeds_of(arguments))], arguments)
    fields = {"wait, s": "wait_mean_s", "p50": "wait_p50_s", "p95": "wait_p95_s", "diverts": "diverts"}
    judge, checks = Judge(results), []
    for pair in PAIRS:
        for load in (32, 64, 96):
            wait = judge.mean(pair, load, "oracle", "wait_mean_s")
            checks += checked(f"{pair}.{load} oracle wait, s", wait, low=86.0, high=130.0)
    record("disc_table3", results, arguments, table(results, fields), checks)


def run_five(arguments: argparse.Namespace) -> None:
    """Table 4."""
    results = run_grids([Grid(PAIRS, arms_of(FIVE), (32, 64, 96), seeds_of(arguments))], arguments)
    fields = {
        "programs/h": "programs_per_h",
        "resolved": "resolved",
        "resolved/h": "resolved_per_h",
        "hit": "hit_ratio",
        "wait, s": "wait_mean_s",
    }
    record("disc_table4", results, arguments, table(results, fields), five_checks(results))


def five_checks(results: Results) -> list[Check]:
    """Table 4 at 96."""
    return [check for pair in PAIRS for check in pair_checks(Judge(results), pair)]


def pair_checks(judge: Judge, pair: str) -> list[Check]:
    """Those of one world."""
    found: list[Check] = []
    for peer, published in (("admission_only", 130 / 94), ("static_cap", 130 / 100)):
        ratio = judge.ratio(pair, 96, "oracle", peer, "resolved_per_h")
        low, high = published - 0.3, published + 0.3
        found += checked(f"{pair}.96 oracle/{peer} resolved/h", ratio, low=low, high=high, published=published)
    for preset in FIVE:
        hit = judge.mean(pair, 96, preset, "hit_ratio")
        if preset in ("vllm_alone", "thunderagent"):
            found += checked(f"{pair}.96 {preset} hit", hit, high=0.3)
        else:
            found += checked(f"{pair}.96 {preset} hit", hit, low=0.75)
    return found


def run_pools(arguments: argparse.Namespace) -> None:
    """Table 5."""
    grids = [Grid((world,), arms_of(PRESETS), (load,), seeds_of(arguments)) for world, load in POOLS]
    results = run_grids(grids, arguments)
    judge, checks = Judge(results), []
    for world, load in POOLS:
        for peer in ("thunderagent", "vllm_alone"):
            ratio = judge.ratio(world, load, "oracle", peer, "resolved_per_h")
            published = PUBLISHED.get(world, {}).get(peer)
            checks += checked(f"{world}.{load} oracle/{peer} resolved/h", ratio, low=1.0, published=published)
    fields = {"resolved/h": "resolved_per_h", "resolved": "resolved", "programs/h": "programs_per_h"}
    fields |= {"hit": "hit_ratio", "wait, s": "wait_mean_s", "killed": "killed"}
    record("disc_table5", results, arguments, table(results, fields), checks)


if __name__ == "__main__":
    main()
