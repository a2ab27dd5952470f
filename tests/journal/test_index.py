"""The index answers for every archived program, loses none, and can itself be lost."""

import sqlite3
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from journal_fakes import header, journal, life, make_machine, write

from loadwise.journal import files, index
from loadwise.journal.index import Index
from loadwise.journal.recover import recover, resume
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.errors import JournalError
from loadwise.kernel.work import ProgramState, Verdict, VerdictKind


def record(i: int, **fields: Any) -> ProgramRecord:
    return ProgramRecord(program_id=f"p{i}", state=ProgramState.CLOSED, ended_at_s=float(i), **fields)


def test_a_program_is_found_before_and_after_it_is_written(tmp_path: Path) -> None:
    """What was added is there at once, and after the file was closed and opened."""
    added = record(1, verdict=Verdict(verdict=VerdictKind.PASS), reward=0.4, cost_usd=0.1)
    opened = Index(tmp_path / "i.sqlite")
    opened.add(1, added)
    assert opened.get("p1") == added
    opened.flush()
    assert opened.get("p1") == added
    assert opened.get("p2") is None
    opened.close()
    opened.close()
    again = Index(tmp_path / "i.sqlite")
    assert again.get("p1") == added
    assert again.count() == 1
    again.close()


def test_nothing_is_dropped_when_the_thread_falls_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law L15: at the bound of waiting records `add` writes them itself."""
    monkeypatch.setattr(index, "BATCH", 1 << 30)
    monkeypatch.setattr(index, "LINGER_S", 3600.0)
    monkeypatch.setattr(index, "WAITING_MAX", 10)
    opened = Index(tmp_path / "i.sqlite")
    for i in range(95):
        opened.add(i + 1, record(i))
        assert len(opened._waiting) < 10
    assert opened.count() >= 90
    assert all(opened.get(f"p{i}") is not None for i in range(95))
    opened.close()
    again = Index(tmp_path / "i.sqlite")
    assert again.count() == 95
    again.close()


def test_the_thread_writes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch is written without anybody asking."""
    monkeypatch.setattr(index, "BATCH", 5)
    monkeypatch.setattr(index, "LINGER_S", 3600.0)
    written = threading.Event()
    real = Index._write

    def write_and_say(self: Index, waiting: Any, reached: int) -> None:
        real(self, waiting, reached)
        written.set()

    monkeypatch.setattr(Index, "_write", write_and_say)
    opened = Index(tmp_path / "i.sqlite")
    for i in range(5):
        opened.add(i + 1, record(i))
    assert written.wait(30)
    opened.close()


def test_the_latest_record_of_a_program_counts(tmp_path: Path) -> None:
    """A program that is archived again (a late verdict) is answered as it stands last."""
    opened = Index(tmp_path / "i.sqlite")
    opened.add(1, record(1))
    opened.flush()
    opened.add(2, record(1, reward=1.0))
    assert opened.get("p1") == record(1, reward=1.0)
    opened.flush()
    assert opened.get("p1") == record(1, reward=1.0)
    assert opened.count() == 1
    opened.close()


def test_recent_programs_come_latest_first(tmp_path: Path) -> None:
    """Listing mixes what is written with what waits."""
    opened = Index(tmp_path / "i.sqlite")
    for i in range(4):
        opened.add(i + 1, record(i))
    opened.flush()
    opened.add(5, record(4))
    assert [r.program_id for r in opened.recent(3)] == ["p4", "p3", "p2"]
    opened.close()


def test_old_programs_can_be_forgotten(tmp_path: Path) -> None:
    """By age and by count."""
    opened = Index(tmp_path / "i.sqlite")
    for i in range(10):
        opened.add(i + 1, record(i))
    assert opened.prune(before_s=3.0) == 3
    assert opened.prune(keep=4) == 3
    assert opened.prune(keep=4) == 0
    assert [r.program_id for r in opened.recent()] == ["p9", "p8", "p7", "p6"]
    opened.close()


