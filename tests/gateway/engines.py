"""Scripted engines for the gateway's tests: raw sockets, so that every fault can be played byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

Behaviour = Callable[["Call"], Awaitable[None]]

METRICS = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n"


def message(text: str | None = "hello", **more: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **more}


def tool_call(name: str = "add", arguments: str = '{"a": 1, "b": 2}', call_id: str = "call_1") -> dict[str, Any]:
    """One call of a tool, as a whole answer carries it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def completion(*messages: dict[str, Any], usage: Any = ...) -> dict[str, Any]:
    """A whole chat completion with one choice per message."""
    if usage is ...:
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    choices = [{"index": i, "message": m, "finish_reason": "stop"} for i, m in enumerate(messages)]
    found: dict[str, Any] = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    return found if usage is None else {**found, "usage": usage}


def chunk(delta: dict[str, Any] | None = None, *, index: int = 0, reason: str | None = None, **more: Any) -> bytes:
    """One event of a streamed chat completion."""
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": reason}]
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(body).encode()


USAGE_CHUNK = chunk(None, usage={"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18})
DONE = b"data: [DONE]\n\n"


class Call:
    """One request as the engine received it, and the means to answer it in any way."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        request, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = request.split(" ")
        self.headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
        self.body = body
        self.gone = gone
        """Set when the client has closed the connection."""
        self.is_closed = False
        self._writer = writer

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body, parse_int=lambda digits: int(digits) if len(digits) < 100 else digits)

    async def send(self, data: bytes) -> None:
        """Put bytes on the wire as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def respond(
        self, body: bytes | dict[str, Any], status: int = 200, headers: str = "", kind: str = "application/json"
    ) -> None:
        """Answer whole."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Status\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\n{headers}\r\n"
        await self.send(head.encode() + raw)

    async def start_stream(self, headers: str = "") -> None:
        """Begin a stream of events, in chunks."""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{headers}\r\n"
        await self.send(head.encode())

    async def piece(self, data: bytes) -> None:
        """One piece of a stream."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        """End a stream properly."""
        await self.send(b"0\r\n\r\n")

    async def read_by_the_client(self) -> None:
        """Until a client on this loop has read what was sent, which a reset would take back.

        It lies in the client's socket once it is out of here, and each round of the loop reads what lies there.
        """
        while self._writer.transport.get_write_buffer_size():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the connection after what was sent."""
        self.is_closed = True
        self._writer.close()

    def reset(self) -> None:
        """Break the connection, unsent bytes lost."""
        self.is_closed = True
        opened = self._writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


def says(*messages: dict[str, Any], usage: Any = ..., headers: str = "") -> Behaviour:
    """Answer with these choices, streamed where the request asks for it, usage in a stream only where asked for."""
    told = messages or (message(),)

    async def behave(call: Call) -> None:
        body = call.json
        if not body.get("stream"):
            await call.respond(completion(*told, usage=usage), headers=headers)
            return
        await call.start_stream(headers)
        for index, whole in enumerate(told):
            await _stream_message(call, whole, index)
        if usage is ... and (body.get("stream_options") or {}).get("include_usage"):
            await call.piece(USAGE_CHUNK)
        await call.piece(DONE)
        await call.end_stream()

    return behave


async def _stream_message(call: Call, whole: dict[str, Any], index: int) -> None:
    await call.piece(chunk({"role": "assistant", "content": ""}, index=index))
    text = whole.get("content") or ""
    for at in range(0, len(text), 3):
        await call.piece(chunk({"content": text[at : at + 3]}, index=index))
    for n, made in enumerate(whole.get("tool_calls") or ()):
        function = made["function"]
        first = {"index": n, "id": made["id"], "type": "function", "function": {"name": function["name"]}}
        await call.piece(chunk({"tool_calls": [first]}, index=index))
        for at in range(0, len(function["arguments"]), 4):
            piece = {"index": n, "function": {"arguments": function["arguments"][at : at + 4]}}
            await call.piece(chunk({"tool_calls": [piece]}, index=index))
    await call.piece(chunk({}, index=index, reason="stop"))


def fails(status: int, body: bytes | dict[str, Any] = b"", headers: str = "") -> Behaviour:
    """Answer with an error."""

    async def behave(call: Call) -> None:
        await call.respond(
            body or {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}, status, headers
        )

    return behave


async def hangs(call: Call) -> None:
    """Say nothing until the client leaves."""
    await call.gone.wait()


async def resets(call: Call) -> None:
    """Break the connection before any byte."""
    call.reset()


async def closes(call: Call) -> None:
    """Close the connection before any byte."""
    call.close()


def sends(*pieces: bytes, then: str = "end") -> Behaviour:
    """Stream these events, then `end` properly, `reset`, `close` in the middle of the body, or `hang`."""

    async def behave(call: Call) -> None:
        await call.start_stream()
        for piece in pieces:
            await call.piece(piece)
        await _finish(call, then)

    return behave


def writes(raw: bytes, then: str = "hang") -> Behaviour:
    """Put these bytes on the wire, whatever they are."""

    async def behave(call: Call) -> None:
        await call.send(raw)
        await _finish(call, then, is_raw=True)

    return behave


async def _finish(call: Call, then: str, *, is_raw: bool = False) -> None:
    if then == "end" and not is_raw:
        await call.end_stream()
    elif then == "close":
        call.close()
    elif then == "reset":
        await call.read_by_the_client()
        call.reset()
    elif then == "hang":
        await call.gone.wait()


RUNNING: list[Engine] = []
"""Engines that listen; a test's loop stops those that are left."""
RESERVED: list[socket.socket] = []
"""Keep the ports of engines while they are down: nobody else is given them. Closed with the test's loop."""


class Engine:
    """An engine on loopback. Each call takes the next behaviour of the script, else the usual one."""

    def __init__(self, usual: Behaviour | None = None) -> None:
        self.usual = usual or says()
        self.script: list[Behaviour] = []
        self.calls: list[Call] = []
        self.port = 0
        self.n_connections = 0
        """Ever accepted."""
        self.metrics: Behaviour | None = None
        """How `/metrics` is answered, where not as usual."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> Engine:
        """Listen, on the same port as before if there was one."""
        if not self.port:
            reserved = socket.socket()
            RESERVED.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for ourselves: it never listens
            reserved.bind(("127.0.0.1", 0))
            self.port = reserved.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        RUNNING.append(self)
        return self

    async def stop(self) -> None:
        """Refuse connections and break those that stand."""
        if self._server is not None:
            self._server.close()
            self._server = None
            RUNNING.remove(self)
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._converse(reader, writer)
        except asyncio.CancelledError:
            pass  # the engine is stopped
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = b""
        while True:
            head = first + await reader.readuntil(b"\r\n\r\n")
            n_bytes = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            gone = asyncio.Event()
            call = Call(head, await reader.readexactly(n_bytes), writer, gone)
            watch = asyncio.ensure_future(self._watch(reader, gone))
            try:
                await self._behave(call)
                if call.is_closed:
                    return
                first = await watch
            finally:
                watch.cancel()
            if not first:
                return

    async def _behave(self, call: Call) -> None:
        if call.path == "/metrics":
            await (self.metrics(call) if self.metrics is not None else call.respond(METRICS, kind="text/plain"))
            return
        self.calls.append(call)
        await (self.script.pop(0) if self.script else self.usual)(call)

    @staticmethod
    async def _watch(reader: asyncio.StreamReader, gone: asyncio.Event) -> bytes:
        try:
            first = await reader.read(1)
        except OSError:
            first = b""
        if not first:
            gone.set()
        return first
