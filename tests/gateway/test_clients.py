"""Clients that leave, read slowly, send too much, have no key or ask for what is not there."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from engines import DONE, Call, Engine, chunk, hangs, says, sends
from sites import exchange, on_loop, parse, site, until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def request(body: Any = BODY, headers: str = "", program_id: str = "p") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Session-ID: {program_id}\r\n"
        f"Content-Length: {len(raw)}\r\n{headers}\r\n"
    )
    return head.encode() + raw


LEAVES = {
    "while the engine thinks": hangs,
    "in the middle of a stream": sends(chunk({"content": "a"}), then="hang"),
    "before the first event": sends(then="hang"),
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("when", LEAVES)
def test_a_client_that_leaves_stops_its_engine(when: str, how: str) -> None:
    """The engine sees the end of its connection at once; nothing stays reserved, the turn is cancelled."""

    @on_loop
    async def run() -> None:
        engine = Engine(LEAVES[when])
        async with site(engine) as s:
            for n in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", s.port)
                writer.write(request({**BODY, "stream": True}))
                await until(lambda n=n: len(engine.calls) == n + 1)
                if how == "reset":
                    writer.transport.abort()
                else:
                    writer.close()
                await engine.calls[n].gone.wait()
                await until(lambda n=n: s.counts.cancelled == n + 1)
                assert s.reserved() == 0 and s.program("p") is None and not s.host.relay_by_turn

    run()


@on_loop
async def test_a_client_that_leaves_while_held_gives_up_its_place() -> None:
    """A held turn of a client who left is not dispatched; the next in line is."""
    engine = Engine(hangs)
    async with site(engine, backend_0={"slots": 1}) as s:
        first = asyncio.ensure_future(s.chat("p1"))
        await until(lambda: engine.calls)
        second = asyncio.ensure_future(s.chat("p2"))
        await until(lambda: s.router.admission.n_held == 1)
        third = asyncio.ensure_future(s.chat("p3"))
        await until(lambda: s.router.admission.n_held == 2)
        second.cancel()
        await until(lambda: s.router.admission.n_held == 1)
        engine.usual = says()
        first.cancel()
        assert (await third).headers["x-loadwise-program"] == "p3"
        assert [c.headers.get("x-session-id") for c in engine.calls] == [None, None]
        assert s.counts.cancelled == 2 and s.counts.completed == 1


@on_loop
async def test_a_turn_held_too_long_is_a_503() -> None:
    """Held beyond the limit: 503 with Retry-After, and what runs goes on."""
    engine = Engine(hangs)
    async with site(engine, backend_0={"slots": 1}, router={"hold_max_s": 0.1}) as s:
        running = asyncio.ensure_future(s.chat("p1"))
        await until(lambda: engine.calls)
        answer = await s.chat("p2")
        assert (answer.status, answer.error["code"]) == (503, "held_too_long")
        assert int(answer.headers["retry-after"]) >= 1
        running.cancel()
        await until(lambda: s.counts.cancelled == 1)


@on_loop
async def test_the_wait_is_told() -> None:
    """A turn that was held says how long, and its program waited as long."""
    engine = Engine(hangs)
    async with site(engine, backend_0={"slots": 1}) as s:
        running = asyncio.ensure_future(s.chat("p1"))
        await until(lambda: engine.calls)
        held = asyncio.ensure_future(s.chat("p2"))
        await until(lambda: s.router.admission.n_held == 1)
        held_at_s = s.host.now_s()
        await until(lambda: s.host.now_s() > held_at_s + 0.05)
        engine.usual = says()
        running.cancel()
        assert int((await held).headers["x-loadwise-wait-ms"]) >= 50


@on_loop
async def test_a_slow_client_slows_its_engine_and_nobody_else() -> None:
    """What a client does not read is not read from the engine either; when it reads on, it gets everything."""
    piece, n_pieces, sent = chunk({"content": "x" * 60_000}), 1000, [0]

    async def flood(call: Call) -> None:
        await call.start_stream()
        for _ in range(n_pieces):
            await call.piece(piece)
            sent[0] += 1
        await call.piece(DONE)
        await call.end_stream()

    engine = Engine(flood)
    async with site(engine) as s:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(opened, ("127.0.0.1", s.port))
        reader, writer = await asyncio.open_connection(sock=opened, limit=65536)
        try:
            writer.write(request({**BODY, "stream": True}, "Connection: close\r\n"))
            await until(lambda: [r for r in s.host.relay_by_turn.values() if r._attempt and r._attempt.is_paused])
            engine.usual = says()
            assert (await s.chat("q")).status == 200
            # What the system's buffers hold has been sent; that they take all of it is out of the question.
            assert sent[0] < n_pieces, "the engine was not slowed down"
            body = parse(await reader.read(-1)).body
        finally:
            writer.close()
        assert body == piece * n_pieces + DONE
        assert s.counts.completed == 2


@on_loop
async def test_a_paused_engine_is_let_go_when_its_slow_client_leaves() -> None:
    """A client that stops reading and then leaves frees its engine."""

    async def flood(call: Call) -> None:
        await call.start_stream()
        while not call.gone.is_set():
            await call.piece(chunk({"content": "x" * 60_000}))

    engine = Engine(flood)
    async with site(engine) as s:
        _, writer = await asyncio.open_connection("127.0.0.1", s.port, limit=1024)
        writer.write(request({**BODY, "stream": True}))
        await until(lambda: any(not r._exchange.is_writable for r in s.host.relay_by_turn.values()))
        writer.transport.abort()
        await until(lambda: s.counts.cancelled == 1)
        assert s.reserved() == 0


@on_loop
async def test_a_slow_client_that_gets_its_end_leaves_the_engines_connection_usable() -> None:
    """The end of a stream may come while the client lags behind: the engine's connection must not stay paused."""
    big = chunk({"content": "x" * 3_000_000})

    async def behave(call: Call) -> None:
        await call.start_stream()
        await call.piece(big + DONE)
        await call.end_stream()

    engine = Engine(behave)
    async with site(engine) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port, limit=1024)
        writer.write(request({**BODY, "stream": True}, "Connection: close\r\n"))
        await until(lambda: s.counts.completed == 1)
        engine.usual = says()
        assert (await s.chat("q")).status == 200
        assert parse(await reader.read(-1)).body == big + DONE
        writer.close()
        await until(lambda: s.host.router.backends.by_id["a"].n_running == 0)


