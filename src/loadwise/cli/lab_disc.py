"""`loadwise lab disc`: presets of admission and divert at several loads on simulated pools."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from loadwise.kernel.errors import ConfigError

from .lists import split_names
from .output import add_json_flag, columns, put, put_json, say

if TYPE_CHECKING:
    from loadwise.lab.disc import Settings

DEFAULT_POOL = "qwen-gh200"
OPEN_PROGRAMS = 2000
SUMMARY = "admission, forecast and divert against their peers: loads and presets on a simulated pair of models"
LEGEND = """
Means over seeds. programs/h: ended within their budget; resolved: those of them that succeeded; hit: share of prompt
tokens that the dear model's engines had cached; diverts: ran elsewhere than chosen; killed: out of budget; dear: share
that ran on the dear model."""
FIGURES_LEGEND = """
Figures to reach; a/b: one preset's over another's; paper: what was published. holds, MISSED: the value is on the right,
the wrong side of the bound; with ? the interval over seeds lies on both, so chance may have decided. One seed has no
interval and judges nothing; run more (--seeds)."""
QUICK_LOADS = (32, 64)
QUICK_PRESETS = ("thunderagent", "oracle", "fast", "quality")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cells, and what differs from the world's file."""
    add = parser.add_argument
    add(
        "--pool",
        metavar="W[,...]",
        help="worlds: the path of a world's file, or qwen-gh200 (default), qwen-gh200-tight, qwen-h200,"
        " qwen-shared-gh200, mistral-h200",
    )
    add("--scenario", metavar="FILE", help="a world's file; as --pool, for a path with a comma in it")
    add("--preset", metavar="P[,...]", help="presets of the router (default all that compete)")
    add("--loads", metavar="N[,...]", help="programs in flight, waiting ones included (default 8,16,32,48,64,96,128)")
    add("--arrivals", choices=("closed", "open"), default="closed", help="a closed loop (default), or a Poisson stream")
    add("--rate", metavar="N[,...]", help="of an open stream: programs that arrive an hour")
    add("--seeds", type=int, default=3, metavar="N", help="paired seeds (default 3)")
    add("--first-seed", type=int, default=1, metavar="N", help="the first of them (default 1)")
    add("--programs", type=int, metavar="N", help="programs of a run (default the world's 108; of an open stream 2000)")
    add("--budget-starts", choices=("admission", "arrival"), help="whether waiting counts against the 900 s")
    add("--prefers", type=float, metavar="P", help="share of programs that do better on the dear model")
    add("--spread", type=float, metavar="S", help="standard deviation of the success gap")
    add("--beta", type=float, metavar="B", help="weight of waiting, instead of the preset's")
    add(
        "--seconds-per-point",
        type=float,
        metavar="S",
        help="the same as what one point of success is worth, in seconds",
    )
    add("--selector", metavar="P", help="a learning policy instead of the one that knows every success (linucb, ...)")
    add("--cache", metavar="DIR", help="keep cells there and take those that are; for runs that are interrupted")
    add("--processes", type=int, default=1, metavar="N", help="processes (default 1)")
    add("--quick", action="store_true", help="one seed, loads 32 and 64, four presets; done in a minute or two")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the cells and report."""
    from loadwise.lab.disc import PRESETS
    from loadwise.lab.disc_cache import CellCache
    from loadwise.lab.disc_figures import check_rows
    from loadwise.lab.disc_report import cells, checks_of, disc_json, disc_rows, run_cells

    settings = _settings(arguments)
    presets: tuple[str, ...] = QUICK_PRESETS if arguments.quick else PRESETS
    if arguments.preset is not None:
        presets = split_names(arguments.preset)
    loads = _open_loads(arguments) if settings.arrivals == "open" else _closed_loads(arguments)
    n_seeds = 1 if arguments.quick else arguments.seeds
    seeds = range(arguments.first_seed, arguments.first_seed + n_seeds)
    cache = None if arguments.cache is None else CellCache(Path(arguments.cache))
    todo = cells(_worlds(arguments), presets, loads, seeds, settings)
    ran = run_cells(todo, arguments.processes, say, cache)
    if arguments.json:
        put_json(disc_json(ran, settings))
        return 0
    put(columns(disc_rows(ran)))
    put(LEGEND)
    checks = checks_of(ran, settings)
    if checks:
        put(FIGURES_LEGEND)
        put(columns(check_rows(checks)))
    return 0


def _settings(arguments: argparse.Namespace) -> "Settings":
    from loadwise.lab.disc import Settings

    if not 1 <= arguments.seeds <= 100_000:
        raise ConfigError(f"--seeds is {arguments.seeds!r}; it must be in 1..100000")
    if arguments.beta is not None and not 0.0 <= arguments.beta <= 1.0:
        raise ConfigError(f"--beta is {arguments.beta!r}; it must be in [0, 1]")
    if arguments.seconds_per_point is not None and not 0.0 < arguments.seconds_per_point < math.inf:
        raise ConfigError(f"--seconds-per-point is {arguments.seconds_per_point!r}; it must be a finite number > 0")
    is_open = arguments.arrivals == "open"
    return Settings(
        n_programs=OPEN_PROGRAMS if is_open and arguments.programs is None else arguments.programs,
        prefers=arguments.prefers,
        spread=arguments.spread,
        budget_starts=arguments.budget_starts,
        beta=arguments.beta,
        seconds_per_point=arguments.seconds_per_point,
        arrivals=arguments.arrivals,
        selector=None if arguments.selector is None else {"name": arguments.selector},
    )


def _worlds(arguments: argparse.Namespace) -> list[str]:
    if arguments.scenario is not None:
        if arguments.pool is not None:
            raise ConfigError("--pool and --scenario both name worlds; give one of them")
        file = str(arguments.scenario)
        return [file if "/" in file or file.endswith((".yaml", ".yml")) else f"./{file}"]
    return list(split_names(DEFAULT_POOL if arguments.pool is None else arguments.pool))


def _closed_loads(arguments: argparse.Namespace) -> tuple[int, ...]:
    from loadwise.lab.disc import LOADS

    if arguments.rate is not None:
        raise ConfigError(f"--rate is {arguments.rate!r}, but arrivals are closed; it goes with --arrivals open")
    if arguments.loads is not None:
        return _numbers("--loads", arguments.loads)
    return QUICK_LOADS if arguments.quick else LOADS


def _open_loads(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.loads is not None:
        raise ConfigError(f"--loads is {arguments.loads!r}, but arrivals are open; say --rate, programs an hour")
    if arguments.rate is None:
        raise ConfigError("--arrivals open needs --rate, programs an hour")
    return _numbers("--rate", arguments.rate)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in split_names(text))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}; it must be whole numbers separated by commas") from error
