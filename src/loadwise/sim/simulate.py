"""`simulate`: a scenario and a seed become a report."""

import math

from loadwise.kernel.machine import Machine

from .report import Report
from .scenario import Scenario
from .world import JournalWriter, World


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    machine: Machine | None = None,
    journal: JournalWriter | None = None,
    hold_limit_s: float = math.inf,
) -> Report:
    """Run a scenario to its end.

    Args:
        machine: What decides; the stack of the scenario's pool where absent.
        journal: Gets every event with its commands.
        hold_limit_s: How long the machine may hold a turn at most; checked.

    Raises:
        ConfigError: the scenario's pool is wrong.
        LawBroken: a law does not hold.
    """
    if machine is None:
        # Imported here: the stack is wired above this room, and a world needs only the machine it is given.
        from loadwise.settings import open_stack, parse_config

        machine = open_stack(parse_config(scenario.pool), seed)
    return World(scenario, machine, seed, journal=journal, hold_limit_s=hold_limit_s).run()