@on_loop
async def test_too_much_is_refused() -> None:
    """Bodies 413, headers 431, targets 414; the connection ends and the next one is served."""
    async with site(Engine(), body_max_bytes=100_000, headers_max_bytes=20_000) as s:
        big = request({"messages": [{"role": "user", "content": "x" * 100_000}]})
        assert parse(await exchange(s.port, big)).status == 413
        head = (
            request(BODY, "Transfer-Encoding: chunked\r\n")
            .replace(b"Content-Length", b"X-Length")
            .partition(b"\r\n\r\n")[0]
        )
        chunks = b"%x\r\n%b\r\n" % (60_000, b" " * 60_000)
        assert parse(await exchange(s.port, head + b"\r\n\r\n" + chunks * 3)).error["code"] == "request_too_large"
        for headers in (
            "X-A: " + "y" * 17_000 + "\r\n",
            "X-B: " + "y" * 9_000 + "\r\nX-C: " + "y" * 12_000 + "\r\n",
            "a: b\r\n" * 200,
        ):
            answer = parse(await exchange(s.port, request(BODY, headers)))
            assert answer.status == 431 and answer.error["type"] == "invalid_request_error"
        long = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 20_000)
        assert parse(await exchange(s.port, long)).status == 414
        fits = request({"messages": [{"role": "user", "content": "x" * 99_000}]}, "Connection: close\r\n")
        assert parse(await exchange(s.port, fits)).status == 200
        assert len(s.engine.calls) == 1


@on_loop
async def test_a_body_of_megabytes_passes() -> None:
    """Below the limit of 32 MiB a body reaches the engine whole, with and without a program's name."""
    content = "ab" * 14_000_000
    async with site(Engine()) as s:
        for program_id in ("p", None):
            answer = await s.chat(program_id, content)
            assert answer.status == 200
            assert s.engine.calls[-1].json["messages"][0]["content"] == content
        program = s.program("p")
        assert program is not None and program.n_turns == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: i\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 2\r\n\r\nab",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused_in_openais_shape(raw: bytes) -> None:
    """What is not HTTP gets a 4xx with an error object, and becomes no turn."""

    @on_loop
    async def run() -> None:
        async with site(Engine()) as s:
            answer = parse(await exchange(s.port, raw))
            assert 400 <= answer.status < 500 and answer.error["code"]
            assert s.counts.arrived == 0

    run()


