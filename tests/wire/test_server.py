"""The server: what arrives becomes exchanges, each answered once, whatever the bytes' cut and their sense."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from server_world import CHUNKED, GET, World, chunked, post

from loadwise.wire.server import Exchange, Limits

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
