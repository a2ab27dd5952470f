"""How a configuration names a verifier."""

import math
from typing import Any

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

EXTERNAL = "external"
"""Somebody reports verdicts over HTTP."""

VERIFIER_KINDS = (
    EXTERNAL,
    "exact",
    "choice",
    "numeric",
    "math",
    "code",
    "patch",
    "container",
    "state",
    "judge",
    "command",
    "webhook",
    "human",
    "fusion",
)


class VerifierSpec(Fact, frozen=True, kw_only=True):
    """Who judges programs of a task type."""

    kind: str = EXTERNAL
    """`external`: somebody reports verdicts over HTTP. Other kinds are run by the verification subsystem."""
    run: str | None = None
    """Of kind `command`: the command line, split as a shell would and run without one."""
    url: str | None = None
    """Of kind `webhook`."""
    timeout_s: float = 60.0
    """How long one check may take."""
    options: dict[str, Any] = {}
    """Its own options (docs/verification.md); an unknown one is refused with the valid ones listed."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"verifier timeout_s is {self.timeout_s!r}; it must be a finite number > 0")
        if self.kind not in VERIFIER_KINDS:
            raise ConfigError(f"verifier kind {self.kind!r} is unknown; known: {', '.join(VERIFIER_KINDS)}")
