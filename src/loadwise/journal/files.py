"""Where a journal lies: a directory of numbered segments and snapshots, or one single file.

    DIR/000001.journal   000002.journal   000002.snapshot   lock   index.sqlite

Snapshot N is the machine's state before the first entry of segment N. A path whose name ends in `.journal` is a
journal of one file, without rotation and without snapshots.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import NamedTuple

from loadwise.kernel.errors import JournalError

SEGMENT_SUFFIX = ".journal"
SNAPSHOT_SUFFIX = ".snapshot"
INDEX_NAME = "index.sqlite"

sync_file = getattr(os, "fdatasync", os.fsync)


class SegmentPath(NamedTuple):
    number: int
    path: Path


def is_single(path: Path) -> bool:
    """Whether the path means a journal of one file."""
    return path.is_file() or (path.suffix == SEGMENT_SUFFIX and not path.is_dir())


def segment_path(path: Path, number: int) -> Path:
    return path if is_single(path) else path / f"{number:06d}{SEGMENT_SUFFIX}"


def snapshot_path(path: Path, number: int) -> Path:
    return path / f"{number:06d}{SNAPSHOT_SUFFIX}"


def list_segments(path: Path) -> list[SegmentPath]:
    """The journal's segments in order; empty where nothing was journaled yet."""
    if is_single(path):
        return [SegmentPath(1, path)] if path.exists() else []
    return _numbered(path, SEGMENT_SUFFIX)


def list_snapshots(path: Path) -> list[SegmentPath]:
    """The journal's snapshots in order."""
    return [] if is_single(path) else _numbered(path, SNAPSHOT_SUFFIX)


def _numbered(path: Path, suffix: str) -> list[SegmentPath]:
    if not path.is_dir():
        return []
    found = [SegmentPath(int(p.stem), p) for p in path.iterdir() if p.suffix == suffix and p.stem.isdecimal()]
    return sorted(found)


def write_whole(path: Path, parts: tuple[bytes, ...]) -> None:
    """Write a file that is either there, whole and on disk, or not there at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_held: "weakref.WeakSet[JournalLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child shares the lock; if it outlived us, nobody could open our journal again.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


class JournalLock:
    """The right to write one journal, held by one process at a time and freed by the kernel when it dies.

    Raises:
        JournalError: another writer holds it (code `journal_locked`), or the place cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lock_path = path.with_name(path.name + ".lock") if is_single(path) else path / "lock"
        try:
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(f"journal {str(path)!r} cannot be written: {error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise JournalError(
                f"journal {str(path)!r} is being written by process {holder}; one writer is the limit",
                code="journal_locked",
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let another writer in; releasing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
