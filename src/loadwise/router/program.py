"""What the router knows of one program and one turn, and the moves a program may make.

Every rule about states stands in `TRANSITIONS`; the machine only says `move`.
"""

import msgspec

from loadwise.kernel.commands import AttemptRecord, ProgramRecord
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from loadwise.kernel.work import EndReason, ProgramState, Usage, Verdict
from loadwise.ledger.forecast import Span

_S = ProgramState

TRANSITIONS: dict[ProgramState, frozenset[ProgramState]] = {
    _S.ARRIVED: frozenset({_S.ROUTED, _S.REJECTED, _S.CANCELLED, _S.TIMED_OUT}),
    # A program rests in ROUTED when only turns pinned to other models were ever placed for it.
    _S.ROUTED: frozenset(
        {_S.HELD, _S.ADMITTED, _S.REJECTED, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT, _S.ENDED},
    ),
    # Back to ROUTED where it is diverted while it is held.
    _S.HELD: frozenset({_S.ROUTED, _S.ADMITTED, _S.REJECTED, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT, _S.ENDED}),
    _S.ADMITTED: frozenset({_S.RUNNING}),
    _S.RUNNING: frozenset({_S.ARRIVED, _S.HELD, _S.ENDED, _S.REJECTED, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT}),
    _S.ENDED: frozenset({_S.VERIFYING}),
    # It arrives anew for another attempt after a failed one.
    _S.VERIFYING: frozenset({_S.CLOSED, _S.CENSORED, _S.ARRIVED}),
    _S.CLOSED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.FAILED: frozenset(),
    _S.TIMED_OUT: frozenset(),
    _S.CANCELLED: frozenset(),
    # A correction may come after the verdict was given up.
    _S.CENSORED: frozenset({_S.CLOSED}),
}

TURN_KEY_PREFIX = "\x1fturn:"

TOKENS_MAX = 1_000_000_000
"""No context is longer; a larger count is taken for this one."""

OUTPUT_RESERVED_MAX_TOKENS = 1024

OPEN_STATES = frozenset({_S.ARRIVED, _S.ROUTED, _S.HELD, _S.ADMITTED, _S.RUNNING})
FORGOTTEN_STATES = frozenset({_S.REJECTED, _S.FAILED})
"""A program that never got an answer leaves no trace: the client's retry with the same id is a new program."""


def clamped_tokens(n_tokens: int) -> int:
    """A token count brought into [0, TOKENS_MAX]: hosts and engines may say anything.

    >>> clamped_tokens(-5), clamped_tokens(7), clamped_tokens(10**30)
    (0, 7, 1000000000)
    """
    if 0 <= n_tokens <= TOKENS_MAX:
        return n_tokens
    return TOKENS_MAX if n_tokens > 0 else 0


def needed_tokens(prompt_tokens: int, max_output_tokens: int | None) -> int:
    """What a turn's context needs room for: its prompt, and what it may answer as far as that is worth promising.

    Clients ask for tens of thousands of output tokens and use hundreds, so of what they ask for no more than
    `OUTPUT_RESERVED_MAX_TOKENS` are promised; where they ask for nothing, the model's expected peak has to do.

    >>> needed_tokens(90_000, 300), needed_tokens(100, 64_000), needed_tokens(100, None)
    (90300, 1124, 100)
    """
    answer_tokens = 0 if max_output_tokens is None else clamped_tokens(max_output_tokens)
    return clamped_tokens(clamped_tokens(prompt_tokens) + min(answer_tokens, OUTPUT_RESERVED_MAX_TOKENS))


class Taught(msgspec.Struct, kw_only=True, frozen=True):
    """What the ladder learned of one attempt, so that it can be taken back."""

    failed: str | None
    """The ladder's name for the attempt before; None for a first one."""
    success: float
    cost_usd: float


