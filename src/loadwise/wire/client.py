"""The HTTP/1.1 client of the gateway: one `Upstream` per backend, answers by callback.

How to use it (all of it on one event loop; callbacks are called on that loop, none is awaited)::

    upstream = Upstream("http://10.0.0.1:8000/v1", ticker=server.ticker)


    class Relay:  # a Sink: any object with these four methods
        def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...  # once; names in lower case
        def on_body(self, data: bytes) -> None: ...  # unchunked; everything one read brought, in one call
        def on_end(self) -> None: ...  # exactly one of on_end and on_error comes last,
        def on_error(self, kind: str, detail: str) -> None: ...  # unless cancelled


    attempt = upstream.send(b"POST", b"/chat/completions", headers, body, Relay())
    attempt.pause_reading()
    attempt.resume_reading()  # backpressure
    attempt.cancel()  # closes the connection, so that the engine stops; silence
    answer = await upstream.get("/models", timeout_s=2.0)  # status, headers, body
    answer = await upstream.get("/metrics", from_root=True)  # beside the base path, not below it
    await upstream.close()

`headers` is a header block (`loadwise.wire.heads.header_block`); host and content-length are written here. No callback
comes before `send` has returned. `on_error` kinds: `refused` (no connection: port closed, name unknown, TLS
failed), `connect_timeout`, `busy` (none of *our* connections came free in time, or too many wait for one: it says
nothing of the other side), `first_byte_timeout` (no byte of the *body*, as servers send heads early),
`idle_timeout` (between bytes, not while paused), `reset`, `truncated` (ended in the middle), `malformed` (not
HTTP, or beyond the bound on heads). Nothing was relayed before `on_head`, so an error before it may be tried
elsewhere.

Theory of operation. Connections are kept and reused last in, first out, and closed when idle longer than
`keep_idle_s`, which is shorter than engines wait. Still an engine may close a kept connection just as we
write to it (llama.cpp does so after every streamed answer while announcing keep-alive): when a *reused*
connection dies before a byte of the answer, the same request is sent once more on a fresh one, and the sink
hears nothing of it. A fresh connection that dies is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadwise.wire.attempt import Attempt, EngineConnection, Sink, Timeouts
from loadwise.wire.heads import Ticker

__all__ = ["Answer", "Attempt", "Sink", "Timeouts", "Upstream", "UpstreamError", "UpstreamLimits"]

_MOST_PREFIXES = 256  # Remembered request lines; more only if paths are made up per request.


class UpstreamLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one upstream."""

    connections: int = 256
    """Open at a time; the next attempts wait (their `connect_s` runs)."""
    idle_connections: int = 256
    """Kept for reuse."""
    waiting: int = 1024
    """Attempts waiting for a connection; the next ones are told `busy` at once."""
    keep_idle_s: float = 4.0
    """How long a connection is kept without a request; uvicorn-based engines close after 5 s."""
    head_bytes: int = 64 * 1024
    """Headers of one answer."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)!r}")


class UpstreamStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What an upstream holds and has done."""

    connections: int
    idle: int
    dialing: int
    waiting: int
    in_flight: int
    """Attempts that have not ended, waiting ones included."""
    sent: int
    retried: int
    """Requests sent again because a kept connection had died."""


