"""Ways in which an emulated engine can misbehave, for the tests of whoever talks to it. Off unless asked for."""

import math
from typing import Literal

import msgspec

from loadwise.kernel.errors import CallerError, ConfigError
from loadwise.kernel.fact import Fact

FAULT_HEADER = b"x-emulator-fault"

FaultKind = Literal["hang", "reset", "truncate", "invalid_json", "no_usage", "status", "slow"]


class Fault(Fact, frozen=True, kw_only=True):
    """One misbehaviour of one answer. A backend that refuses connections is `EmulatedBackend.go_down`."""

    kind: FaultKind
    """`hang`: no byte, ever. `reset`: the connection breaks after `after_tokens` tokens. `truncate`: the answer ends
    there as if it were whole, in the middle of a line. `invalid_json`: whole, but no JSON. `no_usage`: it lacks usage.
    `status`: an error with `status` and `retry_after_s`. `slow`: nothing happens for `delay_s` real seconds first."""
    after_tokens: int = 1
    """0 breaks before the first byte."""
    status: int = 503
    retry_after_s: float | None = None
    delay_s: float = 1.0
    ratio: float = 1.0
    """Share of the requests that it befalls, when it is set for a backend."""

    def __post_init__(self) -> None:
        if self.after_tokens < 0:
            raise ConfigError(f"fault after_tokens is {self.after_tokens!r}; it must be >= 0")
        if not 400 <= self.status <= 599:
            raise ConfigError(f"fault status is {self.status!r}; it must be in 400..599")
        for name in ("retry_after_s", "delay_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"fault {name} is {value!r}; it must be a finite number >= 0")
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"fault ratio is {self.ratio!r}; it must be in [0, 1]")


def parse_fault(value: bytes) -> Fault:
    """Read a fault from a header: a kind alone, or the fault as JSON.

    >>> parse_fault(b"hang").kind, parse_fault(b'{"kind": "reset", "after_tokens": 3}').after_tokens
    ('hang', 3)

    Raises:
        CallerError: it is neither.
    """
    text = value.strip()
    try:
        if text.startswith(b"{"):
            return msgspec.json.decode(text, type=Fault)
        return msgspec.convert({"kind": text.decode("latin-1")}, Fault)
    except (msgspec.DecodeError, ConfigError) as error:
        raise CallerError(f"{FAULT_HEADER.decode()} is {value!r}: {error}") from error