@on_loop
async def test_what_is_not_served_is_a_404_and_what_is_served_otherwise_a_405() -> None:
    """Unknown paths and wrong methods are told apart; a 405 says what is allowed."""
    async with site(Engine()) as s:
        await s.chat("p")
        for method, path in (
            ("GET", "/nothing"),
            ("POST", "/v1/embeddings"),
            ("POST", "/v1/chat/completions/"),
            ("GET", "/v1/programs/p/other"),
            ("POST", "/v1/programs/p/finish/x"),
            ("GET", "//"),
        ):
            answer = await s.ask(method, path, b"{}" if method == "POST" else None)
            assert (answer.status, answer.error["code"]) == (404, "not_found"), path
        for method, path, allowed in (
            ("GET", CHAT, "POST"),
            ("PUT", CHAT, "POST"),
            ("DELETE", "/v1/completions", "POST"),
            ("POST", "/v1/models", "GET"),
            ("POST", "/v1/models/m", "GET"),
            ("POST", "/healthz", "GET"),
            ("OPTIONS", "/metrics", "GET"),
            ("GET", "/v1/programs/p/finish", "POST"),
            ("PUT", "/v1/programs/p/verdict", "POST"),
            ("DELETE", "/v1/programs/p", "GET"),
            ("POST", "/v1/programs", "GET"),
        ):
            answer = await s.ask(method, path, b"")
            assert (answer.status, answer.headers.get("allow")) == (405, allowed), (method, path)
            assert answer.error["code"] == "method_not_allowed"
        for path in ("/v1/models", "/healthz", "/readyz", "/metrics", "/", "/v1/programs", "/v1/programs/p"):
            head = await s.ask("HEAD", path)
            assert (head.status, head.body) == (200, b""), path


@on_loop
async def test_keys_let_in_those_who_have_one() -> None:
    """With keys configured everything but health asks for one; the scheme's case does not matter."""
    config = {"key_env": "KEYS", "environment": {"KEYS": "one, two,"}}
    async with site(Engine(), **config) as s:
        paths = [
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("POST", "/v1/programs/p/verdict"),
            ("GET", "/x"),
        ]
        wrong = [
            {},
            *(
                {"Authorization": a}
                for a in ("Bearer", "Bearer ", "Bearer three", "one", "Basic one", "Bearer one two")
            ),
        ]
        for method, path in paths:
            for headers in wrong:
                answer = await s.ask(method, path, BODY if method == "POST" else None, headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), headers
                assert answer.error["type"] == "authentication_error"
        assert not s.engine.calls
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "bearer two"}):
            assert (await s.ask("POST", CHAT, BODY, headers)).status == 200
        assert "authorization" not in s.engine.calls[0].headers, "a client's key stays here"
        for path in ("/healthz", "/readyz"):
            assert (await s.ask("GET", path)).status == 200


@on_loop
async def test_each_backend_gets_its_own_key() -> None:
    """The key of a backend comes from the environment and goes to that backend only."""
    one, two = Engine(), Engine()
    options = {"models": {"x": {}, "y": {}}, "backend_0": {"key_env": "SECRET"}, "environment": {"SECRET": "s3"}}
    async with site(one, two, **options) as s:
        for model in ("x", "y"):
            await s.chat(None, model=model, headers={"Authorization": "Bearer clients"})
        assert one.calls[0].headers["authorization"] == "bearer s3"
        assert "authorization" not in two.calls[0].headers


@on_loop
async def test_pipelined_requests_are_answered_in_order() -> None:
    """Several requests on one connection, written at once, streamed and not."""
    async with site(Engine()) as s:
        many = [request({**BODY, "stream": n % 2 == 1}, program_id=f"p{n}") for n in range(6)]
        last = request(BODY, "Connection: close\r\n", "p6")
        raw = await exchange(s.port, b"".join(many) + last)
        order = [line for line in raw.split(b"\r\n") if line.startswith(b"x-loadwise-program")]
        assert order == [b"x-loadwise-program: p%d" % n for n in range(7)]


@on_loop
async def test_the_metrics_page_counts() -> None:
    """Prometheus' text, with what has happened."""
    async with site(Engine()) as s:
        await s.chat("p")
        await s.chat("p", model="none")
        await s.verdict("p")
        page = (await s.ask("GET", "/metrics")).body.decode()
        for line in (
            'loadwise_turns_ended_total{outcome="completed"} 1.0',
            'loadwise_requests_refused_total{status="404"} 1.0',
            'loadwise_verdicts_total{fate="credited"} 1.0',
            'loadwise_backend_up{backend="a",model="m"} 1.0',
            "loadwise_turns_open 0.0",
            "loadwise_journal_writable 1.0",
        ):
            assert f"\n{line}\n" in page, line
