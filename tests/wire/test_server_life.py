"""The server and the lives of connections: kept, streamed, slow, stalled, abandoned."""

from __future__ import annotations

import json
from functools import partial

import pytest
from server_world import CHUNKED, GET, Client, World, chunked, post

from loadwise.wire.heads import Ticker
from loadwise.wire.memory import MemoryTransport
from loadwise.wire.server import Exchange, Limits, Server


@pytest.mark.parametrize("is_answered_at_once", [False, True])
def test_nothing_is_read_after_the_last_request(is_answered_at_once: bool) -> None:
    """What follows `Connection: close` is neither served nor refused."""
    world = World(answer=is_answered_at_once)
    world.transport.deliver(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + GET)
    world.transport.deliver(b"nonsense")
    if not is_answered_at_once:
        world.exchanges[0].respond(200)
    world.transport.settle()
    assert [reply.status for reply in world.replies()] == [200] and len(world.exchanges) == 1
    assert world.server.statistics().refused == {}


def test_streams_are_chunked_and_for_http10_end_with_the_connection() -> None:
    """Each piece is one chunk; a client that knows no chunks gets the plain bytes and a close."""
    world = World()
    world.transport.deliver(GET)
    world.exchanges[0].start(200, b"a: b\r\n")
    world.exchanges[0].write(b"hello ")
    world.exchanges[0].write(b"")
    world.exchanges[0].write(b"world")
    assert not world.replies()[0].complete
    world.exchanges[0].end()
    assert world.replies()[0].complete and world.replies()[0].body == b"hello world"
    assert world.replies()[0].headers[b"a"] == b"b"
    world.transport.take()
    world.transport.deliver(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    world.exchanges[1].start(200)
    world.exchanges[1].write(b"plain")
    world.exchanges[1].end()
    world.transport.settle()
    assert world.transport.sent.endswith(b"\r\n\r\nplain") and world.transport.is_lost


def test_answers_that_have_no_body_send_none() -> None:
    """HEAD, 204 and 304 end with their head; HEAD still tells the length."""
    world = World()
    world.transport.deliver(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n" * 2 + GET * 2)
    world.exchanges[0].respond(200, b"", b"12345")
    assert world.transport.take().endswith(b"content-length: 5\r\n\r\n")
    world.exchanges[1].start(200)
    world.exchanges[1].write(b"piece")
    world.exchanges[1].end()
    assert world.transport.take().endswith(b"transfer-encoding: chunked\r\n\r\n")
    world.exchanges[2].respond(204)
    world.exchanges[3].respond(200, b"", b"after")
    assert [reply.body for reply in world.replies()] == [b"", b"after"]
    assert b"content-length: 0" not in world.transport.sent


def test_an_offer_to_upgrade_may_come_with_a_close() -> None:
    """Ignoring the offer does not ignore the rest of the Connection header."""
    world = World(answer=True)
    world.transport.deliver(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade, close\r\nUpgrade: x\r\n\r\n")
    assert [reply.headers[b"connection"] for reply in world.replies()] == [b"close"] and world.transport.is_lost


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("body", [post(b"body", UPGRADE), chunked(b"bo", b"dy").replace(CHUNKED, CHUNKED + UPGRADE)])
def test_an_offer_to_upgrade_is_ignored_and_the_request_served(body: bytes, step: int) -> None:
    """Clients that offer h2c with every request get HTTP/1.1 answers, bodies and what follows included."""
    world = World(answer=True)
    data = body + GET
    for at in range(0, len(data), step):
        world.transport.deliver(data[at : at + step])
    assert [exchange.body for exchange in world.exchanges] == [b"body", b""]
    assert [reply.status for reply in world.replies()] == [200, 200]
    assert world.exchanges[0].headers[b"host"] == b"h"


def test_repeated_headers_are_joined_and_targets_reduced_to_their_path() -> None:
    """The handler sees one value per name, and the path whether or not the client named the server in it."""
    world = World()
    world.transport.deliver(b"GET http://h:1/x?y=%20 HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a: 2\r\n\r\n")
    exchange = world.exchanges[0]
    assert (exchange.path, exchange.query, exchange.headers[b"x-a"]) == (b"/x", b"y=%20", b"1, 2")
    assert exchange.peer == ("memory", 0) and exchange.is_writable


def _tick(world: World, now_s: float) -> None:
    world.ticker.tick(now_s)
    world.transport.settle()


def test_an_idle_connection_is_closed_in_silence() -> None:
    """No request within keep_alive_s, before the first or after the last: closed without a word."""
    world = World(Limits(keep_alive_s=5.0), answer=True)
    _tick(world, 5.0)
    assert not world.transport.is_lost
    world.transport.deliver(GET)
    world.transport.take()
    _tick(world, 10.0)
    assert not world.transport.is_lost
    _tick(world, 10.5)
    assert world.transport.is_lost and world.transport.sent == b""


@pytest.mark.parametrize("data", [GET[:10], post(b"12345")[:-1]])
def test_a_slow_request_is_told_408(data: bytes) -> None:
    """Head and body each have their time, and bytes that trickle in do not extend it."""
    world = World(Limits(head_timeout_s=3.0, body_timeout_s=3.0, keep_alive_s=100.0))
    world.transport.deliver(data[:-3])
    for second in (1.0, 2.0, 3.0):
        _tick(world, second)
        assert not world.transport.sent
        world.transport.deliver(data[len(data) - 4 + int(second) : len(data) - 3 + int(second)])
    _tick(world, 3.5)
    assert world.refusal() == (408, "request_timeout")


def test_no_time_runs_while_an_answer_is_owed() -> None:
    """A long answer is the handler's business: idle, head and body limits do not count it."""
    world = World(Limits(keep_alive_s=1.0, head_timeout_s=1.0, body_timeout_s=1.0))
    world.transport.deliver(post(b"x"))
    _tick(world, 1000.0)
    world.exchanges[0].respond(200)
    assert world.replies()[0].complete and not world.transport.is_lost


def test_input_after_a_refusal_is_discarded_for_a_moment_only() -> None:
    """The connection lingers so that the refusal arrives, then it is cut."""
    world = World(Limits(linger_s=2.0))
    world.transport.deliver(b"nonsense\r\n\r\n")
    assert world.transport.is_ended and not world.transport.is_lost
    _tick(world, 2.0)
    assert not world.transport.is_lost
    _tick(world, 2.5)
    assert world.transport.is_lost


def test_one_connection_too_many_is_told_503_and_a_flood_is_dropped() -> None:
    """The limit on connections has a clean answer, and its own bound; a place that frees is given away."""
    world = World(Limits(connections=1), answer=True)
    second = world.connect()
    reply = Client().read(bytes(second.sent))[0]
    assert reply.status == 503 and reply.headers[b"retry-after"] == b"1" and second.is_ended
    flood = [world.connect() for _ in range(300)]
    assert flood[-1].sent == b"" and flood[-1].is_closing()
    for transport in (second, *flood):
        transport.hang_up()
    world.transport.hang_up()
    third = world.connect()
    third.deliver(GET)
    assert Client().read(bytes(third.sent))[0].status == 200


def test_a_slow_reader_pauses_the_handler_and_resumes_it() -> None:
    """Backpressure reaches whoever produces the stream."""
    world = World(Limits(write_high_bytes=100, write_low_bytes=10, write_max_bytes=1000))
    world.transport.deliver(GET + GET)
    exchange = world.exchanges[0]
    told: list[str] = []
    exchange.on_pause, exchange.on_resume = lambda: told.append("pause"), lambda: told.append("resume")
    exchange.start(200)
    world.transport.stall()
    exchange.write(b"x" * 90)
    assert told == []
    exchange.write(b"x" * 90)
    assert told == ["pause"] and not exchange.is_writable
    world.transport.catch_up()
    assert told == ["pause", "resume"] and exchange.is_writable
    exchange.end()
    assert len(world.exchanges) == 2


def test_a_client_that_does_not_read_is_dropped_by_size_and_by_time() -> None:
    """A handler that ignores the pause cannot fill the memory, and a stalled client cannot hold its place."""
    for limit in ("size", "time"):
        world = World(Limits(write_high_bytes=100, write_low_bytes=10, write_max_bytes=1000, write_timeout_s=5.0))
        world.transport.deliver(GET)
        exchange = world.exchanges[0]
        gone: list[int] = []
        exchange.on_disconnect = partial(gone.append, 1)
        exchange.start(200)
        world.transport.stall()
        exchange.write(b"x" * 200)
        if limit == "size":
            for _ in range(100):
                exchange.write(b"x" * 100)
        else:
            _tick(world, 5.0)
            assert not gone
            _tick(world, 5.5)
        world.transport.settle()
        assert gone == [1] and world.transport.is_lost and not exchange.is_open


def test_answers_to_a_stalled_client_do_not_pile_up() -> None:
    """Pipelined requests wait unanswered while the client does not read."""
    world = World(Limits(write_high_bytes=100, write_low_bytes=10, write_max_bytes=1000), answer=True)
    world.transport.stall()
    world.transport.deliver(post(b"x" * 60) * 10)
    assert len(world.exchanges) <= 2
    world.transport.catch_up()
    assert len(world.exchanges) == 10 and len(world.replies()) == 10


@pytest.mark.parametrize("body", [b"", b"x" * 70_000])
def test_deep_pipelining_pauses_reading_and_loses_nothing(body: bytes) -> None:
    """Requests beyond the bound stay unread until answers make room; all are answered in order."""
    world = World(Limits(pipelined=4))
    count = 2000 if not body else 8
    world.transport.deliver(b"".join(post(b"%d" % i + body) for i in range(count)))
    assert world.transport.is_paused and world.server.statistics().exchanges_open < max(700, count)
    at = 0
    while at < len(world.exchanges):
        world.exchanges[at].respond(200)
        at += 1
    assert [exchange.body for exchange in world.exchanges] == [b"%d" % i + body for i in range(count)]
    assert not world.transport.is_paused


def test_a_client_that_leaves_is_noticed_at_once() -> None:
    """The pending exchange hears of it, once; requests behind it are dropped; later answers are no error."""
    for problem in (None, ConnectionResetError()):
        world = World()
        world.transport.deliver(GET * 3)
        gone: list[int] = []
        world.exchanges[0].on_disconnect = partial(gone.append, 1)
        world.transport.hang_up(problem)
        assert gone == [1] and len(world.exchanges) == 1 and not world.exchanges[0].is_open
        world.exchanges[0].respond(200)
        world.exchanges[0].start(200)
        world.exchanges[0].write(b"x")
        world.exchanges[0].end()
        world.exchanges[0].abort()
        assert world.transport.sent == b"" and world.server.statistics().exchanges_open == 0


def test_an_answered_exchange_hears_nothing_of_a_later_hang_up() -> None:
    """on_disconnect is for answers that are owed."""
    world = World()
    world.transport.deliver(GET)
    gone: list[int] = []
    world.exchanges[0].on_disconnect = lambda: gone.append(1)
    world.exchanges[0].respond(200)
    world.transport.hang_up()
    assert gone == []


def test_answering_twice_is_a_bug_and_says_so() -> None:
    """Exactly one answer: a second one, or a piece without a stream, raises and sends nothing."""
    world = World()
    world.transport.deliver(GET)
    exchange = world.exchanges[0]
    with pytest.raises(RuntimeError, match="no streamed answer"):
        exchange.write(b"x")
    with pytest.raises(RuntimeError, match="no streamed answer"):
        exchange.end()
    exchange.respond(200)
    sent = bytes(world.transport.sent)
    for again in (partial(exchange.respond, 200), partial(exchange.start, 200), exchange.end):
        with pytest.raises(RuntimeError, match="answer"):
            again()
    exchange.abort()
    assert world.transport.sent == sent


def test_abort_breaks_the_stream_visibly() -> None:
    """What was written arrives, the end does not, and nothing follows."""
    world = World()
    world.transport.deliver(GET * 2)
    world.exchanges[0].start(200)
    world.exchanges[0].write(b"half")
    world.exchanges[0].abort()
    world.transport.settle()
    (reply,) = world.replies()
    assert reply.body == b"half" and not reply.complete and world.transport.is_lost
    assert len(world.exchanges) == 1


@pytest.mark.parametrize("is_started", [False, True])
def test_a_handler_that_raises_becomes_an_error_not_a_hang(is_started: bool) -> None:
    """Before the head: 500 in OpenAI's shape and the connection lives on; after it: a broken stream."""
    bugs: list[Exception] = []

    def handler(exchange: Exchange) -> None:
        if is_started:
            exchange.start(200)
        raise KeyError("oops")

    server = Server(handler, ticker=Ticker(), on_bug=lambda _, problem: bugs.append(problem))
    transport = MemoryTransport(server.connect())
    transport.deliver(GET)
    (reply,) = Client().read(bytes(transport.sent))
    assert len(bugs) == 1 and isinstance(bugs[0], KeyError)
    expected = (200, False, True) if is_started else (500, True, False)
    assert (reply.status, reply.complete, transport.is_lost) == expected
    if not is_started:
        assert json.loads(reply.body)["error"]["code"] == "internal_error"


def test_callbacks_that_raise_do_not_hurt_the_connection() -> None:
    """A broken on_disconnect or on_pause is reported, and the server goes on."""
    world = World(Limits(write_high_bytes=10, write_low_bytes=5, write_max_bytes=1000))
    world.transport.deliver(GET)
    exchange = world.exchanges[0]

    def broken() -> None:
        raise OSError("broken")

    exchange.on_pause = exchange.on_resume = exchange.on_disconnect = broken
    exchange.start(200)
    world.transport.stall()
    exchange.write(b"x" * 50)
    world.transport.catch_up()
    world.transport.hang_up()
    assert len(world.bugs) == 3 and world.server.statistics().connections == 0


@pytest.mark.parametrize("name", ["body_bytes", "head_timeout_s", "pipelined"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_must_limit(name: str, value: float) -> None:
    """Zero, negative, NaN and infinite bounds are errors that name the field."""
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_write_limits_must_be_in_order() -> None:
    """Pausing above the bound that drops the client makes no sense."""
    with pytest.raises(ValueError, match="write_low_bytes"):
        Limits(write_high_bytes=10)
