"""A scenario file: a pool, the true engines behind it, what agents bring and what only the world knows.

The format is described in docs/formats/scenario.md. Reading is strict: an unknown key is an error that lists the valid
ones, and nothing is guessed.
"""

import math
from collections.abc import Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.places import choices_at, value_at
from loadwise.kernel.pool import BackendSpec, ModelSpec
from loadwise.kernel.streams import Streams
from loadwise.settings import Config, parse_config, parse_yaml, require_unicode

from .api_engine import ApiEngine, ApiEngineSpec
from .bounds import EVERY_S_MIN, MAX_EVENTS_MAX, N_PROGRAMS_MAX, SECONDS_MAX, require_within
from .draw import Quantity, least_of, require_quantity
from .engine import Engine
from .locate import place_of
from .servers_engine import ServersEngine, ServersEngineSpec
from .shared_gpu import SharedGpuSpec
from .simple_engine import SimpleEngine, SimpleEngineSpec
from .truth import TruthSpec
from .verdicts import VerdictSpec
from .vllm_engine import VllmEngine, VllmEngineSpec
from .workload import Trace, WorkloadSpec

SCENARIO_VERSION = 1

EngineSpec = SimpleEngineSpec | ServersEngineSpec | VllmEngineSpec | ApiEngineSpec


