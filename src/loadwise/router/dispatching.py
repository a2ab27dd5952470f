"""A turn that has a model is dispatched, held, or refused; held turns start when something has become free.

Turns are held per model, first in, first out. The turns of a program that has its reservation need not stand in line:
what they need is promised already.
"""

from loadwise.kernel import commands as c
from loadwise.kernel.ids import ModelId, TurnId
from loadwise.kernel.pool import CapacityUnit
from loadwise.kernel.work import ProgramState, TurnOutcome

from .desk import Desk
from .ending import Ending
from .failure import RETRY_AFTER_S, Failure, held_too_long, nobody_usable, overloaded, rate_limited
from .program import Program, Turn

_S = ProgramState


class Dispatching:
    """The only part that says `Dispatch`."""

    def __init__(self, desk: Desk, ending: Ending) -> None:
        self._desk = desk
        self._ending = ending

    def place(self, turn: Turn, program: Program) -> None:
        """Dispatch the turn, hold it, or refuse it."""
        desk = self._desk
        assert turn.model is not None
        refusal = desk.spending.cover(turn, program, desk.now_s)
        if refusal is not None:
            self._refuse_for_money(turn, program, refusal)
            return
        stays = program.is_reserved and not turn.is_side
        if (stays or desk.admission.head(turn.model) is None) and self.try_dispatch(turn, program):
            return
        if not stays and not self._is_coming(turn.model):
            self._ending.end_turn(turn, TurnOutcome.REJECTED, nobody_usable(f"model {turn.model!r}"))
        elif desk.admission.n_held >= desk.config.held_max:
            text = f"{desk.config.held_max} turns are held, which is the limit"
            self._ending.end_turn(turn, TurnOutcome.REJECTED, overloaded("too_many_held", text))
        else:
            self.hold(turn, program)

    def _refuse_for_money(self, turn: Turn, program: Program, refusal: Failure) -> None:
        """End the turn; its program is not idle before it may come back, and needs no place until then."""
        desk = self._desk
        desk.counts.over_budget += 1
        self._ending.end_turn(turn, TurnOutcome.REJECTED, refusal)
        if program.is_open and not program.open_turns:
            assert refusal.retry_after_s is not None
            program.active_at_s = desk.now_s + refusal.retry_after_s
            desk.admission.release_program(program)

    def _is_coming(self, model_id: ModelId) -> bool:
        """Whether a backend of the model takes turns, or will within the time that a turn may be held."""
        desk = self._desk
        return desk.backends.returns_at_s(model_id, desk.now_s) <= desk.now_s + desk.config.hold_max_s

    def hold(self, turn: Turn, program: Program) -> None:
        """Put the turn behind all others of its model, for `hold_max_s` at most."""
        desk = self._desk
        assert turn.model is not None
        desk.admission.hold(turn)
        self.wait(turn)
        if not turn.is_side and program.state is not _S.HELD and not self._is_running(program):
            program.move(_S.HELD)
        self._watch_windows(turn.model)

    def _is_running(self, program: Program) -> bool:
        """Whether a turn of the program runs on its own model."""
        turns = [self._desk.turns[turn_id] for turn_id in program.open_turns]
        return any(turn.backend_id is not None and not turn.is_side for turn in turns)

    def wait(self, turn: Turn) -> None:
        """The turn waits from now on: for a model, or for a place."""
        if turn.waits_since_s is not None:
            return
        turn.waits_since_s = self._desk.now_s
        self._desk.agenda.schedule(f"hold:{turn.turn_id}", self._desk.now_s + self._desk.config.hold_max_s)
        if not turn.has_waited:
            turn.has_waited = True
            self._desk.counts.held += 1

    def try_dispatch(self, turn: Turn, program: Program) -> bool:
        """Dispatch the turn if it may start now, or change nothing and say False."""
        desk = self._desk
        place = program.backend_id if program.is_reserved else None
        backend_id = desk.admission.admit(turn, program, desk.now_s)
        if backend_id is None:
            return False
        if turn.waits_since_s is not None:
            waited_s = desk.now_s - turn.waits_since_s
            turn.wait_s += waited_s
            program.wait_s += waited_s
            self._ending.stop_waiting(turn)
        if program.state is not _S.RUNNING and not turn.is_side:
            program.move(_S.ADMITTED)
            program.move(_S.RUNNING)
        turn.attempt += 1
        turn.backend_id = backend_id
        if not turn.has_own_reservation:
            program.n_covered += 1
        state = desk.backends.by_id[backend_id]
        state.n_running += 1
        if state.is_on_trial:
            desk.backends.begin_trial(state, turn.turn_id)
        assert turn.model is not None and program.decision_id is not None
        desk.out.append(
            c.Dispatch(
                turn_id=turn.turn_id,
                attempt=turn.attempt,
                program_id=turn.program_id,
                backend_id=backend_id,
                model=turn.model,
                decision_id=program.decision_id,
                wait_s=turn.wait_s,
                priority=turn.priority,
            )
        )
        if program.is_reserved and program.backend_id != place:
            self._settle_in(program)
        return True

    def _settle_in(self, program: Program) -> None:
        """The program has just got a place: it is parked in time, and its held turns need not stand in line."""
        if program.n_turns:
            self._desk.agenda.schedule(f"idle:{program.program_id}", self._desk.now_s + self._desk.config.park_s)
        if len(program.open_turns) > 1:
            self._dispatch_siblings(program)

    def _dispatch_siblings(self, program: Program) -> None:
        for turn_id in list(program.open_turns):
            turn = self._desk.turns[turn_id]
            if turn.is_held and not turn.is_side:
                self.try_dispatch(turn, program)

    def start_held(self) -> None:
        """Dispatch held turns of every model that has room now, each from its head on, as far as they fit (law L9).

        Where a backend takes turns again, those go first whose programs live there: who stands before them waits for
        what they have, and they would wait for each other.
        """
        backends = self._desk.backends
        while backends.roomy:
            model_id, _ = backends.roomy.popitem()
            if model_id in backends.risen:
                del backends.risen[model_id]
                self._start_at_home(model_id)
            self._start_held_of(model_id)

    def _start_at_home(self, model_id: ModelId) -> None:
        """Dispatch the held turns of programs that have their place already."""
        desk = self._desk
        for turn_id in list(desk.admission.order_by_model[model_id]):
            turn = desk.turns[turn_id]
            program = desk.table.by_id[turn.program_id]
            if turn.is_held and desk.admission.may_stay(turn, program, desk.now_s):
                self.try_dispatch(turn, program)

    def _start_held_of(self, model_id: ModelId) -> None:
        desk = self._desk
        while (head := desk.admission.head(model_id)) is not None:
            turn = desk.turns[head]
            if not self.try_dispatch(turn, desk.table.by_id[turn.program_id]):
                self._watch_windows(model_id)
                return

    def _watch_windows(self, model_id: ModelId) -> None:
        """Requests per minute come free by time alone: look again when they do."""
        desk = self._desk
        for backend_id in desk.backends.all_of(model_id):
            frees_at_s = desk.admission.ledger.frees_at_s(backend_id, at_s=desk.now_s)
            if frees_at_s is not None:
                desk.agenda.schedule(f"window:{backend_id}", frees_at_s)

    def hold_due(self, key: str) -> None:
        """The turn has waited as long as it may."""
        turn = self._desk.turns.get(TurnId(int(key)))
        if turn is None or turn.waits_since_s is None:
            return
        hold_max_s, frees_after_s = self._desk.config.hold_max_s, self._window_frees_after_s(turn)
        failure = held_too_long(hold_max_s) if frees_after_s is None else rate_limited(hold_max_s, frees_after_s)
        self._ending.end_turn(turn, TurnOutcome.EVICTED, failure)

    def _window_frees_after_s(self, turn: Turn) -> float | None:
        """In how long a request per minute comes free, where such are all that a held turn waits for."""
        desk = self._desk
        if not turn.is_held or turn.model is None:
            return None
        usable, ledger = desk.backends.usable(turn.model, desk.now_s), desk.admission.ledger
        if not usable or any(ledger.unit(b) is not CapacityUnit.REQUESTS_PER_MINUTE for b in usable):
            return None
        frees_at_s = [ledger.frees_at_s(b, at_s=desk.now_s) for b in usable]
        return min((at_s - desk.now_s for at_s in frees_at_s if at_s is not None), default=RETRY_AFTER_S)
