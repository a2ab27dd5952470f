"""The server: what arrives becomes exchanges, each answered once and in order; everything is bounded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loadwise.wire.heads import JSON_TYPE, Ticker
from loadwise.wire.memory import MemoryTransport
from loadwise.wire.server import Exchange, Limits, Server

CHUNKED = b"Transfer-Encoding: chunked\r\n"
GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, more: bytes = b"") -> bytes:
    """A request with a counted body."""
    return b"POST /p?q=1 HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (more, len(body), body)


def chunked(*pieces: bytes) -> bytes:
    """A request with a chunked body."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@dataclass
class Reply:
    """A parsed answer."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False


class Client:
    """Parses whatever the server sent; raises if it is not HTTP."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.replies.append(Reply())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.replies[-1].headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.replies[-1].body += body

    def on_headers_complete(self) -> None:
        self.replies[-1].status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self.replies[-1].complete = True

    def read(self, data: bytes) -> list[Reply]:
        """All answers so far."""
        self._parser.feed_data(data)
        return self.replies


class World:
    """A server, one client in memory, and everything that the handler was given."""

    def __init__(self, limits: Limits | None = None, *, answer: bool = False) -> None:
        self.exchanges: list[Exchange] = []
        self.bugs: list[Exception] = []
        self.ticker = Ticker()
        self._answer = answer
        self.server = Server(
            self._handle, limits, ticker=self.ticker, on_bug=lambda _, problem: self.bugs.append(problem)
        )
        self.transport = self.connect()

    def _handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self._answer:
            exchange.respond(200, JSON_TYPE, exchange.method + b" " + exchange.path + b" " + exchange.body)

    def connect(self) -> MemoryTransport:
        """One more connection."""
        return MemoryTransport(self.server.connect())

    def replies(self) -> list[Reply]:
        """What the first client has received."""
        return Client().read(bytes(self.transport.sent))

    def refusal(self) -> tuple[int, str]:
        """Status and code of the last answer: an error in OpenAI's shape, on a closed connection."""
        reply = self.replies()[-1]
        assert reply.complete and reply.headers[b"connection"] == b"close" and self.transport.is_ended
        error = json.loads(reply.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return reply.status, error["code"]


_HEADER = st.tuples(
    st.sampled_from([b"X-A", b"x-a", b"Cookie", b"Accept"]), st.sampled_from([b"", b"1", b"a, b", b"~" * 300])
)
_BODY = st.binary(max_size=60)


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    more = b"".join(b"%b: %b\r\n" % header for header in draw(st.lists(_HEADER, max_size=3)))
    kind = draw(st.sampled_from(["get", "post", "chunked", "head"]))
    if kind == "post":
        return post(draw(_BODY), more)
    if kind == "chunked":
        return chunked(*draw(st.lists(st.binary(min_size=1, max_size=30), max_size=3)))
    return b"%b /%b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (
        kind.upper().encode(),
        b"x" * draw(st.integers(0, 9)),
        more,
    )


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(_requests(), max_size=6), st.lists(st.integers(0, 5000), max_size=12))
def test_split_points_of_the_bytes_change_nothing(requests: list[bytes], cuts: list[int]) -> None:
    """However the stream is cut, the handler sees the same requests and the client the same answers."""
    whole, parts = World(answer=True), World(answer=True)
    data = b"".join(requests)
    whole.transport.deliver(data)
    for part in _cut(data, cuts):
        parts.transport.deliver(part)
    for name in ("method", "path", "query", "headers", "body"):
        assert [getattr(e, name) for e in whole.exchanges] == [getattr(e, name) for e in parts.exchanges]
    assert len(whole.exchanges) == len(requests)
    assert _undated(whole.transport.sent) == _undated(parts.transport.sent)


def _undated(sent: bytearray) -> list[bytes]:
    return [line for line in bytes(sent).split(b"\r\n") if not line.startswith(b"date: ")]


