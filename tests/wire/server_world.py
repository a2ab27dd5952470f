"""A client and a handler around the server, all in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import httptools

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
