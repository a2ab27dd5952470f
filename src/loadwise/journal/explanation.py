"""What is told of a program: its decisions, what each rested on, and what came of it."""

from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import EndReason, ProgramState, Verdict

from .held import HeldTurn


class SignalAge(Fact, frozen=True, kw_only=True):
    """A signal as the decision saw it."""

    name: str
    value: float
    age_s: float


class CandidateExplained(Fact, frozen=True, kw_only=True):
    """One candidate of a decision; None where the policy reports no such number."""

    candidate: str
    is_chosen: bool
    score: float | None = None
    mean: float | None = None
    width: float | None = None
    propensity: float | None = None
    n_running: int = 0
    n_held: int = 0
    headroom_ratio: float | None = None
    expected_success: float | None = None
    wait_s: float | None = None
    wait_low_s: float | None = None
    wait_high_s: float | None = None
    signals: tuple[SignalAge, ...] = ()


class DecisionExplained(Fact, frozen=True, kw_only=True):
    """One decision with all that it rested on."""

    decision_id: int
    sequence: int
    at_s: float
    policy: str
    learner_version: str
    context_version: str
    context: tuple[float, ...]
    chosen: str
    reason: str
    routed: str | None = None
    """The selector's choice, where the program was diverted from it."""
    candidates: tuple[CandidateExplained, ...]
    is_taken: bool = True
    """False for a further attempt that was offered and of which no turn ran: waiting still, or withdrawn."""
    unaffordable: tuple[str, ...] = ()
    """Models that were left out because the hour's dollars did not allow the first turn on them."""


class CreditExplained(Fact, frozen=True, kw_only=True):
    """What one attempt of a program earned, as it stands."""

    decision_id: int
    model: str
    success: float
    cost_usd: float
    reward: float


class Explanation(Fact, frozen=True, kw_only=True):
    """Why a program ran on its model, and what came of it."""

    program_id: str
    arrived_at_s: float
    decisions: tuple[DecisionExplained, ...]
    """More than one where another model took over after failures."""
    n_turns: int
    backend_ids: tuple[str, ...] = ()
    wait_s: float | None = None
    """Seconds its turns were held by us, those that were evicted or left meanwhile included, and those that wait still
    left out; None where the commands were not regenerated."""
    waiting: tuple[HeldTurn, ...] = ()
    """Turns that wait still."""
    state: ProgramState | None = None
    """Where it stands after the last entry, or when it left memory; None where the commands were not regenerated, and
    for a program that was forgotten because it never got an answer."""
    end_reason: EndReason | None = None
    ended_at_s: float | None = None
    verdicts: tuple[Verdict, ...] = ()
    success: float | None = None
    cost_usd: float | None = None
    reward: float | None = None
    """Of the last attempt, by the credit that is in force."""
    credits: tuple[CreditExplained, ...] = ()
    """Of every attempt that was judged, in their order: more than one where the program was tried again."""
    n_corrections: int = 0
    """Credits that were taken back before, by another on the same attempt."""
    refusals: tuple[str, ...] = ()
    """What its turns were told that were refused."""
    record: ProgramRecord | None = None
    """As archived, once it has left the router's memory."""
    is_exact: bool = True
    """False where the regenerated commands are not those recorded: another version of loadwise reads than wrote."""
