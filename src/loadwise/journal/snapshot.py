"""Snapshots: the machine's state at a segment's begin, so that recovery need not read a life from its first day."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadwise.kernel.errors import JournalError
from loadwise.kernel.fact import Fact

from . import files
from .entry import SCHEMA_VERSION, Header
from .frame import MAGIC_BYTES, SNAPSHOT_MAGIC, frame, take_frame

SNAPSHOTS_KEPT = 2
"""One to use and one to fall back to; that of the first kept segment stays besides."""

SNAPSHOT_SPACING = 8
"""Of the older ones every so manieth stays: what happened long ago is explained from the nearest."""

_MAX_BYTES = 0xFFFFFFFF


class Snapshot(Fact, frozen=True, kw_only=True):
    """A dumped machine and the last sequence that it has handled."""

    schema_version: int
    loadwise_version: str
    config_digest: str
    sequence: int
    at_s: float
    state: bytes

    @staticmethod
    def of(header: Header, state: bytes) -> "Snapshot":
        """The state of a machine that stands right before the first entry under `header`."""
        return Snapshot(
            schema_version=SCHEMA_VERSION,
            loadwise_version=header.loadwise_version,
            config_digest=header.config_digest,
            sequence=header.first_sequence - 1,
            at_s=header.starts_at_s,
            state=state,
        )


def write_snapshot(path: Path, number: int, snapshot: Snapshot) -> None:
    """Write the snapshot of segment `number`: whole and on disk, or not at all (OSError)."""
    payload = msgspec.msgpack.encode(snapshot)
    files.write_whole(files.snapshot_path(path, number), (SNAPSHOT_MAGIC, frame(payload)))


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot file.

    Raises:
        JournalError: unreadable, torn, damaged or of another schema version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"snapshot {path.name} cannot be read: {error.strerror}") from error
    payload = take_frame(data, MAGIC_BYTES, _MAX_BYTES) if data.startswith(SNAPSHOT_MAGIC) else None
    if payload is None:
        raise JournalError(f"snapshot {path.name} is torn or damaged", code="journal_corrupt")
    try:
        snapshot = msgspec.msgpack.decode(payload, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise JournalError(f"snapshot {path.name}: {error}", code="schema_mismatch") from error
    if snapshot.schema_version != SCHEMA_VERSION:
        raise JournalError(
            f"snapshot {path.name}: schema version is {snapshot.schema_version}; this loadwise reads {SCHEMA_VERSION}",
            code="schema_mismatch",
        )
    return snapshot


def prune_snapshots(path: Path) -> None:
    """Remove snapshots that recovery would not reach for."""
    found = files.list_snapshots(path)
    first_kept = min((s.number for s in files.list_segments(path)), default=0)
    newest = {s.number for s in found[-SNAPSHOTS_KEPT:]}
    for number, file in found:
        if number != first_kept and number not in newest and number % SNAPSHOT_SPACING:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


class SnapshotWriter:
    """Writes one snapshot at a time in a thread of its own: a host does not wait for the disk."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path = path
        self._tell = tell
        self._thread: threading.Thread | None = None

    def write(self, number: int, snapshot: Snapshot) -> None:
        """Begin to write, then prune; waits for the one before. A failure is a message: the journal is whole without.

        Pruned only once it is on disk, so that there is always one to fall back to, and the same ones stay however
        long the disk takes.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(number, snapshot), name="journal-snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, number: int, snapshot: Snapshot) -> None:
        try:
            write_snapshot(self._path, number, snapshot)
        except OSError as error:
            self._tell(f"snapshot of segment {number} was not written: {error}")
        with contextlib.suppress(OSError):
            prune_snapshots(self._path)