def test_a_damaged_index_is_set_aside(tmp_path: Path) -> None:
    """It is derived, so it is replaced with a message, never an obstacle."""
    path = tmp_path / "i.sqlite"
    path.write_bytes(b"this is no database" * 100)
    opened = Index(path)
    assert "was unusable" in opened.messages[0]
    assert opened.last_sequence == 0
    opened.close()
    later = sqlite3.connect(path)
    later.execute("PRAGMA user_version = 99")
    later.close()
    opened = Index(path)
    assert "schema version is 99" in opened.messages[0]
    opened.close()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """An index in a directory that does not exist is named."""
    with pytest.raises(JournalError, match=r"nowhere/i\.sqlite"):
        Index(tmp_path / "nowhere" / "i.sqlite")


def resumed(path: Path, **options: Any) -> tuple[JournalWriter, Any, Index]:
    path.mkdir(exist_ok=True)
    opened = Index(path / files.INDEX_NAME)
    options = {"ends_with_snapshot": False, **options}  # as after a crash
    writer, recovered = resume(path, header(), make_machine, index=opened, **options)
    return writer, recovered, opened


def crash(writer: JournalWriter, opened: Index) -> None:
    """Close the files without writing what waits, as a death would."""
    with opened._wake:
        opened._waiting.clear()
    opened.close()
    writer.close()


def programs(opened: Index) -> list[str]:
    return sorted(r.program_id for r in opened.recent(1000))


def test_a_writer_fills_the_index(tmp_path: Path) -> None:
    """Every program that an entry archives is found, without the host doing anything."""
    writer, recovered, opened = resumed(tmp_path / "j")
    write(writer, recovered.machine, life(20))
    assert programs(opened) == sorted(f"p{i}" for i in range(20))
    writer.close()
    opened.close()


@pytest.mark.parametrize("segment_bytes", [3000, 1 << 20])
def test_recovery_catches_the_index_up(segment_bytes: int, tmp_path: Path) -> None:
    """Programs archived right before a crash, in memory only, are found again after recovery."""
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=segment_bytes)
    write(writer, recovered.machine, life(20))
    crash(writer, opened)
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=segment_bytes)
    assert programs(opened) == sorted(f"p{i}" for i in range(20))
    assert opened.last_sequence == 120
    assert recovered.n_replayed < 120 or segment_bytes > 3000
    crash(writer, opened)


def test_a_lost_index_is_rebuilt(tmp_path: Path) -> None:
    """With the file gone, recovery starts from its snapshot all the same, and the index is filled meanwhile."""
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=3000)
    write(writer, recovered.machine, life(20))
    writer.close()
    opened.close()
    (tmp_path / "j" / files.INDEX_NAME).unlink()
    writer, recovered, opened = resumed(tmp_path / "j")
    assert recovered.n_replayed < 120
    assert "the index lacks programs archived from sequence 1 to" in recovered.messages[0]
    recovered.refill.wait()
    assert programs(opened) == sorted(f"p{i}" for i in range(20))
    assert "the index is filled again" in opened.messages[-1]
    crash(writer, opened)


