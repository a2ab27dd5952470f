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
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][ \t]*[\r\n]")

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
        if b'"usage"' in data and _USAGE_OBJECT.search(data):
            data = self._take_usage(data)
        if b"[DONE]" in data and (found := _DONE.search(data)):
            self.is_done = True
            data = data[: _first_event_end(data, found.start() + 1)]
        return data

    def finish(self) -> bytes:
        """The engine has said all: an end mark without its blank line is one all the same."""
        held, self._held = self._held.strip(), b""
        if held not in (b"data: [DONE]", b"data:[DONE]"):
            return b""
        self.is_done = True
        return b"data: [DONE]\n\n"

    def _take_usage(self, data: bytes) -> bytes:
        """Read usage from the events that carry it; drop an event that carries nothing else if we asked for it."""
        kept: list[bytes] = []
        done = 0
        for start, end in _events_with_usage(data):
            if self._reads_usage(data[start:end]) and self.drops_usage:
                kept.append(data[done:start])
                done = end
        return data if done == 0 else b"".join((*kept, data[done:]))

    def _reads_usage(self, event: bytes) -> bool:
        """Whether the event carries usage and nothing else; remembers the usage."""
        if not _USAGE_OBJECT.search(event):
            return False
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


def _last_event_end(data: bytes) -> int:
    """Where the last whole event ends, 0 where none does."""
    if data.endswith(b"\n\n"):
        return len(data)
    plain = data.rfind(b"\n\n")
    carriage = data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)


def _last_line_end(data: bytes) -> int:
    """Where the last line ends, its end not counted, for that may be half of a blank line; all where there is none."""
    at = data.rfind(b"\n")
    end = len(data) if at < 0 else at - data.endswith(b"\r", 0, at)
    return end if end or len(data) <= 2 else len(data)


def _first_event_end(data: bytes, start: int) -> int:
    """Where the event that holds `start` ends, with its blank line."""
    plain, carriage = data.find(b"\n\n", start), data.find(b"\r\n\r\n", start)
    ends = [at for at in (plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0) if at]
    return min(ends, default=len(data))


def _events_with_usage(data: bytes) -> Iterator[tuple[int, int]]:
    """Where events that mention a usage object begin and end, each with its blank line."""
    end = 0
    for match in _USAGE_OBJECT.finditer(data):
        if match.start() < end:
            continue
        start = _last_event_end(data[end : match.start()]) + end
        end = _first_event_end(data, match.end())
        yield start, end
