"""Many waiters share one sync, and none is told a lie."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from journal_fakes import header

from loadwise.journal import files
from loadwise.journal.commit import GroupCommit
from loadwise.journal.store import JournalWriter
from loadwise.kernel.errors import JournalError, Overloaded
from loadwise.kernel.events import HostRestarted


class GatedDisk:
    """A sync that waits until the test lets it go on, and can be made to fail."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.n_syncs = 0
        self.fails = False

    def sync(self, fd: int) -> None:
        self.began.release()
        self.go_on.acquire()
        self.n_syncs += 1
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> GatedDisk:
    gated = GatedDisk()
    monkeypatch.setattr(files, "sync_file", gated.sync)
    return gated


def test_waiters_share_one_sync(tmp_path: Path, disk: GatedDisk) -> None:
    """While one sync runs, all who come wait for the next one together; each is told after its own entry is synced."""
    writer = JournalWriter(tmp_path / "j", header())
    commit = GroupCommit(writer)
    told: list[int] = []

    def request(n: int) -> None:
        writer.append(HostRestarted(at_s=float(n)))
        commit.request(lambda error: told.append(n))

    request(0)
    disk.began.acquire()
    for n in range(1, 100):
        request(n)
    assert told == []
    disk.go_on.release()
    disk.began.acquire()
    assert told == [0]
    disk.go_on.release()
    commit.close()
    assert told == list(range(100))
    assert disk.n_syncs == commit.n_syncs == 2
    disk.go_on.release()
    writer.close()


def test_a_failed_sync_is_told_to_everyone(tmp_path: Path, disk: GatedDisk) -> None:
    """Nothing is acknowledged that is not on disk: those in line get the error too, and so do later ones."""
    writer = JournalWriter(tmp_path / "j", header())
    commit = GroupCommit(writer)
    errors: list[JournalError | None] = []
    writer.append(HostRestarted(at_s=1.0))
    commit.request(errors.append)
    disk.began.acquire()
    writer.append(HostRestarted(at_s=2.0))
    commit.request(errors.append)
    disk.fails = True
    disk.go_on.release()
    commit.close()
    assert [e is not None and "sync failed" in e.message for e in errors] == [True, True]
    with pytest.raises(JournalError, match="sync failed"):
        writer.append(HostRestarted(at_s=3.0))
    with pytest.raises(JournalError, match="sync failed"):
        commit.request(errors.append)
    writer.close()


def test_waiters_are_bounded(tmp_path: Path, disk: GatedDisk) -> None:
    """Law L15: beyond the limit a caller is told to come again, with nothing waiting for it."""
    writer = JournalWriter(tmp_path / "j", header())
    commit = GroupCommit(writer, waiters_max=2)
    told: list[JournalError | None] = []
    commit.request(told.append)
    disk.began.acquire()
    commit.request(told.append)
    commit.request(told.append)
    with pytest.raises(Overloaded, match="2 callers wait for the journal; 2 is the limit"):
        commit.request(told.append)
    for _ in range(3):
        disk.go_on.release()
    commit.close()
    assert told == [None, None, None]
    writer.close()


def test_rotation_during_a_sync_keeps_the_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being synced is closed only afterwards, so that its number is not given to another meanwhile."""
    disk = GatedDisk()
    real = files.sync_file
    writer = JournalWriter(tmp_path / "j", header())
    writer.append(HostRestarted(at_s=1.0))
    commit = GroupCommit(writer)
    synced: list[os.stat_result] = []

    def sync(fd: int) -> None:
        if threading.current_thread() is threading.main_thread():
            real(fd)
        else:
            disk.sync(fd)
            synced.append(os.fstat(fd))

    monkeypatch.setattr(files, "sync_file", sync)
    before = os.stat(tmp_path / "j" / "000001.journal")
    commit.request(lambda error: None)
    disk.began.acquire()
    writer.rotate()
    writer.append(HostRestarted(at_s=2.0))
    disk.go_on.release()
    commit.close()
    assert [found.st_ino for found in synced] == [before.st_ino]
    assert writer._retired_fds == []
    writer.close()


def test_a_loop_awaits_durability(tmp_path: Path) -> None:
    """Tasks of a loop wait together; each continues when its entry is on disk."""

    async def run() -> int:
        writer = JournalWriter(tmp_path / "j", header(), segment_bytes=500)
        commit = GroupCommit(writer)

        async def acknowledge(n: int) -> None:
            writer.append(HostRestarted(at_s=float(n)))
            await commit.wait()

        await asyncio.gather(*(acknowledge(n) for n in range(200)))
        commit.close()
        writer.close()
        return commit.n_syncs

    assert 1 <= asyncio.run(run()) < 200
    assert len(files.list_segments(tmp_path / "j")) > 5


def test_a_waiter_that_gave_up_harms_nobody(tmp_path: Path, disk: GatedDisk) -> None:
    """A cancelled task and a callback that raises leave the other waiters their answer."""

    async def run() -> tuple[int, list[JournalError | None]]:
        writer = JournalWriter(tmp_path / "j", header())
        commit = GroupCommit(writer)
        task = asyncio.create_task(commit.wait())
        await asyncio.sleep(0)
        task.cancel()
        told: list[JournalError | None] = []

        def broken(error: JournalError | None) -> None:
            raise ValueError("broken")

        commit.request(broken)
        commit.request(told.append)
        for _ in range(3):
            disk.go_on.release()
        await asyncio.to_thread(commit.close)
        await asyncio.sleep(0)
        writer.close()
        return commit.n_broken_callbacks, told

    assert asyncio.run(run()) == (1, [None])


def test_a_closed_commit_says_so(tmp_path: Path) -> None:
    """A request after close is an error."""
    with JournalWriter(tmp_path / "j", header()) as writer:
        commit = GroupCommit(writer)
        commit.close()
        with pytest.raises(JournalError, match="closed"):
            commit.request(lambda error: None)
