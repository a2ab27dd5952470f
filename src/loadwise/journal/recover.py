"""After a crash: the machine as it stood after the last whole entry, and the writer that goes on from there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadwise.kernel.commands import Archive, Command, RecordDecision
from loadwise.kernel.machine import Machine
from loadwise.kernel.stack import Stack

from . import files
from .entry import Entry, Header, digest_commands
from .index import Index
from .refill import Refill
from .regenerate import MakeMachine, Regeneration, from_snapshot, hand_over, machine_trusting, recorded_machine
from .repair import cut_torn_tail
from .store import JournalWriter


class Recovered(NamedTuple):
    """A machine in the state of its journal's last entry. The host appends `HostRestarted` itself."""

    machine: Machine
    header: Header
    """Under which the journal stands; its `epoch_unix_s` is what `at_s` goes on counting from."""
    next_sequence: int
    last_at_s: float
    truncated_bytes: int
    n_replayed: int
    messages: tuple[str, ...]
    """For the operator: a torn tail cut off, a snapshot passed over, a replay that went another way."""
    is_new: bool = False
    """There was no journal."""
    index_lacks_up_to: int = 0
    """Programs archived up to this sequence, and after what the index held, are not in it."""
    refill: Refill | None = None
    """Fills the index with them, meanwhile."""


def recover(
    path: str | Path,
    make_machine: MakeMachine = recorded_machine,
    *,
    index: Index | None = None,
    lock: files.JournalLock | None = None,
) -> Recovered:
    """Cut off a torn tail and bring a machine to where the journal ends.

    Args:
        make_machine: builds a machine in its first state from a segment's header.
        index: is caught up with the programs that were archived since it was last written.
        lock: the journal's lock where the caller holds it; otherwise it is held meanwhile.

    Raises:
        JournalError: no journal, another writer, or damage that is not a torn tail.
    """
    path = Path(path)
    held = lock if lock is not None else files.JournalLock(path)
    try:
        return _recover(path, make_machine, index)
    finally:
        if lock is None:
            held.release()


def _recover(path: Path, make_machine: MakeMachine, index: Index | None) -> Recovered:
    messages: list[str] = []
    torn = cut_torn_tail(path)[0] if files.list_segments(path) else None
    if torn is not None:
        messages.append(f"{torn}: cut off")
    run = from_snapshot(path, make_machine, messages, sequence=index.last_sequence if index is not None else None)
    first_sequence = run.last_sequence + 1
    is_index_behind = index is not None and first_sequence > index.last_sequence + 1
    if index is not None and is_index_behind:
        messages.append(
            f"the index lacks programs archived from sequence {index.last_sequence + 1} to {first_sequence - 1}"
        )
    n_different, first_different, n_otherwise = _replay(run, index)
    if n_different:
        messages.append(
            f"{n_different} entries led to other commands than recorded, first sequence {first_different}: "
            "the machine is not the one that wrote this journal"
        )
    if n_otherwise:
        messages.append(f"{n_otherwise} recorded decisions could not be followed: their programs are bound anew")
    return Recovered(
        machine=run.machine,
        header=run.header,
        next_sequence=run.last_sequence + 1,
        last_at_s=run.last_at_s,
        truncated_bytes=torn.n_bytes if torn is not None else 0,
        n_replayed=run.last_sequence + 1 - first_sequence,
        messages=tuple(messages),
        index_lacks_up_to=first_sequence - 1 if is_index_behind else 0,
    )


def _replay(run: Regeneration, index: Index | None) -> tuple[int, int, int]:
    """Run to the end with the recorded decisions.

    Returns:
        How many entries differed, the first that did, and how many recorded decisions did not come out again.
    """
    n_different = first_different = n_otherwise = 0
    for entry, commands in run.steps(follows=True):
        if digest_commands(commands) != entry.digest:
            n_different += 1
            first_different = first_different or entry.sequence
            n_otherwise += _n_otherwise(entry, commands)
        if index is not None:
            for command in commands:
                if type(command) is Archive:
                    index.add(entry.sequence, command.program)
    if index is not None:
        index.settle(run.last_sequence)
    return n_different, first_different, n_otherwise


def _n_otherwise(entry: Entry, commands: Sequence[Command]) -> int:
    made = {c.decision_id: c.chosen for c in commands if isinstance(c, RecordDecision)}
    return sum(made.get(recorded.decision_id) != recorded.chosen for recorded in entry.decisions)


def resume(
    path: str | Path,
    header: Header,
    make_machine: MakeMachine | None = None,
    *,
    index: Index | None = None,
    **writer_options: Any,
) -> tuple[JournalWriter, Recovered]:
    """Open a journal for writing, new or not, with the machine that stands at its end.

    Where `header` is not the one under which the journal stands, a machine of the new header takes the state over and
    a segment begins, so that replay does the same.

    Args:
        make_machine: builds machines from headers; None builds recorded machines that import the policy classes which
            `header` names, and no others; those are stood in for.
        writer_options: `segment_bytes`, `keep_segments`, `keep_artefacts`, `ends_with_snapshot` of `JournalWriter`.

    Raises:
        JournalError: as `recover` and `JournalWriter`; or the new machine refuses the state. Nothing was changed then
            but a torn tail cut off.
    """
    path = Path(path)
    messages: list[str] = []
    make_machine = machine_trusting(header, messages) if make_machine is None else make_machine
    lock = files.JournalLock(path)
    try:
        if files.list_segments(path):
            recovered = recover(path, make_machine, index=index, lock=lock)
            if not header.continues(recovered.header):
                successor = hand_over(recovered.machine, header, make_machine)
                recovered = recovered._replace(machine=successor)
        else:
            recovered = Recovered(make_machine(header), header, 1, 0.0, 0, 0, (), is_new=True)
        options = {"ends_with_snapshot": True, **writer_options}
        machine = recovered.machine
        if isinstance(machine, Stack):
            options["n_handled"] = lambda: machine.n_events
        writer = JournalWriter(path, header, lock=lock, index=index, dump=machine.dump, **options)
    except BaseException:
        lock.release()
        raise
    if index is not None and recovered.index_lacks_up_to:
        refill = Refill(path, index, recovered.index_lacks_up_to, make_machine)
        recovered = recovered._replace(refill=refill)
        refill.start()
    return writer, recovered._replace(header=writer.header, messages=(*recovered.messages, *messages))
