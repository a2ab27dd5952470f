"""A fake OpenAI engine that costs as little as Python allows: what benches ask, directly and through a
gateway.

`python -m bench.engine_stub [--host H] [--port P] [--chunks N]` prints the address it listens on, one line,
and serves until it is killed. It generates nothing: every answer is a constant, so that what is measured is
the way.

Answers: `POST /v1/chat/completions` (and `/v1/completions`) not streamed, about 400 bytes of JSON with usage;
streamed when the body says `"stream": true`, N chunks, then one with usage, then `[DONE]`, each written on
its own (they may still leave in one packet, as those of an engine under load do); `GET /v1/models`,
`/metrics` (the names of vLLM), `/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence

import msgspec

from loadwise.wire.heads import EVENT_STREAM, JSON_TYPE, error_body
from loadwise.wire.server import Exchange, Limits, Server

MODEL = "stub-model"
STREAM_CHUNKS = 40
_STREAMED = re.compile(rb'"stream"\s*:\s*true')
_TEXT = (
    "The first step is to read the failing test and the function under test side by side, then to name the "
    "assumption that does not hold."
)
_USAGE = {
    "prompt_tokens": 96,
    "completion_tokens": 40,
    "total_tokens": 136,
    "prompt_tokens_details": {"cached_tokens": 64},
}
_METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="stub-model"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="stub-model"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="stub-model"} 0.1
"""


class Stub:
    """The handler, with its answers made beforehand."""

    def __init__(self, chunks: int = STREAM_CHUNKS, is_spread: bool = True) -> None:
        self._is_spread = is_spread
        self._complete = msgspec.json.encode(_completion())
        self._pieces = [b"data: " + msgspec.json.encode(piece) + b"\n\n" for piece in _stream(chunks)] + [
            b"data: [DONE]\n\n"
        ]
        self._models = msgspec.json.encode(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "stub"}],
            }
        )

    def __call__(self, exchange: Exchange) -> None:
        """Answer at once."""
        path = exchange.path
        if path == b"/v1/chat/completions" or path == b"/v1/completions":
            if _STREAMED.search(exchange.body) is None:
                exchange.respond(200, JSON_TYPE, self._complete)
            else:
                self._stream(exchange)
        elif path == b"/v1/models":
            exchange.respond(200, JSON_TYPE, self._models)
        elif path == b"/health":
            exchange.respond(200)
        elif path == b"/metrics":
            exchange.respond(200, b"content-type: text/plain; version=0.0.4\r\n", _METRICS)
        else:
            body = error_body(f"no route {path.decode('latin-1')!r}", "invalid_request_error", "not_found")
            exchange.respond(404, JSON_TYPE, body)

    def _stream(self, exchange: Exchange) -> None:
        exchange.start(200, EVENT_STREAM)
        if self._is_spread:
            asyncio.get_running_loop().call_soon(self._next, exchange, 0)
            return
        for piece in self._pieces:
            exchange.write(piece)
        exchange.end()

    def _next(self, exchange: Exchange, index: int) -> None:
        if not exchange.is_open:
            return
        exchange.write(self._pieces[index])
        if index + 1 < len(self._pieces):
            asyncio.get_running_loop().call_soon(self._next, exchange, index + 1)
        else:
            exchange.end()


def _completion() -> dict[str, object]:
    message = {"role": "assistant", "content": _TEXT}
    return {
        "id": "chatcmpl-0f3a5d2c9b7e4812a6d0c4f1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }


def _stream(chunks: int) -> list[dict[str, object]]:
    head = {
        "id": "chatcmpl-0f3a5d2c9b7e4812a6d0c4f1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
    }
    pieces: list[dict[str, object]] = []
    for index in range(chunks):
        reason = "stop" if index == chunks - 1 else None
        delta = {"content": f" word{index}"}
        pieces.append({**head, "model": MODEL, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    pieces.append({**head, "model": MODEL, "choices": [], "usage": _USAGE})
    return pieces


async def _serve(host: str, port: int, chunks: int) -> None:
    server = Server(Stub(chunks), Limits(keep_alive_s=3600.0))
    ((at_host, at_port),) = await server.listen(host, port)
    print(f"http://{at_host}:{at_port}", flush=True)
    await asyncio.Event().wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="bench.engine_stub", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=STREAM_CHUNKS)
    options = parser.parse_args(arguments)
    import uvloop

    uvloop.run(_serve(options.host, options.port, options.chunks))


if __name__ == "__main__":
    main()