class Program(msgspec.Struct, kw_only=True):
    """One row of the program table."""

    program_id: ProgramId
    arrived_at_s: float
    active_at_s: float
    """When its last turn arrived or ended, or when one that was refused for want of money may come back."""
    is_implicit: bool = False
    is_pinned: bool = False
    tenant: str = ""
    task_type: str | None = None
    domain: str | None = None
    components: tuple[float, ...] = ()
    state: ProgramState = _S.ARRIVED
    model: ModelId | None = None
    backend_id: BackendId | None = None
    is_reserved: bool = False
    """Whether the program itself holds a reservation on `backend_id`."""
    is_resident: bool = False
    """Its last answer came from there, and it has had its place since: its context should still be in the cache."""
    has_found: bool = False
    """Its context was found once: a program whose prompts never begin alike finds nothing in any cache."""
    n_excused: int = 0
    """How often its engine was said to have begun anew since an answer to it was learned from (`residing`)."""
    answered_at_s: float = 0.0
    """When its last answer came."""
    fill_ratio: float = 0.0
    """How full the cache was then, where that is learned from; 0: not known."""
    decision_id: DecisionId | None = None
    verifier: str | None = None
    open_turns: list[TurnId] = []
    n_covered: int = 0
    """Attempts in flight under the program's own reservation."""
    context_tokens: int = 0
    peak_tokens: int = 0
    live_tokens: int = 0
    """What its latest dispatched turn may grow to."""
    admitted_at_s: float | None = None
    """When its attempt at hand first got a place on its model; None until then."""
    budget_s: float | None = None
    """Its time budget, while that has not begun."""
    is_marked: bool = False
    """Its place is to be given back when its turn ends (`pausing`, `residing`)."""
    is_paused: bool = False
    """Its place was taken from it, or will be, to relieve a cache (`residing`); until it has one again."""
    routed_model: ModelId | None = None
    """The selector's choice, where it was diverted from that."""
    estimates: dict[ModelId, float] = {}
    """Expected success by model, as its decision saw it, while it may still be diverted."""
    n_routed: int = 0
    """Its number in the account of what diverts give up (`forgone`), until it starts; 0: it is not in it."""
    forecast: Span | None = None
    """What its wait was forecast to be, before correction; None where nothing was, or it is known how it came out."""
    forecast_from_s: float = 0.0
    n_turns: int = 0
    """Completed turns."""
    n_side_turns: int = 0
    """Those among them that ran on another model than the program's."""
    n_failed_turns: int = 0
    tried_models: list[ModelId] = []
    """Models that failed before the first answer."""
    asked_decision_id: DecisionId | None = None
    """Under which the user's selector has been asked, while it has not answered."""
    wait_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    ended_at_s: float | None = None
    end_reason: EndReason | None = None
    verdict: Verdict | None = None
    reward: float | None = None
    is_credited: bool = False
    attempts: list[AttemptRecord] = []
    """Attempts that are over and were followed by another."""
    taught: dict[DecisionId, Taught] = {}
    """By decision, of the attempts that taught the ladder."""
    attempt_at_s: float = 0.0
    """When the attempt at hand began."""
    n_turns_before: int = 0
    """Completed turns of earlier attempts."""
    n_failed_before: int = 0
    cost_before_usd: float = 0.0
    budget_ends_at_s: float | None = None
    """When its time is used up, whatever the attempt."""

    @property
    def attempt_cost_usd(self) -> float:
        """What the attempt at hand has cost."""
        return self.cost_usd - self.cost_before_usd if self.attempts else self.cost_usd

    @property
    def is_unanswered(self) -> bool:
        """Whether a further attempt was offered after a verdict and none of its turns is completed."""
        if not self.is_open or not self.attempts or self.attempts[-1].verdict is None:
            return False
        return self.n_turns == self.n_turns_before

    @property
    def tokens(self) -> int:
        """Its context as last counted, or what its turn in flight may make of it."""
        return max(self.context_tokens, self.live_tokens)

    @property
    def is_open(self) -> bool:
        """Whether it still takes turns."""
        return self.state in OPEN_STATES

    def move(self, state: ProgramState) -> None:
        """Change the state along the table.

        Raises:
            LawBroken: the table has no such move.
        """
        if state not in TRANSITIONS[self.state]:
            raise LawBroken("transition", f"program {self.program_id!r} cannot go from {self.state} to {state}")
        self.state = state

    def record(self) -> ProgramRecord:
        """The program as it is shown and archived."""
        return ProgramRecord(
            program_id=self.program_id,
            state=self.state,
            model=self.model,
            backend_id=self.backend_id,
            decision_id=self.decision_id,
            verifier=self.verifier,
            task_type=self.task_type,
            domain=self.domain,
            tenant=self.tenant,
            arrived_at_s=self.arrived_at_s,
            ended_at_s=self.ended_at_s,
            end_reason=self.end_reason,
            n_turns=self.n_turns,
            n_failed_turns=self.n_failed_turns,
            wait_s=self.wait_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            cost_usd=self.cost_usd,
            verdict=self.verdict,
            reward=self.reward,
            is_credited=self.is_credited,
            attempts=tuple(self.attempts),
            is_unanswered=self.is_unanswered,
        )


