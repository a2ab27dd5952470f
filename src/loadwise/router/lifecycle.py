"""A program ends, is judged, teaches, closes, and leaves memory.

The reservation is given back when the program ends, before its verifier runs. A verdict finds its decision through the
program id, whenever it comes; at most one is credited (law L11). Silence is not failure: what nobody judges is undone.
"""

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import ProgramId
from loadwise.kernel.work import HUMAN, EndReason, ProgramState, Verdict
from loadwise.verify.debias import ErrorRates

from .desk import Desk
from .ending import Ending
from .escalation import Escalation
from .failure import budget_exceeded, program_finished
from .program import Program

EXTERNAL = "external"
"""The verifier of a task type whose verdicts somebody else reports."""
REPORTED = frozenset({None, EXTERNAL, HUMAN})
"""Verifiers that nobody here runs."""

_S = ProgramState
_CORRECTABLE = frozenset({_S.CLOSED, _S.CENSORED, _S.TIMED_OUT})
"""Where a program rests that was judged, or could have been."""


class Lifecycle:
    """What happens to a program after its last turn."""

    def __init__(self, desk: Desk, ending: Ending, escalation: Escalation) -> None:
        self._desk = desk
        self._ending = ending
        self._escalation = escalation

    def program_ended(self, event: e.ProgramEnded) -> None:
        """The agent, or an operator, says that it is over."""
        program = self._desk.table.by_id.get(event.program_id)
        if program is None or not program.is_open:
            self._desk.counts.stale += 1
        elif event.reason in (EndReason.CANCELLED, EndReason.INTERNAL) or (program.n_turns == 0 and program.open_turns):
            self._cancel(program, event.reason)
        else:
            self.end(program, event.reason)

    def end(self, program: Program, reason: EndReason) -> None:
        """End an open program and ask for its verdict; one that never got an answer is forgotten instead."""
        is_unanswered = program.is_unanswered
        if not self._stop(program, reason):
            return
        self._await_verdict(program)
        if is_unanswered:
            self._withdraw(program)
            return
        if program.verifier not in REPORTED:
            assert program.verifier is not None
            self._desk.out.append(
                c.Verify(program_id=program.program_id, verifier=program.verifier, task_type=program.task_type)
            )
        self._bound_verifying()

    def _withdraw(self, program: Program) -> None:
        """The attempt that was offered has not begun: the verdict before it stands."""
        self._escalation.withdraw(program)
        self._close(program, _S.CLOSED)

    def _stop(self, program: Program, reason: EndReason) -> bool:
        """End what is still open of an ending program and release it. False when that left nothing to end."""
        desk = self._desk
        self._ending.cancel_turns_of(program, program_finished(program.program_id, reason))
        if program.program_id not in desk.table.by_id:
            return False
        self._settle(program, reason)
        return True

    def _settle(self, program: Program, reason: EndReason) -> None:
        """The program runs no more: slot and reservation are free from here on."""
        desk = self._desk
        program.ended_at_s, program.end_reason = desk.now_s, reason
        desk.admission.release_program(program)
        self._ending.record_propensities(program)

    def _await_verdict(self, program: Program) -> None:
        desk = self._desk
        if program.model is not None and program.peak_tokens:
            desk.admission.learn_demand(program, desk.now_s)
        desk.agenda.cancel(f"idle:{program.program_id}")
        desk.agenda.cancel(f"budget:{program.program_id}")
        program.move(_S.ENDED)
        program.move(_S.VERIFYING)
        desk.table.end(program.program_id)
        desk.agenda.schedule(f"verdict:{program.program_id}", desk.now_s + desk.config.verdict_max_s)

    def _bound_verifying(self) -> None:
        table = self._desk.table
        if len(table.verifying) > self._desk.config.verifying_max:
            self._censor(table.by_id[next(iter(table.verifying))])

    def _cancel(self, program: Program, reason: EndReason) -> None:
        """Somebody's explicit word, before any answer or in spite of it: nothing is judged, nothing is learned.

        The program is remembered, answered or not, so that it stays ended: a turn that comes late opens no new one.
        """
        failure = program_finished(program.program_id, reason)
        self._ending.cancel_turns_of(program, failure, keeps_program=True)
        self._settle(program, reason)
        self._desk.credit.undo(program.decision_id)
        self._close(program, _S.CANCELLED)

    def verdict_arrived(self, event: e.VerdictArrived) -> None:
        """A program is judged; one that is still open has thereby ended."""
        desk = self._desk
        program = desk.table.by_id.get(event.program_id)
        if program is None or (program.verdict is not None and not event.verdict.replaces(program.verdict)):
            desk.counts.verdicts_stale += 1
            return
        if program.attempts and not self._is_of_this_attempt(program, event.verdict):
            desk.counts.verdicts_stale += 1
            return
        if not program.is_open and program.state is not _S.VERIFYING and self._is_correction(program, event.verdict):
            self._correct(program, event.verdict)
            return
        if program.is_open:
            if not self._stop(program, EndReason.VERDICT):
                desk.counts.verdicts_stale += 1
                return
            self._await_verdict(program)
        program.verdict = event.verdict
        if program.state is not _S.VERIFYING:
            desk.counts.verdicts_late += 1
            return
        success = event.verdict.success
        if success is None:
            desk.credit.give_up(program.decision_id)
            desk.counts.verdicts_abstained += 1
        else:
            rates = self._error_rates(program, event.verdict)
            self._escalation.learn(program, success)
            self._credit(program, success, rates)
            known = None if rates is None else (rates.false_pass_ratio, rates.false_fail_ratio)
            if self._escalation.reopen(program, event.verdict, known):
                return
        self._close(program, _S.CLOSED)

    def _is_of_this_attempt(self, program: Program, verdict: Verdict) -> bool:
        """Whether a verdict speaks of the attempt at hand, not of an earlier one once more.

        While an offered attempt has not begun, only a word that takes the place of the verdict before it is news: the
        offer is then withdrawn.
        """
        if verdict.verdict_id and any(_same_report(verdict, attempt.verdict) for attempt in program.attempts):
            return False
        if not program.is_unanswered:
            return True
        last = program.attempts[-1].verdict
        if last is None or not verdict.replaces(last):
            return False
        self.end(program, EndReason.VERDICT)
        return True

    def _error_rates(self, program: Program, verdict: Verdict) -> ErrorRates | None:
        """How often this verdict's verifier is known to be wrong; a person is taken at his word."""
        if verdict.verifier == HUMAN:
            return None
        return self._desk.error_rates_by_task_type.get(program.task_type or "")

    def _is_correction(self, program: Program, verdict: Verdict) -> bool:
        """Whether it takes the place of what was said or given up before."""
        return program.state in _CORRECTABLE and (program.verdict is not None or verdict.is_correction)

    def _correct(self, program: Program, verdict: Verdict) -> None:
        """Another verdict takes the place of the one that stands; what that one taught is taken back first (L11)."""
        desk = self._desk
        self._escalation.audit(program.verdict, verdict)
        program.verdict = verdict
        desk.counts.verdicts_corrected += 1
        if program.state is _S.CENSORED:
            program.move(_S.CLOSED)
        if program.n_side_turns or program.decision_id is None or program.model is None:
            return
        rates = self._error_rates(program, verdict)
        corrected = desk.credit.correct(program.decision_id, verdict.success, program.attempt_cost_usd, rates)
        if corrected is None or corrected == (None, None):
            return
        self._escalation.correct(program, verdict.success)
        program.reward, program.is_credited = corrected.after, corrected.after is not None
        desk.out.append(
            c.RecordCredit(
                decision_id=program.decision_id,
                program_id=program.program_id,
                model=program.model,
                success=verdict.success or 0.0,
                cost_usd=program.attempt_cost_usd,
                reward=corrected.after or 0.0,
                replaced_reward=corrected.before,
                is_withdrawn=corrected.after is None,
            )
        )

    def _credit(self, program: Program, success: float, rates: ErrorRates | None = None) -> None:
        """Learn from a success or failure, unless another model has worked on it: then it is not one model's (L11)."""
        if program.n_side_turns:
            self._desk.credit.undo(program.decision_id)
            return
        assert program.decision_id is not None and program.model is not None
        reward = self._desk.credit.land(program.decision_id, success, program.attempt_cost_usd, rates)
        if reward is None:
            raise LawBroken("L11", f"program {program.program_id!r} has no pending decision to credit")
        program.reward, program.is_credited = reward, True
        self._desk.routing.successes.learn(program.task_type, program.model, success)
        self._desk.out.append(
            c.RecordCredit(
                decision_id=program.decision_id,
                program_id=program.program_id,
                model=program.model,
                success=success,
                cost_usd=program.attempt_cost_usd,
                reward=reward,
            )
        )

    def _censor(self, program: Program) -> None:
        """No verdict will come: the decision is undone."""
        self._desk.credit.give_up(program.decision_id)
        self._desk.counts.censored += 1
        self._close(program, _S.CENSORED)

    def _close(self, program: Program, state: ProgramState) -> None:
        desk = self._desk
        program.move(state)
        program.components = ()
        self._ending.leave(program)
        desk.table.close(program.program_id, desk.now_s)
        while len(desk.table.closed) > desk.config.closed_max:
            self._archive(next(iter(desk.table.closed)))
        if len(desk.table.closed) == 1:
            desk.agenda.schedule("closed:", desk.now_s + desk.config.closed_s)

    def _archive(self, program_id: ProgramId) -> None:
        program = self._desk.table.by_id[program_id]
        for decision_id in (program.decision_id, *(attempt.decision_id for attempt in program.attempts)):
            self._desk.credit.forget(decision_id)
        self._desk.out.append(c.Archive(program=program.record()))
        self._desk.table.forget(program_id)

    # --- what is due ---

    def idle_due(self, key: str) -> None:
        """Nothing was heard of the program for a while: park it, or end it."""
        desk = self._desk
        program = desk.table.by_id.get(ProgramId(key))
        if program is None or not program.is_open:
            return
        if program.open_turns:
            desk.agenda.schedule(f"idle:{key}", desk.now_s + min(desk.config.park_s, desk.config.idle_s))
            return
        ends_at_s = program.active_at_s + desk.config.idle_s
        parks_at_s = program.active_at_s + desk.config.park_s
        if desk.now_s >= ends_at_s:
            self.end(program, EndReason.IDLE)
        elif desk.now_s >= parks_at_s:
            desk.admission.release_program(program)
            desk.agenda.schedule(f"idle:{key}", ends_at_s)
        else:
            desk.agenda.schedule(f"idle:{key}", min(parks_at_s, ends_at_s))

    def budget_due(self, key: str) -> None:
        """The program has used up its time: it is out, answered or not, and remembered."""
        desk = self._desk
        program = desk.table.by_id.get(ProgramId(key))
        if program is None or not program.is_open:
            return
        if program.is_unanswered:
            self.end(program, EndReason.BUDGET)
            return
        self._ending.cancel_turns_of(program, budget_exceeded(program.program_id), keeps_program=True)
        self._settle(program, EndReason.BUDGET)
        if program.model is not None and program.admitted_at_s is not None:
            desk.admission.learn_overdue(program, desk.now_s)
        if desk.config.budget_credit == "fail" and program.decision_id is not None:
            self._credit(program, 0.0)
        else:
            desk.credit.give_up(program.decision_id)
        self._close(program, _S.TIMED_OUT)

    def verdict_due(self, key: str) -> None:
        """The verdict is lost."""
        program = self._desk.table.by_id.get(ProgramId(key))
        if program is not None and program.state is _S.VERIFYING:
            self._censor(program)

    def closed_due(self, key: str) -> None:
        """Closed programs have been remembered long enough."""
        desk = self._desk
        closed = desk.table.closed
        while closed:
            program_id, closed_at_s = next(iter(closed.items()))
            due_at_s = closed_at_s + desk.config.closed_s
            if due_at_s > desk.now_s:
                desk.agenda.schedule("closed:", due_at_s)
                return
            self._archive(program_id)


def _same_report(verdict: Verdict, other: Verdict | None) -> bool:
    return other is not None and verdict.verdict_id == other.verdict_id
