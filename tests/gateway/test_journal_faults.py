"""When the journal or the stack fails, nothing is acknowledged, dispatched or snapshotted that the journal lacks."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Call, Engine, says
from sites import Site, on_loop, site, until

from loadwise.journal import files
from loadwise.journal.recover import recover
from loadwise.kernel import events as e
from loadwise.kernel.errors import JournalError, LawBroken

Break = Callable[[Site], None]


def listen() -> list[Any]:
    """Hear of our own bugs instead of failing the test for them."""
    heard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
    return heard


def raises(problem: Exception) -> Callable[..., Any]:
    def raising(*_: Any, **__: Any) -> Any:
        raise problem

    return raising


def break_append(problem: Exception) -> Break:
    def break_it(s: Site) -> None:
        s.host.journal.append = raises(problem)

    return break_it


def break_write(s: Site) -> None:
    """The disk is full: what is appended cannot be handed over."""
    s.host.journal._fd, full = 987_654, s.host.journal._fd
    s.disk_fd = full  # type: ignore[attr-defined]


def break_stack(s: Site) -> None:
    """A bug of ours, after the state has been changed already."""
    known = s.host.stack.handle

    def handle(event: e.Event) -> Any:
        known(event)
        raise RuntimeError("a bug")

    s.host.stack.handle = handle


def mend(s: Site) -> None:
    """Let the gateway close."""
    s.has_failed = True
    s.host.stack.__dict__.pop("handle", None)
    if s.host.journal is not None:
        s.host.journal.__dict__.pop("append", None)
    if hasattr(s, "disk_fd"):
        s.host.journal._fd = s.disk_fd


FAULTS: dict[str, tuple[Break, int]] = {
    "the disk is full": (break_write, 503),
    "the journal refuses": (break_append(JournalError("no")), 503),
    "a law is broken": (break_append(LawBroken("L3", "time fell")), 503),
    "the journal has a bug": (break_append(TypeError("odd")), 503),
    "the stack has a bug": (break_stack, 500),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_verdict_that_is_not_in_the_journal_is_never_acknowledged(name: str, tmp_path: Path) -> None:
    """Not the first time nor when repeated, although the stack has it in memory; a restart has not heard of it."""
    break_it, status = FAULTS[name]

    @on_loop
    async def run() -> None:
        listen()
        async with site(Engine(), journal=tmp_path) as s:
            assert (await s.chat("kept")).status == (await s.verdict("kept")).status == 200
            assert (await s.chat("p")).status == 200
            break_it(s)
            assert (await s.verdict("p")).status == status
            for repeat in (await s.verdict("p"), await s.finish("p"), await s.verdict("kept"), await s.chat("q")):
                assert repeat.status in (500, 503), repeat
            assert (await s.ask("GET", "/readyz")).status == 503
            mend(s)
        async with site(Engine(), journal=tmp_path) as s:
            program, kept = s.program("p"), s.program("kept")
            assert program is not None and program.verdict is None
            assert kept is not None and kept.verdict is not None
            assert (await s.verdict("p")).json["credited"] is True

    run()


@pytest.mark.parametrize("name", FAULTS)
def test_no_snapshot_is_taken_of_what_the_journal_lacks(name: str, tmp_path: Path) -> None:
    """Whatever closes a segment after the failure: a restart stands where the journal ends."""
    break_it, _ = FAULTS[name]

    @on_loop
    async def run() -> None:
        listen()
        async with site(Engine(), journal=tmp_path) as s:
            assert (await s.chat("p")).status == 200
            break_it(s)
            await s.verdict("p")
            mend(s)
            assert s.host.journal.dump is None
            if s.host.journal.failure is None:
                s.host.journal.rotate()
        assert not files.list_snapshots(tmp_path)
        router: Any = recover(tmp_path).machine.machine_by_name["router"]  # type: ignore[attr-defined]
        assert router.table.by_id["p"].verdict is None

    run()


@on_loop
async def test_what_was_appended_before_a_bug_of_the_stack_is_kept(tmp_path: Path) -> None:
    """An event that waits for the end of the loop's turn is written all the same."""
    listen()
    async with site(Engine(), journal=tmp_path) as s:
        assert (await s.chat("p")).status == 200
        s.host.post(e.ProgramEnded(at_s=s.host.now_s(), program_id="p"))
        break_stack(s)
        s.host.post(e.ProgramEnded(at_s=s.host.now_s(), program_id="q"))
        mend(s)
        router: Any = recover(tmp_path, lock=s.host.journal._lock).machine.machine_by_name["router"]  # type: ignore[attr-defined]
        assert router.table.by_id["p"].ended_at_s is not None


@on_loop
async def test_a_held_turn_whose_decision_is_unwritten_is_never_dispatched(tmp_path: Path) -> None:
    """It was held when the journal failed; the place that comes free is not for it, and its client is told."""
    release = asyncio.Event()

    async def waits(call: Call) -> None:
        await release.wait()
        await says()(call)

    engine = Engine(waits)
    async with site(engine, journal=tmp_path, backend_0={"slots": 1}) as s:
        running = asyncio.ensure_future(s.chat("first"))
        await until(lambda: engine.calls)
        s.host.journal.append = raises(JournalError("full", code="journal_failed"))
        held = asyncio.ensure_future(s.chat("second"))
        await until(lambda: s.router.admission.n_held == 1)
        release.set()
        assert (await running).status == 200, "what runs is finished"
        assert (await s.finish("first")).status == 503
        s.host.post(e.ProgramEnded(at_s=s.host.now_s(), program_id="first"))
        answer = await held
        assert (answer.status, answer.error["code"]) == (503, "journal_failed")
        assert int(answer.headers["retry-after"]) >= 1
        assert len(engine.calls) == 1
        mend(s)


@on_loop
async def test_a_written_decision_is_still_carried_out_when_the_journal_fails(tmp_path: Path) -> None:
    """The turn of a program that the journal knows is tried again elsewhere; nothing of it would be lost."""
    engine, release = Engine(), asyncio.Event()

    async def breaks(call: Call) -> None:
        await release.wait()
        call.reset()

    engine.script = [breaks]
    async with site(engine, journal=tmp_path) as s:
        client = asyncio.ensure_future(s.chat("p"))
        await until(lambda: engine.calls)
        s.host.journal.append = raises(OSError(errno.ENOSPC, "full"))
        listen()
        s.host.post(e.ProgramEnded(at_s=s.host.now_s(), program_id="nobody"))
        assert s.host.failure is not None
        release.set()
        assert (await client).status == 200
        mend(s)


@on_loop
async def test_without_a_journal_a_bug_is_told_too() -> None:
    """Nothing is promised to be durable, but what did not happen is not acknowledged."""
    listen()
    async with site(Engine()) as s:
        assert (await s.chat("p")).status == 200
        break_stack(s)
        assert (await s.verdict("p")).status == 500
        mend(s)
