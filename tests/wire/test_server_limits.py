"""The server refuses what is too large, too long or too many, by one clean answer, and goes on."""

from __future__ import annotations

import pytest
from server_world import GET, Client, World, chunked, post

from loadwise.wire.server import Limits


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
