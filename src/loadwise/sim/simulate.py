"""`simulate`: a scenario and a seed become a report."""

from loadwise.kernel.machine import Machine
from loadwise.settings import open_stack

from .bounds import N_PROGRAMS_MAX
from .report import Report
from .scenario import Scenario
from .vllm_engine import VllmEngineSpec
from .workload import Trace
from .world import World, WorldJournal

COMPILED_FROM_PROGRAMS = 100
"""Fewer are over before numba is imported, let alone has compiled."""


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    machine: Machine | None = None,
    journal: WorldJournal | None = None,
    hold_limit_s: float | None = None,
    is_compiled: bool | None = None,
) -> Report:
    """Run a scenario to its end.

    Args:
        machine: What decides; the stack of the scenario's pool where absent.
        journal: Gets every event with its commands.
        hold_limit_s: How long the machine may hold a turn at most, which is checked; the pool's own limit where absent.
        is_compiled: Take compiled engines where there are any (`kind: vllm`, with numba): the same bytes, a fraction of
            the time, after some seconds of compilation on a machine's first run. Where absent, as `is_worth_compiling`
            says.

    Raises:
        ConfigError: the scenario's pool is wrong.
        LawBroken: a law does not hold.
    """
    config = scenario.config
    if machine is None:
        machine = open_stack(config, seed)
    if hold_limit_s is None:
        hold_limit_s = config.router.hold_max_s
    if is_compiled is None:
        is_compiled = is_worth_compiling(scenario)
    return World(scenario, machine, seed, journal=journal, hold_limit_s=hold_limit_s, is_compiled=is_compiled).run()


def is_worth_compiling(scenario: Scenario) -> bool:
    """Whether compiled engines save more than they cost: a vLLM engine and many programs to come."""
    n_programs = scenario.n_programs or N_PROGRAMS_MAX
    if isinstance(scenario.workload.arrivals, Trace):
        n_programs = min(n_programs, scenario.workload.arrivals.max_programs or N_PROGRAMS_MAX)
    has_vllm = any(isinstance(engine, VllmEngineSpec) for engine in scenario.engines.values())
    return has_vllm and n_programs >= COMPILED_FROM_PROGRAMS
