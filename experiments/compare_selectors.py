"""All selectors side by side: one table per stream, adaptive and single verification paired, cold and steady.

Reading: the default preset is on or above every other selector that makes one attempt per task, on every stream.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import CRB_MODELS, PAIRS, arguments_of, record, run_cell, shown
from loadwise.kernel.streams import Streams
from loadwise.lab.arms import make_arms
from loadwise.lab.features import make_contexts
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.policy.base import Candidate, Context, Feedback

LEARNERS = (
    *("loadwise", "linucb", "lints", "epsilon_greedy", "table", "knn", "acrouter"),
    "acrouter?n_forced=0&exploration_floor=0",
)
OTHERS = ("pacer?budget_ratio=0.1", "pacer?budget_ratio=0.4", "tiers", "threshold", "cascade", "random")


def main() -> None:
    """Run every cell and record."""
    arguments = arguments_of(__doc__, 50)
    settings: dict[str, Any] = {"policies": (*LEARNERS, *OTHERS), "verifications": ("adaptive", "single")}
    latency = decision_us(arguments.data)
    cells: list[dict[str, Any]] = []
    for n_passes in (1, 8):
        for pair in PAIRS:
            name = f"swe+terminal2 {'/'.join(pair)} {n_passes}"
            more = {**settings, "n_orders": arguments.orders, "n_passes": n_passes}
            cells.append(run_cell(name, arguments.data, ("swe", "terminal2"), pair, **more))
            record("selectors", cells, table(cells, latency))  # after each cell: the last ones take an hour
        more = {**settings, "n_orders": max(arguments.orders // 10, 1), "n_passes": n_passes}
        # One verifier reads all of CodeRouterBench, and it is not the patch verifier: adaptive only.
        more["verifications"] = ("adaptive",)
        cells.append(run_cell(f"crb all-8 {n_passes}", arguments.data, ("crb",), CRB_MODELS, **more))
        record("selectors", cells, table(cells, latency))


def table(cells: list[dict[str, Any]], latency: dict[str, str]) -> str:
    """Every selector against every cell so far, and the best of each."""
    lines = [
        "Cross-fitted gain over the hull, pp (cost weight or threshold of each half chosen on the other); for one-point"
        " selectors the gain of the point. The cascade makes more than one attempt a task.",
        "",
        "| selector | " + " | ".join(f"{cell['cell']} passes" for cell in cells) + " | choose, µs |",
        "| --- |" + " --- |" * (len(cells) + 1),
    ]
    for verification in ("adaptive", "single"):
        for policy in (*LEARNERS, *OTHERS, "per_task_best"):
            found = [gain(cell, policy, verification) for cell in cells]
            if any(found):
                lines.append(f"| {policy}, {verification} | {' | '.join(found)} | {latency.get(policy, '')} |")
    lines += ["", "Best selectors of one attempt per stream under adaptive verification:", ""]
    for cell in cells:
        ranked = sorted(((number(cell, policy), policy) for policy in (*LEARNERS, *OTHERS[:4])), reverse=True)
        lines.append(f"- {cell['cell']} passes: " + ", ".join(f"{policy} {value:+.1f}" for value, policy in ranked[:4]))
    return "\n".join(lines) + "\n"


def points_of(cell: dict[str, Any], policy: str, verification: str) -> list[dict[str, Any]]:
    """The points of one selector."""
    return [one for one in cell["points"] if one["policy"] == policy and one["verification"] == verification]


def gain(cell: dict[str, Any], policy: str, verification: str) -> str:
    """Cross-fitted where there are several points, else that of the one point."""
    crossed = shown(cell, f"{policy}.{verification}.over_hull_cross_fitted_pp")
    points = points_of(cell, policy, verification)
    if crossed or not points:
        return crossed
    low, high = points[0]["ci95"]
    return f"{points[0]['hull_gain_pp']:+.1f} [{low:+.1f}, {high:+.1f}]"


def number(cell: dict[str, Any], policy: str) -> float:
    """The same as a number."""
    name = f"{policy}.adaptive.over_hull_cross_fitted_pp"
    if name in cell["values"]:
        return float(cell["values"][name])
    points = points_of(cell, policy, "adaptive")
    return float(points[0]["hull_gain_pp"])


def decision_us(data: Path) -> dict[str, str]:
    """Median time of `choose` after 500 verdicts, in microseconds; an LLM orchestrator takes 209,000 (paper)."""
    stream = read_stream(data, ["swe", "terminal2"], list(PAIRS[0]), AgentChoice.parse(None))
    contexts = make_contexts(stream, "hash", 16)
    prices = dict(zip(stream.models, stream.cost_usd.mean(axis=0).tolist(), strict=True))
    candidates = [Candidate(name=model, price_usd=price) for model, price in prices.items()]
    found = {}
    for arm in make_arms([*LEARNERS, *OTHERS[:2]], stream.models):
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
    return found


if __name__ == "__main__":
    main()
