"""Engines that fail in every way: what the client hears, what is tried again, what is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engines import (
    DONE,
    USAGE_CHUNK,
    Behaviour,
    Call,
    Engine,
    chunk,
    closes,
    completion,
    fails,
    hangs,
    message,
    resets,
    says,
    sends,
    writes,
)
from sites import Answer, Site, on_loop, pool, site, until

TEXT = chunk({"content": "abc"})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.respond(body)

    return behave


BEFORE_THE_FIRST_BYTE: dict[str, tuple[Behaviour, int, str]] = {
    "resets": (resets, 502, "upstream_broken"),
    "closes": (closes, 502, "upstream_broken"),
    "hangs": (hangs, 504, "upstream_timeout"),
    "head only": (writes(HEAD + b"content-length: 9\r\n\r\n"), 504, "upstream_timeout"),
    "half a body": (writes(HEAD + b'content-length: 99\r\n\r\n{"choi'), 504, "upstream_timeout"),
    "cut body": (writes(HEAD + b'content-length: 99\r\n\r\n{"choi', then="close"), 502, "upstream_broken"),
    "reset body": (writes(HEAD + b'content-length: 99\r\n\r\n{"choi', then="reset"), 502, "upstream_broken"),
    "not http": (writes(b"hello, I am no engine\r\n\r\n"), 502, "upstream_broken"),
    "http/2": (writes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 502, "upstream_broken"),
    "endless head": (writes(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000), 502, "upstream_broken"),
    "upgrade": (writes(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), 502, "upstream_broken"),
    "no json": (whole(b"<html>oops</html>"), 502, "upstream_broken"),
    "cut json": (whole(b'{"choices": [{"message": {"content": "a'), 502, "upstream_broken"),
    "empty": (whole(b""), 502, "upstream_broken"),
    "a list": (whole(b"[]"), 502, "upstream_broken"),
    "null": (whole(b"null"), 502, "upstream_broken"),
    "deep": (whole(b"[" * 200_000 + b"]" * 200_000), 502, "upstream_broken"),
    "not utf-8": (whole(b'{"choices": \xff}'), 502, "upstream_broken"),
    "redirect": (
        writes(b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", then="end"),
        502,
        "upstream_broken",
    ),
    "no content": (writes(b"HTTP/1.1 204 No\r\n\r\n", then="end"), 502, "upstream_broken"),
    "empty stream": (sends(), 502, "upstream_broken"),
    "stream of half an event": (sends(b'data: {"cho'), 502, "upstream_broken"),
    "stream cut in its first event": (sends(b'data: {"cho', then="close"), 502, "upstream_broken"),
    "stream that hangs": (sends(then="hang"), 504, "upstream_timeout"),
    "stream without chunks": (writes(STREAM + b"zz\r\n"), 502, "upstream_broken"),
    "status 500": (fails(500), 500, "c"),
    "status 503": (fails(503), 503, "c"),
    "status 429": (fails(429), 429, "c"),
    "status 400": (fails(400), 400, "c"),
    "status 401": (fails(401), 401, "c"),
    "status 404": (fails(404), 404, "c"),
    "status 413": (fails(413), 413, "c"),
    "status 422": (fails(422), 422, "c"),
    "status 418": (fails(418), 418, "c"),
    "status 599": (fails(599), 599, "c"),
}
SHORT = {"first_byte_s": 0.15, "idle_s": 0.15}
"""Only for engines that are to be given up: another that is slow to answer is no fault."""
RETRIED = {"resets", "hangs", "cut json", "empty stream", "stream cut in its first event", "status 500", "status 503"}


async def ask(s: Site, program_id: str, stream: bool) -> Answer:
    return await s.chat(program_id, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_BYTE)
def test_a_fault_before_the_first_byte_has_its_status(name: str, stream: bool) -> None:
    """The right status, an OpenAI-shaped body, nothing reserved, the program forgotten, the next turn served."""
    behaviour, status, code = BEFORE_THE_FIRST_BYTE[name]

    @on_loop
    async def run() -> None:
        engine = Engine(behaviour)
        async with site(engine, router={"attempts_max": 1}) as s:
            s.wait_for_engine(**(SHORT if code == "upstream_timeout" else {}))
            answer = await ask(s, "p", stream)
            assert (answer.status, answer.error["code"]) == (status, code), answer.body
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-loadwise-program"] == "p"
            assert s.reserved() == 0 and s.program("p") is None and not s.router.credit.pending_by_decision
            engine.usual = says()
            s.wait_for_engine()
            await until(lambda: s.router.backends.usable("m", s.host.now_s()))
            assert (await ask(s, "p", stream)).status == 200

    run()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", sorted(RETRIED))
def test_another_replica_takes_over_before_the_first_byte(name: str, stream: bool) -> None:
    """The client sees the other replica's answer and nothing of the fault; both attempts are known to the router."""
    behaviour = BEFORE_THE_FIRST_BYTE[name][0]

    @on_loop
    async def run() -> None:
        bad, good = Engine(behaviour), Engine()
        async with site(bad, good) as s:
            s.wait_for_engine(**(SHORT if name == "hangs" else {}))
            answers = [await ask(s, f"p{n}", stream) for n in range(2)]
            assert [a.status for a in answers] == [200, 200]
            assert {a.headers["x-loadwise-backend"] for a in answers} == {"b"}
            assert len(bad.calls) + len(good.calls) > 2
            assert s.counts.completed == 2 and s.counts.failed == 0

    run()


