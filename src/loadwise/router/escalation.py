"""A program whose attempt failed may run again on another model: escalation, within its budgets.

Evidence is what the agent does not write: the verifier's verdict, failed turns, and our own counts of turns and
seconds. A verdict under the name `SELF` is an agent's opinion of itself and escalates nothing.

On a *fail* the attempt is credited to the model that ran it, and then `policy.ladder` is asked whether another attempt
pays. If so, the program opens again under the same id, bound to the next model, and whoever runs the agent is told with
the answer to the verdict (`retry`). The next attempt begins with its first turn; until then the program can be
*withdrawn* (idle, finished, out of time): it is then closed under the verdict it has.

A program that is *stuck* (more turns, failed turns or seconds than configured) is bound to another model at its next
turn instead; the attempt given up is undone, for nobody judged it.

A verdict that is corrected is taken back from the ladder as from every learner (L11).

What a further attempt earns is credited to its own decision and teaches the ladder; the learner of first choices does
not hear of it, since tasks that another model failed are not tasks at large.

Nothing loops: every attempt takes a model that the program has not tried, `attempts_max` at most.
"""

from loadwise.kernel import commands as c
from loadwise.kernel.commands import AttemptRecord
from loadwise.kernel.ids import ModelId
from loadwise.kernel.work import HUMAN, ProgramState, Verdict, VerdictKind
from loadwise.policy.ladder import Rung

from .binding import Binding
from .config import EscalationConfig
from .desk import Desk
from .ending import Ending
from .program import Program, Taught

SELF = "agent"
"""The verifier's name under which an agent judges itself."""

STUCK = "\x1estuck"
"""After a model's name: the model of an attempt that was given up unjudged."""


