"""Candidate `protocols`: our own server and upstream client, uvloop and httptools on both sides."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from loadwise.wire.client import Upstream, UpstreamLimits
from loadwise.wire.heads import JSON_TYPE, Ticker, error_body
from loadwise.wire.server import Exchange, Limits, Server


class _Relay:
    """Carries one answer from the engine to the client."""

    __slots__ = ("_body", "_exchange", "_headers", "_status", "attempt")

    def __init__(self, exchange: Exchange, upstream: Upstream) -> None:
        self._exchange = exchange
        self.attempt = upstream.send(exchange.method, exchange.path, JSON_TYPE, exchange.body, self)
        exchange.on_disconnect = self.attempt.cancel
        exchange.on_pause = self.attempt.pause_reading
        exchange.on_resume = self.attempt.resume_reading

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._headers = b"content-type: %b\r\n" % headers.get(b"content-type", b"application/json")
        self._body: bytes | None = None
        if b"content-length" not in headers:
            self._exchange.start(status, self._headers)
        else:
            self._body = b""

    def on_body(self, data: bytes) -> None:
        if self._body is None:
            self._exchange.write(data)
        else:
            self._body += data

    def on_end(self) -> None:
        if self._body is None:
            self._exchange.end()
        else:
            self._exchange.respond(self._status, self._headers, self._body)

    def on_error(self, kind: str, detail: str) -> None:
        if self._exchange.is_started:
            self._exchange.abort()
        else:
            self._exchange.respond(502, JSON_TYPE, error_body(detail, "server_error", kind))


async def _serve(engine: str, port: int) -> None:
    ticker = Ticker()
    upstream = Upstream(engine, ticker=ticker, limits=UpstreamLimits(keep_idle_s=3600.0))

    def handler(exchange: Exchange) -> None:
        _Relay(exchange, upstream)

    server = Server(handler, Limits(keep_alive_s=3600.0), ticker=ticker)
    await server.listen("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2])))
