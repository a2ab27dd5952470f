"""What `lab mismatch` found, as JSON, as tables and as a picture."""

from typing import Any

from loadwise import __version__

from .judge import singles
from .mismatch import ARMS, Mismatch, described
from .plotting import drawing
from .report import commit, machine

COLOURS = {"uninformed": "0.7", "patch_only": "tab:red", "adaptive": "tab:blue", "best_fixed": "tab:green"}
LABELS = {
    "uninformed": "uninformed",
    "patch_only": "patch verifier only",
    "adaptive": "adaptive",
    "best_fixed": "best fixed verifier",
}


def as_json(found: Mismatch) -> dict[str, Any]:
    """The one object of `--json`."""
    mixed = found.mixed
    points = [
        {
            "policy": found.config.policy,
            "verification": arm,
            "cost_weight": weight,
            "cost_usd": float(mixed.cost_usd[arm, weight].mean()),
            "success": float(success.mean()),
            "share": dict(zip(mixed.stream.models, mixed.share[arm, weight].tolist(), strict=True)),
        }
        for (arm, weight), success in mixed.success.items()
    ]
    return {
        "name": "lab.mismatch",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": list(found.config.seeds),
        "config": described(found),
        "values": found.values,
        "ci95": {key: list(bounds) for key, bounds in found.ci95.items()},
        "peers": {},
        "checks": found.checks,
        "points": points,
        "singles": singles(mixed.stream),
        "n_tasks": mixed.stream.n_tasks,
    }


def as_rows(found: Mismatch) -> list[tuple[str, ...]]:
    """Table 1 and Fig. 2a as rows: families alone, then within the mixed stream."""
    header = ("family", "patch only, pp", "adaptive, pp", "best fixed, pp", "adaptive - best", "mixed: over patch only")
    rows: list[tuple[str, ...]] = [header]
    for family in found.config.families:
        alone = [f"alone.{family}.{arm}.gain_pp" for arm in ARMS] + [f"alone.{family}.adaptive_minus_best_fixed_pp"]
        rows.append((family, *(_shown(found, key) for key in [*alone, f"mixed.{family}.adaptive_over_patch_only_pp"])))
    return rows


def as_markdown(found: Mismatch) -> str:
    """The table, and the mixed stream by family."""
    header, *rows = as_rows(found)
    config = described(found)
    counts = ", ".join(f"{name} {n}" for name, n in config["tasks_per_family"].items())
    wrong = ", ".join(f"{name} {100 * ratio:.1f} %" for name, ratio in config["misclassified_ratio"].items())
    lines = [
        "Families alone at cost weight 0: success over the uninformed choice, pp; last column: the mixed stream of"
        f" {found.mixed.stream.n_tasks} tasks ({counts}). {config['policy']}, {config['n_passes']} passes,"
        f" {config['n_orders']} orders of each of the seeds {', '.join(map(str, found.config.seeds))}; wrong verifier:"
        f" {wrong}.",
        "",
        f"| {' | '.join(header)} |",
        f"| --- | {' | '.join(['---'] * (len(header) - 1))} |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "| mixed stream, success % | uninformed | patch only | adaptive | best fixed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in found.config.families:
        cells = [_percent(found, f"mixed.{family}.{arm}.success") for arm in ("uninformed", *ARMS)]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    cells = [_percent(found, f"mixed.{arm}.success") for arm in ("uninformed", *ARMS)]
    lines.append(f"| all | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_plot(found: Mismatch, path: str) -> None:
    """Fig. 2a, 8a and 8b, from left to right.

    Raises:
        ConfigError: matplotlib is not installed, or it cannot write such a file.
    """
    with drawing(path, 3, size_inches=(15, 4.5), dpi=110) as (figure, (left, middle, right)):
        families = found.config.families
        _bars(left, found, ("uninformed", *ARMS), [f"mixed.{family}.{{}}.success" for family in families], scale=100.0)
        left.set(ylabel="success, %", title="Each family within the mixed stream, cost weight 0")
        _draw_shares(middle, found)
        _bars(right, found, tuple(ARMS), [f"alone.{family}.{{}}.gain_pp" for family in families], scale=1.0)
        right.axhline(0.0, color="black", lw=0.8)
        right.set(ylabel="over the uninformed choice, pp", title="Each family alone, cost weight 0")
        for axes in (left, right):
            axes.set_xticks(range(len(families)), families)
        left.set_ylim(top=left.get_ylim()[1] * 1.2)
        left.legend(fontsize="small", loc="upper right", ncols=2)
        figure.tight_layout()


def _bars(axes: Any, found: Mismatch, arms: tuple[str, ...], keys: list[str], *, scale: float) -> None:
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        at = [index + (place - (len(arms) - 1) / 2) * width for index in range(len(keys))]
        values = [scale * found.values[key.format(arm)] for key in keys]
        bounds = [[scale * bound for bound in found.ci95[key.format(arm)]] for key in keys]
        errors = [
            [max(value - low, 0.0) for value, (low, _) in zip(values, bounds, strict=True)],
            [max(high - value, 0.0) for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        axes.bar(at, values, width * 0.92, yerr=errors, color=COLOURS[arm], label=LABELS[arm], capsize=2)


def _draw_shares(axes: Any, found: Mismatch) -> None:
    """Success of the mixed stream against the share of the dearest model, one point for each cost weight."""
    mixed = found.mixed
    stream = mixed.stream
    dear = int(stream.cost_usd.mean(axis=0).argmax())
    for arm in ARMS:
        points = sorted(
            (100.0 * float(mixed.share[key][dear]), 100.0 * float(success.mean()))
            for key, success in mixed.success.items()
            if key[0] == arm
        )
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[arm], label=LABELS[arm])
    if len(stream.models) == 2:
        other = stream.success.mean(axis=0)[1 - dear]
        line = [100.0 * float(other), 100.0 * float(stream.success.mean(axis=0)[dear])]
        axes.plot([0.0, 100.0], line, "k--", lw=1, label="random mixing")
    axes.set(xlabel=f"share of {stream.models[dear]}, %", ylabel="success, %", title="The mixed stream, by cost weight")
    axes.legend(fontsize="small")


def _shown(found: Mismatch, key: str) -> str:
    low, high = found.ci95[key]
    return f"{found.values[key]:+.1f} [{low:+.1f}, {high:+.1f}]"


def _percent(found: Mismatch, key: str) -> str:
    low, high = found.ci95[key]
    return f"{100 * found.values[key]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
