"""Why a program ran where it ran: its decision, what that rested on, and what came of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadwise.kernel.commands import (
    ESCALATION,
    Archive,
    Command,
    Dispatch,
    EndTurn,
    ProgramRecord,
    RecordCredit,
    RecordDecision,
    RecordPropensities,
)
from loadwise.kernel.events import (
    AttemptEnded,
    Event,
    HostRestarted,
    ProgramEnded,
    TurnAbandoned,
    TurnArrived,
    VerdictArrived,
)
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import AttemptOutcome, EndReason, ProgramState, TurnOutcome, Verdict
from loadwise.policy.picking import TIE_RATIO
from loadwise.router.program import OPEN_STATES

from .concern import Concern, Concerning
from .entry import Entry
from .held import Held, HeldTurn
from .regenerate import MakeMachine, recorded_machine


class SignalAge(Fact, frozen=True, kw_only=True):
    """A signal as the decision saw it."""

    name: str
    value: float
    age_s: float


class CandidateExplained(Fact, frozen=True, kw_only=True):
    """One candidate of a decision; None where the policy reports no such number."""

    candidate: str
    is_chosen: bool
    score: float | None = None
    mean: float | None = None
    width: float | None = None
    propensity: float | None = None
    n_running: int = 0
    n_held: int = 0
    headroom_ratio: float | None = None
    expected_success: float | None = None
    wait_s: float | None = None
    wait_low_s: float | None = None
    wait_high_s: float | None = None
    signals: tuple[SignalAge, ...] = ()


class DecisionExplained(Fact, frozen=True, kw_only=True):
    """One decision with all that it rested on."""

    decision_id: int
    sequence: int
    at_s: float
    policy: str
    learner_version: str
    context_version: str
    context: tuple[float, ...]
    chosen: str
    reason: str
    routed: str | None = None
    """The selector's choice, where the program was diverted from it."""
    candidates: tuple[CandidateExplained, ...]
    is_taken: bool = True
    """False for a further attempt that was offered and of which no turn ran: waiting still, or withdrawn."""
    unaffordable: tuple[str, ...] = ()
    """Models that were left out because the hour's dollars did not allow the first turn on them."""


class CreditExplained(Fact, frozen=True, kw_only=True):
    """What one attempt of a program earned, as it stands."""

    decision_id: int
    model: str
    success: float
    cost_usd: float
    reward: float


