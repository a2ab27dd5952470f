"""What a live gateway has written is what happened: it replays (law L7), and after a crash a gateway goes on."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, fails, hangs, message, resets, says, sends
from processes import Process, serve
from sites import Site, on_loop, pool, site, until

from loadwise.gateway.serve import start
from loadwise.journal.files import list_segments, list_snapshots
from loadwise.journal.parity import replay
from loadwise.journal.recover import recover
from loadwise.journal.regenerate import from_begin, recorded_machine
from loadwise.kernel.errors import JournalError
from loadwise.settings import parse_config

MODELS: dict[str, Any] = {
    "small": {"usd_per_million": {"input": 0.1, "output": 0.2}},
    "large": {"usd_per_million": {"input": 1.0, "output": 5.0}},
}
LEARNING = {"policy": "linucb", "context": {"task_types": ["t", "u"]}}


def replayed_state(journal: Path) -> bytes:
    """The machine after all entries, from the first on, without any snapshot."""
    run = from_begin(journal, recorded_machine)
    for _ in run.steps():
        pass
    return run.machine.dump()


async def traffic(s: Site, rng: random.Random, n_programs: int) -> None:
    """Programs of every fate: judged, finished, streamed, failed, left by their client, nameless."""

    async def program(n: int) -> None:
        fate = rng.choice(["judged", "judged", "finished", "open", "left", "nameless"])
        for _ in range(rng.randint(1, 3)):
            asking = asyncio.ensure_future(
                s.chat(
                    None if fate == "nameless" else f"p{n}",
                    stream=rng.random() < 0.5,
                    metadata={"task_type": rng.choice("tu")},
                )
            )
            if fate == "left" and rng.random() < 0.5:
                await asyncio.sleep(0)
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if fate in ("judged", "finished"):
            await s.finish(f"p{n}")
        if fate == "judged":
            await s.verdict(f"p{n}", {"verdict": rng.choice(["pass", "fail", "abstain"]), "score": rng.random()})

    for start_at in range(0, n_programs, 8):
        await asyncio.gather(*(program(n) for n in range(start_at, min(start_at + 8, n_programs))))


def faulty(rng: random.Random) -> Engine:
    """An engine that fails now and then."""
    engine = Engine()

    async def behave(call: Any) -> None:
        await rng.choice([says(), says(), says(message("x" * 50)), fails(500), fails(400), resets, sends()])(call)

    engine.usual = behave
    return engine


@pytest.mark.parametrize("seed", range(3))
def test_a_live_journal_replays_to_the_same_commands_and_the_same_state(tmp_path: Path, seed: int) -> None:
    """Law L7 on a real run with faults, fallbacks, verdicts and clients that leave."""

    @on_loop
    async def run() -> None:
        rng = random.Random(seed)
        router = {**LEARNING, "closed_max": 5}
        async with site(
            faulty(rng), faulty(rng), faulty(rng), models=MODELS, router=router, journal=tmp_path, seed=seed
        ) as s:
            await traffic(s, rng, 60)
            await until(lambda: not s.router.turns)
            s.host.journal.flush()
            live = s.host.stack.dump()
            assert replayed_state(tmp_path) == live
        report = replay(tmp_path)
        assert report.holds, report.mismatch
        assert report.n_decisions > 20

    run()


@on_loop
async def test_a_gateway_goes_on_where_the_dead_one_stood(tmp_path: Path) -> None:
    """At an instant with turns running and held: bindings, pending decisions and the learner stand; turns are over."""
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    one, two = Engine(), Engine()
    options: dict[str, Any] = {
        "models": MODELS,
        "router": LEARNING,
        "backend_0": {"slots": 4},
        "backend_1": {"slots": 4},
    }
    async with site(one, two, journal=dead, **options) as s:
        await s.chat("judged")
        await s.verdict("judged")
        bound = {f"p{n}": (await s.chat(f"p{n}")).headers["x-loadwise-model"] for n in range(3)}
        await s.finish("p1")
        one.usual = two.usual = hangs
        waiting = [asyncio.ensure_future(s.chat(name)) for name in ("p0", "p2", *(f"q{n}" for n in range(6)))]
        await until(lambda: len(s.router.turns) == 8 and s.router.admission.n_held > 0)
        s.host.journal.flush()
        shutil.copytree(dead, alive)
        n_open = len(s.router.turns)
        learned = s.router.credit.learners[0].dump()
        async with site(one, two, journal=alive, **options) as again:
            assert again.said[-1].startswith("recovered "), again.said
            assert again.counts.cancelled == n_open and not again.router.turns
            bound |= {f"q{n}": program.model for n in range(6) if (program := again.program(f"q{n}"))}
            one.usual = two.usual = says()
            assert again.router.credit.learners[0].dump() == learned, "what was decided stands"
            assert (await again.chat("p1")).status == 409
            for name, model in bound.items():
                if name != "p1":
                    answer = await again.chat(name)
                    assert (answer.status, answer.headers["x-loadwise-model"]) == (200, model), name
                assert (await again.verdict(name)).json["credited"] is True
            assert (await again.verdict("judged")).json["credited"] is True
            assert again.router.credit.n_landed == 1 + len(bound) == 10
            assert again.reserved() == 0
        for task in waiting:
            task.cancel()
        await until(lambda: not s.router.turns)
    for journal in (dead, alive):
        report = replay(journal)
        assert report.holds, report.mismatch


async def crash(process: Process, rng: random.Random, facts: dict[str, Any], tag: str) -> None:
    """Load a gateway, kill it after a random number of answers; `facts` keeps what was acknowledged."""
    budget = rng.randint(10, 60)
    n_answers = 0

    async def agent(a: int) -> None:
        nonlocal n_answers
        for i in range(20):
            name = f"{tag}-{a}-{i}"
            try:
                for _ in range(2):
                    answer = await process.chat(name, stream=i % 2 == 0, metadata={"task_type": "t"})
                    if answer.status == 200 and (i % 2 or answer.body.endswith(b"[DONE]\n\n")):
                        facts["model"][name] = answer.headers["x-loadwise-model"]
                if i % 3 == 0:
                    judged = await process.verdict(name)
                    if judged.status == 200:
                        facts["judged"][name] = judged.body
            except (OSError, ValueError, IndexError, AssertionError):
                return  # it died meanwhile
            n_answers += 1
            if n_answers >= budget:
                process.kill()

    await asyncio.gather(*(agent(a) for a in range(6)))
    process.kill()
    await process.wait()


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_instant_nothing_acknowledged_is_lost(tmp_path: Path, seed: int) -> None:
    """kill -9 under load, three times over one journal: bindings and verdicts stand, and the whole journal replays."""

    @on_loop
    async def run() -> None:
        rng = random.Random(seed)
        engines = [await Engine().start(), await Engine().start()]
        config = pool(*engines, models=MODELS, router=LEARNING)
        facts: dict[str, Any] = {"model": {}, "judged": {}}
        for round_ in range(3):
            process = await serve(config, journal=str(tmp_path))
            await crash(process, rng, facts, f"r{round_}")
        process = await serve(config, journal=str(tmp_path))
        assert any(text.startswith("recovered ") for text in process.said)
        for name, body in facts["judged"].items():
            assert (await process.verdict(name)).body == body, name
            assert (await process.chat(name)).status == 409
        unjudged = [name for name in facts["model"] if name not in facts["judged"]]
        assert unjudged and facts["judged"]
        for name in unjudged:
            answer = await process.chat(name)
            if answer.status == 409:  # its verdict was written, but the answer did not come through
                continue
            assert (answer.status, answer.headers["x-loadwise-model"]) == (200, facts["model"][name]), name
            assert (await process.verdict(name)).json["credited"] is True
        shown = (await process.ask("GET", "/v1/programs?limit=1000")).json["data"]
        assert sum(p["is_credited"] for p in shown) >= len(facts["model"])
        process.terminate()
        assert await process.wait() == 0
        report = replay(tmp_path)
        assert report.holds, report.mismatch
        assert recover(tmp_path).machine.dump() == replayed_state(tmp_path)

    run()


@on_loop
async def test_a_verdict_is_on_disk_when_it_is_acknowledged(tmp_path: Path) -> None:
    """kill -9 right after the 200: the restarted gateway has credited it and says the same."""
    engine = await Engine().start()
    process = await serve(pool(engine), journal=str(tmp_path))
    await process.chat("p")
    judged = await process.verdict("p")
    process.kill()
    await process.wait()
    assert judged.json["credited"] is True
    async with site(engine, journal=tmp_path) as s:
        assert s.router.credit.n_landed == 1
        assert (await s.verdict("p")).body == judged.body
        assert (await s.verdict("p", {"verdict": "fail"})).status == 409


@on_loop
async def test_a_torn_tail_is_cut_off_and_said(tmp_path: Path) -> None:
    """A crash in the middle of a write: the tail goes, with a message on stderr; all before it stands."""
    engine = await Engine().start()
    async with site(engine, journal=tmp_path) as s:
        await s.chat("p")
    segment = list_segments(tmp_path)[-1].path
    whole = segment.read_bytes()
    for n_lost in (1, 7, 40):
        segment.write_bytes(whole[:-n_lost])
        process = await serve(pool(engine), journal=str(tmp_path))
        assert any("cut off" in text for text in process.said), process.said
        assert (await process.chat("p")).status == 200
        process.kill()
        await process.wait()
        assert replay(tmp_path).holds


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "policy options": {"router": {**LEARNING, "policy": {"name": "linucb", "alpha": 1.5}}},
    "another policy": {"router": {**LEARNING, "policy": "lints"}},
    "a baseline": {"router": {"policy": "random"}},
    "context": {"router": {**LEARNING, "context": {"task_types": ["t", "u", "v"]}}},
    "prices": {"models": {"small": {}, "large": {"usd_per_million": {"input": 9.0}}}},
    "limits": {"router": {**LEARNING, "hold_max_s": 1.0, "idle_s": 10.0, "closed_max": 1}},
    "one learner a slot": {"router": {**LEARNING, "feedback": {"arm": "per_slot", "size": 4}}},
    "one after the other": {"router": {**LEARNING, "feedback": {"arm": "sequential"}}},
    "a new model": {"models": {**MODELS, "huge": {}}, "backend_2": {"model": "huge"}},
    "a backend less": {"n_engines": 2},
    "a model less": {"models": {"large": {}}, "backend_0": {"name": "b"}, "n_engines": 1},
    "a backend serves another model": {"backend_0": {"model": "large"}, "backend_1": {"model": "small"}},
    "another unit": {
        "backend_0": {"kv_tokens": 100_000},
        "backend_1": {"slots": 7},
        "backend_2": {"requests_per_minute": 90},
    },
    "a smaller capacity": {"backend_0": {"slots": 1}},
    "another seed": {"seed": 99},
}


@pytest.mark.parametrize("was", ["as usual", "one learner a slot", "one after the other", "another unit"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_configuration_starts_and_keeps_what_fits(tmp_path: Path, name: str, was: str) -> None:
    """Programs keep their models where these still exist, verdicts credit, and the journal of both replays."""

    @on_loop
    async def run() -> None:
        dead, alive = tmp_path / "dead", tmp_path / "alive"
        engines = [Engine(), Engine(), Engine()]
        base: dict[str, Any] = {"models": MODELS, "router": LEARNING}
        before = {**base, **CHANGES.get(was, {})}
        async with site(*engines, journal=dead, **before) as s:
            judged = await s.chat("judged")
            await s.verdict("judged")
            bound = {}
            if was != "one after the other":
                bound = {f"p{n}": (await s.chat(f"p{n}")).headers["x-loadwise-model"] for n in range(3)}
            bound["pinned"] = (await s.chat("pinned", model="small")).headers["x-loadwise-model"]
            for engine in engines:
                engine.usual = hangs
            open_turns = [asyncio.ensure_future(s.chat(f"q{n}")) for n in range(4)]
            await until(lambda: len(s.router.turns) == 4)
            s.host.journal.flush()
            shutil.copytree(dead, alive)
            for task in open_turns:
                task.cancel()
            await until(lambda: not s.router.turns)
        for engine in engines:
            engine.usual = says()
        after = {**base, **CHANGES[name]}
        n_engines = after.pop("n_engines", 3)
        async with site(*engines[:n_engines], journal=alive, **after) as again:
            again.check()
            models = {
                b["model"]
                for b in pool(*engines[:n_engines], **{k: v for k, v in after.items() if k != "seed"})["backends"]
            }
            assert {m["id"] for m in (await again.ask("GET", "/v1/models")).json["data"]} == {"auto", *models}
            bound |= {f"q{n}": program.model for n in range(4) if (program := again.program(f"q{n}"))}
            for program_id, model in bound.items():
                answer = await again.chat(program_id)
                if model in models:
                    assert (answer.status, answer.headers["x-loadwise-model"]) == (200, model)
                    backend = answer.headers["x-loadwise-backend"]
                    assert again.router.backends.by_id[backend].spec.model == model
                else:
                    assert (answer.status, answer.error["code"]) == (409, "model_removed")
                program = again.program(program_id)
                if program is not None and program.n_turns:
                    assert (await again.verdict(program_id)).json["credited"] is True
                elif program is not None:
                    assert (await again.finish(program_id)).json["state"] == "cancelled"
            assert (await again.verdict("judged")).json["decision"] == int(judged.headers["x-loadwise-decision"])
            for n in range(6):
                answer = await again.chat(f"new{n}")
                assert answer.status == 200 and answer.headers["x-loadwise-model"] in models
                assert (await again.verdict(f"new{n}")).json["credited"] is True
            assert again.reserved() == 0
        report = replay(alive)
        assert report.holds, report.mismatch
        async with site(*engines[:n_engines], journal=alive, **after) as once_more:
            assert (await once_more.chat("last")).status == 200

    run()


@on_loop
async def test_two_gateways_do_not_share_a_journal(tmp_path: Path) -> None:
    """The second says that another writes it, and the first goes on."""
    async with site(Engine(), journal=tmp_path) as s:
        config = parse_config({**pool(s.engine), "gateway": {"port": 0, "journal": str(tmp_path)}})
        with pytest.raises(JournalError, match="one writer"):
            await start(config, environment={})
        assert (await s.chat("p")).status == 200


@on_loop
async def test_a_damaged_journal_is_not_written_on(tmp_path: Path) -> None:
    """Damage that is no torn tail is an error that names the place, and nothing is changed."""
    async with site(Engine(), journal=tmp_path) as s:
        for n in range(5):
            await s.chat(f"p{n}")
        engine = s.engine
    for snapshot in list_snapshots(tmp_path):
        snapshot.path.unlink()  # else what stands before it is not read at all
    segment = list_segments(tmp_path)[0].path
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    segment.write_bytes(raw)
    with pytest.raises(JournalError, match=segment.name):
        await start(parse_config({**pool(engine), "gateway": {"port": 0, "journal": str(tmp_path)}}), environment={})
    assert segment.read_bytes() == raw
