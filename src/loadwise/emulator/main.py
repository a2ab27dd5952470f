"""`loadwise emulate`: parsed options become running engines, until told to stop."""

import asyncio
from collections.abc import Callable

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.sim.draw import Quantity
from loadwise.sim.scenario import Failure, load_scenario
from loadwise.sim.simple_engine import SimpleEngineSpec

from .backend import EmulatedBackendSpec
from .emulator import EmulatorHandle, EmulatorSpec, spec_from_scenario, start_emulator
from .script import filler_script


class EmulateOptions(Fact, frozen=True, kw_only=True):
    """What the command line says; either a scenario or models."""

    models: tuple[str, ...] = ()
    """One backend each, all with the same engine."""
    scenario: str | None = None
    """Path of a scenario file: its backends and engines are emulated."""
    port: int = 0
    """Of the first backend; the others follow. 0: any free ones."""
    host: str = "127.0.0.1"
    scale: float = 1.0
    seed: int = 0
    engine: SimpleEngineSpec = SimpleEngineSpec()
    output_tokens: Quantity | None = None
    has_fault_header: bool = False
    is_stepped: bool = False
    """Time moves by request only (`control`)."""

    def __post_init__(self) -> None:
        if bool(self.models) == (self.scenario is not None):
            raise ConfigError("emulate needs --model NAME (repeatable) or --scenario SCENARIO.yaml, and not both")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port!r}; it must be in 0..65535")


def emulator_spec(options: EmulateOptions) -> EmulatorSpec:
    """What the options ask for.

    Raises:
        ConfigError: the scenario is wrong, or a name is used twice.
    """
    failures: tuple[Failure, ...] = ()
    if options.scenario is not None:
        described = spec_from_scenario(load_scenario(options.scenario))
        backends, failures = described.backends, described.failures
    else:
        backends = tuple(EmulatedBackendSpec(name=m, model=m, engine=options.engine) for m in options.models)
    return EmulatorSpec(
        backends=backends,
        host=options.host,
        scale=options.scale,
        seed=options.seed,
        has_fault_header=options.has_fault_header,
        is_stepped=options.is_stepped,
        failures=failures,
    )


async def emulate(options: EmulateOptions, is_ready: Callable[[EmulatorHandle], None], stop: asyncio.Event) -> None:
    """Run until `stop` is set; the caller owns signals, loop and what is printed.

    Raises:
        ConfigError: the options are wrong.
        OSError: a port is taken.
    """
    script = filler_script(options.output_tokens, options.seed)
    handle = await start_emulator(emulator_spec(options), options.port, script)
    try:
        is_ready(handle)
        await stop.wait()
    finally:
        await handle.close()
