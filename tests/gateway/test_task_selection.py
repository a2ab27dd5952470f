"""A program that names no task type gets one from its first request, once, and none where nobody can tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, message, says
from sites import Site, on_loop, pool, site, until

from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.reading import embedder_of, reading_notices
from loadwise.gateway.serve import gateway_config
from loadwise.kernel.errors import ConfigError
from loadwise.runner.embed import EmbedderSpec
from loadwise.settings import parse_config
from loadwise.verify.task_types import SelectionSpec

TASK_TYPES: dict[str, Any] = {
    "patch": {"examples": ["Fix the crash in parser.py.", "The test of `Reader.close` fails, repair it."]},
    "support": {"examples": ["Hello, I would like to return my shoes.", "Where is my order? It has not arrived."]},
}
PATCH = "The parser.py test fails with a crash. Fix it, please repair `close`."
SUPPORT = "Hello, where is my order? I would like to return my shoes."
NEITHER = "今日は天気がいいですね"


@asynccontextmanager
async def selecting(
    task_types: Any = None, journal: Path | None = None, engine: Engine | None = None, **gateway: Any
) -> AsyncIterator[Site]:
    """A gateway that tells task types by hashed words."""
    options = {"task_types": task_types if task_types is not None else TASK_TYPES}
    engine = Engine() if engine is None else engine
    config = parse_config({**pool(engine), **options})
    embedder = embedder_of(config, gateway_config(config) if not gateway else GatewayConfig(**gateway))
    gateway.pop("embedder", None)  # the site is given the object
    try:
        async with site(engine, embedder=embedder, journal=journal, **options, **gateway) as running:
            yield running
    finally:
        if embedder is not None:
            embedder.close()


def task_type(s: Site, program_id: str) -> str | None:
    """What the router knows of a program."""
    program = s.program(program_id)
    assert program is not None
    return program.task_type


@on_loop
async def test_the_first_request_tells_the_task_type() -> None:
    """Each program gets the type that its first request resembles; what resembles none gets none."""
    async with selecting() as s:
        for name, text in (("p", PATCH), ("q", SUPPORT), ("r", NEITHER)):
            assert (await s.chat(name, text)).status == 200
        assert [task_type(s, name) for name in "pqr"] == ["patch", "support", None]
        program = s.program("p")
        assert program is not None and len(program.components) == 16
        await s.chat("s", NEITHER, metadata={"task_type": "patch"})
        await s.chat("t", " ")
        page = (await s.ask("GET", "/metrics")).body.decode()
        for origin, n in {"named": 1, "told": 2, "abstained": 1, "none": 1}.items():
            assert f'loadwise_task_types_total{{origin="{origin}"}} {n}.0' in page


@on_loop
async def test_only_the_first_request_counts() -> None:
    """A later turn of the program changes nothing, whatever it is about."""
    async with selecting() as s:
        await s.chat("p", PATCH)
        await s.chat("p", SUPPORT)
        assert task_type(s, "p") == "patch"


@on_loop
async def test_a_name_wins_over_what_is_told() -> None:
    """Header before metadata before inference; an unknown name is kept, for somebody reports its verdicts."""
    async with selecting() as s:
        await s.chat("p", PATCH, headers={"X-Loadwise-Task-Type": "support"})
        await s.chat("q", PATCH, metadata={"task_type": "support"})
        await s.chat("r", SUPPORT, metadata={"task_type": "support"}, headers={"X-Loadwise-Task-Type": "patch"})
        await s.chat("s", PATCH, headers={"X-Loadwise-Task-Type": "other"})
        assert [task_type(s, name) for name in "pqrs"] == ["support", "support", "patch", "other"]
        program = s.program("p")
        assert program is not None and program.components, "the embedding is read all the same"


@on_loop
async def test_the_pool_file_may_fix_the_type() -> None:
    """`task_selector.task_type` is of every program that names none, and nothing is inferred."""
    async with selecting(task_selector=SelectionSpec(task_type="support")) as s:
        await s.chat("p", PATCH)
        await s.chat("q", PATCH, headers={"X-Loadwise-Task-Type": "patch"})
        assert [task_type(s, name) for name in "pq"] == ["support", "patch"]


@on_loop
async def test_an_inferred_type_survives_a_restart(tmp_path: Path) -> None:
    """What was told is an event of the journal: a restart asks nobody again."""
    async with selecting(journal=tmp_path / "j") as s:
        await s.chat("p", PATCH)
    async with selecting(journal=tmp_path / "j") as s:
        assert task_type(s, "p") == "patch"


@on_loop
async def test_an_embedding_server_that_is_down_costs_no_request() -> None:
    """Programs run without components and without an inferred type."""
    down = EmbedderSpec(kind="openai", url="http://127.0.0.1:9", model="m", timeout_s=0.2)
    async with selecting(embedder=down) as s:
        assert (await s.chat("p", PATCH)).status == 200
        assert task_type(s, "p") is None
        program = s.program("p")
        assert program is not None and program.components == ()


def notices(task_types: Any, **gateway: Any) -> list[str]:
    """What a start says of a pool file's examples."""
    config = parse_config({**pool(Engine()), "task_types": task_types, "gateway": gateway})
    settings = gateway_config(config)
    embedder = embedder_of(config, settings)
    try:
        return reading_notices(config, settings, embedder)
    finally:
        if embedder is not None:
            embedder.close()