class Explanation(Fact, frozen=True, kw_only=True):
    """Why a program ran on its model, and what came of it."""

    program_id: str
    arrived_at_s: float
    decisions: tuple[DecisionExplained, ...]
    """More than one where another model took over after failures."""
    n_turns: int
    backend_ids: tuple[str, ...] = ()
    wait_s: float | None = None
    """Seconds its turns were held by us, those that were evicted or left meanwhile included, and those that wait still
    left out; None where the commands were not regenerated."""
    waiting: tuple[HeldTurn, ...] = ()
    """Turns that wait still."""
    state: ProgramState | None = None
    """Where it stands after the last entry, or when it left memory; None where the commands were not regenerated, and
    for a program that was forgotten because it never got an answer."""
    end_reason: EndReason | None = None
    ended_at_s: float | None = None
    verdicts: tuple[Verdict, ...] = ()
    success: float | None = None
    cost_usd: float | None = None
    reward: float | None = None
    """Of the last attempt, by the credit that is in force."""
    credits: tuple[CreditExplained, ...] = ()
    """Of every attempt that was judged, in their order: more than one where the program was tried again."""
    n_corrections: int = 0
    """Credits that were taken back before, by another on the same attempt."""
    refusals: tuple[str, ...] = ()
    """What its turns were told that were refused."""
    record: ProgramRecord | None = None
    """As archived, once it has left the router's memory."""
    is_exact: bool = True
    """False where the regenerated commands are not those recorded: another version of loadwise reads than wrote."""


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
        self._credits: dict[int, RecordCredit] = {}
        """By decision the last one."""
        self._n_corrections = 0
        self._record: ProgramRecord | None = None
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

    def _hear_event(self, event: Event) -> None:
        match event:
            case TurnArrived():
                self._n_turns += 1
                self._left = None
                if event.is_final:
                    self._final_turn_ids.add(event.turn_id)
            case AttemptEnded(outcome=AttemptOutcome.COMPLETED):
                if event.turn_id in self._final_turn_ids:
                    self._end = self._end or _End(EndReason.FINAL, event.at_s)
            case AttemptEnded(outcome=AttemptOutcome.CANCELLED) | TurnAbandoned() | HostRestarted():
                self._left = _End(EndReason.CANCELLED, event.at_s)
            case ProgramEnded():
                self._end = self._end or _End(event.reason, event.at_s)
            case VerdictArrived():
                self._verdicts.append(event.verdict)
                self._end = self._end or _End(EndReason.VERDICT, event.at_s)

    def _hear_command(self, entry: Entry, command: Command) -> None:
        match command:
            case RecordDecision():
                self._decisions.append(_explain(entry, command))
                if command.reason == ESCALATION:
                    self._end = None  # it is open again
            case Dispatch():
                if command.decision_id is not None:
                    self._dispatched.add(command.decision_id)
                if command.backend_id not in self._backend_ids:
                    self._backend_ids.append(command.backend_id)
            case RecordPropensities():
                self._decisions = [_with_propensities(d, command) for d in self._decisions]
            case RecordCredit():
                self._n_corrections += command.decision_id in self._credits
                self._credits[command.decision_id] = command
            case Archive():
                self._record = command.program
            case EndTurn():
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

    def _ending(self, record: ProgramRecord | None, *, is_forgotten: bool) -> _End:
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
        if decision.reason != ESCALATION or not self._has_commands:
            return decision
        if self._record is None:
            is_taken = decision.decision_id in self._dispatched
        else:
            ran = (self._record.decision_id, *(attempt.decision_id for attempt in self._record.attempts))
            is_taken = decision.decision_id in ran
        return msgspec.structs.replace(decision, is_taken=is_taken)


def _credited(credit: RecordCredit) -> CreditExplained:
    return CreditExplained(
        decision_id=credit.decision_id,
        model=credit.model,
        success=credit.success,
        cost_usd=credit.cost_usd,
        reward=credit.reward,
    )


def _with_propensities(decision: DecisionExplained, command: RecordPropensities) -> DecisionExplained:
    """The decision with the propensities that were estimated after it."""
    if decision.decision_id != command.decision_id or len(decision.candidates) != len(command.propensities):
        return decision
    estimated = zip(decision.candidates, command.propensities, strict=True)
    candidates = tuple(msgspec.structs.replace(c, propensity=p) for c, p in estimated)
    return msgspec.structs.replace(decision, candidates=candidates)


def _explain(entry: Entry, decision: RecordDecision) -> DecisionExplained:
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
                candidate=c.candidate,
                is_chosen=c.candidate == decision.chosen,
                score=c.score,
                mean=c.mean,
                width=c.width,
                propensity=c.propensity,
                n_running=c.n_running,
                n_held=c.n_held,
                headroom_ratio=c.headroom_ratio,
                expected_success=c.expected_success,
                wait_s=c.wait_s,
                wait_low_s=c.wait_low_s,
                wait_high_s=c.wait_high_s,
                signals=tuple(
                    SignalAge(name=name, value=signal.value, age_s=at_s - signal.observed_at_s)
                    for name, signal in sorted(c.signals.items())
                ),
            )
            for c in decision.candidates
        ),
        unaffordable=decision.unaffordable,
    )