def test_an_index_that_closes_is_not_filled_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stops does not wait for the past."""
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=3000)
    write(writer, recovered.machine, life(20))
    writer.close()
    opened.close()
    (tmp_path / "j" / files.INDEX_NAME).unlink()
    monkeypatch.setattr(Index, "closes_within", lambda self, seconds: True)
    writer, recovered, opened = resumed(tmp_path / "j")
    recovered.refill.wait()
    assert "p0" not in programs(opened) or len(programs(opened)) < 20
    crash(writer, opened)


def test_an_index_that_cannot_be_read_answers_unknown(tmp_path: Path) -> None:
    """Its host goes on serving, hears of it once, and the next start fills a new one."""
    writer, recovered, opened = resumed(tmp_path / "j")
    write(writer, recovered.machine, life(3))
    opened.flush(18)
    with opened._writer:
        opened._writer.execute("UPDATE programs SET record = x'ff'")
    for _ in range(3):
        assert opened.get("p0") is None and opened.recent() == []
    assert len(opened.messages) == 1 and "count as unknown" in opened.messages[0]
    writer.close()
    opened.close()
    assert (tmp_path / "j" / (files.INDEX_NAME + ".broken")).exists()
    writer, recovered, opened = resumed(tmp_path / "j")
    assert programs(opened) == ["p0", "p1", "p2"]
    crash(writer, opened)


def test_a_record_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    """The past is filled in while the present goes on, and a name may have been used twice."""
    opened = Index(tmp_path / "i.sqlite")
    for sequence, order in ((9, "before"), (3, "after"), (4, "written")):
        opened.add(sequence, ProgramRecord(program_id="p", state=ProgramState.CLOSED, verifier=order))
    opened.flush()
    opened.add(5, ProgramRecord(program_id="p", state=ProgramState.CLOSED, verifier="late"))
    opened.flush()
    found = opened.get("p")
    assert found is not None and found.verifier == "before"
    opened.close()


def test_what_cannot_be_rebuilt_is_said(tmp_path: Path) -> None:
    """Where the segments are gone too, the message names the sequences whose programs are missing."""
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=3000, keep_segments=1)
    write(writer, recovered.machine, life(20))
    writer.close()
    opened.close()
    (tmp_path / "j" / files.INDEX_NAME).unlink()
    first = files.list_segments(tmp_path / "j")[0].number
    assert first > 1
    writer, recovered, opened = resumed(tmp_path / "j")
    assert "the index lacks programs archived from sequence 1 to" in recovered.messages[0]
    crash(writer, opened)


def test_an_index_ahead_of_its_journal_is_cut_back(tmp_path: Path) -> None:
    """When the machine died, the index may know programs whose entries the disk has lost: they have not happened."""
    writer, recovered, opened = resumed(tmp_path / "j")
    write(writer, recovered.machine, life(3))
    opened.flush(18)
    writer.close()
    opened.close()
    journal(tmp_path / "shorter", life(2))
    (tmp_path / "j" / "000001.journal").write_bytes((tmp_path / "shorter" / "000001.journal").read_bytes())
    writer, recovered, opened = resumed(tmp_path / "j")
    assert programs(opened) == ["p0", "p1"]
    assert opened.last_sequence == 12
    crash(writer, opened)


def test_a_failing_index_does_not_stop_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal goes on and keeps every segment; the next recovery fills the index again."""
    writer, recovered, opened = resumed(tmp_path / "j", segment_bytes=3000, keep_segments=1)

    def refuse(self: Index, waiting: Any, reached: int) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_write", refuse)
        write(writer, recovered.machine, life(20))
        assert any("database or disk is full" in m for m in writer.messages)
        writer.close()
        opened.close()
    assert files.list_segments(tmp_path / "j")[0].number == 1
    writer, recovered, opened = resumed(tmp_path / "j")
    recovered.refill.wait()
    assert programs(opened) == sorted(f"p{i}" for i in range(20))
    crash(writer, opened)


def test_recovery_without_an_index_needs_none(tmp_path: Path) -> None:
    """An index is an option of the host."""
    journal(tmp_path / "j", life(3))
    assert recover(tmp_path / "j", make_machine).next_sequence == 19


def test_memory_stays_flat(tmp_path: Path) -> None:
    """From the 5,000th to the 20,000th archived program the index grows by next to nothing."""
    opened = Index(tmp_path / "i.sqlite")

    def add(first: int, last: int) -> None:
        for i in range(first, last):
            opened.add(i + 1, record(i))
        opened.flush()

    tracemalloc.start()
    try:
        add(0, 5000)
        before = tracemalloc.get_traced_memory()[0]
        add(5000, 20_000)
        assert tracemalloc.get_traced_memory()[0] - before < 1_000_000  # a record kept would be 15,000 times 500 bytes
    finally:
        tracemalloc.stop()
    assert opened.count() == 20_000
    opened.close()
