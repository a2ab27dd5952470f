"""Which entries of a journal concern one program, with the commands they led to."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import UnknownProgram
from loadwise.kernel.ids import ProgramId
from loadwise.kernel.stack import Stack
from loadwise.router.machine import Router

from . import files
from .entry import Entry, digest_commands
from .reader import Reader
from .regenerate import MakeMachine, Regeneration, from_begin, from_snapshot


class Concern(NamedTuple):
    """One entry that concerns a program: by its event, by its commands, or by both."""

    entry: Entry
    commands: list[c.Command]
    """Those that concern the program; of the entry's others nothing is said."""
    is_own: bool
    """Whether the event is the program's. If not, it may be another program's, and only the commands are this one's."""


class Concerning:
    """The entries of one program, with those of their commands that concern it."""

    def __init__(self, path: Path, program_id: str, make_machine: MakeMachine | None) -> None:
        self._path = path
        self._program_id = program_id
        self._make_machine = make_machine
        self._turn_ids: set[int] = set()
        self._decision_ids: set[int] = set()
        self._is_open = False
        self._run: Regeneration | None = None
        self.is_exact = True
        """False once the regenerated commands were not those recorded."""

    def __iter__(self) -> Iterator[Concern]:
        first, last = self._find()
        found = False
        for segment_number, entry, commands in self._steps(first):
            if self._make_machine is not None and digest_commands(commands) != entry.digest:
                self.is_exact = False
            is_ours = self._is_ours(entry.event)
            ours = [command for command in commands if self._is_ours_command(command)]
            if is_ours or ours:
                found = True
                yield Concern(entry, ours, is_ours)
            if segment_number > last and not self._is_open:
                break
        if not found:
            raise UnknownProgram(f"journal {str(self._path)!r} knows no program {self._program_id!r}", param="program")

    @property
    def is_remembered(self) -> bool | None:
        """Whether the router remembers the program after what was read; None where there is no router to ask."""
        router = self._router()
        return None if router is None else self._program_id in router.table.by_id

    def record(self) -> c.ProgramRecord | None:
        """The program as the router remembers it after what was read; None where it does not, or there is none."""
        router = self._router()
        program = None if router is None else router.table.by_id.get(ProgramId(self._program_id))
        return None if program is None else program.record()

    def _router(self) -> Router | None:
        machine = None if self._run is None else self._run.machine
        machines = machine.machine_by_name.values() if isinstance(machine, Stack) else ()
        return next((one for one in machines if isinstance(one, Router)), None)

    def _find(self) -> tuple[int, int]:
        """The first and the last segment whose bytes name the program: the others need not be decoded."""
        needle = self._program_id.encode()
        segments = files.list_segments(self._path)
        if len(segments) < 2:
            Reader(self._path)
            return 1, 1
        naming = [s.number for s in segments if needle and needle in s.path.read_bytes()]
        if not naming:
            raise UnknownProgram(f"journal {str(self._path)!r} knows no program {self._program_id!r}", param="program")
        return naming[0], naming[-1]

    def _steps(self, first: int) -> Iterator[tuple[int, Entry, list[c.Command]]]:
        if self._make_machine is None:
            for segment in Reader(self._path, from_segment=first).segments():
                for entry in segment.entries():
                    yield segment.number, entry, [*entry.decisions, *entry.propensities, *entry.credits]
            return
        if first > 1:
            run = from_snapshot(self._path, self._make_machine, [], newest=first)
        else:
            run = from_begin(self._path, self._make_machine)
        self._run = run
        for entry, commands in run.steps():
            yield run.segment_number, entry, commands

    def _is_ours(self, event: e.Event) -> bool:
        match event:
            case e.TurnArrived():
                if event.program_id != self._program_id:
                    return False
                self._turn_ids.add(event.turn_id)
                self._is_open = True
                return True
            case e.ProgramEnded() | e.VerdictArrived():
                return event.program_id == self._program_id
            case e.AttemptEnded() | e.TurnAbandoned():
                return event.turn_id in self._turn_ids
            case e.SelectorAnswered():
                return event.decision_id in self._decision_ids
            case e.HostRestarted():
                return self._is_open
        return False

    def _is_ours_command(self, command: c.Command) -> bool:
        match command:
            case c.RecordDecision() | c.AskSelector():
                if command.program_id != self._program_id:
                    return False
                self._decision_ids.add(command.decision_id)
                return True
            case c.Dispatch():
                if command.program_id != self._program_id:
                    return False
                self._turn_ids.add(command.turn_id)  # where the journal's begin is gone, its arrival is not there
                return True
            case c.Verify() | c.RecordCredit():
                return command.program_id == self._program_id
            case c.RecordPropensities():
                return command.decision_id in self._decision_ids
            case c.CancelAttempt() | c.EndTurn():
                return command.turn_id in self._turn_ids
            case c.Archive():
                if command.program.program_id != self._program_id:
                    return False
                self._is_open = False
                return True
        return False
