"""Writing a journal: append in memory, flush to the kernel, sync to the disk; refuse everything once one of them fails.

Theory of operation. `append` costs microseconds and does no I/O. `flush` hands all appended entries to the kernel by
one write: from then on they survive the death of this process, not that of the machine. `sync` makes them survive
both. A host flushes before it carries out commands and syncs before it acknowledges a verdict.

A failed write is cut off again, so that the file ends with a whole entry, and the writer accepts nothing more: what it
could not keep must not be acknowledged. A failed sync is final too, because the kernel may have dropped the pages.
"""

import contextlib
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadwise.kernel.commands import Archive, Command
from loadwise.kernel.errors import Error, JournalError, LawBroken
from loadwise.kernel.events import Event, ProgramEnded

from . import files
from .entry import Header, encode_entry, encode_header, make_entry, tame
from .frame import FRAME_MAX_BYTES, HEAD, MARKER, SEGMENT_MAGIC, frame
from .index import Index
from .reader import TornTail
from .repair import cut_torn_tail
from .snapshot import Snapshot, SnapshotWriter, prune_snapshots

SEGMENT_BYTES = 8 << 20
"""Size at which a segment is closed: about a second or two of replay after a crash."""

MESSAGES_MAX = 100

PENDING_MAX_BYTES = 4 << 20
"""Appended and not yet flushed bytes at which `append` flushes by itself (law L15)."""


