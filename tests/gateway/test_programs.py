"""Programs over HTTP: one binding, finish, verdict; each answer the same however often it is asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engines import Call, Engine, fails, hangs, says
from sites import on_loop, site, until

from loadwise.gateway import turns
from loadwise.kernel.commands import ProgramRecord
from loadwise.runner.embed import Reading

LARGE = 10**400


@on_loop
async def test_two_first_turns_at_once_are_one_program() -> None:
    """Both go to the model of one decision."""
    engines = [Engine(), Engine(), Engine()]
    models: dict[str, Any] = {"x": {}, "y": {}, "z": {}}
    async with site(*engines, models=models, router={"policy": "random"}) as s:
        for n in range(10):
            answers = await asyncio.gather(*(s.chat(f"p{n}") for _ in range(4)))
            assert {a.status for a in answers} == {200}
            assert len({a.headers["x-loadwise-model"] for a in answers}) == 1
            assert len({a.headers["x-loadwise-decision"] for a in answers}) == 1
        assert s.router.routing.n_decisions == 10


class SlowEmbedder:
    """Gives the components when it is told to."""

    version = "slow-1"

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def read_now(self, text: str) -> Reading | None:
        return Reading((1.0,)) if text == "known" else None

    def submit(self, text: str, callback: Any) -> None:
        self.waiting.append(callback)


@on_loop
async def test_first_turns_wait_for_one_embedding_each_and_bind_once() -> None:
    """While the embedding is computed the program is not known yet; it is bound once all the same."""
    embedder = SlowEmbedder()
    async with site(Engine(), Engine(), models={"x": {}, "y": {}}, embedder=embedder) as s:
        asked = [asyncio.ensure_future(s.chat("p", "new")) for _ in range(3)]
        await until(lambda: len(embedder.waiting) == 3)
        assert not s.host.relay_by_turn and s.counts.arrived == 0
        gone = asyncio.ensure_future(s.chat("q", "new"))
        await until(lambda: len(embedder.waiting) == 4)
        gone.cancel()
        assert (await s.chat("r", "known")).status == 200
        await until(lambda: s.gateway.server.statistics().exchanges_open == 3)
        for callback in embedder.waiting:
            callback(Reading((0.5, 0.5)))
        answers = await asyncio.gather(*asked)
        assert {a.headers["x-loadwise-decision"] for a in answers} == {"2"}
        assert s.program("q") is None and s.counts.arrived == 4


@on_loop
async def test_a_first_turn_does_not_wait_for_ever_for_its_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedder that never answers costs a moment, not the turn; its late answer changes nothing."""
    monkeypatch.setattr(turns, "EMBEDDING_MAX_S", 0.01)
    embedder = SlowEmbedder()
    async with site(Engine(), embedder=embedder) as s:
        assert (await s.chat("p", "new")).status == 200
        embedder.waiting[0](Reading((1.0,)))
        assert (await s.chat("p")).status == 200
        assert s.counts.arrived == 2


@on_loop
async def test_turn_numbers_are_used_up_only_by_turns_that_arrive(tmp_path: Path) -> None:
    """A restart counts on from the turns in the journal; a number that was given and not used would come twice."""
    embedder = SlowEmbedder()
    async with site(Engine(), embedder=embedder, journal=tmp_path) as s:
        gone = asyncio.ensure_future(s.chat("q", "new"))
        await until(lambda: embedder.waiting)
        gone.cancel()
        await s.chat("p", "known")
        assert s.host.next_turn_id() == s.counts.arrived + 1


@on_loop
async def test_a_turn_after_finish_is_a_409_for_ever(tmp_path: Path) -> None:
    """In memory, after the program has left memory, and after a restart."""
    router = {"closed_max": 1}
    engine = Engine()
    async with site(engine, journal=tmp_path, router=router) as s:
        for n in range(4):
            await s.chat(f"p{n}")
            assert (await s.finish(f"p{n}")).status == 200
            if n < 3:
                assert (await s.verdict(f"p{n}")).json["credited"] is True
        assert s.program("p0") is None, "it has left memory"
        for n in range(4):
            answer = await s.chat(f"p{n}")
            assert (answer.status, answer.error["code"]) == (409, "program_finished"), n
    async with site(engine, journal=tmp_path, router=router) as s:
        for n in range(4):
            assert (await s.chat(f"p{n}")).status == 409
            assert (await s.finish(f"p{n}")).json["end_reason"] == "finish"
            assert (await s.verdict(f"p{n}")).json["credited"] is True
        assert s.router.credit.n_landed == 4


