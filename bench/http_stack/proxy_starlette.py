"""Candidate `starlette`: starlette under uvicorn, httpx as client: the usual choice."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def _make(engine: str) -> Starlette:
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256, keepalive_expiry=3600.0)
    client = httpx.AsyncClient(base_url=engine, limits=limits, timeout=600.0)

    async def relay(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        asked = client.build_request(request.method, request.url.path, content=await request.body(), headers=headers)
        answer = await client.send(asked, stream=True)
        content_type = answer.headers.get("content-type", "application/json")
        if "content-length" in answer.headers:
            body = await answer.aread()
            await answer.aclose()
            return Response(body, answer.status_code, media_type=content_type)

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece
            await answer.aclose()

        return StreamingResponse(pieces(), answer.status_code, media_type=content_type)

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(
        _make(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=3600,
    )