_FRAGMENTS = [
    *(
        b"GET ",
        b"POST ",
        b"CONNECT ",
        b"/",
        b" HTTP/1.1\r\n",
        b"HTTP/2.0",
        b"\r\n",
        b"\r",
        b"\n",
        b":",
        b"\x00",
        GET,
    ),
    *(
        b"Host: h\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(b"Upgrade: x\r\n", b"Connection: upgrade\r\n", b"Connection: close\r\n", b"0", b"5", b"abcde", b";x"),
]
_GARBAGE = st.binary(max_size=200) | st.lists(st.sampled_from(_FRAGMENTS), max_size=25).map(b"".join)


@given(st.lists(_GARBAGE, max_size=4), st.lists(st.integers(0, 800), max_size=6))
def test_garbage_is_answered_or_cut_but_never_breaks_the_server(pieces: list[bytes], cuts: list[int]) -> None:
    """Any bytes lead to well-formed answers, at most one refusal, the last, and no exchange left behind."""
    world = World(answer=True)
    for part in _cut(b"".join(pieces), cuts):
        world.transport.deliver(part)
    interims = bytes(world.transport.sent).count(b"HTTP/1.1 100 Continue\r\n\r\n")
    heads = sum(exchange.method == b"HEAD" for exchange in world.exchanges)
    if not heads:
        replies = [reply for reply in world.replies() if reply.status != 100]
        refused = [reply for reply in replies if reply.status >= 400]
        assert all(reply.complete for reply in replies)
        assert len(replies) == len(world.exchanges) + len(refused)
        assert refused in ([], replies[-1:]) and interims <= len(replies) + 1
    world.transport.hang_up()
    statistics = world.server.statistics()
    assert (statistics.connections, statistics.exchanges_open, statistics.held_body_bytes) == (0, 0, 0)
    assert not world.bugs


class Conversation(RuleBasedStateMachine):
    """One connection under pipelining, deferred answers, slow reading and hang-up."""

    @initialize(pipelined=st.integers(1, 4))
    def connect(self, pipelined: int) -> None:
        self.world = World(
            Limits(pipelined=pipelined, write_high_bytes=200, write_low_bytes=50, write_max_bytes=10_000)
        )
        self.sent = 0
        self.answered = 0
        self.streamed = b""
        self.gone: list[int] = []
        self.is_left = False

    @property
    def current(self) -> Exchange | None:
        """The exchange that waits for its answer."""
        exchanges = self.world.exchanges
        return exchanges[-1] if exchanges and exchanges[-1].is_open else None

    @precondition(lambda self: not self.is_left)
    @rule(count=st.integers(1, 6), body=st.binary(max_size=40))
    def ask(self, count: int, body: bytes) -> None:
        self.world.transport.deliver(post(body) * count)
        self.sent += count

    @precondition(lambda self: self.current is not None and not self.current.is_started)
    @rule(body=st.binary(max_size=300))
    def respond(self, body: bytes) -> None:
        assert self.current is not None
        self.current.respond(200, b"", body)
        self.answered += 1

    @precondition(lambda self: self.current is not None and not self.current.is_started)
    @rule()
    def start(self) -> None:
        assert self.current is not None
        number = len(self.world.exchanges)
        self.current.on_disconnect = lambda: self.gone.append(number)
        self.current.start(200)

    @precondition(lambda self: self.current is not None and self.current.is_started)
    @rule(piece=st.binary(max_size=120))
    def write(self, piece: bytes) -> None:
        assert self.current is not None
        self.current.write(piece)

    @precondition(lambda self: self.current is not None and self.current.is_started)
    @rule()
    def end(self) -> None:
        assert self.current is not None
        self.current.end()
        self.answered += 1

    @rule()
    def stall(self) -> None:
        self.world.transport.stall()

    @rule()
    def catch_up(self) -> None:
        self.world.transport.catch_up()

    @precondition(lambda self: not self.is_left)
    @rule()
    def leave(self) -> None:
        current = self.current
        waiting = current.on_disconnect if current is not None else None
        self.world.transport.hang_up()
        self.is_left = True
        assert self.gone == ([len(self.world.exchanges)] if waiting is not None else [])

    @invariant()
    def answers_match_requests(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        assert self.answered <= len(world.exchanges) <= self.sent
        assert sum(exchange.is_open for exchange in world.exchanges) <= 1
        assert world.server.statistics().exchanges_open <= self.sent - self.answered
        if not self.is_left:
            assert world.server.statistics().exchanges_open + self.answered >= len(world.exchanges)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if not self.is_left:
            self.world.transport.catch_up()
            while self.current is not None:
                if self.current.is_started:
                    self.current.end()
                else:
                    self.current.respond(200)
                self.answered += 1
                self.world.transport.settle()
            assert self.answered == self.sent == len([r for r in self.world.replies() if r.complete])
            self.world.transport.hang_up()
        assert self.world.server.statistics().connections == self.world.server.statistics().exchanges_open == 0
        assert not self.world.bugs


TestConversation = Conversation.TestCase


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"BREW / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA: b\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n%b\r\n0\r\n\r\n" % CHUNKED, 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\n%bContent-Length: 5\r\n\r\n0\r\n\r\n" % CHUNKED, 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5, 6\r\n\r\n12345", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nExpect: a-miracle\r\nContent-Length: 1\r\n\r\n", 417),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\nxx", 501),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 10_000])
def test_refused_requests_get_one_clean_answer(data: bytes, status: int, step: int) -> None:
    """What is not a request is refused with its status, byte by byte as at once, and reaches no handler."""
    if status == 505 and data.startswith(b"PRI"):
        step = 10_000  # Only a preface that arrives whole is recognised; one in pieces is merely malformed.
    world = World()
    for at in range(0, len(data), step):
        world.transport.deliver(data[at : at + step])
    assert world.refusal()[0] == status
    assert not world.exchanges and len(world.replies()) == 1
    assert world.server.statistics().refused == {status: 1}