@on_loop
async def test_finish_twice_is_the_same_answer(tmp_path: Path) -> None:
    """The second finish changes nothing and says the same, with or without artefacts."""
    async with site(Engine(), journal=tmp_path) as s:
        await s.chat("p")
        first = await s.finish("p", {"artefacts": {"patch": "diff"}})
        assert (first.status, first.json) == (200, {"program": "p", "state": "verifying", "end_reason": "finish"})
        assert (await s.finish("p")).body == first.body
        assert s.reserved() == 0
        missing = await s.finish("nobody")
        assert (missing.status, missing.error["code"]) == (404, "program_not_found")


@on_loop
async def test_finish_refuses_artefacts_that_are_none() -> None:
    """The body is optional; where there is one it must be an object with texts."""
    async with site(Engine()) as s:
        await s.chat("p")
        wrong = [b"{", b"[]", b'"x"', {"artefacts": []}, {"artefacts": {"a": 1}}, b'{"artefacts":{"a":"\\ud800"}}']
        for body in [*wrong, {"artefacts": {str(n): "" for n in range(65)}}]:
            assert (await s.finish("p", body)).status == 400, body
        for body in (b"", b" ", b"{}", {"artefacts": None}, {"more": 1}):
            assert (await s.finish("p", body)).status == 200, body


@on_loop
async def test_finish_ends_the_turns_that_run() -> None:
    """A turn that is open when its program is finished ends with 409, and its engine is let go."""
    engine = Engine()
    async with site(engine) as s:
        await s.chat("p")
        engine.script = [hangs]
        running = asyncio.ensure_future(s.chat("p"))
        await until(lambda: len(engine.calls) == 2)
        assert (await s.finish("p")).status == 200
        answer = await running
        assert (answer.status, answer.error["code"]) == (409, "program_finished")
        await engine.calls[1].gone.wait()


@on_loop
async def test_finish_of_a_program_without_an_answer_says_cancelled() -> None:
    """Nothing of it is kept: its turn ends, its reservation goes."""
    engine = Engine(hangs)
    async with site(engine) as s:
        running = asyncio.ensure_future(s.chat("p"))
        await until(lambda: engine.calls)
        assert (await s.finish("p")).json == {"program": "p", "state": "cancelled", "end_reason": "finish"}
        assert (await running).status == 409
        assert s.reserved() == 0


@on_loop
async def test_a_verdict_is_credited_once_and_answered_the_same() -> None:
    """The same verdict again is the same answer; another one is a conflict."""
    async with site(Engine()) as s:
        await s.chat("p")
        await s.finish("p")
        body = {"verdict": "pass", "score": 1, "verifier": "tests", "version": "2", "id": "v1"}
        first = await s.verdict("p", body)
        assert (first.status, first.json) == (200, {"program": "p", "credited": True, "decision": 1})
        again = await asyncio.gather(*(s.verdict("p", body) for _ in range(5)))
        assert {(a.status, a.body) for a in again} == {(200, first.body)}
        assert s.router.credit.n_landed == 1
        for other in ({**body, "verdict": "fail"}, {**body, "score": 0.5}, {"verdict": "abstain"}):
            answer = await s.verdict("p", other)
            assert (answer.status, answer.error["code"]) == (409, "verdict_conflict")
        assert s.router.credit.n_landed == 1


@on_loop
async def test_many_at_once_are_one_credit(tmp_path: Path) -> None:
    """The same verdict, finish and turns in parallel: one end, one credit, one answer."""
    async with site(Engine(), journal=tmp_path) as s:
        await s.chat("p")
        answers = await asyncio.gather(*(s.verdict("p") for _ in range(8)), *(s.finish("p") for _ in range(8)))
        assert {a.status for a in answers} == {200}
        assert len({a.body for a in answers[:8]}) == 1
        assert s.router.credit.n_landed == 1 and s.counts.verdicts_stale == 0


