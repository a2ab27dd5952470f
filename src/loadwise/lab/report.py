"""A replay as JSON, as Markdown, and as a picture."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadwise import __version__

from .experiment import Result
from .frontier import hull_vertices
from .judge import Point, singles
from .offline import OFFLINE
from .plotting import drawing


def as_json(result: Result, experiment: str = "replay") -> dict[str, Any]:
    """The one object of `--json`; its keys are promised to outside checks."""
    return {
        "name": f"lab.{experiment}",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": [result.config.seed],
        "config": result.described,
        "values": result.judged.values,
        "ci95": {name: list(bounds) for name, bounds in result.judged.ci95.items()},
        "peers": {},
        "checks": [],
        "points": [_as_object(point) for point in result.judged.points],
        "singles": singles(result.stream),
        "n_tasks": result.stream.n_tasks,
        "dropped": dict(result.stream.dropped),
    }


def as_markdown(result: Result) -> str:
    """Tables of the single models, every point, every figure, and every family."""
    described = result.described
    lines = [
        f"# Replay of {', '.join(result.config.families)}",
        "",
        f"{result.stream.n_tasks} tasks (dropped: {_pairs(result.stream.dropped)}), {described['n_orders']} orders,"
        f" {described['n_passes']} passes, {described['scored']} scored, seed {result.config.seed},"
        f" verdicts {described['concurrency']}, in flight {described['in_flight']}, delay {described['delay']},"
        f" loss {described['loss']}. Agents: {_pairs(described['agent'])}."
        f"{_constructed(described)}"
        f" Tasks: sha256 {described['task_ids_sha256'][:16]}. Commit {commit() or 'unknown'}.",
        "",
        "| single model | success | USD per task |",
        "| --- | ---: | ---: |",
    ]
    for model, single in singles(result.stream).items():
        lines.append(f"| {model} | {single['success']:.3f} | {single['cost_usd']:.4f} |")
    lines += ["", "| figure | value | 95 % interval |", "| --- | ---: | ---: |"]
    for name, value in result.judged.values.items():
        lines.append(f"| {name} | {_signed(value)} | {_bounds(result.judged.ci95[name])} |")
    families = result.config.families
    lines += [
        "",
        "Over the hull: success minus that of the best mix of single models at the same cost, in percentage points.",
        "",
        f"| policy | verifier | cost weight | USD per task | success | {' | '.join(families)} | over hull, pp | 95 % |",
        f"| --- | --- | ---: | ---: | ---: | {'---: | ' * len(families)}---: | ---: |",
    ]
    for point in result.judged.points:
        by_family = point.family_success
        parts = " | ".join(f"{by_family[name]:.3f}" if name in by_family else "" for name in families)
        lines.append(
            f"| {point.policy} | {point.verification} | {_setting(point)} | {point.cost_usd:.4f}"
            f" | {point.success:.3f} | {parts} | {_signed(point.hull_gain_pp)} | {_bounds(point.ci95)} |"
        )
    return "\n".join(lines) + "\n"


def _constructed(described: Mapping[str, Any]) -> str:
    """That a family was not measured, and who stands for whom."""
    if "constructed" not in described:
        return ""
    named = ", ".join(f"{model} = {of}" for model, of in described["submissions"].items())
    return f" **Constructed, not measured**: {', '.join(described['constructed'])}, {described['coupling']} ({named})."


def write_plot(result: Result, path: str) -> None:
    """Success against cost: one line per policy and verifier, the single models, and their hull.

    Raises:
        ConfigError: matplotlib is not installed, or it cannot write such a file.
    """
    with drawing(path, 1, size_inches=(8, 5)) as (_, axes):
        _draw(axes, result)


def _draw(axes: Any, result: Result) -> None:
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point in result.judged.points:
        lines.setdefault((point.policy, point.verification), []).append((point.cost_usd, 100.0 * point.success))
    for (policy, verification), found in lines.items():
        is_line = len(found) > 1
        if policy.startswith("fixed:"):
            continue
        axes.plot(*zip(*sorted(found), strict=True), "o-" if is_line else "s", ms=4, label=f"{policy}, {verification}")
    single = singles(result.stream)
    costs, successes = ([one[key] for one in single.values()] for key in ("cost_usd", "success"))
    axes.plot(*_scaled(*hull_vertices(costs, successes)), "k--", lw=1, label="random mixing")
    axes.plot(*_scaled(costs, successes), "k^", ms=7)
    for model, one in single.items():
        axes.annotate(model, (one["cost_usd"], 100.0 * one["success"]), textcoords="offset points", xytext=(5, -10))
    axes.set(xlabel="USD per task", ylabel="success, %", title=", ".join(result.config.families))
    axes.legend(fontsize="x-small")


def machine() -> dict[str, object]:
    """What it ran on."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that ran, with a mark where files differ from it; empty outside a repository."""
    argv = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def as_rows(result: Result) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The points, the single models first, and the figures, as cells for a terminal."""
    points: list[tuple[str, ...]] = [
        ("policy", "verifier", "cost weight", "USD/task", "success", "over hull, pp", "95 %")
    ]
    for model, single in singles(result.stream).items():
        points.append((model, "", "", f"{single['cost_usd']:.4f}", f"{single['success']:.3f}", "", ""))
    for point in result.judged.points:
        cells = (
            _setting(point),
            f"{point.cost_usd:.4f}",
            f"{point.success:.3f}",
            _signed(point.hull_gain_pp),
        )
        points.append((point.policy, point.verification, *cells, _bounds(point.ci95)))
    figures: list[tuple[str, ...]] = [("figure", "value", "95 %")]
    for name, value in result.judged.values.items():
        figures.append((name, _signed(value), _bounds(result.judged.ci95[name])))
    return points, figures


def _as_object(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "ci95": list(point.ci95)}


def _bounds(ci95: tuple[float, float]) -> str:
    return f"[{_signed(ci95[0])}, {_signed(ci95[1])}]"


def _signed(number: float) -> str:
    """Two digits with a sign; nothing is never negative.

    >>> _signed(-0.001), _signed(-1.5)
    ('+0.00', '-1.50')
    """
    return f"{round(number, 2) + 0.0:+.2f}"


def _setting(point: Point) -> str:
    """The cost weight; of a selector that knows none, the number of its point.

    A threshold's points are shares of tasks, a cascade's are lengths of its ladder.
    """
    return f"no. {point.cost_weight:g}" if point.policy in OFFLINE else f"{point.cost_weight:g}"


def _scaled(costs: list[float], successes: list[float]) -> tuple[list[float], list[float]]:
    return costs, [100.0 * success for success in successes]


def _pairs(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())
