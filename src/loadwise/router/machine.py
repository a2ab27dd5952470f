"""The router: turns in, dispatches out.

Theory of operation. A program is *routed* once, at its first turn: the policy chooses a model, the decision is recorded
and becomes pending. It is *admitted* when a backend of that model can reserve what it will need; until then its turns
are *held*, first in, first out per model, never longer than `hold_max_s`. While the program lives its reservation
follows its context. When it *ends* (told, final turn, idle) slot and reservation are released first, and only then is
it verified. A *verdict* finds its decision through the program id, whenever it comes: the learner learns, the program
closes.

A program that never got an answer (rejected, failed) is forgotten and its decision undone, so the client's retry under
the same id is a new program. Retries and fallbacks happen only before the first byte reached the client; a program that
has had an answer keeps its model.

Everything that waits is on the agenda, and the host has one timer: the earliest thing due.

References: ORACLE, sections 4.1 to 4.3, appendices B.2 and E.9.
"""

from collections.abc import Callable, Mapping
from typing import Any

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec, price_usd
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import AttemptOutcome, EndReason, ProgramState, TurnOutcome

from .admission import Admission
from .agenda import Agenda
from .backends import Backends
from .config import RouterConfig
from .credit import Credit
from .failure import UNREACHABLE, UNRESPONSIVE, Failure, explain, may_retry, patience_s
from .gate import Gate
from .program import FORGOTTEN_STATES, Program, Turn
from .routing import Routing
from .state import Counts, dump_router, load_router
from .table import ProgramTable

TIMER = "router"
EXTERNAL = "external"
"""The verifier of a task type whose verdicts somebody else reports."""
RETRY_AFTER_S = 1.0

_S = ProgramState
_FORGOTTEN_AS = {
    TurnOutcome.REJECTED: _S.REJECTED,
    TurnOutcome.EVICTED: _S.REJECTED,
    TurnOutcome.FAILED: _S.FAILED,
    TurnOutcome.CANCELLED: _S.CANCELLED,
}


