"""Why a program ran where it ran: its decision, what that rested on, and what came of it."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.work import AttemptOutcome, EndReason, TurnOutcome, Verdict
from loadwise.router.program import OPEN_STATES

from .concern import Concern, Concerning
from .entry import Entry
from .explanation import CandidateExplained, CreditExplained, DecisionExplained, Explanation, SignalAge
from .held import Held
from .regenerate import MakeMachine, recorded_machine


def why(path: str | Path, program_id: str, make_machine: MakeMachine | None = recorded_machine) -> Explanation:
    """Why a program ran where it ran.

    Args:
        make_machine: regenerates the commands; with None, waits, backends and the archived record stay unknown.

    Raises:
        UnknownProgram: no entry names it.
        JournalError: a missing or damaged journal.
    """
    told = _Told(has_commands=make_machine is not None)
    concerning = Concerning(Path(path), program_id, make_machine)
    for concern in concerning:
        told.hear(concern)
    return told.explanation(program_id, concerning)


class _End(NamedTuple):
    """How and when a program ended."""

    reason: EndReason | None
    at_s: float | None


_LEFT_AS = {
    TurnOutcome.REJECTED: EndReason.REJECTED,
    TurnOutcome.EVICTED: EndReason.REJECTED,
    TurnOutcome.FAILED: EndReason.FAILED,
    TurnOutcome.CANCELLED: EndReason.CANCELLED,
}
"""The end of a program that was forgotten, by that of its last turn."""


class _Told:
    """What the entries of one program add up to."""

    def __init__(self, *, has_commands: bool) -> None:
        self._decisions: list[DecisionExplained] = []
        self._dispatched: set[int] = set()
        """Decisions under which a turn ran."""
        self._held = Held()
        self._backend_ids: list[str] = []
        self._verdicts: list[Verdict] = []
        self._has_commands = has_commands
        self._n_turns = 0
        self._arrived_at_s: float | None = None
        self._end: _End | None = None
        """By the events alone, which know nothing of ends that only time brings."""
        self._left: _End | None = None
        """How the last turn ended without an answer, for a program that is forgotten thereby."""
        self._final_turn_ids: set[int] = set()
        self._credits: dict[int, c.RecordCredit] = {}
        """By decision the last one."""
        self._n_corrections = 0
        self._record: c.ProgramRecord | None = None
        self._refusals: list[str] = []

    def hear(self, concern: Concern) -> None:
        """Take one entry. What happened to others is not this program's, whatever it led to."""
        entry, commands, is_own = concern
        if self._arrived_at_s is None:
            self._arrived_at_s = entry.event.at_s
        if is_own:
            self._hear_event(entry.event)
        for command in commands:
            self._hear_command(entry, command)
        if self._has_commands:
            self._held.hear(concern)

    def _hear_event(self, event: e.Event) -> None:
        match event:
            case e.TurnArrived():
                self._n_turns += 1
                self._left = None
                if event.is_final:
                    self._final_turn_ids.add(event.turn_id)
            case e.AttemptEnded(outcome=AttemptOutcome.COMPLETED):
                if event.turn_id in self._final_turn_ids:
                    self._end = self._end or _End(EndReason.FINAL, event.at_s)
            case e.AttemptEnded(outcome=AttemptOutcome.CANCELLED) | e.TurnAbandoned() | e.HostRestarted():
                self._left = _End(EndReason.CANCELLED, event.at_s)
            case e.ProgramEnded():
                self._end = self._end or _End(event.reason, event.at_s)
            case e.VerdictArrived():
                self._verdicts.append(event.verdict)
                self._end = self._end or _End(EndReason.VERDICT, event.at_s)

    def _hear_command(self, entry: Entry, command: c.Command) -> None:
        match command:
            case c.RecordDecision():
                self._decisions.append(_explain(entry, command))
                if command.reason == c.ESCALATION:
                    self._end = None  # it is open again
            case c.Dispatch():
                if command.decision_id is not None:
                    self._dispatched.add(command.decision_id)
                if command.backend_id not in self._backend_ids:
                    self._backend_ids.append(command.backend_id)
            case c.RecordPropensities():
                self._decisions = [_with_propensities(d, command) for d in self._decisions]
            case c.RecordCredit():
                self._n_corrections += command.decision_id in self._credits
                self._credits[command.decision_id] = command
            case c.Archive():
                self._record = command.program
            case c.EndTurn():
                self._left = _End(_LEFT_AS.get(command.outcome), entry.event.at_s)
                if command.outcome is TurnOutcome.REJECTED:
                    self._refusals.append(f"turn {command.turn_id}: {command.status} {command.code}, {command.message}")

    def explanation(self, program_id: str, concerning: Concerning) -> Explanation:
        """All of it together, after the last entry."""
        record = concerning.record() or self._record
        end = self._ending(record, is_forgotten=record is None and concerning.is_remembered is False)
        credit = self._credits[max(self._credits)] if self._credits else None
        if credit is not None and credit.is_withdrawn:
            credit = None
        return Explanation(
            program_id=program_id,
            arrived_at_s=self._arrived_at_s or 0.0,
            decisions=tuple(self._marked(decision) for decision in self._decisions),
            n_turns=self._n_turns,
            backend_ids=tuple(self._backend_ids),
            wait_s=self._held.wait_s if self._has_commands else None,
            waiting=self._held.waiting,
            state=record.state if record is not None else None,
            end_reason=end.reason,
            ended_at_s=end.at_s,
            verdicts=tuple(self._verdicts),
            success=credit.success if credit is not None else None,
            cost_usd=credit.cost_usd if credit is not None else record.cost_usd if record is not None else None,
            reward=credit.reward if credit is not None else None,
            credits=tuple(_credited(one) for _, one in sorted(self._credits.items()) if not one.is_withdrawn),
            n_corrections=self._n_corrections,
            refusals=tuple(self._refusals),
            record=self._record,
            is_exact=concerning.is_exact,
        )

    def _ending(self, record: c.ProgramRecord | None, *, is_forgotten: bool) -> _End:
        """How it ended: by the router's word, which alone knows of ends that time brought; else by the events."""
        by_events = self._left if is_forgotten else self._end
        if record is None:
            return by_events or _End(None, None)
        if record.state in OPEN_STATES:
            return _End(None, None)
        if record.ended_at_s is None and by_events is not None:
            return by_events
        return _End(record.end_reason, record.ended_at_s)

    def _marked(self, decision: DecisionExplained) -> DecisionExplained:
        """Whether an offered attempt was taken: by the archived record, else by whether a turn was sent out."""
        if decision.reason != c.ESCALATION or not self._has_commands:
            return decision
        if self._record is None:
            is_taken = decision.decision_id in self._dispatched
        else:
            ran = (self._record.decision_id, *(attempt.decision_id for attempt in self._record.attempts))
            is_taken = decision.decision_id in ran
        return msgspec.structs.replace(decision, is_taken=is_taken)


