"""A model that changes behind its name: alarms are counted and said, and an operator may say so first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Engine
from sites import on_loop, site, until

from loadwise.gateway.notices import alarm_notice
from loadwise.journal.parity import replay

ROUTER: dict[str, Any] = {"policy": {"name": "drift", "alarm": 1.0, "discount": 1.0, "ridge": 0.01}}


async def judged(s: Any, program_id: str, verdict: str) -> None:
    await s.chat(program_id)
    await s.finish(program_id)
    assert (await s.verdict(program_id, {"verdict": verdict})).status == 200


@on_loop
async def test_an_alarm_is_counted_and_said_once(tmp_path: Path) -> None:
    """A restart counts on and does not say it again."""
    async with site(Engine(), models={"x": {}}, router=ROUTER, journal=tmp_path) as s:
        for n in range(6):
            await judged(s, f"good{n}", "pass")
        assert b"loadwise_policy_alarms_total" in (await s.ask("GET", "/metrics")).body
        quiet = dict(s.router.credit.alarms())
        for n in range(4):
            await judged(s, f"bad{n}", "fail")
        alarms = s.router.credit.alarms()["x"]
        assert alarms > quiet["x"]
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert f'loadwise_policy_alarms_total{{model="x"}} {float(alarms)}' in page
        await until(lambda: any("'x' is no longer what it was" in text for text in s.said))
    async with site(Engine(), models={"x": {}}, router=ROUTER, journal=tmp_path) as s:
        assert s.router.credit.alarms() == {"x": alarms}
        said: list[str] = []
        alarm_notice(s.router, said.append)(0.0)
        assert not said


@on_loop
async def test_an_operator_may_say_that_a_model_was_swapped(tmp_path: Path) -> None:
    """It is journaled, and a replay forgets at the same place."""
    async with site(Engine(), Engine(), models={"x": {}, "y": {}}, router=ROUTER, journal=tmp_path) as s:
        for n in range(4):
            await judged(s, f"p{n}", "pass")
        learner = s.router.credit.learners[0]
        before = learner.dump()
        assert (await s.ask("POST", "/v1/models/x/forget")).json == {"model": "x", "forgotten": True}
        assert learner.dump() != before
        await judged(s, "after", "pass")
        for name, status in (("z", 404), ("auto", 400)):
            assert (await s.ask("POST", f"/v1/models/{name}/forget")).status == status
        assert (await s.ask("GET", "/v1/models/x/forget")).status == 404
    assert replay(tmp_path).mismatch is None


@on_loop
async def test_a_policy_that_cannot_forget_says_so() -> None:
    """Nothing has happened then."""
    async with site(Engine(), models={"x": {}}) as s:
        refused = await s.ask("POST", "/v1/models/x/forget")
        assert (refused.status, refused.error["code"]) == (409, "policy_cannot_forget")
        assert s.counts.stale == 0
