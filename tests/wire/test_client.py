"""The upstream client: every attempt ends once, with what the engine said; no connection leaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from loadwise.wire.attempt import EngineConnection
from loadwise.wire.client import (
    Attempt,
    Timeouts,
    Upstream,
    UpstreamError,
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
        uvloop.run(asyncio.wait_for(test(), 30))

    return run


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds (bounded by the test's own limit)."""
    while not condition():
        await asyncio.sleep(0)


_HEADER = st.tuples(st.sampled_from([b"X-A", b"x-b", b"Server"]), st.sampled_from([b"", b"1", b"a, b", b"~" * 200]))


@st.composite
def _answers(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """A valid answer, its body, and whether it ends with the connection."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * draw(st.integers(0, 2))
    status = draw(st.sampled_from([b"200 OK", b"404 Not Found", b"500", b"529 Busy"]))
    headers = b"".join(b"%b: %b\r\n" % header for header in draw(st.lists(_HEADER, max_size=3)))
    pieces = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
    body = b"".join(pieces)
    head = interim + b"HTTP/1.1 " + status + b"\r\n" + headers
    framing = draw(st.sampled_from(["counted", "chunked", "until close"]))
    if framing == "counted":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body, False
    if framing == "chunked":
        coded = b"".join(b"%x;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\nT: t\r\n\r\n", body, False
    return head + b"\r\n" + body, body, True


@given(_answers(), st.lists(st.integers(0, 2000), max_size=12))
def test_split_points_of_an_answer_change_nothing(answer: tuple[bytes, bytes, bool], cuts: list[int]) -> None:
    """However the bytes are cut, the sink hears the same head, body and end, and the pool is the same."""
    data, body, until_close = answer
    whole, engine = answered(data, eof=until_close)
    parts, other = answered(data, cuts, eof=until_close)
    assert whole == parts and whole[-1] == ("end",)
    assert b"t" not in whole[0][2]  # type: ignore[index]  # A trailer is no header.
    assert whole[1:-1] == ([("body", body)] if body else [])
    assert engine.statistics() == other.statistics()
    assert (engine.statistics().in_flight, engine.statistics().idle) == (0, 0 if until_close else 1)


@given(_answers(), st.data())
def test_an_answer_cut_short_is_never_taken_for_a_whole_one(
    answer: tuple[bytes, bytes, bool], data: st.DataObject
) -> None:
    """A counted or chunked answer that ends early is an error, at every byte."""
    wire, body, until_close = answer
    at = data.draw(st.integers(0, len(wire) - 1))
    for broken in (None, ConnectionResetError("reset")):
        events, engine = answered(wire[:at], eof=broken or True)
        if until_close and broken is None and b"\r\n\r\n" in wire[:at] and ("head" in {e[0] for e in events}):  # type: ignore[index]
            assert events[-1] == ("end",) and body.startswith(b"".join(e[1] for e in events[1:-1]))  # type: ignore[index]
        else:
            assert events[-1] == ("error", "reset" if broken or not at else "truncated")
        assert engine.statistics().in_flight == engine.statistics().connections == 0


_FRAGMENTS = [
    *(
        b"HTTP/1.1 ",
        b"HTTP/1.0 ",
        b"HTTP/2 ",
        b"200",
        b"100",
        b"101",
        b"204",
        b" OK",
        b"\r\n",
        b"\r\n\r\n",
        OK,
    ),
    *(
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"\x00",
        b";",
    ),
    *(b"Connection: upgrade\r\nUpgrade: x\r\n", b"Connection: close\r\n", b"abc", b"0", b"3"),
]


@given(
    st.binary(max_size=200) | st.lists(st.sampled_from(_FRAGMENTS), max_size=20).map(b"".join),
    st.lists(st.integers(0, 500), max_size=6),
    st.booleans(),
)
def test_garbage_from_an_engine_ends_every_attempt_once(data: bytes, cuts: list[int], is_reset: bool) -> None:
    """Whatever an engine sends: at most one head, one last event, nothing raised, nothing left in flight."""
    events, engine = answered(data, cuts, eof=OSError("broken") if is_reset else True)
    names = [event[0] for event in events]  # type: ignore[index]
    assert names[-1] in ("end", "error") and names.count("end") + names.count("error") == 1
    assert names[:-1] in ([], ["head"], ["head", "body"])
    statistics = engine.statistics()
    assert (statistics.in_flight, statistics.connections, statistics.idle) == (0, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"\x15\x03\x01\x00\x02",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
    ],
)
@pytest.mark.parametrize("step", [1000, 1_000_000])
def test_what_is_not_an_answer_is_malformed(data: bytes, step: int) -> None:
    """Not HTTP, ambiguous framing, or heads beyond the bound: one error, nothing told, connection dropped."""
    events, engine = answered(data, list(range(0, len(data), step)))
    assert events == [("error", "malformed")]
    assert engine.statistics().idle == 0


def test_a_head_without_end_is_cut_off() -> None:
    """An engine that never ends its head is stopped within the bound."""
    engine = Engine(limits=UpstreamLimits(head_bytes=1000))
    transport = engine.connect()
    _, sink = engine.ask()
    transport.deliver(b"HTTP/1.1 200 OK\r\nA: ")
    delivered = 0
    while not sink.events and delivered < 10_000:
        transport.deliver(b"x" * 100)
        delivered += 100
    assert sink.events == [("error", "malformed")] and delivered <= 2000


def test_bad_chunks_after_good_ones_are_told_after_the_good_bytes() -> None:
    """What was sound arrives, then the error."""
    events, _ = answered(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")
    assert events == [
        ("head", 200, {b"transfer-encoding": b"chunked"}),
        ("body", b"abc"),
        ("error", "malformed"),
    ]


def test_what_was_read_before_a_pause_still_arrives_and_starts_no_clock() -> None:
    """TLS may hold decrypted bytes when reading stops: they are told, and the connection is kept reading."""
    engine = Engine(timeouts=Timeouts(idle_s=1.0))
    connection = EngineConnection(engine)
    transport = MemoryTransport(connection)
    engine.adopt(connection)
    attempt, sink = engine.ask()
    transport.deliver(OK[:-2])
    attempt.pause_reading()
    connection.data_received(OK[-2:-1])
    engine.clock.tick(50.0)
    connection.data_received(OK[-1:])
    assert sink.events == OK_EVENTS and not transport.is_paused


def test_all_chunks_of_one_read_come_in_one_call() -> None:
    """Forty chunks in one read cost one callback."""
    engine, calls = Engine(), []
    transport = engine.connect()

    class Counting(Recorder):
        def on_body(self, data: bytes) -> None:
            calls.append(data)

    engine.send(b"POST", b"/chat", b"", b"", Counting())
    transport.deliver(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3\r\nabc\r\n" * 40)
    assert calls == [b"abc" * 40]


def test_the_request_is_written_at_once_and_whole() -> None:
    """Request line below the base path, host, the caller's headers, length, body, in one write."""
    engine = Engine()
    transport = engine.connect()
    engine.ask(b'{"a":1}')
    assert transport.take() == (
        b'POST /v1/chat HTTP/1.1\r\nhost: engine:8000\r\na: b\r\ncontent-length: 7\r\n\r\n{"a":1}'
    )
    other = engine.connect()
    engine.send(b"GET", b"/metrics", b"", b"", Recorder(), from_root=True)
    assert other.take() == b"GET /metrics HTTP/1.1\r\nhost: engine:8000\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"HEAD", b"/"),
        (b"CONNECT", b"/"),
        (b"get", b"/"),
        (b"GET /x", b"/"),
        (b"GET", b""),
        (b"GET", b"x"),
        (b"GET", b"/a b"),
        (b"GET", b"/a\r\nx: y"),
        (b"GET", b"/\xe9"),
    ],
)
def test_what_would_forge_a_request_is_not_sent(method: bytes, path: bytes) -> None:
    """Methods and paths that cannot be put on the wire raise before anything is written."""
    engine = Engine()
    transport = engine.connect()
    with pytest.raises(ValueError, match=r"cannot be sent|path must begin"):
        engine.send(method, path, b"", b"", Recorder())
    assert transport.sent == b"" and engine.statistics().in_flight == 0


