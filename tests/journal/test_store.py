"""The writer accepts what it can keep, and nothing after it could not."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_fakes import FakeMachine, header, journal, life, make_machine, write

from loadwise.journal import files, store
from loadwise.journal.entry import digest_config
from loadwise.journal.parity import replay
from loadwise.journal.reader import Reader, read
from loadwise.journal.store import JournalWriter
from loadwise.kernel.errors import JournalError, LawBroken
from loadwise.kernel.events import HostRestarted, TurnArrived, VerdictArrived
from loadwise.kernel.work import Verdict, VerdictKind

HERE = Path(__file__).parent


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Reopened, a journal continues its sequence, its clock and its last segment."""
    journal(tmp_path / "j", life(1))
    with JournalWriter(tmp_path / "j", header(epoch_unix_s=99.0)) as writer:
        assert (writer.last_sequence, writer.last_at_s) == (6, 3.0)
        assert writer.append(HostRestarted(at_s=3.0)) == 7
    assert [e.sequence for e in read(tmp_path / "j")] == [1, 2, 3, 4, 5, 6, 7]
    assert len(files.list_segments(tmp_path / "j")) == 1
    assert read(tmp_path / "j").header.epoch_unix_s == 0.0


def test_a_torn_tail_is_cut_off_before_writing_on(tmp_path: Path) -> None:
    """What follows a torn tail must not be written behind it."""
    journal(tmp_path / "j", life(1))
    with open(tmp_path / "j" / "000001.journal", "ab") as file:
        file.write(b"\xfeLW\xff torn")
    with JournalWriter(tmp_path / "j", header()) as writer:
        assert writer.torn is not None
        assert writer.torn.n_bytes == 9
        writer.append(HostRestarted(at_s=3.0))
    assert len(list(read(tmp_path / "j"))) == 7


