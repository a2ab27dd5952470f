"""The demo's pool and gateways for real: an emulator or llama.cpp servers, and the gateway that `serve` starts.

Each row gets a fresh pool and a fresh gateway with its own journal, on a loop of their own in a thread beside the
agents. The agents are ordinary clients: they reach the gateway over HTTP only.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from loadwise.demo.run import DemoFailed, RowPlan, StartGateway, StartPool
from loadwise.demo.table import SuccessTable, UsdPerMillion
from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, start_emulator
from loadwise.emulator.script import Script
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.serve import start
from loadwise.runner.embed import Embedder
from loadwise.settings import parse_config
from loadwise.sim.simple_engine import SimpleEngineSpec

_T = TypeVar("_T")

ENGINES = {
    "small": SimpleEngineSpec(slots=16, prefill_tokens_per_s=24_000, decode_steps_per_s=90),
    "medium": SimpleEngineSpec(slots=12, prefill_tokens_per_s=12_000, decode_steps_per_s=55),
    "large": SimpleEngineSpec(slots=8, prefill_tokens_per_s=6_000, decode_steps_per_s=30),
}
"""Speeds of the emulated engines, in the order of size of hosted models; success and prices are in the table."""
SCALE = 20.0
"""Seconds of emulated time in one second of the clock."""
REAL_START_MAX_S = 60.0
_FAMILIES = ("arithmetic", "dates", "strings", "units")


def emulated_engine(model: str) -> SimpleEngineSpec:
    """The speed and size of a model's emulated engine."""
    return ENGINES.get(model, SimpleEngineSpec())


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def emulated_pool(table: SuccessTable) -> StartPool:
    """A pool with one emulated engine for each model of the table; gives the base URL by model."""

    @contextmanager
    def start_pool(script: Script) -> Iterator[dict[str, str]]:
        specs = tuple(EmulatedBackendSpec(name=m, model=m, engine=emulated_engine(m)) for m in table.models)
        thread = LoopThread("demo-pool")
        try:
            emulator = thread.run(start_emulator(EmulatorSpec(backends=specs, scale=SCALE), script=script))
            try:
                yield emulator.urls
            finally:
                thread.run(emulator.close())
        finally:
            thread.close()

    return start_pool


def real_pool(gguf_by_model: Mapping[str, Path], *, slots: int) -> StartPool:
    """A pool with one llama.cpp server for each weights file, on the CPU; gives the base URL by model."""

    @contextmanager
    def start_pool(script: Script) -> Iterator[dict[str, str]]:
        servers: dict[str, tuple[subprocess.Popen[str], str]] = {}
        try:
            for model, path in gguf_by_model.items():
                servers[model] = _start_llama(model, path, slots)
            for model, (process, url) in servers.items():
                _wait_until_ready(model, process, url)
            yield {model: url + "/v1" for model, (_, url) in servers.items()}
        finally:
            for process, _ in servers.values():
                process.terminate()
            for process, _ in servers.values():
                process.wait(timeout=20)
                if process.stdout is not None:
                    process.stdout.close()

    return start_pool


def _start_llama(model: str, path: Path, slots: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "loadwise.demo.llama", str(path), model, str(slots)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("listening "):
            return process, line.split()[1]
    process.wait()
    raise DemoFailed(f"model {model!r}: the llama.cpp server for {str(path)!r} ended with {process.returncode}")


def _wait_until_ready(model: str, process: subprocess.Popen[str], url: str) -> None:
    give_up_at_s = time.monotonic() + REAL_START_MAX_S
    while time.monotonic() < give_up_at_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise DemoFailed(f"model {model!r}: the llama.cpp server was not ready within {REAL_START_MAX_S:g} s")


def gateways(
    prices: Mapping[str, UsdPerMillion],
    journal_root: Path,
    *,
    engine: str,
    slots_by_model: Mapping[str, int],
    embedder: Callable[[], Embedder | None] = lambda: None,
) -> StartGateway:
    """Fresh gateways over a started pool, each with its journal in a folder named after its row."""

    @contextmanager
    def start_gateway(pool: dict[str, str], plan: RowPlan) -> Iterator[str]:
        config = parse_config(pool_file(prices, pool, plan, engine=engine, slots_by_model=slots_by_model), where="demo")
        journal = journal_root / plan.label.replace(":", "-").replace("/", "-")
        settings = GatewayConfig(port=0, journal=str(journal), seed=plan.seed & 0xFFFF_FFFF)
        thread = LoopThread(f"demo-gateway-{plan.label}")
        try:
            gateway = thread.run(start(config, settings, embedder=embedder()))
            try:
                yield gateway.url + "/v1"
            finally:
                thread.run(gateway.close())
        finally:
            thread.close()

    return start_gateway


def pool_file(
    prices: Mapping[str, UsdPerMillion],
    url_by_model: Mapping[str, str],
    plan: RowPlan,
    *,
    engine: str,
    slots_by_model: Mapping[str, int],
) -> dict[str, Any]:
    """The pool file of a row: the same models and backends, another policy.

    What the routed row is compared with runs where its row says: a single model whose waiting programs went elsewhere
    would be none, nor would the mixtures that the gains are drawn from.
    """
    policy_by_kind: dict[str, dict[str, Any]] = {
        "loadwise": {},
        "random": {"policy": "random"},
        "mixing": {"policy": {"name": "mixing", "weights": plan.shares}},
        "fixed": {"policy": {"name": "fixed", "candidate": next(iter(plan.shares), "")}},
    }
    stays = {} if plan.policy == "loadwise" else {"divert": {"when": "never"}}
    return {
        "preset": "loadwise",
        "models": {name: {"usd_per_million": msgspec.to_builtins(price)} for name, price in prices.items()},
        "backends": [
            {"name": f"{model}-1", "model": model, "url": url, "engine": engine, "slots": slots_by_model[model]}
            for model, url in url_by_model.items()
        ],
        "router": {**policy_by_kind[plan.policy], **stays, "idle_s": 120.0},
        "task_types": {family: {} for family in _FAMILIES},
    }
