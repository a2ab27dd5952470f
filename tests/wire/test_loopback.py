"""Server and client over real sockets on the loop that serves: what memory cannot show."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path

import pytest
import uvloop

from loadwise.wire.client import Attempt, Timeouts, Upstream, UpstreamError, UpstreamLimits
from loadwise.wire.heads import EVENT_STREAM, JSON_TYPE
from loadwise.wire.server import Exchange, Limits, Server

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on uvloop, bounded."""

    @wraps(test)
    def run(**fixtures: object) -> None:
        uvloop.run(asyncio.wait_for(test(**fixtures), 120))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; the test's own limit bounds it."""
    while not condition():
        await asyncio.sleep(0)


class Relay:
    """A minimal proxy: what the gateway builds on top of both sides."""

    def __init__(self, exchange: Exchange, upstream: Upstream, errors: list[str]) -> None:
        self.exchange, self.errors = exchange, errors
        self.attempt: Attempt = upstream.send(b"POST", exchange.path, JSON_TYPE, exchange.body, self)
        exchange.on_disconnect = self.attempt.cancel
        exchange.on_pause, exchange.on_resume = self.attempt.pause_reading, self.attempt.resume_reading

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.exchange.start(status)

    def on_body(self, data: bytes) -> None:
        self.exchange.write(data)

    def on_end(self) -> None:
        self.exchange.end()

    def on_error(self, kind: str, detail: str) -> None:
        self.errors.append(kind)
        if self.exchange.is_started:
            self.exchange.abort()
        else:
            self.exchange.respond(502, b"", kind.encode())


class Chain:
    """An engine, a relay before it, and an upstream that asks the relay."""

    def __init__(self, engine: Callable[[Exchange], None], limits: Limits | None = None) -> None:
        self.errors: list[str] = []
        self.engine = Server(engine)
        self.proxy = Server(lambda exchange: self._relay(exchange), limits)

    def _relay(self, exchange: Exchange) -> None:
        Relay(exchange, self.inner, self.errors)

    async def __aenter__(self) -> Chain:
        (engine,) = await self.engine.listen("127.0.0.1", 0)
        (self.address,) = await self.proxy.listen("127.0.0.1", 0)
        self.inner = Upstream("http://{}:{}".format(*engine))
        self.client = Upstream("http://{}:{}/v1".format(*self.address))
        return self

    async def __aexit__(self, *_: object) -> None:
        for upstream in (self.client, self.inner):
            await upstream.close()
        for server in (self.proxy, self.engine):
            await server.close(grace_s=5.0)
            assert server.statistics().connections == server.statistics().exchanges_open == 0


