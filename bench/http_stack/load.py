"""How many requests per second, at so many connections: by `wrk`, or by our own client where wrk is not installed.

Each connection asks again as soon as it has its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.pinned import environment
from loadwise.wire.client import Timeouts, Upstream, UpstreamLimits
from loadwise.wire.heads import JSON_TYPE, header_block

PROMPT = [
    {"role": "system", "content": "You are a careful engineer. Answer with the shortest correct text."},
    {"role": "user", "content": "What is 17 times 23? Explain in one line how you know."},
]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a load run measured. Times in milliseconds."""

    rps: float
    """Error-free answers per second."""
    requests: int
    errors: int
    p50_ms: float | None
    """None if nothing was answered."""
    p99_ms: float | None
    tool: str


def body(*, stream: bool = False, model: str = "stub-model") -> bytes:
    """A chat request of about 250 bytes."""
    request: dict[str, object] = {"model": model, "messages": PROMPT}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(request)


def closed(
    url: str, *, payload: bytes, core: int, connections: int = 32, seconds: float = 3.0, sessions: int = 0
) -> Load:
    """Ask as fast as answers come.

    Args:
        url: With path.
        payload: Body of every request.
        core: Where the load generator runs.
        connections: Kept open.
        seconds: Length of the run.
        sessions: If positive, requests carry `X-Session-ID` of so many programs in turn.
    """
    if shutil.which("wrk") is None:
        arguments = [
            "--connections",
            str(connections),
            "--seconds",
            str(seconds),
            "--sessions",
            str(sessions),
        ]
        return _own(url, payload, core, arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.lua"
        file.write_text(script(payload, sessions))
        command = [
            "taskset",
            "-c",
            str(core),
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
        ]
        command += ["--timeout", "10s", "-s", str(file), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60.0, check=True)
    figures = json.loads(re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)[-1])
    good = figures["requests"] - figures["errors"]
    return Load(
        rps=good / figures["seconds"],
        requests=figures["requests"],
        errors=figures["errors"],
        p50_ms=figures["p50_ms"],
        p99_ms=figures["p99_ms"],
        tool="wrk",
    )


def script(payload: bytes, sessions: int) -> str:
    """The wrk script: prebuilt requests in turn, and a summary that a program can read."""
    quoted = "".join(f"\\{byte:03d}" for byte in payload)
    ids = [f'["X-Session-ID"] = "bench-{number}"' for number in range(sessions)] or [""]
    tables = ",\n".join(f'{{["Content-Type"] = "application/json", {one}}}' for one in ids)
    return f"""
local headers = {{
{tables}
}}
local requests, at = {{}}, 0
init = function(args)
  for i, h in ipairs(headers) do requests[i] = wrk.format("POST", nil, h, "{quoted}") end
end
request = function()
  at = at % #requests + 1
  return requests[at]
end
done = function(summary, latency, _)
  local e = summary.errors
  io.write(string.format('\\n{{"requests": %d, "errors": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f}}\\n',
    summary.requests, e.connect + e.read + e.write + e.status + e.timeout, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""


def _own(url: str, payload: bytes, core: int, arguments: Sequence[str]) -> Load:
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.http_stack.load", url, *arguments]
    done = subprocess.run(command, input=payload, capture_output=True, env=environment(), timeout=300.0, check=True)
    return msgspec.json.decode(done.stdout, type=Load)


class _Asker:
    """One request in flight: a sink that measures and asks again."""

    __slots__ = ("_load", "_number", "_since_s", "_status")

    def __init__(self, load: _Generator, number: int) -> None:
        self._load = load
        self._number = number
        self._status = 0
        self._since_s = 0.0

    def ask(self, since_s: float) -> None:
        self._since_s = since_s
        load = self._load
        headers = load.headers[self._number % len(load.headers)]
        load.upstream.send(b"POST", load.path, headers, load.payload, self, from_root=True)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        self._load.answered(self, self._since_s, self._status == 200)

    def on_error(self, kind: str, detail: str) -> None:
        self._load.answered(self, self._since_s, False)


class _Generator:
    """Counts answers and keeps their latencies."""

    def __init__(self, url: str, payload: bytes, options: argparse.Namespace) -> None:
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        limits = UpstreamLimits(connections=options.connections, waiting=1_000_000, keep_idle_s=60.0)
        self.upstream = Upstream(f"{scheme}://{authority}", limits=limits, timeouts=Timeouts(connect_s=60.0))
        self.path = b"/" + path.encode()
        self.payload = payload
        ids = range(options.sessions)
        self.headers = [JSON_TYPE + header_block([("X-Session-ID", f"bench-{number}")]) for number in ids] or [
            JSON_TYPE
        ]
        self.latencies_s: list[float] = []
        self.errors = 0
        # Not the loop's clock: that of uvloop has a grain of a millisecond.
        self._end_s = time.perf_counter() + options.seconds
        self._open = 0

    def answered(self, asker: _Asker, since_s: float, is_good: bool) -> None:
        now_s = time.perf_counter()
        self._open -= 1
        if is_good:
            self.latencies_s.append(now_s - since_s)
        else:
            self.errors += 1
        if now_s < self._end_s:
            self._open += 1
            asker.ask(now_s)

    async def run(self, options: argparse.Namespace) -> Load:
        begin_s = time.perf_counter()
        for number in range(options.connections):
            self._open += 1
            _Asker(self, number).ask(begin_s)
        await asyncio.sleep(options.seconds)
        while self._open and time.perf_counter() < self._end_s + 30.0:
            await asyncio.sleep(0.01)
        self.errors += self._open
        await self.upstream.close()
        ordered = sorted(self.latencies_s)
        return Load(
            rps=len(self.latencies_s) / options.seconds,
            requests=len(self.latencies_s) + self.errors,
            errors=self.errors,
            p50_ms=ordered[len(ordered) // 2] * 1e3 if ordered else None,
            p99_ms=ordered[int(len(ordered) * 0.99)] * 1e3 if ordered else None,
            tool="own",
        )


async def generate(payload: bytes, options: argparse.Namespace) -> Load:
    """Run one load on this loop, with the options of `arguments`."""
    return await _Generator(options.url, payload, options).run(options)


def arguments() -> argparse.ArgumentParser:
    """What `python -m bench.http_stack.load` takes (the body comes on stdin)."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_stack.load")
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sessions", type=int, default=0)
    return parser


def main() -> None:
    """Run one load in this process and print what it measured."""
    import uvloop

    options = arguments().parse_args()
    payload = sys.stdin.buffer.read()
    print(msgspec.json.encode(uvloop.run(generate(payload, options))).decode())


if __name__ == "__main__":
    main()