class Escalation:
    """Decides about further attempts; does nothing where the configuration does not ask for them."""

    def __init__(self, desk: Desk, ending: Ending, binding: Binding) -> None:
        self._desk = desk
        self._ending = ending
        self._binding = binding

    def learn(self, program: Program, success: float) -> None:
        """The program's attempt was judged."""
        ladder = self._desk.ladder
        if ladder is None or program.is_pinned or program.n_side_turns:
            return
        assert program.model is not None
        before = program.attempts[-1] if program.attempts else None
        failed = None if before is None else _label(before)
        x = self._desk.routing.context(program)
        ladder.learn(x, failed, program.model, success=success, cost_usd=program.attempt_cost_usd)
        assert program.decision_id is not None
        taught = Taught(failed=failed, success=success, cost_usd=program.attempt_cost_usd)
        program.taught[program.decision_id] = taught

    def correct(self, program: Program, success: float | None) -> None:
        """Another verdict takes the place of what the attempt at hand taught, or of nothing.

        Args:
            success: None where the new verdict is an abstention.
        """
        ladder = self._desk.ladder
        if ladder is None or program.decision_id is None:
            return
        taught = program.taught.pop(program.decision_id, None)
        if taught is None and program.is_credited:
            return  # it taught a ladder that is no more
        if taught is not None:
            assert program.model is not None
            x = self._desk.routing.context(program)
            ladder.unlearn(x, taught.failed, program.model, success=taught.success, cost_usd=taught.cost_usd)
        if success is not None:
            self.learn(program, success)

    def audit(self, before: Verdict | None, person: Verdict) -> None:
        """A person has judged what a verifier had judged: where that is a random sample, it tells the false rates."""
        config, ladder = self._desk.config.escalation, self._desk.ladder
        if config is None or ladder is None or not config.audited or before is None:
            return
        if person.verifier != HUMAN or before.verifier in (HUMAN, SELF):
            return
        told = (VerdictKind.PASS, VerdictKind.FAIL)
        if before.verdict in told and person.verdict in told:
            ladder.audited(passed=before.verdict is VerdictKind.PASS, is_right=person.verdict is VerdictKind.PASS)

    def reopen(self, program: Program, verdict: Verdict, rates: tuple[float, float] | None) -> bool:
        """Open a judged program again where another attempt pays. False where the verdict is its last.

        Args:
            rates: false passes and false fails of this verdict's verifier, where they are known.
        """
        if verdict.verdict is not VerdictKind.FAIL or verdict.verifier == SELF:
            return False
        assert program.model is not None
        rung = self._rung(program, program.model, rates, is_judged=True)
        if rung is None:
            return False
        desk = self._desk
        self._note(program, verdict)
        desk.agenda.cancel(f"verdict:{program.program_id}")
        desk.table.reopen(program.program_id)
        program.active_at_s = desk.now_s
        due_at_s = desk.now_s + min(desk.config.park_s, desk.config.idle_s)
        desk.agenda.schedule(f"idle:{program.program_id}", due_at_s)
        if program.budget_ends_at_s is not None:
            desk.agenda.schedule(f"budget:{program.program_id}", program.budget_ends_at_s)
        self._begin(program, rung)
        desk.counts.escalated += 1
        return True

    def rebind_stuck(self, program: Program) -> None:
        """Before its next turn: bind a program that is stuck to another model, where one can take over."""
        config = self._desk.config.escalation
        if config is None or program.state is not ProgramState.RUNNING or program.open_turns or program.n_side_turns:
            return
        if program.model is None or not _is_stuck(program, config, self._desk.now_s):
            return
        rung = self._rung(program, ModelId(program.model + STUCK), None, is_judged=False)
        if rung is None:
            return
        self._ending.undo(program)
        self._note(program, None)
        self._desk.admission.release_program(program)
        self._begin(program, rung)
        self._desk.counts.escalated_stuck += 1

    def withdraw(self, program: Program) -> None:
        """The attempt that was offered is not taken: the program is again what it was before the offer."""
        self._desk.credit.undo(program.decision_id)
        last = program.attempts.pop()
        program.model, program.decision_id, program.verdict = last.model, last.decision_id, last.verdict
        program.reward, program.is_credited = last.reward, last.is_credited
        program.cost_before_usd = program.cost_usd - last.cost_usd

    def _rung(
        self, program: Program, failed: ModelId, rates: tuple[float, float] | None, *, is_judged: bool
    ) -> Rung | None:
        """The best model to go on with; None where none pays or a budget forbids it."""
        desk, config, ladder = self._desk, self._desk.config.escalation, self._desk.ladder
        if config is None or ladder is None or program.is_pinned or program.n_side_turns:
            return None
        if len(program.attempts) + 2 > config.attempts_max:
            return None
        if is_judged and desk.table.n_open >= desk.config.programs_max:
            return None
        if program.budget_ends_at_s is not None and desk.now_s >= program.budget_ends_at_s:
            return None
        tried = {program.model, *(attempt.model for attempt in program.attempts)}
        usable = [model for model in desk.routing.models_for_new(desk.now_s) if model not in tried]
        models = desk.spending.affordable(usable, program, None, desk.now_s)
        left_usd = None if config.cost_max_usd is None else config.cost_max_usd - program.cost_usd
        x = desk.routing.context(program)
        rungs = ladder.climb(x, failed, models, rates=rates, is_judged=is_judged)
        return next((rung for rung in rungs if left_usd is None or rung.cost_usd < left_usd), None)

    def _note(self, program: Program, verdict: Verdict | None) -> None:
        """The attempt at hand joins those that are over."""
        assert program.model is not None and program.decision_id is not None
        program.attempts.append(
            AttemptRecord(
                model=program.model,
                decision_id=program.decision_id,
                verdict=verdict,
                cost_usd=program.attempt_cost_usd,
                reward=program.reward,
                is_credited=program.is_credited,
            )
        )

    def _begin(self, program: Program, rung: Rung) -> None:
        """The next attempt: nothing of the one before is this one's."""
        program.verdict, program.reward, program.is_credited = None, None, False
        program.ended_at_s, program.end_reason = None, None
        program.n_turns_before, program.n_failed_before = program.n_turns, program.n_failed_turns
        program.cost_before_usd, program.attempt_at_s = program.cost_usd, self._desk.now_s
        program.context_tokens, program.peak_tokens, program.live_tokens, program.backend_id = 0, 0, 0, None
        program.admitted_at_s, program.forecast = None, None
        program.move(ProgramState.ARRIVED)
        slot = self._desk.pacing.slot_by_program.get(program.program_id, 0)
        model = ModelId(rung.candidate)
        self._binding.decide(program, [model], slot=slot, reason=c.ESCALATION, named=model)


def _label(attempt: AttemptRecord) -> str:
    """Under which the ladder knows the attempt that failed."""
    return attempt.model if attempt.verdict is not None else attempt.model + STUCK


def _is_stuck(program: Program, config: EscalationConfig, now_s: float) -> bool:
    """Whether the attempt has passed one of the limits at which it is given up."""
    counts = (
        (config.turns_max, program.n_turns - program.n_turns_before),
        (config.failed_turns_max, program.n_failed_turns - program.n_failed_before),
        (config.stall_s, now_s - program.attempt_at_s),
    )
    return any(limit is not None and n >= limit for limit, n in counts)
