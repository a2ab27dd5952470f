"""Random quantities of a scenario file: one named distribution, with optional bounds."""

import math

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .bounds import NUMBER_MAX, SECONDS_MAX, SIGMA_MAX, require_within


class LogNormal(Fact, frozen=True, kw_only=True):
    """`exp(N(ln median, sigma²))`: the usual shape of prompt and output lengths."""

    median: float
    sigma: float


class Gamma(Fact, frozen=True, kw_only=True):
    """A gamma distribution by its shape (1 is exponential, more is narrower) and its mean."""

    shape: float
    mean: float


class Pareto(Fact, frozen=True, kw_only=True):
    """A tail: at least `least`, beyond it with probability `(least / x)^alpha`."""

    least: float
    alpha: float


class Part(Fact, frozen=True, kw_only=True):
    """One of several distributions, with its weight."""

    weight: float
    draw: "Draw"


class Draw(Fact, frozen=True, kw_only=True):
    """Exactly one distribution; `min` and `max` clip what it yields.

    >>> import numpy as np
    >>> Draw(choice=[3.0]).sample(np.random.default_rng(0))
    3.0
    """

    constant: float | None = None
    uniform: tuple[float, float] | None = None
    """Lowest and highest value."""
    exponential: float | None = None
    """Its mean."""
    geometric: float | None = None
    """Its mean, >= 1; values are 1, 2, …"""
    lognormal: LogNormal | None = None
    gamma: Gamma | None = None
    pareto: Pareto | None = None
    mixture: list[Part] | None = None
    """One of these, by weight."""
    choice: list[float] | None = None
    """Equally likely values."""
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        kinds = ("constant", "uniform", "exponential", "geometric", "lognormal", "gamma", "pareto", "mixture", "choice")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ConfigError(f"a distribution names exactly one of {', '.join(kinds)}; found {found}")
        if any(not math.isfinite(v) for v in self._numbers()):
            raise ConfigError(f"{given[0]} has a number that is not finite")
        for number in self._numbers():
            require_within(f"a number of {given[0]}", number, -NUMBER_MAX, NUMBER_MAX)
        self._check_ranges()

    def _numbers(self) -> list[float]:
        numbers = [v for v in (self.constant, self.exponential, self.geometric, self.min, self.max) if v is not None]
        if self.lognormal is not None:
            numbers += [self.lognormal.median, self.lognormal.sigma]
        for pair in (self.gamma, self.pareto):
            if pair is not None:
                numbers += [getattr(pair, name) for name in pair.__struct_fields__]
        numbers += [part.weight for part in self.mixture or ()]
        return numbers + list(self.uniform or ()) + list(self.choice or ())

    def _check_ranges(self) -> None:
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ConfigError(f"uniform is {list(self.uniform)!r}; the first value must not exceed the second")
        if self.exponential is not None and self.exponential < 0:
            raise ConfigError(f"exponential is {self.exponential!r}; its mean must be >= 0")
        if self.geometric is not None and self.geometric < 1:
            raise ConfigError(f"geometric is {self.geometric!r}; its mean must be >= 1")
        if self.lognormal is not None and (self.lognormal.median <= 0 or self.lognormal.sigma < 0):
            raise ConfigError(f"lognormal is {self.lognormal!r}; median must be > 0 and sigma >= 0")
        if self.lognormal is not None:
            require_within("lognormal sigma", self.lognormal.sigma, 0, SIGMA_MAX)
        for pair in (self.gamma, self.pareto):
            if pair is not None and any(getattr(pair, name) <= 0 for name in pair.__struct_fields__):
                raise ConfigError(f"{type(pair).__name__.lower()} is {pair!r}; both numbers must be > 0")
        if self.gamma is not None:
            require_within("gamma shape", self.gamma.shape, 1e-3, NUMBER_MAX)
        if self.pareto is not None:
            require_within("pareto alpha", self.pareto.alpha, 0.1, NUMBER_MAX)
        if self.mixture is not None and not (
            all(part.weight >= 0 for part in self.mixture) and sum(part.weight for part in self.mixture) > 0
        ):
            raise ConfigError("mixture needs weights >= 0, one of them > 0")
        if self.choice is not None and not self.choice:
            raise ConfigError("choice is empty; it must have at least one value")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"min {self.min!r} exceeds max {self.max!r}")

    def sample(self, rng: Generator) -> float:
        """One value."""
        return self.clipped(self.raw(rng))

    def clipped(self, value: float) -> float:
        """A value, moved between the bounds."""
        if self.min is not None:
            value = max(value, self.min)
        if self.max is not None:
            value = min(value, self.max)
        return value

    @staticmethod
    def _of_mixture(parts: list[Part], rng: Generator) -> float:
        u = float(rng.random()) * sum(part.weight for part in parts)
        for part in parts:
            u -= part.weight
            if u < 0:
                return part.draw.sample(rng)
        return parts[-1].draw.sample(rng)

    def raw(self, rng: Generator) -> float:
        """One value, before the bounds."""
        if self.uniform is not None:
            return float(rng.uniform(*self.uniform))
        if self.exponential is not None:
            return float(rng.exponential(self.exponential))
        if self.geometric is not None:
            return float(rng.geometric(1.0 / self.geometric))
        if self.lognormal is not None:
            return float(self.lognormal.median * math.exp(self.lognormal.sigma * rng.standard_normal()))
        if self.gamma is not None:
            return float(rng.gamma(self.gamma.shape, self.gamma.mean / self.gamma.shape))
        if self.pareto is not None:
            return float(self.pareto.least * (1.0 - rng.random()) ** (-1.0 / self.pareto.alpha))
        if self.mixture is not None:
            return self._of_mixture(self.mixture, rng)
        if self.choice is not None:
            return float(self.choice[int(rng.integers(len(self.choice)))])
        return float(self.constant or 0.0)


