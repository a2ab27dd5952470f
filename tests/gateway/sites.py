"""A real gateway on loopback over scripted engines, and the clients that ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import openai
import uvloop
from engines import RESERVED, RUNNING, Engine

from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.serve import Gateway, start
from loadwise.router.program import Program
from loadwise.settings import parse_config
from loadwise.wire.client import Timeouts

LIMIT_S = 300.0
"""Of a whole test: what takes longer hangs, on however slow a machine."""
UNTIL_S = 120.0
"""Of one wait for what must come."""
PATIENT = Timeouts(connect_s=UNTIL_S, first_byte_s=UNTIL_S, idle_s=UNTIL_S)
LEFT: list[Any] = []
"""What else a test has started; its `stop` is awaited when the test is over."""


def run_on_loop(test: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    """Run an async test on uvloop, bounded; returns what the loop's exception handler heard of."""
    heard: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        try:
            await asyncio.wait_for(test(), LIMIT_S)
        finally:
            for left in (*RUNNING, *LEFT):
                await left.stop()
            LEFT.clear()
            while RESERVED:
                RESERVED.pop().close()

    uvloop.run(bounded())
    return heard


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make an async test a plain one; an exception in a callback of the loop fails it."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        heard = run_on_loop(lambda: test(**fixtures))
        assert not heard, heard

    return run


async def until(condition: Callable[[], Any], limit_s: float = UNTIL_S) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.001)


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; every error has exactly these four fields, or those that an engine adds."""
        error = self.json["error"]
        assert {"message", "type", "param", "code"} <= set(error), error
        assert isinstance(error["message"], str) and error["message"]
        return dict(error)


async def exchange(port: int, request: bytes) -> bytes:
    """Send bytes, read all that comes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read(-1)
    finally:
        writer.close()


def parse(raw: bytes) -> Answer:
    """A whole HTTP answer."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunk(body)
    return Answer(int(status.split(" ")[1]), headers, body)


def _unchunk(body: bytes) -> bytes:
    pieces, at = [], 0
    while True:
        line_end = body.index(b"\r\n", at)
        n_bytes, at = int(body[at:line_end], 16), line_end + 2
        if n_bytes == 0:
            assert body[at:] == b"\r\n", body[at:]
            return b"".join(pieces)
        pieces.append(body[at : at + n_bytes])
        at += n_bytes + 2


class Site:
    """A gateway under test and its engines."""

    def __init__(self, gateway: Gateway, engines: list[Engine], said: list[str]) -> None:
        self.gateway = gateway
        self.engines = engines
        self.said = said
        self.has_failed = False
        """A test has broken journal or stack, so that nothing new is taken."""
        self.port = int(gateway.url.rpartition(":")[2])

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def host(self) -> Any:
        return self.gateway.host

    @property
    def router(self) -> Any:
        return self.gateway.host.router

    @property
    def counts(self) -> Any:
        return self.router.counts

    def program(self, program_id: str) -> Program | None:
        """A program in memory."""
        found: Program | None = self.router.table.by_id.get(program_id)
        return found

    def wait_for_engine(self, number: int = 0, **limits_s: float) -> None:
        """From now on so long (`first_byte_s` ...) is waited for an engine; all that is not named is waited for."""
        upstream = self.gateway.probes[number]._link.upstream
        upstream.timeouts = msgspec.structs.replace(PATIENT, **limits_s)

    def reserved(self) -> int:
        """What is reserved on all backends together."""
        return sum(a.reserved for a in self.router.admission.ledger.account_by_backend.values())

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """The SDK, as a user makes it; retries off so that each answer is seen."""
        return openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1", **{"api_key": "k", "max_retries": 0, "timeout": UNTIL_S, **options}
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [b"%b %b HTTP/1.1" % (method.encode(), path.encode()), b"Host: localhost", b"Connection: close"]
        if body is not None:
            lines.append(b"Content-Length: %d" % len(raw))
        for name, value in (headers or {}).items():
            lines.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()))
        return parse(await exchange(self.port, b"\r\n".join(lines) + b"\r\n\r\n" + raw))

    async def chat(self, program_id: str | None = None, text: str = "hi", **more: Any) -> Answer:
        """One turn; `headers` may be among the rest, which goes into the body."""
        headers = dict(more.pop("headers", {}))
        if program_id is not None:
            headers["X-Session-ID"] = program_id
        body = {"model": "auto", "messages": [{"role": "user", "content": text}], **more}
        return await self.ask("POST", "/v1/chat/completions", body, headers)

    async def finish(self, program_id: str, body: Any = None) -> Answer:
        return await self.ask("POST", f"/v1/programs/{program_id}/finish", b"" if body is None else body)

    async def verdict(self, program_id: str, body: Any = ...) -> Answer:
        return await self.ask(
            "POST", f"/v1/programs/{program_id}/verdict", {"verdict": "pass"} if body is ... else body
        )

    def check(self) -> None:
        """The laws, and nothing left of turns that are over."""
        self.gateway.host.stack.check()
        assert (self.host.failure is not None) is self.has_failed
        assert set(self.host.relay_by_turn) == set(self.router.turns)


def pool(*engines: Engine, models: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A pool file over these engines: one backend each, named a, b, c, models as told or one for all."""
    names = list(models) if models is not None else ["m"]
    backends = [
        {
            "name": "abcdefgh"[i],
            "model": names[min(i, len(names) - 1)],
            "url": engine.url,
            "connect_timeout_s": PATIENT.connect_s,
            "first_byte_timeout_s": PATIENT.first_byte_s,
            "idle_timeout_s": PATIENT.idle_s,
            **more.pop(f"backend_{i}", {}),
        }
        for i, engine in enumerate(engines)
    ]
    return {"models": dict(models or {"m": {}}), "backends": backends, **more}


@contextlib.asynccontextmanager
async def site(
    *engines: Engine,
    journal: Path | None = None,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    embedder: Any = None,
    **options: Any,
) -> AsyncIterator[Site]:
    """Start engines and a gateway over them; at the end the laws must hold."""
    gateway_options = {name: options.pop(name) for name in list(options) if name in GatewayConfig.__struct_fields__}
    settings = {"port": 0, "probe_interval_s": 0.05, "grace_s": 5.0, "embedder": "none", **gateway_options}
    settings["journal"] = None if journal is None else str(journal)
    said: list[str] = []
    for engine in engines:
        if engine.port == 0:
            await engine.start()
    parsed = parse_config(config if config is not None else pool(*engines, **options))
    gateway = await start(
        parsed, GatewayConfig(**settings), embedder=embedder, environment=environment or {}, say=said.append
    )
    running = Site(gateway, list(engines), said)
    try:
        yield running
        running.check()
    finally:
        await gateway.close()
