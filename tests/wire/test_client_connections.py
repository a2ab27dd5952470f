"""The upstream client and its connections: kept, reused, timed, bounded, closed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from client_world import OK, OK_EVENTS, Engine, Recorder, answered, loop_test, settled

from loadwise.wire.attempt import EngineConnection
from loadwise.wire.client import (
    Timeouts,
    Upstream,
    UpstreamError,
    UpstreamLimits,
)
from loadwise.wire.heads import Ticker
from loadwise.wire.memory import MemoryTransport


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
    engine.clock.tick(limit_s + 0.5)
    transport.settle()
    assert sink.events[-1] == ("error", kind) and transport.is_lost
    assert engine.statistics().in_flight == 0


def test_timeouts_may_differ_by_attempt() -> None:
    """A send's own limits replace the upstream's."""
    engine = Engine()
    engine.connect()
    _, sink = engine.ask(timeouts=Timeouts(first_byte_s=1.0))
    engine.clock.tick(1.5)
    assert sink.events == [("error", "first_byte_timeout")]


def test_kept_connections_are_closed_when_idle_too_long() -> None:
    """We close before the engine does."""
    engine = Engine(limits=UpstreamLimits(keep_idle_s=4.0))
    transport = engine.connect()
    engine.clock.tick(4.0)
    assert engine.statistics().idle == 1
    engine.clock.tick(4.5)
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
    engine.clock.tick(2.5)
    assert dialing.events == waiting.events == [("error", "connect_timeout")]
    await settled(lambda: engine.statistics().dialing == 0)
    assert engine.statistics().waiting == engine.statistics().in_flight == 0


@loop_test
async def test_who_waited_for_a_connection_of_ours_in_vain_blames_nobody() -> None:
    """All connections carry something: that is `busy`; the engine was never asked."""
    engine = Engine(limits=UpstreamLimits(connections=1), timeouts=Timeouts(connect_s=2.0))
    transport = engine.connect()
    carried, waiting = engine.ask()[1], engine.ask()[1]
    engine.clock.tick(2.5)
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
