"""A running emulator and a client for it, on loopback, for one test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from loadwise.emulator.backend import EmulatedBackend, EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, start_emulator
from loadwise.emulator.script import Reply, Script
from loadwise.sim.simple_engine import SimpleEngineSpec
from loadwise.wire.client import Attempt, Upstream

SCALE = 200.0
LIMIT_S = 120.0
"""Of one wait for what must come, on however slow a machine."""


class Answer:
    """A sink that keeps everything and can be awaited."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.attempt: Attempt | None = None
        self.over: asyncio.Future[str] = loop.create_future()
        self.begun: asyncio.Future[None] = loop.create_future()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self.body += data
        if not self.begun.done():
            self.begun.set_result(None)

    def on_end(self) -> None:
        self.over.set_result("end")

    def on_error(self, kind: str, detail: str) -> None:
        self.over.set_result(kind)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def chunks(self) -> list[Any]:
        """The stream's events, without [DONE]."""
        lines = [line for line in self.body.split(b"\n\n") if line]
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line != b"data: [DONE]"]


class Client:
    """Asks one backend."""

    def __init__(self, backend: EmulatedBackend) -> None:
        self.backend = backend
        self.upstream = Upstream(backend.url)

    def send(self, body: Any, path: bytes = b"/chat/completions", headers: bytes = b"") -> Answer:
        answer = Answer()
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = b"content-type: application/json\r\n" + headers
        answer.attempt = self.upstream.send(b"POST", path, head, data, answer)
        return answer

    async def ask(self, body: Any, path: bytes = b"/chat/completions", headers: bytes = b"") -> Answer:
        answer = self.send(body, path, headers)
        await asyncio.wait_for(answer.over, LIMIT_S)
        return answer

    async def get(self, path: str) -> bytes:
        found = await self.upstream.get(path, from_root=True)
        assert found.status == 200
        return found.body


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """A chat body of user and assistant messages in turn."""
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]} | fields


def says(text: str, n_tokens: int | None = None) -> Script:
    """A script that always says the same."""
    return lambda body: Reply(text=text, output_tokens=n_tokens)


@contextlib.asynccontextmanager
async def running(
    script: Script | None = None, *, scale: float = SCALE, engine: Any = None, **fields: Any
) -> AsyncIterator[Client]:
    """One backend `a` that serves `m`."""
    backend = EmulatedBackendSpec(name="a", model="m", engine=engine or SimpleEngineSpec(), **fields)
    spec = EmulatorSpec(backends=(backend,), scale=scale, has_fault_header=True)
    handle = await start_emulator(spec, script=script)
    client = Client(handle.backends["a"])
    try:
        yield client
    finally:
        await client.upstream.close()
        await handle.close()


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own."""
    import functools

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
