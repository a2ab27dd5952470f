"""One program's life, told from the journal: what happened, what was done about it, when.

An entry is part of a story because of its event or because of its commands. Where the event is another program's, the
commands that concern this one are told alone, with what occasioned them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.fact import Fact

from .concern import Concern, Concerning
from .held import Held, HeldTurn
from .regenerate import MakeMachine, recorded_machine


class StoryLine(Fact, frozen=True, kw_only=True):
    """One thing that happened to a program, or that was done about it."""

    sequence: int
    at_s: float
    kind: str
    """Name of the event or command, in snake case; `held` where neither of them sent a turn out."""
    text: str
    is_command: bool = False
    occasion: str = ""
    """Of a command: what happened elsewhere that led to it, where that was no event of this program."""


def story(
    path: str | Path, program_id: str, make_machine: MakeMachine | None = recorded_machine
) -> tuple[StoryLine, ...]:
    """Every entry that concerns a program, in order.

    Args:
        make_machine: regenerates the commands; None tells what is recorded: events, decisions and credits.

    Raises:
        UnknownProgram: no entry names it.
        JournalError: a missing or damaged journal.
    """
    held = Held()
    lines: list[StoryLine] = []
    for concern in Concerning(Path(path), program_id, make_machine):
        lines += _entry_lines(concern)
        if make_machine is not None:
            lines += (_held_line(concern, turn) for turn in held.after(concern))
    return tuple(lines)


def render_story(lines: Sequence[StoryLine]) -> str:
    """A story as text: sequence, instant, what; what an entry led to is indented under its first line."""
    width = max((len(str(line.sequence)) for line in lines), default=1)
    rows: list[str] = []
    before: StoryLine | None = None
    for line in lines:
        is_first = before is None or before.sequence != line.sequence
        occasion = f" (when {line.occasion})" if is_first and line.occasion else ""
        indent = "" if is_first else "  -> "
        rows.append(f"{line.sequence:>{width}}  {line.at_s:12.6f} s  {indent}{line.kind}: {line.text}{occasion}")
        before = line
    return "\n".join(rows)


def _entry_lines(concern: Concern) -> list[StoryLine]:
    entry = concern.entry
    sequence, event = entry.sequence, entry.event
    others = "" if concern.is_own else _others_text(event)
    lines = [] if others else [_line(sequence, event.at_s, event, _event_text(event))]
    for command in concern.commands:
        text = _command_text(command)
        lines.append(_line(sequence, event.at_s, command, text, is_command=True, occasion=others))
    return lines


def _held_line(concern: Concern, turn: HeldTurn) -> StoryLine:
    text = f"turn {turn.turn_id} waits, {turn.waits_for}"
    return StoryLine(sequence=concern.entry.sequence, at_s=concern.entry.event.at_s, kind="held", text=text)


def _line(
    sequence: int, at_s: float, fact: e.Event | c.Command, text: str, *, is_command: bool = False, occasion: str = ""
) -> StoryLine:
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(fact).__name__).lower()
    return StoryLine(sequence=sequence, at_s=at_s, kind=kind, text=text, is_command=is_command, occasion=occasion)


def _event_text(event: e.Event) -> str:
    match event:
        case e.TurnArrived():
            return f"turn {event.turn_id} of {event.program_id} for {event.model}, about {event.prompt_tokens} tokens"
        case e.AttemptEnded():
            return _attempt_text(event)
        case e.TurnAbandoned():
            return f"the client of turn {event.turn_id} left"
        case e.ProgramEnded():
            return f"{event.program_id} ended ({event.reason})"
        case e.VerdictArrived():
            score = "" if event.verdict.score is None else f", score {event.verdict.score:g}"
            return f"{event.verdict.verdict}{score} by {event.verdict.verifier or 'the client'}"
        case e.SelectorAnswered():
            return f"the selector answered {event.model or 'nothing'} for decision {event.decision_id}"
        case e.HostRestarted():
            return "the host came back; open attempts are gone"
    return _cause_text(event)


def _attempt_text(event: e.AttemptEnded) -> str:
    usage = event.usage
    status = f" {event.status}" if event.status else ""
    tokens = f"{usage.prompt_tokens}+{usage.completion_tokens} tokens ({usage.cached_tokens} cached)"
    detail = f": {event.detail}" if event.detail else ""
    return f"attempt {event.attempt} of turn {event.turn_id} {event.outcome}{status}, {tokens}{detail}"


def _others_text(event: e.Event) -> str:
    """What happened to another program; empty for events that are nobody's."""
    match event:
        case e.TurnArrived():
            return "a turn of another program arrived"
        case e.AttemptEnded():
            return "an attempt of another program ended"
        case e.TurnAbandoned():
            return "the client of another program left"
        case e.ProgramEnded():
            return "another program ended"
        case e.VerdictArrived():
            return "another program was judged"
        case e.SelectorAnswered():
            return "the selector answered for another program"
    return ""


def _cause_text(event: e.Event) -> str:
    """An event that concerns no program by itself; it is told because of what it led to."""
    match event:
        case e.TimerFired():
            return event.timer
        case e.SignalsObserved():
            return f"{event.backend_id} was read"
        case e.BackendAdded():
            return f"{event.backend.name} joined"
        case e.BackendChanged():
            return f"{event.backend_id} is {event.health}"
        case e.BackendRemoved():
            return f"{event.backend_id} was taken out"
        case e.ModelForgotten():
            return f"{event.model} is another model now"
    return type(event).__name__


def _command_text(command: c.Command) -> str:
    match command:
        case c.Dispatch():
            to = f"to {command.backend_id} ({command.model})"
            in_all = " in all" if command.attempt > 1 else ""
            waited = f"dispatched after {command.wait_s:.3f} s of waiting{in_all}"
            when = waited if command.wait_s else "dispatched at once"
            return f"attempt {command.attempt} of turn {command.turn_id} {to}, {when}"
        case c.CancelAttempt():
            return f"attempt {command.attempt} of turn {command.turn_id}"
        case c.EndTurn():
            return f"turn {command.turn_id} {command.outcome}: {command.status} {command.code}, {command.message}"
        case c.SetTimer():
            return f"{command.timer} at {command.fires_at_s:.6f} s"
        case c.AskSelector():
            return f"decision {command.decision_id} among {', '.join(command.candidates)}"
        case c.Verify():
            return f"by {command.verifier}"
        case c.RecordDecision():
            return f"decision {command.decision_id}: {command.chosen} by {command.policy} ({command.reason})"
        case c.RecordPropensities():
            return f"decision {command.decision_id}: {', '.join(f'{p:.4g}' for p in command.propensities)}"
        case c.RecordCredit():
            if command.is_withdrawn:
                taken_back = command.replaced_reward or 0.0
                return f"decision {command.decision_id} ({command.model}): reward {taken_back:.6g} taken back"
            return (
                f"decision {command.decision_id} ({command.model}): success {command.success:g}, "
                f"cost ${command.cost_usd:.6g}, reward {command.reward:.6g}"
            )
        case c.Archive():
            return f"{command.program.program_id} left memory, {command.program.state}"
