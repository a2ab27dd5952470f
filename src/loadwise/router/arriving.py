"""A turn arrives: it is refused, opens a program, or is the next of one.

What is out of range is decided here, once, so that no part behind it has to think of it again: token counts are brought
into [0, `TOKENS_MAX`], a budget that is not a positive number is no budget, components of another embedding are none.
"""

import math

from loadwise.kernel import events as e
from loadwise.kernel.ids import PROGRAM_ID_MAX_CHARS, ModelId
from loadwise.kernel.work import EndReason

from .binding import Binding
from .desk import Desk
from .dispatching import Dispatching
from .ending import Ending
from .escalation import Escalation
from .failure import Failure, model_removed, overloaded, program_finished, unknown_model
from .lifecycle import EXTERNAL, Lifecycle
from .program import Program, Turn, clamped_tokens, needed_tokens


class Arriving:
    """Opens turns and programs."""

    def __init__(
        self,
        desk: Desk,
        ending: Ending,
        lifecycle: Lifecycle,
        binding: Binding,
        dispatching: Dispatching,
        escalation: Escalation,
    ) -> None:
        self._desk = desk
        self._ending = ending
        self._lifecycle = lifecycle
        self._binding = binding
        self._dispatching = dispatching
        self._escalation = escalation

    def turn_arrived(self, event: e.TurnArrived) -> None:
        """Take one model call."""
        desk = self._desk
        if event.turn_id in desk.turns:
            desk.counts.malformed += 1
            return
        desk.counts.arrived += 1
        program = desk.table.by_id.get(event.program_id)
        refusal = self._refusal(event, program)
        if refusal is not None:
            self._ending.refuse(event, refusal)
        elif program is None:
            self._open_program(event)
        else:
            self._next_turn(program, event)

    def refuse_unwritable(self, event: e.TurnArrived) -> None:
        """Turn away a model call that says something which cannot be written down."""
        desk = self._desk
        if event.turn_id in desk.turns:
            desk.counts.malformed += 1
            return
        desk.counts.arrived += 1
        text = "the request has text that is not Unicode, or a number beyond 64 bits"
        refusal = Failure(status=400, code="invalid_request", message=text)
        if not _is_program_id(event.program_id):
            refusal = _invalid_program_id(event.program_id)
        self._ending.refuse(event, refusal)

    def _refusal(self, event: e.TurnArrived, program: Program | None) -> Failure | None:
        desk = self._desk
        if program is None and not _is_program_id(event.program_id):
            return _invalid_program_id(event.program_id)
        if program is not None and not program.is_open:
            return program_finished(program.program_id, program.state)
        if event.model != e.AUTO:
            if not desk.backends.all_of(ModelId(event.model)):
                return unknown_model(event.model, (e.AUTO, *filter(desk.backends.all_of, desk.backends.model_by_id)))
        elif program is not None and program.model is not None and not desk.backends.all_of(program.model):
            return model_removed(program.program_id, program.model)
        if len(desk.turns) >= desk.config.turns_max:
            return overloaded("too_many_turns", f"{desk.config.turns_max} turns are open, which is the limit")
        if program is None and not self._make_room():
            limit = desk.config.programs_max
            return overloaded("too_many_programs", f"{limit} programs are open, which is the limit")
        return None

    def _make_room(self) -> bool:
        """Whether one more program fits in the table; the one that is idle longest gives way."""
        table = self._desk.table
        if table.n_open < self._desk.config.programs_max:
            return True
        oldest = next(iter(table.idle), None)
        if oldest is None:
            return False
        self._lifecycle.end(table.by_id[oldest], EndReason.IDLE)
        return True

    def _open_program(self, event: e.TurnArrived) -> None:
        desk = self._desk
        program = Program(
            program_id=event.program_id,
            arrived_at_s=event.at_s,
            active_at_s=event.at_s,
            attempt_at_s=event.at_s,
            is_implicit=event.is_implicit,
            is_pinned=event.model != e.AUTO,
            tenant=event.tenant,
            task_type=event.task_type,
            domain=event.domain,
            components=self._components(event),
            verifier=desk.verifier_by_task_type.get(event.task_type or "", EXTERNAL),
        )
        desk.table.add(program)
        self._new_turn(program, event)
        budget_s = self._budget_s(event)
        if budget_s is not None and desk.config.budget_starts == "arrival":
            program.budget_ends_at_s = event.at_s + budget_s
            desk.agenda.schedule(f"budget:{program.program_id}", event.at_s + budget_s)
        else:
            program.budget_s = budget_s
        desk.agenda.schedule(f"idle:{program.program_id}", event.at_s + min(desk.config.park_s, desk.config.idle_s))
        if program.is_pinned:
            self._binding.bind_pinned(program, ModelId(event.model))
        else:
            self._binding.bind(program)

    def _components(self, event: e.TurnArrived) -> tuple[float, ...]:
        """The embedding, or nothing where it is longer than the context has room for: it is of another embedder."""
        if len(event.components) <= self._desk.config.context.n_components:
            return event.components
        self._desk.counts.malformed += 1
        return ()

    def _budget_s(self, event: e.TurnArrived) -> float | None:
        if event.budget_s is None:
            return self._desk.config.budget_s
        if math.isfinite(event.budget_s) and event.budget_s > 0:
            return event.budget_s
        self._desk.counts.malformed += 1
        return self._desk.config.budget_s

    def _new_turn(self, program: Program, event: e.TurnArrived) -> Turn:
        pinned_model = None if event.model == e.AUTO else ModelId(event.model)
        is_side = program.model is not None and pinned_model is not None and pinned_model != program.model
        turn = Turn(
            turn_id=event.turn_id,
            program_id=event.program_id,
            pinned_model=pinned_model,
            model=pinned_model if is_side else program.model,
            is_side=is_side,
            prompt_tokens=clamped_tokens(event.prompt_tokens),
            needed_tokens=needed_tokens(event.prompt_tokens, event.max_output_tokens),
            max_output_tokens=None if event.max_output_tokens is None else clamped_tokens(event.max_output_tokens),
            n_answers=max(1, clamped_tokens(event.n_answers)),
            is_final=event.is_final,
            priority=event.priority,
            deadline_at_s=None if event.deadline_at_s is None else self._deadline_at_s(event.deadline_at_s),
            arrived_at_s=event.at_s,
        )
        self._desk.turns[event.turn_id] = turn
        program.open_turns.append(event.turn_id)
        program.active_at_s = event.at_s
        self._desk.table.wake(event.program_id)
        return turn

    def _deadline_at_s(self, said_at_s: float) -> float | None:
        if math.isfinite(said_at_s):
            return said_at_s
        self._desk.counts.malformed += 1
        return None

    def _next_turn(self, program: Program, event: e.TurnArrived) -> None:
        if event.model == e.AUTO and self._desk.config.escalation is not None:
            self._escalation.rebind_stuck(program)
        turn = self._new_turn(program, event)
        if program.model is None:
            self._dispatching.wait(turn)
        else:
            self._dispatching.place(turn, program)


def _is_program_id(program_id: str) -> bool:
    return 1 <= len(program_id) <= PROGRAM_ID_MAX_CHARS and program_id.isprintable()


def _invalid_program_id(program_id: str) -> Failure:
    text = f"a program id has 1 to {PROGRAM_ID_MAX_CHARS} printable characters; this has {len(program_id)}"
    return Failure(status=400, code="invalid_program_id", message=text)