def test_connections_are_reused_last_in_first_out() -> None:
    """The most recently used connection is the least likely to have been closed."""
    engine = Engine()
    first, second = engine.connect(), engine.connect()
    for _ in range(3):
        _, sink = engine.ask()
        second.deliver(OK)
        assert sink.events == OK_EVENTS
    assert first.sent == b"" and engine.statistics().idle == 2


@pytest.mark.parametrize("data", [OK.replace(b"X-A", b"Connection: close\r\nX-A"), OK.replace(b"1.1", b"1.0")])
def test_connections_that_the_engine_will_close_are_not_kept(data: bytes) -> None:
    """`Connection: close` and HTTP/1.0 end the connection with the answer."""
    events, engine = answered(data)
    assert events[-1] == ("end",) and engine.statistics().idle == 0


@pytest.mark.parametrize("more", [b"x", OK])
@pytest.mark.parametrize("later", [False, True])
def test_words_nobody_asked_for_end_the_connection_not_the_answer(more: bytes, later: bool) -> None:
    """Bytes after an answer would pass for the next one: the answer stands, the connection goes."""
    engine = Engine()
    transport = engine.connect()
    _, sink = engine.ask()
    if later:
        transport.deliver(OK)
        transport.deliver(more)
    else:
        transport.deliver(OK + more)
    assert sink.events == OK_EVENTS
    assert engine.statistics().idle == engine.statistics().connections == 0


