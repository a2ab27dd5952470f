"""How good forecasts of waits are in pools nobody has tuned them on: coverage, points, calibration.

    python -m experiments.disc_forecast [--seeds 23,24] [--loads 64] [--smoke]

Settings were chosen on seeds 1 to 17; these cells are others. Writes `results/disc_forecast.json`, `.md` and `.svg`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.cells import NO_IDS
from loadwise.lab.disc import Cell, CellResult, run_cell
from loadwise.lab.disc_forecast import Wait, calibration, forecast_object
from loadwise.lab.report import commit

IDS: tuple[str, ...] = ()
RESULTS = Path(__file__).parent / "results"
WORLDS = ("qwen-gh200", "qwen-h200", "mistral-h200")
PRESETS = ("admission_only", "static_cap", "oracle", "fast", "quality")
NOMINAL = tuple(n / 20 for n in range(1, 20))


def measure(cells: list[Cell]) -> tuple[dict[str, list[CellResult]], dict[str, list[Wait]]]:
    """Results and waits by preset."""
    results: dict[str, list[CellResult]] = {}
    waits: dict[str, list[Wait]] = {}
    for cell in cells:
        results.setdefault(cell.preset, []).append(run_cell(cell, waits.setdefault(cell.preset, [])))
        print(cell.world, cell.preset, cell.load, cell.seed, len(waits[cell.preset]), file=sys.stderr)
    return results, waits


def table(said: dict[str, dict[str, Any]]) -> str:
    """The Markdown table."""
    rows = ["| preset | waits | inside 80 % | [95 %] | within 2 | [95 %] |", "|---|---|---|---|---|---|"]
    for name, one in said.items():
        figures = []
        for key in ("coverage", "within_2"):
            low, high = one["ci95"].get(key, (float("nan"), float("nan")))
            value = one[key]
            figures += ["-" if value is None else f"{value:.3f}", f"{low:.2f}-{high:.2f}"]
        rows.append(f"| {name} | {one['n']} | {' | '.join(figures)} |")
    return "\n".join(rows)


def draw(waits: dict[str, list[Wait]], path: Path) -> None:
    """Nominal quantile against realised share, and points against realised waits."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "loadwise"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.6))
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    left.axvspan(0.1, 0.9, color="0.94")
    for name, some in waits.items():
        if some:
            left.plot(NOMINAL, calibration(some, NOMINAL), marker=".", label=f"{name} ({len(some)})")
            right.scatter([w.point_s for w in some], [w.real_s for w in some], s=6, alpha=0.5, label=name)
    left.set(xlabel="nominal quantile", ylabel="share of waits at or below", xlim=(0, 1), ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    ends = [1.0, 5000.0]
    for ratio, style in ((1.0, "-"), (0.5, ":"), (2.0, ":")):
        right.plot(ends, [ratio * end for end in ends], color="black", linewidth=0.8, linestyle=style)
    right.set(xlabel="forecast, s", ylabel="realised, s", xscale="log", yscale="log", xlim=ends, ylim=ends)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run the cells and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="20,21,22")
    parser.add_argument("--loads", default="64")
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--smoke", action="store_true", help="print only")
    options = parser.parse_args()
    cells = [
        Cell(world=world, preset=preset, load=int(load), seed=int(seed))
        for seed in options.seeds.split(",")
        for load in options.loads.split(",")
        for world in options.worlds.split(",")
        for preset in options.presets.split(",")
    ]
    results, waits = measure(cells)
    said = {"all": forecast_object([r for some in results.values() for r in some])}
    said |= {name: forecast_object(some) for name, some in results.items()}
    cells_said = f"Seeds {options.seeds}, loads {options.loads}, worlds {options.worlds}."
    body = f"# Forecasts of waits\n\n{cells_said}\n\n{table(said)}\n"
    print(body)
    if not options.smoke:
        pooled = {name: calibration(some, NOMINAL) for name, some in waits.items()}
        document = {"ids": NO_IDS, "commit": commit(), "seeds": options.seeds, "forecast": said}
        document |= {"nominal": NOMINAL, "calibration": pooled}
        (RESULTS / "disc_forecast.json").write_text(json.dumps(document, indent=1) + "\n")
        (RESULTS / "disc_forecast.md").write_text(body + "\n![calibration](disc_forecast.svg)\n")
        draw(waits, RESULTS / "disc_forecast.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
