"""What a start makes of its configuration and its journal, and what it says."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engines import Engine
from hypothesis import given
from hypothesis import strategies as st
from sites import on_loop, pool, site, until

from loadwise.gateway import serve
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.notices import OTHER_FILES, notices, raise_file_limit
from loadwise.gateway.serve import resumed_at_s, start
from loadwise.journal.reader import Reader
from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.errors import ConfigError, JournalError
from loadwise.kernel.work import Verdict
from loadwise.runner.embed import HashEmbedder
from loadwise.settings import parse_config

times_s = st.floats(0.0, 1e10)


@given(times_s, times_s, times_s)
def test_the_runs_clock_counts_the_time_nobody_served(last_at_s: float, epoch_s: float, now_s: float) -> None:
    """It stands at the last entry plus the gap of wall clock since; a clock that was set back does not turn it back."""
    at_s = resumed_at_s(last_at_s, epoch_s, now_s)
    assert at_s >= last_at_s
    if epoch_s:
        assert at_s == max(last_at_s, now_s - epoch_s)
    else:
        assert at_s == last_at_s, "a journal that does not say when it began"


@on_loop
async def test_a_restart_an_hour_later_is_an_hour_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was left idle is over; with the clock set back nothing is lost."""
    async with site(Engine(), journal=tmp_path, router={"idle_s": 1800.0}) as s:
        assert (await s.chat("p")).status == 200
        ended_at_s = s.host.now_s()
    for gap_s, is_open in ((-7200.0, True), (3600.0, False)):
        wall = SimpleNamespace(time=lambda gap_s=gap_s: time.time() + gap_s, time_ns=time.time_ns)
        monkeypatch.setattr(serve, "time", wall)
        async with site(Engine(), journal=tmp_path, router={"idle_s": 1800.0}) as s:
            if is_open:
                assert ended_at_s <= s.host.now_s() < ended_at_s + 600.0
                assert s.program("p").is_open  # type: ignore[union-attr]
            else:
                assert s.host.now_s() >= ended_at_s + 3600.0
                await until(lambda: not s.program("p") or not s.program("p").is_open)  # type: ignore[union-attr]


@on_loop
async def test_the_context_names_its_embedder(tmp_path: Path) -> None:
    """In the stack and in the journal's header; without one it names none."""
    async with site(Engine(), journal=tmp_path / "h", embedder=HashEmbedder(16)) as s:
        assert s.router.config.context.embedder == "hash-1-16"
        named = s.router.config.context.version
    async with site(Engine(), journal=tmp_path / "n") as s:
        assert s.router.config.context.embedder == ""
        assert s.router.config.context.version != named
    header = next(iter(Reader(tmp_path / "h").segments())).header
    assert header.config["router"]["context"]["embedder"] == "hash-1-16"


class BrokenArchive:
    """An index that cannot be read for a while."""

    def __init__(self) -> None:
        self.problem: Exception | None = JournalError("disk I/O error", code="index_failed")

    def get(self, program_id: str) -> ProgramRecord | None:
        if self.problem is not None:
            raise self.problem
        return None

    def recent(self, limit: int = 100) -> list[ProgramRecord]:
        if self.problem is not None:
            raise self.problem
        return []


@pytest.mark.parametrize("problem", [JournalError("disk I/O error"), msgspec.ValidationError("odd")])
def test_new_programs_are_served_while_the_index_cannot_be_read(problem: Exception) -> None:
    """What is not in memory counts as unknown, once said and every time counted; questions about it may come again."""

    @on_loop
    async def run() -> None:
        async with site(Engine()) as s:
            archive = s.gateway.server.handler.routes._turns.archive  # type: ignore[attr-defined]
            archive._archive = broken = BrokenArchive()
            broken.problem = problem
            assert [(await s.chat(f"p{n}")).status for n in range(3)] == [200] * 3
            assert (await s.chat("p0")).status == (await s.verdict("p0")).status == 200
            for answer in (await s.ask("GET", "/v1/programs/q"), await s.ask("GET", "/v1/programs")):
                assert (answer.status, answer.error["code"]) == (503, "index_failed")
            assert sum("cannot be read" in text for text in s.said) == 1
            assert "loadwise_index_failures_total 5.0" in (await s.ask("GET", "/metrics")).body.decode()
            broken.problem = None
            assert (await s.ask("GET", "/v1/programs/q")).status == 404
            assert s.said[-1] == "archived programs can be read again"

    run()