def test_a_sink_may_send_from_its_end_and_gets_the_same_connection() -> None:
    """The connection is free before on_end is called."""
    engine, inner = Engine(), Recorder()
    transport = engine.connect()

    class Chaining(Recorder):
        def on_end(self) -> None:
            engine.send(b"GET", b"/again", b"", b"", inner)

    engine.send(b"POST", b"/chat", b"", b"", Chaining())
    transport.deliver(OK)
    assert b"GET /v1/again" in transport.sent
    transport.deliver(OK)
    assert inner.events == OK_EVENTS


@pytest.mark.parametrize("at", ["head", "body", "end"])
def test_a_sink_may_cancel_from_any_callback(at: str) -> None:
    """After cancel nothing is heard, even of what the same read brought."""
    engine = Engine()
    transport = engine.connect()

    class Cancelling(Recorder):
        def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
            super().on_head(status, headers)
            if at == "head":
                attempt.cancel()

        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            if at == "body":
                attempt.cancel()

        def on_end(self) -> None:
            super().on_end()
            attempt.cancel()

    sink = Cancelling()
    attempt = engine.send(b"POST", b"/chat", b"", b"", sink)
    transport.deliver(OK)
    assert [event[0] for event in sink.events] == ["head", "body", "end"][: ["head", "body", "end"].index(at) + 1]
    assert engine.statistics().in_flight == 0 and not attempt.is_open


def test_cancel_closes_the_connection_and_silences_the_attempt() -> None:
    """The engine sees the connection close, which is how it learns to stop."""
    engine = Engine()
    transport = engine.connect()
    attempt, sink = engine.ask()
    transport.deliver(OK[:-1])
    heard = list(sink.events)
    attempt.cancel()
    attempt.cancel()
    transport.settle()
    assert transport.is_lost and sink.events == heard and not attempt.is_open
    assert engine.statistics().connections == engine.statistics().in_flight == 0


def test_pausing_stops_reading_and_the_clock() -> None:
    """A paused attempt neither reads nor times out; it goes on where it was, and its connection is reused."""
    engine = Engine(timeouts=Timeouts(idle_s=1.0))
    transport = engine.connect()
    attempt, sink = engine.ask()
    transport.deliver(OK[:-1])
    attempt.pause_reading()
    attempt.pause_reading()
    assert transport.is_paused
    engine.clock.tick(50.0)
    transport.deliver(OK[-1:])
    assert sink.events[-1] == ("body", b"o")
    attempt.resume_reading()
    assert sink.events == OK_EVENTS and not transport.is_paused
    attempt.resume_reading()
    attempt.pause_reading()
    assert not transport.is_paused and engine.statistics().idle == 1


