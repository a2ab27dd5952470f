"""Useful from the first request: cold passes with a pack fitted on other models and other tasks, and without one.

Reading: SWE+TB2 with a pack >= +1.5 (gpt-5-mini / claude-sonnet-4.5) and >= +0.7 (gpt-5 / claude-sonnet-4.5), aimed at
twice; CodeRouterBench, all models, without a pack >= +6.5; without a pack nowhere more than 0.5 pp below the hull.

Packs are fitted here, on a copy that is thrown away: their sources may not be passed on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import CRB_MODELS, PAIRS, arguments_of, record, run_cell, shown
from loadwise.lab.outcomes import read_outcomes, read_texts
from loadwise.lab.pack import write_pack
from loadwise.lab.pack_build import BuildConfig, build_pack

IDS = ("swe+terminal2", "crb", "pack_0", "pack_1")
FAMILIES = ("swe", "terminal2")
STREAM = "swe+terminal2"
PACKED = ("linucb", "linucb?prior_strength=0.3", "linucb?prior_strength=3", "loadwise")
PLAIN = ("linucb", "loadwise", "linucb?component_ridge=25")
ALL_EIGHT = (*PLAIN, "linucb?component_ridge=25&alpha=0.75", "linucb?component_ridge=25&ridge=0.5")
FIGURE = "chosen.adaptive.over_hull_cross_fitted_pp"
DEFAULT = "loadwise.adaptive.over_hull_cross_fitted_pp"


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 100)
    settings: dict[str, Any] = {"n_orders": arguments.orders, "n_passes": 1}
    cells = []
    for pair in PAIRS:
        with half_packs(arguments.data, excluded={model for one in PAIRS for model in one}) as packs:
            more = {**settings, "policies": PACKED, "packs": packs}
            cells.append(run_cell(f"swe+terminal2 {pair[0]} pack", arguments.data, FAMILIES, pair, ids=STREAM, **more))
        more = {**settings, "policies": PLAIN}
        cells.append(run_cell(f"swe+terminal2 {pair[0]} none", arguments.data, FAMILIES, pair, ids=STREAM, **more))
        record("cold_packs", cells, table(cells))
    settings["policies"] = ALL_EIGHT
    cells.append(run_cell("crb all-8 none", arguments.data, ["crb"], CRB_MODELS, ids="crb", **settings))
    record("cold_packs", cells, table(cells))


@contextmanager
def half_packs(data: Path, excluded: set[str]) -> Iterator[tuple[str, ...]]:
    """Packs of two halves of the tasks, of all models but the excluded ones; a task is scored with the other half's."""
    outcomes, texts = read_outcomes(data, FAMILIES, None), read_texts(data, FAMILIES)
    tasks = sorted(set(zip(outcomes.family, outcomes.task_id, strict=True)))
    with tempfile.TemporaryDirectory() as name:
        paths = []
        for place, half in enumerate(halves(tasks)):
            config = BuildConfig(FAMILIES, None, sorted(excluded), frozenset(half), "not to be passed on")
            path = Path(name) / f"{place}.pack.json"
            write_pack(build_pack(outcomes, texts, config, None, "none"), path)
            paths.append(str(path))
        yield tuple(paths)


def halves(tasks: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """By a seeded permutation within each family."""
    rng = np.random.default_rng(0)
    found: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for family in FAMILIES:
        inside = [task for task in tasks if task[0] == family]
        for place, index in enumerate(rng.permutation(len(inside)).tolist()):
            found[place % 2].append(inside[index])
    return found


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Every cell so far."""
    lines = [
        "One pass, over the hull, pp. Chosen: policy settings and cost weight of each half of the tasks chosen on the"
        " other half, ten halvings. Packs: of all models but gpt-5-mini, gpt-5 and claude-sonnet-4.5, each task scored"
        " with the pack of the half that it is not in; siblings by name. Worst: lowest gain of any setting and weight.",
        "",
        "| cell | chosen | preset loadwise | plain linucb | worst |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for cell in cells:
        worst = min(point["hull_gain_pp"] for point in cell["points"])
        plain = shown(cell, "linucb.adaptive.over_hull_cross_fitted_pp")
        lines.append(f"| {cell['cell']} | {shown(cell, FIGURE)} | {shown(cell, DEFAULT)} | {plain} | {worst:+.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