AFTER_THE_FIRST_BYTE: dict[str, Behaviour] = {
    "ends without its mark": sends(TEXT),
    "closes": sends(TEXT, then="close"),
    "resets": sends(TEXT, then="reset"),
    "hangs": sends(TEXT, then="hang"),
    "half an event": sends(TEXT, b'data: {"choices":[{"delta":{"content":"lost', then="close"),
    "half an event, properly ended": sends(TEXT, b'data: {"choices":[{"delta":{"content":"lost'),
    "malformed chunks": writes(STREAM + b"%x\r\n%b\r\nzz\r\n" % (len(TEXT), TEXT)),
    "text that looks like the end": sends(TEXT, chunk({"content": "[DONE]"}), then="close"),
    "text that looks like a whole end": sends(TEXT, chunk({"content": "\ndata: [DONE]\n\n"}), then="close"),
    "no chunks, cut": writes(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TEXT, then="close"),
}


@pytest.mark.parametrize("name", AFTER_THE_FIRST_BYTE)
def test_a_fault_after_the_first_byte_is_told_in_band(name: str) -> None:
    """The stream ends well formed, with an error as its last event and no [DONE]; no other engine is asked."""

    @on_loop
    async def run() -> None:
        bad, other = Engine(AFTER_THE_FIRST_BYTE[name]), Engine()
        async with site(bad, other) as s:
            if name == "hangs":
                s.wait_for_engine(idle_s=SHORT["idle_s"])
            answer = await s.chat("p", stream=True)
            assert answer.status == 200
            *_, last, rest = answer.body.split(b"\n\n")
            assert rest == b"" and answer.body.startswith(TEXT) and b"lost" not in answer.body
            assert b"\ndata: [DONE]" not in answer.body
            told = Answer(200, {}, last.removeprefix(b"data: ")).error
            assert (told["type"], told["code"]) == ("server_error", "upstream_broken")
            assert not other.calls and s.counts.failed == 1 and s.reserved() == 0

    run()