def test_a_pause_from_the_last_callback_does_not_stick_to_the_connection() -> None:
    """A connection goes back to the pool reading."""
    engine = Engine()
    transport = engine.connect()

    class Pausing(Recorder):
        def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
            super().on_head(status, headers)
            attempt.pause_reading()

    attempt = engine.send(b"POST", b"/chat", b"", b"", Pausing())
    transport.deliver(OK)
    assert not transport.is_paused and engine.statistics().idle == 1
    attempt = engine.send(b"POST", b"/chat", b"", b"", Pausing())
    transport.deliver(OK[:-1])
    assert transport.is_paused


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"", "first_byte_timeout"), (OK[:-2], "first_byte_timeout"), (OK[:-1], "idle_timeout")],
)
def test_an_engine_that_hangs_is_given_up(data: bytes, kind: str) -> None:
    """Before the first byte of the body one limit holds, between bytes the other; never early."""
    engine = Engine(timeouts=Timeouts(first_byte_s=10.0, idle_s=5.0))
    transport = engine.connect()
    _, sink = engine.ask()
    transport.deliver(data)
    limit_s = 5.0 if kind == "idle_timeout" else 10.0
    engine.clock.tick(limit_s)
    assert ("error", kind) not in sink.events
    engine.clock.tick(limit_s + 0.2)
    transport.settle()
    assert sink.events[-1] == ("error", kind) and transport.is_lost
    assert engine.statistics().in_flight == 0


def test_timeouts_may_differ_by_attempt() -> None:
    """A send's own limits replace the upstream's."""
    engine = Engine()
    engine.connect()
    _, sink = engine.ask(timeouts=Timeouts(first_byte_s=1.0))
    engine.clock.tick(1.2)
    assert sink.events == [("error", "first_byte_timeout")]


def test_kept_connections_are_closed_when_idle_too_long() -> None:
    """We close before the engine does."""
    engine = Engine(limits=UpstreamLimits(keep_idle_s=4.0))
    transport = engine.connect()
    engine.clock.tick(4.0)
    assert engine.statistics().idle == 1
    engine.clock.tick(4.2)
    transport.settle()
    assert transport.is_lost and engine.statistics().connections == 0


@loop_test
async def test_a_kept_connection_that_died_is_replaced_unheard() -> None:
    """A reused connection that dies before any byte costs one retry; the sink hears the answer only."""
    for problem in (None, ConnectionResetError("reset"), BrokenPipeError("pipe")):
        engine = Engine()
        old = engine.connect()
        engine.ask()
        old.deliver(OK)
        request = old.take()
        _, sink = engine.ask()
        assert old.take() == request
        old.hang_up(problem)
        await settled(lambda engine=engine: len(engine.dialed) == 1 and bool(engine.dialed[0].sent))  # type: ignore[misc]
        assert engine.dialed[0].take() == request and sink.events == []
        engine.dialed[0].deliver(OK)
        assert sink.events == OK_EVENTS and engine.statistics().retried == 1


@loop_test
async def test_the_retry_happens_once() -> None:
    """A fresh connection that dies, first or second, is an error."""
    engine = Engine()
    old = engine.connect()
    engine.ask()
    old.deliver(OK)
    _, sink = engine.ask()
    old.hang_up()
    await settled(lambda: bool(engine.dialed))
    await settled(lambda: bool(engine.dialed[0].sent))
    engine.dialed[0].hang_up()
    assert sink.events == [("error", "reset")] and len(engine.dialed) == 1


def test_a_kept_connection_that_dies_after_a_byte_is_an_error() -> None:
    """Once the engine has spoken the request is not repeated."""
    engine = Engine()
    transport = engine.connect()
    engine.ask()
    transport.deliver(OK)
    _, sink = engine.ask()
    transport.deliver(b"H")
    transport.hang_up()
    assert sink.events == [("error", "truncated")] and engine.statistics().retried == 0


@loop_test
async def test_a_connection_that_is_closing_carries_nothing() -> None:
    """Between the engine's close and our hearing of it, another connection is taken."""
    engine = Engine()
    first, second = engine.connect(), engine.connect()
    second.close()
    engine.ask()
    assert first.sent and not second.sent
    first.deliver(OK)
    first.close()
    engine.ask()
    await settled(lambda: bool(engine.dialed) and bool(engine.dialed[0].sent))


@loop_test
async def test_a_dial_that_fails_gives_its_place_to_who_waits() -> None:
    """Each attempt dials in its turn and is told of its own refusal."""

    class Closed(Engine):
        async def open_connection(self) -> EngineConnection:
            raise ConnectionRefusedError("nobody there")

    engine = Closed(limits=UpstreamLimits(connections=1))
    sinks = [engine.ask()[1] for _ in range(3)]
    await settled(lambda: bool(sinks[2].events))
    assert [sink.events for sink in sinks] == [[("error", "refused")]] * 3
    await settled(lambda: engine.statistics().dialing == 0)


