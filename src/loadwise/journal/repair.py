"""Making a journal end with a whole entry again, after its writer was killed."""

import os
from pathlib import Path

from loadwise.kernel.errors import JournalError

from . import files
from .reader import Segment, TornTail, is_stub


def cut_torn_tail(path: Path) -> tuple[TornTail | None, Segment, float]:
    """Cut the torn tail off a journal whose lock is held; returns it, the last segment and its last `at_s`.

    Raises:
        JournalError: the last segment is damaged elsewhere than at its end.
    """
    segments = files.list_segments(path)
    if len(segments) > 1 and is_stub(segments[-1].path):
        return _drop_stub(path, segments)
    number, last = segments[-1]
    segment = Segment(number, last, is_last=True)
    at_s = segment.header.starts_at_s
    for entry in segment.entries():
        at_s = entry.event.at_s
    if segment.torn is not None:
        try:
            with open(last, "r+b") as file:
                file.truncate(segment.torn.offset)
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(f"{segment.torn}, which cannot be cut off: {error}") from error
    return segment.torn, segment, at_s


def _drop_stub(path: Path, segments: list[files.SegmentPath]) -> tuple[TornTail, Segment, float]:
    """Remove a last segment that was torn inside its header, and the snapshot that would stand for its beginning."""
    stub = segments[-1]
    n_bytes = stub.path.stat().st_size
    try:
        stub.path.unlink()
        files.snapshot_path(path, stub.number).unlink(missing_ok=True)
        files.sync_directory(path)
    except OSError as error:
        raise JournalError(f"{stub.path.name} is torn inside its header and cannot be removed: {error}") from error
    torn, segment, at_s = cut_torn_tail(path)
    sequence = segment.next_sequence - 1 if torn is None else torn.after_sequence
    return TornTail(stub.path, 0, n_bytes, sequence), segment, at_s
