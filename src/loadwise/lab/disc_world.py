"""Files of worlds: a scenario of two models and, beside it, how they differ, the frozen caps and the size of a state.

Worlds come with the package, by name, or from a file of the same shape, by path:

    gap: {dear: big, cheap: small, middle: 0.57, prefers: 0.99, spread: 0.1}
    caps: {big: 27, small: 42}
    state_tokens: 4000
    scenario: 1
    ...                     # docs/formats/scenario.md; `pool` without policy and preset, one backend or more a model
"""

import math
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.settings import parse_yaml
from loadwise.sim.scenario import Scenario, convert_scenario
from loadwise.sim.vllm_engine import VllmEngineSpec

_BESIDE = ("gap", "caps", "state_tokens")
_NEEDED = ("pool", "engines", "workload", "truth", "n_programs")


class Gap(Fact, frozen=True, kw_only=True):
    """How the success of two models differs from program to program: normally, around a common middle.

    Raises:
        ConfigError: a value is out of its range.
    """

    dear: str
    cheap: str
    middle: float
    """Mean success of both together."""
    prefers: float
    """Share of programs that do better on the dear model."""
    spread: float
    """Standard deviation of the gap."""

    def __post_init__(self) -> None:
        for name in ("middle", "prefers"):
            value = getattr(self, name)
            if not 0.0 < value < 1.0:
                raise ConfigError(f"gap.{name} is {value!r}; it must be in (0, 1)")
        if not 0.0 < self.spread <= 1.0:
            raise ConfigError(f"gap.spread is {self.spread!r}; it must be in (0, 1]")
        if self.dear == self.cheap:
            raise ConfigError(f"gap.dear and gap.cheap are both {self.dear!r}; they must differ")


def world_names() -> tuple[str, ...]:
    """Worlds that come with the package, sorted."""
    files = resources.files("loadwise.lab").joinpath("worlds").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def is_path(world: str) -> bool:
    """Whether a world is named by the path of its file.

    >>> is_path("qwen-gh200"), is_path("mine.yaml"), is_path("worlds/mine")
    (False, True, True)
    """
    return "/" in world or world.endswith((".yaml", ".yml"))


def world_text(world: str) -> str:
    """A world's file as it is written.

    Raises:
        ConfigError: there is none of that name, or the file cannot be read.
    """
    if is_path(world):
        try:
            return Path(world).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
            raise ConfigError(f"world {world!r} cannot be read: {error}") from error
    if world not in world_names():
        known = ", ".join(world_names())
        raise ConfigError(f"pool {world!r} is unknown; known: {known}, or the path of a world's file")
    return resources.files("loadwise.lab").joinpath("worlds", f"{world}.yaml").read_text(encoding="utf-8")


def read_world(world: str) -> dict[str, Any]:
    """A world's file, checked as far as it is more than a scenario.

    Raises:
        ConfigError: there is none of that name, it cannot be read, or it lacks a key or has a wrong one.
    """
    document = parse_yaml(world_text(world), where=f"world {world}")
    missing = [key for key in (*_BESIDE, *_NEEDED) if key not in document]
    if missing:
        raise ConfigError(f"world {world}: {', '.join(missing)} missing; docs/simulator.md shows a world's file")
    for key in ("pool", "engines", "workload", "truth", "caps", "gap"):
        if not isinstance(document[key], dict):
            raise ConfigError(f"world {world}: {key} is {document[key]!r}; it must be a mapping")
    arrivals = document["workload"].get("arrivals")
    if not isinstance(arrivals, dict) or arrivals.get("kind") == "trace":
        raise ConfigError(f"world {world}: workload.arrivals is {arrivals!r}; it must be a mapping, and no trace")
    gap = gap_of(document, world)
    backends = document["pool"].get("backends")
    if not isinstance(backends, list) or not all(isinstance(backend, dict) for backend in backends):
        raise ConfigError(f"world {world}: pool.backends is {backends!r}; it must be a list of mappings")
    served = sorted({str(backend.get("model")) for backend in backends})
    if served != sorted((gap.dear, gap.cheap)):
        shown = ", ".join(served) or "none"
        raise ConfigError(f"world {world}: backends serve {shown}; gap names {gap.dear} and {gap.cheap}")
    _check_router(document["pool"], world)
    _check_caps(document, world, (gap.dear, gap.cheap))
    return document


def _check_router(pool: dict[str, Any], world: str) -> None:
    """Cells write into these two tables."""
    router = pool.get("router", {})
    if not isinstance(router, dict):
        raise ConfigError(f"world {world}: pool.router is {router!r}; it must be a mapping")
    admission = router.get("admission", {})
    if not isinstance(admission, dict):
        raise ConfigError(f"world {world}: pool.router.admission is {admission!r}; it must be a mapping")


def gap_of(document: dict[str, Any], world: str) -> Gap:
    """What a world's file says of the gap."""
    try:
        return msgspec.convert(document["gap"], Gap)
    except msgspec.ValidationError as error:
        raise ConfigError(f"world {world}: gap: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"world {world}: {error.message}") from error


def _check_caps(document: dict[str, Any], world: str, models: tuple[str, str]) -> None:
    for model in models:
        cap = document["caps"].get(model)
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise ConfigError(
                f"world {world}: caps of {model!r} is {cap!r}; it must be a whole number >= 1"
                " (the mean number admitted while others wait: admitted_dear and admitted_cheap of `--json`)"
            )
    tokens = document["state_tokens"]
    if not isinstance(tokens, int | float) or isinstance(tokens, bool) or not (math.isfinite(tokens) and tokens >= 0):
        raise ConfigError(f"world {world}: state_tokens is {tokens!r}; it must be a finite number >= 0")


def with_capacity(document: dict[str, Any], name: str) -> Scenario:
    """Declare what each engine would say of itself: blocks times their size, of a shared memory all of it."""
    scenario = convert_scenario(apart(document), name)
    for backend in document["pool"]["backends"]:
        engine = scenario.engine_spec(backend["name"])
        if not isinstance(engine, VllmEngineSpec):
            raise ConfigError(f"world {name}: engine of {backend['name']!r} is no vllm; what it holds is not known")
        backend.setdefault("kv_tokens", engine.n_blocks * engine.block_tokens)
    return convert_scenario(document, name)


def apart(document: dict[str, Any]) -> dict[str, Any]:
    """The world without shared caches: such a one needs its size, which the engine has yet to say."""
    backends = [
        {key: value for key, value in backend.items() if key != "kv_pool" or "kv_tokens" in backend}
        for backend in document["pool"]["backends"]
    ]
    return {**document, "pool": {**document["pool"], "backends": backends}}
