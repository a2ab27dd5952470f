"""What both sides of the HTTP layer share: one coarse clock, header blocks, status lines, error bodies.

Theory of operation. A header block is `bytes`: zero or more complete lines, each ending in CRLF, ready to be
put on the wire; the hot path builds it by formatting and never takes it apart. `header_block` builds one from
pairs and refuses what could forge a line; use it for every value that came from outside.

Timeouts cost nothing per request: whoever waits stores a deadline and one `Ticker` per loop sweeps all of
them. A deadline is `ticker.after(limit)`, with twice the longest step of the clock to spare: it never fires early, nor
for a standstill of this process, and fires at most five periods late while the loop keeps pace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus

import msgspec

TICK_S = 0.1
"""Default period of the sweep: the grain of every timeout of the HTTP layer."""

JSON_TYPE = b"content-type: application/json\r\n"
"""Header block of a JSON body."""

EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
"""Header block of a stream of server-sent events."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade "
    b"transfer-encoding http2-settings host content-length expect".split()
)
"""Lower-case names that belong to one connection (RFC 9110, section 7.6.1) or that we write ourselves.

A relay drops them. One that reads answers also drops `accept-encoding`, so that engines answer plainly."""

STEP_TICKS = 2.0
"""So many periods a tick moves the clock at most: a busy loop is late by one, and what is later stood still."""

_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_NEVER_IN_VALUES = frozenset(range(0x20)) - {0x09} | {0x7F}


class Ticker:
    """One clock and one timer for all deadlines of one event loop.

    `start` arms it on the running loop; a test leaves it unstarted and calls `tick` with the times it wants.

    Its clock leaves standstills of this process out: what came meanwhile still lies in the sockets, and whoever waits
    must not be out of time before the loop has read. So a tick moves the clock by the time since the last one, but by
    `STEP_TICKS` at most, and a deadline has two such steps to spare: one for the tick after it is set, however late
    that comes, and one for the tick that finds it over: its limit had passed by the tick before, and the loop has read
    since.
    """

    __slots__ = ("_handle", "_loop", "_seen_s", "_spare_s", "_step_s", "_watchers", "now_s", "period_s")

    def __init__(self, period_s: float = TICK_S, now_s: float = 0.0) -> None:
        if not 0.001 <= period_s <= 60.0:
            raise ValueError(f"period_s must lie in 0.001..60, got {period_s!r}")
        self.period_s = period_s
        self.now_s = now_s
        """Seconds that this clock has shown since it began, standstills left out, as of the last tick."""
        self._step_s = STEP_TICKS * period_s
        self._spare_s = 2 * self._step_s
        self._watchers: dict[Callable[[float], None], None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen_s = 0.0
        """The loop's time at the last tick."""
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick on the running loop from now on; a second call changes nothing."""
        if self._handle is None:
            self._loop = asyncio.get_running_loop()
            self._seen_s = self._loop.time()
            self._run()

    def stop(self) -> None:
        """Disarm the timer; `start` arms it again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def watch(self, watcher: Callable[[float], None]) -> None:
        """Call `watcher(now_s)` at every tick."""
        self._watchers[watcher] = None

    def forget(self, watcher: Callable[[float], None]) -> None:
        """Stop calling `watcher`; unknown watchers are no error."""
        self._watchers.pop(watcher, None)

    def after(self, limit_s: float) -> float:
        """A deadline at least that far from now."""
        return self.now_s + self._spare_s + limit_s

    def tick(self, now_s: float) -> None:
        """Set the clock and let every watcher look at its deadlines."""
        self.now_s = now_s
        for watcher in tuple(self._watchers):
            watcher(now_s)

    def _run(self) -> None:
        assert self._loop is not None
        seen_s = self._loop.time()
        passed_s, self._seen_s = seen_s - self._seen_s, seen_s
        # Armed before the sweep: a watcher that raises must not stop the clock of all others.
        self._handle = self._loop.call_later(self.period_s, self._run)
        self.tick(self.now_s + min(passed_s, self._step_s))


class StatusLines(dict[int, bytes]):
    """Status line and Date header by status code, built on first use and renewed every second."""

    def __init__(self) -> None:
        super().__init__()
        self._second = -1
        self._date = b""
        self.renew(time.time())

    def renew(self, wall_s: float) -> None:
        """Take the date of `wall_s` (seconds since the epoch) for all answers from now on."""
        if int(wall_s) != self._second:
            self._second = int(wall_s)
            self._date = formatdate(wall_s, usegmt=True).encode()
            self.clear()

    def __missing__(self, status: int) -> bytes:
        line = b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, _reason(status), self._date)
        if 200 <= status <= 599:
            self[status] = line
        return line


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


def header_block(pairs: Iterable[tuple[str | bytes, str | bytes]]) -> bytes:
    """Build a header block from names and values.

    Raises:
        ValueError: A name is not a token, or a value holds a control character or is not latin-1: it could
            forge a header line.
    """
    lines = []
    for name, value in pairs:
        name_bytes = name.encode("latin-1", "replace") if isinstance(name, str) else name
        if not name_bytes or not _TOKEN.issuperset(name_bytes):
            raise ValueError(f"not a header name: {name!r}")
        try:
            value_bytes = value.encode("latin-1") if isinstance(value, str) else value
        except UnicodeEncodeError as problem:
            raise ValueError(f"header {name!r} holds characters outside latin-1: {value!r}") from problem
        if not _NEVER_IN_VALUES.isdisjoint(value_bytes):
            raise ValueError(f"header {name!r} holds a control character: {value!r}")
        lines.append(b"%b: %b\r\n" % (name_bytes, value_bytes))
    return b"".join(lines)


_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def error_kind(status: int) -> str:
    """OpenAI's word for the kind of error that an HTTP status tells of."""
    return _ERROR_KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """The JSON body that OpenAI clients expect of every failure (`kind` becomes its `type`)."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
