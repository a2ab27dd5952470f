"""Candidate `aiohttp`: aiohttp's server and client on uvloop."""

from __future__ import annotations

import sys

import aiohttp
import uvloop
from aiohttp import web


async def _make(engine: str) -> web.Application:
    application = web.Application(client_max_size=32 << 20)
    connector = aiohttp.TCPConnector(limit=256)
    session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with session.request(request.method, engine + request.path_qs, data=body, headers=headers) as answer:
            content_type = answer.headers.get("content-type", "application/json")
            if "content-length" in answer.headers:
                return web.Response(
                    status=answer.status, body=await answer.read(), headers={"content-type": content_type}
                )
            response = web.StreamResponse(status=answer.status, headers={"content-type": content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    application.router.add_route("*", "/{path:.*}", relay)
    return application


async def _serve(engine: str, port: int) -> None:
    import asyncio

    runner = web.AppRunner(await _make(engine), access_log=None, keepalive_timeout=3600)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2])))
