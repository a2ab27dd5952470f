"""The index: programs that have left the router's memory, found by id; derived from the journal, so it may be lost.

What cannot be read is answered as unknown, with a message: a damaged index must not stop a host from serving.

Theory of operation. `add` remembers a record in memory; a thread writes batches to SQLite (WAL), off the host's path.
Nothing is dropped: at the bound of waiting records `add` writes them itself. The last indexed sequence is stored in
the same transaction, so that recovery knows which archives to regenerate.
"""

import sqlite3
import threading
from collections import deque
from pathlib import Path

import msgspec

from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.errors import Error, JournalError

BATCH = 256
"""Waiting records at which the thread is woken at once; fewer wait `LINGER_S`."""

LINGER_S = 0.5
WAITING_MAX = 4096
"""Waiting records at which `add` writes them itself (law L15)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS programs (
    program_id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, archived_at_s REAL NOT NULL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS programs_by_sequence ON programs (sequence);
CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY CHECK (id = 1), sequence INTEGER NOT NULL);
"""
_SCHEMA_VERSION = 1
_KEEP_LATEST = """
INSERT INTO programs VALUES (?, ?, ?, ?) ON CONFLICT (program_id) DO UPDATE SET sequence = excluded.sequence,
archived_at_s = excluded.archived_at_s, record = excluded.record WHERE excluded.sequence >= programs.sequence
"""
MESSAGES_MAX = 100

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ProgramRecord).decode

_Row = tuple[str, int, float, bytes]


