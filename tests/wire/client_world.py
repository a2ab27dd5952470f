"""An engine made of bytes, and a sink that notes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from itertools import pairwise

import uvloop

from loadwise.wire.attempt import EngineConnection
from loadwise.wire.client import (
    Attempt,
    Timeouts,
    Upstream,
    UpstreamLimits,
)
from loadwise.wire.heads import Ticker
from loadwise.wire.memory import MemoryTransport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"
OK_EVENTS = [("head", 200, {b"content-length": b"2", b"x-a": b"b"}), ("body", b"ok"), ("end",)]


class Recorder:
    """A sink that keeps what it hears; bodies of one answer are joined."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.events.append(("head", status, headers))

    def on_body(self, data: bytes) -> None:
        assert data
        last = self.events[-1]
        if last[0] == "body":
            self.events[-1] = ("body", last[1] + data)  # type: ignore[operator]
        else:
            self.events.append(("body", data))

    def on_end(self) -> None:
        self.events.append(("end",))

    def on_error(self, kind: str, detail: str) -> None:
        assert detail
        self.events.append(("error", kind))


class Engine(Upstream):
    """An upstream whose connections are in memory; the test plays the engine."""

    def __init__(self, *, limits: UpstreamLimits | None = None, timeouts: Timeouts | None = None) -> None:
        self.clock = Ticker()
        super().__init__("http://engine:8000/v1/", ticker=self.clock, limits=limits, timeouts=timeouts)
        self.dialed: list[MemoryTransport] = []
        self.answers_dials = True

    async def open_connection(self) -> EngineConnection:
        if not self.answers_dials:
            await asyncio.Event().wait()
        connection = EngineConnection(self)
        self.dialed.append(MemoryTransport(connection))
        return connection

    def connect(self) -> MemoryTransport:
        """A fresh idle connection, without a loop."""
        connection = EngineConnection(self)
        transport = MemoryTransport(connection)
        self.adopt(connection)
        return transport

    def ask(self, body: bytes = b"{}", timeouts: Timeouts | None = None) -> tuple[Attempt, Recorder]:
        """Send one request."""
        sink = Recorder()
        return self.send(b"POST", b"/chat", b"a: b\r\n", body, sink, timeouts=timeouts), sink


def answered(
    data: bytes, cuts: Sequence[int] = (), *, eof: Exception | bool | None = None
) -> tuple[list[object], Engine]:
    """What a sink hears when a fresh connection brings these bytes, cut like this, and then ends."""
    engine = Engine()
    transport = engine.connect()
    _, sink = engine.ask()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for a, b in pairwise(edges):
        transport.deliver(data[a:b])
    if eof:
        transport.hang_up(eof if isinstance(eof, Exception) else None)
    return list(sink.events), engine


def loop_test(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test on the loop that serves."""

    @wraps(test)
    def run() -> None:
        uvloop.run(asyncio.wait_for(test(), 120))

    return run


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds (bounded by the test's own limit)."""
    while not condition():
        await asyncio.sleep(0)
