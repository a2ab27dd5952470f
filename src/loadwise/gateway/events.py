"""A stream of server-sent events on its way through: whole events out, usage and the end noticed."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from loadwise.kernel.work import Usage

from .openai import UNREADABLE, read_leniently
from .usage import usage_of


class _Chunk(msgspec.Struct):
    usage: Any = None
    choices: list[msgspec.Raw] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
# Marks are found by their bytes and then looked at: a pattern would be tried at every byte of what came in one read.
_USAGE = b'"usage"'
_OBJECT_AFTER = re.compile(rb"\s*:\s*\{")
_DONE = b"[DONE]"
_AFTER_DONE = re.compile(rb"[ \t]*[\r\n]")

EVENT_MAX_BYTES = 4 * 1024 * 1024
"""One event of a stream that has not ended; beyond it the bytes go through unread."""


class EventStream:
    """Follows a stream of server-sent events as it passes: whole events out, usage and the end noticed.

    Whole events only are let through, so that what the client has received before a break is always well formed.
    """

    __slots__ = ("_held", "drops_usage", "is_done", "is_torn", "n_bytes", "usage")

    def __init__(self, *, drops_usage: bool) -> None:
        self._held = b""
        self.drops_usage = drops_usage
        self.usage: Usage | None = None
        self.is_done = False
        """`[DONE]` has passed."""
        self.is_torn = False
        """The last thing that passed was part of an event."""
        self.n_bytes = 0

    def feed(self, piece: bytes) -> bytes:
        """Take what the engine sent; return what may go to the client now."""
        data = self._held + piece if self._held else piece
        cut = _last_event_end(data)
        if cut == len(data):
            self._held = b""
            self.is_torn = False
        else:
            if cut == 0 and (self.is_torn or len(data) > EVENT_MAX_BYTES):
                cut = _last_line_end(data)
                self.is_torn = True
            elif cut:
                self.is_torn = False
            self._held = data[cut:]
            data = data[:cut]
        if not data:
            return data
        self.n_bytes += len(data)
        usage_at = _usage_at(data, 0)
        if usage_at >= 0:
            data = self._take_usage(data, usage_at)
        done_at = _done_at(data)
        if done_at >= 0:
            self.is_done = True
            data = data[: _first_event_end(data, done_at)]
        return data

    def finish(self) -> bytes:
        """The engine has said all: an end mark without its blank line is one all the same."""
        held, self._held = self._held.strip(), b""
        if held not in (b"data: [DONE]", b"data:[DONE]"):
            return b""
        self.is_done = True
        return b"data: [DONE]\n\n"

    def _take_usage(self, data: bytes, usage_at: int) -> bytes:
        """Read usage from the events that carry it; drop an event that carries nothing else if we asked for it."""
        kept: list[bytes] = []
        done = 0
        for start, end in _events_with_usage(data, usage_at):
            if self._reads_usage(data[start:end]) and self.drops_usage:
                kept.append(data[done:start])
                done = end
        return data if done == 0 else b"".join((*kept, data[done:]))

    def _reads_usage(self, event: bytes) -> bool:
        """Whether the event carries usage and nothing else; remembers the usage."""
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        payload = b"\n".join(lines)
        try:
            chunk = _decode_chunk(payload)
            said, choices = chunk.usage, chunk.choices
        except UNREADABLE:
            found = read_leniently(payload)
            if not isinstance(found, dict):
                return False
            said, choices = found.get("usage"), found.get("choices")
        if not isinstance(said, dict):
            return False
        self.usage = usage_of(said) or self.usage
        return not choices


def _done_at(data: bytes) -> int:
    """Where the end mark of a stream stands, on a line of its own as `data: [DONE]`; -1 where there is none.

    >>> _done_at(b"data: [DONE]\\n\\n"), _done_at(b'data: "data: [DONE]"\\n\\n')
    (6, -1)
    """
    at = data.find(_DONE)
    while at >= 0:
        start = at - 6 if data.endswith(b"data: ", 0, at) else at - 5 if data.endswith(b"data:", 0, at) else -1
        is_at_start = start == 0 or (start > 0 and data[start - 1] in b"\r\n")
        if is_at_start and _AFTER_DONE.match(data, at + len(_DONE)):
            return at
        at = data.find(_DONE, at + 1)
    return -1


def _usage_at(data: bytes, start: int) -> int:
    """Where a field `usage` that holds an object begins, from `start` on; -1 where none does."""
    at = data.find(_USAGE, start)
    while at >= 0 and _OBJECT_AFTER.match(data, at + len(_USAGE)) is None:
        at = data.find(_USAGE, at + 1)
    return at


def _last_event_end(data: bytes, start: int = 0, end: int | None = None) -> int:
    """Where the last whole event of a part of `data` ends; where the part begins, if none does."""
    end = len(data) if end is None else end
    if data.endswith(b"\n\n", start, end):
        return end
    plain = data.rfind(b"\n\n", start, end)
    carriage = data.rfind(b"\r\n\r\n", max(plain, start), end)
    return carriage + 4 if carriage >= 0 else plain + 2 if plain >= 0 else start


def _last_line_end(data: bytes) -> int:
    """Where the last line ends, its end not counted, for that may be half of a blank line; all where there is none."""
    at = data.rfind(b"\n")
    end = len(data) if at < 0 else at - data.endswith(b"\r", 0, at)
    return end if end or len(data) <= 2 else len(data)


def _first_event_end(data: bytes, start: int) -> int:
    """Where the event that holds `start` ends, with its blank line."""
    plain = data.find(b"\n\n", start)
    end = plain + 2 if plain >= 0 else len(data)
    carriage = data.find(b"\r\n\r\n", start, end)  # no further: else many events in one read cost its square
    return carriage + 4 if carriage >= 0 else end


def _events_with_usage(data: bytes, usage_at: int) -> Iterator[tuple[int, int]]:
    """Where events that mention a usage object begin and end, each with its blank line; the first at `usage_at`."""
    end = 0
    while usage_at >= 0:
        start = _last_event_end(data, end, usage_at)
        end = _first_event_end(data, usage_at)
        yield start, end
        usage_at = _usage_at(data, end)
