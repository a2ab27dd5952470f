"""Candidate `uvicorn`: bare ASGI under uvicorn (uvloop, httptools), our own upstream client behind it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn

from loadwise.wire.client import Upstream, UpstreamLimits


class _Pieces:
    """Sink that hands what it hears to one waiting coroutine."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.heard.put_nowait(("head", (status, headers)))

    def on_body(self, data: bytes) -> None:
        self.heard.put_nowait(("body", data))

    def on_end(self) -> None:
        self.heard.put_nowait(("end", None))

    def on_error(self, kind: str, detail: str) -> None:
        self.heard.put_nowait(("error", kind))


class App:
    """The proxy as a bare ASGI application."""

    def __init__(self, engine: str) -> None:
        self._upstream = Upstream(engine, limits=UpstreamLimits(keep_idle_s=3600.0))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        pieces = []
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        sink = _Pieces()
        block = b"content-type: application/json\r\n"
        self._upstream.send(scope["method"].encode(), scope["raw_path"], block, b"".join(pieces), sink)
        while True:
            what, value = await sink.heard.get()
            if what == "head":
                status, headers = value
                kept = [item for item in headers.items() if item[0] in (b"content-type", b"content-length")]
                await send({"type": "http.response.start", "status": status, "headers": kept})
            elif what == "body":
                await send({"type": "http.response.body", "body": value, "more_body": True})
            else:
                await send({"type": "http.response.body", "body": b""})
                return


if __name__ == "__main__":
    uvicorn.run(
        App(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=3600,
    )