ENDS: dict[str, Behaviour] = {
    "as usual": sends(TEXT, USAGE_CHUNK, DONE),
    "all in one piece": sends(TEXT + USAGE_CHUNK + DONE),
    "byte by byte": sends(*[bytes([b]) for b in TEXT + USAGE_CHUNK + DONE]),
    "without the blank line": sends(TEXT, USAGE_CHUNK, b"data: [DONE]\n"),
    "without any line end": sends(TEXT, USAGE_CHUNK, b"data: [DONE]"),
    "without a space": sends(TEXT, USAGE_CHUNK, b"data:[DONE]\n\n"),
    "carriage returns": sends((TEXT + USAGE_CHUNK + DONE).replace(b"\n", b"\r\n")),
    "hangs after the mark": sends(TEXT, USAGE_CHUNK, DONE, then="hang"),
    "resets after the mark": sends(TEXT, USAGE_CHUNK, DONE, then="reset"),
    "closes after the mark": sends(TEXT, USAGE_CHUNK, DONE, then="close"),
    "goes on after the mark": sends(TEXT, USAGE_CHUNK, DONE, TEXT, TEXT, then="hang"),
    "comments and other fields": sends(b": hi\n\n", b"event: x\nid: 1\n" + TEXT, b"event: y\n" + USAGE_CHUNK, DONE),
    "no chunks": writes(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TEXT + USAGE_CHUNK + DONE, then="close"
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_way_to_end_a_stream_is_an_end(name: str) -> None:
    """The answer is whole, its usage is read and hidden, the reservation follows; the next turn works."""

    @on_loop
    async def run() -> None:
        engine = Engine(ENDS[name])
        async with site(engine) as s:
            for n in range(3):
                answer = await s.chat("p", stream=True)
                assert answer.body.count(b"abc") == 1 and b"usage" not in answer.body
                assert answer.body.replace(b"\r", b"").replace(b"data:[", b"data: [").endswith(b"data: [DONE]\n\n")
                program = s.program("p")
                assert program is not None and (program.n_turns, program.prompt_tokens) == (n + 1, 11 * (n + 1))
            assert s.counts.completed == 3 and s.counts.failed == s.counts.cancelled == 0

    run()


@on_loop
async def test_usage_may_have_any_shape_that_hides_in_a_stream() -> None:
    """Usage in the last choice stays with it; a usage chunk that only we asked for goes, also where unreadable."""
    with_choice = chunk({}, reason="stop", usage={"prompt_tokens": 5, "completion_tokens": 2})
    odd = b'data: {"choices":[],"usage":{"prompt_tokens":3,"x":1e400}}\n\n'
    spread = b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":4}}\n\n'
    looks = chunk({"content": '{"usage": {"prompt_tokens": 1}}'})
    async with site(Engine()) as s:
        for n, (pieces, seen, tokens) in enumerate(
            [
                ((with_choice, DONE), with_choice, 5),
                ((TEXT, odd, DONE), TEXT, 3),
                ((TEXT, spread, DONE), TEXT, 4),
                ((looks, USAGE_CHUNK, DONE), looks, 11),
                ((USAGE_CHUNK, DONE), b"", 11),
                ((chunk(None, usage={}), DONE), b"", None),
                ((chunk(None, usage=None), TEXT, DONE), chunk(None, usage=None) + TEXT, None),
            ]
        ):
            s.engine.script = [sends(*pieces)]
            answer = await s.chat(f"p{n}", stream=True)
            assert answer.body == seen + DONE, pieces
            program = s.program(f"p{n}")
            assert program is not None and (tokens is None or program.prompt_tokens == tokens)


@on_loop
async def test_an_event_larger_than_we_hold_passes_and_a_break_in_it_is_still_told() -> None:
    """Beyond the bound an event goes through in parts; then the error starts on a line of its own."""
    part = b'data: {"x":"' + b"y" * (5 << 20)
    async with site(Engine(sends(part, then="close"))) as s:
        answer = await s.chat("p", stream=True)
        assert answer.body.startswith(part) and b'\n\ndata: {"error":' in answer.body


def retry_header(value: str) -> Behaviour:
    return fails(503, headers=f"retry-after: {value}\r\n")


@on_loop
async def test_an_engine_that_asks_for_patience_is_heard() -> None:
    """Retry-After comes through as whole seconds, whatever the engine wrote, and never more than a day."""
    async with site(Engine()) as s:
        for n, (value, seen) in enumerate(
            [("0", "1"), ("0.001", "1"), ("nan", None), ("inf", None), ("-1", "1"), ("1e308", "86400"), ("Fri", None)]
        ):
            s.engine.script = [retry_header(value)] * 3
            s.router.backends.by_id["a"].quiet_until_s = 0.0
            answer = await s.chat(f"p{n}")
            assert answer.status == 503 and answer.headers.get("retry-after") == seen, value


ERRORS: list[tuple[Any, Callable[[dict[str, Any]], bool]]] = [
    (b"<h1>Bad gateway</h1>", lambda e: "Bad gateway" in e["message"]),
    (b"\xff\xfe\x00", lambda e: bool(e["message"])),
    (b"[]", lambda e: bool(e["message"])),
    (b'{"object":"error","message":"too long","code":400}', lambda e: "too long" in e["message"]),
    (b'{"error":"text"}', lambda e: "text" in e["message"]),
    (b'{"error":{"message":5}}', lambda e: bool(e["message"])),
    (b'{"error":{"message":"m"}}', lambda e: e == {"message": "m", "type": None, "param": None, "code": None}),
    (b'{"error":{"message":"m","code":7,"more":1e400}}', lambda e: e["message"] == "m" and e["code"] == 7),
    (b'{"error":' + b"[" * 99_999, lambda e: bool(e["message"])),
    (b"x" * 3_000_000, lambda e: len(e["message"]) < 5000),
]


@on_loop
async def test_every_error_of_an_engine_has_openais_shape() -> None:
    """What has the shape passes on as it is; what has not is told in it."""
    async with site(Engine()) as s:
        for said, is_right in ERRORS:
            s.engine.script = [fails(400, said)]
            answer = await s.chat("p")
            assert answer.status == 400 and is_right(answer.error), said[:60]
        s.engine.script = [fails(400, b"", headers="")]
        assert (await s.chat("p")).status == 400


@on_loop
async def test_an_answer_without_bound_is_cut_off() -> None:
    """A whole answer larger than the limit is a broken engine; the client hears so and the engine is let go."""

    async def endless(call: Call) -> None:
        await call.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while not call.gone.is_set():
            await call.piece(b"x" * 65536)

    async with site(Engine(endless), answer_max_bytes=200_000, router={"attempts_max": 1}) as s:
        answer = await s.chat("p")
        assert answer.status == 502 and "200000" in answer.error["message"]


@on_loop
async def test_a_program_without_an_answer_may_fall_back_to_another_model() -> None:
    """Another model takes an unanswered program, and the credit; a program that has had an answer keeps its model."""
    first, second = Engine(), Engine()
    for engine in (first, second):
        await engine.start()
    config = pool(first, second, models={"x": {}, "y": {}}, router={"policy": {"name": "fixed", "candidate": "x"}})
    async with site(first, second, config=config) as s:
        assert (await s.chat("bound")).headers["x-loadwise-model"] == "x"
        first.usual = fails(500)
        answer = await s.chat("new")
        assert (answer.status, answer.headers["x-loadwise-model"]) == (200, "y")
        assert answer.headers["x-loadwise-decision"] == "3", "the decision of the model that failed is undone"
        assert (await s.chat("bound")).status == 500
        assert (await s.chat("pinned", model="x")).status == 500
        assert (await s.verdict("new")).json == {"program": "new", "credited": True, "decision": 3}
        first.usual = says()
        assert (await s.chat("bound")).headers["x-loadwise-model"] == "x"


@on_loop
async def test_an_engine_that_closes_after_a_stream_costs_nobody_an_answer() -> None:
    """llama.cpp announces keep-alive and closes after every streamed reply: the next request goes on a fresh one."""

    async def behave(call: Call) -> None:
        if not call.json.get("stream"):
            await call.respond(completion(message("ok")), headers="connection: keep-alive\r\nkeep-alive: timeout=5\r\n")
            return
        await call.start_stream("connection: keep-alive\r\nkeep-alive: timeout=5, max=100\r\n")
        for piece in (TEXT, USAGE_CHUNK, DONE):
            await call.piece(piece)
        await call.end_stream()
        call.close()

    async with site(Engine(behave)) as s:
        for n in range(20):
            answers = await asyncio.gather(*(s.chat(f"p{i}", stream=n % 3 != 0) for i in range(4)))
            assert {a.status for a in answers} == {200}
        assert s.counts.completed == 80 and s.counts.failed == 0


@on_loop
async def test_backends_may_come_and_go_under_load() -> None:
    """Engines that stop and start again: every request has an answer, and in the end all is served."""
    one, two = Engine(), Engine()
    async with site(one, two) as s:

        async def client(n: int) -> list[int]:
            return [(await s.chat(f"p{n}-{i}", stream=i % 2 == 0)).status for i in range(25)]

        async def chaos() -> None:
            for engine in (one, two, one):
                n = len(engine.calls)
                await until(lambda engine=engine, n=n: len(engine.calls) > n + 5 or s.counts.arrived >= 250)
                await engine.stop()
                probe = s.gateway.probes[(one, two).index(engine)]
                await until(lambda probe=probe: probe.is_reachable is False)
                await engine.start()

        statuses, _ = await asyncio.gather(asyncio.gather(*(client(n) for n in range(10))), chaos())
        told = [status for row in statuses for status in row]
        assert len(told) == 250 and set(told) <= {200, 502, 503}
        await until(lambda: len(s.router.backends.usable("m", s.host.now_s())) == 2)
        assert (await s.chat("last")).status == 200
