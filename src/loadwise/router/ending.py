"""How a turn leaves: refused, ended, cancelled; and how a program without a single answer is forgotten.

Whatever leaves gives back what it held. Who may start because of that is decided later, once, when the event at hand
has been dealt with (`machine.Router.handle`).
"""

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.work import ProgramState, TurnOutcome

from .desk import CALLED_OFF_MAX, Desk
from .failure import Failure
from .program import CalledOff, Program, Turn

_FORGOTTEN_AS = {
    TurnOutcome.REJECTED: ProgramState.REJECTED,
    TurnOutcome.EVICTED: ProgramState.REJECTED,
    TurnOutcome.FAILED: ProgramState.FAILED,
    TurnOutcome.CANCELLED: ProgramState.CANCELLED,
}


class Ending:
    """Ends turns; every exit path goes through `close_turn`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def refuse(self, event: e.TurnArrived, failure: Failure) -> None:
        """Turn away a turn that never entered the table."""
        self._desk.counts.rejected += 1
        self._desk.out.append(failure.end_turn(event.turn_id, TurnOutcome.REJECTED))

    def end_turn(
        self, turn: Turn, outcome: TurnOutcome, failure: Failure | None, *, keeps_program: bool = False
    ) -> None:
        """Close an open turn without an answer, tell the client why, and settle its program.

        Args:
            failure: None where nobody is left to be told.
            keeps_program: remember the program even if it never got an answer.
        """
        desk = self._desk
        program = desk.table.by_id[turn.program_id]
        self.close_turn(turn, program)
        program.n_failed_turns += 1
        setattr(desk.counts, outcome.value, getattr(desk.counts, outcome.value) + 1)
        if failure is not None:
            desk.out.append(failure.end_turn(turn.turn_id, outcome))
        if not program.open_turns and program.n_turns == 0 and not keeps_program:
            self._forget(program, outcome)

    def cancel_turn(
        self,
        turn: Turn,
        failure: Failure | None,
        *,
        outcome: TurnOutcome = TurnOutcome.CANCELLED,
        keeps_program: bool = False,
    ) -> None:
        """End an open turn from our side or the client's, wherever it stands."""
        if turn.backend_id is not None:
            self._desk.out.append(c.CancelAttempt(turn_id=turn.turn_id, attempt=turn.attempt))
            self._remember(turn)
            self.lift(turn, self._desk.table.by_id[turn.program_id])
        self.end_turn(turn, outcome, failure, keeps_program=keeps_program)

    def _remember(self, turn: Turn) -> None:
        """The engine has worked for it: what that has cost is the program's, when it becomes known."""
        called_off, program = self._desk.called_off, self._desk.table.by_id[turn.program_id]
        assert turn.model is not None
        before = called_off.pop(turn.turn_id, None)
        if before is not None:
            self._desk.spending.settle(before, None, self._desk.now_s)
        promise, turn.promise = turn.promise, ""
        called_off[turn.turn_id] = CalledOff(
            attempt=turn.attempt,
            program_id=turn.program_id,
            arrived_at_s=program.arrived_at_s,
            model=turn.model,
            prompt_tokens=turn.prompt_tokens,
            needed_tokens=turn.needed_tokens,
            backend_id=turn.backend_id,
            promise=promise,
        )
        while len(called_off) > CALLED_OFF_MAX:
            self._desk.spending.settle(called_off.pop(next(iter(called_off))), None, self._desk.now_s)

    def cancel_turns_of(self, program: Program, failure: Failure | None, *, keeps_program: bool = False) -> None:
        """Cancel all open turns of a program."""
        for turn_id in list(program.open_turns):
            self.cancel_turn(self._desk.turns[turn_id], failure, keeps_program=keeps_program)

    def fail_program(self, program: Program, failure: Failure) -> None:
        """Refuse all that a program asked for before it got a model."""
        for turn_id in list(program.open_turns):
            self.end_turn(self._desk.turns[turn_id], TurnOutcome.REJECTED, failure)

    def lift(self, turn: Turn, program: Program) -> None:
        """Take the turn off its backend."""
        backend_id = turn.backend_id
        assert backend_id is not None
        if turn.has_own_reservation:
            self._desk.admission.release_turn(turn)
        else:
            program.n_covered -= 1
        turn.backend_id = None
        if self._desk.config.admission.call_ratio is not None and self._desk.admission.n_held:
            self._desk.admission.rise(backend_id)
        state = self._desk.backends.end_call(backend_id, turn.needed_tokens, self._desk.now_s)
        if state.trial_turn_id == turn.turn_id:
            self._desk.backends.end_trial(backend_id, state)

    def close_turn(self, turn: Turn, program: Program) -> None:
        """Drop the turn from every table; its program rests when it was the last one open."""
        desk = self._desk
        if turn.waits_since_s is not None:
            self.stop_waiting(turn, program)
        if turn.promise:
            desk.spending.settle(turn, 0.0, desk.now_s)
        del desk.turns[turn.turn_id]
        program.open_turns.remove(turn.turn_id)
        program.active_at_s = desk.now_s
        if program.is_reserved:
            desk.admission.follow(program, self._needed_tokens(program) if program.n_covered else 0)
        if not program.open_turns:
            desk.table.rest(program.program_id)
            if program.is_implicit:
                desk.admission.release_program(program)

    def _needed_tokens(self, program: Program) -> int:
        """What the largest of the turns needs that run under the program's reservation."""
        turns = (self._desk.turns[turn_id] for turn_id in program.open_turns)
        return max(t.needed_tokens for t in turns if t.backend_id is not None and not t.has_own_reservation)

    def stop_waiting(self, turn: Turn, program: Program, *, is_served: bool = False) -> None:
        """Count the wait, take the turn out of its order, if it stands in one, and forget when it would be evicted."""
        assert turn.waits_since_s is not None
        waited_s = self._desk.now_s - turn.waits_since_s
        turn.wait_s += waited_s
        program.wait_s += waited_s
        turn.waits_since_s = None
        self._desk.agenda.cancel(f"hold:{turn.turn_id}")
        if turn.is_held:
            self._desk.admission.unhold(turn, self._desk.now_s, is_served=is_served)

    def _forget(self, program: Program, outcome: TurnOutcome) -> None:
        """A program without a single answer leaves no trace; its decision is undone."""
        program.move(_FORGOTTEN_AS[outcome])
        self._desk.divert.note_lost(program)
        self.undo(program)
        self._desk.admission.release_program(program)
        self.leave(program)
        self._desk.counts.forgotten += 1
        self._desk.table.forget(program.program_id)

    def undo(self, program: Program) -> None:
        """The program's decision will never be judged; what is still to be estimated of it is, for it was made."""
        self.record_propensities(program)
        self._desk.credit.undo(program.decision_id)

    def record_propensities(self, program: Program) -> None:
        """Write down the propensities of the program's decision that were too costly on its path."""
        propensities = self._desk.credit.late_propensities(program.decision_id)
        if propensities is not None and program.decision_id is not None:
            self._desk.out.append(c.RecordPropensities(decision_id=program.decision_id, propensities=propensities))

    def leave(self, program: Program) -> None:
        """Nothing more will be learned of the program: nothing of it stays due, and its slot is free."""
        desk = self._desk
        for kind in ("idle", "budget", "verdict"):
            desk.agenda.cancel(f"{kind}:{program.program_id}")
        if program.asked_decision_id is not None:
            desk.agenda.cancel(f"selector:{program.asked_decision_id}")
            desk.asked.pop(program.asked_decision_id, None)
            program.asked_decision_id = None
        desk.pacing.leave(program.program_id)
