"""Stopping: what runs is finished within the grace, nothing new is taken, the process ends with 0."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engines import DONE, Engine, chunk, hangs, says
from processes import serve
from sites import UNTIL_S, on_loop, pool, site, until

from loadwise.journal.parity import replay


@on_loop
async def test_sigterm_finishes_what_runs_and_ends_with_0(tmp_path: Path) -> None:
    """Open turns, streamed and not, get their whole answers; then the process ends and the journal is whole."""
    release = asyncio.Event()

    async def waits(call: Any) -> None:
        if not call.json.get("stream"):
            await release.wait()
            await says()(call)
            return
        await call.start_stream()
        await call.piece(chunk({"content": "a"}))
        await release.wait()
        await call.piece(chunk({"content": "b"}))
        await call.piece(DONE)
        await call.end_stream()

    engine = await Engine(waits).start()
    process = await serve(pool(engine), journal=str(tmp_path), grace_s=UNTIL_S)
    running = [asyncio.ensure_future(process.chat(f"p{n}", stream=n % 2 == 0)) for n in range(4)]
    await until(lambda: len(engine.calls) == 4)
    process.terminate()
    await until(lambda: "stopping" in process.said)
    with pytest.raises(OSError):
        while True:  # until its socket is closed
            await process.ask("GET", "/healthz")
    release.set()
    answers = await asyncio.gather(*running)
    assert [a.status for a in answers] == [200] * 4
    assert all(a.body.endswith(DONE) for a in answers[::2])
    assert await process.wait() == 0
    assert not any("Traceback" in text for text in process.said), process.said
    assert replay(tmp_path).holds
    async with site(engine, journal=tmp_path) as s:
        assert s.counts.completed == 4 and s.counts.cancelled == 0


@on_loop
async def test_the_grace_is_a_bound(tmp_path: Path) -> None:
    """A turn that does not end is cut when the grace is over: its engine is let go, the process ends with 0."""
    engine = await Engine(hangs).start()
    process = await serve(pool(engine), journal=str(tmp_path), grace_s=0.2)
    running = asyncio.ensure_future(process.chat("p"))
    await until(lambda: engine.calls)
    process.terminate()
    assert await process.wait() == 0
    await engine.calls[0].gone.wait()
    await asyncio.gather(running, return_exceptions=True)
    async with site(engine, journal=tmp_path) as s:
        assert s.counts.cancelled == 1 and not s.router.turns


@on_loop
async def test_closing_while_everything_happens_leaves_nothing() -> None:
    """Turns running, held and streaming, a probe and a selector under way: close ends them all, quietly."""
    selector = await Engine(hangs).start()
    engine = Engine(hangs)
    router = {"selector": {"url": f"http://127.0.0.1:{selector.port}/", "timeout_s": 0.05}}
    before = len(asyncio.all_tasks())
    async with site(engine, grace_s=0.05, backend_0={"slots": 2}, router=router) as s:
        asked = [asyncio.ensure_future(s.chat(f"p{n}", stream=n % 2 == 0)) for n in range(6)]
        await until(lambda: len(engine.calls) == 2 and s.router.admission.n_held == 4)
        engine.metrics = hangs
        asked.append(asyncio.ensure_future(s.chat("asking")))
        host = s.host
        await s.gateway.close()
        await asyncio.gather(*asked, return_exceptions=True)
        assert not host.relay_by_turn and not host._timer_by_name and not s.router.turns
        s.check()
    await engine.stop()
    await selector.stop()
    await until(lambda: len(asyncio.all_tasks()) <= before)
