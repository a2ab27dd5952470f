"""Facts about the pool: models with prices, backends with capacities, signals with ages."""

import enum
import math
from typing import Literal

from .errors import ConfigError
from .fact import Fact

EngineKind = Literal["vllm", "sglang", "llamacpp", "tgi", "trtllm", "api", "emulator"]


PRICE_MAX_USD = 1e9
"""A price per million tokens beyond it is a slip of the pen, and costs would overflow."""
CAPACITY_MAX = 10**12


class Price(Fact, frozen=True, kw_only=True):
    """US dollars per million tokens."""

    input: float = 0.0
    output: float = 0.0
    cached_input: float | None = None
    """Price of prompt tokens found in the prefix cache; the input price where absent."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= PRICE_MAX_USD:
                raise ConfigError(
                    f"usd_per_million.{name} is {value!r}; it must be a finite number >= 0 and <= {PRICE_MAX_USD:g}"
                )


class ModelSpec(Fact, frozen=True, kw_only=True):
    """One entry under `models:`."""

    usd_per_million: Price = Price()
    context_tokens: int | None = None
    """The longest context the model accepts; None where unknown."""
    expected_tokens: int | None = None
    """Prior of a program's peak context on this model (ORACLE's c0); the router's `expected_tokens` where absent."""
    expected_run_s: float | None = None
    """Prior of a program's run time on this model (ORACLE's D0); the router's `expected_run_s` where absent."""

    def __post_init__(self) -> None:
        if self.expected_tokens is not None and not 1 <= self.expected_tokens <= CAPACITY_MAX:
            raise ConfigError(f"expected_tokens is {self.expected_tokens!r}; it must be >= 1 and <= {CAPACITY_MAX:g}")
        run_s = self.expected_run_s
        if run_s is not None and not (math.isfinite(run_s) and run_s > 0):
            raise ConfigError(f"expected_run_s is {run_s!r}; it must be a finite number > 0")
        if self.context_tokens is not None and not 1 <= self.context_tokens <= CAPACITY_MAX:
            raise ConfigError(f"context_tokens is {self.context_tokens!r}; it must be >= 1 and <= {CAPACITY_MAX:g}")


class CapacityUnit(enum.StrEnum):
    """What a reservation on a backend is counted in."""

    KV_TOKENS = "kv_tokens"
    SLOTS = "slots"
    REQUESTS_PER_MINUTE = "requests_per_minute"


DEFAULT_SLOTS = 256
"""Programs admitted at once to a backend that declares no capacity at all."""


class BackendSpec(Fact, frozen=True, kw_only=True):
    """One entry under `backends:`. At most one of `kv_tokens`, `slots`, `requests_per_minute` is the capacity."""

    name: str
    model: str
    url: str = ""
    engine: EngineKind = "vllm"
    served_model: str | None = None
    """The model's name in the engine's own words; the pool's name where absent."""
    key_env: str | None = None
    """Name of the environment variable that holds the API key; the key itself is never in a file."""
    kv_tokens: int | None = None
    slots: int | None = None
    requests_per_minute: int | None = None
    kv_pool: str | None = None
    """Name of the KV cache that it shares with other backends (models on one GPU); `kv_tokens` is then all of that
    cache, in this model's tokens."""
    priority: Literal["lower_first", "higher_first"] | None = None
    """Which turns the engine serves first by the field `priority`; None sends it none. vLLM (with `--scheduling-policy
    priority`) serves the lower first, SGLang (with `--enable-priority-scheduling`) the higher: opt in, nothing is
    guessed."""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64:
            raise ConfigError(f"a backend's name is {self.name!r}; it must have 1 to 64 characters")
        declared = [n for n in ("kv_tokens", "slots", "requests_per_minute") if getattr(self, n) is not None]
        if len(declared) > 1:
            raise ConfigError(f"backend {self.name!r} declares {' and '.join(declared)}; one capacity is the limit")
        for name in declared:
            if not 1 <= getattr(self, name) <= CAPACITY_MAX:
                limits = f"it must be >= 1 and <= {CAPACITY_MAX:g}"
                raise ConfigError(f"backend {self.name!r}: {name} is {getattr(self, name)!r}; {limits}")
        if self.kv_pool is not None and (not self.kv_pool or self.kv_tokens is None):
            raise ConfigError(f"backend {self.name!r}: kv_pool {self.kv_pool!r} needs a name and kv_tokens")
        if self.priority is not None and self.engine in ("llamacpp", "tgi", "trtllm"):
            raise ConfigError(f"backend {self.name!r}: priority is {self.priority!r}; engine {self.engine} takes none")
        for name in ("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"backend {self.name!r}: {name} is {value!r}; it must be a finite number > 0")

    @property
    def declares_capacity(self) -> bool:
        """Whether the pool file says how much it takes."""
        return not (self.kv_tokens is None and self.slots is None and self.requests_per_minute is None)

    @property
    def capacity(self) -> tuple[CapacityUnit, int]:
        """The unit of this backend's reservations and how many of them it has."""
        if self.kv_tokens is not None:
            return CapacityUnit.KV_TOKENS, self.kv_tokens
        if self.requests_per_minute is not None:
            return CapacityUnit.REQUESTS_PER_MINUTE, self.requests_per_minute
        return CapacityUnit.SLOTS, self.slots if self.slots is not None else DEFAULT_SLOTS


class BackendHealth(enum.StrEnum):
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"
    """Finishes what it runs; takes no new program."""


class Signal(Fact, frozen=True, kw_only=True):
    """A measured value and when it was measured: a value without its age is a rumour."""

    value: float
    observed_at_s: float

    def fresh(self, now_s: float, max_age_s: float) -> float | None:
        """The value, or None when it is older than `max_age_s` (law L10: stale is unknown, not zero)."""
        return self.value if now_s - self.observed_at_s <= max_age_s else None


def price_usd(price: Price, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> float:
    """What a call costs in US dollars.

    >>> price_usd(Price(input=1.0, output=2.0, cached_input=0.1), 1000, 500, 400)
    0.00164
    """
    cached_rate = price.input if price.cached_input is None else price.cached_input
    cached = cached_tokens if cached_tokens < prompt_tokens else prompt_tokens
    return ((prompt_tokens - cached) * price.input + cached * cached_rate + completion_tokens * price.output) / 1e6


__all__ = [
    "DEFAULT_SLOTS",
    "BackendHealth",
    "BackendSpec",
    "CapacityUnit",
    "EngineKind",
    "ModelSpec",
    "Price",
    "Signal",
    "price_usd",
]
