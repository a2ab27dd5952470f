"""Reading a journal: every entry once and in order, and never a damaged one in silence.

Theory of operation. A file may end in a torn frame: the writer was killed, or is writing now. That tail was never
acknowledged and is left out, with a message. Anything else that does not fit (a damaged frame with a whole one after
it, a missing sequence, a torn end of a segment that has a successor) is an error that names segment, offset and
sequence.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from loadwise.kernel.errors import JournalError, SchemaMismatch

from . import files
from .entry import Entry, Header, decode_entry, decode_header
from .frame import HEAD, MAGIC_BYTES, SEGMENT_MAGIC, find_frame, read_frame


class TornTail(NamedTuple):
    """Bytes after the last whole entry of a journal."""

    path: Path
    offset: int
    n_bytes: int
    after_sequence: int

    def __str__(self) -> str:
        return (
            f"{self.path.name}: {self.n_bytes} bytes at offset {self.offset} after sequence {self.after_sequence} "
            "are a torn tail"
        )


class Damage(JournalError):
    """A journal that does not say what was written. `code` is `journal_corrupt`."""

    code = "journal_corrupt"

    def __init__(self, path: Path, offset: int, sequence: int, what: str) -> None:
        super().__init__(f"{path.name}: {what} at offset {offset}, where sequence {sequence} should be")
        self.path = path
        self.offset = offset
        self.sequence = sequence


class Segment:
    """One file of a journal, read lazily."""

    def __init__(self, number: int, path: Path, *, is_last: bool) -> None:
        self.number = number
        self.path = path
        self.is_last = is_last
        self.torn: TornTail | None = None
        """Known once `entries` is exhausted."""
        self.n_bytes = 0
        """Bytes of whole frames, known once `entries` is exhausted."""
        self.header, self._first_offset = read_header(path)
        self.next_sequence = self.header.first_sequence
        """One above the last entry that was read."""

    def entries(self) -> Iterator[Entry]:
        """The segment's entries in order.

        Raises:
            Damage: damaged, missing or disordered entries, or a torn end that is not the journal's.
            SchemaMismatch: an entry that this version does not know.
        """
        at_s = self.header.starts_at_s
        self.next_sequence = self.header.first_sequence
        for offset, payload in self.payloads():
            entry = self._decode(payload, offset)
            if entry.sequence != self.next_sequence:
                raise Damage(self.path, offset, self.next_sequence, f"sequence {entry.sequence} stands")
            if not entry.event.at_s >= at_s:
                falls = f"time falls from {at_s!r} to {entry.event.at_s!r} s (law L3)"
                raise Damage(self.path, offset, self.next_sequence, falls)
            self.next_sequence += 1
            at_s = entry.event.at_s
            yield entry
        if self.torn is not None and not self.is_last:
            raise Damage(self.path, self.torn.offset, self.next_sequence, "a segment that has a successor is torn")

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """Every whole frame after the header as (offset, payload); sets `torn`, raises `Damage`."""
        with _open(self.path) as file:
            # The writer may be at work: what it adds after this moment is not ours to judge.
            size = file.seek(0, 2)
            offset = file.seek(self._first_offset)
            sequence = self.header.first_sequence
            while offset < size:
                payload = read_frame(file, size - offset)
                if payload is None:
                    self._judge_rest(file, offset, size, sequence)
                    break
                yield offset, payload
                sequence += 1
                offset += HEAD.size + len(payload)
        self.n_bytes = offset

    def _judge_rest(self, file: BinaryIO, offset: int, size: int, sequence: int) -> None:
        file.seek(offset)
        rest = file.read(size - offset)
        following = find_frame(rest, 1)
        if following is not None:
            raise Damage(
                self.path, offset, sequence, f"a damaged frame (a whole one follows at offset {offset + following})"
            )
        self.torn = TornTail(self.path, offset, size - offset, sequence - 1)

    def _decode(self, payload: bytes, offset: int) -> Entry:
        try:
            return decode_entry(payload)
        except SchemaMismatch as error:
            raise SchemaMismatch(
                f"{self.path.name}: sequence {self.next_sequence} at offset {offset}, written by loadwise "
                f"{self.header.loadwise_version}: {error}"
            ) from error


def read_header(path: Path) -> tuple[Header, int]:
    """A segment's header and the offset of its first entry.

    Raises:
        JournalError: empty, not a journal, or a torn or damaged header.
        SchemaMismatch: another schema version.
    """
    with _open(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        magic = file.read(MAGIC_BYTES)
        if not magic:
            raise JournalError(f"{path.name} is empty: it has no header", code="journal_corrupt")
        if magic != SEGMENT_MAGIC:
            torn = size < MAGIC_BYTES and SEGMENT_MAGIC.startswith(magic)
            what = f"ends after {size} bytes, inside its header" if torn else f"is no journal: it begins with {magic!r}"
            raise JournalError(f"{path.name} {what}", code="journal_corrupt")
        payload = read_frame(file, size - MAGIC_BYTES)
        if payload is None:
            raise JournalError(f"{path.name} has a torn or damaged header", code="journal_corrupt")
        try:
            return decode_header(payload), MAGIC_BYTES + HEAD.size + len(payload)
        except SchemaMismatch as error:
            raise SchemaMismatch(f"{path.name}: {error}") from error


def is_stub(path: Path) -> bool:
    """Whether a file is a segment that was torn inside its header: no whole header, and no whole frame either."""
    try:
        read_header(path)
    except SchemaMismatch:
        return False
    except JournalError:
        with _open(path) as file:
            return find_frame(file.read(), 0) is None
    return False


def _last_sequence(found: files.SegmentPath) -> int:
    segment = Segment(found.number, found.path, is_last=True)
    for _ in segment.entries():
        pass
    return segment.next_sequence - 1


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise JournalError(f"journal segment {str(path)!r} cannot be read: {error.strerror}") from error


class Reader:
    """A journal opened for reading. Iterating gives its entries; `torn` is known once they are exhausted."""

    def __init__(self, path: str | Path, *, from_segment: int = 1) -> None:
        self.path = Path(path)
        found = [s for s in files.list_segments(self.path) if s.number >= from_segment]
        if not found:
            there = "holds no segment" if self.path.exists() else "does not exist"
            raise JournalError(f"journal {str(self.path)!r} {there}")
        for before, after in itertools.pairwise(found):
            if after.number != before.number + 1:
                raise JournalError(
                    f"journal {str(self.path)!r}: segment {before.number + 1} is missing before {after.path.name}",
                    code="journal_corrupt",
                )
        self.torn: TornTail | None = None
        if len(found) > 1 and is_stub(found[-1].path):
            # The segment was torn before its first entry: the journal ends with the one before.
            stub = found.pop()
            self.torn = TornTail(stub.path, 0, stub.path.stat().st_size, _last_sequence(found[-1]))
        self._found = found
        self.header = read_header(found[0].path)[0]
        """Of the first segment that is still kept."""

    def segments(self) -> Iterator[Segment]:
        """The segments in order. Each must be exhausted before the next, for the seams to be checked."""
        expected: int | None = None
        for number, path in self._found:
            segment = Segment(number, path, is_last=number == self._found[-1].number)
            if expected is not None and segment.header.first_sequence != expected:
                raise Damage(path, 0, expected, f"a segment from sequence {segment.header.first_sequence} stands")
            yield segment
            expected = segment.next_sequence
            self.torn = self.torn or segment.torn

    def __iter__(self) -> Iterator[Entry]:
        for segment in self.segments():
            yield from segment.entries()


def read(path: str | Path) -> Reader:
    """Open a journal, or one file of it, for reading; `reader.header` says how it was made, iterating gives entries.

    Raises:
        JournalError: missing, empty or not a journal.
        SchemaMismatch: another schema version.
    """
    return Reader(path)