class Index:
    """Archived programs by id.

    Args:
        path: the SQLite file; one that is damaged or of another schema is set aside (`messages` says so), and
            recovery fills a new one.

    Raises:
        JournalError: the file cannot be opened or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.messages: deque[str] = deque(maxlen=MESSAGES_MAX)
        """What went wrong with it, and what was done; taken out by whoever tells the operator."""
        self._is_damaged = False
        self._closing = threading.Event()
        self._waiting: dict[str, tuple[int, ProgramRecord]] = {}
        self._sequence_seen = 0
        self._failure: str | None = None
        self._is_closing = False
        self._wake = threading.Condition()
        self._writing = threading.Lock()
        self._writer = self._open()
        self._reader = sqlite3.connect(self.path, check_same_thread=False)
        self._reading = threading.Lock()
        row = self._writer.execute("SELECT sequence FROM progress").fetchone()
        self._last_sequence: int = row[0] if row else 0
        self._thread = threading.Thread(target=self._run, name="journal-index", daemon=True)
        self._thread.start()

    @property
    def last_sequence(self) -> int:
        """All archives up to this sequence are in the file."""
        return self._last_sequence

    def add(self, sequence: int, record: ProgramRecord) -> None:
        """Remember that a program left the router's memory in entry `sequence`.

        Raises:
            JournalError: the index cannot be written.
        """
        with self._wake:
            if self._failure is not None:
                raise JournalError(f"index {str(self.path)!r}: {self._failure}", code="index_failed")
            waiting = self._waiting.get(record.program_id)
            if waiting is None or waiting[0] <= sequence:
                self._waiting[record.program_id] = (sequence, record)
            self._sequence_seen = max(self._sequence_seen, sequence)
            n_waiting = len(self._waiting)
            if n_waiting == 1 or n_waiting == BATCH:
                self._wake.notify()
        if n_waiting >= WAITING_MAX:
            self.flush()

    def get(self, program_id: str) -> ProgramRecord | None:
        """The record of an archived program; None where it is unknown, or cannot be read."""
        with self._wake:
            waiting = self._waiting.get(program_id)
        if waiting is not None:
            return waiting[1]
        rows = self._read("SELECT record FROM programs WHERE program_id = ?", (program_id,))
        return rows[0] if rows else None

    def recent(self, limit: int = 100) -> list[ProgramRecord]:
        """The programs that were archived last, the latest first."""
        with self._wake:
            waiting = sorted(self._waiting.values(), key=lambda w: -w[0])[:limit]
        rows = self._read("SELECT record FROM programs ORDER BY sequence DESC LIMIT ?", (limit,))
        found = {w[1].program_id: w[1] for w in waiting}
        for record in rows:
            found.setdefault(record.program_id, record)
        return list(found.values())[:limit]

    def count(self) -> int:
        """How many programs the file holds."""
        return int(self._query("SELECT count(*) FROM programs", ())[0][0])

    def flush(self, sequence: int | None = None) -> None:
        """Write what waits, now and here.

        Args:
            sequence: every archive up to this entry has been added; None claims no more than was added.

        Raises:
            JournalError: the index cannot be written.
        """
        with self._writing:
            with self._wake:
                waiting = dict(self._waiting)
                # The entry that was seen last may archive more programs than were added so far.
                reached = max(self._sequence_seen - 1 if sequence is None else sequence, self._last_sequence)
            if not waiting and reached == self._last_sequence:
                return
            try:
                self._write(waiting, reached)
            except sqlite3.Error as error:
                self._failure = str(error)
                self._note_damage(error)
                raise JournalError(f"index {str(self.path)!r}: {error}", code="index_failed") from error
            self._last_sequence = reached
            with self._wake:
                for program_id, written in waiting.items():
                    if self._waiting.get(program_id) is written:
                        del self._waiting[program_id]

    def settle(self, sequence: int) -> None:
        """Agree with a journal that ends at `sequence`, all of whose archives have been added.

        The index may know more than the journal where the machine died, not only the process: what the journal lost
        has not happened.
        """
        self.flush(sequence)
        with self._writing, self._writer:
            self._writer.execute("DELETE FROM programs WHERE sequence > ?", (sequence,))
            self._writer.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", (sequence,))
            self._last_sequence = self._sequence_seen = sequence

    def tell(self, message: str) -> None:
        """Leave a message for the operator."""
        self.messages.append(message)

    def closes_within(self, seconds: float) -> bool:
        """Wait so long; True as soon as the index is being closed."""
        return self._closing.wait(seconds)

    def prune(self, *, keep: int | None = None, before_s: float | None = None) -> int:
        """Forget all but the `keep` programs archived last, and all that ended before `before_s`; returns how many."""
        self.flush()
        n_gone = 0
        with self._writing, self._writer:
            if before_s is not None:
                n_gone += self._writer.execute("DELETE FROM programs WHERE archived_at_s < ?", (before_s,)).rowcount
            if keep is not None:
                n_gone += self._writer.execute(
                    "DELETE FROM programs WHERE sequence <= (SELECT sequence FROM programs ORDER BY sequence DESC "
                    "LIMIT 1 OFFSET ?)",
                    (keep,),
                ).rowcount
        return n_gone

    def close(self) -> None:
        """Write what waits and close the file; closing twice is harmless."""
        with self._wake:
            if self._is_closing:
                return
            self._is_closing = True
            self._closing.set()
            self._wake.notify()
        self._thread.join()
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._reader.close()
            self._writer.close()
            if self._is_damaged:
                self._set_aside("it is damaged")

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._is_closing:
                    self._wake.wait()
                if not self._is_closing and len(self._waiting) < BATCH:
                    self._wake.wait(LINGER_S)
                if self._is_closing:
                    return
            try:
                self.flush()
            except JournalError:
                return  # `add` tells it from now on

    def _write(self, waiting: dict[str, tuple[int, ProgramRecord]], reached: int) -> None:
        rows: list[_Row] = [
            (program_id, sequence, record.ended_at_s or record.arrived_at_s, _encode(record))
            for program_id, (sequence, record) in waiting.items()
        ]
        with self._writer:
            self._writer.executemany(_KEEP_LATEST, rows)
            self._writer.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", (reached,))

    def _query(self, sql: str, arguments: tuple[object, ...]) -> list[tuple[bytes]]:
        with self._reading:
            return self._reader.execute(sql, arguments).fetchall()

    def _read(self, sql: str, arguments: tuple[object, ...]) -> list[ProgramRecord]:
        try:
            return [_decode(blob) for (blob,) in self._query(sql, arguments)]
        except (sqlite3.Error, msgspec.MsgspecError, Error) as error:
            self._note_damage(error)
            text = f"index {str(self.path)!r} cannot be read, its programs count as unknown: {error}"
            if text not in self.messages:
                self.tell(text)
            return []

    def _note_damage(self, error: Exception) -> None:
        """What is damaged is set aside at the end, so that the next start fills a new one."""
        if not isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
            self._is_damaged = True

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(
                    f"index {str(self.path)!r} cannot be opened: {error}", code="index_failed"
                ) from error
            self._set_aside(str(error))
            return self._connect()

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_name(self.path.name + ".broken")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.tell(f"index {str(self.path)!r} was unusable ({why}); set aside as {aside.name}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"schema version is {version}, {_SCHEMA_VERSION} is known")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection
