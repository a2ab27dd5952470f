"""The replay host: recorded events go through a machine again, and its commands come back.

Where a segment's header does not continue the one before (another configuration, seed or version), the machine is
built anew and takes over the state, exactly as the live host did when it restarted.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loadwise.kernel.commands import Command
from loadwise.kernel.errors import JournalError
from loadwise.kernel.machine import Follower, Machine
from loadwise.policy.standin import StandIn

from . import files
from .entry import Entry, Header
from .reader import Reader, TornTail, read_header
from .snapshot import Snapshot, read_snapshot

MakeMachine = Callable[[Header], Machine]


class Step(NamedTuple):
    """One entry and what the machine answered now."""

    entry: Entry
    commands: list[Command]


def recorded_machine(header: Header) -> Machine:
    """The machine of this loadwise that a header describes; it imports nobody's classes.

    Raises:
        JournalError: the header names a policy class outside loadwise (code `import_refused`).
    """
    config = _settings().config_from_builtins(header.config)
    refused = sorted(_settings().policy_classes(config))
    if refused:
        raise JournalError(
            f"the journal's header names the policy class {', '.join(refused)}; reading a journal imports no class "
            "unless told to (--allow-import), for importing runs its code",
            code="import_refused",
        )
    machine: Machine = _settings().open_stack(config, header.seed)
    return machine


def importing_machine(header: Header) -> Machine:
    """As `recorded_machine`, but imports and runs whatever policy class the header names: for journals of one's own."""
    machine: Machine = _settings().open_stack(_settings().config_from_builtins(header.config), header.seed)
    return machine


def machine_trusting(own: Header, messages: list[str]) -> MakeMachine:
    """Makes recorded machines, and imports those policy classes that `own`, the header of this run, names itself.

    In the place of any other stands one that only remembers: recovery takes its decisions as they were recorded.
    """
    settings = _settings()
    trusted = settings.policy_classes(settings.config_from_builtins(own.config))

    def resolve(path: str) -> Any:
        if path in trusted:
            return settings.import_class(path)
        message = f"the policy class {path} of the journal is not imported, for this configuration does not name it"
        if message not in messages:
            messages.append(message)
        return StandIn

    def make(header: Header) -> Machine:
        machine: Machine = settings.open_stack(
            settings.config_from_builtins(header.config), header.seed, resolve=resolve
        )
        return machine

    return make


def _settings() -> Any:
    # By name, because settings stands above this room on the stair.
    return importlib.import_module("loadwise.settings")


class Regeneration:
    """One pass of a journal through a machine, from its begin or from a snapshot."""

    def __init__(self, reader: Reader, machine: Machine, make_machine: MakeMachine) -> None:
        self.machine = machine
        self.header = reader.header
        self.last_sequence = reader.header.first_sequence - 1
        self.last_at_s = reader.header.starts_at_s
        self.segment_number = 0
        self._reader = reader
        self._make_machine = make_machine

    @property
    def torn(self) -> TornTail | None:
        """The journal's torn tail; known once `steps` is exhausted."""
        return self._reader.torn

    def entries(self) -> Iterator[Entry]:
        """The entries in order, with `machine` being the one that each belongs to. The caller lets it `handle`.

        Raises:
            JournalError: a damaged journal, or a state that another configuration cannot take over.
        """
        for segment in self._reader.segments():
            if not segment.header.continues(self.header):
                self.machine = hand_over(self.machine, segment.header, self._make_machine)
            self.header = segment.header
            self.segment_number = segment.number
            for entry in segment.entries():
                yield entry
                self.last_sequence = entry.sequence
                self.last_at_s = entry.event.at_s

    def steps(self, *, follows: bool = False) -> Iterator[Step]:
        """Every entry with the regenerated commands.

        Args:
            follows: let the machine decide as it was recorded, where it can (`Follower`).
        """
        for entry in self.entries():
            if follows and isinstance(self.machine, Follower):
                self.machine.follow(entry.decisions)
            yield Step(entry, self.machine.handle(entry.event))


def hand_over(machine: Machine, header: Header, make_machine: MakeMachine) -> Machine:
    """The machine of another header in the state of this one.

    Raises:
        JournalError: the new machine refuses the state.
    """
    successor = make_machine(header)
    refusal = _load(successor, machine.dump())
    if refusal is not None:
        raise JournalError(
            f"the state before sequence {header.first_sequence} cannot be taken over by configuration "
            f"{header.config_digest} of loadwise {header.loadwise_version}: {refusal}"
        )
    return successor


def _load(machine: Machine, state: bytes) -> str | None:
    try:
        machine.load(state)
    except Exception as error:  # a state that does not fit may raise anything; the half-loaded machine is thrown away
        return f"{type(error).__name__}: {error}"
    return None


def from_begin(path: Path, make_machine: MakeMachine) -> Regeneration:
    """Regenerate from the first entry that is still kept.

    Raises:
        JournalError: no journal, or its first segments are gone and the snapshot that stands for them is unusable.
    """
    reader = Reader(path)
    if reader.header.first_sequence == 1:
        return Regeneration(reader, make_machine(reader.header), make_machine)
    first = files.list_segments(path)[0].number
    problem = f"there is no snapshot {first}"
    if files.snapshot_path(path, first).exists():
        found = _from_snapshot(path, first, make_machine)
        if isinstance(found, Regeneration):
            return found
        problem = found
    raise JournalError(
        f"journal {str(path)!r} begins at sequence {reader.header.first_sequence}, and {problem}",
        code="journal_corrupt",
    )


def from_snapshot(
    path: Path,
    make_machine: MakeMachine,
    messages: list[str],
    *,
    newest: int | None = None,
    sequence: int | None = None,
) -> Regeneration:
    """Regenerate from the latest usable snapshot, else from the begin; what was unusable is told in `messages`.

    Args:
        newest: the highest segment number to begin at.
        sequence: the highest sequence that a snapshot should stand for; where each stands for a higher one, the latest
            is taken all the same.
    """
    segments = {s.number for s in files.list_segments(path)}
    numbers = [n for n, _ in reversed(files.list_snapshots(path)) if n in segments and (newest is None or n <= newest)]
    if sequence is not None:
        early = [n for n in numbers if read_header(files.segment_path(path, n))[0].first_sequence - 1 <= sequence]
        numbers = early or numbers
    for number in numbers:
        found = _from_snapshot(path, number, make_machine)
        if isinstance(found, Regeneration):
            return found
        messages.append(f"{found}; going further back")
    return from_begin(path, make_machine)


def _from_snapshot(path: Path, number: int, make_machine: MakeMachine) -> Regeneration | str:
    reader = Reader(path, from_segment=number)
    try:
        snapshot: Snapshot = read_snapshot(files.snapshot_path(path, number))
    except JournalError as error:
        return error.message
    if snapshot.sequence != reader.header.first_sequence - 1:
        return (
            f"snapshot {number} stands for sequence {snapshot.sequence}, but its segment begins at "
            f"{reader.header.first_sequence}"
        )
    machine = make_machine(reader.header)
    refusal = _load(machine, snapshot.state)
    if refusal is not None:
        return f"snapshot {number} (loadwise {snapshot.loadwise_version}) cannot be loaded: {refusal}"
    return Regeneration(reader, machine, make_machine)
