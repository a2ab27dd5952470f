"""Another attempt over HTTP: the answer to the verdict offers it, a repeat says the same, a turn begins it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Engine
from sites import on_loop, site

MODELS: dict[str, Any] = {"x": {}, "y": {}}
ROUTER: dict[str, Any] = {"policy": {"name": "fixed", "candidate": "x"}, "escalation": {"optimism": 9.0}}
FAIL = {"verdict": "fail", "verifier": "tests", "id": "v1"}


@on_loop
async def test_a_failed_verdict_offers_another_attempt(tmp_path: Path) -> None:
    """`retry` names the model; the same verdict again is answered alike; the next turn runs there."""
    async with site(Engine(), Engine(), models=MODELS, router=ROUTER, journal=tmp_path) as s:
        assert (await s.chat("p")).headers["x-loadwise-model"] == "x"
        await s.finish("p")
        first = await s.verdict("p", FAIL)
        assert first.json == {"program": "p", "credited": True, "decision": 1, "retry": {"model": "y", "attempt": 2}}
        assert (await s.verdict("p", FAIL)).body == first.body
        conflict = await s.verdict("p", {"verdict": "pass", "verifier": "tests", "id": "v2"})
        assert (conflict.status, conflict.error["code"]) == (409, "verdict_conflict")
        shown = (await s.ask("GET", "/v1/programs/p")).json
        assert (shown["state"], shown["model"], shown["is_unanswered"]) == ("routed", "y", True)
        assert (await s.chat("p")).headers["x-loadwise-model"] == "y"
        assert (await s.verdict("p", FAIL)).body == first.body
        last = await s.verdict("p", {"verdict": "pass", "verifier": "tests", "id": "v2"})
        assert last.json == {"program": "p", "credited": True, "decision": 2}
        assert (await s.chat("p")).status == 409
        assert (await s.verdict("p", FAIL)).body == first.body


@on_loop
async def test_an_offer_survives_a_restart(tmp_path: Path) -> None:
    """The journal tells of it, and the attempt goes on where it was offered."""
    async with site(Engine(), Engine(), models=MODELS, router=ROUTER, journal=tmp_path) as s:
        await s.chat("p")
        first = await s.verdict("p", FAIL)
    async with site(Engine(), Engine(), models=MODELS, router=ROUTER, journal=tmp_path) as s:
        assert (await s.verdict("p", FAIL)).body == first.body
        assert (await s.chat("p")).headers["x-loadwise-model"] == "y"


@on_loop
async def test_finishing_an_offered_attempt_declines_it() -> None:
    """The program is closed under the verdict that it has."""
    async with site(Engine(), Engine(), models=MODELS, router=ROUTER) as s:
        await s.chat("p")
        await s.verdict("p", FAIL)
        assert (await s.finish("p")).json == {"program": "p", "state": "closed", "end_reason": "finish"}
        assert (await s.verdict("p", FAIL)).json == {"program": "p", "credited": True, "decision": 1}
