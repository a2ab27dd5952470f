"""`simulate`: a scenario and a seed become a report."""

from loadwise.kernel.machine import Machine
from loadwise.settings import open_stack

from .report import Report
from .scenario import Scenario
from .world import World, WorldJournal


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    machine: Machine | None = None,
    journal: WorldJournal | None = None,
    hold_limit_s: float | None = None,
) -> Report:
    """Run a scenario to its end.

    Args:
        machine: What decides; the stack of the scenario's pool where absent.
        journal: Gets every event with its commands.
        hold_limit_s: How long the machine may hold a turn at most, which is checked; the pool's own limit where absent.

    Raises:
        ConfigError: the scenario's pool is wrong.
        LawBroken: a law does not hold.
    """
    config = scenario.config
    if machine is None:
        machine = open_stack(config, seed)
    if hold_limit_s is None:
        hold_limit_s = config.router.hold_max_s
    return World(scenario, machine, seed, journal=journal, hold_limit_s=hold_limit_s).run()