def _credited(credit: c.RecordCredit) -> CreditExplained:
    return CreditExplained(
        decision_id=credit.decision_id,
        model=credit.model,
        success=credit.success,
        cost_usd=credit.cost_usd,
        reward=credit.reward,
    )


def _with_propensities(decision: DecisionExplained, command: c.RecordPropensities) -> DecisionExplained:
    """The decision with the propensities that were estimated after it."""
    if decision.decision_id != command.decision_id or len(decision.candidates) != len(command.propensities):
        return decision
    estimated = zip(decision.candidates, command.propensities, strict=True)
    candidates = tuple(msgspec.structs.replace(view, propensity=p) for view, p in estimated)
    return msgspec.structs.replace(decision, candidates=candidates)


def _explain(entry: Entry, decision: c.RecordDecision) -> DecisionExplained:
    at_s = entry.event.at_s
    return DecisionExplained(
        decision_id=decision.decision_id,
        sequence=entry.sequence,
        at_s=at_s,
        policy=decision.policy,
        learner_version=decision.learner_version,
        context_version=decision.context_version,
        context=decision.context,
        chosen=decision.chosen,
        reason=decision.reason,
        routed=decision.routed,
        candidates=tuple(
            CandidateExplained(
                candidate=view.candidate,
                is_chosen=view.candidate == decision.chosen,
                score=view.score,
                mean=view.mean,
                width=view.width,
                propensity=view.propensity,
                n_running=view.n_running,
                n_held=view.n_held,
                headroom_ratio=view.headroom_ratio,
                expected_success=view.expected_success,
                wait_s=view.wait_s,
                wait_low_s=view.wait_low_s,
                wait_high_s=view.wait_high_s,
                signals=tuple(
                    SignalAge(name=name, value=signal.value, age_s=at_s - signal.observed_at_s)
                    for name, signal in sorted(view.signals.items())
                ),
            )
            for view in decision.candidates
        ),
        unaffordable=decision.unaffordable,
    )
