"""A gateway in a process of its own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sites import LEFT, Answer, exchange, parse

_PROGRAM = """
import asyncio, json, resource, signal, sys
import uvloop
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.serve import start
from loadwise.settings import parse_config
said = json.loads(sys.argv[1])
if said["file_max_bytes"]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (said["file_max_bytes"],) * 2)

def say(text):
    print(text, file=sys.stderr, flush=True)

async def serve():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = await start(parse_config(said["config"]), GatewayConfig(**said["gateway"]), say=say)
    say(f"serving on {running.url}/v1")
    await stop.wait()
    say("stopping")
    await running.close()

uvloop.run(serve())
"""
SOURCE = Path(__file__).parents[2] / "src"


class Process:
    """A running `serve`, and what it has said on stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[str] = []
        self.port = 0
        self._reading: asyncio.Task[None] | None = None

    async def wait_serving(self) -> None:
        """Read what it says until it serves; go on reading."""
        assert self._process.stderr is not None
        while not self.port:
            line = (await self._process.stderr.readline()).decode()
            assert line, f"the gateway ended: {self.said}"
            self.said.append(line.rstrip())
            if line.startswith("serving "):
                self.port = int(line.rpartition("/v1")[0].rpartition(":")[2])
        self._reading = asyncio.ensure_future(self._read(self._process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.said.append(line.decode().rstrip())

    def kill(self) -> None:
        """End it as a crash does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Make sure that it has ended."""
        self.kill()
        await self.wait()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Its exit code."""
        code = await self._process.wait()
        if self._reading is not None:
            await self._reading
        return code

    async def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """One request on a connection of its own.

        Raises:
            OSError, ValueError, IndexError: the process died meanwhile.
        """
        raw = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return parse(await exchange(self.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + raw))

    async def chat(self, program_id: str, **more: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": "x"}], **more}
        return await self.ask("POST", "/v1/chat/completions", body, {"X-Session-ID": program_id})

    async def verdict(self, program_id: str, verdict: str = "pass") -> Answer:
        return await self.ask("POST", f"/v1/programs/{program_id}/verdict", {"verdict": verdict})


async def serve(config: Mapping[str, Any], *, file_max_bytes: int = 0, **gateway: Any) -> Process:
    """Start a gateway as `serve` does and wait until it takes requests."""
    settings = {"port": 0, "probe_interval_s": 0.05, "grace_s": 5.0, **gateway}
    told = json.dumps({"config": config, "gateway": settings, "file_max_bytes": file_max_bytes})
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"}
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM, told, env=environment, stderr=asyncio.subprocess.PIPE
        )
    )
    LEFT.append(process)
    await process.wait_serving()
    return process