@on_loop
async def test_bodies_of_every_size_survive_the_way_through_both_sides() -> None:
    """An echo through relay and engine returns the same bytes, streamed, over kept connections."""

    def echo(exchange: Exchange) -> None:
        exchange.start(200)
        for at in range(0, len(exchange.body), 50_000):
            exchange.write(exchange.body[at : at + 50_000])
        exchange.end()

    async with Chain(echo) as chain:
        for size in (0, 1, 1000, 16_384, 16_385, 300_000, 3_000_000):
            body = bytes(range(256)) * (size // 256) + bytes(size % 256)
            answer = await chain.client.fetch(b"POST", "/echo", body=body)
            assert answer.status == 200 and answer.body == body
        assert chain.client.statistics().connections == chain.inner.statistics().connections == 1


@on_loop
async def test_a_client_that_leaves_cancels_the_engine_call() -> None:
    """Hang-up travels client → relay → engine while the answer is pending and while it streams."""
    for is_streaming in (False, True):
        engine = _Unfinished(is_streaming)
        async with Chain(engine) as chain:
            reader, writer = await asyncio.open_connection(*chain.address)
            writer.write(GET)
            await until(lambda seen=engine.seen: bool(seen))  # type: ignore[misc]
            if is_streaming:
                await reader.readuntil(b"data: 1\n\n")
            writer.close()
            await until(lambda gone=engine.gone: gone == [1])  # type: ignore[misc]
            assert chain.inner.statistics().in_flight == 0 and chain.errors == []


class _Unfinished:
    """An engine that never ends its answers."""

    def __init__(self, is_streaming: bool) -> None:
        self.seen: list[Exchange] = []
        self.gone: list[int] = []
        self._is_streaming = is_streaming

    def __call__(self, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: self.gone.append(1)
        self.seen.append(exchange)
        if self._is_streaming:
            exchange.start(200, EVENT_STREAM)
            exchange.write(b"data: 1\n\n")


@on_loop
async def test_a_slow_client_pauses_the_engine_and_gets_every_byte() -> None:
    """Nothing on the way holds more than its bound while the client does not read."""
    total, piece = 40_000_000, b"x" * 100_000
    written: list[int] = [0]
    answering: list[Exchange] = []

    def engine(exchange: Exchange) -> None:
        def pump() -> None:
            while written[0] < total and exchange.is_writable and exchange.is_open:
                exchange.write(piece)
                written[0] += len(piece)
            if written[0] >= total and exchange.is_open:
                exchange.end()

        answering.append(exchange)
        exchange.start(200)
        exchange.on_resume = pump
        pump()

    async with Chain(engine, Limits(write_max_bytes=1_000_000)) as chain:
        reader, writer = await asyncio.open_connection(*chain.address, limit=100_000)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await until(lambda: bool(answering) and not answering[0].is_writable)
        assert written[0] < total // 2
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while data := await reader.read(1 << 20):
            received += len(data)
        assert received == total
        writer.close()


@on_loop
async def test_close_lets_answers_in_flight_finish_and_cuts_what_does_not() -> None:
    """Idle connections close at once, pending ones after their answer, hung ones at the end of the grace."""
    held: list[Exchange] = []
    server = Server(held.append)
    ((host, port),) = await server.listen("127.0.0.1", 0)
    idle, pending, hung = [await asyncio.open_connection(host, port) for _ in range(3)]
    for _, writer in (pending, hung):
        writer.write(GET)
    await until(lambda: len(held) == 2)
    closing = asyncio.ensure_future(server.close(grace_s=0.2))
    assert await idle[0].read() == b""
    with pytest.raises(OSError):
        await asyncio.open_connection(host, port)
    gone: list[int] = []
    held[1].on_disconnect = lambda: gone.append(1)
    held[0].respond(200, b"", b"done")
    answers = [await stream[0].read() for stream in (pending, hung)]
    await closing
    assert sorted(answers)[0] == b"" and b"connection: close" in sorted(answers)[1]
    assert gone == [1] and server.statistics().connections == 0
    for _, writer in (idle, pending, hung):
        writer.close()


@on_loop
async def test_listen_reports_every_real_port_and_takes_a_socket() -> None:
    """Port 0 is resolved; several addresses serve the same handler; a taken port is an OSError."""
    server = Server(lambda exchange: exchange.respond(200, b"", exchange.path))
    addresses = await server.listen("127.0.0.1", 0)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        addresses += await server.listen(sock=sock)
        assert len({port for _, port in addresses}) == 2
        for host, port in addresses:
            upstream = Upstream(f"http://{host}:{port}")
            assert (await upstream.get("/x")).body == b"/x"
            await upstream.close()
        with pytest.raises(OSError):
            await server.listen(*addresses[0])
        await server.close()


@on_loop
async def test_a_large_upload_that_is_refused_still_gets_its_answer() -> None:
    """413 arrives although the client is in the middle of sending: no reset destroys it."""
    server = Server(lambda exchange: exchange.respond(200), Limits(body_bytes=1000))
    ((host, port),) = await server.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3000000\r\n\r\n")
    for _ in range(30):
        writer.write(b"x" * 100_000)
        await writer.drain()
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()
    await server.close()


@on_loop
async def test_an_engine_that_closes_after_a_stream_while_promising_keep_alive_costs_nothing() -> None:
    """The known habit of llama.cpp: many streams in a row, none fails, whatever instant the close arrives."""
    served: list[int] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        served.append(1)
        writer.write(
            b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n"
        )
        for _ in range(len(served) % 8):
            await asyncio.sleep(0)
        writer.close()

    listener = await asyncio.start_server(engine, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    for _ in range(40):
        assert (await upstream.get("/")).body == b"abc"
    assert len(served) == 40 and upstream.statistics().in_flight == 0
    await upstream.close()
    listener.close()


@on_loop
async def test_failures_of_the_network_have_their_kinds() -> None:
    """A closed port is refused, a silent listener times out, a name that does not exist is refused."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        closed = Upstream(f"http://127.0.0.1:{port}")
        with pytest.raises(UpstreamError) as caught:
            await closed.get("/")
        assert caught.value.kind == "refused"
        silent.listen(1)
        hanging = Upstream(f"http://127.0.0.1:{port}", timeouts=Timeouts(first_byte_s=0.05))
        with pytest.raises(UpstreamError) as caught:
            await hanging.get("/")
        assert caught.value.kind == "first_byte_timeout"
        for upstream in (closed, hanging):
            await upstream.close()
            assert upstream.statistics().connections == upstream.statistics().dialing == 0
    unknown = Upstream("http://" + "x" * 70 + ".invalid")
    with pytest.raises(UpstreamError) as caught:
        await unknown.get("/")
    assert caught.value.kind == "refused"
    await unknown.close()


@on_loop
async def test_cancelling_while_dialing_leaves_no_connection() -> None:
    """A dial that is cancelled at any moment closes what it opened."""
    server = Server(lambda exchange: exchange.respond(200))
    ((host, port),) = await server.listen("127.0.0.1", 0)
    upstream = Upstream(f"http://{host}:{port}", limits=UpstreamLimits(connections=64))
    for turns in range(12):
        task = asyncio.ensure_future(upstream.get("/"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: upstream.statistics().dialing == 0)
    await upstream.close()
    await until(lambda: server.statistics().connections == 0)
    assert upstream.statistics().in_flight == 0
    await server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate and its key for localhost, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(folder / "key"),
    ]
    command = [openssl, "req", "-x509", *key, "-out", str(folder / "cert"), "-days", "2", *subject]
    subprocess.run(command, check=True, capture_output=True)
    both = folder / "both"
    both.write_text((folder / "key").read_text() + (folder / "cert").read_text())
    return both


@on_loop
async def test_https_is_spoken_and_certificates_are_checked(certificate: Path) -> None:
    """A trusted certificate works and keeps its connection; an untrusted one is refused."""

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntls")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = await asyncio.start_server(engine, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{listener.sockets[0].getsockname()[1]}"
    trusting = Upstream(url, tls=ssl.create_default_context(cafile=str(certificate)))
    for _ in range(2):
        assert (await trusting.get("/")).body == b"tls"
    assert trusting.statistics().connections == 1
    doubting = Upstream(url)
    with pytest.raises(UpstreamError) as caught:
        await doubting.get("/")
    assert caught.value.kind == "refused" and "certificate" in caught.value.detail
    for upstream in (trusting, doubting):
        await upstream.close()
    listener.close()
