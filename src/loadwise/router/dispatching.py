"""A turn that has a model is dispatched, held, or refused; held turns start when something has become free.

Turns are held per model, first in, first out. The turns of a program that has its reservation need not stand in line:
what they need is promised already.
"""

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel.ids import ModelId, TurnId
from loadwise.kernel.pool import CapacityUnit
from loadwise.kernel.work import ProgramState, TurnOutcome

from .desk import Desk
from .divert import may_move
from .ending import Ending
from .failure import RETRY_AFTER_S, Failure, held_too_long, nobody_usable, overloaded, rate_limited
from .program import Program, Turn

_S = ProgramState


class Dispatching:
    """The only part that says `Dispatch`."""

    def __init__(self, desk: Desk, ending: Ending) -> None:
        self._desk = desk
        self._ending = ending
        self._head_by_model: dict[ModelId, TurnId | None] = {}

    def place(self, turn: Turn, program: Program) -> None:
        """Dispatch the turn, hold it, or refuse it."""
        desk = self._desk
        assert turn.model is not None
        refusal = None if desk.spending.purse is None else desk.spending.cover(turn, program, desk.now_s)
        if refusal is not None:
            self._refuse_for_money(turn, program, refusal)
            return
        stays = program.is_reserved and not turn.is_side
        if (stays or not desk.admission.order_by_model[turn.model]) and self.try_dispatch(turn, program):
            return
        is_coming = self._is_coming(turn.model)
        if not is_coming and not desk.admission.may_stay(turn, program, desk.now_s) and self.rebind(turn, program):
            return
        if not stays and not is_coming:
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
        desk.admission.hold(turn, program, desk.now_s)
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

    def try_dispatch(self, turn: Turn, program: Program, *, is_overdue: bool = False) -> bool:
        """Dispatch the turn if it may start now, or change nothing and say False; see `Admission.admit`."""
        desk = self._desk
        place = program.backend_id if program.is_reserved else None
        backend_id = desk.admission.admit(turn, program, desk.now_s, is_overdue=is_overdue)
        if backend_id is None:
            return False
        if turn.waits_since_s is not None:
            self._ending.stop_waiting(turn, program, is_served=True)
        if program.state is not _S.RUNNING and not turn.is_side:
            program.move(_S.ADMITTED)
            program.move(_S.RUNNING)
        turn.attempt += 1
        turn.backend_id = backend_id
        if not turn.has_own_reservation:
            program.n_covered += 1
        state = desk.backends.begin_call(backend_id, turn.needed_tokens, desk.now_s)
        if state.is_on_trial:
            desk.backends.begin_trial(state, turn.turn_id)
            desk.backends.stir(backend_id)  # who had only this one left untried may now go where it has failed
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
        if program.admitted_at_s is None and not turn.is_side:
            self._note_admitted(program)
        if program.is_reserved and program.backend_id != place:
            self._settle_in(program)
        return True

    def _note_admitted(self, program: Program) -> None:
        """The program starts: its run time is counted from here, and its budget where that does not begin sooner."""
        desk = self._desk
        program.admitted_at_s = desk.now_s
        if program.forecast is not None:
            desk.divert.waiting.errors.learn(program.forecast, realised_s=desk.now_s - program.forecast_from_s)
            program.forecast = None
        program.estimates, program.n_routed = {}, 0
        if program.budget_s is not None:
            program.budget_ends_at_s = desk.now_s + program.budget_s
            desk.agenda.schedule(f"budget:{program.program_id}", desk.now_s + program.budget_s)
            program.budget_s = None

    def _settle_in(self, program: Program) -> None:
        """The program has just got a place: it is parked in time, and its held turns need not stand in line."""
        if program.n_turns:
            config = self._desk.config
            self._desk.agenda.schedule(
                f"idle:{program.program_id}", self._desk.now_s + min(config.park_s, config.idle_s)
            )
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
        while (head := desk.admission.head(model_id, desk.now_s)) is not None:
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

    # --- another model ---

    def move_held(self) -> bool:
        """Let a held program start on another model that has room for it, where it gains by that."""
        desk = self._desk
        if desk.config.divert.when != "held" or not desk.admission.is_stirred or not desk.admission.n_held:
            return False
        models = desk.routing.models(desk.now_s)
        move = desk.divert.best_move(models, desk.turns, desk.table.by_id, desk.now_s) if len(models) > 1 else None
        if move is None:
            desk.admission.is_stirred = False
            return False
        desk.counts.diverts += 1
        self._bind_anew(move.turn, move.program, models, move.model, "divert")
        return True

    def rebind(self, turn: Turn, program: Program) -> bool:
        """Move a started program whose model nobody serves any more; what it has said is read anew elsewhere."""
        desk = self._desk
        if not desk.config.divert.rebinds or program.is_pinned or turn.is_side or len(program.open_turns) > 1:
            return False
        tried = {program.model, *(attempt.model for attempt in program.attempts)}
        models = [m for m in desk.routing.models(desk.now_s) if m not in tried]
        if not models or program.model is None:
            return False
        waits_s = [desk.divert.waiting.forecast(m, turn, program, desk.now_s).wait_s for m in models]
        estimates = [desk.routing.successes.estimate(program.task_type, m) for m in models]
        best = desk.divert.best(models, estimates, waits_s)
        desk.counts.rebinds += 1
        program.n_side_turns += program.n_turns  # two models have worked on it: it is credited to neither (L11)
        self._bind_anew(turn, program, models, models[best], "rebind")
        return True

    def _bind_anew(self, turn: Turn, program: Program, models: list[ModelId], model_id: ModelId, reason: str) -> None:
        """Take the program's decision back, decide for another model, and place its turn there."""
        desk = self._desk
        if turn.is_held:
            desk.admission.unhold(turn, desk.now_s)
        slot = desk.credit.slot(program.decision_id)
        self._ending.undo(program)
        desk.admission.release_program(program)
        program.backend_id = None
        routed = program.routed_model or program.model
        if reason == "divert":
            desk.divert.note_diverted(program, model_id)
        decision = desk.routing.decide(
            program,
            models,
            decision_id=desk.routing.next_decision_id(),
            slot=slot,
            at_s=desk.now_s,
            reason=reason,
            named=model_id,
        )
        program.routed_model = routed
        desk.out.append(msgspec.structs.replace(decision, routed=routed))
        if program.state is _S.HELD:
            program.move(_S.ROUTED)
        turn.model = model_id
        turn.tried.clear()
        turn.n_attempts_before = turn.attempt
        self.place(turn, program)

    def hold_due(self, key: str) -> None:
        """The turn has waited as long as it may: elsewhere, if it can start there at once; else it is over.

        A program that was paused goes on whatever the room: what was let in is not refused for want of it.
        """
        turn = self._desk.turns.get(TurnId(int(key)))
        if turn is None or turn.waits_since_s is None:
            return
        if self._start_elsewhere(turn) and (turn.waits_since_s is None or turn.turn_id not in self._desk.turns):
            return
        if self._resume(turn):
            return
        hold_max_s, frees_after_s = self._desk.config.hold_max_s, self._window_frees_after_s(turn)
        failure = held_too_long(hold_max_s) if frees_after_s is None else rate_limited(hold_max_s, frees_after_s)
        self._ending.end_turn(turn, TurnOutcome.EVICTED, failure)

    def _resume(self, turn: Turn) -> bool:
        """Give a paused program its place back and dispatch its turn, if its backend takes turns."""
        desk, program = self._desk, self._desk.table.by_id[turn.program_id]
        backend_id = program.backend_id
        if not program.is_paused or turn.is_side or not turn.is_held or program.is_reserved or backend_id is None:
            return False
        if backend_id in turn.tried or not desk.backends.is_usable(backend_id, desk.now_s):
            return False
        if not desk.admission.reserve_again(program, backend_id, desk.now_s):
            return False
        self.try_dispatch(turn, program, is_overdue=True)
        self._settle_in(program)
        return True

    def _start_elsewhere(self, turn: Turn) -> bool:
        """Divert a program that has waited too long, whatever success that costs."""
        desk, program = self._desk, self._desk.table.by_id[turn.program_id]
        if not desk.config.divert.is_on or not turn.is_held or not may_move(turn, program):
            return False
        models = desk.routing.models(desk.now_s)
        for model_id in models:
            if (
                model_id != program.model
                and not desk.admission.order_by_model[model_id]
                and desk.admission.room_at(model_id, turn, program, desk.now_s) is not None
            ):
                desk.divert.note_lost(program)  # it would be refused here
                desk.counts.diverts += 1
                self._bind_anew(turn, program, models, model_id, "divert")
                return True
        return False

    def note_heads(self) -> None:
        """Who is next may change with time alone (age, deadlines): then look whether the new head fits."""
        desk = self._desk
        for model_id, order in desk.admission.order_by_model.items():
            if len(order):
                head = desk.admission.head(model_id, desk.now_s)
                if head != self._head_by_model.get(model_id):
                    self._head_by_model[model_id] = head
                    desk.backends.roomy[model_id] = None

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