UNREADABLE = [b"", b"{", b"[]", b'"pass"', b"7", b"null", b"pass", b"\xff\xfe", b"[" * 100_000, b'{"verdict":pass}']
OUT_OF_RANGE: list[Any] = [
    {},
    {"verdict": None},
    {"verdict": "PASS"},
    {"verdict": "maybe"},
    {"verdict": ""},
    {"verdict": True},
    {"verdict": 1},
    {"verdict": ["pass"]},
    {"verdict": {"pass": 1}},
    {"verdict": "x" * 100_000},
    {"verdict": "pass", "score": -0.001},
    {"verdict": "pass", "score": 1.0001},
    {"verdict": "pass", "score": 2},
    {"verdict": "pass", "score": "1"},
    {"verdict": "pass", "score": True},
    {"verdict": "pass", "score": [1]},
    {"verdict": "pass", "score": {}},
    b'{"verdict":"pass","score":NaN}',
    b'{"verdict":"pass","score":Infinity}',
    b'{"verdict":"pass","score":-Infinity}',
    b'{"verdict":"pass","score":1e400}',
    b'{"verdict":"pass","score":%d}' % LARGE,
    b'{"verdict":"pass","score":-%d}' % LARGE,
    b'{"verdict":"\\ud800"}',
    {"verdict": "pass", "verifier": 3},
    {"verdict": "pass", "version": []},
    {"verdict": "pass", "id": "x" * 257},
    b'{"verdict":"pass","verifier":"\\ud800"}',
    b'{"verdict":"pass","id":"\\udc00"}',
]


@on_loop
async def test_a_verdict_that_is_none_is_refused(tmp_path: Path) -> None:
    """Not an object: 400. A value out of range or of the wrong type: 422. Nothing is credited, nothing is lost."""
    async with site(Engine(), journal=tmp_path) as s:
        await s.chat("p")
        for body in UNREADABLE:
            answer = await s.verdict("p", body)
            assert (answer.status, answer.error["code"]) == (400, "invalid_json"), body[:40]
        for body in OUT_OF_RANGE:
            answer = await s.verdict("p", body)
            assert (answer.status, answer.error["code"]) == (422, "out_of_range"), body
            assert answer.error["param"] in ("verdict", "score", "verifier", "version", "id")
            assert len(answer.body) < 1000
        assert s.router.credit.n_landed == 0
        program = s.program("p")
        assert program is not None and program.is_open
        for score in (0, 1, 0.0, 1.0, 5e-324, -0.0, None):
            await s.chat(f"s{score}")
            assert (await s.verdict(f"s{score}", {"verdict": "fail", "score": score})).json["credited"] is True
        json.loads((await s.ask("GET", "/v1/programs/p")).body)


@on_loop
async def test_a_verdict_for_nobody_is_a_404() -> None:
    """Never seen, or never answered and therefore forgotten."""
    async with site(Engine(fails(400))) as s:
        assert (await s.chat("failed")).status == 400
        for program_id in ("nobody", "failed"):
            answer = await s.verdict(program_id)
            assert (answer.status, answer.error["code"]) == (404, "program_not_found")


@on_loop
async def test_a_verdict_ends_an_open_program() -> None:
    """Without a finish the verdict ends the program, also while a turn runs; without any answer it is too early."""
    engine = Engine()
    async with site(engine) as s:
        await s.chat("p")
        engine.script = [hangs, hangs]
        running = asyncio.ensure_future(s.chat("p"))
        early = asyncio.ensure_future(s.chat("q"))
        await until(lambda: len(engine.calls) == 3)
        answer = await s.verdict("q")
        assert (answer.status, answer.error["code"]) == (409, "program_unanswered")
        assert (await s.verdict("p")).json["credited"] is True
        assert (await running).status == 409
        assert (await s.chat("p")).status == 409
        early.cancel()
        await until(lambda: s.counts.cancelled == 2)


@on_loop
async def test_a_verdict_after_censoring_is_kept_and_not_credited() -> None:
    """Too late to learn from: the answer says so, and says so again."""
    async with site(Engine(), router={"verdict_max_s": 0.05}) as s:
        await s.chat("p")
        await s.finish("p")
        await until(lambda: s.counts.censored == 1)
        for _ in range(2):
            assert (await s.verdict("p")).json == {"program": "p", "credited": False, "decision": 1}
        assert s.counts.verdicts_late == 1
        assert (await s.verdict("p", {"verdict": "fail"})).status == 409
        assert (await s.finish("p")).json["end_reason"] == "finish"


