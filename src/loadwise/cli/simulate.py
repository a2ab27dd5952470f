"""`loadwise simulate SCENARIO.yaml`."""

import argparse
from typing import TYPE_CHECKING

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, plain, put, say

if TYPE_CHECKING:
    from loadwise.sim.report import Report
    from loadwise.sim.scenario import Scenario

DESCRIPTION = "Run a scenario file in virtual time; equal scenario and seed give equal bytes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The scenario, a seed, a journal."""
    parser.add_argument("scenario", metavar="SCENARIO.yaml", help="scenario file")
    parser.add_argument("--seed", type=int, default=0, help="fixes all chance (default 0)")
    parser.add_argument("--journal", metavar="PATH", help="write a journal there: a new directory, or a NAME.journal")
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="compiled engines where there are any: same result, quicker when long (default: from 100 programs on)",
    )
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report."""
    from loadwise.sim.scenario import load_scenario
    from loadwise.sim.simulate import simulate

    scenario = load_scenario(arguments.scenario)
    if arguments.journal is None:
        report = simulate(scenario, arguments.seed, is_compiled=arguments.compiled)
    else:
        report = _simulate_into(scenario, arguments.seed, arguments.journal, is_compiled=arguments.compiled)
        say(f"journal written to {arguments.journal}")
    if arguments.json:
        put(report.to_json().decode().rstrip("\n"))
    else:
        put(columns([(name, _shown(value)) for name, value in plain(report).items()]))
    return 0


def _simulate_into(scenario: "Scenario", seed: int, path: str, *, is_compiled: bool | None) -> "Report":
    from pathlib import Path

    import msgspec

    from loadwise.journal.entry import make_header
    from loadwise.journal.files import list_segments
    from loadwise.journal.store import JournalWriter
    from loadwise.settings import open_stack
    from loadwise.sim.simulate import simulate

    if list_segments(Path(path)):
        raise ConfigError(f"{path!r} holds a journal already; a simulation needs a new one")
    config = msgspec.structs.replace(scenario.config, gateway={})
    machine = open_stack(config, seed)
    header = make_header(msgspec.to_builtins(config), seed=seed, host="sim")
    writer = JournalWriter(path, header, dump=machine.dump)
    try:
        return simulate(scenario, seed, machine=machine, journal=writer, is_compiled=is_compiled)
    finally:
        writer.close()


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items()) or "none"
    if value is None:
        return "unknown"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