@on_loop
async def test_what_the_journal_has_to_say_is_said_while_it_runs(tmp_path: Path) -> None:
    """Not only at the next start; and what closing it brings up too."""
    async with site(Engine(), journal=tmp_path) as s:
        s.host.journal.messages.append("the snapshot was not written")
        await until(lambda: "journal: the snapshot was not written" in s.said)
        writer = s.host.journal
        writer._snapshots.wait = lambda: writer.messages.append("at the very end")
    assert s.said[-1] == "journal: at the very end"


@on_loop
async def test_a_program_is_shown_with_every_field() -> None:
    """Defaults too: a reader need not know them."""
    async with site(Engine()) as s:
        await s.chat("p")
        await s.verdict("p")
        shown = (await s.ask("GET", "/v1/programs/p")).json
        assert set(shown) == set(ProgramRecord.__struct_fields__)
        assert set(shown["verdict"]) == set(Verdict.__struct_fields__) - {"evidence"}
        assert (shown["verdict"]["verdict"], shown["verdict"]["score"], shown["verdict"]["verifier"]) == (
            "pass",
            None,
            "",
        )
        assert shown["task_type"] is None and shown["n_failed_turns"] == 0
        assert (await s.ask("GET", "/v1/programs")).json["data"] == [shown]


def told(gateway: GatewayConfig, *, has_keys: bool = False, **more: Any) -> str:
    backends = [{"name": "a", "model": "m", "url": "http://127.0.0.1:1/v1"}]
    config = parse_config({"models": {"m": {}}, "backends": backends, **more})
    return "\n".join(notices(config, gateway, has_keys=has_keys))


def test_what_does_not_do_what_one_might_think_is_said() -> None:
    """Doors that stand open; silence where all is as it looks."""
    assert told(GatewayConfig()) == ""
    types = {"a": {"verifier": {"kind": "exact"}}, "b": {"verifier": {"kind": "external"}}, "c": {}}
    assert told(GatewayConfig(), task_types=types) == ""
    assert "without API keys" in told(GatewayConfig(host="0.0.0.0"))
    assert told(GatewayConfig(host="0.0.0.0"), has_keys=True) == ""


def test_the_limit_of_open_files_is_raised_as_far_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what is wanted or the hard limit, never down; where it does not suffice it is said."""
    limit = [256, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limit.__setitem__(0, pair[0]))
    assert (raise_file_limit(500), limit) == (500, [500, 1000])
    assert (raise_file_limit(400), limit) == (500, [500, 1000])
    assert (raise_file_limit(9999), limit) == (1000, [1000, 1000])
    assert "connections_max is 4096" in told(GatewayConfig())
    assert told(GatewayConfig(connections_max=1000 - OTHER_FILES)) == ""
    limit[:] = [256, resource.RLIM_INFINITY]
    assert raise_file_limit(5000) == 5000

    def refuses(which: int, pair: tuple[int, int]) -> None:
        raise OSError("no")

    limit[0] = 256
    monkeypatch.setattr(resource, "setrlimit", refuses)
    assert raise_file_limit(5000) == 256


@on_loop
async def test_an_address_that_cannot_be_had_is_said_before_anything_else() -> None:
    """No word of backends, and no question to them."""
    said: list[str] = []
    engine = await Engine().start()
    gateway = GatewayConfig(host="192.0.2.1", port=0, journal=None)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        await start(parse_config(pool(engine)), gateway, say=said.append)
    assert said == [] and engine.n_connections == 0