@loop_test
async def test_a_connection_nobody_wants_any_more_is_closed() -> None:
    """A dial that succeeds after its cancel leaves nothing open; one that comes lost is an error."""

    class Stubborn(Engine):
        is_lost = False

        async def open_connection(self) -> EngineConnection:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            connection = await super().open_connection()
            if self.is_lost:
                self.dialed[-1].hang_up()
            return connection

    engine = Stubborn()
    attempt, sink = engine.ask()
    await asyncio.sleep(0)
    attempt.cancel()
    await settled(lambda: engine.statistics().dialing == 0)
    assert engine.dialed[0].is_closing() and not engine.dialed[0].sent and sink.events == []
    engine.is_lost = True
    _, sink = engine.ask()
    await settled(lambda: bool(sink.events))
    assert sink.events == [("error", "reset")] and engine.statistics().connections == 0


@loop_test
async def test_a_cancelled_attempt_is_not_repeated() -> None:
    """Cancel wins over the retry."""
    engine = Engine()
    old = engine.connect()
    engine.ask()
    old.deliver(OK)
    attempt, sink = engine.ask()
    engine.answers_dials = False
    old.hang_up()
    attempt.cancel()
    await settled(lambda: engine.statistics().dialing == 0)
    assert sink.events == [] and engine.statistics().in_flight == 0


@loop_test
async def test_no_callback_comes_before_send_returns() -> None:
    """Even a refusal that is certain at once is told later."""
    engine = Engine(limits=UpstreamLimits(connections=1, waiting=1))
    engine.answers_dials = False
    sinks = [engine.ask()[1] for _ in range(3)]
    assert [sink.events for sink in sinks] == [[], [], []]
    await settled(lambda: bool(sinks[2].events))
    assert [sink.events for sink in sinks] == [[], [], [("error", "busy")]]
    await engine.close()
    assert [sink.events for sink in sinks] == [
        [("error", "reset")],
        [("error", "reset")],
        [("error", "busy")],
    ]


@loop_test
async def test_connections_are_bounded_and_waiting_attempts_served_in_order() -> None:
    """Beyond the bound attempts wait for a connection that frees, or for the place of one that died."""
    engine = Engine(limits=UpstreamLimits(connections=1))
    transport = engine.connect()
    sinks = [engine.ask(b"%d" % number)[1] for number in range(3)]
    dropped, _ = engine.ask(b"x")
    last = engine.ask(b"3")[1]
    dropped.cancel()
    assert engine.statistics().waiting == 3
    transport.deliver(OK)
    assert sinks[0].events == OK_EVENTS and transport.sent.endswith(b"\r\n\r\n1")
    transport.deliver(OK.replace(b"X-A", b"Connection: close\r\nX-A"))
    await settled(lambda: bool(engine.dialed) and bool(engine.dialed[0].sent))
    assert engine.dialed[0].sent.endswith(b"\r\n\r\n2") and engine.statistics().connections == 1
    engine.dialed[0].deliver(OK)
    engine.dialed[0].deliver(OK)
    assert last.events == OK_EVENTS and len(engine.dialed) == 1


@loop_test
async def test_waiting_and_dialing_are_bounded_in_time() -> None:
    """connect_s covers both; what timed out takes no connection later."""
    engine = Engine(limits=UpstreamLimits(connections=1), timeouts=Timeouts(connect_s=2.0))
    engine.answers_dials = False
    dialing, waiting = engine.ask()[1], engine.ask()[1]
    engine.clock.tick(2.2)
    assert dialing.events == waiting.events == [("error", "connect_timeout")]
    await settled(lambda: engine.statistics().dialing == 0)
    assert engine.statistics().waiting == engine.statistics().in_flight == 0


@loop_test
async def test_who_waited_for_a_connection_of_ours_in_vain_blames_nobody() -> None:
    """All connections carry something: that is `busy`; the engine was never asked."""
    engine = Engine(limits=UpstreamLimits(connections=1), timeouts=Timeouts(connect_s=2.0))
    transport = engine.connect()
    carried, waiting = engine.ask()[1], engine.ask()[1]
    engine.clock.tick(2.2)
    assert (carried.events, waiting.events) == ([], [("error", "busy")])
    transport.deliver(OK)
    assert carried.events == OK_EVENTS and engine.statistics().in_flight == 0


