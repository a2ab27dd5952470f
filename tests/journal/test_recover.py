"""After any death of its writer, a journal gives back the machine that wrote it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_fakes import FakeMachine, header, journal, life, make_machine, write

from loadwise.journal import files
from loadwise.journal.entry import Header, make_header
from loadwise.journal.parity import replay
from loadwise.journal.reader import Damage, read
from loadwise.journal.recover import recover, resume
from loadwise.journal.snapshot import SNAPSHOT_SPACING, read_snapshot
from loadwise.journal.store import JournalWriter
from loadwise.kernel.errors import JournalError
from loadwise.kernel.events import HostRestarted, TurnArrived
from loadwise.kernel.stack import Stack
from loadwise.settings import open_stack, parse_config

HERE = Path(__file__).parent


@given(n_events=st.integers(0, 60), segment_bytes=st.sampled_from([1500, 4000, 1 << 20]))
@settings(max_examples=30, deadline=None)
def test_recovery_restores_the_machine(
    n_events: int, segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Stopped after any number of entries, with any number of snapshots, the machine is the one that wrote."""
    path = tmp_path_factory.mktemp("recover") / "j"
    machine = journal(path, life(10)[:n_events], segment_bytes=segment_bytes)
    recovered = recover(path, make_machine)
    assert recovered.machine.dump() == machine.dump()
    assert recovered.next_sequence == n_events + 1
    assert (recovered.truncated_bytes, recovered.messages) == (0, ())


def test_recovery_after_every_truncation_of_the_last_entry(tmp_path: Path) -> None:
    """Cut at every byte of its last entry, a journal recovers to the entry before, says so, and can be written on."""
    before = journal(tmp_path / "j", life(2)[:-1])
    size = (tmp_path / "j" / "000001.journal").stat().st_size
    with JournalWriter(tmp_path / "j", header()) as writer:
        write(writer, FakeMachine(7, 0.1), life(2)[-1:])
    data = (tmp_path / "j" / "000001.journal").read_bytes()
    for end in range(size + 1, len(data)):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "000001.journal").write_bytes(data[:end])
        recovered = recover(tmp_path / "cut", make_machine)
        assert recovered.machine.dump() == before.dump()
        assert (recovered.next_sequence, recovered.last_at_s) == (12, 6.0)
        assert recovered.truncated_bytes == end - size
        assert recovered.messages == (
            f"000001.journal: {end - size} bytes at offset {size} after sequence 11 are a torn tail: cut off",
        )
        assert (tmp_path / "cut" / "000001.journal").read_bytes() == data[:size]


def test_recovery_reads_only_what_follows_the_snapshot(tmp_path: Path) -> None:
    """The latest snapshot stands for everything before it."""
    machine = journal(tmp_path / "j", life(20), segment_bytes=4000)
    last = files.list_snapshots(tmp_path / "j")[-1]
    recovered = recover(tmp_path / "j", make_machine)
    assert recovered.n_replayed == 120 - read_snapshot(last.path).sequence < 40
    assert recovered.machine.dump() == machine.dump()