def scaled(quantity: "Quantity", factor: float, rng: Generator) -> float:
    """One value times a factor; bounds hold for the product."""
    if not isinstance(quantity, Draw):
        return float(quantity) * factor
    return quantity.clipped(quantity.raw(rng) * factor)


Quantity = float | Draw
"""In a file: a bare number, or a distribution."""


def sample(quantity: Quantity, rng: Generator) -> float:
    """One value of a number or a distribution."""
    return quantity.sample(rng) if isinstance(quantity, Draw) else float(quantity)


def sample_seconds(quantity: Quantity, rng: Generator) -> float:
    """One duration, never negative and never beyond `SECONDS_MAX` (law L15)."""
    return to_seconds(sample(quantity, rng))


def to_seconds(value: float) -> float:
    """A duration of at least 0 and at most `SECONDS_MAX`."""
    return min(max(value, 0.0), SECONDS_MAX)


def require_quantity(what: str, quantity: "Quantity | None") -> None:
    """Refuse a bare number that is not finite or too large; a distribution has checked itself.

    Raises:
        ConfigError: it names `what`.
    """
    if quantity is not None and not isinstance(quantity, Draw):
        require_within(what, quantity, -NUMBER_MAX, NUMBER_MAX)


def least_of(quantity: "Quantity") -> float:
    """A value that no draw falls below; 0 where only chance bounds it."""
    if not isinstance(quantity, Draw):
        return quantity
    if quantity.uniform is not None:
        least = quantity.uniform[0]
    elif quantity.choice is not None:
        least = min(quantity.choice)
    elif quantity.mixture is not None:
        least = min(least_of(part.draw) for part in quantity.mixture)
    elif quantity.pareto is not None:
        least = quantity.pareto.least
    else:
        least = quantity.constant or 0.0
    return quantity.clipped(least)


def to_count(value: float, least: int, most: int = 10_000_000) -> int:
    """A whole number of at least `least` and at most `most`."""
    return int(min(max(round(value), least), most))


def sample_count(quantity: Quantity, rng: Generator, least: int, most: int = 10_000_000) -> int:
    """One whole number of at least `least` and at most `most` (law L15: no draw is unbounded)."""
    return to_count(sample(quantity, rng), least, most)
