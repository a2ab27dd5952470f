"""What `verification:` in a pool file may say; every default of running verifiers stands here and nowhere else."""

import math
from typing import Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.verify.spec import VERIFIER_KINDS

CONCURRENCY_BY_KIND: dict[str, int] = {
    "code": 2,
    "patch": 1,
    "container": 1,
    "math": 2,
    "judge": 4,
    "command": 2,
    "webhook": 8,
    "fusion": 4,
}
_OWN = "proc dev sys etc root home run var tmp work usr bin sbin lib lib64 loadwise"
HIDDEN = frozenset(("", *_OWN.split()))
"""What a sandbox shows of itself, or must not show at all."""
CONCURRENCY_DEFAULT = 2
CONCURRENCY_MAX = 64


class VerificationConfig(Fact, frozen=True, kw_only=True):
    """How verifiers are run."""

    sandbox: Literal["bubblewrap", "limits", "none"] = "bubblewrap"
    """`limits` is no sandbox: code that models wrote sees this machine's files and network."""
    shows: tuple[str, ...] = ()
    """Directories of this machine that a sandbox shows, read-only, where they lie: environments that tests need."""
    container_engine: str | None = None
    """`podman`, `docker` or a path; null takes the first that is installed."""
    concurrency: dict[str, int] = {}
    """Programs judged at once, by kind of verifier."""
    queue_max: int = 10_000
    """Programs that wait to be judged, all kinds together; one more is abstained on."""
    retries_max: int = 2
    """Of a check that ended in an error or without an answer."""
    retry_s: float = 2.0
    """Before the first retry; each later one waits twice as long."""
    program_max_s: float = 1800.0
    """Judging one program, its retries included."""
    answer_max_bytes: int = 4 * 1024 * 1024
    """A longer answer is not kept, so its program is abstained on."""
    prompt_max_bytes: int = 256 * 1024
    """A longer request is cut."""
    kept_max_bytes: int = 256 * 1024 * 1024
    """Requests and answers of open programs, in memory; the oldest give way."""
    spool_max_bytes: int = 1024 * 1024 * 1024
    """What waits to be judged, on disk beside the journal."""
    keeps_evidence: bool = False
    """Whether a verdict's evidence (outputs of tests, a judge's words) goes into the journal."""

    def __post_init__(self) -> None:
        for kind, n in self.concurrency.items():
            if kind not in VERIFIER_KINDS:
                known = ", ".join(VERIFIER_KINDS)
                raise ConfigError(f"verification.concurrency names {kind!r}; known: {known}")
            if not 1 <= n <= CONCURRENCY_MAX:
                raise ConfigError(f"verification.concurrency.{kind} is {n!r}; it must be 1 to {CONCURRENCY_MAX}")
        for tree in self.shows:
            if not tree.startswith("/") or ".." in tree.split("/") or tree.strip("/") in HIDDEN:
                raise ConfigError(
                    f"verification.shows holds {tree!r}; it must be an absolute path, not one of the system's own"
                )
        if not 0 <= self.retries_max <= 10:
            raise ConfigError(f"verification.retries_max is {self.retries_max!r}; it must be 0 to 10")
        for name in ("retry_s", "program_max_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"verification.{name} is {value!r}; it must be a finite number > 0")
        for name in self.__struct_fields__:
            if name.endswith(("_max_bytes", "queue_max")) and not 1 <= getattr(self, name) <= 1 << 42:
                raise ConfigError(f"verification.{name} is {getattr(self, name)!r}; it must be in [1, {1 << 42}]")

    def concurrency_of(self, kind: str) -> int:
        """Programs judged at once by verifiers of this kind."""
        return self.concurrency.get(kind, CONCURRENCY_BY_KIND.get(kind, CONCURRENCY_DEFAULT))
