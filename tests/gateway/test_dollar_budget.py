"""A budget of dollars an hour over HTTP: 429 that says when, metrics, and a journal that remembers what was spent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, hangs
from sites import on_loop, site, until

from loadwise.gateway.openai import ModelRequest
from loadwise.journal.explain import why
from loadwise.journal.explanation_text import render_why
from loadwise.journal.parity import replay

MODELS: dict[str, Any] = {
    "cheap": {"usd_per_million": {"input": 0.0, "output": 1000.0}},
    "dear": {"usd_per_million": {"input": 0.0, "output": 100_000.0}},
}
ROUTER: dict[str, Any] = {"policy": "random", "budget_usd_per_h": 1.0, "budget_output_tokens": 600}


@on_loop
async def test_what_does_not_fit_is_told_and_survives_a_restart(tmp_path: Path) -> None:
    """The cheaper model takes what the dearer one may not; then nobody does, after a restart either."""
    options: dict[str, Any] = {"models": MODELS, "router": ROUTER, "journal": tmp_path}
    async with site(Engine(), Engine(), **options) as s:
        assert (await s.chat("p", max_tokens=500)).headers["x-loadwise-model"] == "cheap"
        page = (await s.ask("GET", "/metrics")).body.decode()
        spent = s.router.spending.purse.spent_usd(s.host.now_s())
        assert f"loadwise_spent_usd_hour {spent}" in page and spent > 0.0
        assert "loadwise_budget_usd_hour 1.0" in page and "loadwise_promised_usd 0.0" in page
        refused = await s.chat("q", max_tokens=1000)
        assert (refused.status, refused.error["code"]) == (429, "dollar_budget_exceeded")
        assert "budget of 1 USD per rolling hour" in refused.error["message"]
        assert 3500 <= int(refused.headers["retry-after"]) <= 3600
        assert "loadwise_budget_refusals_total 1.0" in (await s.ask("GET", "/metrics")).body.decode()
    async with site(Engine(), Engine(), **options) as s:
        assert s.router.spending.purse.spent_usd(s.host.now_s()) == spent
        assert (await s.chat("r", max_tokens=1000)).status == 429
        assert (await s.chat("r", max_tokens=500)).status == 200
    assert "dear: left out, the budget of dollars per hour" in render_why(why(tmp_path, "p"))
    assert "refused turn" in render_why(why(tmp_path, "q"))
    report = replay(tmp_path)
    assert report.mismatch is None


@on_loop
async def test_off_by_default() -> None:
    """No budget, no metric."""
    async with site(Engine(), models={"dear": MODELS["dear"]}) as s:
        assert (await s.chat("p", max_tokens=10**6)).status == 200
        assert b"usd_hour" not in (await s.ask("GET", "/metrics")).body


@on_loop
async def test_models_without_a_price_are_named_at_the_start() -> None:
    """The budget does not hold for them: a price that was forgotten would go unnoticed."""
    models = {**MODELS, "local": {}}
    async with site(Engine(), Engine(), Engine(), models=models, router=ROUTER) as s:
        assert any("does not hold for local" in text for text in s.said)
    async with site(Engine(), Engine(), models=MODELS, router=ROUTER) as s:
        assert not any("budget_usd_per_h" in text for text in s.said)


@pytest.mark.parametrize(
    ("field", "body", "n"),
    [
        ("messages", b'{"messages": [{}]}', 1),
        ("messages", b'{"messages": [{}], "n": 4}', 4),
        ("messages", b'{"messages": [{}], "n": "x"}', 1),
        ("messages", b'{"messages": [{}], "n": -1}', 1),
        ("messages", b'{"messages": [{}], "n": 1e400}', 1),
        ("prompt", b'{"prompt": "a", "n": 2, "best_of": 3}', 3),
        ("prompt", b'{"prompt": ["a", "b"], "n": 3}', 6),
        ("prompt", b'{"prompt": [1, 2, 3]}', 1),
        ("prompt", b'{"prompt": [[1], [2]]}', 2),
        ("prompt", b'{"prompt": []}', 1),
    ],
)
def test_how_many_answers_a_request_asks_for(field: str, body: bytes, n: int) -> None:
    """Each of them may be as long as `max_tokens` permits."""
    assert ModelRequest(body, prompt_field=field).n_answers == n


@on_loop
async def test_money_promised_to_a_client_that_left_is_settled() -> None:
    """The host says how an attempt ended that it took back; what nobody counted has cost its whole promise."""
    engine = Engine(hangs)
    async with site(engine, models={"cheap": MODELS["cheap"]}, router=ROUTER) as s:
        purse = s.router.spending.purse
        asking = asyncio.ensure_future(s.chat("p", max_tokens=100))
        await until(lambda: engine.calls)
        assert purse.promised_usd > 0.0
        asking.cancel()
        await until(lambda: s.counts.cancelled == 1)
        await until(lambda: not purse.open)
        assert purse.promised_usd == 0.0 and purse.spent_usd(s.host.now_s()) > 0.0
        assert not s.router.desk.called_off
