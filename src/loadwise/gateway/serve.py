"""Puts the live host together: journal and stack, links and probes, server and routes."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import uvloop

from loadwise.journal.commit import GroupCommit
from loadwise.journal.entry import make_header
from loadwise.journal.index import Index
from loadwise.journal.recover import resume
from loadwise.journal.store import JournalWriter
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError, JournalError
from loadwise.kernel.ids import BackendId
from loadwise.kernel.stack import Stack
from loadwise.settings import Config, convert, open_stack
from loadwise.wire.server import Limits, Server

from .archive import Archived, NoArchive
from .backend import BackendLink
from .config import GatewayConfig
from .host import Host
from .meter import Meter
from .probe import Probe
from .programs import OnDurable, Programs
from .routes import Routes
from .selector import Selector
from .turns import Embedder, Turns

Say = Callable[[str], None]
FIRST_LOOK_S = 1.0
"""How long a start waits for the backends' first answers; later ones are heard later."""


def gateway_config(config: Config) -> GatewayConfig:
    """The `gateway:` part of a pool file, checked."""
    return convert(config.gateway, GatewayConfig, where="gateway")


class Gateway:
    """A running gateway; made by `start`, stopped by `close`."""

    def __init__(
        self, host: Host, server: Server, url: str, probes: list[Probe], closers: contextlib.AsyncExitStack
    ) -> None:
        self.host = host
        self.server = server
        self.url = url
        """Base URL, without `/v1`."""
        self.probes = probes
        self._closers = closers

    async def close(self) -> None:
        """Stop accepting, let open turns finish within the grace, write everything down."""
        await self._closers.aclose()