@loop_test
async def test_a_pause_before_the_connection_is_there_holds() -> None:
    """Backpressure may come before the first byte."""
    engine = Engine()
    attempt, sink = engine.ask()
    attempt.pause_reading()
    await settled(lambda: bool(engine.dialed) and bool(engine.dialed[0].sent))
    engine.dialed[0].deliver(OK)
    assert engine.dialed[0].is_paused and sink.events == []
    attempt.resume_reading()
    assert sink.events == OK_EVENTS


@loop_test
async def test_a_sink_that_raises_loses_its_attempt_and_nothing_else() -> None:
    """The bug is reported to the loop; the pool and other attempts go on."""
    bugs: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))

    class Broken(Recorder):
        def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
            raise KeyError("oops")

    engine = Engine()
    transport = engine.connect()
    sink = Broken()
    engine.send(b"POST", b"/chat", b"", b"", sink)
    transport.deliver(OK)
    assert len(bugs) == 1 and sink.events == [] and engine.statistics().in_flight == 0
    _, other = engine.ask()
    transport.deliver(OK)
    assert other.events == OK_EVENTS


@loop_test
async def test_close_ends_everything_and_refuses_more() -> None:
    """After close nothing is open, and sending raises."""
    engine = Engine()
    transport = engine.connect()
    _, sink = engine.ask()
    await engine.close()
    transport.settle()
    assert sink.events == [("error", "reset")] and transport.is_lost
    with pytest.raises(RuntimeError, match="closed"):
        engine.ask()


@pytest.mark.parametrize(
    ("url", "authority", "base"),
    [
        ("http://h", "h", b""),
        ("http://h:80/", "h", b""),
        ("https://h:443/v1", "h", b"/v1"),
        ("https://h:80/v1/", "h:80", b"/v1"),
        ("http://[::1]:8000/v1", "[::1]:8000", b"/v1"),
        ("http://bücher.example", "xn--bcher-kva.example", b""),
    ],
)
def test_urls_are_taken_apart(url: str, authority: str, base: bytes) -> None:
    """Host header and base path follow the url."""
    upstream = Upstream(url, ticker=Ticker())
    connection = EngineConnection(upstream)
    transport = MemoryTransport(connection)
    upstream.adopt(connection)
    upstream.send(b"GET", b"/x", b"", b"", Recorder())
    assert transport.sent.startswith(b"GET %b/x HTTP/1.1\r\nhost: %b\r\n" % (base, authority.encode()))


BAD_URLS = ["", "h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://u:p@h", "http://h/?q"]


@pytest.mark.parametrize("url", [*BAD_URLS, "http://h/#f", "http://h/é"])
def test_urls_that_cannot_be_asked_are_refused(url: str) -> None:
    """The message shows the url."""
    with pytest.raises(ValueError) as caught:
        Upstream(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_limits_and_timeouts_must_be_positive(value: float) -> None:
    """A timeout that is none, or a pool of nothing, is an error at once."""
    with pytest.raises(ValueError, match="idle_s"):
        Timeouts(idle_s=value)
    with pytest.raises(ValueError, match="connections"):
        UpstreamLimits(connections=value)  # type: ignore[arg-type]


async def _fetched(engine: Engine, data: bytes, **options: float) -> object:
    engine_transport = engine.connect()
    task = asyncio.ensure_future(engine.get("/models", **options))  # type: ignore[arg-type]
    await settled(lambda: bool(engine_transport.sent))
    engine_transport.deliver(data)
    return await task


@loop_test
async def test_get_returns_the_whole_answer_or_says_why_not() -> None:
    """Complete answers are values; large, late and broken ones raise with their kind."""
    answer = await _fetched(Engine(), OK)
    assert answer == (200, {b"content-length": b"2", b"x-a": b"b"}, b"ok")
    for data, options, kind in [
        (OK, {"most_bytes": 1}, "too_large"),
        (OK[:-1], {"timeout_s": 0.0}, "idle_timeout"),
        (b"nonsense", {}, "malformed"),
    ]:
        engine = Engine()
        with pytest.raises(UpstreamError) as caught:
            await _fetched(engine, data, **options)  # type: ignore[arg-type]
        assert caught.value.kind == kind and engine.statistics().in_flight == 0
