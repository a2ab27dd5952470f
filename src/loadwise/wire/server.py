"""The HTTP/1.1 server of the gateway: sockets in, exchanges out.

How to use it (all of it on one event loop; every callback is called on that loop, none is awaited)::

    def handler(exchange: Exchange) -> None:  # must return at once; answer now or later
        if exchange.path == b"/healthz":
            exchange.respond(200, JSON_TYPE, b"{}")  # complete answer, one write
        else:
            relay = Relay(exchange)  # keep the exchange, answer later:
            exchange.on_disconnect = relay.cancel  #   client left, fires at once
            exchange.on_pause = relay.pause  #   client reads slowly: pause the upstream
            exchange.on_resume = relay.resume
            # exchange.start(200, EVENT_STREAM); exchange.write(piece) ...; exchange.end()   or
            # exchange.abort()


    server = Server(handler, Limits(body_bytes=8 << 20))
    (address,) = await server.listen("127.0.0.1", 0)  # [(host, port)], the real port
    ...
    await server.close(grace_s=10.0)  # stop accepting, finish what is in flight, cut the rest

What the handler can rely on: requests of one connection arrive one after the other, complete, within all
limits; each gets exactly one answer (a second one raises); a handler that raises becomes a 500 (or a cut
stream). What it must do: answer every exchange it was given, or call `abort`. Refusals made here, before the
handler, carry an OpenAI-shaped error body and close the connection: 400 malformed or ambiguous framing, 408
too slow, 413 body, 414 target, 417 expectation, 431 headers, 501 CONNECT, 503 too many connections or
buffered bodies, 505 version.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from loadwise.wire.connection import Connection
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import StatusLines, Ticker

__all__ = ["Exchange", "Limits", "Server", "ServerStatistics"]

_LINGERING = 256  # Connections beyond the limit that may wait for their 503; the next ones are dropped unheard.


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of everything that a client can make grow."""

    body_bytes: int = 32 * 1024 * 1024
    """One request body; beyond it 413."""
    head_bytes: int = 64 * 1024
    """All headers of a request (names, values and four bytes each); beyond it 431."""
    header_bytes: int = 16 * 1024
    """One header (431) or the request target (414)."""
    headers: int = 128
    """Number of headers of a request; beyond it 431."""
    held_body_bytes: int = 1024 * 1024 * 1024
    """All bodies larger than one read that the server holds at a time; beyond it 503."""
    connections: int = 4096
    """Open connections; the next ones are told 503."""
    pipelined: int = 16
    """Requests waiting on one connection behind the one being answered; beyond it reading pauses."""
    head_timeout_s: float = 10.0
    """From the first byte of a request to the end of its headers; beyond it 408."""
    body_timeout_s: float = 60.0
    """From the end of the headers to the end of the body; beyond it 408."""
    keep_alive_s: float = 75.0
    """Without a request; beyond it the connection is closed."""
    write_timeout_s: float = 60.0
    """A client that reads nothing of what waits for it is dropped."""
    linger_s: float = 2.0
    """How long input is discarded after a refusal, so that the refusal arrives."""
    write_high_bytes: int = 256 * 1024
    """Bytes waiting for the client at which `on_pause` is called."""
    write_low_bytes: int = 64 * 1024
    """Bytes waiting for the client at which `on_resume` is called."""
    write_max_bytes: int = 8 * 1024 * 1024
    """Bytes waiting for a paused client, while a stream goes on being written, at which it is dropped."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if not self.write_low_bytes < self.write_high_bytes <= self.write_max_bytes:
            low, high, most = self.write_low_bytes, self.write_high_bytes, self.write_max_bytes
            raise ValueError(
                f"write_low_bytes < write_high_bytes <= write_max_bytes does not hold: {low}, {high}, {most}"
            )


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds and has seen."""

    connections: int
    exchanges_open: int
    """Requests received and not yet answered."""
    held_body_bytes: int
    requests: int
    """Complete requests since the start."""
    refused: dict[int, int]
    """Refusals made by the server itself, by status."""


