"""All selectors side by side: one table of every stream, adaptive and single verification paired, cold and steady.

Reading: the preset `loadwise` is on or above every other selector that makes one attempt a task, on every stream: the
paired 95 % interval of its cross-fitted gain minus the other's is nowhere wholly below zero. `single` is one verifier
for all, which reads patches: it reads nothing of CodeRouterBench.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import CRB_MODELS, PAIRS, arguments_of, list_of, record, recorded, run_cell, shown
from experiments.cold_packs import half_packs
from loadwise.kernel.streams import Streams
from loadwise.lab.arms import make_arms
from loadwise.lab.experiment import Result
from loadwise.lab.features import make_contexts
from loadwise.lab.judge import BEST, paired_gains
from loadwise.lab.offline import complexity
from loadwise.lab.stream import AgentChoice, Stream, read_stream
from loadwise.policy.base import Candidate, Context, Feedback

IDS = ("swe+terminal2", "crb", "pack_0", "pack_1")
PRESET = "loadwise"
RELEASED = "acrouter?n_forced=0&exploration_floor=0"
"""ACRouter's rule as released; `acrouter` alone tries every model first, as the code of its study does."""
LEARNERS = (PRESET, "linucb", "lints", "epsilon_greedy", "table", "knn", "acrouter", RELEASED)
PACERS = ("pacer?budget_ratio=0.1", "pacer?budget_ratio=0.4")
FITTED = ("threshold",)
"""Knows both models' outcomes on the other half of the tasks before the first request."""
OTHERS = (*PACERS, "tiers", *FITTED, "random")
ONE_ATTEMPT = (*LEARNERS, *OTHERS)
VERIFICATIONS = ("adaptive", "single")
ORDERS = {1: 30, 8: 8}
ORDERS_CRB = {1: 10, 8: 2}
"""By passes: eight of CodeRouterBench are 200,000 decisions an order and selector."""
FIGURE = "over_hull_cross_fitted_pp"


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, ORDERS[1])
    cells = recorded("selectors") if arguments.only is not None else {}
    latency = decision_us(arguments.data)
    for n_passes in (1, 8):
        streams = [(("swe", "terminal2"), pair, ORDERS) for pair in PAIRS] + [(("crb",), tuple(CRB_MODELS), ORDERS_CRB)]
        for families, models, orders in streams:
            name = f"{'+'.join(families)} {'/'.join(models) if len(models) == 2 else 'all-8'} {n_passes}"
            if arguments.only is not None and arguments.only not in name:
                continue
            settings: dict[str, Any] = {
                "policies": (*ONE_ATTEMPT, "cascade"),
                "verifications": VERIFICATIONS,
                "n_orders": max(arguments.orders * orders[n_passes] // ORDERS[1], 1),
                "n_passes": n_passes,
            }
            ids = list_of(families)
            cells[name] = run_cell(name, arguments.data, families, models, ids=ids, add=paired, **settings)
            record("selectors", list(cells.values()), table(list(cells.values()), latency))
    if arguments.only is None or arguments.only in "pack":
        cells |= {one["cell"]: one for one in known_beforehand(arguments.data, arguments.orders)}
        record("selectors", list(cells.values()), table(list(cells.values()), latency))


def known_beforehand(data: Path, orders: int) -> list[dict[str, Any]]:
    """Cold, the preset with a pack of other models and tasks beside the threshold, which was fitted beforehand too."""
    found = []
    for pair in PAIRS:
        with half_packs(data, excluded={model for one in PAIRS for model in one}) as packs:
            settings: dict[str, Any] = {"policies": (PRESET, *FITTED), "packs": packs, "n_orders": orders}
            name = f"swe+terminal2 {'/'.join(pair)} 1 pack"
            ids = list_of(("swe", "terminal2"))
            more = {"ids": ids, "add": paired, "n_passes": 1, **settings}
            found.append(run_cell(name, data, ("swe", "terminal2"), pair, **more))
    return found


def paired(result: Result) -> dict[str, Any]:
    """The preset minus every other selector, and each learner's adaptive verification minus its single one."""
    arms = {(one.policy, one.verification) for one in result.scored}
    pairs = {}
    for policy, verification in sorted(arms):
        if policy not in (PRESET, BEST, "cascade"):
            pairs[f"preset_minus.{policy}.{verification}"] = ((PRESET, verification), (policy, verification))
        if (policy, "single") in arms and verification == "adaptive" and policy in (*LEARNERS, *PACERS, "cascade"):
            pairs[f"adaptive_minus_single.{policy}"] = ((policy, "adaptive"), (policy, "single"))
    found = paired_gains(result.judged, pairs)
    return {"paired": {name: {"value": one.value, "ci95": list(one.ci95)} for name, one in found.items()}}


def table(cells: Sequence[dict[str, Any]], latency: dict[str, str]) -> str:
    """Every selector against every cell so far, and how the preset stands to each."""
    packed = [cell for cell in cells if cell["cell"].endswith(" pack")]
    cells = [cell for cell in cells if cell not in packed]
    head = " | ".join(f"{short(cell)}" for cell in cells)
    orders = [f"{short(cell)} passes: {cell['config']['n_orders']}" for cell in cells]
    lines = [
        "Cross-fitted gain over the hull, pp (cost weight or threshold of each half chosen on the other); for selectors"
        " of one point the gain of the point. One attempt a task, the cascade apart. No selector here spends tokens.",
        f"Orders: {'; '.join(orders)}. Seed 0.",
        "",
        f"| selector | {head} | choose, µs |",
        "| --- |" + " --- |" * len(cells) + " ---: |",
    ]
    for verification in VERIFICATIONS:
        for policy in (*ONE_ATTEMPT, "cascade", BEST):
            found = [gain(cell, policy, verification) for cell in cells]
            lines.append(f"| {policy}, {verification} | {' | '.join(found)} | {latency.get(policy, '')} |")
    lines += [
        "",
        "Preset `loadwise` minus the selector, adaptive, paired, pp; **below** where the whole interval is.",
        "",
        f"| selector | {head} |",
        "| --- |" + " --- |" * len(cells),
    ]
    for policy in (one for one in ONE_ATTEMPT if one != PRESET):
        found = [difference(cell, f"preset_minus.{policy}.adaptive") for cell in cells]
        lines.append(f"| {policy} | {' | '.join(found)} |")
    lines += [
        "",
        "Adaptive minus single verification of the same selector, paired, cross-fitted, pp.",
        "",
        f"| selector | {head} |",
        "| --- |" + " --- |" * len(cells),
    ]
    for policy in (*LEARNERS, *PACERS, "cascade"):
        found = [difference(cell, f"adaptive_minus_single.{policy}") for cell in cells]
        lines.append(f"| {policy} | {' | '.join(found)} |")
    return "\n".join([*lines, "", *attempts(cells), "", *standing(cells), *told_before(packed)]) + "\n"


def told_before(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The preset and the threshold where both know something before the first request."""
    if not cells:
        return []
    lines = [
        "",
        "Cold with knowledge from before: the threshold knows both models on the other half of the tasks; a pack other"
        " models on the other half, not these two.",
        "",
        "| stream | preset with a pack | threshold | difference, paired |",
        "| --- | --- | --- | --- |",
    ]
    for cell in cells:
        gains = [gain(cell, policy, "adaptive") for policy in (PRESET, *FITTED)]
        name = cell["cell"].removesuffix(" 1 pack")
        lines.append(f"| {name} | {' | '.join(gains)} | {difference(cell, 'preset_minus.threshold.adaptive')} |")
    return lines


def short(cell: dict[str, Any]) -> str:
    """A cell's name for a column: stream, cheaper model, passes."""
    stream, models, passes = cell["cell"].split(" ")
    return f"{stream} {models.split('/')[0]}, {passes}"


def attempts(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What the cascade spends: it is no match for selectors of one attempt (`escalation.md` grants equal attempts)."""
    lines = [
        "The cascade, adaptive, by its length: attempts a task, success and gain over the hull at its cost.",
        "",
        "| stream | attempts, success %, over hull pp |",
        "| --- | --- |",
    ]
    for cell in cells:
        if cell["config"]["n_passes"] == 1:
            points = points_of(cell, "cascade", "adaptive")
            told = [
                f"{sum(one['share'].values()):.2f}, {100 * one['success']:.1f}, {one['hull_gain_pp']:+.1f}"
                for one in points
            ]
            lines.append(f"| {short(cell)} | {'; '.join(told)} |")
    return lines


def standing(cells: Sequence[dict[str, Any]]) -> list[str]:
    """For each stream where the preset is on or above the frontier of all, and where it is not."""
    lines = ["Where preset `loadwise` stands among selectors of one attempt, adaptive:", ""]
    for cell in cells:
        ranked = sorted(((number(cell, policy), policy) for policy in ONE_ATTEMPT), reverse=True)
        below = [
            f"{policy} ({difference(cell, f'preset_minus.{policy}.adaptive').replace('**below** ', '')})"
            for policy in ONE_ATTEMPT
            if policy != PRESET and cell["paired"][f"preset_minus.{policy}.adaptive"]["ci95"][1] < 0.0
        ]
        place = [policy for _, policy in ranked].index(PRESET) + 1
        best = ", ".join(f"{policy} {value:+.1f}" for value, policy in ranked[:4])
        verdict = f"below {', '.join(below)}" if below else "on or above all"
        lines.append(f"- {short(cell)}: {verdict}; place {place} of {len(ranked)}: {best}")
    return lines


def points_of(cell: dict[str, Any], policy: str, verification: str) -> list[dict[str, Any]]:
    """The points of one selector."""
    return [one for one in cell["points"] if one["policy"] == policy and one["verification"] == verification]


def difference(cell: dict[str, Any], name: str) -> str:
    """A paired difference with its interval."""
    found = cell["paired"].get(name)
    if found is None:
        return ""
    low, high = found["ci95"]
    return f"{'**below** ' if high < 0.0 else ''}{found['value']:+.1f} [{low:+.1f}, {high:+.1f}]"


def gain(cell: dict[str, Any], policy: str, verification: str) -> str:
    """Cross-fitted where there are several points, else that of the one point."""
    crossed = shown(cell, f"{policy}.{verification}.{FIGURE}")
    points = points_of(cell, policy, verification)
    if crossed or not points:
        return crossed
    low, high = points[0]["ci95"]
    return f"{points[0]['hull_gain_pp']:+.1f} [{low:+.1f}, {high:+.1f}]"


def number(cell: dict[str, Any], policy: str) -> float:
    """The same as a number, adaptive."""
    name = f"{policy}.adaptive.{FIGURE}"
    if name in cell["values"]:
        return float(cell["values"][name])
    return float(points_of(cell, policy, "adaptive")[0]["hull_gain_pp"])


def decision_us(data: Path) -> dict[str, str]:
    """Median time of `choose` after 500 verdicts, in microseconds; an LLM orchestrator takes 209,000 (paper)."""
    stream = read_stream(data, ["swe", "terminal2"], list(PAIRS[0]), AgentChoice.parse(None))
    contexts = make_contexts(stream, "hash", 16)
    prices = dict(zip(stream.models, stream.cost_usd.mean(axis=0).tolist(), strict=True))
    candidates = [Candidate(name=model, price_usd=price) for model, price in prices.items()]
    found = {}
    for arm in make_arms([*LEARNERS, *PACERS, "random"], stream.models):
        policy, streams = arm.make(contexts.spec, prices), Streams(0)
        taken = []
        for step in range(1000):
            context = Context(decision_id=step, x=contexts.x[step % stream.n_tasks])
            rng = streams.at("policy", step)
            begin = time.perf_counter()
            choice = policy.choose(context, candidates, rng)
            taken.append(time.perf_counter() - begin)
            name = candidates[choice.chosen].name
            policy.observe(step, name, context.x)
            policy.learn(Feedback(decision_id=step, candidate=name, x=context.x, reward=float(step % 2)))
        found[arm.label] = f"{1e6 * float(np.median(taken[500:])):.0f}"
    theta = np.ones(contexts.x.shape[1])
    found["tiers"] = median_us(stream, lambda task: complexity(stream.texts[task]))
    found["threshold"] = median_us(stream, lambda task: float(contexts.x[task] @ theta) > 0.0)
    return found


def median_us(stream: Stream, decide: Callable[[int], object]) -> str:
    """Median time of a decision over all tasks."""
    taken = []
    for task in range(stream.n_tasks):
        begin = time.perf_counter()
        decide(task)
        taken.append(time.perf_counter() - begin)
    return f"{1e6 * float(np.median(taken)):.0f}"


if __name__ == "__main__":
    main()