@given(instants=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8))
def test_time_never_falls(instants: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Law L3: an instant that falls, or is no instant, is refused and leaves nothing behind."""
    path = tmp_path_factory.mktemp("l3") / "j.journal"
    accepted = []
    with JournalWriter(path, header()) as writer:
        for at_s in instants:
            if at_s >= (accepted[-1] if accepted else 0.0) and at_s != float("inf"):
                writer.append(HostRestarted(at_s=at_s))
                accepted.append(at_s)
            else:
                with pytest.raises(LawBroken, match="L3"):
                    writer.append(HostRestarted(at_s=at_s))
    entries = list(read(path))
    assert [e.event.at_s for e in entries] == accepted
    assert [e.sequence for e in entries] == list(range(1, len(accepted) + 1))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """One writer at a time, in this process too; the error names the path and the holder."""
    with JournalWriter(tmp_path / "j", header()):
        with pytest.raises(JournalError, match=rf"j' is being written by process {os.getpid()}; one writer") as caught:
            JournalWriter(tmp_path / "j", header())
        assert caught.value.code == "journal_locked"
    JournalWriter(tmp_path / "j", header()).close()


@pytest.mark.parametrize("name", ["j", "j.journal"])
def test_a_second_process_is_refused(name: str, tmp_path: Path) -> None:
    """Another process cannot write the same journal, be it a directory or a file, while we do, and can afterwards."""
    code = "import sys, journal_fakes as f; f.JournalWriter(sys.argv[1], f.header()).close()"
    path = tmp_path / name
    with JournalWriter(path, header()):
        refused = run_python(code, str(path))
        assert refused.returncode == 1
        assert f"is being written by process {os.getpid()}" in refused.stderr
    assert run_python(code, str(path)).returncode == 0


def test_a_forked_child_does_not_keep_the_journal_locked(tmp_path: Path) -> None:
    """A worker that was forked off and outlives the writer must not lock everyone out."""
    code = """
import os, sys
import journal_fakes as f
writer = f.JournalWriter(sys.argv[1], f.header())
ready, say_ready = os.pipe()
end, say_end = os.pipe()
child = os.fork()
if child == 0:
    os.write(say_ready, b"x")
    os.read(end, 1)
    os._exit(0)
os.read(ready, 1)
writer.close()
f.JournalWriter(sys.argv[1], f.header()).close()
os.write(say_end, b"x")
os.waitpid(child, 0)
"""
    done = run_python(code, str(tmp_path / "j"))
    assert done.returncode == 0, done.stderr


class Disk:
    """A disk that takes `room` more bytes and then fails every write with `error`."""

    def __init__(self, room: int, error: int) -> None:
        self.room = room
        self.error = error

    def write(self, fd: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(self.error, os.strerror(self.error))
        n = min(self.room, len(data))
        self.room -= n
        return REAL_WRITE(fd, data[:n])


REAL_WRITE = os.write


@pytest.mark.parametrize("room", [0, 1, 11, 12, 50, 151])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_ends_the_writer_and_not_the_journal(
    room: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half-way is cut off; nothing more is accepted; what was flushed before is whole."""
    machine = make_machine(header())
    writer = JournalWriter(tmp_path / "j", header())
    write(writer, machine, life(1))
    monkeypatch.setattr(store.os, "write", Disk(room, error).write)
    with pytest.raises(JournalError, match=os.strerror(error)) as caught:
        write(writer, machine, life(2, first=1))
    monkeypatch.undo()
    assert caught.value.code == "journal_failed"
    for refused in (lambda: writer.append(HostRestarted(at_s=99.0)), writer.flush, writer.sync, writer.rotate):
        with pytest.raises(JournalError, match="accepts nothing more: write failed after"):
            refused()
    writer.close()
    reader = read(tmp_path / "j")
    assert len(list(reader)) >= 6
    assert reader.torn is None
    JournalWriter(tmp_path / "j", header()).close()


def test_a_real_file_size_limit_ends_the_writer(tmp_path: Path) -> None:
    """The same under a limit of the kernel's, in a process of its own."""
    code = """
import resource, sys
import journal_fakes as f
from loadwise.kernel.errors import JournalError
writer = f.JournalWriter(sys.argv[1], f.header())
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    f.write(writer, f.make_machine(f.header()), f.life(100))
except JournalError as error:
    print(error.code, "File too large" in error.message)
"""
    done = run_python(code, str(tmp_path / "j"))
    assert (done.returncode, done.stdout) == (0, "journal_failed True\n"), done.stderr
    reader = read(tmp_path / "j")
    assert list(reader)
    assert reader.torn is None


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the pages, so a second sync that succeeds would prove nothing."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = JournalWriter(tmp_path / "j", header())
    writer.append(HostRestarted(at_s=1.0))
    monkeypatch.setattr(files, "sync_file", fail)
    with pytest.raises(JournalError, match="sync failed"):
        writer.sync()
    monkeypatch.undo()
    with pytest.raises(JournalError, match="accepts nothing more: sync failed"):
        writer.sync()
    writer.close()


def test_segments_follow_one_another_by_size(tmp_path: Path) -> None:
    """A full segment is closed between entries; all entries are read across the seams."""
    journal(tmp_path / "j", life(10), segment_bytes=2000)
    found = files.list_segments(tmp_path / "j")
    assert len(found) > 2
    assert all(2000 <= s.path.stat().st_size < 3500 for s in found[:-1])
    assert len(list(read(tmp_path / "j"))) == 60


def test_a_segment_that_cannot_be_begun_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no new file can be made just now, the old segment goes on, and a later one is begun."""
    real = files.sync_directory
    refusals = iter([True, True])

    def refuse(path: Path) -> None:
        if next(refusals, False):
            raise OSError(errno.EMFILE, "Too many open files")
        real(path)

    machine = make_machine(header())
    with JournalWriter(tmp_path / "j", header(), segment_bytes=2000, dump=machine.dump) as writer:
        monkeypatch.setattr(files, "sync_directory", refuse)
        write(writer, machine, life(20))
        assert [m for m in writer.messages if "000002.journal cannot be begun: [Errno 24]" in m] == list(
            writer.messages
        )
        assert len(writer.messages) == 2
    found = files.list_segments(tmp_path / "j")
    assert found[0].path.stat().st_size > 6000
    assert len(found) > 2
    assert len(list(read(tmp_path / "j"))) == 120
    assert replay(tmp_path / "j", make_machine).holds


def test_a_single_file_does_not_rotate(tmp_path: Path) -> None:
    """A path that ends in `.journal` is one file, whatever its size."""
    journal(tmp_path / "j.journal", life(10), segment_bytes=500)
    assert len(list(read(tmp_path / "j.journal"))) == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j.journal", "j.journal.lock"]


def test_old_segments_go_only_where_a_snapshot_stands_for_them(tmp_path: Path) -> None:
    """`keep_segments` drops what is older than a snapshot, and nothing where there are no snapshots."""
    journal(tmp_path / "with", life(20), segment_bytes=2000, keep_segments=2)
    kept = files.list_segments(tmp_path / "with")
    assert kept[0].number > 1
    assert len(kept) <= 4
    assert kept[0].number in {s.number for s in files.list_snapshots(tmp_path / "with")}
    with JournalWriter(tmp_path / "without", header(), segment_bytes=2000, keep_segments=2) as writer:
        write(writer, make_machine(header()), life(20))
    assert files.list_segments(tmp_path / "without")[0].number == 1


def test_another_configuration_begins_a_segment(tmp_path: Path) -> None:
    """Entries under another configuration or seed stand under a header of their own; a single file refuses them."""
    journal(tmp_path / "j", life(1))
    with JournalWriter(tmp_path / "j", header({"bonus": 0.5})) as writer:
        writer.append(HostRestarted(at_s=9.0))
    headers = [s.header for s in Reader(tmp_path / "j").segments() for _ in [list(s.entries())]]
    assert [h.config["bonus"] for h in headers] == [0.1, 0.5]
    assert (headers[1].first_sequence, headers[1].starts_at_s) == (7, 3.0)
    journal(tmp_path / "j.journal", life(1))
    with pytest.raises(JournalError, match="another configuration, seed or version"):
        JournalWriter(tmp_path / "j.journal", header(seed=8))


def test_what_messagepack_cannot_hold_does_not_end_the_journal(tmp_path: Path) -> None:
    """A client's lone surrogate or an integer beyond 64 bits is journaled as near as can be."""
    with JournalWriter(tmp_path / "j", header()) as writer:
        turn = TurnArrived(at_s=1.0, turn_id=1, program_id="p", domain="x\ud800", max_output_tokens=10**30)
        writer.append(turn, FakeMachine(7, 0.1).handle(turn))
        verdict = Verdict(verdict=VerdictKind.PASS, verifier="\udfff")
        writer.append(VerdictArrived(at_s=2.0, program_id="p", verdict=verdict))
    first, second = (e.event for e in read(tmp_path / "j"))
    assert isinstance(first, TurnArrived)
    assert (first.domain, first.max_output_tokens) == ("x\\ud800", 2**63 - 1)
    assert isinstance(second, VerdictArrived)
    assert second.verdict.verifier == "\\udfff"


def test_an_entry_that_cannot_be_kept_ends_the_writer(tmp_path: Path) -> None:
    """The machine has moved on, so a journal with a hole would be a lie."""
    unknown: Any = HostRestarted(at_s=1.0, detail=object())  # type: ignore[arg-type]
    writer = JournalWriter(tmp_path / "j", header())
    with pytest.raises(JournalError, match=r"sequence 1 \(HostRestarted\) cannot be encoded"):
        writer.append(unknown)
    with pytest.raises(JournalError, match="accepts nothing more"):
        writer.append(HostRestarted(at_s=2.0))
    writer.close()
    long = JournalWriter(tmp_path / "k", header())
    with pytest.raises(JournalError, match=r"bytes; 16777216 is the limit"):
        long.append(HostRestarted(at_s=1.0, detail="x" * (17 << 20)))
    long.close()


def test_appended_entries_do_not_pile_up_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law L15: a host that never flushes has its entries written at a bound."""
    monkeypatch.setattr(store, "PENDING_MAX_BYTES", 1000)
    with JournalWriter(tmp_path / "j", header()) as writer:
        for i in range(100):
            writer.append(HostRestarted(at_s=float(i)))
        assert len(list(read(tmp_path / "j"))) > 50


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    """Appending after close is an error, closing twice is not."""
    writer = JournalWriter(tmp_path / "j", header())
    writer.close()
    writer.close()
    with pytest.raises(JournalError, match="it is closed"):
        writer.append(HostRestarted(at_s=1.0))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A journal below a file is an error that names the path."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(JournalError, match="file/j' cannot be written"):
        JournalWriter(tmp_path / "file" / "j", header())


def test_equal_configurations_have_equal_digests() -> None:
    """The order of keys does not matter, values do."""
    assert digest_config({"a": 1, "b": {"c": 2, "d": 3}}) == digest_config({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest_config({"a": 1}) != digest_config({"a": 2})