@on_loop
async def test_an_abstaining_verifier_teaches_nothing() -> None:
    """Abstaining is an answer: the program is closed, nothing is credited."""
    async with site(Engine()) as s:
        await s.chat("p")
        assert (await s.verdict("p", {"verdict": "abstain"})).json["credited"] is False
        assert s.program("p").state == "closed"  # type: ignore[union-attr]


@on_loop
async def test_the_final_header_ends_the_program() -> None:
    """With X-Loadwise-Final the turn is the last one, streamed or not."""
    async with site(Engine()) as s:
        for program_id, stream in (("p", False), ("q", True)):
            answer = await s.chat(program_id, headers={"X-Loadwise-Final": "1"}, stream=stream)
            assert answer.status == 200
            await until(lambda program_id=program_id: s.program(program_id).end_reason == "final")
            assert (await s.chat(program_id)).status == 409
        assert (await s.chat("r", headers={"X-Loadwise-Final": "0"})).status == 200
        assert (await s.chat("r")).status == 200


@on_loop
async def test_programs_can_be_listed_and_shown(tmp_path: Path) -> None:
    """The latest first, those that have left memory included; wrong queries say what is allowed."""
    async with site(Engine(), journal=tmp_path, router={"closed_max": 1}) as s:
        for n in range(4):
            await s.chat(f"p{n}", metadata={"task_type": "t", "domain": "d"})
            await s.verdict(f"p{n}")
        await s.chat("open")
        found = (await s.ask("GET", "/v1/programs")).json["data"]
        assert [p["program_id"] for p in found] == ["open", "p3", "p2", "p1", "p0"]
        assert all(set(p) == set(ProgramRecord.__struct_fields__) for p in found), "every field is there"
        assert [(p["is_credited"], (p["verdict"] or {}).get("score", 7)) for p in found[:2]] == [
            (False, 7),
            (True, None),
        ]
        assert {p["task_type"] for p in found[1:]} == {"t"}
        assert [p["program_id"] for p in (await s.ask("GET", "/v1/programs?limit=2")).json["data"]] == ["open", "p3"]
        closed = (await s.ask("GET", "/v1/programs?state=closed&limit=1000")).json["data"]
        assert len(closed) == 4
        assert (await s.ask("GET", "/v1/programs/p0")).json["state"] == "closed"
        for query in (
            "limit=0",
            "limit=1001",
            "limit=x",
            "limit=-1",
            "limit=%C2%B2",
            "state=odd",
            "limit=" + "1" * 5000,
        ):
            assert (await s.ask("GET", f"/v1/programs?{query}")).status == 400, query
        assert (await s.ask("GET", "/v1/programs/nobody")).status == 404


@on_loop
async def test_usage_that_is_nonsense_is_passed_on_and_not_counted() -> None:
    """Whatever an engine says of its usage, the client gets the answer and the estimate stands."""
    odd: list[Any] = [
        None,
        "many",
        [1],
        7,
        {},
        {"prompt_tokens": "1"},
        {"prompt_tokens": None, "completion_tokens": 3},
        {"prompt_tokens": True},
        {"prompt_tokens": -5, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": -2}},
        {"prompt_tokens": 10**30, "completion_tokens": 10**30, "prompt_tokens_details": 3},
        {"prompt_tokens": 1e300, "completion_tokens": 2.5},
    ]
    async with site(Engine()) as s:
        for n, usage in enumerate(odd):
            s.engine.script = [says(usage=usage)]
            answer = await s.chat(f"p{n}")
            assert (answer.status, answer.json.get("usage")) == (200, usage), usage
            program = s.program(f"p{n}")
            assert program is not None and 0 <= program.prompt_tokens <= 2**40

        async def raw(call: Call) -> None:
            await call.respond(b'{"choices":[],"usage":{"prompt_tokens":1e400,"completion_tokens":1}}')

        s.engine.script = [raw]
        assert (await s.chat("raw")).status == 200