class CalledOff(msgspec.Struct, kw_only=True):
    """An attempt that was taken back; its engine may still say what it has used."""

    attempt: int
    program_id: ProgramId
    arrived_at_s: float
    """Of its program, so that a later one of the same name is not charged."""
    model: ModelId
    prompt_tokens: int
    needed_tokens: int = 0
    backend_id: BackendId | None = None
    promise: str = ""
    """Under which money is promised to it."""


class Turn(msgspec.Struct, kw_only=True):
    """One open turn."""

    turn_id: TurnId
    program_id: ProgramId
    pinned_model: ModelId | None = None
    """What the client asked for by name."""
    model: ModelId | None = None
    """What it runs on; None until its program is routed."""
    is_side: bool = False
    """Whether it runs on another model than its program's, because the client pinned it there."""
    prompt_tokens: int = 0
    needed_tokens: int = 0
    """What its context may grow to: see `needed_tokens()`."""
    max_output_tokens: int | None = None
    """What the client permits for each answer; None where it names no limit."""
    n_answers: int = 1
    promise: str = ""
    """Under which `spending` has promised it money; empty where it has none."""
    is_final: bool = False
    priority: int = 0
    deadline_at_s: float | None = None
    arrived_at_s: float = 0.0
    attempt: int = 0
    n_attempts_before: int = 0
    """Attempts on models that it was moved away from."""
    backend_id: BackendId | None = None
    """Where an attempt runs now."""
    has_own_reservation: bool = False
    """Covered under `key` instead of the program's reservation."""
    is_held: bool = False
    """Whether it stands in its model's order."""
    is_paused: bool = False
    """Whether its program was paused when it joined it; who joined before that keeps its place there."""
    joined_at_s: float | None = None
    """When it joined it, where its program has not started yet."""
    waits_since_s: float | None = None
    """Since when it waits, for its program to be routed or for a place; None while it runs."""
    has_waited: bool = False
    wait_s: float = 0.0
    tried: list[BackendId] = []
    """Backends on which it failed."""

    @property
    def key(self) -> str:
        """Under which its own reservation is held; no program id may contain the control character."""
        return f"{TURN_KEY_PREFIX}{self.turn_id}"


def usage_can_be_true(usage: Usage, limit_tokens: int) -> bool:
    """Whether no count of an engine is longer than a context can be there.

    >>> (
    ...     usage_can_be_true(Usage(prompt_tokens=900, completion_tokens=7), 4096),
    ...     usage_can_be_true(Usage(prompt_tokens=10**30), 4096),
    ... )
    (True, False)
    """
    return usage.prompt_tokens <= limit_tokens and usage.completion_tokens <= limit_tokens


def estimated_usage(turn: Turn | CalledOff, said: Usage, limit_tokens: int) -> Usage:
    """What stands for a usage that cannot be true: the estimated prompt, and no longer an answer than was promised."""
    promised_tokens = max(turn.needed_tokens - turn.prompt_tokens, 0)
    completion_tokens = min(clamped_tokens(said.completion_tokens), promised_tokens)
    prompt_tokens = min(turn.prompt_tokens, limit_tokens)
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, is_exact=False)
