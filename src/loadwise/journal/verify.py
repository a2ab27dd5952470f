"""Walking a journal for its integrity, and printing it: what needs no machine."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadwise.kernel.errors import JournalError, SchemaMismatch
from loadwise.kernel.fact import Fact

from . import files
from .entry import decode_entry
from .frame import HEAD, find_frame, take_frame
from .reader import Reader, read_header
from .snapshot import read_snapshot

PROBLEMS_MAX = 1000
"""Problems reported; a file of garbage has as many as bytes."""


class Problem(Fact, frozen=True, kw_only=True):
    """One thing that does not fit."""

    file: str
    offset: int
    sequence: int
    """Of the entry that should stand there."""
    what: str

    def __str__(self) -> str:
        return f"{self.file} at offset {self.offset} (sequence {self.sequence}): {self.what}"


class Integrity(Fact, frozen=True, kw_only=True):
    """What a walk over a whole journal found. A torn tail is no problem: it is what recovery cuts off."""

    n_segments: int
    n_snapshots: int
    n_entries: int
    n_decisions: int
    n_credits: int
    n_bytes: int
    first_sequence: int
    last_sequence: int
    torn_bytes: int
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or damaged."""
        return not self.problems


def verify(path: str | Path) -> Integrity:
    """Check every frame, sequence, instant and snapshot of a journal; damage is reported, not raised.

    Raises:
        JournalError: there is no journal at `path`.
    """
    path = Path(path)
    segments = files.list_segments(path)
    if not segments:
        Reader(path)  # says which: nothing there, or nothing in it
    walk = _Walk()
    for number, segment in segments:
        if walk.n_segments and number != walk.number + 1:
            walk.problem(segment, 0, f"segment {walk.number + 1} is missing before it")
        walk.number = number
        walk.segment(segment, is_last=number == segments[-1].number)
    snapshots = files.list_snapshots(path)
    for _, snapshot in snapshots:
        try:
            read_snapshot(snapshot)
        except JournalError as error:
            walk.problem(snapshot, 0, error.message)
    return Integrity(
        n_segments=len(segments),
        n_snapshots=len(snapshots),
        n_entries=walk.n_entries,
        n_decisions=walk.n_decisions,
        n_credits=walk.n_credits,
        n_bytes=sum(p.stat().st_size for _, p in segments),
        first_sequence=walk.first_sequence,
        last_sequence=walk.sequence,
        torn_bytes=walk.torn_bytes,
        problems=tuple(walk.problems),
    )


class _Walk:
    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.number = self.n_segments = self.n_entries = self.n_decisions = self.n_credits = 0
        self.first_sequence = self.sequence = self.torn_bytes = 0
        self.at_s = 0.0

    def problem(self, path: Path, offset: int, what: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(file=path.name, offset=offset, sequence=self.sequence + 1, what=what))

    def segment(self, path: Path, *, is_last: bool) -> None:
        self.n_segments += 1
        try:
            header, offset = read_header(path)
        except JournalError as error:
            self.problem(path, 0, error.message)
            return
        if self.n_segments == 1:
            self.first_sequence = header.first_sequence
            self.sequence, self.at_s = header.first_sequence - 1, header.starts_at_s
        elif header.first_sequence != self.sequence + 1:
            self.problem(path, 0, f"the segment begins at sequence {header.first_sequence}")
            self.sequence = header.first_sequence - 1
        self._frames(path, path.read_bytes(), offset, is_last)

    def _frames(self, path: Path, data: bytes, offset: int, is_last: bool) -> None:
        while offset < len(data):
            payload = take_frame(data, offset)
            if payload is not None:
                self._entry(path, offset, bytes(payload))
                offset += HEAD.size + len(payload)
                continue
            following = find_frame(data, offset + 1)
            if following is None and is_last:
                self.torn_bytes = len(data) - offset
                return
            end = len(data) if following is None else following
            self.problem(path, offset, f"{end - offset} bytes are damaged")
            offset = end

    def _entry(self, path: Path, offset: int, payload: bytes) -> None:
        try:
            entry = decode_entry(payload)
        except SchemaMismatch as error:
            self.problem(path, offset, error.message)
            self.sequence += 1
            return
        if entry.sequence != self.sequence + 1:
            self.problem(path, offset, f"sequence {entry.sequence} stands there")
        if not entry.event.at_s >= self.at_s:
            self.problem(path, offset, f"time falls from {self.at_s!r} to {entry.event.at_s!r} s (law L3)")
        self.sequence, self.at_s = entry.sequence, entry.event.at_s
        self.n_entries += 1
        self.n_decisions += len(entry.decisions)
        self.n_credits += len(entry.credits)


def cat(path: str | Path) -> Iterator[str]:
    """The journal as JSON lines: `{"header": …}` before each segment's entries.

    Raises:
        JournalError: as `read`, at the line where it is found.
    """
    encode = msgspec.json.encode
    for segment in Reader(path).segments():
        yield encode({"header": segment.header}).decode()
        for entry in segment.entries():
            yield encode(entry).decode()