class Server:
    """Listening sockets, their connections, and the bounds they share."""

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: Limits | None = None,
        *,
        ticker: Ticker | None = None,
        on_bug: Callable[[str, Exception], None] | None = None,
    ) -> None:
        """
        Args:
            handler: Called with every complete request; see the module's docstring.
            limits: Bounds; the defaults suit an inference gateway.
            ticker: Clock shared with upstreams; the server starts it. Own one if None.
            on_bug: Told what the handler or its callbacks raised; the loop's exception handler if None.
        """
        self.handler = handler
        self.limits = limits or Limits()
        self.ticker = ticker or Ticker()
        self.status_lines = StatusLines()
        self.is_draining = False
        self.requests = 0
        self.held_bytes = 0
        self._on_bug = on_bug
        self._owns_ticker = ticker is None
        self._listeners: list[asyncio.Server] = []
        self._connections: dict[Connection, None] = {}
        self._refused: dict[int, int] = {}
        self._emptied: asyncio.Event | None = None
        self.ticker.watch(self._sweep)

    async def listen(
        self,
        host: str | None = "127.0.0.1",
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        backlog: int = 1024,
        reuse_port: bool = False,
        starts: bool = True,
    ) -> list[tuple[str, int]]:
        """Accept connections on one more address; may be called several times.

        Args:
            host: Name or address; None means all interfaces.
            port: 0 lets the system choose.
            sock: A bound socket instead of host and port, for a parent that hands sockets to its workers.
            reuse_port: Let several processes share the address.
            starts: False only takes the address; connections are refused until `serve` is called.

        Returns:
            Host and real port of every socket opened.

        Raises:
            OSError: The address is taken or not ours.
        """
        loop = asyncio.get_running_loop()
        self.ticker.start()
        if sock is not None:
            listener = await loop.create_server(self.connect, sock=sock, backlog=backlog, start_serving=starts)
        else:
            listener = await loop.create_server(
                self.connect, host, port, backlog=backlog, reuse_port=reuse_port or None, start_serving=starts
            )
        self._listeners.append(listener)
        return [opened.getsockname()[:2] for opened in listener.sockets]

    async def serve(self) -> None:
        """Accept connections on addresses that were only taken so far."""
        for listener in self._listeners:
            await listener.start_serving()

    def connect(self) -> Connection:
        """Protocol for one new connection (the factory that `create_server` and in-memory tests call)."""
        return Connection(self)

    async def close(self, grace_s: float = 10.0) -> None:
        """Stop accepting, let what is in flight finish for at most `grace_s` seconds, cut the rest."""
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in tuple(self._connections):
            connection.drain()
        await self._empty(grace_s)
        for connection in tuple(self._connections):
            connection.kill()
        await self._empty(1.0)
        self.ticker.forget(self._sweep)
        if self._owns_ticker:
            self.ticker.stop()

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(
            connections=len(self._connections),
            exchanges_open=sum(connection.open_exchanges for connection in self._connections),
            held_body_bytes=self.held_bytes,
            requests=self.requests,
            refused=dict(self._refused),
        )

    # ---- what connections ask ----

    def admit(self, connection: Connection) -> bool:
        """Register a new connection; False if it is one too many (it is then told so and closed)."""
        self._connections[connection] = None
        excess = len(self._connections) - self.limits.connections
        if excess > _LINGERING:
            connection.kill()
        return excess <= 0

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self._connections.pop(connection, None)
        if self._emptied is not None and not self._connections:
            self._emptied.set()

    def count_refusal(self, status: int) -> None:
        """A request was refused before it reached the handler."""
        self._refused[status] = self._refused.get(status, 0) + 1

    def report(self, message: str, problem: Exception) -> None:
        """Tell of a bug in the handler."""
        if self._on_bug is not None:
            self._on_bug(message, problem)
        else:
            context: dict[str, Any] = {"message": message, "exception": problem}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _empty(self, limit_s: float) -> None:
        if not self._connections:
            return
        self._emptied = asyncio.Event()
        try:
            await asyncio.wait_for(self._emptied.wait(), limit_s)
        except TimeoutError:
            pass
        finally:
            self._emptied = None

    def _sweep(self, now_s: float) -> None:
        self.status_lines.renew(time.time())
        for connection in tuple(self._connections):
            connection.expire(now_s)