class Answer(NamedTuple):
    """A complete answer, as `Upstream.get` returns it."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class UpstreamError(Exception):
    """`Upstream.get` got no answer; `kind` is one of those of `Sink.on_error`, or `too_large`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Upstream:
    """The pool of connections to one backend."""

    def __init__(
        self,
        url: str,
        *,
        limits: UpstreamLimits | None = None,
        timeouts: Timeouts | None = None,
        ticker: Ticker | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            url: `http` or `https`, host, optional port and base path.
            limits: Bounds.
            timeouts: What `send` uses unless told otherwise.
            ticker: A clock that someone else starts; own one, started at the first use, if None.
            tls: For https; the system's certificate authorities if None.

        Raises:
            ValueError: The url is not one that can be asked.
        """
        self.url = url
        self.limits = limits or UpstreamLimits()
        self.timeouts = timeouts or Timeouts()
        self._host, self._port, self._authority, self._base, is_tls = _split(url)
        self._tls = (tls or ssl.create_default_context()) if is_tls else None
        self._ticker = ticker or Ticker()
        self._owns_ticker = ticker is None
        self._ticker.watch(self._sweep)
        self._prefixes: dict[tuple[bytes, bytes, bool], bytes] = {}
        self._connections: dict[EngineConnection, None] = {}
        self._idle: list[EngineConnection] = []
        self._waiting: deque[Attempt] = deque()
        self._in_flight: dict[Attempt, None] = {}
        self._dials: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._sent = self._retried = 0
        self.n_heard = 0
        """Times that something was read from it, on any connection."""

    def send(
        self,
        method: bytes,
        path: bytes,
        headers: bytes,
        body: bytes,
        sink: Sink,
        *,
        timeouts: Timeouts | None = None,
        from_root: bool = False,
    ) -> Attempt:
        """Send one request; the answer goes to `sink`.

        Args:
            method: Any but HEAD and CONNECT.
            path: Target below the base path, with its query.
            headers: Header block without host, content-length and connection lines; trusted.
            body: Complete.
            sink: Hears of the answer, never before this method has returned.
            timeouts: In place of the upstream's.
            from_root: `path` starts at the server's root.

        Raises:
            ValueError: Method or path cannot be put on the wire.
            RuntimeError: The upstream is closed.
        """
        if self._is_closed:
            raise RuntimeError(f"upstream {self.url!r} is closed")
        if self._owns_ticker:
            self._ticker.start()
        prefix = self._prefixes.get((method, path, from_root)) or self._prefix(method, path, from_root)
        if body or method != b"GET":
            request = b"%b%bcontent-length: %d\r\n\r\n%b" % (prefix, headers, len(body), body)
        else:
            request = b"%b%b\r\n" % (prefix, headers)
        attempt = Attempt(self, request, sink, timeouts or self.timeouts)
        self._in_flight[attempt] = None
        self._sent += 1
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                connection.begin(attempt)
                return attempt
        self._seek_connection(attempt)
        return attempt

    async def fetch(
        self,
        method: bytes,
        path: str,
        headers: bytes = b"",
        body: bytes = b"",
        *,
        timeout_s: float = 5.0,
        most_bytes: int = 8 * 1024 * 1024,
        from_root: bool = False,
    ) -> Answer:
        """Ask and wait for the complete answer: for probes and set-up, not for relays.

        Raises:
            UpstreamError: No complete answer within `timeout_s` seconds, or its body is larger than
            `most_bytes`.
        """
        sink = _Collector(most_bytes)
        attempt = self.send(method, path.encode("ascii"), headers, body, sink, from_root=from_root)
        try:
            async with asyncio.timeout(timeout_s):
                return await sink.answer
        except TimeoutError:
            kind = "busy" if attempt.is_waiting else attempt.timeout_kind
            raise UpstreamError(kind, f"no complete answer within {timeout_s:g} s") from None
        finally:
            attempt.cancel()

    async def get(
        self,
        path: str,
        headers: bytes = b"",
        *,
        timeout_s: float = 5.0,
        most_bytes: int = 8 * 1024 * 1024,
        from_root: bool = False,
    ) -> Answer:
        """`fetch` with GET."""
        return await self.fetch(b"GET", path, headers, timeout_s=timeout_s, most_bytes=most_bytes, from_root=from_root)

    async def close(self) -> None:
        """Fail what is in flight (`reset`), close every connection; nothing can be sent any more."""
        self._is_closed = True
        for attempt in tuple(self._in_flight):
            self._break_off(attempt)
            self.fail(attempt, "reset", "the upstream is being closed")
        for connection in tuple(self._connections):
            connection.abandon()
        for dial in tuple(self._dials):
            with contextlib.suppress(asyncio.CancelledError):
                await dial
        self._ticker.forget(self._sweep)
        if self._owns_ticker:
            self._ticker.stop()

    def statistics(self) -> UpstreamStatistics:
        """A snapshot."""
        return UpstreamStatistics(
            connections=len(self._connections),
            idle=len(self._idle),
            dialing=len(self._dials),
            waiting=len(self._waiting),
            in_flight=len(self._in_flight),
            sent=self._sent,
            retried=self._retried,
        )

    async def open_connection(self) -> EngineConnection:
        """Dial once; the one place that touches the network.

        Raises:
            OSError: Nobody answers there, the name is unknown, or TLS failed.
        """
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: EngineConnection(self), self._host, self._port, ssl=self._tls
        )
        return connection

    # ---- what attempts and connections ask ----

    def after(self, limit_s: float) -> float:
        """Deadline `limit_s` seconds from now, on the ticker's clock."""
        return self._ticker.after(limit_s)

    def adopt(self, connection: EngineConnection) -> None:
        """Count a fresh connection as ours and let it carry whoever waits, else keep it."""
        self._connections[connection] = None
        self.take_back(connection)

    def take_back(self, connection: EngineConnection) -> None:
        """The connection is free."""
        while self._waiting:
            attempt = self._waiting.popleft()
            if attempt.is_open:
                connection.begin(attempt)
                return
        if self._is_closed or len(self._idle) >= self.limits.idle_connections:
            connection.close()
        else:
            connection.idle_deadline_s = self.after(self.limits.keep_idle_s)
            self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """The connection is closed."""
        if connection in self._connections:
            del self._connections[connection]
            with contextlib.suppress(ValueError):
                self._idle.remove(connection)
            self._dial_for_waiting()

    def drop(self, attempt: Attempt) -> None:
        """The attempt was cancelled."""
        self._in_flight.pop(attempt, None)
        self._break_off(attempt)

    def end(self, attempt: Attempt) -> None:
        """The attempt's answer is complete."""
        self._in_flight.pop(attempt, None)
        sink, attempt.sink = attempt.sink, None
        if sink is not None:
            try:
                sink.on_end()
            except Exception as problem:
                self.report(attempt, problem)

    def fail(self, attempt: Attempt, kind: str, detail: str) -> None:
        """The attempt will get no (more) answer."""
        self._in_flight.pop(attempt, None)
        sink, attempt.sink = attempt.sink, None
        if sink is not None:
            try:
                sink.on_error(kind, detail)
            except Exception as problem:
                self.report(attempt, problem)

    def send_again(self, attempt: Attempt) -> None:
        """A kept connection died under the attempt: dial a fresh one, once (it will not count as kept)."""
        self._retried += 1
        attempt.timeout_kind = "connect_timeout"
        attempt.deadline_s = self.after(attempt.timeouts.connect_s)
        self._dial(attempt)

    def report(self, attempt: Attempt, problem: Exception) -> None:
        """A sink raised: a bug of its owner; the attempt is given up."""
        attempt.cancel()
        context = {"message": f"a sink of upstream {self.url!r} raised", "exception": problem}
        asyncio.get_running_loop().call_exception_handler(context)

    # ---- connections ----

    def _seek_connection(self, attempt: Attempt) -> None:
        if len(self._connections) + len(self._dials) < self.limits.connections:
            self._dial(attempt)
        elif len(self._waiting) < self.limits.waiting:
            self._waiting.append(attempt)
        else:
            detail = f"{len(self._waiting)} attempts are waiting for one of {self.limits.connections} connections"
            asyncio.get_running_loop().call_soon(self.fail, attempt, "busy", detail)

    def _dial(self, attempt: Attempt) -> None:
        dial = attempt.dial = asyncio.get_running_loop().create_task(self._connect(attempt))
        self._dials.add(dial)
        dial.add_done_callback(self._dialed)

    def _dialed(self, dial: asyncio.Task[None]) -> None:
        self._dials.discard(dial)
        self._dial_for_waiting()

    async def _connect(self, attempt: Attempt) -> None:
        try:
            connection = await self.open_connection()
        except (OSError, ValueError) as problem:
            # ValueError: a host name that cannot be encoded.
            self.fail(attempt, "refused", f"no connection to {self._authority}: {problem}")
            return
        attempt.dial = None
        if connection.is_lost:
            self.fail(attempt, "reset", f"{self._authority} closed the connection at once")
        elif attempt.is_open:
            self._connections[connection] = None
            connection.begin(attempt)
        else:
            connection.close()

    def _dial_for_waiting(self) -> None:
        waiting = self._waiting
        while waiting and len(self._connections) + len(self._dials) < self.limits.connections:
            attempt = waiting.popleft()
            if attempt.is_open and not self._is_closed:
                self._dial(attempt)

    def _break_off(self, attempt: Attempt) -> None:
        connection, attempt.connection = attempt.connection, None
        if connection is not None:
            connection.abandon()
        elif attempt.dial is not None:
            attempt.dial.cancel()
            attempt.dial = None
        else:
            with contextlib.suppress(ValueError):
                self._waiting.remove(attempt)

    def _sweep(self, now_s: float) -> None:
        for attempt in tuple(self._in_flight):
            if now_s >= attempt.deadline_s and attempt.is_open:
                kind = attempt.timeout_kind
                limit_s = getattr(attempt.timeouts, kind.replace("timeout", "s"))
                detail = f"{self._authority} was waited for longer than {limit_s:g} s"
                if attempt.is_waiting and self._connections:  # else it is the other side that accepts none
                    kind = "busy"
                    detail = f"none of {self.limits.connections} connections came free within {limit_s:g} s"
                self._break_off(attempt)
                self.fail(attempt, kind, detail)
        for connection in [kept for kept in self._idle if now_s >= kept.idle_deadline_s]:
            self._idle.remove(connection)
            connection.close()

    def _prefix(self, method: bytes, path: bytes, from_root: bool) -> bytes:
        target = path if from_root else self._base + path
        if method in (b"HEAD", b"CONNECT") or not method.isalpha() or not method.isupper():
            raise ValueError(f"method {method!r} cannot be sent")
        if not path.startswith(b"/") or any(byte <= 0x20 or byte >= 0x7F for byte in target):
            raise ValueError(f"path must begin with '/' and hold printable ASCII without spaces, got {path!r}")
        if len(self._prefixes) >= _MOST_PREFIXES:
            self._prefixes.clear()
        prefix = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, self._authority.encode())
        self._prefixes[method, path, from_root] = prefix
        return prefix


class _Collector:
    """Sink that gathers a bounded answer into a future."""

    def __init__(self, most_bytes: int) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._most_bytes = most_bytes
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        if len(self._body) + len(data) > self._most_bytes:
            self.on_error("too_large", f"the answer is larger than {self._most_bytes} bytes")
        else:
            self._body += data

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, self._headers, bytes(self._body)))

    def on_error(self, kind: str, detail: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(UpstreamError(kind, detail))


def _split(url: str) -> tuple[str, int, str, bytes, bool]:
    """Host, port, authority as written in the Host header, base path, whether TLS."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must be http://HOST… or https://HOST…, got {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"url must hold no user, query or fragment, got {url!r}")
    is_tls = parts.scheme == "https"
    try:
        port = parts.port
        host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
        base = parts.path.rstrip("/").encode("ascii")
    except ValueError as problem:
        raise ValueError(f"url {url!r}: {problem}") from problem
    written = f"[{host}]" if ":" in host else host
    usual = 443 if is_tls else 80
    if port is None or port == usual:
        return host, usual, written, base, is_tls
    return host, port, f"{written}:{port}", base, is_tls
