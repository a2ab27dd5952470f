"""`loadwise lab sweep`: many runs of the whole stack over ORACLE's pair, and how long a cell takes."""

import argparse

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, put, put_json, say

SUMMARY = "run presets at several loads over a simulated pair of models, and time the cells"
QUICK_CELLS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cells, on how many processes."""
    add = parser.add_argument
    add(
        "--cells",
        type=int,
        default=240,
        metavar="N",
        help="cells to run, seed by seed (default 240; 1000 is the goal's)",
    )
    add("--presets", metavar="P[,...]", help="presets of the router (default loadwise,oracle,least_loaded,round_robin)")
    add("--loads", metavar="N[,...]", help="programs in flight (default 8,16,32,48,64,96)")
    add("--processes", type=int, default=2, metavar="N", help="processes (default 2)")
    add("--quick", action="store_true", help=f"at most {QUICK_CELLS} cells; done within a minute or two")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the cells and report."""
    from loadwise.lab.sweep import LOADS, MAX_CELLS, PRESETS, cells, run_sweep, sweep_json, sweep_rows

    n = min(QUICK_CELLS, arguments.cells) if arguments.quick else arguments.cells
    if not 1 <= n <= MAX_CELLS:
        raise ConfigError(f"--cells is {n!r}; it must be in 1..{MAX_CELLS}")
    presets = PRESETS if arguments.presets is None else tuple(arguments.presets.split(","))
    loads = LOADS if arguments.loads is None else _loads(arguments.loads)
    sweep = run_sweep(cells(n, presets, loads), arguments.processes, say)
    if arguments.json:
        put_json(sweep_json(sweep))
    else:
        put(columns(sweep_rows(sweep)))
    say(
        f"{n} cells in {sweep.wall_s:.0f} s on {sweep.n_processes} processes, "
        f"{sweep.core_s_per_cell:.2f} core seconds each; 1,000 take {sweep.wall_s_per_1000_cells / 60:.1f} minutes"
    )
    return 0


def _loads(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--loads is {text!r}; it must be whole numbers separated by commas") from error
