"""Everything a machine may ask of its host. Commands are imperative; the host answers with events, if at all."""

from .fact import Fact
from .ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from .pool import Signal
from .work import EndReason, ProgramState, TurnOutcome, Verdict


class _Command(Fact, frozen=True, kw_only=True, tag=True):
    pass


class Dispatch(_Command, frozen=True, kw_only=True):
    """Send one attempt of a turn to a backend."""

    turn_id: TurnId
    attempt: int
    program_id: ProgramId
    backend_id: BackendId
    model: ModelId
    decision_id: DecisionId
    wait_s: float = 0.0
    """How long the turn was held by us."""
    priority: int = 0


class CancelAttempt(_Command, frozen=True, kw_only=True):
    """Take an attempt back: close its connection, so that the engine stops. Still answered by `AttemptEnded`."""

    turn_id: TurnId
    attempt: int


class EndTurn(_Command, frozen=True, kw_only=True):
    """Tell the client that its turn ended without an answer of ours. A completed turn needs no command."""

    turn_id: TurnId
    outcome: TurnOutcome
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    is_upstream_answer: bool = False
    """Pass the engine's own error answer on, which the host has kept, instead of this message."""


class SetTimer(_Command, frozen=True, kw_only=True):
    """Say `TimerFired(timer)` at or after `fires_at_s`. Setting the same name again moves it; it fires once."""

    timer: str
    fires_at_s: float


class AskSelector(_Command, frozen=True, kw_only=True):
    """Ask the user's HTTP selector; `SelectorAnswered` or the timer, whichever comes first, continues."""

    decision_id: DecisionId
    program_id: ProgramId
    candidates: tuple[str, ...]
    context: tuple[float, ...]
    task_type: str | None
    domain: str | None
    timeout_s: float


class Verify(_Command, frozen=True, kw_only=True):
    """Judge an ended program, off the dispatch path; answered by `VerdictArrived`."""

    program_id: ProgramId
    verifier: str
    task_type: str | None = None


ESCALATION = "escalation"
"""The reason of a decision for a further attempt."""


class CandidateView(Fact, frozen=True, kw_only=True):
    """One candidate of a decision as it stood when the choice was made."""

    candidate: str
    score: float | None = None
    mean: float | None = None
    width: float | None = None
    propensity: float | None = None
    n_running: int = 0
    n_held: int = 0
    headroom_ratio: float | None = None
    signals: dict[str, Signal] = {}
    expected_success: float | None = None
    """What the divert rule took for the candidate's success."""
    wait_s: float | None = None
    """Forecast of its wait; None where none was made."""
    wait_low_s: float | None = None
    wait_high_s: float | None = None
    """Ends of the forecast's 80 % interval."""


class RecordDecision(_Command, frozen=True, kw_only=True):
    """Write a choice down, before anything that follows from it. This is what `why` shows and what-if reads."""

    decision_id: DecisionId
    program_id: ProgramId
    policy: str
    learner_version: str
    context_version: str
    context: tuple[float, ...]
    candidates: tuple[CandidateView, ...]
    chosen: ModelId
    reason: str = "policy"
    """`policy`, `pinned`, `fallback` (another model ran after failures), `escalation` (another model after an attempt
    that failed), `selector`, `selector_fallback` (the policy chose where the selector did not), `policy_fallback` (a
    user's policy failed; the cheapest candidate was taken), `divert` (it starts sooner elsewhere), `rebind` (its
    model's backends are gone)."""
    slot: int = 0
    """Which learner decided, under the arm `per_slot`."""
    routed: ModelId | None = None
    """What the selector had chosen, where the program was diverted from that."""
    unaffordable: tuple[ModelId, ...] = ()
    """Models that were no candidates because the hour's dollars did not allow the first turn on them."""


class RecordPropensities(_Command, frozen=True, kw_only=True):
    """Write down the propensities of an earlier choice, estimated off the decision path."""

    decision_id: DecisionId
    propensities: tuple[float, ...]
    """One per candidate of the decision, in its order."""


class RecordCredit(_Command, frozen=True, kw_only=True):
    """Write down what a decision earned. At most one per decision is in force (law L11): a later one replaces it."""

    decision_id: DecisionId
    program_id: ProgramId
    model: ModelId
    success: float
    """As the verifier said; what its known error rates make of it is in the reward."""
    cost_usd: float
    reward: float
    replaced_reward: float | None = None
    """The reward of the earlier credit that this one takes back; None where there was none."""
    is_withdrawn: bool = False
    """The verdict was corrected to an abstention: the earlier credit is taken back, and nothing takes its place."""


class AttemptRecord(Fact, frozen=True, kw_only=True):
    """An attempt of a program that another one followed."""

    model: ModelId
    decision_id: DecisionId
    verdict: Verdict | None = None
    """None where it was given up unjudged."""
    cost_usd: float = 0.0
    reward: float | None = None
    is_credited: bool = False


class ProgramRecord(Fact, frozen=True, kw_only=True):
    """A program as it is shown, archived and answered about after it has left memory."""

    program_id: ProgramId
    state: ProgramState
    model: ModelId | None = None
    backend_id: BackendId | None = None
    decision_id: DecisionId | None = None
    verifier: str | None = None
    task_type: str | None = None
    domain: str | None = None
    tenant: str = ""
    arrived_at_s: float = 0.0
    ended_at_s: float | None = None
    end_reason: EndReason | None = None
    n_turns: int = 0
    n_failed_turns: int = 0
    wait_s: float = 0.0
    """How long its turns were held by us, those included that were not served in the end."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    verdict: Verdict | None = None
    reward: float | None = None
    is_credited: bool = False
    attempts: tuple[AttemptRecord, ...] = ()
    """Those before the one that the rest speaks of; costs, tokens and turns are of all together."""
    is_unanswered: bool = False
    """An attempt was offered after the last of `attempts`, and no turn of it is completed yet."""


class Archive(_Command, frozen=True, kw_only=True):
    """The program has left the router's memory; the host's index answers for it from now on."""

    program: ProgramRecord


Command = (
    Dispatch
    | CancelAttempt
    | EndTurn
    | SetTimer
    | AskSelector
    | Verify
    | RecordDecision
    | RecordPropensities
    | RecordCredit
    | Archive
)