class SignalSpec(Fact, frozen=True, kw_only=True):
    """How the host reads the engines."""

    every_s: float = 1.0
    """0 never reads: machines know nothing but what they did."""
    delay_s: float = 0.0
    """Age of a reading when it reaches the machine."""

    def __post_init__(self) -> None:
        for name in ("every_s", "delay_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"signals {name} is {value!r}; it must be a finite number >= 0")
            require_within(f"signals {name}", value, 0, SECONDS_MAX)
        if 0 < self.every_s < EVERY_S_MIN:
            raise ConfigError(f"signals every_s is {self.every_s!r}; it must be 0 or >= {EVERY_S_MIN}")


class SelectorSpec(Fact, frozen=True, kw_only=True):
    """The user's own selector, as the world plays it."""

    answers: Literal["uniform", "error", "nothing"] = "uniform"
    """A candidate at random, a failure, or silence until the machine's own time limit."""
    delay_s: Quantity = 0.0

    def __post_init__(self) -> None:
        require_quantity("selector delay_s", self.delay_s)


class Failure(Fact, frozen=True, kw_only=True):
    """What befalls a backend at an instant."""

    at_s: float
    backend: str
    kind: Literal["crash", "hang", "slow"]
    """`crash`: running attempts break and new ones are refused. `hang`: connections are taken and nothing comes.
    `slow`: engine steps last longer."""
    for_s: float | None = None
    """Until it is well again (a crashed engine comes back empty); absent means for good."""
    speed_ratio: float = 0.25
    """Of `slow`: speed relative to a healthy engine."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.at_s >= 0):
            raise ConfigError(f"failure at_s is {self.at_s!r}; it must be a finite number >= 0")
        if self.for_s is not None and not (math.isfinite(self.for_s) and self.for_s > 0):
            raise ConfigError(f"failure for_s is {self.for_s!r}; it must be a finite number > 0")
        require_within("failure at_s", self.at_s, 0, SECONDS_MAX)
        require_within("failure for_s", self.for_s or 0.0, 0, SECONDS_MAX)
        require_within("failure speed_ratio", self.speed_ratio, 1e-6, 1000)


class Scenario(Fact, frozen=True, kw_only=True):
    """A simulated world, whole."""

    scenario: int
    """Format version."""
    name: str
    pool: dict[str, Any]
    """Exactly a pool file."""
    engines: dict[str, EngineSpec] = {}
    """The true engine of each backend by name; one that is absent gets the default simple engine."""
    gpus: dict[str, SharedGpuSpec] = {}
    """GPUs that several backends' engines share; an engine that is in none has its own."""
    workload: WorkloadSpec
    truth: TruthSpec = TruthSpec()
    verdicts: VerdictSpec = VerdictSpec()
    signals: SignalSpec = SignalSpec()
    selector: SelectorSpec = SelectorSpec(answers="nothing")
    failures: list[Failure] = []
    n_programs: int | None = None
    """No program arrives after so many; the run then ends when all are over and judged."""
    until_s: float | None = None
    """The run is cut here."""
    max_events: int = 20_000_000
    """A run that needs more is refused (law L15)."""
    stall_limit_s: float = 7200.0
    """Nothing may happen to open programs for longer than this while only the host's readings go on."""

    def __post_init__(self) -> None:
        if self.scenario != SCENARIO_VERSION:
            raise ConfigError(f"scenario is {self.scenario!r}; this version reads {SCENARIO_VERSION}")
        if self.n_programs is None and self.until_s is None and not isinstance(self.workload.arrivals, Trace):
            raise ConfigError("a scenario needs n_programs or until_s, or it would never end")
        if self.n_programs is not None and self.n_programs < 1:
            raise ConfigError(f"n_programs is {self.n_programs!r}; it must be >= 1")
        for name in ("until_s", "stall_limit_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number > 0")
            require_within(name, value or 0.0, 0, SECONDS_MAX)
        require_within("n_programs", self.n_programs or 1, 1, N_PROGRAMS_MAX)
        require_within("max_events", self.max_events, 1, MAX_EVENTS_MAX)
        self._check_names()

    def _check_names(self) -> None:
        config = self.config
        names = {backend.name for backend in config.backends}
        if not names:
            raise ConfigError("pool: backends is empty; a simulated world needs at least one")
        for used in [*self.engines, *(failure.backend for failure in self.failures)]:
            if used not in names:
                raise ConfigError(f"backend {used!r} is not in the pool; it has {', '.join(sorted(names))}")
        self._check_gpus(names)
        self._check_failures()
        unknown = sorted({*self.truth.success, *self.truth.output_ratio, *self.truth.turns_ratio} - set(config.models))
        if unknown:
            raise ConfigError(f"truth knows {unknown[0]!r}, the pool only {', '.join(sorted(config.models))}")
        self._check_prompts()

    def _check_gpus(self, names: set[str]) -> None:
        seen: dict[str, str] = {}
        own = {name: self.engines.get(name, SimpleEngineSpec()) for name in names}
        for gpu, shared in self.gpus.items():
            for backend in shared.backends:
                if backend not in names:
                    raise ConfigError(f"gpus {gpu!r}: backend {backend!r} is not in the pool")
                if backend in seen:
                    raise ConfigError(f"gpus {gpu!r}: backend {backend!r} is on {seen[backend]!r} already")
                if isinstance(own[backend], ApiEngineSpec):
                    raise ConfigError(f"gpus {gpu!r}: backend {backend!r} is an API, which has no GPU here")
                seen[backend] = gpu
        for gpu, shared in self.gpus.items():
            shared.check_engines(gpu, [(backend, own[backend]) for backend in shared.backends])

    def engine_spec(self, backend: str) -> EngineSpec:
        """The true engine of a backend. With shared KV memory, as many blocks as the whole memory has."""
        spec = self.engines.get(backend, SimpleEngineSpec())
        shared = next((gpu for gpu in self.gpus.values() if gpu.shares_kv and backend in gpu.backends), None)
        if shared is None or not isinstance(spec, VllmEngineSpec) or spec.hardware is None:
            return spec
        return msgspec.structs.replace(spec, num_gpu_blocks=self.shared_kv_bytes(shared) // block_bytes_of(spec))

    def shared_kv_bytes(self, shared: SharedGpuSpec) -> int:
        """The memory that engines on a GPU share."""
        specs = [self.engines.get(name) for name in shared.backends]
        return shared.kv_bytes([spec.hardware for spec in specs if isinstance(spec, VllmEngineSpec) and spec.hardware])

    def _check_prompts(self) -> None:
        """A first prompt that fits no engine, whatever is drawn, would make every program fail."""
        workload, most = self.workload, self.most_tokens
        if isinstance(workload.arrivals, Trace):
            return
        least = max(least_of(workload.first_prompt_tokens), workload.shared_tokens + 1)
        if min(least, workload.context_limit_tokens - 1) + 1 > most:
            name = "shared_tokens" if workload.shared_tokens + 1 >= least else "first_prompt_tokens"
            raise ConfigError(
                f"workload {name} is {getattr(workload, name)!r}: no request can ever fit, "
                f"the largest engine takes {most:.0f} tokens of prompt and answer"
            )

    @property
    def most_tokens(self) -> float:
        """Tokens of prompt and answer that the largest engine takes."""
        return max(most_tokens_of(self.engine_spec(spec.name)) for spec in self.backends)

    def _check_failures(self) -> None:
        well_at_s: dict[str, float] = {}
        for failure in sorted(self.failures, key=lambda f: f.at_s):
            if failure.at_s < well_at_s.get(failure.backend, 0.0):
                raise ConfigError(
                    f"failures of backend {failure.backend!r} overlap at {failure.at_s} s; one must be over first"
                )
            well_at_s[failure.backend] = math.inf if failure.for_s is None else failure.at_s + failure.for_s

    @property
    def config(self) -> Config:
        """The pool file, presets applied."""
        return parse_config(self.pool, where="pool")

    @property
    def backends(self) -> tuple[BackendSpec, ...]:
        """The pool's backends, in the file's order."""
        return self.config.backends

    @property
    def models(self) -> dict[str, ModelSpec]:
        """The pool's models."""
        return self.config.models


def block_bytes_of(spec: VllmEngineSpec) -> int:
    """Memory of one block of an engine whose hardware is known."""
    if spec.hardware is None:
        raise ConfigError("an engine without hardware has no bytes, only blocks")
    return spec.block_tokens * spec.hardware.model_facts.kv_bytes_per_token


def most_tokens_of(spec: EngineSpec) -> float:
    """Tokens of prompt and answer that an engine takes at most."""
    if isinstance(spec, ServersEngineSpec):
        return math.inf
    if isinstance(spec, ApiEngineSpec):
        return min(spec.max_model_len, spec.tokens_per_minute or math.inf)
    if isinstance(spec, VllmEngineSpec):
        # The last token that is said is never computed.
        fits = (spec.n_blocks - 2 * spec.state_groups) * spec.block_tokens + 1
        return min(fits, spec.max_model_len or math.inf)
    return spec.kv_tokens


OpenEngine = Callable[[EngineSpec, Streams, str], Engine]


def open_engine(spec: EngineSpec, streams: Streams, name: str, *, is_compiled: bool = False) -> Engine:
    """A fresh engine of a backend.

    Args:
        is_compiled: Take compiled code where there is some for such an engine; what it does is the same.
    """
    if is_compiled and isinstance(spec, VllmEngineSpec):
        from .compiled import HAS_NUMBA  # importing numba takes longer than most runs
        from .hybrid_engine import HybridEngine, fits_hybrid

        if HAS_NUMBA and fits_hybrid(spec):
            return HybridEngine(spec)
    if isinstance(spec, ServersEngineSpec):
        return ServersEngine(spec, streams, name)
    if isinstance(spec, VllmEngineSpec):
        return VllmEngine(spec)
    if isinstance(spec, ApiEngineSpec):
        return ApiEngine(spec)
    return SimpleEngine(spec)


def load_scenario(path: str | Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ConfigError: it cannot be read, is no YAML, or breaks the format; the message names the place.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise ConfigError(f"scenario {str(path)!r} cannot be read: {error}") from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, name: str = "scenario") -> Scenario:
    """Read a scenario from YAML text; `name` is used in messages."""
    try:
        document = parse_yaml(text, where=name)
    except RecursionError as error:
        raise ConfigError(f"{name} is not valid YAML: it is nested too deeply") from error
    return convert_scenario(document, name)


def convert_scenario(document: dict[str, Any], name: str = "scenario") -> Scenario:
    """Read a scenario from what a YAML file would hold; `name` is used in messages."""
    require_unicode(document, name)
    version = document.get("scenario")
    if version != SCENARIO_VERSION or isinstance(version, bool):
        raise ConfigError(f"{name}: scenario is {version!r}; this version reads {SCENARIO_VERSION}")
    whole = document
    try:
        whole = _with_preset(document)
        return msgspec.convert(whole, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}{_shown(document, str(error))}") from error
    except ConfigError as error:
        place = place_of(whole, Scenario)
        raise ConfigError(f"{name}: {place}: {error}" if place else f"{name}: {error}") from error


def preset_names() -> tuple[str, ...]:
    """Workloads that come with the package."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _presets().iterdir() if entry.name.endswith(".yaml"))
    )


def read_preset(name: str) -> dict[str, Any]:
    """A shipped workload, without arrivals.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in preset_names():
        raise ConfigError(f"workload preset {name!r} is unknown; known: {', '.join(preset_names())}")
    return parse_yaml(_presets().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), where=name)


def preset_workload(name: str, arrivals: dict[str, Any], **changes: Any) -> WorkloadSpec:
    """A shipped workload with arrivals of its own."""
    return msgspec.convert(read_preset(name) | {"arrivals": arrivals} | changes, WorkloadSpec)


def _presets() -> Traversable:
    return resources.files("loadwise.sim").joinpath("presets")


def _with_preset(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its workload's preset below what it says itself."""
    workload = document.get("workload")
    if not isinstance(workload, dict) or "preset" not in workload:
        return document
    said = {key: value for key, value in workload.items() if key != "preset"}
    return document | {"workload": read_preset(str(workload["preset"])) | said}


def _shown(document: dict[str, Any], message: str) -> str:
    return value_at(document, message) + choices_at(Scenario, message) + _valid_keys(message)


def _valid_keys(message: str) -> str:
    """The keys that are valid where an unknown one was found, for the end of the message."""
    if "unknown field" not in message:
        return ""
    place = message.rsplit("at `$", 1)[-1].rstrip("`") if "at `$" in message else ""
    kinds: list[Any] = [Scenario]
    for part in place.replace("[...]", ".*").strip(".").split("."):
        if part and part != "*":
            kinds = [kind for owner in kinds for kind in _structs_in(_field_type(owner, part))]
    names = sorted({name for kind in kinds for name in kind.__struct_encode_fields__})
    return f"; valid keys: {', '.join(names)}" if names else ""


def _field_type(owner: Any, name: str) -> Any:
    return next((field.type for field in msgspec.structs.fields(owner) if field.encode_name == name), None)


def _structs_in(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [found for part in getattr(kind, "__args__", ()) for found in _structs_in(part)]