def test_examples_that_cannot_be_used_are_told() -> None:
    """One type, no embedder, and an example in the wrong place are each said; a sound file says nothing."""
    assert notices(TASK_TYPES) == []
    assert "one task type" in notices({"patch": TASK_TYPES["patch"]})[0]
    assert "embedder is none" in notices(TASK_TYPES, embedder="none")[0]
    wrong = {
        "patch": {"examples": [PATCH, "Repair the crash of `close` in parser.py", "The test fails. Fix parser.py"]},
        "support": {"examples": [SUPPORT, "Where is my order?", "The test of parser.py fails with a crash. Fix it."]},
    }
    assert any("example 3 of task type 'support' looks like 'patch'" in said for said in notices(wrong))


def test_a_pool_file_writes_embedder_and_selector_strictly() -> None:
    """The samples of the format page parse; an unknown key lists the valid ones; a fixed type must exist."""
    settings = gateway_config(
        parse_config(
            {
                **pool(Engine()),
                "gateway": {
                    "embedder": {"kind": "openai", "url": "http://127.0.0.1:7997", "model": "bge-m3"},
                    "task_selector": {"rule": "prototype", "margin": 0.05},
                },
            }
        )
    )
    assert isinstance(settings.embedder, EmbedderSpec)
    assert settings.task_selector.margin_min == 0.05
    with pytest.raises(ConfigError, match=r"unknown key 'margn'; valid keys: margin, rule, task_type"):
        notices({}, task_selector={"margn": 1})
    with pytest.raises(ConfigError, match="'nobody', which is not in task_types: patch, support"):
        notices(TASK_TYPES, task_selector={"task_type": "nobody"})


@on_loop
async def test_the_type_that_is_told_brings_its_verifier_and_none_brings_none() -> None:
    """From a first request without a name to a credit by the right verifier; what is not told is not judged."""
    types = {
        "patch": {**TASK_TYPES["patch"], "verifier": {"kind": "exact"}, "references": {"reference": "other"}},
        "support": {**TASK_TYPES["support"], "verifier": {"kind": "exact"}, "references": {"reference": "hello"}},
    }
    async with selecting(types, engine=Engine(says(message("hello")))) as s:
        for name, text in (("p", PATCH), ("q", SUPPORT), ("r", NEITHER)):
            assert (await s.chat(name, text)).status == 200
            assert (await s.finish(name)).status == 200
        await until(lambda: all(s.program(name).verdict is not None for name in "pq"))  # type: ignore[union-attr]
        verdicts = [s.program(name).verdict.verdict for name in "pq"]  # type: ignore[union-attr]
        assert verdicts == ["fail", "pass"], "each by the reference of its own type"
        undecided = s.program("r")
        assert undecided is not None and undecided.verdict is None and not undecided.is_credited
