"""After a storm of clients, faults and departures nothing is left: no turn, no reservation, no task, no timer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from engines import (
    DONE,
    Behaviour,
    Engine,
    chunk,
    closes,
    fails,
    hangs,
    message,
    resets,
    says,
    sends,
    tool_call,
    writes,
)
from sites import Site, on_loop, site, until

from loadwise.journal.parity import replay

FAULTS: list[Behaviour] = [
    resets,
    closes,
    fails(500),
    fails(503, headers="retry-after: 0\r\n"),
    fails(429, headers="retry-after: 0\r\n"),
    fails(400),
    fails(404, b"<html>"),
    sends(chunk({"content": "a"}), then="close"),
    sends(chunk({"content": "a"})),
    sends(chunk({"content": "a"}), DONE, then="close"),
    writes(b"garbage\r\n\r\n", then="close"),
    writes(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", then="close"),
    says(usage=None),
    says(message(None, tool_calls=[tool_call()])),
    says(message("x"), message("y")),
]
SHORT = {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3, "slots": 12}


def stormy(rng: random.Random) -> Engine:
    engine = Engine()

    async def behave(call: Any) -> None:
        odds = rng.random()
        if odds < 0.01:
            await hangs(call)
        await (rng.choice(FAULTS) if odds < 0.2 else says())(call)

    engine.usual = behave
    return engine


async def storm(s: Site, rng: random.Random, n_requests: int, n_clients: int) -> None:
    """Clients of every kind until so many requests have been sent."""
    left = [n_requests]

    async def client(c: int) -> None:
        while left[0] > 0:
            left[0] -= 1
            name = f"p{rng.randrange(60)}" if rng.random() < 0.7 else None
            odds = rng.random()
            if odds < 0.08:
                await s.verdict(name or "p0", rng.choice([{"verdict": "pass"}, {"verdict": "fail"}, {}, b"x"]))
            elif odds < 0.16:
                await s.finish(name or "p0")
            elif odds < 0.2:
                await s.ask("POST", "/v1/chat/completions", rng.choice([b"{", b'{"messages":[]}', b'{"messages":[1]}']))
            elif odds < 0.35:
                await leave(s, rng, name)
            else:
                model = rng.choice(["auto", "auto", "auto", "x", "y", "none"])
                answer = await s.chat(name, rng.choice("abc"), stream=rng.random() < 0.5, model=model)
                assert answer.status in (200, 400, 404, 409, 429, 500, 502, 503, 504), answer
                if answer.status != 200:
                    assert answer.error["message"]

    await asyncio.gather(*(client(c) for c in range(n_clients)))


async def leave(s: Site, rng: random.Random, name: str | None) -> None:
    """Ask, read a little or nothing, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": rng.random() < 0.7}).encode()
    session = f"X-Session-ID: {name}\r\n" if name else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n{session}Content-Length: {len(body)}\r\n\r\n"
    sent = head.encode() + body
    writer.write(sent[: rng.randrange(len(sent))] if rng.random() < 0.2 else sent)
    if rng.random() < 0.5:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.02):
                await reader.read(10)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("seed", range(2))
def test_after_a_storm_nothing_is_left(tmp_path: Path, seed: int) -> None:
    """2000 requests: the laws hold, the ledger is empty, no relay, timer, task or connection is left; L7 holds."""

    @on_loop
    async def run() -> None:
        rng = random.Random(seed)
        engines = [stormy(rng) for _ in range(4)]
        before = len(asyncio.all_tasks())
        async with site(
            *engines,
            models={"x": {}, "y": {}},
            backend_0=SHORT,
            backend_1=SHORT,
            backend_2={"requests_per_minute": 100_000, "first_byte_timeout_s": 0.3},
            backend_3={"kv_tokens": 100_000, "first_byte_timeout_s": 0.3},
            router={"hold_max_s": 0.3, "closed_max": 20, "policy": "linucb"},
            journal=tmp_path,
            answer_max_bytes=1 << 20,
        ) as s:
            await storm(s, rng, 2000, 24)
            await until(lambda: not s.router.turns)
            assert s.counts.arrived > 1000 and s.counts.completed > 400 and s.counts.cancelled > 20
            assert not s.host.relay_by_turn and not s.host._queue
            for engine in engines:
                engine.usual = says()
            for program_id in [p for p, program in s.router.table.by_id.items() if program.is_open]:
                await s.finish(program_id)
            assert s.reserved() == 0
            assert set(s.host._timer_by_name) <= {"router"}
            await until(lambda: s.gateway.server.statistics().connections == 0)
            for probe in s.gateway.probes:
                held = probe._link.upstream.statistics()
                assert (held.waiting, held.dialing) == (0, 0) and held.in_flight <= 1
            assert not s.gateway.server.statistics().held_body_bytes
            assert len(s.router.credit.pending_by_decision) <= len(s.router.table.verifying)
        for engine in engines:
            await engine.stop()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        report = replay(tmp_path)
        assert report.holds, report.mismatch

    run()