class JournalWriter:
    """The one writer of a journal. Not thread-safe but for `sync_written`; the host's single task owns it.

    Args:
        path: a directory, or a file name ending in `.journal` (one file, no rotation).
        header: how the machine is built. Where it does not continue the journal's last header, a segment begins.
        segment_bytes: size at which a segment is closed.
        keep_segments: how many closed segments to keep; None keeps all.
        dump: the machine's `dump`, called at rotation; None takes no snapshots. The state is taken to be that after
            the last appended entry, so a host appends right after `handle`.
        n_handled: how many events the machine has handled. Where it has handled more than were appended, because an
            append was refused, its state is not the journal's, and no snapshot is taken.
        index: takes every program that an appended entry archives, and is written before each snapshot. If it fails,
            the journal goes on without it and keeps all segments, so that the next recovery fills it again.
        keep_artefacts: journal what `ProgramEnded` carries for verifiers; it may hold users' texts.
        ends_with_snapshot: take one when the writer is closed, too, so that the next start replays nothing: an upgrade
            then puts no old entries through new code.
        lock: a lock already held, which the writer takes over.

    Raises:
        JournalError: another writer is at work, the last segment is damaged, or the place cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_segments: int | None = None,
        dump: Callable[[], bytes] | None = None,
        n_handled: Callable[[], int] | None = None,
        index: Index | None = None,
        keep_artefacts: bool = False,
        ends_with_snapshot: bool = False,
        lock: files.JournalLock | None = None,
    ) -> None:
        if keep_segments is not None and keep_segments < 1:
            raise JournalError(f"keep_segments is {keep_segments!r}; it must be >= 1")
        self.path = Path(path)
        self.dump = dump
        self._n_handled = n_handled
        self.torn: TornTail | None = None
        """The tail that was cut off when the journal was opened."""
        self.messages: deque[str] = deque(maxlen=MESSAGES_MAX)
        """What went wrong without harm to the journal: a snapshot or an index that could not be written."""
        self.on_message: Callable[[str], None] | None = None
        """Told of each message when it arises, on whatever thread that is."""
        self._index = index
        self._is_index_lost = False
        self._segment_bytes = segment_bytes
        self._keep_segments = keep_segments
        self._keep_artefacts = keep_artefacts
        self._ends_with_snapshot = ends_with_snapshot
        self._snapshots = SnapshotWriter(self.path, self.tell)
        self._sequence = 0
        self._at_s = 0.0
        self._n_bytes = 0
        self._rotate_at_bytes = segment_bytes
        self._pending: list[bytes] = []
        self._n_pending_bytes = 0
        self._failure: str | None = None
        self._fd = -1
        self._fd_lock = threading.Lock()
        self._n_syncing = 0
        self._retired_fds: list[int] = []
        self._lock = lock if lock is not None else files.JournalLock(self.path)
        try:
            self._open(header)
            self._n_unjournaled = self._count_unjournaled()
        except BaseException:
            self.close()
            raise

    @property
    def last_sequence(self) -> int:
        """Sequence of the last appended entry; 0 in a new journal."""
        return self._sequence

    @property
    def last_at_s(self) -> float:
        """Instant of the last appended entry; 0 in a new journal."""
        return self._at_s

    @property
    def failure(self) -> str | None:
        """Why nothing more is accepted; None while all is well."""
        return self._failure

    def append(self, event: Event, commands: Sequence[Command] = ()) -> int:
        """Take one event and the commands it led to; no I/O. Returns the entry's sequence.

        Raises:
            LawBroken: `at_s` falls or is not finite (L3); nothing was appended.
            JournalError: an earlier failure, or an entry that cannot be encoded; nothing more will be accepted.
        """
        if self._failure is not None:
            raise self._refusal()
        at_s = event.at_s
        if not self._at_s <= at_s < math.inf:
            raise LawBroken("L3", f"at_s {at_s!r} of {type(event).__name__} follows {self._at_s!r} s")
        if type(event) is ProgramEnded and event.artefacts and not self._keep_artefacts:
            event = msgspec.structs.replace(event, artefacts={})
        sequence = self._sequence + 1
        try:
            payload = encode_entry(make_entry(sequence, event, commands))
        except (ValueError, OverflowError):
            payload = self._tamed(sequence, event, commands)
        except TypeError as error:
            raise self._fail(f"sequence {sequence} ({type(event).__name__}) cannot be encoded: {error}") from error
        n_bytes = len(payload)
        if n_bytes > FRAME_MAX_BYTES:
            raise self._fail(f"sequence {sequence} has {n_bytes} bytes; {FRAME_MAX_BYTES} is the limit")
        self._pending += (HEAD.pack(MARKER, n_bytes, zlib.crc32(payload)), payload)
        self._n_pending_bytes += n_bytes
        self._sequence = sequence
        self._at_s = at_s
        if self._index is not None:
            for command in commands:
                if type(command) is Archive:
                    self._archive(self._index, sequence, commands)
                    break
        if self._n_pending_bytes > PENDING_MAX_BYTES:
            self._write()
        return sequence

    def flush(self) -> None:
        """Hand every appended entry to the kernel by one write; close the segment if it is full.

        Raises:
            JournalError: the write failed; nothing more will be accepted.
        """
        self._write()
        if self._n_bytes >= self._rotate_at_bytes and not self._is_single:
            try:
                self.rotate()
            except JournalError as error:
                if self._failure is not None:
                    raise
                # A directory that takes no new file now is no reason to stop: the segment goes on, and we try later.
                self.tell(error.message)
                self._rotate_at_bytes = self._n_bytes + self._segment_bytes

    def sync(self) -> None:
        """Flush, then make everything written survive the machine's death too.

        Raises:
            JournalError: writing or syncing failed; nothing more will be accepted.
        """
        self.flush()
        self.sync_written()

    def sync_written(self) -> None:
        """Make what is already written durable. The one method that another thread may call.

        Raises:
            JournalError: the disk refused; nothing more will be accepted.
        """
        with self._fd_lock:
            if self._failure is not None:
                raise self._refusal()
            fd = self._fd
            self._n_syncing += 1
        try:
            files.sync_file(fd)
        except OSError as error:
            raise self._fail(f"sync failed: {error}") from error
        finally:
            with self._fd_lock:
                self._n_syncing -= 1
                self._close_retired()

    def rotate(self) -> None:
        """Close the segment, begin the next, take a snapshot of the machine.

        Raises:
            JournalError: the journal is a single file, or the disk refused. Where only the new segment could not be
                made, the old one goes on.
        """
        if self._is_single:
            raise JournalError(f"journal {str(self.path)!r} is a single file; only a directory can be rotated")
        self._write()
        self.sync_written()
        is_indexed = self._write_index()
        self._begin_segment(self._number + 1, self.header)
        # What is dropped depends on which snapshots there are, never on how far the writing of one has come.
        self._snapshots.wait()
        if is_indexed:
            self._drop_old_segments()
        if not self._take_snapshot():
            prune_snapshots(self.path)

    def _take_snapshot(self) -> bool:
        """Whether one is on its way, after which older ones are pruned."""
        if self.dump is None:
            return False
        if self._count_unjournaled() != self._n_unjournaled:
            self.tell(f"segment {self._number} has no snapshot: the machine has handled events that are not journaled")
            return False
        try:
            state = self.dump()
        except Exception as error:  # the journal is whole without it
            self.tell(f"segment {self._number} has no snapshot: the machine could not be dumped ({error})")
            return False
        self._snapshots.write(self._number, Snapshot.of(self.header, state))
        return True

    def close(self) -> None:
        """Write and sync what is pending, take the last snapshot, let another writer in."""
        try:
            if self._fd >= 0 and self._failure is None:
                self._write()
                self.sync_written()
                self._end_with_snapshot()
        finally:
            self._snapshots.wait()
            with self._fd_lock:
                self._failure = self._failure or "it is closed"
                self._retire()
            self._lock.release()

    def _count_unjournaled(self) -> int:
        return 0 if self._n_handled is None else self._n_handled() - self._sequence

    def _end_with_snapshot(self) -> None:
        has_entries = self._sequence >= self.header.first_sequence
        if not (self._ends_with_snapshot and has_entries) or self.dump is None or self._is_single:
            return
        try:
            self.rotate()
        except JournalError as error:
            self.tell(f"the journal ends without a snapshot: {error.message}")

    def tell(self, message: str) -> None:
        """Leave a message for the operator; may be called from any thread."""
        self.messages.append(message)
        if self.on_message is not None:
            self.on_message(message)

    def _open(self, header: Header) -> None:
        self._is_single = files.is_single(self.path)
        found = files.list_segments(self.path)
        if not found:
            self._begin_segment(1, header)
            return
        self.torn, segment, self._at_s = cut_torn_tail(self.path)
        self._sequence = segment.next_sequence - 1
        # The run's clock goes on: at_s counts from where it counted before.
        header = msgspec.structs.replace(header, epoch_unix_s=segment.header.epoch_unix_s)
        if header.continues(segment.header):
            self.header = segment.header
            try:
                self._adopt(segment.number, segment.path)
            except OSError as error:
                raise self._fail(f"segment {segment.path.name} cannot be opened: {error}") from error
        elif self._is_single:
            raise JournalError(
                f"journal {str(self.path)!r} was written under another configuration, seed or version "
                f"(digest {segment.header.config_digest}, now {header.config_digest}); a single file holds one"
            )
        else:
            self._begin_segment(segment.number + 1, header)

    def _begin_segment(self, number: int, header: Header) -> None:
        header = msgspec.structs.replace(header, first_sequence=self._sequence + 1, starts_at_s=self._at_s)
        path = files.segment_path(self.path, number)
        try:
            files.write_whole(path, (SEGMENT_MAGIC, frame(encode_header(header))))
            self._adopt(number, path)
        except OSError as error:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                raise self._fail(f"segment {path.name} cannot be begun: {error}") from error
            raise JournalError(f"journal {str(self.path)!r}: segment {path.name} cannot be begun: {error}") from error
        self.header = header

    def _adopt(self, number: int, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with self._fd_lock:
            self._retire()
            self._fd = fd
        self._number = number
        self._n_bytes = os.fstat(fd).st_size
        self._rotate_at_bytes = self._segment_bytes

    def _retire(self) -> None:
        if self._fd >= 0:
            self._retired_fds.append(self._fd)
            self._fd = -1
        self._close_retired()

    def _close_retired(self) -> None:
        # Another thread may be syncing a file that rotation has left behind: its number must not be given away.
        while self._retired_fds and not self._n_syncing:
            os.close(self._retired_fds.pop())

    def _write(self) -> None:
        if self._failure is not None:
            raise self._refusal()
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        n_done = 0
        try:
            while n_done < len(data):
                n_done += os.write(self._fd, data[n_done:])
        except OSError as error:
            # Without this cut the file would end inside an entry; if it fails too, the tail is torn and will be cut
            # at recovery. Nothing of it was acknowledged.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._n_bytes)
            raise self._fail(f"write failed after {n_done} of {len(data)} bytes: {error}") from error
        self._pending.clear()
        self._n_pending_bytes = 0
        self._n_bytes += len(data)

    def _tamed(self, sequence: int, event: Event, commands: Sequence[Command]) -> bytes:
        try:
            return encode_entry(make_entry(sequence, tame(event), [tame(command) for command in commands]))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, Error) as error:
            raise self._fail(f"sequence {sequence} ({type(event).__name__}) cannot be encoded: {error}") from error

    def _archive(self, index: Index, sequence: int, commands: Sequence[Command]) -> None:
        for command in commands:
            if type(command) is Archive:
                try:
                    index.add(sequence, command.program)
                except JournalError as error:
                    self.tell(error.message)
                    self._index, self._is_index_lost = None, True
                    return

    def _write_index(self) -> bool:
        """Whether the index, where there is one, holds every program archived so far."""
        if self._index is not None:
            try:
                self._index.flush(self._sequence)
            except JournalError as error:
                self.tell(error.message)
                self._index, self._is_index_lost = None, True
        return not self._is_index_lost

    def _drop_old_segments(self) -> None:
        if self._keep_segments is not None:
            # A segment may go only when a snapshot on disk stands for it and all before it.
            oldest = self._number - self._keep_segments
            limit = max((s.number for s in files.list_snapshots(self.path) if s.number <= oldest), default=0)
            for number, path in files.list_segments(self.path):
                if number < limit:
                    path.unlink(missing_ok=True)

    def _fail(self, what: str) -> JournalError:
        self._failure = what
        return self._refusal()

    def _refusal(self) -> JournalError:
        # A new one each time: an exception that is raised again and again collects every traceback.
        message = f"journal {str(self.path)!r} accepts nothing more: {self._failure}"
        return JournalError(message, code="journal_failed")

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
