"""Everything that can happen to a machine. Events are past tense; each carries the instant it happened.

`at_s` is float seconds on the run's clock, stamped by the host; machines know no other time. The union `Event` is
what a journal holds, so a field may be added with a default and never be removed or change its meaning.
"""

from .fact import Fact
from .ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from .pool import BackendHealth, BackendSpec, ModelSpec
from .work import AttemptOutcome, EndReason, Usage, Verdict

AUTO = "auto"
"""The model name by which a client leaves the choice to us."""


class _Event(Fact, frozen=True, kw_only=True, tag=True):
    at_s: float


class TurnArrived(_Event, frozen=True, kw_only=True):
    """A client asks for one model call of a program."""

    turn_id: TurnId
    program_id: ProgramId
    model: str = AUTO
    """`auto`, or a pool model by name (pinned)."""
    prompt_tokens: int = 0
    """The host's estimate; the engine's own count replaces it when the turn ends."""
    max_output_tokens: int | None = None
    """For each answer."""
    n_answers: int = 1
    """How many answers are asked for at once (`n`, several prompts)."""
    is_implicit: bool = False
    """The program was recognised by its messages, not named: its reservation lives only while a turn is open."""
    is_final: bool = False
    """The program ends with this turn."""
    task_type: str | None = None
    domain: str | None = None
    components: tuple[float, ...] = ()
    """Principal components of the request's embedding; empty where there is none."""
    tenant: str = ""
    budget_s: float | None = None
    """Wall seconds the whole program may take, waiting included; read from its first turn."""
    priority: int = 0
    deadline_at_s: float | None = None


class AttemptEnded(_Event, frozen=True, kw_only=True):
    """One attempt on one backend is over, whole or not."""

    turn_id: TurnId
    attempt: int
    outcome: AttemptOutcome
    usage: Usage = Usage()
    status: int = 0
    """The engine's HTTP status; 0 where no head came."""
    first_byte_at_s: float | None = None
    """When the first byte went to the client; None means nothing did, so a retry is still invisible."""
    detail: str = ""
    retry_after_s: float | None = None
    """What a 429 or 503 of the engine asked for."""


class TurnAbandoned(_Event, frozen=True, kw_only=True):
    """The client left before its answer was whole."""

    turn_id: TurnId


class ProgramEnded(_Event, frozen=True, kw_only=True):
    """The agent says that its program is over (finish, final), or an operator cancels it."""

    program_id: ProgramId
    reason: EndReason = EndReason.FINISH
    artefacts: dict[str, str] = {}
    """What a verifier needs, by name; stays out of the journal unless the host is told to keep it."""


class VerdictArrived(_Event, frozen=True, kw_only=True):
    """A verifier has judged a program; verdicts come in any order, late, twice or never."""

    program_id: ProgramId
    verdict: Verdict


class SelectorAnswered(_Event, frozen=True, kw_only=True):
    """A user's HTTP selector has answered `AskSelector`, or failed (then `model` is None)."""

    decision_id: DecisionId
    model: ModelId | None = None
    propensity: float | None = None
    detail: str = ""


class SignalsObserved(_Event, frozen=True, kw_only=True):
    """One reading of one backend. A name that is absent was not readable: unknown, never zero."""

    backend_id: BackendId
    values: dict[str, float]
    observed_at_s: float


class BackendAdded(_Event, frozen=True, kw_only=True):
    """A backend joined the pool after start; its model joins with it where new."""

    backend: BackendSpec
    model: ModelSpec | None = None


class BackendChanged(_Event, frozen=True, kw_only=True):
    """A probe or an operator changed a backend's health."""

    backend_id: BackendId
    health: BackendHealth
    detail: str = ""


class BackendRemoved(_Event, frozen=True, kw_only=True):
    """An operator took a backend out of the pool."""

    backend_id: BackendId


class ModelForgotten(_Event, frozen=True, kw_only=True):
    """An operator says that the model behind a name is another one now: what was learned of it no longer holds."""

    model: ModelId
    detail: str = ""


class TimerFired(_Event, frozen=True, kw_only=True):
    """A `SetTimer` came due."""

    timer: str


class HostRestarted(_Event, frozen=True, kw_only=True):
    """The host came back after a crash: every open attempt is gone, every binding and pending decision stands."""

    detail: str = ""


Event = (
    TurnArrived
    | AttemptEnded
    | TurnAbandoned
    | ProgramEnded
    | VerdictArrived
    | SelectorAnswered
    | SignalsObserved
    | BackendAdded
    | BackendChanged
    | BackendRemoved
    | ModelForgotten
    | TimerFired
    | HostRestarted
)
