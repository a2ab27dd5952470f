"""Many emulated backends in one process, each on its own port.

emulator = await start_emulator(EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),), scale=100))
...                                      # emulator.url is the first backend's http://127.0.0.1:PORT/v1
await emulator.close()
"""

from collections.abc import Mapping

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.sim.scenario import Failure, Scenario
from loadwise.sim.simple_engine import SimpleEngineSpec

from .backend import EmulatedBackend, EmulatedBackendSpec
from .misfortune import Misfortunes
from .script import Script, filler_script


class EmulatorSpec(Fact, frozen=True, kw_only=True):
    """What to emulate."""

    backends: tuple[EmulatedBackendSpec, ...]
    host: str = "127.0.0.1"
    scale: float = 1.0
    """Engine seconds per real second."""
    seed: int = 0
    has_fault_header: bool = False
    """Let a request name its own fault in the header `x-emulator-fault`."""
    failures: tuple[Failure, ...] = ()
    """What befalls backends, in engine seconds from the start on; in stepped time the client plays them (`control`)."""
    is_stepped: bool = False
    """Time stands still until a client moves it, each engine's by itself (`control`)."""

    def __post_init__(self) -> None:
        if not self.backends:
            raise ConfigError("an emulator needs at least one backend")
        names = [backend.name for backend in self.backends]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two emulated backends are named {twice[0]!r}; names must differ")
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"scale is {self.scale!r}; it must be a finite number > 0")
        if self.is_stepped and self.scale != 1.0:
            raise ConfigError(f"scale is {self.scale!r}; a stepped clock has none, so it must be 1")
        for failure in self.failures:
            if failure.backend not in names:
                raise ConfigError(f"a failure befalls {failure.backend!r}; emulated are {', '.join(names)}")


class EmulatorHandle:
    """A running emulator."""

    def __init__(self, backends: dict[str, EmulatedBackend], misfortunes: Misfortunes) -> None:
        self.backends = backends
        """By name, in the specification's order."""
        self._misfortunes = misfortunes

    @property
    def url(self) -> str:
        """Base URL of the first backend."""
        return next(iter(self.backends.values())).url

    @property
    def urls(self) -> dict[str, str]:
        """Base URL by backend name."""
        return {name: backend.url for name, backend in self.backends.items()}

    async def close(self) -> None:
        """Stop every backend and cut what runs."""
        await self._misfortunes.close()
        for backend in self.backends.values():
            await backend.close()


async def start_emulator(
    spec: EmulatorSpec, port: int = 0, script: Script | Mapping[str, Script] | None = None
) -> EmulatorHandle:
    """Start every backend on the running loop.

    Args:
        port: The first backend's; the others follow. 0 lets the system choose.
        script: What the models say: one script for all, or one by model name; filler where absent.

    Raises:
        OSError: a port is taken; nothing is left running.
    """
    backends: dict[str, EmulatedBackend] = {}
    try:
        for i, one in enumerate(spec.backends):
            backend = EmulatedBackend(
                one,
                _script_of(one.model, script, spec.seed),
                scale=spec.scale,
                seed=spec.seed,
                has_fault_header=spec.has_fault_header,
                is_stepped=spec.is_stepped,
            )
            backends[one.name] = backend
            wanted = one.port if one.port is not None else (port + i if port else 0)
            await backend.listen(spec.host, wanted)
    except BaseException:
        for backend in backends.values():
            await backend.close()
        raise
    return EmulatorHandle(backends, Misfortunes(backends, () if spec.is_stepped else spec.failures, spec.scale))


def _script_of(model: str, script: Script | Mapping[str, Script] | None, seed: int) -> Script:
    if isinstance(script, Mapping):
        script = script.get(model)
    return filler_script(seed=seed) if script is None else script


def spec_from_scenario(scenario: Scenario, *, scale: float = 1.0, seed: int = 0) -> EmulatorSpec:
    """Emulate the backends of a scenario's pool with the scenario's true engines."""
    models = scenario.models
    backends = tuple(
        EmulatedBackendSpec(
            name=backend.name,
            model=backend.served_model or backend.model,
            engine=scenario.engines.get(backend.name, SimpleEngineSpec()),
            context_tokens=models[backend.model].context_tokens,
        )
        for backend in scenario.backends
    )
    return EmulatorSpec(backends=backends, scale=scale, seed=seed, failures=tuple(scenario.failures))
