"""One request to an engine and the connection that carries it.

Parser callbacks only collect; what one read brought is delivered after the parser has returned, in the order
head, body, end. So a sink may send, pause or cancel from inside its callbacks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools
import msgspec

if TYPE_CHECKING:
    from loadwise.wire.client import Upstream

NEVER = float("inf")
_MOST_INTERIM = 16  # 1xx answers before the real one.


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long one attempt waits, by phase. Kept by a sweep (`heads.Ticker`): a few ticks late, never early."""

    connect_s: float = 5.0
    """For a connection, including TLS and waiting for a free one."""
    first_byte_s: float = 600.0
    """From the request to the first byte of the answer's body."""
    idle_s: float = 120.0
    """Between two reads of the body."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")


class Sink(Protocol):
    """Who hears of an attempt; see the docstring of `client`."""

    def on_head(self, status: int, headers: dict[bytes, bytes], /) -> None: ...

    def on_body(self, data: bytes, /) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, kind: str, detail: str, /) -> None: ...


class Attempt:
    """Handle on a request that was sent; made by `Upstream.send`."""

    __slots__ = (
        "connection",
        "deadline_s",
        "dial",
        "is_paused",
        "request",
        "sink",
        "timeout_kind",
        "timeouts",
        "upstream",
    )

    def __init__(self, upstream: Upstream, request: bytes, sink: Sink, timeouts: Timeouts) -> None:
        self.upstream = upstream
        self.request = request
        self.sink: Sink | None = sink
        """Nobody once the attempt has ended, failed or been cancelled."""
        self.timeouts = timeouts
        self.connection: EngineConnection | None = None
        self.dial: asyncio.Task[None] | None = None
        self.is_paused = False
        self.timeout_kind = "connect_timeout"
        """What passing the deadline means."""
        self.deadline_s = upstream.after(timeouts.connect_s)
        """On the ticker's clock."""

    @property
    def is_open(self) -> bool:
        """Neither ended, failed nor cancelled."""
        return self.sink is not None

    @property
    def is_waiting(self) -> bool:
        """No connection of ours is free for it: nobody has been asked yet."""
        return self.sink is not None and self.connection is None and self.dial is None

    def cancel(self) -> None:
        """Give up: close the connection, so that the engine stops working; no callback comes any more."""
        if self.sink is not None:
            self.sink = None
            self.upstream.drop(self)

    def pause_reading(self) -> None:
        """Read no more until `resume_reading`; meanwhile no timeout runs. What was already read still
        arrives."""
        if self.sink is not None and not self.is_paused:
            self.is_paused = True
            if self.connection is not None:
                self.connection.pause()

    def resume_reading(self) -> None:
        """Read on."""
        if self.is_paused:
            self.is_paused = False
            if self.connection is not None:
                self.connection.resume()


class _Stop(Exception):
    """Leaves the parser from inside a callback: what the engine sends is not an answer we take."""


