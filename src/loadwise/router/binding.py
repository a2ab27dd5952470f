"""A program gets its model: paced by the feedback arm, by the user's selector or the policy, once, at its first turn.

The decision is written down and pending before anything follows from it. A program that was bound keeps its model,
unless that model failed before its first answer (`attempts`).
"""

import math

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import DecisionId, ModelId
from loadwise.kernel.work import ProgramState

from .config import SelectorConfig
from .desk import Desk
from .dispatching import Dispatching
from .ending import Ending
from .failure import nobody_usable
from .program import Program, Turn


class Binding:
    """Routes programs and places the turns that waited for it."""

    def __init__(self, desk: Desk, ending: Ending, dispatching: Dispatching) -> None:
        self._desk = desk
        self._ending = ending
        self._dispatching = dispatching

    def bind_pinned(self, program: Program, model_id: ModelId) -> None:
        """The client chose."""
        self.decide(program, [model_id], reason="pinned", named=model_id)

    def bind(self, program: Program) -> None:
        """Let the program start, or let its turns wait until it may."""
        slot = self._desk.pacing.enter(program.program_id)
        if slot is None:
            self._wait(program)
        else:
            self._route(program, slot)

    def start_next(self) -> bool:
        """Route the first program whose start is paced, if it may start now."""
        started = self._desk.pacing.next()
        if started is None:
            return False
        program_id, slot = started
        self._route(self._desk.table.by_id[program_id], slot)
        return True

    def _wait(self, program: Program) -> None:
        for turn_id in program.open_turns:
            self._dispatching.wait(self._desk.turns[turn_id])

    def _route(self, program: Program, slot: int) -> None:
        models, left_out = self._candidates(program)
        if not models:
            return
        if self._desk.config.selector is None:
            self.decide(program, models, slot=slot, reason="policy", unaffordable=left_out)
        else:
            self._ask_selector(program, models, self._desk.config.selector)

    def _candidates(self, program: Program) -> tuple[list[ModelId], tuple[ModelId, ...]]:
        """Models that can take the program and that there is money for, and those there is none for.

        Where there is none at all the program is refused.
        """
        desk = self._desk
        models = desk.routing.models_for_new(desk.now_s)
        turn = desk.turns[program.open_turns[0]] if program.open_turns else None
        affordable = desk.spending.affordable(models, program, turn, desk.now_s)
        if not models:
            self._ending.fail_program(program, nobody_usable("any model"))
        elif not affordable and turn is not None:
            desk.counts.over_budget += len(program.open_turns)
            usd_max = min(desk.spending.cost_max_usd(model, turn, program) for model in models)
            self._ending.fail_program(program, desk.spending.refusal(usd_max, desk.now_s))
        if len(affordable) == len(models):
            return affordable, ()
        return affordable, tuple(model for model in models if model not in affordable)

    def _ask_selector(self, program: Program, models: list[ModelId], selector: SelectorConfig) -> None:
        desk = self._desk
        decision_id = desk.routing.next_decision_id()
        desk.asked[decision_id] = program.program_id
        program.asked_decision_id = decision_id
        self._wait(program)
        desk.agenda.schedule(f"selector:{decision_id}", desk.now_s + selector.timeout_s)
        desk.out.append(
            c.AskSelector(
                decision_id=decision_id,
                program_id=program.program_id,
                candidates=tuple(models),
                context=tuple(desk.routing.context(program).tolist()),
                task_type=program.task_type,
                domain=program.domain,
                timeout_s=selector.timeout_s,
            )
        )

    def selector_answered(self, event: e.SelectorAnswered) -> None:
        """Take the selector's word where it names a candidate; otherwise the policy decides."""
        desk = self._desk
        program_id = desk.asked.pop(event.decision_id, None)
        if program_id is None:
            desk.counts.stale += 1
            return
        desk.agenda.cancel(f"selector:{event.decision_id}")
        program = desk.table.by_id[program_id]
        program.asked_decision_id = None
        models, left_out = self._candidates(program)
        slot = desk.pacing.slot_by_program.get(program.program_id, 0)
        if not models:
            return
        propensity = event.propensity
        if propensity is not None and not (math.isfinite(propensity) and 0.0 < propensity <= 1.0):
            desk.counts.malformed += 1
            propensity = None
        named = event.model if event.model in models else None
        self.decide(
            program,
            models,
            slot=slot,
            decision_id=event.decision_id,
            reason="selector_fallback" if named is None else "selector",
            named=named,
            named_propensity=propensity,
            unaffordable=left_out,
        )

    def selector_due(self, key: str) -> None:
        """The selector took too long."""
        decision_id = DecisionId(int(key))
        if decision_id in self._desk.asked:
            self.selector_answered(e.SelectorAnswered(at_s=self._desk.now_s, decision_id=decision_id))

    def decide(
        self,
        program: Program,
        models: list[ModelId],
        *,
        reason: str,
        slot: int = 0,
        decision_id: DecisionId | None = None,
        named: ModelId | None = None,
        named_propensity: float | None = None,
        unaffordable: tuple[ModelId, ...] = (),
    ) -> None:
        """Bind the program to one of `models`, write that down, and place its waiting turns."""
        desk = self._desk
        decision = desk.routing.decide(
            program,
            models,
            decision_id=desk.routing.next_decision_id() if decision_id is None else decision_id,
            slot=slot,
            at_s=desk.now_s,
            reason=reason,
            named=named,
            named_propensity=named_propensity,
            turn=None if program.is_pinned else self._first_turn(program),
            unaffordable=unaffordable,
        )
        if decision.reason == "divert":
            desk.counts.diverts += 1
        desk.out.append(decision)
        program.move(ProgramState.ROUTED)
        self._place_waiting(program)

    def _first_turn(self, program: Program) -> Turn | None:
        """The turn that will run on the model that is chosen; None where all are pinned elsewhere."""
        for turn_id in program.open_turns:
            turn = self._desk.turns[turn_id]
            if turn.pinned_model is None:
                return turn
        return None

    def _place_waiting(self, program: Program) -> None:
        desk = self._desk
        for turn_id in list(program.open_turns):
            turn = desk.turns.get(turn_id)
            if turn is None or turn.backend_id is not None or turn.is_held:
                continue  # a sibling's end took it along, or it went ahead with the program's reservation
            turn.is_side = turn.pinned_model not in (None, program.model)
            turn.model = turn.pinned_model if turn.is_side else program.model
            self._dispatching.place(turn, program)
