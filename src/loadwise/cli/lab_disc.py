"""`loadwise lab disc`: presets of admission and divert at several loads on simulated pools."""

import argparse

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, put, put_json, say

SUMMARY = "admission, forecast and divert against their peers: loads and presets on a simulated pair of models"
QUICK_LOADS = (32, 64)
QUICK_PRESETS = ("thunderagent", "oracle", "fast", "quality")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cells, and what differs from the world's file."""
    add = parser.add_argument
    add(
        "--pool",
        default="qwen-gh200",
        metavar="W[,...]",
        help="worlds (default qwen-gh200)",
    )
    add("--preset", metavar="P[,...]", help="presets of the router (default all that compete)")
    add("--loads", metavar="N[,...]", help="programs in flight, waiting ones included (default 8,16,32,48,64,96,128)")
    add("--seeds", type=int, default=3, metavar="N", help="paired seeds (default 3)")
    add("--first-seed", type=int, default=1, metavar="N", help="the first of them (default 1)")
    add("--programs", type=int, metavar="N", help="programs of a run (default the world's 108)")
    add("--budget-starts", choices=("admission", "arrival"), help="whether waiting counts against the 900 s")
    add("--prefers", type=float, metavar="P", help="share of programs that do better on the dear model")
    add("--spread", type=float, metavar="S", help="standard deviation of the success gap")
    add("--beta", type=float, metavar="B", help="weight of waiting, instead of the preset's")
    add("--processes", type=int, default=1, metavar="N", help="processes (default 1)")
    add("--quick", action="store_true", help="one seed, loads 32 and 64, four presets; done within a minute")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the cells and report."""
    from loadwise.lab.disc import LOADS, PRESETS, Settings
    from loadwise.lab.disc_report import cells, disc_json, disc_rows, run_cells

    if not 1 <= arguments.seeds <= 100_000:
        raise ConfigError(f"--seeds is {arguments.seeds!r}; it must be in 1..100000")
    if arguments.beta is not None and not 0.0 <= arguments.beta <= 1.0:
        raise ConfigError(f"--beta is {arguments.beta!r}; it must be in [0, 1]")
    settings = Settings(
        n_programs=arguments.programs,
        prefers=arguments.prefers,
        spread=arguments.spread,
        budget_starts=arguments.budget_starts,
        beta=arguments.beta,
    )
    presets = QUICK_PRESETS if arguments.quick else PRESETS
    if arguments.preset is not None:
        presets = tuple(arguments.preset.split(","))
    loads: tuple[int, ...] = QUICK_LOADS if arguments.quick else LOADS
    if arguments.loads is not None:
        loads = _loads(arguments.loads)
    n_seeds = 1 if arguments.quick else arguments.seeds
    seeds = range(arguments.first_seed, arguments.first_seed + n_seeds)
    ran = run_cells(cells(arguments.pool.split(","), presets, loads, seeds, settings), arguments.processes, say)
    if arguments.json:
        put_json(disc_json(ran, settings))
    else:
        put(columns(disc_rows(ran)))
    return 0


def _loads(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--loads is {text!r}; it must be whole numbers separated by commas") from error