class EngineConnection(asyncio.Protocol):
    """Protocol of one connection to an engine; carries one attempt at a time."""

    __slots__ = (
        "_attempt",
        "_ends_with_connection",
        "_has_head",
        "_head_bytes",
        "_headers",
        "_heard",
        "_interim",
        "_is_complete",
        "_is_head_told",
        "_is_interim",
        "_is_reused",
        "_keeps_alive",
        "_parser",
        "_parts",
        "_raw_head_bytes",
        "_status",
        "_transport",
        "_upstream",
        "idle_deadline_s",
        "is_lost",
    )

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._attempt: Attempt | None = None
        self._is_reused = False
        self.is_lost = False
        self.idle_deadline_s = NEVER
        self._parts: list[bytes] = []
        self._reset()

    def _reset(self) -> None:
        self._heard = self._has_head = self._is_head_told = self._is_complete = False
        self._is_interim = self._ends_with_connection = self._keeps_alive = False
        self._interim = self._raw_head_bytes = self._head_bytes = self._status = 0
        self._headers: dict[bytes, bytes] = {}

    # ---- what the upstream and the attempt ask ----

    @property
    def is_usable(self) -> bool:
        """May carry a request."""
        return not self.is_lost and not self._transport.is_closing()

    def begin(self, attempt: Attempt) -> None:
        """Send the attempt's request; the connection is its own until the answer ends."""
        self._attempt = attempt
        attempt.connection = self
        attempt.timeout_kind = "first_byte_timeout"
        attempt.deadline_s = self._upstream.after(attempt.timeouts.first_byte_s)
        self._transport.write(attempt.request)
        if attempt.is_paused:
            self.pause()

    def abandon(self) -> None:
        """Close at once; the attempt hears nothing from us any more."""
        self._attempt = None
        self._transport.abort()

    def close(self) -> None:
        """Close a connection that carries nothing."""
        self._transport.close()

    def pause(self) -> None:
        """Stop reading; the attempt's clock stops too."""
        assert self._attempt is not None
        self._attempt.deadline_s = NEVER
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on; the attempt's clock starts anew."""
        attempt = self._attempt
        assert attempt is not None
        is_first = attempt.timeout_kind == "first_byte_timeout"
        limit_s = attempt.timeouts.first_byte_s if is_first else attempt.timeouts.idle_s
        attempt.deadline_s = self._upstream.after(limit_s)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        attempt = self._attempt
        if attempt is None:
            # An engine that speaks unasked would have its words taken for the next answer.
            self._transport.abort()
            return
        self._heard = True
        self._upstream.n_heard += 1
        fault = ""
        try:
            self._parser.feed_data(data)  # type: ignore[union-attr]
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            fault = str(problem.__context__ or problem)
            self._keeps_alive = False
        if not self._has_head and not fault:
            self._raw_head_bytes += len(data)
            if self._raw_head_bytes > 2 * self._upstream.limits.head_bytes:
                fault = f"the head of the answer is longer than {self._upstream.limits.head_bytes} bytes"
        self._deliver(attempt, fault)

    def connection_lost(self, problem: Exception | None) -> None:
        self.is_lost = True
        self._parser = None  # It holds our bound methods: without this only the collector would free us.
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.connection = None
            self._tell_of_loss(attempt, problem)
        # Last, so that a request which must be sent again goes before those that wait for a place.
        self._upstream.forget(self)

    def _tell_of_loss(self, attempt: Attempt, problem: Exception | None) -> None:
        if problem is None and self._ends_with_connection:
            self._upstream.end(attempt)
        elif self._is_reused and not self._heard:
            self._upstream.send_again(attempt)
        elif problem is not None:
            self._upstream.fail(attempt, "reset", f"the connection broke: {problem}")
        elif self._heard:
            self._upstream.fail(attempt, "truncated", "the engine closed the connection in the middle of its answer")
        else:
            self._upstream.fail(attempt, "reset", "the engine closed the connection without an answer")

    # ---- httptools callbacks: collect and bound ----

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise _Stop("a second answer to one request")
        self._headers = {}
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        limit = self._upstream.limits.head_bytes
        if self._head_bytes > limit:
            raise _Stop(f"the head of the answer is longer than {limit} bytes")
        if self._has_head:
            return  # A trailer.
        name = name.lower()
        headers = self._headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > _MOST_INTERIM:
                raise _Stop(f"status {status} in place of an answer")
            self._is_interim = True
            return
        headers = self._headers
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if coding.strip().lower() != b"chunked":
                raise _Stop(f"Transfer-Encoding {coding[:80]!r}, which was not asked for")
        elif b"content-length" not in headers:
            self._ends_with_connection = status not in (204, 304)
        self._status = status
        self._has_head = True

    def on_body(self, piece: bytes) -> None:
        self._parts.append(piece)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            return
        assert self._parser is not None
        self._is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()

    # ---- delivery ----

    def _deliver(self, attempt: Attempt, fault: str) -> None:
        """Tell the sink what one read brought. It may cancel at any of its callbacks."""
        parts = self._parts
        body = b""
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if not attempt.is_paused:
                attempt.timeout_kind = "idle_timeout"
                attempt.deadline_s = self._upstream.after(attempt.timeouts.idle_s)
        is_head_due = self._has_head and not self._is_head_told
        status, headers, is_complete = self._status, self._headers, self._is_complete
        self._is_head_told = self._has_head
        if is_complete or fault:
            # The connection is free before the sink hears of the end: what it sends next may use it.
            self._let_go(attempt)
        sink = attempt.sink
        assert sink is not None
        try:
            if is_head_due:
                sink.on_head(status, headers)
            if body and attempt.sink is not None:
                sink.on_body(body)
        except Exception as problem:
            self._upstream.report(attempt, problem)
        if is_complete:
            self._upstream.end(attempt)
        elif fault:
            self._upstream.fail(attempt, "malformed", f"the engine's answer is not valid HTTP: {fault}")

    def _let_go(self, attempt: Attempt) -> None:
        keeps_alive = self._is_complete and self._keeps_alive
        self._attempt = attempt.connection = None
        if attempt.is_paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._reset()
        self._is_reused = True
        if keeps_alive:
            self._upstream.take_back(self)
        else:
            self._transport.abort()