def spoil_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_byte, "is torn or damaged; going further back"),
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "is torn or damaged; going further back"),
        (lambda p: p.write_bytes(b""), "is torn or damaged; going further back"),
        (lambda p: p.write_bytes((p.parent / "000002.snapshot").read_bytes()), "but its segment begins at"),
    ],
)
def test_an_unusable_snapshot_is_passed_over(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    """Recovery goes back to the snapshot before, else to the begin, says so, and ends at the same state."""
    machine = journal(tmp_path / "j", life(12), segment_bytes=7000)
    snapshots = files.list_snapshots(tmp_path / "j")
    assert [s.number for s in snapshots] == [2, 3]
    spoil(snapshots[-1].path)
    recovered = recover(tmp_path / "j", make_machine)
    assert message in recovered.messages[0]
    assert recovered.machine.dump() == machine.dump()
    snapshots[0].path.write_bytes(b"gone")
    recovered = recover(tmp_path / "j", make_machine)
    assert len(recovered.messages) == 2
    assert recovered.n_replayed == 72
    assert recovered.machine.dump() == machine.dump()


class ForgetfulMachine(FakeMachine):
    """A later version that cannot read the state of the one before."""

    def load(self, state: bytes) -> None:
        raise KeyError("learners")


def test_a_snapshot_that_does_not_load_is_passed_over(tmp_path: Path) -> None:
    """A state that the machine refuses is left aside; the events say the same."""
    machine = journal(tmp_path / "j", life(12), segment_bytes=7000)
    recovered = recover(tmp_path / "j", lambda of: ForgetfulMachine(of.seed, of.config["bonus"]))
    assert "cannot be loaded: KeyError: 'learners'; going further back" in recovered.messages[0]
    assert recovered.machine.dump() == machine.dump()


def test_without_first_segments_and_snapshot_recovery_gives_up(tmp_path: Path) -> None:
    """Where nothing stands for the dropped segments, the error says which snapshot is missed."""
    journal(tmp_path / "j", life(20), segment_bytes=2000, keep_segments=2)
    for snapshot in files.list_snapshots(tmp_path / "j"):
        snapshot.path.unlink()
    with pytest.raises(JournalError, match=r"begins at sequence \d+, and there is no snapshot \d+"):
        recover(tmp_path / "j", make_machine)


def test_damage_is_not_recovered_from(tmp_path: Path) -> None:
    """A damaged middle stops recovery and leaves the file as it is."""
    journal(tmp_path / "j", life(2))
    path = tmp_path / "j" / "000001.journal"
    spoil_byte(path)
    damaged = path.read_bytes()
    with pytest.raises(Damage):
        recover(tmp_path / "j", make_machine)
    with pytest.raises(Damage):
        JournalWriter(tmp_path / "j", header())
    assert path.read_bytes() == damaged


def test_recovery_needs_the_lock(tmp_path: Path) -> None:
    """A journal that is being written is not cut."""
    journal(tmp_path / "j", life(1))
    with JournalWriter(tmp_path / "j", header()), pytest.raises(JournalError, match="is being written by process"):
        recover(tmp_path / "j", make_machine)


def test_a_machine_that_answers_otherwise_is_told(tmp_path: Path) -> None:
    """Recovering with another policy works, and says from where on it is not the machine that wrote."""
    journal(tmp_path / "j", life(12))
    recovered = recover(tmp_path / "j", lambda of: FakeMachine(of.seed, 5.0))
    assert "led to other commands than recorded, first sequence" in recovered.messages[0]


POOL = {
    "models": {"cheap": {}, "dear": {"usd_per_million": {"input": 9}}},
    "backends": [{"name": "a", "model": "cheap"}, {"name": "b", "model": "dear"}],
}


def stack_of(policy: dict[str, Any], seed: int = 1) -> Stack:
    return open_stack({**POOL, "router": {"policy": policy}}, seed)


@pytest.mark.parametrize("policy", ["lints", "random", "mixing"])
def test_recovery_takes_decisions_as_they_were_recorded(policy: str, tmp_path: Path) -> None:
    """Another policy, seed or linear algebra does not choose anew what was carried out: bindings stand."""
    options = {"weights": {"cheap": 0.5, "dear": 0.5}} if policy == "mixing" else {}
    stack = stack_of({"name": policy, "options": options})
    with JournalWriter(tmp_path / "j", header()) as writer:
        for n in range(20):
            event = TurnArrived(at_s=float(n), turn_id=n + 1, program_id=f"p{n}")
            writer.append(event, stack.handle(event))
    models = [program.model for program in stack.machine_by_name["router"].table.by_id.values()]
    assert len(set(models)) == 2
    other = stack_of({"name": "fixed", "options": {"candidate": "cheap"}}, seed=9)
    recovered = recover(tmp_path / "j", lambda of: other)
    assert recovered.machine is other
    assert [program.model for program in other.machine_by_name["router"].table.by_id.values()] == models
    assert not any("could not be followed" in message for message in recovered.messages)
    assert replay(tmp_path / "j", lambda of: stack_of({"name": policy, "options": options})).holds
    assert not replay(tmp_path / "j", lambda of: stack_of({"name": "fixed", "options": {"candidate": "cheap"}})).holds


def test_decisions_that_cannot_be_followed_are_told(tmp_path: Path) -> None:
    """The model that ran is no candidate any more."""
    stack = stack_of({"name": "fixed", "options": {"candidate": "dear"}})
    event = TurnArrived(at_s=0.0, turn_id=1, program_id="p")
    with JournalWriter(tmp_path / "j", header()) as writer:
        writer.append(event, stack.handle(event))
    smaller = {"models": {"cheap": {}}, "backends": [{"name": "a", "model": "cheap"}]}
    recovered = recover(tmp_path / "j", lambda of: open_stack(smaller, 1))
    assert "1 recorded decisions could not be followed" in recovered.messages[-1]


def test_a_clean_end_leaves_nothing_to_replay(tmp_path: Path) -> None:
    """However often a host starts and stops; where nothing happened no segment is begun."""
    for n in range(3):
        writer, recovered = resume(tmp_path / "j", header(), make_machine)
        assert recovered.n_replayed == 0 and recovered.messages == ()
        write(writer, recovered.machine, life(2, first=2 * n))
        writer.close()
    n_segments = len(files.list_segments(tmp_path / "j"))
    for _ in range(3):
        resume(tmp_path / "j", header(), make_machine)[0].close()
    assert len(files.list_segments(tmp_path / "j")) == n_segments
    assert replay(tmp_path / "j", make_machine).holds


def test_a_machine_that_cannot_be_dumped_goes_without_snapshots(tmp_path: Path) -> None:
    """The journal is whole all the same, and its host hears why at once."""
    heard: list[str] = []
    writer, recovered = resume(tmp_path / "j", header(), make_machine, segment_bytes=3000)
    writer.on_message = heard.append
    writer.dump = lambda: 1 // 0
    write(writer, recovered.machine, life(20))
    writer.close()
    assert heard and all("could not be dumped (integer division or modulo by zero)" in message for message in heard)
    assert list(writer.messages) == heard
    assert recover(tmp_path / "j", make_machine).n_replayed == 120


def test_a_machine_that_knows_more_than_the_journal_leaves_no_snapshot(tmp_path: Path) -> None:
    """An event whose entry was refused has not happened; the next start must not find its traces."""
    of = make_header(msgspec.to_builtins(parse_config(POOL)), seed=1)
    writer, recovered = resume(tmp_path / "j", of)
    for n in range(3):
        event = TurnArrived(at_s=float(n), turn_id=n + 1, program_id=f"p{n}")
        commands = recovered.machine.handle(event)
        if n < 2:
            writer.append(event, commands)
    writer.close()
    assert any("events that are not journaled" in message for message in writer.messages)
    writer, recovered = resume(tmp_path / "j", of)
    assert recovered.n_replayed == 2
    writer.close()
    assert replay(tmp_path / "j").holds


def test_old_snapshots_stay_at_intervals(tmp_path: Path) -> None:
    """What happened long ago is explained from the nearest, not from the first day."""
    writer, recovered = resume(tmp_path / "j", header(), make_machine, segment_bytes=1000)
    write(writer, recovered.machine, life(80))
    writer.close()
    numbers = [s.number for s in files.list_snapshots(tmp_path / "j")]
    n_segments = len(files.list_segments(tmp_path / "j"))
    assert n_segments > 3 * SNAPSHOT_SPACING
    assert numbers == [n for n in range(2, n_segments + 1) if n % SNAPSHOT_SPACING == 0 or n > n_segments - 2]


def test_a_host_resumes(tmp_path: Path) -> None:
    """Over many restarts, with rotation and a torn tail, the journal replays as one life."""
    events = life(12)
    for start in range(0, 72, 9):
        writer, recovered = resume(tmp_path / "j", header(), make_machine, segment_bytes=3000)
        assert recovered.is_new == (start == 0)
        if start:
            writer.append(HostRestarted(at_s=recovered.last_at_s), recovered.machine.handle(HostRestarted(at_s=0.0)))
        assert isinstance(recovered.machine, FakeMachine)
        write(writer, recovered.machine, events[start : start + 9])
        writer.close()
        with open(files.list_segments(tmp_path / "j")[-1].path, "ab") as file:
            file.write(b"\x00torn")
    report = replay(tmp_path / "j", make_machine)
    assert report.holds
    assert (report.n_entries, report.truncated_bytes) == (72 + 7, 5)


def test_a_changed_configuration_takes_over_the_state(tmp_path: Path) -> None:
    """After a restart under another configuration the machine keeps what it learned, and replay does the same."""
    journal(tmp_path / "j", life(6))
    changed = header({"bonus": 0.9})
    for first in (6, 12):
        writer, recovered = resume(tmp_path / "j", changed, make_machine)
        machine = recovered.machine
        assert isinstance(machine, FakeMachine)
        assert (machine.n_decisions, machine._bonus) == (first, 0.9)
        assert recovered.n_replayed == (36 if first == 6 else 0), "a clean end leaves nothing to replay"
        write(writer, machine, life(6, first=first))
        writer.close()
    assert recovered.header.config == {"bonus": 0.9}
    assert len(files.list_segments(tmp_path / "j")) == 4
    assert replay(tmp_path / "j", make_machine).holds
    assert recover(tmp_path / "j", make_machine).machine.dump() == machine.dump()


def test_a_configuration_that_refuses_the_state_changes_nothing(tmp_path: Path) -> None:
    """The error names the configuration, and the host may still start under the old one."""

    def make(of: Header) -> FakeMachine:
        return ForgetfulMachine(7, 0.9) if of.config == {"bonus": 0.9} else make_machine(of)

    journal(tmp_path / "j", life(2))
    with pytest.raises(JournalError, match="cannot be taken over by configuration"):
        resume(tmp_path / "j", header({"bonus": 0.9}), make)
    writer, recovered = resume(tmp_path / "j", header(), make)
    assert recovered.next_sequence == 13
    writer.close()


@pytest.mark.parametrize("round_", range(4))
def test_kill_9_loses_nothing_that_was_flushed(round_: int, tmp_path: Path) -> None:
    """A real writer, killed at a random moment in the midst of rotation and snapshots, loses no flushed entry."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "journal_fakes.py"), str(tmp_path / "j")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(50 + 437 * round_)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
    flushed = max(int(line) for line in lines if line.endswith(b"\n"))
    recovered = recover(tmp_path / "j", make_machine)
    assert recovered.next_sequence > flushed
    entries = list(read(tmp_path / "j"))
    assert [e.sequence for e in entries] == list(range(1, recovered.next_sequence))
    expected = FakeMachine(7, 0.1)
    for entry in entries:
        expected.handle(entry.event)
    assert recovered.machine.dump() == expected.dump()
    arrived = {e.event.program_id for e in entries if isinstance(e.event, TurnArrived)}
    assert isinstance(recovered.machine, FakeMachine)
    assert set(recovered.machine.model_by_program) <= arrived


def test_a_snapshot_that_cannot_be_written_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without snapshots recovery takes longer; the journal is whole."""
    real = files.write_whole

    def refuse(path: Path, parts: Any) -> None:
        if path.suffix == files.SNAPSHOT_SUFFIX:
            raise OSError(28, "No space left on device")
        real(path, parts)

    monkeypatch.setattr(files, "write_whole", refuse)
    machine = make_machine(header())
    with JournalWriter(tmp_path / "j", header(), dump=machine.dump, segment_bytes=2000) as writer:
        write(writer, machine, life(6))
    assert "snapshot of segment 2 was not written: [Errno 28] No space left on device" in writer.messages
    assert recover(tmp_path / "j", make_machine).machine.dump() == machine.dump()


def test_a_segment_torn_inside_its_header_is_dropped(tmp_path: Path) -> None:
    """Cut at any byte of a segment that has no entry yet, the journal ends with the segment before it."""
    source = tmp_path / "whole"
    writer, recovered = resume(source, header(), make_machine)
    write(writer, recovered.machine, life(6))
    n_entries = writer.last_sequence
    writer.rotate()
    writer.close()
    last = sorted(source.glob("*.journal"))[-1]
    raw = last.read_bytes()
    for n_bytes in range(len(raw)):
        path = tmp_path / str(n_bytes)
        shutil.copytree(source, path)
        (path / last.name).write_bytes(raw[:n_bytes])
        assert sum(1 for _ in read(path)) == n_entries
        again, found = resume(path, header(), make_machine)
        assert found.next_sequence == n_entries + 1
        assert any("torn tail" in message for message in found.messages)
        again.close()
