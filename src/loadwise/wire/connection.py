"""One client connection: bytes in, complete requests out in order, answers back in order.

Theory of operation. llhttp (through httptools) parses every untrusted byte; this file only bounds, orders and
answers. Parser callbacks collect a request and append it to a queue; no handler runs inside the parser. After
each feed `_advance` hands the queue's head to the handler, one at a time, so pipelined requests are answered
in order. A refusal (malformed, too large, too slow) is remembered in `_refusal`, stops the parser, waits for
the answers that are owed before it, and is the last thing said on the connection; then input is discarded for
a moment (a *linger*), because closing over unread bytes resets the connection and destroys the answer on its
way.

Bounds: head bytes, one header, number of headers, body bytes, all buffered bodies of the server, pipelined
requests (reading pauses), bytes written but not read by the client (handler is told to pause, then the client
is dropped), and time for each of idle, head, body, write and linger.

A client that closes its sending side is taken as gone: a closed socket looks the same until one writes to it,
and work for a client who left must stop at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import httptools

from loadwise.wire.exchange import CLOSE, KEEP, Exchange
from loadwise.wire.heads import JSON_TYPE, error_body, error_kind

if TYPE_CHECKING:
    from loadwise.wire.server import Server

_NEVER = float("inf")
_SLICE_BYTES = 16 * 1024  # Parsed at once: bounds the requests that one read can put into the queue.
_QUEUED_BODY_BYTES = 64 * 1024  # Bodies of pipelined requests beyond which reading pauses.
_IDLE, _HEAD, _BODY, _LINGER = range(4)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Stop(Exception):
    """Leaves the parser from inside a callback; the reason is in `_refusal`."""


class Connection(asyncio.Protocol):
    """Protocol of one accepted socket; made by `Server`, driven by its event loop."""

    __slots__ = (
        "_advancing",
        "_began",
        "_body",
        "_body_bytes",
        "_continue_due",
        "_current",
        "_deadline_s",
        "_deaf",
        "_handler",
        "_head_bytes",
        "_header_count",
        "_headers",
        "_held_bytes",
        "_http10",
        "_is_last",
        "_limits",
        "_method",
        "_parser",
        "_persistence",
        "_phase",
        "_queue",
        "_raw_head_bytes",
        "_reading_paused",
        "_refusal",
        "_server",
        "_stash",
        "_target",
        "_ticker",
        "_transport",
        "_upgrading",
        "_write_deadline_s",
        "is_write_paused",
        "status_lines",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._handler = server.handler
        self._limits = server.limits
        self._ticker = server.ticker
        self.status_lines = server.status_lines
        self._transport: asyncio.Transport
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._advancing = False
        self._refusal: tuple[int, str, str] | None = None  # status, code, message
        self._deaf = False  # No byte is parsed any more.
        self._stash = b""  # Read but not parsed: the queue is full.
        self._reading_paused = False
        self.is_write_paused = False
        self._phase = _IDLE
        self._deadline_s = self._after(self._limits.keep_alive_s)
        self._write_deadline_s = _NEVER
        self._target = self._method = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = self._head_bytes = self._body_bytes = self._held_bytes = 0
        self._body: bytes | bytearray = b""
        self._persistence = b""
        self._http10 = self._upgrading = self._continue_due = self._is_last = False
        self._began = self._raw_head_bytes = 0

    # ---- what the server asks ----

    @property
    def is_draining(self) -> bool:
        """The server is closing and nothing else is owed: this answer is the last one of its connection."""
        return self._server.is_draining and not self._queue

    @property
    def peer(self) -> Any:
        """Remote address."""
        return self._transport.get_extra_info("peername")

    @property
    def open_exchanges(self) -> int:
        """Requests received and not yet answered."""
        return len(self._queue) + (self._current is not None)

    def expire(self, now_s: float) -> None:
        """Act on deadlines that have passed."""
        if now_s >= self._write_deadline_s:
            self._lose_client()
        elif now_s >= self._deadline_s:
            if self._phase == _IDLE:
                self._transport.close()
            elif self._phase == _LINGER:
                self._transport.abort()
            else:
                part = "head" if self._phase == _HEAD else "body"
                limit_s = self._limits.head_timeout_s if self._phase == _HEAD else self._limits.body_timeout_s
                self._refuse(408, "request_timeout", f"the request's {part} did not arrive within {limit_s:g} s")
                self._advance()

    def drain(self) -> None:
        """Close now if nothing is owed; else the last answer closes."""
        if self._phase == _IDLE and self._current is None and not self._queue:
            self._transport.close()

    def kill(self) -> None:
        """Close at once, whatever is owed."""
        self._lose_client()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        limits = self._limits
        self._transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_low_bytes)
        if not self._server.admit(self):
            self._refuse(503, "too_many_connections", f"more than {limits.connections} connections are open")
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._stash:
            self._stash += data
        elif len(data) <= _SLICE_BYTES:
            self._feed(data)
            self._advance()
            if self._queue:
                self._pause_if_backlogged()
        else:
            self._feed_in_slices(data)

    def eof_received(self) -> None:
        # Returning None closes the transport once it has flushed; the write limit cuts off who does not read.
        self._write_deadline_s = self._after(self._limits.write_timeout_s)
        self._client_left()

    def connection_lost(self, problem: Exception | None) -> None:
        self._client_left()
        self._deaf = True
        self._deadline_s = self._write_deadline_s = _NEVER
        self._release(self._held_bytes)
        self._held_bytes = 0
        self._parser = None  # It holds our bound methods: without this only the collector would free us.
        self._stash = b""
        self._server.forget(self)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._write_deadline_s = self._after(self._limits.write_timeout_s)
        if self._current is not None and self._current.on_pause is not None:
            self._call(self._current.on_pause)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._write_deadline_s = _NEVER
        if self._current is not None and self._current.on_resume is not None:
            self._call(self._current.on_resume)
        self._advance()

    # ---- what an exchange asks ----

    def write(self, data: bytes) -> None:
        """Put bytes on the wire, in the order of the calls."""
        self._transport.write(data)

    def write_piece(self, data: bytes) -> None:
        """Like `write`, for streams without a known end: bounded by what the client has not read."""
        self._transport.write(data)
        if self.is_write_paused and self._transport.get_write_buffer_size() > self._limits.write_max_bytes:
            self._lose_client()

    def finish(self, is_last: bool, held_bytes: int) -> None:
        """The current exchange has its answer."""
        self._current = None
        if held_bytes:
            self._release(held_bytes)
        if is_last:
            self._hang_up()
            return
        if self._phase == _IDLE:
            self._deadline_s = self._after(self._limits.keep_alive_s)
        if not self._advancing:
            self._advance()

    # ---- httptools callbacks: collect, bound, never call the handler ----

    def on_message_begin(self) -> None:
        self._phase = _HEAD
        self._deadline_s = self._after(self._limits.head_timeout_s)
        self._target = self._body = b""
        self._headers = {}
        self._header_count = self._head_bytes = self._body_bytes = self._raw_head_bytes = 0
        self._began += 1

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        if len(self._target) > self._limits.header_bytes:
            self._stop(414, "uri_too_long", f"the request target is longer than {self._limits.header_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        size = len(name) + len(value) + 4
        self._head_bytes += size
        self._header_count += 1
        if size > limits.header_bytes:
            self._stop(431, "header_too_large", f"a header is longer than {limits.header_bytes} bytes")
        if self._head_bytes > limits.head_bytes:
            self._stop(431, "headers_too_large", f"the headers are longer than {limits.head_bytes} bytes")
        if self._header_count > limits.headers:
            self._stop(431, "too_many_headers", f"the request has more than {limits.headers} headers")
        if self._phase != _HEAD:
            return  # A trailer: bounded, but it must not pass for a header.
        name = name.lower()
        headers = self._headers
        if name in headers:
            if name == b"host":
                self._stop(400, "bad_request", "the request has more than one Host header")
            value = headers[name] + b", " + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        headers = self._headers
        self._method = parser.get_method()
        self._http10 = self._upgrading = False
        self._persistence = b""
        keeps_alive = parser.should_keep_alive()
        if not keeps_alive or b"connection" in headers:
            self._check_version(parser.get_http_version(), keeps_alive)
        if b"host" not in headers and not self._http10:
            self._stop(400, "bad_request", "the request has no Host header")
        self._phase = _BODY
        self._deadline_s = self._after(self._limits.body_timeout_s)
        if self._method == b"CONNECT":
            self._stop(501, "not_implemented", "CONNECT is not supported")
        if b"upgrade" in headers:
            self._upgrading = parser.should_upgrade()
        if b"transfer-encoding" in headers:
            self._check_coding(headers[b"transfer-encoding"])
        elif int(headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            self._stop_at_body()
        if b"expect" in headers:
            self._check_expectation(headers[b"expect"])

    def on_body(self, piece: bytes) -> None:
        size = self._body_bytes + len(piece)
        if size > self._limits.body_bytes:
            self._stop_at_body()
        if self._body_bytes == 0:
            self._body = piece
        else:
            self._append(piece)
        self._body_bytes = size

    def on_message_complete(self) -> None:
        self._phase = _IDLE
        if self._upgrading:
            return  # The parser skipped the body; `_ignore_upgrade` reads the request again.
        self._deadline_s = _NEVER
        body = self._body
        if body.__class__ is not bytes:
            body = bytes(body)
        persistence = self._persistence
        exchange = Exchange(self, self._method, self._origin_form(), self._headers, body, persistence)
        exchange._http10 = self._http10
        exchange._held_bytes, self._held_bytes = self._held_bytes, 0
        self._is_last = persistence is CLOSE
        self._body = b""
        self._continue_due = False
        self._server.requests += 1
        self._queue.append(exchange)

    # ---- reading ----

    def _feed(self, data: bytes | memoryview) -> None:
        assert self._parser is not None
        began = self._began
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as problem:
            self._refuse_malformed(problem, data)
        if self._phase == _HEAD and self._began == began:
            # The parser reports a header only when it is complete: one without end is bounded by its raw
            # bytes. The feed in which the request began is not counted, as other requests may have filled it.
            self._raw_head_bytes += len(data)
            if self._raw_head_bytes > self._limits.head_bytes + self._limits.header_bytes:
                self._refuse(431, "headers_too_large", f"the headers are longer than {self._limits.head_bytes} bytes")

    def _feed_in_slices(self, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(data), _SLICE_BYTES):
            if self._deaf:
                break
            if self._is_backlogged():
                self._stash = bytes(view[at:])
                break
            self._feed(view[at : at + _SLICE_BYTES])
            self._advance()
        self._pause_if_backlogged()

    def _is_backlogged(self) -> bool:
        queue = self._queue
        if not queue:
            return False
        return len(queue) >= self._limits.pipelined or sum(len(e.body) for e in queue) > _QUEUED_BODY_BYTES

    def _pause_if_backlogged(self) -> None:
        if self._is_backlogged() and not self._reading_paused and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        stash, self._stash = self._stash, b""
        if stash:
            self._feed_in_slices(stash)

    def _append(self, piece: bytes) -> None:
        """Second and later pieces of a body, counted against what the whole server may hold."""
        server = self._server
        if server.held_bytes + len(piece) > self._limits.held_body_bytes:
            self._stop(503, "overloaded", "too many request bodies are being received; try again")
        server.held_bytes += len(piece)
        self._held_bytes += len(piece)
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += piece

    def _release(self, held_bytes: int) -> None:
        self._server.held_bytes -= held_bytes

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again without its offer to upgrade, as RFC 9110 (section 7.8) lets a server do.

        Some clients offer h2c with every request, bodies included, and the parser skips the body of such a
        one.
        """
        headers = (item for item in self._headers.items() if item[0] != b"upgrade")
        lines = b"".join(b"%b: %b\r\n" % item for item in headers)
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self._method, self._target, lines)
        self._parser = httptools.HttpRequestParser(self)
        self._feed(head)
        if rest and not self._deaf:
            self._feed(rest)

    def _origin_form(self) -> bytes:
        target = self._target
        if target.startswith(b"/"):
            return target
        _, scheme_mark, rest = target.partition(b"://")
        if scheme_mark:  # Absolute form, as sent to proxies.
            return b"/" + rest.partition(b"/")[2]
        return target

    def _check_version(self, version: str, keeps_alive: bool) -> None:
        if version == "1.1":
            self._persistence = b"" if keeps_alive else CLOSE
        elif version == "1.0":
            self._http10 = True
            self._persistence = KEEP if keeps_alive else CLOSE
        else:
            self._stop(505, "http_version_not_supported", f"HTTP/{version} is not spoken here, HTTP/1.1 is")

    def _check_coding(self, coding: bytes) -> None:
        if self._http10:
            self._stop(400, "bad_request", "HTTP/1.0 knows no Transfer-Encoding")
        if coding.strip().lower() != b"chunked":
            self._stop(400, "bad_request", f"Transfer-Encoding {coding[:80]!r} is not supported, only chunked is")

    def _check_expectation(self, expectation: bytes) -> None:
        if self._http10:
            return
        if expectation.strip().lower() != b"100-continue":
            self._stop(417, "expectation_failed", f"Expect {expectation[:80]!r} cannot be met")
        self._continue_due = True

    # ---- refusing ----

    def _stop(self, status: int, code: str, message: str) -> NoReturn:
        self._refuse(status, code, message)
        raise _Stop

    def _stop_at_body(self) -> NoReturn:
        self._stop(413, "request_too_large", f"the request body is larger than {self._limits.body_bytes} bytes")

    def _refuse(self, status: int, code: str, message: str) -> None:
        if not self._deaf:
            self._deaf = True
            self._refusal = (status, code, message)

    def _refuse_malformed(self, problem: httptools.HttpParserError, data: bytes | memoryview) -> None:
        if self._deaf:
            return  # Stopped by one of our own bounds.
        if self._is_last:
            self._deaf = True  # Nothing after the last request of a connection is read.
        elif isinstance(problem, httptools.HttpParserCallbackError):
            raise problem  # A bug in a callback of ours: the loop reports it and closes the connection.
        elif bytes(data[:18]) == b"PRI * HTTP/2.0\r\n\r\n":
            self._refuse(505, "http_version_not_supported", "HTTP/2 is not spoken here, HTTP/1.1 is")
        else:
            self._refuse(400, "bad_request", f"the request is not valid HTTP: {problem}")

    def _say_refusal(self) -> None:
        assert self._refusal is not None
        status, code, message = self._refusal
        self._refusal = None
        self._server.count_refusal(status)
        body = error_body(message, error_kind(status), code)
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        length = b"content-length: %d\r\n\r\n" % len(body)
        if self._transport.is_closing():
            return
        self._transport.write(b"".join((self.status_lines[status], JSON_TYPE, retry, CLOSE, length, body)))
        self._phase = _LINGER
        self._deadline_s = self._after(self._limits.linger_s)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # ---- moving on ----

    def _after(self, limit_s: float) -> float:
        return self._ticker.after(limit_s)

    def _advance(self) -> None:
        """Hand out queued requests while none is being answered; then do what waited for the queue to
        empty."""
        if self._advancing:
            return
        self._advancing = True
        queue = self._queue
        while queue and self._current is None and not self.is_write_paused:
            exchange = self._current = queue.popleft()
            try:
                self._handler(exchange)
            except Exception as problem:
                self._handler_failed(exchange, problem)
        self._advancing = False
        if self._current is None and not queue:
            if self._refusal is not None:
                self._say_refusal()
            elif self._continue_due:
                self._continue_due = False
                self._transport.write(_CONTINUE)
        if self._reading_paused and not self._is_backlogged():
            self._resume_reading()

    def _handler_failed(self, exchange: Exchange, problem: Exception) -> None:
        self._server.report("the handler raised", problem)
        if exchange.is_started:
            exchange.abort()
        elif exchange.is_open:
            body = error_body("internal error", error_kind(500), "internal_error")
            exchange.respond(500, JSON_TYPE, body)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as problem:
            self._server.report("a callback of an exchange raised", problem)

    def _hang_up(self) -> None:
        """Flush and close; a client that does not read is cut off by the write limit."""
        self._deaf = True
        self._write_deadline_s = self._after(self._limits.write_timeout_s)
        self._transport.close()

    def _client_left(self) -> None:
        """Drop what is owed and tell the handler, once."""
        self._deaf = True
        owed = [self._current, *self._queue] if self._current is not None else list(self._queue)
        self._current = None
        self._queue.clear()
        for exchange in owed:
            self._release(exchange._held_bytes)
            told = exchange._vanish()
            if told is not None:
                self._call(told)

    def _lose_client(self) -> None:
        self._client_left()
        self._transport.abort()
