"""Making a journal end with a whole entry again, after its writer was killed."""

import os
from pathlib import Path

from loadwise.kernel.errors import JournalError

from . import files
from .reader import Segment, TornTail


def cut_torn_tail(path: Path) -> tuple[TornTail | None, Segment, float]:
    """Cut the torn tail off a journal whose lock is held; returns it, the last segment and its last `at_s`.

    Raises:
        JournalError: the last segment is damaged elsewhere than at its end.
    """
    number, last = files.list_segments(path)[-1]
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
