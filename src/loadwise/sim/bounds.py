"""How large the numbers of a scenario may be, so that every run ends (law L15) and no product overflows."""

from typing import Any

from loadwise.kernel.errors import ConfigError

N_PROGRAMS_MAX = 10_000_000
N_AGENTS_MAX = 1_000_000
MAX_EVENTS_MAX = 1_000_000_000
NUMBER_MAX = 1e9
"""Of any quantity: seconds (31 years) or tokens."""
SECONDS_MAX = 1e9
TOKENS_MAX = 10_000_000
"""Of one program's context."""
RATE_MIN_PER_S, RATE_MAX_PER_S = 1e-6, 1e9
"""Of arrivals and of an engine's tokens, steps and services."""
EVERY_S_MIN = 1e-3
"""Between two readings of the engines."""
SIGMA_MAX = 20.0
"""Of a log-normal: exp(20 z) is finite for any z that a generator can draw."""


def require_within(what: str, value: Any, least: float, most: float) -> None:
    """Refuse a number outside its bounds, and what is not a number.

    Raises:
        ConfigError: `value` is not in [least, most].
    """
    if not least <= value <= most:
        raise ConfigError(f"{what} is {value!r}; it must be in [{least:g}, {most:g}]")
