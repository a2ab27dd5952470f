"""Programs that are paused because their cache thrashes, as an operator sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engines import Call, Engine, completion, message
from sites import on_loop, site

from loadwise.journal.parity import replay

ROUTER: dict[str, Any] = {
    "admission": {"kind": "footprint", "footprint_ratio": 1.0},
    "hold_max_s": 60,
    "expected_tokens": 700,
}


class Cache:
    """An engine that has found all contexts so far, or finds none any more."""

    def __init__(self) -> None:
        self.has_all = True

    async def __call__(self, call: Call) -> None:
        """Answer at once, with usage."""
        tokens = len(call.body) // 4
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        usage |= {"prompt_tokens_details": {"cached_tokens": tokens if self.has_all else 0}}
        await call.respond(completion(message(), usage=usage))


async def metric(s: Any, name: str) -> float:
    """The value of the one line of a metric."""
    lines = (await s.ask("GET", "/metrics")).body.decode().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return float(line.split()[-1])


@on_loop
async def test_a_thrashing_cache_is_seen_and_a_paused_program_goes_on(tmp_path: Path) -> None:
    """Its turn is held, answered when others find their contexts again, and all of it is in the journal."""
    cache, n_turns = Cache(), 0

    async def turn(s: Any, number: int) -> int:
        """A longer one than all before; the status."""
        nonlocal n_turns
        n_turns += 1
        return (await s.chat(f"p{number}", "x" * (2400 + 8 * n_turns))).status

    async with site(
        Engine(cache), models={"x": {}}, backend_0={"kv_tokens": 10_000}, router=ROUTER, journal=tmp_path
    ) as s:
        for _ in range(2):
            for n in range(12):
                assert await turn(s, n) == 200
        assert await metric(s, "loadwise_pauses_total") == 0.0
        cache.has_all = False
        for n in range(5):
            await turn(s, n)
        assert await metric(s, "loadwise_pauses_total") >= 3.0
        assert await metric(s, "loadwise_cache_thrashing") == 1.0
        assert await metric(s, "loadwise_cache_lost_ratio") > 0.12
        assert await metric(s, "loadwise_cache_fill_ratio") < await metric(s, "loadwise_cache_bound_ratio") < 0.8
        cache.has_all = True
        paused = asyncio.ensure_future(turn(s, 11))
        for n in range(60):
            await turn(s, n % 5)
        assert await paused == 200
        assert await metric(s, "loadwise_cache_thrashing") == 0.0
        learned = s.router.admission.books.residency_by_cache
        learned["pool:renamed since"] = next(iter(learned.values()))
        assert await metric(s, "loadwise_cache_bound_ratio") > 0.0, "only caches that a backend uses are shown"
    assert replay(tmp_path).mismatch is None