def render_why(explanation: Explanation) -> str:
    """An explanation as text, one decision after the other."""
    lines = [f"program {explanation.program_id}: {_count(explanation.n_turns, 'turn')}, {_ending(explanation)}"]
    for decision in explanation.decisions:
        lines += _decision_lines(decision)
    if explanation.backend_ids:
        lines.append(f"ran on {', '.join(explanation.backend_ids)}")
    if explanation.wait_s is not None:
        lines.append(f"waited {explanation.wait_s:.3f} s")
    lines += [f"turn {one.turn_id} waits since {one.since_s:.3f} s, {one.waits_for}" for one in explanation.waiting]
    lines += [f"refused {text}" for text in explanation.refusals]
    lines += [_verdict_line(verdict) for verdict in explanation.verdicts]
    for credit in explanation.credits:
        of = f" of decision {credit.decision_id} ({credit.model})" if len(explanation.credits) > 1 else ""
        lines.append(
            f"credit{of}: success {_number(credit.success)}, cost ${_number(credit.cost_usd)}, "
            f"reward {_number(credit.reward)}"
        )
    if explanation.n_corrections:
        lines.append(f"the credit was corrected {_count(explanation.n_corrections, 'time')}; only the last counts")
    if not explanation.is_exact:
        lines.append("note: this loadwise does not answer as the one that wrote the journal; commands may differ")
    return "\n".join(lines)


def _ending(explanation: Explanation) -> str:
    if explanation.ended_at_s is None:
        return "open"
    lasted = explanation.ended_at_s - explanation.arrived_at_s
    reason = f" ({explanation.end_reason})" if explanation.end_reason is not None else ""
    return f"ended after {lasted:.3f} s{reason}"


def _decision_lines(decision: DecisionExplained) -> Iterator[str]:
    yield (
        f"decision {decision.decision_id} at {decision.at_s:.3f} s: {decision.chosen} "
        f"by {decision.policy} ({decision.reason}{_from(decision)}; learner {decision.learner_version}, "
        f"context {decision.context_version})"
    )
    if not decision.is_taken:
        yield "    a further attempt was offered; nothing ran under it"
    for candidate in decision.candidates:
        mark = "*" if candidate.is_chosen else " "
        numbers = (
            f"{name} {_number(getattr(candidate, name))}"
            for name in ("score", "mean", "width", "propensity", "headroom_ratio", "expected_success")
            if getattr(candidate, name) is not None
        )
        load = f"{candidate.n_running} running, {candidate.n_held} held"
        yield f"  {mark} {candidate.candidate}: {', '.join((*numbers, *_wait(candidate), load))}"
        for signal in candidate.signals:
            yield f"      {signal.name} = {_number(signal.value)}, {signal.age_s:.3f} s old"
    best = _better_scored(decision)
    if best is not None:
        yield f"    explored: {best} has the higher score"
    for model in decision.unaffordable:
        yield f"    {model}: left out, the budget of dollars per hour does not allow it now"


def _wait(candidate: CandidateExplained) -> Iterator[str]:
    """The forecast of its wait, with the ends of its 80 % interval where those were recorded."""
    if candidate.wait_s is None:
        return
    ends = (candidate.wait_low_s, candidate.wait_high_s)
    interval = "" if ends == (None, None) else f" ({_number(ends[0])} to {_number(ends[1])})"
    yield f"wait {_number(candidate.wait_s)} s{interval}"


def _better_scored(decision: DecisionExplained) -> str | None:
    """Who has a higher score than whom the policy chose: it explored. None where nobody has, or it was not free."""
    scores = {c.candidate: c.score for c in decision.candidates if c.score is not None}
    chosen = scores.get(decision.chosen)
    if decision.reason != "policy" or chosen is None:
        return None
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] - chosen > TIE_RATIO * max(1.0, abs(scores[best])) else None


def _from(decision: DecisionExplained) -> str:
    return "" if decision.routed is None else f" from {decision.routed}"


def _verdict_line(verdict: Verdict) -> str:
    score = f", score {_number(verdict.score)}" if verdict.score is not None else ""
    by = f" by {verdict.verifier}" if verdict.verifier else ""
    version = f" (version {verdict.version})" if verdict.version else ""
    took = f", {_number(verdict.took_s)} s" if verdict.took_s is not None else ""
    cost = f", ${_number(verdict.cost_usd)}" if verdict.cost_usd else ""
    correction = ", a correction" if verdict.is_correction else ""
    why = f": {verdict.explanation}" if verdict.explanation else ""
    lines = [f"verdict: {verdict.verdict}{score}{by}{version}{took}{cost}{correction}{why}"]
    lines += [f"    {name}: {text}" for name, text in verdict.evidence.items()]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
