"""How often the 95 % interval of `loadwise whatif` covers the truth, over simulated logs of preset `loadwise`.

Reading: the doubly robust interval of success covers in 93 to 97 % of the logs, in every world, pooled over the
policies asked about; a policy alone may deviate by what 200 logs leave to chance (1.5 points a standard error). The
truth is what the policy earns when it is run on many fresh programs of the same world.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from experiments.cells import NO_IDS, RESULTS
from loadwise import __version__
from loadwise.kernel.streams import Streams
from loadwise.lab.report import commit
from loadwise.lab.whatif import evaluate
from loadwise.lab.whatif_log import OUTCOMES, Log, Refusal, read_log
from loadwise.lab.whatif_target import make_target, parse_target
from loadwise.lab.whatif_world import Programs, WorldSpec, draw_programs, outcomes_of, world_config, write_log
from loadwise.policy.base import Candidate, Context
from loadwise.policy.stateless import Stateless
from loadwise.settings import Config

IDS: tuple[str, ...] = ()
"""Logs are simulated: there are no tasks to list."""
FIRST_SEED = 10_000
"""Seeds below were used while the interval was chosen, in two other worlds."""
N_FRESH = 100_000
N_FRESH_LEARNED = 3_000

WORLDS = (
    WorldSpec(
        name="pair",
        success={"small": {"patch": 0.3, "support": 0.75}, "large": {"patch": 0.6, "support": 0.85}},
        usd_per_million={"small": 0.5, "large": 4.0},
    ),
    WorldSpec(
        name="three",
        success={
            "mini": {"code": 0.45, "math": 0.55, "chat": 0.8},
            "mid": {"code": 0.6, "math": 0.5, "chat": 0.85},
            "top": {"code": 0.75, "math": 0.8, "chat": 0.8},
        },
        usd_per_million={"mini": 0.3, "mid": 1.0, "top": 5.0},
        n_components=8,
        text_effect=0.7,
        in_flight=64,
        loss_ratio=0.15,
    ),
)
TARGETS = {
    "pair": ("fixed:small", "fixed:large", 'mixing?weights={"small":0.7,"large":0.3}', "random", "linucb?alpha=0.1"),
    "three": ("fixed:mini", "fixed:mid", "fixed:top", "random", "linucb?alpha=0.1", "epsilon_greedy"),
}


N_PROGRAMS = {"pair": 1000, "three": 2000}


def ask(policy: Any, config: Config, spec: WorldSpec, programs: Programs, models: tuple[str, ...]) -> np.ndarray:
    """How likely the policy chooses each model for each program, shape (n, models of the world)."""
    context, streams = config.router.context, Streams(1)
    price = spec.usd_per_million
    candidates = [Candidate(name=name, price_usd=price[name]) for name in models]
    place = [spec.models.index(name) for name in models]
    found = np.zeros((len(programs.kind), len(models)))
    for row, kind in enumerate(programs.kind):
        x = context.features(spec.task_types[kind], None, programs.components[row].tolist())
        task = Context(decision_id=row, x=x, task_type=spec.task_types[kind])
        choice = policy.choose(task, candidates, streams.at("policy", row))
        found[row, place] = choice.propensities or policy.propensities(choice, streams.at("propensity", row))
    return found


class Fresh(NamedTuple):
    """Programs that no log has seen, and what every model earns on them."""

    programs: Programs
    outcomes: np.ndarray
    """Shape (n, models, outcomes)."""


def truth_of(log: Log, config: Config, spec: WorldSpec, said: str, fresh: Fresh) -> np.ndarray:
    """What the policy earns, shape (outcomes,): run on fresh programs, in the state in which what-if evaluates it.

    A learner is asked about the first of them only; how they differ from all is known of the models' mean, and taken
    out.
    """
    arm = parse_target(said, spec.models)
    policy = arm.make(config.router.context, {})
    is_stateless = isinstance(policy, Stateless)
    if not is_stateless:
        policy = make_target(log, arm, config.router.context, 0.5, 0).policy
    n_asked = 1 if is_stateless else N_FRESH_LEARNED  # those without memory do not look at the context
    chances = ask(policy, config, spec, Programs(*(part[:n_asked] for part in fresh.programs)), tuple(config.models))
    if is_stateless:
        return (chances[0][:, None] * fresh.outcomes.mean(axis=0)).sum(axis=0)
    asked = fresh.outcomes[:n_asked]
    gain = ((chances - 1.0 / len(spec.models))[:, :, None] * asked).sum(axis=1).mean(axis=0)
    return fresh.outcomes.mean(axis=(0, 1)) + gain


def run_world(spec: WorldSpec, n_logs: int, n_programs: int) -> dict[str, Any]:
    """Coverage and width by policy and figure."""
    config = world_config(spec)
    programs = draw_programs(spec, N_FRESH, np.random.default_rng(77))
    fresh = Fresh(programs, outcomes_of(spec, config, programs))
    covered: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    widths: dict[str, list[float]] = {}
    effective: dict[str, list[float]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + n_logs):
        log = read_log(write_log(spec, config, n_programs, seed), config.models)
        for said in TARGETS[spec.name]:
            try:
                found = evaluate(log, config, said, seed=seed)
            except Refusal:
                refused[said] += 1
                continue
            truth = truth_of(log, config, spec, said, fresh)
            effective.setdefault(said, []).append(found.estimates.effective_n)
            for outcome, true in zip(OUTCOMES, truth, strict=True):
                for key in ("dr", "snips", "ips"):
                    figure = f"{outcome}.{key}"
                    one = found.estimates.by_name[figure]
                    for name in (f"{said} {figure}", f"all {figure}"):
                        asked[name] += 1
                        covered[name] += one.low <= true <= one.high
                        widths.setdefault(name, []).append((one.high - one.low) / 2.0)
        if (seed + 1 - FIRST_SEED) % 50 == 0:
            print(f"{spec.name}: {seed + 1 - FIRST_SEED} logs", file=sys.stderr, flush=True)
    return {
        "world": spec.name,
        "n_logs": n_logs,
        "n_programs": n_programs,
        "coverage": {name: covered[name] / n for name, n in asked.items()},
        "n": dict(asked),
        "half_width": {name: float(np.median(found)) for name, found in widths.items()},
        "effective_n": {said: float(np.median(found)) for said, found in effective.items()},
        "refused": dict(refused),
    }


def as_object(cells: list[dict[str, Any]], n_logs: int) -> dict[str, Any]:
    """The one JSON object."""
    values, ci95, checks = {}, {}, []
    for cell in cells:
        for name, ratio in cell["coverage"].items():
            key = f"{cell['world']}.{name.replace(' ', '.')}"
            # Policies asked about one log share its luck: an interval counts logs.
            half = 1.96 * float(np.sqrt(ratio * (1.0 - ratio) / n_logs))
            values[key], ci95[key] = ratio, [ratio - half, ratio + half]
        key = f"{cell['world']}.all.success.dr"
        for op, bound in ((">=", 0.93), ("<=", 0.97)):
            holds = values[key] >= bound if op == ">=" else values[key] <= bound
            checks.append({"key": key, "op": op, "bound": bound, "holds": bool(holds)})
    return {
        "name": "whatif_coverage",
        "ids": NO_IDS,
        "version": __version__,
        "commit": commit(),
        "machine": {},
        "seeds": [FIRST_SEED, FIRST_SEED + n_logs - 1],
        "config": {"targets": {name: list(said) for name, said in TARGETS.items()}},
        "values": values,
        "ci95": ci95,
        "peers": {},
        "checks": checks,
        "cells": cells,
    }


def as_table(result: dict[str, Any]) -> str:
    """Coverage of the doubly robust intervals as Markdown."""
    lines = [
        "Coverage of the 95 % interval, %; half-width of the interval of success; decisions' worth. Seeds"
        f" {result['seeds'][0]} to {result['seeds'][1]}, commit {result['commit']}.",
        "",
        "| world | policy | success, DR | SNIPS | IPS | cost, DR | reward, DR | half-width | worth | refused |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in result["cells"]:
        for said in (*TARGETS[cell["world"]], "all"):
            if f"{said} success.dr" not in cell["coverage"]:
                continue
            shown = [
                f"{100 * cell['coverage'][f'{said} {figure}']:.1f}"
                for figure in ("success.dr", "success.snips", "success.ips", "cost_usd.dr", "reward.dr")
            ]
            width = cell["half_width"][f"{said} success.dr"]
            worth = f"{cell['effective_n'][said]:.0f}" if said in cell["effective_n"] else ""
            refused = cell["refused"].get(said, "") if said != "all" else sum(cell["refused"].values())
            lines.append(f"| {cell['world']} | {said} | {' | '.join(shown)} | {width:.3f} | {worth} | {refused} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=int, default=200)
    parser.add_argument("--programs", type=int, help="of each log (default 1000 and 2000)")
    parser.add_argument("--world", choices=list(N_PROGRAMS), help="one of them only, printed")
    parser.add_argument("--json", action="store_true", help="print the result instead of recording it")
    parser.add_argument("--quick", action="store_true", help="few logs: whether it runs, not how it covers")
    arguments = parser.parse_args()
    n_logs = 10 if arguments.quick else arguments.logs
    worlds = [spec for spec in WORLDS if arguments.world in (None, spec.name)]
    cells = [run_world(spec, n_logs, arguments.programs or N_PROGRAMS[spec.name]) for spec in worlds]
    result = as_object(cells, n_logs)
    if arguments.json or arguments.quick or arguments.world is not None:
        print(json.dumps(result))
        return
    (RESULTS / "whatif_coverage.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "whatif_coverage.md").write_text(as_table(result))
    print(as_table(result))


if __name__ == "__main__":
    main()
