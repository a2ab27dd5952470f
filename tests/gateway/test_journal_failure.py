"""A journal that cannot be written: new work is refused, what runs is finished, nothing unwritten is acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, hangs, says
from processes import serve
from sites import Site, on_loop, pool, run_on_loop, site, until

from loadwise.gateway.serve import start
from loadwise.journal.parity import replay
from loadwise.kernel.commands import Command
from loadwise.kernel.errors import JournalError, LawBroken
from loadwise.kernel.events import Event, TurnArrived
from loadwise.settings import parse_config


class FullDisk:
    """A journal writer whose disk is full from now on."""

    def __init__(self, s: Site, *, at: str) -> None:
        self.inner, self.at = s.host.journal, at
        s.host.journal = self

    @property
    def dump(self) -> Any:
        return self.inner.dump

    @dump.setter
    def dump(self, value: Any) -> None:
        self.inner.dump = value

    def append(self, event: Event, commands: list[Command]) -> int:
        if self.at == "append":
            raise JournalError("no space left", code="journal_failed")
        number: int = self.inner.append(event, commands)
        return number

    def flush(self) -> None:
        if self.at == "flush":
            raise JournalError("no space left", code="journal_failed")
        self.inner.flush()


@pytest.mark.parametrize("at", ["append", "flush"])
def test_new_work_is_refused_and_running_turns_finish(tmp_path: Path, at: str) -> None:
    """503 journal_failed for turns, verdicts and finishes; the running turn gets its answer; readiness says no."""

    @on_loop
    async def run() -> None:
        engine = Engine()
        release = asyncio.Event()

        async def waits(call: Any) -> None:
            await release.wait()
            await says()(call)

        async with site(engine, journal=tmp_path) as s:
            for program_id in ("p", "q", "judged"):
                await s.chat(program_id)
            judged = await s.verdict("judged")
            engine.script = [waits, waits]
            running = [asyncio.ensure_future(s.chat("p", stream=stream)) for stream in (False, True)]
            await until(lambda: len(engine.calls) == 5)
            FullDisk(s, at=at)
            first = await s.chat("new")
            assert (first.status, first.error["code"]) == (503, "journal_failed")
            assert "no space left" in first.error["message"] and int(first.headers["retry-after"]) >= 1
            assert len(engine.calls) == 5, "a decision that is not written down is not carried out"
            for answer in (await s.chat("q"), await s.chat("new"), await s.verdict("q"), await s.finish("q")):
                assert (answer.status, answer.error["code"]) == (503, "journal_failed")
            release.set()
            assert [a.status for a in await asyncio.gather(*running)] == [200, 200]
            assert (await s.ask("GET", "/readyz")).status == 503
            assert (await s.ask("GET", "/healthz")).status == 200
            assert "\nloadwise_journal_writable 0.0\n" in (await s.ask("GET", "/metrics")).body.decode()
            assert (await s.ask("GET", "/v1/programs/judged")).json["is_credited"] is True
            assert s.program("new") is None
            assert "no space left" in s.host.failure
            s.host.failure = None  # for the check at the end
            assert judged.status == 200
        async with site(engine, journal=tmp_path) as again:
            assert (await again.verdict("judged")).body == judged.body
            assert (await again.chat("q")).status == 200
        assert replay(tmp_path).holds

    run()


@on_loop
async def test_a_full_disk_in_real_life(tmp_path: Path) -> None:
    """The kernel refuses the write: what was acknowledged before is there after a restart, and nothing more."""
    engine = await Engine().start()
    process = await serve(pool(engine), journal=str(tmp_path), file_max_bytes=150_000)
    judged: dict[str, bytes] = {}
    refused = None
    for n in range(2000):
        answer = await process.chat(f"p{n}")
        if answer.status == 200:
            answer = await process.verdict(f"p{n}")
        if answer.status != 200:
            refused = answer
            break
        judged[f"p{n}"] = answer.body
    assert refused is not None and (refused.status, refused.error["code"]) == (503, "journal_failed")
    assert (await process.chat("later")).error["code"] == "journal_failed"
    process.terminate()
    await process.wait()
    assert not any("Traceback" in text for text in process.said), process.said
    async with site(engine, journal=tmp_path) as s:
        assert s.router.credit.n_landed == len(judged)
        for program_id in (min(judged), max(judged)):
            assert (await s.verdict(program_id)).body == judged[program_id]
    assert replay(tmp_path).holds


@on_loop
async def test_a_verdict_that_is_not_durable_is_not_acknowledged(tmp_path: Path) -> None:
    """The sync fails: 503, also when it is asked again; after a restart the verdict can be given."""
    async with site(Engine(), journal=tmp_path) as s:
        await s.chat("p")
        s.host.journal.flush()
        s.host.journal._failure = "the disk is gone"
        for _ in range(2):
            answer = await s.verdict("p")
            assert (answer.status, answer.error["code"]) == (503, "journal_failed")
        s.host.failure = None
        engine = s.engine
    async with site(engine, journal=tmp_path) as again:
        assert (await again.verdict("p")).json["credited"] is True


@on_loop
async def test_a_place_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    """The journal's directory cannot be made: said by name, before anything is served."""
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        config = {**pool(Engine()), "gateway": {"port": 0, "journal": str(place)}}
        with pytest.raises(JournalError, match="file"):
            await start(parse_config(config), environment={})


def test_a_bug_in_the_stack_stops_new_work_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Where the stack raises, its client gets a 500, new work a 503, and a restart stands where the journal ends."""
    engine = Engine()

    async def run() -> None:
        async with site(engine, journal=tmp_path) as s:
            await s.chat("p")
            engine.script = [hangs]
            gone = asyncio.ensure_future(s.chat("p"))
            await until(lambda: len(engine.calls) == 2)
            handle = s.host.stack.handle

            def broken(event: Event) -> list[Command]:
                if isinstance(event, TurnArrived):
                    raise LawBroken("L0", "made up")
                return handle(event)  # type: ignore[no-any-return]

            s.host.stack.handle = broken
            answer = await s.chat("q")
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert "made up" not in answer.error["message"]
            later = await s.chat("p")
            assert (later.status, later.error["code"]) == (503, "internal_error")
            gone.cancel()
            await until(lambda: s.counts.cancelled == 1)
            s.host.stack.handle = handle
            s.host.failure = None
        async with site(engine, journal=tmp_path) as again:
            assert (await again.chat("p")).status == 200

    heard = run_on_loop(run)
    assert len(heard) == 1 and "TurnArrived" in heard[0]["message"]
    assert replay(tmp_path).holds


def test_a_command_that_cannot_be_carried_out_costs_its_own_turn_only() -> None:
    """A bug in a relay: its client gets a 500, its reservation goes, and the next turn is served."""

    async def run() -> None:
        async with site(Engine()) as s:
            link = s.gateway.probes[0]._link
            head, link.head = link.head, None
            for stream in (False, True):
                answer = await s.chat("p", stream=stream)
                assert (answer.status, answer.error["code"]) == (500, "internal_error")
                assert s.reserved() == 0 and s.program("p") is None
            link.head = head
            assert (await s.chat("p")).status == 200

    heard = run_on_loop(run)
    assert len(heard) == 2 and all("could not be carried out" in context["message"] for context in heard)