class Router:
    """Subsystem 1 as a machine; see the module's theory of operation."""

    def __init__(
        self,
        models: dict[str, ModelSpec],
        backends: tuple[BackendSpec, ...],
        config: RouterConfig,
        verifier_by_task_type: Mapping[str, str],
        seed: int,
    ) -> None:
        streams = Streams(seed)
        self.config = config
        self.verifier_by_task_type = dict(verifier_by_task_type)
        self.backends = Backends(models, backends)
        self.admission = Admission(config, self.backends, streams)
        self.credit = Credit(config, streams)
        self.routing = Routing(config, self.backends, self.admission, self.credit, streams)
        self.gate = Gate(config.feedback)
        self.agenda = Agenda()
        self.table = ProgramTable()
        self.turns: dict[TurnId, Turn] = {}
        self.asked: dict[DecisionId, ProgramId] = {}
        """Programs for which the user's selector has been asked."""
        self.counts = Counts()
        self.now_s = float("-inf")
        self.timer_at_s: float | None = None
        self._is_resolving = False
        self._out: list[c.Command] = []
        self._handler_by_event: dict[type, Callable[[Any], None]] = {
            e.TurnArrived: self._on_turn_arrived,
            e.AttemptEnded: self._on_attempt_ended,
            e.TurnAbandoned: self._on_turn_abandoned,
            e.ProgramEnded: self._on_program_ended,
            e.VerdictArrived: self._on_verdict,
            e.SelectorAnswered: self._on_selector_answered,
            e.SignalsObserved: self._on_signals,
            e.BackendAdded: self._on_backend_added,
            e.BackendChanged: self._on_backend_changed,
            e.BackendRemoved: self._on_backend_removed,
            e.TimerFired: self._on_timer,
            e.HostRestarted: self._on_host_restarted,
        }
        self._due_by_kind: dict[str, Callable[[str], None]] = {
            "idle": self._idle_due,
            "hold": self._hold_due,
            "budget": self._budget_due,
            "verdict": self._verdict_due,
            "closed": self._closed_due,
            "retry": self._retry_due,
            "window": self._window_due,
            "selector": self._selector_due,
        }

    @property
    def heard_events(self) -> tuple[type, ...]:
        """The event types that this machine listens for."""
        return tuple(self._handler_by_event)

    def handle(self, event: e.Event) -> list[c.Command]:
        """Take one event and say what the host must do, in order."""
        out: list[c.Command] = []
        self._out = out
        self.now_s = event.at_s
        next_at_s = self.agenda.next_at_s
        if next_at_s is not None and next_at_s <= event.at_s:
            self._run_due()
        self._handler_by_event[type(event)](event)
        next_at_s = self.agenda.next_at_s
        if next_at_s is not None and (self.timer_at_s is None or next_at_s < self.timer_at_s):
            self.timer_at_s = next_at_s
            out.append(c.SetTimer(timer=TIMER, fires_at_s=next_at_s))
        return out

    # --- a turn arrives -------------------------------------------------------------------------------------------

    def _on_turn_arrived(self, event: e.TurnArrived) -> None:
        self.counts.arrived += 1
        program = self.table.by_id.get(event.program_id)
        if event.turn_id in self.turns:
            raise LawBroken("L2", f"turn {event.turn_id} arrived twice")
        if program is None:
            self._open_program(event)
        elif not program.is_open:
            self._refuse(event, 409, "program_finished", f"program {event.program_id!r} has ended ({program.state})")
        elif not self._is_known_model(event):
            self._refuse_model(event)
        else:
            self._next_turn(program, event)

    def _is_known_model(self, event: e.TurnArrived) -> bool:
        return event.model == e.AUTO or event.model in self.backends.model_by_id

    def _refuse_model(self, event: e.TurnArrived) -> None:
        known = ", ".join([e.AUTO, *self.backends.model_by_id])
        self._refuse(event, 404, "model_not_found", f"the model {event.model!r} is not in the pool; known: {known}")

    def _open_program(self, event: e.TurnArrived) -> None:
        if not self._is_known_model(event):
            self._refuse_model(event)
            return
        if not self._make_room():
            limit = self.config.programs_max
            self._refuse(event, 503, "too_many_programs", f"{limit} programs are open, which is the limit")
            return
        program = Program(
            program_id=event.program_id,
            arrived_at_s=event.at_s,
            active_at_s=event.at_s,
            is_implicit=event.is_implicit,
            is_pinned=event.model != e.AUTO,
            tenant=event.tenant,
            task_type=event.task_type,
            domain=event.domain,
            components=event.components,
            verifier=self.verifier_by_task_type.get(event.task_type or "", EXTERNAL),
        )
        self.table.add(program)
        self._new_turn(program, event, is_side=False)
        budget_s = event.budget_s if event.budget_s is not None else self.config.budget_s
        if budget_s is not None:
            self.agenda.schedule(f"budget:{program.program_id}", event.at_s + budget_s)
        self.agenda.schedule(f"idle:{program.program_id}", event.at_s + min(self.config.park_s, self.config.idle_s))
        if program.is_pinned:
            self._decide(program, [ModelId(event.model)], reason="pinned", named=ModelId(event.model))
            return
        slot = self.gate.enter(program.program_id)
        if slot is not None:
            self._route(program, slot)
        else:
            self.agenda.schedule(f"hold:{event.turn_id}", event.at_s + self.config.hold_max_s)

    def _make_room(self) -> bool:
        """Whether one more program fits in the table; the one that is idle longest gives way."""
        if self.table.n_open < self.config.programs_max:
            return True
        oldest = next(iter(self.table.idle), None)
        if oldest is None:
            return False
        self._end_program(self.table.by_id[oldest], EndReason.IDLE)
        return True

    def _new_turn(self, program: Program, event: e.TurnArrived, *, is_side: bool) -> Turn:
        turn = Turn(
            turn_id=event.turn_id,
            program_id=event.program_id,
            arrived_at_s=event.at_s,
            model=ModelId(event.model) if is_side else program.model,
            is_side=is_side,
            prompt_tokens=event.prompt_tokens,
            is_final=event.is_final,
            priority=event.priority,
        )
        self.turns[event.turn_id] = turn
        program.open_turns.append(event.turn_id)
        program.active_at_s = event.at_s
        self.table.wake(event.program_id)
        return turn

    def _next_turn(self, program: Program, event: e.TurnArrived) -> None:
        is_side = event.model not in (e.AUTO, program.model) and program.model is not None
        turn = self._new_turn(program, event, is_side=is_side)
        if program.model is None:
            self.agenda.schedule(f"hold:{event.turn_id}", event.at_s + self.config.hold_max_s)
        else:
            self._place(turn, program)

    # --- a model is chosen ----------------------------------------------------------------------------------------

    def _route(self, program: Program, slot: int) -> None:
        models = self.routing.models(self.now_s)
        if not models:
            self._fail_program(program, self._nobody_usable("any model"), TurnOutcome.REJECTED)
            return
        selector = self.config.selector
        if selector is None:
            self._decide(program, models, slot=slot, reason="policy")
            return
        decision_id = self.routing.next_decision_id()
        self.asked[decision_id] = program.program_id
        self.agenda.schedule(f"selector:{decision_id}", self.now_s + selector.timeout_s)
        self._out.append(
            c.AskSelector(
                decision_id=decision_id,
                program_id=program.program_id,
                candidates=tuple(models),
                context=tuple(self.routing.context(program).tolist()),
                task_type=program.task_type,
                domain=program.domain,
                timeout_s=selector.timeout_s,
            )
        )

    def _decide(
        self,
        program: Program,
        models: list[ModelId],
        *,
        reason: str,
        slot: int = 0,
        decision_id: DecisionId | None = None,
        named: ModelId | None = None,
        named_propensity: float | None = None,
    ) -> None:
        decision = self.routing.decide(
            program,
            models,
            decision_id=self.routing.next_decision_id() if decision_id is None else decision_id,
            slot=slot,
            at_s=self.now_s,
            reason=reason,
            named=named,
            named_propensity=named_propensity,
        )
        self._out.append(decision)
        program.move(_S.ROUTED)
        for turn_id in list(program.open_turns):
            turn = self.turns.get(turn_id)
            if turn is not None and not turn.is_side and turn.backend_id is None:
                turn.model = program.model
                self._place(turn, program)

    def _on_selector_answered(self, event: e.SelectorAnswered) -> None:
        program_id = self.asked.pop(event.decision_id, None)
        self.agenda.cancel(f"selector:{event.decision_id}")
        program = None if program_id is None else self.table.by_id.get(program_id)
        if program is None or program.model is not None:
            self.counts.stale += 1
            return
        models = self.routing.models(self.now_s)
        slot = self.gate.slot_by_program.get(program.program_id, 0)
        if not models:
            self._fail_program(program, self._nobody_usable("any model"), TurnOutcome.REJECTED)
        elif event.model in models:
            self._decide(
                program,
                models,
                slot=slot,
                decision_id=event.decision_id,
                reason="selector",
                named=event.model,
                named_propensity=event.propensity,
            )
        else:
            self._decide(program, models, slot=slot, decision_id=event.decision_id, reason="selector_fallback")

    def _selector_due(self, key: str) -> None:
        self._on_selector_answered(e.SelectorAnswered(at_s=self.now_s, decision_id=DecisionId(int(key))))

    # --- a turn is placed on a backend ----------------------------------------------------------------------------

    def _place(self, turn: Turn, program: Program) -> None:
        """Dispatch the turn, hold it, or refuse it."""
        assert turn.model is not None
        is_first_in_line = self.admission.head(turn.model) is None
        stays = program.is_reserved and not turn.is_side
        if (is_first_in_line or stays) and self._try_dispatch(turn, program):
            return
        if not self.backends.usable(turn.model, self.now_s) and not stays:
            self._end_turn(turn, TurnOutcome.REJECTED, self._nobody_usable(f"model {turn.model!r}"))
        elif self.admission.n_held >= self.config.held_max:
            text = f"{self.config.held_max} turns are held, which is the limit"
            self._end_turn(turn, TurnOutcome.REJECTED, _overloaded("too_many_held", text))
        else:
            self._hold(turn, program)

    def _hold(self, turn: Turn, program: Program) -> None:
        self.admission.hold(turn)
        self.counts.held += 1
        due_at_s = turn.arrived_at_s + self.config.hold_max_s
        self.agenda.schedule(f"hold:{turn.turn_id}", due_at_s)
        if not turn.is_side and (program.state is _S.ROUTED or (program.state is _S.RUNNING and not program.n_covered)):
            program.move(_S.HELD)
        for backend_id in self.backends.usable(turn.model, self.now_s) if turn.model else ():
            frees_at_s = self.admission.ledger.frees_at_s(backend_id, at_s=self.now_s)
            if frees_at_s is not None:
                self.agenda.schedule(f"window:{backend_id}", frees_at_s)

    def _try_dispatch(self, turn: Turn, program: Program) -> bool:
        backend_id = self.admission.admit(turn, program, self.now_s)
        if backend_id is None:
            return False
        if turn.is_held:
            self.admission.unhold(turn)
        if program.state is not _S.RUNNING and not turn.is_side:
            program.move(_S.ADMITTED)
            program.move(_S.RUNNING)
        if self.now_s > turn.arrived_at_s and turn.attempt == 0:
            turn.wait_s = self.now_s - turn.arrived_at_s
            program.wait_s += turn.wait_s
            self.agenda.cancel(f"hold:{turn.turn_id}")
        turn.attempt += 1
        turn.backend_id = backend_id
        if not turn.has_own_reservation:
            program.n_covered += 1
        self.backends.by_id[backend_id].n_running += 1
        assert turn.model is not None and program.decision_id is not None
        self._out.append(
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
        return True

    def _drain(self, model_id: ModelId) -> None:
        """Dispatch held turns of a model from the head on, as far as they fit."""
        while (head := self.admission.head(model_id)) is not None:
            turn = self.turns[head]
            program = self.table.by_id[turn.program_id]
            if not self._try_dispatch(turn, program):
                return
            if program.is_reserved:
                self._dispatch_siblings(program)

    def _dispatch_siblings(self, program: Program) -> None:
        """The program has its reservation: its other held turns need not stand in line."""
        for turn_id in list(program.open_turns):
            turn = self.turns[turn_id]
            if turn.is_held and not turn.is_side:
                self._try_dispatch(turn, program)

    # --- an attempt ends ------------------------------------------------------------------------------------------

    def _on_attempt_ended(self, event: e.AttemptEnded) -> None:
        turn = self.turns.get(event.turn_id)
        if turn is None or turn.attempt != event.attempt or turn.backend_id is None:
            self.counts.stale += 1
            return
        program = self.table.by_id[turn.program_id]
        backend_id = turn.backend_id
        if event.outcome is AttemptOutcome.COMPLETED:
            self.backends.note_success(backend_id)
            self._complete(turn, program, event)
            return
        self._lift(turn, program)
        self._blame(backend_id, event)
        if event.outcome is AttemptOutcome.CANCELLED:
            self._end_turn(turn, TurnOutcome.CANCELLED, None)
        elif not self._retry(turn, program, backend_id, event):
            self._count_tokens(program, turn, event)
            self._end_turn(turn, TurnOutcome.FAILED, explain(event, backend_id))
        self._drain_model_of(backend_id)

    def _complete(self, turn: Turn, program: Program, event: e.AttemptEnded) -> None:
        assert turn.model is not None and turn.backend_id is not None
        backend_id = turn.backend_id
        had_own = turn.has_own_reservation
        self._lift(turn, program)
        self._count_tokens(program, turn, event)
        program.n_turns += 1
        if not turn.is_side:
            program.context_tokens = event.usage.prompt_tokens + event.usage.completion_tokens
            program.peak_tokens = max(program.peak_tokens, program.context_tokens)
        has_freed = self.admission.follow(program) or had_own
        self._close_turn(turn, program)
        self.counts.completed += 1
        if turn.is_final:
            self._end_program(program, EndReason.FINAL)
        elif has_freed:
            self._drain_model_of(backend_id)

    def _count_tokens(self, program: Program, turn: Turn, event: e.AttemptEnded) -> None:
        usage = event.usage
        program.prompt_tokens += usage.prompt_tokens
        program.completion_tokens += usage.completion_tokens
        program.cached_tokens += usage.cached_tokens
        if turn.model is not None:
            price = self.backends.price(turn.model)
            program.cost_usd += price_usd(price, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    def _lift(self, turn: Turn, program: Program) -> None:
        """Take the turn off its backend."""
        backend_id = turn.backend_id
        if backend_id is None:
            return
        if turn.has_own_reservation:
            self.admission.release_turn(turn)
        else:
            program.n_covered -= 1
        turn.backend_id = None
        state = self.backends.by_id.get(backend_id)
        if state is not None:
            state.n_running -= 1

    def _blame(self, backend_id: BackendId, event: e.AttemptEnded) -> None:
        if event.outcome in UNREACHABLE or (event.outcome in UNRESPONSIVE and event.first_byte_at_s is None):
            cooldown_s = self.backends.note_failure(backend_id, is_unreachable=event.outcome in UNREACHABLE)
            if cooldown_s is not None:
                self.agenda.schedule(f"retry:{backend_id}", self.now_s + cooldown_s)
        elif event.outcome is AttemptOutcome.STATUS:
            self.backends.note_success(backend_id)
            asked_s = patience_s(event)
            if asked_s is not None and backend_id in self.backends.by_id:
                self.backends.by_id[backend_id].quiet_until_s = self.now_s + asked_s
                self.agenda.schedule(f"retry:{backend_id}", self.now_s + asked_s)

    def _retry(self, turn: Turn, program: Program, backend_id: BackendId, event: e.AttemptEnded) -> bool:
        """Try elsewhere, invisibly to the client: another replica, once more here after a break, another model."""
        if not may_retry(event) or turn.attempt >= self.config.attempts_max:
            return False
        turn.tried.append(backend_id)
        if program.is_reserved and program.n_covered == 0 and not turn.is_side:
            self.admission.release_program(program)
        if self._try_dispatch(turn, program):
            return True
        assert turn.model is not None
        if any(b not in turn.tried for b in self.backends.usable(turn.model, self.now_s)):
            self._hold(turn, program)
            return True
        if event.outcome is AttemptOutcome.BROKEN and turn.tried.count(backend_id) == 1:
            turn.tried.clear()
            if self._try_dispatch(turn, program):
                turn.tried.append(backend_id)
                return True
        return self._fall_back(turn, program)

    def _fall_back(self, turn: Turn, program: Program) -> bool:
        """Route a program that has had no answer yet to another model; credit goes to the model that runs."""
        if program.is_pinned or turn.is_side or program.n_turns or len(program.open_turns) > 1:
            return False
        assert program.model is not None
        program.tried_models.append(program.model)
        models = self.routing.models(self.now_s, frozenset(program.tried_models))
        if not models:
            return False
        pending = self.credit.pending_by_decision.get(program.decision_id) if program.decision_id else None
        slot = 0 if pending is None else pending.slot
        self.credit.undo(program.decision_id)
        self.admission.release_program(program)
        turn.tried.clear()
        program.backend_id = None
        program.move(_S.ARRIVED)
        self._decide(program, models, slot=slot, reason="fallback")
        return True

    def _on_turn_abandoned(self, event: e.TurnAbandoned) -> None:
        turn = self.turns.get(event.turn_id)
        if turn is None:
            self.counts.stale += 1
            return
        self._cancel_turn(turn, None)

    def _cancel_turn(self, turn: Turn, failure: Failure | None) -> None:
        """End an open turn from our side or the client's, wherever it stands."""
        program = self.table.by_id[turn.program_id]
        backend_id = turn.backend_id
        if backend_id is not None:
            self._out.append(c.CancelAttempt(turn_id=turn.turn_id, attempt=turn.attempt))
            self._lift(turn, program)
        self._end_turn(turn, TurnOutcome.CANCELLED, failure)
        if backend_id is not None:
            self._drain_model_of(backend_id)

    # --- a turn ends ----------------------------------------------------------------------------------------------

    def _refuse(self, event: e.TurnArrived, status: int, code: str, message: str) -> None:
        """Turn away a turn that never entered the table."""
        self.counts.rejected += 1
        retry_after_s = RETRY_AFTER_S if status == 503 else None
        self._out.append(
            c.EndTurn(
                turn_id=event.turn_id,
                outcome=TurnOutcome.REJECTED,
                status=status,
                code=code,
                message=message,
                retry_after_s=retry_after_s,
            )
        )

    def _end_turn(self, turn: Turn, outcome: TurnOutcome, failure: Failure | None) -> None:
        """Close an open turn without an answer, tell the client why, and settle its program."""
        program = self.table.by_id[turn.program_id]
        self._close_turn(turn, program)
        program.n_failed_turns += 1
        setattr(self.counts, outcome.value, getattr(self.counts, outcome.value) + 1)
        if failure is not None:
            self._out.append(
                c.EndTurn(
                    turn_id=turn.turn_id,
                    outcome=outcome,
                    status=failure.status,
                    code=failure.code,
                    message=failure.message,
                    retry_after_s=failure.retry_after_s,
                    is_upstream_answer=failure.is_upstream_answer,
                )
            )
        if not program.open_turns and program.n_turns == 0 and not program.is_timing_out:
            self._forget(program, outcome)

    def _close_turn(self, turn: Turn, program: Program) -> None:
        if turn.is_held:
            self.admission.unhold(turn)
        if turn.wait_s == 0.0:
            self.agenda.cancel(f"hold:{turn.turn_id}")
        del self.turns[turn.turn_id]
        program.open_turns.remove(turn.turn_id)
        program.active_at_s = self.now_s
        if not program.open_turns:
            self.table.rest(program.program_id)
            if program.is_implicit and program.is_reserved:
                self._park(program)

    def _fail_program(self, program: Program, failure: Failure, outcome: TurnOutcome) -> None:
        for turn_id in list(program.open_turns):
            self._end_turn(self.turns[turn_id], outcome, failure)

    def _forget(self, program: Program, outcome: TurnOutcome) -> None:
        """A program without a single answer leaves no trace; its decision is undone."""
        program.move(_FORGOTTEN_AS[outcome])
        self.credit.undo(program.decision_id)
        self._release(program)
        self._cancel_agenda(program)
        self.counts.forgotten += 1
        self.table.forget(program.program_id)
        self._resolve(program)

    def _park(self, program: Program) -> None:
        """An idle program gives its reservation back and keeps its binding."""
        self._release(program)

    def _release(self, program: Program) -> None:
        if program.is_reserved:
            assert program.backend_id is not None
            self.admission.release_program(program)
            self._drain_model_of(program.backend_id)

    def _drain_model_of(self, backend_id: BackendId) -> None:
        state = self.backends.by_id.get(backend_id)
        if state is not None:
            self._drain(ModelId(state.spec.model))

    def _cancel_agenda(self, program: Program) -> None:
        for kind in ("idle", "budget", "verdict"):
            self.agenda.cancel(f"{kind}:{program.program_id}")

    def _nobody_usable(self, what: str) -> Failure:
        return _overloaded("no_backend_available", f"no backend of {what} can be reached now")

    # --- a program ends and is judged -----------------------------------------------------------------------------

    def _on_program_ended(self, event: e.ProgramEnded) -> None:
        program = self.table.by_id.get(event.program_id)
        if program is None or not program.is_open:
            self.counts.stale += 1
            return
        self._end_program(program, event.reason)

    def _end_program(self, program: Program, reason: EndReason) -> None:
        if not self._cancel_open_turns(program, reason):
            return
        program.ended_at_s, program.end_reason = self.now_s, reason
        self._learn_demand(program)
        propensities = self.credit.late_propensities(program.decision_id)
        if propensities is not None and program.decision_id is not None:
            self._out.append(c.RecordPropensities(decision_id=program.decision_id, propensities=propensities))
        self.agenda.cancel(f"idle:{program.program_id}")
        self.agenda.cancel(f"budget:{program.program_id}")
        program.move(_S.ENDED)
        program.move(_S.VERIFYING)
        self.table.end(program.program_id)
        self._release(program)
        if program.model is not None:
            self._drain(program.model)  # the demand estimate may have fallen
        self.agenda.schedule(f"verdict:{program.program_id}", self.now_s + self.config.verdict_max_s)
        if program.verifier not in (None, EXTERNAL):
            assert program.verifier is not None
            self._out.append(
                c.Verify(program_id=program.program_id, verifier=program.verifier, task_type=program.task_type)
            )
        if len(self.table.verifying) > self.config.verifying_max:
            self._censor(self.table.by_id[next(iter(self.table.verifying))])

    def _cancel_open_turns(self, program: Program, reason: EndReason) -> bool:
        """End what is still open of an ending program. False when that left nothing to end."""
        text = f"program {program.program_id!r} has ended ({reason})"
        for turn_id in list(program.open_turns):
            turn = self.turns.get(turn_id)
            if turn is not None:
                self._cancel_turn(turn, Failure(status=409, code="program_finished", message=text))
        return program.program_id in self.table.by_id and program.is_open

    def _learn_demand(self, program: Program) -> None:
        if program.model is not None and program.peak_tokens:
            self.admission.demand_by_model[program.model].learn(program.peak_tokens)

    def _on_verdict(self, event: e.VerdictArrived) -> None:
        program = self.table.by_id.get(event.program_id)
        if program is None or program.verdict is not None:
            self.counts.verdicts_stale += 1
            return
        if program.is_open:
            self._end_program(program, EndReason.VERDICT)
            if program.program_id not in self.table.by_id:
                self.counts.verdicts_stale += 1
                return
        program.verdict = event.verdict
        if program.state is not _S.VERIFYING:
            self.counts.verdicts_late += 1
            return
        success = event.verdict.success
        if success is None:
            self.credit.undo(program.decision_id)
            self.counts.verdicts_abstained += 1
        else:
            self._credit(program, success)
        self._close(program, _S.CLOSED)

    def _credit(self, program: Program, success: float) -> None:
        assert program.decision_id is not None and program.model is not None
        reward = self.credit.land(program.decision_id, success, program.cost_usd)
        if reward is None:
            raise LawBroken("L11", f"program {program.program_id!r} has no pending decision to credit")
        program.reward, program.is_credited = reward, True
        self._out.append(
            c.RecordCredit(
                decision_id=program.decision_id,
                program_id=program.program_id,
                model=program.model,
                success=success,
                cost_usd=program.cost_usd,
                reward=reward,
            )
        )

    def _censor(self, program: Program) -> None:
        """No verdict will come: the decision is undone, for silence is not failure."""
        self.credit.undo(program.decision_id)
        self.counts.censored += 1
        self._close(program, _S.CENSORED)

    def _close(self, program: Program, state: ProgramState) -> None:
        program.move(state)
        self._cancel_agenda(program)
        program.components = ()
        self.table.close(program.program_id, self.now_s)
        self._resolve(program)
        while len(self.table.closed) > self.config.closed_max:
            self._archive(next(iter(self.table.closed)))
        if len(self.table.closed) == 1:
            self.agenda.schedule("closed:", self.now_s + self.config.closed_s)

    def _archive(self, program_id: ProgramId) -> None:
        self._out.append(c.Archive(program=self.table.by_id[program_id].record()))
        self.table.forget(program_id)

    def _resolve(self, program: Program) -> None:
        """Nothing more will be learned of the program: whoever waited for that may start."""
        self.gate.leave(program.program_id)
        if self._is_resolving:
            return  # the loop below, further up, goes on
        self._is_resolving = True
        while (started := self.gate.next()) is not None:
            waiting, slot = started
            self._route(self.table.by_id[waiting], slot)
        self._is_resolving = False

    # --- what is due ----------------------------------------------------------------------------------------------

    def _on_timer(self, event: e.TimerFired) -> None:
        if event.timer != TIMER:
            self.counts.stale += 1
            return
        self.timer_at_s = None

    def _run_due(self) -> None:
        """Do what is due before the event at hand, so that a late timer changes nothing."""
        for key in self.agenda.pop_due(self.now_s):
            kind, _, rest = key.partition(":")
            self._due_by_kind[kind](rest)

    def _idle_due(self, key: str) -> None:
        program = self.table.by_id.get(ProgramId(key))
        if program is None or not program.is_open:
            return
        if program.open_turns:
            self.agenda.schedule(f"idle:{key}", self.now_s + self.config.park_s)
            return
        ends_at_s = program.active_at_s + self.config.idle_s
        parks_at_s = program.active_at_s + self.config.park_s
        if self.now_s >= ends_at_s:
            self._end_program(program, EndReason.IDLE)
            return
        if self.now_s >= parks_at_s:
            self._park(program)
        next_at_s = ends_at_s if self.now_s >= parks_at_s else min(parks_at_s, ends_at_s)
        self.agenda.schedule(f"idle:{key}", next_at_s)

    def _hold_due(self, key: str) -> None:
        turn = self.turns.get(TurnId(int(key)))
        if turn is None or turn.backend_id is not None:
            return
        text = f"held for {self.config.hold_max_s:g} s, which is the limit"
        self._end_turn(turn, TurnOutcome.EVICTED, _overloaded("held_too_long", text))

    def _budget_due(self, key: str) -> None:
        program = self.table.by_id.get(ProgramId(key))
        if program is None or not program.is_open:
            return
        failure = Failure(status=504, code="budget_exceeded", message=f"program {key!r} has used up its time budget")
        has_decision = program.decision_id is not None
        program.is_timing_out = True
        for turn_id in list(program.open_turns):
            self._cancel_turn(self.turns[turn_id], failure)
        program.ended_at_s, program.end_reason = self.now_s, EndReason.BUDGET
        self._release(program)
        if self.config.budget_credit == "fail" and has_decision:
            self._credit(program, 0.0)
        else:
            self.credit.undo(program.decision_id)
        self._close(program, _S.TIMED_OUT)

    def _verdict_due(self, key: str) -> None:
        program = self.table.by_id.get(ProgramId(key))
        if program is not None and program.state is _S.VERIFYING:
            self._censor(program)

    def _closed_due(self, key: str) -> None:
        closed = self.table.closed
        while closed:
            program_id, closed_at_s = next(iter(closed.items()))
            due_at_s = closed_at_s + self.config.closed_s
            if due_at_s > self.now_s:
                self.agenda.schedule("closed:", due_at_s)
                return
            self._archive(program_id)

    def _retry_due(self, key: str) -> None:
        self.backends.try_again(BackendId(key))
        self._drain_model_of(BackendId(key))

    def _window_due(self, key: str) -> None:
        self._drain_model_of(BackendId(key))
        state = self.backends.by_id.get(BackendId(key))
        if state is not None and self.admission.head(ModelId(state.spec.model)) is not None:
            frees_at_s = self.admission.ledger.frees_at_s(key, at_s=self.now_s)
            if frees_at_s is not None:
                self.agenda.schedule(f"window:{key}", frees_at_s)

    # --- the pool changes -----------------------------------------------------------------------------------------

    def _on_signals(self, event: e.SignalsObserved) -> None:
        self.backends.observe(event.backend_id, event.values, event.observed_at_s)

    def _on_backend_added(self, event: e.BackendAdded) -> None:
        if event.model is not None:
            self.backends.add_model(ModelId(event.backend.model), event.model)
            self.admission.add_model(ModelId(event.backend.model))
        self.backends.add(event.backend)
        self.admission.add_backend(event.backend)
        self._drain(ModelId(event.backend.model))

    def _on_backend_changed(self, event: e.BackendChanged) -> None:
        state = self.backends.by_id.get(event.backend_id)
        if state is None:
            self.counts.stale += 1
            return
        state.health = event.health
        if event.health is BackendHealth.UP:
            state.n_failures = 0
            state.quiet_until_s = 0.0
            self.agenda.cancel(f"retry:{event.backend_id}")
            self._drain_model_of(event.backend_id)

    def _on_backend_removed(self, event: e.BackendRemoved) -> None:
        if event.backend_id not in self.backends.by_id:
            self.counts.stale += 1
            return
        failure = Failure(status=502, code="backend_removed", message=f"backend {event.backend_id!r} was removed")
        for turn in [t for t in self.turns.values() if t.backend_id == event.backend_id]:
            self._cancel_turn(turn, failure)
        for program in self.table.by_id.values():
            if program.backend_id == event.backend_id:
                self.admission.release_program(program)
        model_id = ModelId(self.backends.by_id[event.backend_id].spec.model)
        self.backends.remove(event.backend_id)
        self.admission.ledger.remove(event.backend_id)
        self._drain(model_id)

    def _on_host_restarted(self, event: e.HostRestarted) -> None:
        """Open turns died with the host; bindings, pending decisions and what is learned stand."""
        for turn in list(self.turns.values()):
            if turn.turn_id in self.turns:
                self._cancel_turn(turn, None)
        self.asked.clear()
        self.timer_at_s = None

    # --- laws and state -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LawBroken` where L1, L2, L4, L5, L9, L11 or L15 does not hold."""
        counts = self.counts
        ended = counts.completed + counts.failed + counts.rejected + counts.evicted + counts.cancelled
        if counts.arrived != ended + len(self.turns):
            raise LawBroken("L1", f"{counts.arrived} turns arrived, {ended} ended, {len(self.turns)} are open")
        open_turns = [t for p in self.table.by_id.values() for t in p.open_turns]
        if sorted(open_turns) != sorted(self.turns):
            raise LawBroken("L2", "the programs' open turns are not the open turns")
        self.admission.check(self.table.by_id, self.turns, self.now_s)
        self._check_programs()
        limits = (
            (self.table.n_open, self.config.programs_max, "open programs"),
            (len(self.table.verifying), self.config.verifying_max, "programs without a verdict"),
            (len(self.table.closed), self.config.closed_max, "closed programs"),
            (self.admission.n_held, self.config.held_max, "held turns"),
        )
        for n, limit, what in limits:
            if n > limit:
                raise LawBroken("L15", f"{n} {what} exceed {limit}")

    def _check_programs(self) -> None:
        for program in self.table.by_id.values():
            is_pending = program.decision_id in self.credit.pending_by_decision
            if program.is_credited and is_pending:
                raise LawBroken("L11", f"program {program.program_id!r} is credited and still pending")
            if program.state is _S.VERIFYING and not is_pending:
                raise LawBroken("L11", f"program {program.program_id!r} waits for a verdict nobody can use")
            if program.state in FORGOTTEN_STATES:
                raise LawBroken("L1", f"program {program.program_id!r} is {program.state} and not forgotten")
            turns = [self.turns[turn_id] for turn_id in program.open_turns]
            n_covered = sum(1 for t in turns if t.backend_id is not None and not t.has_own_reservation)
            if n_covered != program.n_covered:
                raise LawBroken("L5", f"program {program.program_id!r} covers {n_covered}, not {program.n_covered}")
        n_live = sum(1 for p in self.table.by_id.values() if p.is_open and p.decision_id) + len(self.table.verifying)
        if len(self.credit.pending_by_decision) > n_live:
            raise LawBroken("L11", f"{len(self.credit.pending_by_decision)} decisions pend for {n_live} programs")

    def dump(self) -> bytes:
        """The whole state; see `router.state`."""
        return dump_router(self)

    def load(self, state: bytes) -> None:
        """Continue from a dumped state of a router with the same configuration and seed."""
        load_router(self, state)


def _overloaded(code: str, message: str) -> Failure:
    return Failure(status=503, code=code, message=message, retry_after_s=RETRY_AFTER_S)
