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
    is_compiled: bool = False,
) -> Report:
    """Run a scenario to its end.

    Args:
        machine: What decides; the stack of the scenario's pool where absent.
        journal: Gets every event with its commands.
        hold_limit_s: How long the machine may hold a turn at most, which is checked; the pool's own limit where absent.
        is_compiled: Take compiled engines where there are any (hybrid-attention models, with numba): the same bytes, a
            fraction of the time, after some seconds of compilation on a machine's first run.

    Raises:
        ConfigError: the scenario's pool is wrong.
        LawBroken: a law does not hold.
    """
    config = scenario.config
    if machine is None:
        machine = open_stack(config, seed)
    if hold_limit_s is None:
        hold_limit_s = config.router.hold_max_s
    return World(scenario, machine, seed, journal=journal, hold_limit_s=hold_limit_s, is_compiled=is_compiled).run()
