"""The upstream client: every attempt ends once, with what the bytes say, whatever their cut."""

from __future__ import annotations

import pytest
from client_world import OK, OK_EVENTS, Engine, Recorder, answered
from hypothesis import given
from hypothesis import strategies as st

from loadwise.wire.attempt import EngineConnection
from loadwise.wire.client import (
    Timeouts,
    UpstreamLimits,
)
from loadwise.wire.memory import MemoryTransport

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