def test_refusal_waits_for_the_answers_owed_before_it() -> None:
    """A malformed request behind a pending one is refused after the pending one's answer."""
    world = World()
    world.transport.deliver(GET + b"nonsense\r\n\r\n")
    assert world.transport.sent == b""
    world.exchanges[0].respond(200, b"", b"first")
    assert [reply.status for reply in world.replies()] == [200, 400]
    assert world.refusal()[0] == 400


@pytest.mark.parametrize("size", [9, 10, 11])
@pytest.mark.parametrize("make", [post, chunked, lambda body: chunked(*(body[i : i + 1] for i in range(len(body))))])
def test_bodies_up_to_the_limit_pass_and_larger_ones_do_not(size: int, make) -> None:  # type: ignore[no-untyped-def]
    """The limit itself is allowed, one byte more is 413, counted or chunked."""
    world = World(Limits(body_bytes=10), answer=True)
    world.transport.deliver(make(b"x" * size))
    if size <= 10:
        assert world.exchanges[0].body == b"x" * size
    else:
        assert world.refusal() == (413, "request_too_large") and not world.exchanges


def test_a_large_announced_body_is_refused_before_it_is_sent() -> None:
    """413 follows the headers, without 100 Continue, and the rest of the upload is discarded, not parsed."""
    world = World(Limits(body_bytes=10))
    world.transport.deliver(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n")
    assert world.refusal()[0] == 413
    world.transport.deliver(GET)
    assert not world.exchanges and len(world.replies()) == 1


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (b"A: " + b"x" * 500 + b"\r\n", "header_too_large"),
        (b"".join(b"A%d: %b\r\n" % (i, b"x" * 90) for i in range(11)), "headers_too_large"),
        (b"A: b\r\n" * 30, "too_many_headers"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_headers_beyond_a_limit_are_431(headers: bytes, code: str, step: int) -> None:
    """Size of one header, size of all, number of them: each has its refusal, however the bytes arrive."""
    world = World(Limits(head_bytes=1000, header_bytes=400, headers=20))
    data = b"GET / HTTP/1.1\r\nHost: h\r\n" + headers + b"\r\n"
    for at in range(0, len(data), step):
        world.transport.deliver(data[at : at + step])
    assert world.refusal() == (431, code)


def test_trailers_are_bounded_and_do_not_become_headers() -> None:
    """A trailer cannot add a header after the fact, nor grow without end."""
    request = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n%b\r\n"
    world = World(Limits(headers=5), answer=True)
    world.transport.deliver(request % b"X-Session-ID: forged\r\n")
    assert b"x-session-id" not in world.exchanges[0].headers
    world.transport.deliver(request % (b"A: b\r\n" * 6))
    assert world.refusal()[0] == 431


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\nA"])
def test_a_head_without_end_is_cut_off(start: bytes) -> None:
    """A target, header value or name that never ends is refused within the limits, not held."""
    world = World(Limits(head_bytes=1000, header_bytes=400))
    world.transport.deliver(start)
    delivered = 0
    while not world.transport.is_ended and delivered < 5000:
        world.transport.deliver(b"x" * 50)
        delivered += 50
    assert world.refusal()[0] in (414, 431) and delivered <= 1500


def test_bodies_of_all_connections_together_are_bounded() -> None:
    """Uploads beyond what the server may hold are told 503; finished ones make room again."""
    world = World(Limits(held_body_bytes=100))
    big = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 90\r\n\r\n"
    world.transport.deliver(big)
    world.transport.deliver(b"x")
    world.transport.deliver(b"x" * 80)
    other = world.connect()
    other.deliver(big)
    other.deliver(b"x")
    other.deliver(b"x" * 80)
    assert Client().read(bytes(other.sent))[0].status == 503
    world.transport.deliver(b"x" * 9)
    assert world.server.statistics().held_body_bytes == 89
    world.exchanges[0].respond(200)
    other.hang_up()
    assert world.server.statistics().held_body_bytes == 0


def test_bodies_of_a_client_that_left_are_not_counted() -> None:
    """What was held for it, delivered or not, makes room."""
    world = World()
    upload = post(b"x" * 50)
    for request in (upload, upload, upload[:-1]):
        world.transport.deliver(request[:-30])
        world.transport.deliver(request[-30:])
    assert world.server.statistics().held_body_bytes == 90
    world.transport.hang_up()
    assert world.server.statistics().held_body_bytes == 0


def test_expect_continue_is_answered_when_its_turn_comes() -> None:
    """100 Continue follows the answers that are owed before it, never amid one of them."""
    world = World()
    world.transport.deliver(GET)
    world.exchanges[0].start(200)
    world.transport.deliver(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    world.exchanges[0].write(b"piece")
    assert b"100 Continue" not in world.transport.sent
    world.exchanges[0].end()
    assert world.transport.sent.endswith(b"0\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
    world.transport.deliver(b"ok")
    assert world.exchanges[1].body == b"ok"


def test_no_continue_for_a_body_that_came_along() -> None:
    """A client that did not wait is not told to go on."""
    world = World(answer=True)
    world.transport.deliver(post(b"ok", b"Expect: 100-continue\r\n"))
    assert [reply.status for reply in world.replies()] == [200]


@pytest.mark.parametrize(
    ("request_line", "header", "answered", "closes"),
    [
        (b"GET / HTTP/1.1", b"Host: h\r\n", None, False),
        (b"GET / HTTP/1.1", b"Host: h\r\nConnection: keep-alive\r\n", None, False),
        (b"GET / HTTP/1.1", b"Host: h\r\nConnection: close\r\n", b"close", True),
        (b"GET / HTTP/1.0", b"", b"close", True),
        (b"GET / HTTP/1.0", b"Connection: Keep-Alive\r\n", b"keep-alive", False),
    ],
)
def test_connections_are_kept_as_the_client_asks(
    request_line: bytes, header: bytes, answered: bytes | None, closes: bool
) -> None:
    """Keep-alive is the default of HTTP/1.1 and an option of HTTP/1.0."""
    world = World(answer=True)
    world.transport.deliver(request_line + b"\r\n" + header + b"\r\n")
    assert world.replies()[0].headers.get(b"connection") == answered
    assert world.transport.is_lost == closes


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
    _tick(world, 10.2)
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
    _tick(world, 3.2)
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
    _tick(world, 2.2)
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
            _tick(world, 5.2)
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