async def start(
    config: Config,
    gateway: GatewayConfig | None = None,
    *,
    embedder: Embedder | None = None,
    environment: Mapping[str, str] = os.environ,
    say: Say = lambda text: None,
) -> Gateway:
    """Start a gateway on the running loop.

    Raises:
        ConfigError: the configuration cannot be served.
        JournalError: the journal is damaged, or another gateway writes it.
    """
    gateway = gateway_config(config) if gateway is None else gateway
    async with contextlib.AsyncExitStack() as closers:
        server, route = _make_server(gateway)
        ticker = server.ticker
        ticker.start()  # before anything is asked: deadlines are told on its clock
        closers.callback(ticker.stop)
        links = {BackendId(spec.name): BackendLink(spec, gateway, ticker, environment) for spec in config.backends}
        keys = _keys(gateway, environment)
        selector = None if config.router.selector is None else Selector(config.router.selector, ticker)
        stack, started_at_s, writer, archive, is_new = _open_journal(config, gateway, closers, say)
        host = Host(
            stack,
            writer,
            started_at_s=started_at_s,
            run_id=f"{time.time_ns() // 1000:x}",
            ask_selector=None if selector is None else selector.ask,
        )
        closers.callback(host.close)
        if selector is not None:
            selector.host = host
            closers.push_async_callback(selector.close)
        for link in links.values():
            closers.push_async_callback(link.close)
        if not is_new:
            _take_over(host, links)
        turns = Turns(host, links, archive, Meter(), embedder=embedder, answer_max_bytes=gateway.answer_max_bytes)
        probes = await _start_probes(host, links, gateway, closers, say)
        programs = Programs(host, archive, _when_durable(host, writer, closers))
        route.routes = Routes(turns, programs, keys=keys, state=lambda: _state(host, probes))
        try:
            addresses = await server.listen(gateway.host, gateway.port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {gateway.host}:{gateway.port}: {error}") from error
        closers.push_async_callback(server.close, gateway.grace_s)
        port = addresses[0][1]
        shown = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        return Gateway(host, server, f"http://{shown}:{port}", probes, closers.pop_all())
    raise AssertionError("unreachable")


class _Route:
    """Lets the server be made before its routes."""

    routes: Routes

    def __call__(self, exchange: object) -> None:
        self.routes.handle(exchange)  # type: ignore[arg-type]


def _make_server(gateway: GatewayConfig) -> tuple[Server, _Route]:
    route = _Route()
    limits = Limits(
        body_bytes=gateway.body_max_bytes, head_bytes=gateway.headers_max_bytes, connections=gateway.connections_max
    )
    return Server(route, limits), route


def _keys(gateway: GatewayConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    if gateway.key_env is None:
        return ()
    keys = tuple(key.strip() for key in environment.get(gateway.key_env, "").split(",") if key.strip())
    if not keys:
        raise ConfigError(f"gateway.key_env: environment variable {gateway.key_env} is not set or holds no key")
    return keys


def _open_journal(
    config: Config, gateway: GatewayConfig, closers: contextlib.AsyncExitStack, say: Say
) -> tuple[Stack, float, JournalWriter | None, Archived, bool]:
    """The stack as the journal left it, and the journal ready for more."""
    core = msgspec.structs.replace(config, gateway={})
    if gateway.journal is None:
        return open_stack(core, gateway.seed), 0.0, None, NoArchive(), True
    path = Path(gateway.journal)
    header = make_header(msgspec.to_builtins(core), seed=gateway.seed, epoch_unix_s=time.time())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"journal {str(path)!r} cannot be made: {error}") from error
    index = Index(path / "index.sqlite")
    closers.callback(index.close)
    writer, recovered = resume(path, header, index=index, keep_segments=gateway.keep_segments)
    closers.callback(writer.close)
    for message in (*index.messages, *recovered.messages):
        say(message)
    if not recovered.is_new:
        say(f"recovered {recovered.n_replayed} journal entries from {path}")
    assert isinstance(recovered.machine, Stack)
    return recovered.machine, writer.last_at_s, writer, index, recovered.is_new


def _when_durable(
    host: Host, writer: JournalWriter | None, closers: contextlib.AsyncExitStack
) -> Callable[[OnDurable], None]:
    if writer is None:
        return lambda callback: callback(None)
    commit = GroupCommit(writer)
    closers.callback(commit.close)

    def when_durable(callback: OnDurable) -> None:
        commit.request(lambda error: host.call_on_loop(callback, error))

    return when_durable


def _take_over(host: Host, links: dict[BackendId, BackendLink]) -> None:
    """Go on from what the journal remembers, in the pool as it is now."""
    host.post(e.HostRestarted(at_s=host.now_s()))
    for backend_id in list(host.router.backends.by_id):
        if backend_id not in links:
            host.post(e.BackendRemoved(at_s=host.now_s(), backend_id=backend_id))


async def _start_probes(
    host: Host,
    links: dict[BackendId, BackendLink],
    gateway: GatewayConfig,
    closers: contextlib.AsyncExitStack,
    say: Say,
) -> list[Probe]:
    """Look at every backend once, for a moment at most, so that what is down is known before the first request."""
    probes = [Probe(host, link, gateway.probe_interval_s, say=say) for link in links.values()]

    async def watch(probe: Probe, first: asyncio.Task[None]) -> None:
        await first
        await probe.run()

    loop = asyncio.get_running_loop()
    firsts = [loop.create_task(probe.poll()) for probe in probes]
    tasks = [loop.create_task(watch(probe, first)) for probe, first in zip(probes, firsts, strict=True)]

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    closers.push_async_callback(stop)
    if firsts:
        await asyncio.wait(firsts, timeout=FIRST_LOOK_S)
    return probes


def _state(host: Host, probes: list[Probe]) -> tuple[bool, dict[str, object]]:
    """Whether work is taken, and the state of every backend."""
    router, now_s = host.router, host.now_s()
    probe_by_id = {probe.backend_id: probe for probe in probes}
    usable = [
        model_id
        for model_id in router.backends.model_by_id
        if any(b in probe_by_id and probe_by_id[b].is_reachable for b in router.backends.usable(model_id, now_s))
    ]
    backends = {
        name: {
            "model": state.spec.model,
            "health": state.health,
            "detail": probe_by_id[name].detail if name in probe_by_id else "",
        }
        for name, state in router.backends.by_id.items()
    }
    is_ready = bool(usable) and host.failure is None
    return is_ready, {"ready": is_ready, "models": usable, "failure": host.failure, "backends": backends}


def run(config: Config, gateway: GatewayConfig, *, embedder: Embedder | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the process' exit code."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        running = await start(config, gateway, embedder=embedder, say=say)
        say(f"serving {', '.join(config.models)} on {running.url}/v1")
        await stop.wait()
        say("stopping")
        await running.close()

    uvloop.run(serve())
    return 0
