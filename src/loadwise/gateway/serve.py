"""Puts the live host together: journal and stack, links and probes, server and routes."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadwise.journal.commit import GroupCommit
from loadwise.journal.entry import make_header
from loadwise.journal.index import Index
from loadwise.journal.recover import resume
from loadwise.journal.store import JournalWriter
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError, JournalError
from loadwise.kernel.ids import BackendId
from loadwise.kernel.stack import Stack
from loadwise.router.lifecycle import REPORTED
from loadwise.runner.embed import Embedder
from loadwise.settings import Config, convert, open_stack, with_embedder
from loadwise.wire.heads import Ticker
from loadwise.wire.server import Limits, Server

from .archive import Archived, NoArchive, WatchedArchive
from .asking import Asking
from .backend import BackendLink
from .config import GatewayConfig
from .guard import Guard
from .host import Host
from .judging import Judging, assign, make_carrier, verification_config
from .meter import Meter
from .notices import alarm_notice, notices
from .probe import Probe
from .programs import OnDurable, Programs, WhenDurable
from .routes import Routes
from .selector import Selector
from .tenants import Tenants, read_secret
from .turns import Turns

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
        self.judging: Judging | None = None
        """None where no verifier is run here."""
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
    if embedder is not None:
        config = with_embedder(config, embedder.version)
    async with contextlib.AsyncExitStack() as closers:
        server, route = _make_server(gateway)
        ticker = server.ticker
        ticker.start()  # before anything is asked: deadlines are told on its clock
        closers.callback(ticker.stop)
        links = {BackendId(spec.name): BackendLink(spec, gateway, ticker, environment) for spec in config.backends}
        keys = _keys(gateway, environment)
        selector = None if config.router.selector is None else Selector(config.router.selector, ticker)
        opened = _open_journal(config, gateway, closers, ticker, say)
        host = Host(
            opened.stack,
            opened.writer,
            started_at_s=opened.started_at_s,
            time_scale=gateway.time_scale,
            run_id=f"{time.time_ns() // 1000:x}",
            ask_selector=None if selector is None else selector.ask,
        )
        closers.callback(host.close)
        if selector is not None:
            selector.host = host
            closers.push_async_callback(selector.close)
        for link in links.values():
            closers.push_async_callback(link.close)
        port = await _take_address(server, gateway, closers)
        tell_alarms = alarm_notice(host.router, say)
        ticker.watch(tell_alarms)
        closers.callback(ticker.forget, tell_alarms)
        for notice in notices(config, gateway, has_keys=bool(keys)):
            say(notice)
        if not opened.is_new:
            _take_over(host, links)
        tenants = Tenants(opened.secret, keys)
        archive = WatchedArchive(opened.archive, say)
        turns = Turns(
            host,
            links,
            archive,
            Meter(),
            tenants,
            embedder=embedder,
            answer_max_bytes=gateway.answer_max_bytes,
            keep_alive_s=gateway.keep_alive_s,
            task_type=gateway.task_selector.task_type,
        )
        probes = await _start_probes(host, links, gateway, closers, say)
        when_durable = _when_durable(host, opened.writer, closers)
        programs = Programs(host, archive, tenants, when_durable)
        await _start_judging(config, gateway, host, turns, programs, when_durable, ticker, closers, say)
        route.routes = Routes(turns, programs, guard=Guard(gateway), state=lambda: _state(host, probes))
        await server.serve()
        closers.push_async_callback(server.close, gateway.grace_s)
        shown = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        running = Gateway(host, server, f"http://{shown}:{port}", probes, closers.pop_all())
        running.judging = turns.judging
        return running
    raise AssertionError("unreachable")


async def _start_judging(
    config: Config,
    gateway: GatewayConfig,
    host: Host,
    turns: Turns,
    programs: Programs,
    when_durable: WhenDurable,
    ticker: Ticker,
    closers: contextlib.AsyncExitStack,
    say: Say,
) -> None:
    """Run the configured verifiers; where there are none, and none of an earlier run, nothing is kept of answers.

    Raises:
        ConfigError: a verifier's option is wrong.
    """
    verification = verification_config(config)
    assigned = assign(config)
    left_over = any(host.router.table.by_id[p].verifier not in REPORTED for p in host.router.table.verifying)
    if not assigned and not left_over:
        return
    # A sandbox is tried before it is relied on, which takes a moment: not on the loop.
    carrier = await asyncio.to_thread(make_carrier, config, verification, say)
    asking = Asking(turns, ticker)
    closers.push_async_callback(asking.close)
    carrier.asking = asking.ask
    judging = Judging(
        host,
        config.task_types,
        assigned,
        carrier,
        verification,
        folder=None if gateway.journal is None else Path(gateway.journal),
        when_durable=when_durable,
        say=say,
    )
    closers.push_async_callback(judging.close)
    turns.judging = programs.judging = judging
    judging.start()


async def _take_address(server: Server, gateway: GatewayConfig, closers: contextlib.AsyncExitStack) -> int:
    """Take the address before anything is asked or said of backends; returns the port.

    Raises:
        ConfigError: it is taken or not ours.
    """
    try:
        addresses = await server.listen(gateway.host, gateway.port, starts=False)
    except OSError as error:
        raise ConfigError(f"cannot listen on {gateway.host}:{gateway.port}: {error}") from error
    closers.push_async_callback(server.close, 0.0)
    return addresses[0][1]


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


class _Opened(NamedTuple):
    """The stack as the journal left it, and the journal ready for more."""

    stack: Stack
    started_at_s: float
    writer: JournalWriter | None
    archive: Archived
    secret: bytes
    is_new: bool


def _open_journal(
    config: Config, gateway: GatewayConfig, closers: contextlib.AsyncExitStack, ticker: Ticker, say: Say
) -> _Opened:
    core = msgspec.structs.replace(config, gateway={}, verification={})
    if gateway.journal is None:
        return _Opened(open_stack(core, gateway.seed), 0.0, None, NoArchive(), read_secret(None), True)
    path = Path(gateway.journal)
    header = make_header(msgspec.to_builtins(core), seed=gateway.seed, epoch_unix_s=time.time())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"journal {str(path)!r} cannot be made: {error}") from error
    index = Index(path / "index.sqlite")
    closers.callback(index.close)
    writer, recovered = resume(path, header, index=index, keep_segments=gateway.keep_segments, ends_with_snapshot=True)
    _tell_messages(writer, closers, ticker, say)
    closers.callback(writer.close)
    for message in (*index.messages, *recovered.messages):
        say(message)
    if not recovered.is_new:
        say(f"recovered {recovered.n_replayed} journal entries from {path}")
    assert isinstance(recovered.machine, Stack)
    started_at_s = resumed_at_s(writer.last_at_s, writer.header.epoch_unix_s, time.time(), gateway.time_scale)
    return _Opened(recovered.machine, started_at_s, writer, index, read_secret(path), recovered.is_new)


def resumed_at_s(last_at_s: float, epoch_unix_s: float, now_unix_s: float, time_scale: float = 1.0) -> float:
    """Where the run's clock stands after a restart: it ran on while nobody served, but never back.

    >>> resumed_at_s(100.0, 1000.0, 1160.0), resumed_at_s(100.0, 1000.0, 1050.0)
    (160.0, 100.0)
    """
    return max(last_at_s, (now_unix_s - epoch_unix_s) * time_scale) if epoch_unix_s > 0.0 else last_at_s


def _tell_messages(writer: JournalWriter, closers: contextlib.AsyncExitStack, ticker: Ticker, say: Say) -> None:
    """Say what goes wrong with snapshots and index while the gateway runs."""

    def tell(now_s: float = 0.0) -> None:
        while writer.messages:
            say(f"journal: {writer.messages.popleft()}")

    closers.callback(tell)  # after the writer is closed: what its closing has to say
    closers.callback(ticker.forget, tell)
    ticker.watch(tell)


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
    interval_s = gateway.probe_interval_s / gateway.time_scale
    probes = [Probe(host, link, interval_s, say=say) for link in links.values()]

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
