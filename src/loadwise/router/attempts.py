"""An attempt ends: the turn is complete, is tried elsewhere, or has failed.

Retries and fallbacks happen only before the first byte reached the client. Where a turn may go next, in this order:
another replica of its model; the same replica once more, if it only broke off; another model, if the program never had
an answer (then credit goes to the model that runs).
"""

from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import price_usd
from loadwise.kernel.work import AttemptOutcome, EndReason, ProgramState, TurnOutcome

from .binding import Binding
from .desk import Desk
from .dispatching import Dispatching
from .ending import Ending
from .failure import UNREACHABLE, explain, is_fault, may_retry, patience_s
from .lifecycle import Lifecycle
from .program import CalledOff, Program, Turn, clamped_tokens, estimated_usage, usage_can_be_true
from .spending import Bill


class Attempts:
    """What follows from an attempt's outcome."""

    def __init__(
        self, desk: Desk, ending: Ending, dispatching: Dispatching, binding: Binding, lifecycle: Lifecycle
    ) -> None:
        self._desk = desk
        self._ending = ending
        self._dispatching = dispatching
        self._binding = binding
        self._lifecycle = lifecycle

    def attempt_ended(self, event: e.AttemptEnded) -> None:
        """One attempt on one backend is over."""
        desk = self._desk
        turn = desk.turns.get(event.turn_id)
        if turn is None or turn.backend_id is None or turn.attempt != event.attempt:
            if not self._charge_called_off(event):
                desk.counts.stale += 1
            return
        program = desk.table.by_id[turn.program_id]
        if event.outcome is AttemptOutcome.COMPLETED:
            self._complete(turn, program, event)
        else:
            self._fail(turn, program, turn.backend_id, event)

    def turn_abandoned(self, event: e.TurnAbandoned) -> None:
        """The client left."""
        turn = self._desk.turns.get(event.turn_id)
        if turn is None:
            self._desk.counts.stale += 1
        else:
            self._ending.cancel_turn(turn, None)

    def _complete(self, turn: Turn, program: Program, event: e.AttemptEnded) -> None:
        desk = self._desk
        backend_id = turn.backend_id
        assert backend_id is not None
        desk.backends.note_success(backend_id)
        self._ending.lift(turn, program)
        bill = self._bill(turn, backend_id, event)
        context_tokens = self._charge(program, bill)
        if program.n_turns == 0 and bill.is_counted:
            desk.admission.learn_first(program, backend_id, bill.cached_tokens)
        elif bill.is_counted and not turn.is_side:
            desk.counts.pauses += desk.residing.learn(
                program, backend_id, bill.prompt_tokens, bill.cached_tokens, context_tokens
            )
        desk.admission.learn_pace(turn, program, backend_id, desk.now_s)
        program.n_turns += 1
        if turn.is_side:
            program.n_side_turns += 1
        else:
            program.context_tokens = context_tokens
            program.peak_tokens = max(program.peak_tokens, context_tokens)
            program.answered_at_s = desk.now_s
            program.is_resident = program.is_reserved and program.backend_id == backend_id
        self._ending.close_turn(turn, program)
        desk.counts.completed += 1
        if turn.is_final:
            self._lifecycle.end(program, EndReason.FINAL)

    def _fail(self, turn: Turn, program: Program, backend_id: BackendId, event: e.AttemptEnded) -> None:
        self._ending.lift(turn, program)
        self._blame(program, backend_id, event)
        bill = self._bill(turn, backend_id, event)
        if event.outcome is AttemptOutcome.CANCELLED:
            self._charge(program, bill)
            self._ending.end_turn(turn, TurnOutcome.CANCELLED, None)
        elif not self._retry(turn, program, backend_id, event):
            self._charge(program, bill)
            self._ending.end_turn(turn, TurnOutcome.FAILED, explain(event, backend_id))

    def _charge_called_off(self, event: e.AttemptEnded) -> bool:
        """An attempt that was taken back has ended: its program is charged, if it is still remembered."""
        called_off = self._desk.called_off.get(event.turn_id)
        if called_off is None or called_off.attempt != event.attempt:
            return False
        del self._desk.called_off[event.turn_id]
        bill = self._bill(called_off, called_off.backend_id, event)
        program = self._desk.table.by_id.get(called_off.program_id)
        if program is None or program.arrived_at_s != called_off.arrived_at_s:
            return False
        self._charge(program, bill)
        return True

    def _bill(self, turn: Turn | CalledOff, backend_id: BackendId | None, event: e.AttemptEnded) -> Bill:
        """What the attempt has used, as far as that can be true; the money it was promised is settled."""
        assert turn.model is not None
        desk, usage = self._desk, event.usage
        is_counted = usage.is_exact
        prompt_tokens = usage.prompt_tokens if is_counted else turn.prompt_tokens
        if is_counted:
            limit_tokens = desk.backends.tokens_max(turn.model, backend_id)
            if not usage_can_be_true(usage, limit_tokens):
                is_counted = False
                usage = estimated_usage(turn, usage, limit_tokens)
                prompt_tokens = usage.prompt_tokens
        prompt_tokens = clamped_tokens(prompt_tokens)
        completion_tokens = clamped_tokens(usage.completion_tokens)
        cached_tokens = min(clamped_tokens(usage.cached_tokens), prompt_tokens)
        usd = price_usd(desk.backends.price(turn.model), prompt_tokens, completion_tokens, cached_tokens)
        is_misread = event.usage.is_exact and not is_counted
        bill = Bill(prompt_tokens, completion_tokens, cached_tokens, usd, is_counted, is_misread)
        if desk.spending.purse is not None:
            desk.spending.settle_attempt(turn, event, bill)
        return bill

    def _charge(self, program: Program, bill: Bill) -> int:
        """Add what was used to the program. Returns the length of the context, in tokens."""
        self._desk.counts.malformed += bill.is_misread
        program.prompt_tokens += bill.prompt_tokens
        program.completion_tokens += bill.completion_tokens
        program.cached_tokens += bill.cached_tokens
        program.cost_usd += bill.usd
        return bill.prompt_tokens + bill.completion_tokens

    def _blame(self, program: Program, backend_id: BackendId, event: e.AttemptEnded) -> None:
        """Take a backend down that fails its calls; leave one alone that asked for it."""
        desk = self._desk
        if is_fault(event):
            is_unreachable = event.outcome in UNREACHABLE
            if is_unreachable:
                desk.residing.forget(backend_id)
            again_at_s = desk.backends.note_failure(
                backend_id, desk.now_s, is_unreachable=is_unreachable, program_id=program.program_id
            )
            if again_at_s is not None:
                desk.agenda.schedule(f"retry:{backend_id}", again_at_s)
        elif event.outcome is AttemptOutcome.STATUS:
            if event.status < 500:
                desk.backends.note_success(backend_id)
            asked_s = patience_s(event)
            if asked_s is not None:
                quiet_until_s = desk.backends.keep_quiet(backend_id, desk.now_s + asked_s)
                desk.agenda.schedule(f"quiet:{backend_id}", quiet_until_s)

    def _retry(self, turn: Turn, program: Program, backend_id: BackendId, event: e.AttemptEnded) -> bool:
        """Try again, invisibly to the client. False where there is no way left."""
        if not may_retry(event):
            return False
        n_attempts = turn.attempt - turn.n_attempts_before
        if n_attempts < self._desk.config.attempts_max and self._retry_model(turn, program, backend_id, event):
            return True
        return self._fall_back(turn, program)

    def _retry_model(self, turn: Turn, program: Program, backend_id: BackendId, event: e.AttemptEnded) -> bool:
        """Try the same model again: now, or when a replica has room."""
        desk = self._desk
        n_tried_here = turn.tried.count(backend_id)
        turn.tried.append(backend_id)
        if desk.spending.cover(turn, program, desk.now_s) is not None:
            return False  # a cheaper model may still do
        if self._dispatching.try_dispatch(turn, program):
            return True
        if desk.admission.untried(turn, desk.now_s) and desk.admission.n_held < desk.config.held_max:
            if program.n_covered == 0 and not turn.is_side:
                desk.admission.release_program(program)  # others may have its place while it waits for another
            self._dispatching.hold(turn, program)
            return True
        if event.outcome is AttemptOutcome.BROKEN and n_tried_here == 0:
            turn.tried.remove(backend_id)
            is_dispatched = self._dispatching.try_dispatch(turn, program)
            turn.tried.append(backend_id)
            return is_dispatched
        return False

    def _fall_back(self, turn: Turn, program: Program) -> bool:
        """Bind a program that has had no answer yet to another model."""
        desk = self._desk
        if program.is_pinned or turn.is_side or program.n_turns or len(program.open_turns) > 1:
            return False
        assert program.model is not None
        failed = (attempt.model for attempt in program.attempts)
        tried_models = frozenset({*program.tried_models, program.model, *failed})
        usable = desk.routing.models(desk.now_s, tried_models)
        models = desk.spending.affordable(usable, program, turn, desk.now_s)
        if not models or len(program.tried_models) >= desk.config.fallbacks_max:
            return False
        left_out = tuple(model for model in usable if model not in models)
        program.tried_models.append(program.model)
        slot = desk.credit.slot(program.decision_id)
        self._ending.undo(program)
        desk.admission.release_program(program)
        turn.tried.clear()
        turn.n_attempts_before = turn.attempt
        program.backend_id = None
        program.admitted_at_s = None  # its run time on the next model begins there
        program.move(ProgramState.ARRIVED)
        self._binding.decide(program, models, slot=slot, reason="fallback", unaffordable=left_out)
        return True
