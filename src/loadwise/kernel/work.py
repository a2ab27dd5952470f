"""Facts about work: what a turn used, what a verdict says, where a program stands."""

import enum
import math

from .errors import Unprocessable
from .fact import Fact


class Usage(Fact, frozen=True, kw_only=True):
    """Tokens of one attempt as the engine counted them.

    An engine that sends no usage leaves `is_exact` false: the host's estimate stands, and says so.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens` that the engine found in its prefix cache."""
    is_exact: bool = True


class ProgramState(enum.StrEnum):
    """Where a program stands; the permitted moves are `router.program.TRANSITIONS`."""

    ARRIVED = "arrived"
    ROUTED = "routed"
    HELD = "held"
    ADMITTED = "admitted"
    RUNNING = "running"
    ENDED = "ended"
    VERIFYING = "verifying"
    CLOSED = "closed"
    REJECTED = "rejected"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    CENSORED = "censored"


class TurnOutcome(enum.StrEnum):
    """How a turn ended. *Rejected* never entered the hold order; *evicted* was in it."""

    COMPLETED = "completed"
    FAILED = "failed"
    REJECTED = "rejected"
    EVICTED = "evicted"
    CANCELLED = "cancelled"


class AttemptOutcome(enum.StrEnum):
    """How one attempt on one backend ended, as the host saw it."""

    COMPLETED = "completed"
    """A whole answer with a 2xx status."""
    REFUSED = "refused"
    """No connection."""
    CONNECT_TIMEOUT = "connect_timeout"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    BROKEN = "broken"
    """Reset, truncated or malformed."""
    STATUS = "status"
    """A whole answer with a status of 400 or more."""
    CANCELLED = "cancelled"
    """The client left, or the router took it back."""


class EndReason(enum.StrEnum):
    """Why a program ended."""

    FINISH = "finish"
    FINAL = "final"
    IDLE = "idle"
    VERDICT = "verdict"
    BUDGET = "budget"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    """A model call of our own (a judge's) is over: nothing is judged, nothing is learned."""
    FAILED = "failed"
    REJECTED = "rejected"


class VerdictKind(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    ABSTAIN = "abstain"


HUMAN = "human"
"""The verifier whose word goes before that of any machine."""


class Verdict(Fact, frozen=True, kw_only=True):
    """What a verifier says of a finished program. Abstaining is not zero: it carries no credit.

    Raises:
        Unprocessable: `score` outside [0, 1] or not a number.
    """

    verdict: VerdictKind
    score: float | None = None
    """In [0, 1]; `pass` means 1 and `fail` means 0 where absent."""
    verifier: str = ""
    version: str = ""
    verdict_id: str = ""
    """The sender's own id, so that the same report sent twice is known to be the same."""
    took_s: float | None = None
    """How long the verifier worked, checks included; None where nobody measured."""
    cost_usd: float | None = None
    """What its checks cost, a judge's model calls above all; None where nobody counted."""
    explanation: str = ""
    """Why, in words for a human."""
    evidence: dict[str, str] = {}
    """What the explanation rests on, by name; bounded by whoever makes it."""
    is_correction: bool = False
    """It replaces the verdict that stands, whoever gave that; a person's verdict replaces a machine's without it."""

    def __post_init__(self) -> None:
        if self.score is not None and not (math.isfinite(self.score) and 0.0 <= self.score <= 1.0):
            raise Unprocessable(f"score {self.score!r} is outside [0, 1]", param="score")

    def replaces(self, other: "Verdict") -> bool:
        """Whether it takes the place of a verdict that stands already; the same report again does not.

        >>> by_test = Verdict(verdict=VerdictKind.FAIL, verifier="code")
        >>> Verdict(verdict=VerdictKind.PASS, verifier="human").replaces(by_test)
        True
        >>> Verdict(verdict=VerdictKind.PASS, verifier="judge").replaces(by_test)
        False
        """
        if self == other:
            return False
        return self.is_correction or (self.verifier == HUMAN and other.verifier != HUMAN)

    @property
    def success(self) -> float | None:
        """The success in [0, 1] to learn from, or None where the verifier abstained."""
        if self.verdict is VerdictKind.ABSTAIN:
            return None
        if self.score is not None:
            return self.score
        return 1.0 if self.verdict is VerdictKind.PASS else 0.0
