"""Emulated engines and a gateway as processes of their own, on loopback and ports of the system's choice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.pinned import ProcessFailed
from loadwise.sim.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
STOP_LIMIT_S = 20.0
GATEWAY: dict[str, Any] = {"embedder": "none", "connections_max": 4096}
"""Nothing is learned from texts here: the worlds' selector knows its table."""


class Site(NamedTuple):
    """What runs."""

    gateway_url: str
    """With `/v1`."""
    engine_urls: Mapping[str, str]
    processes: Mapping[str, subprocess.Popen[str]]

    def cpu_s(self) -> dict[str, float]:
        """Seconds of a core that each process has used."""
        return {name: cpu_s(process.pid) for name, process in self.processes.items()}


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used, its ended children left out; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _loadwise(argv: list[str], log: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """A `loadwise` command that prints one JSON object when it is ready; ended when the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "loadwise", *argv], stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                process.wait(timeout=STOP_LIMIT_S)
                said.seek(0)
                raise ProcessFailed(f"loadwise {argv[0]} did not start: {said.read()[-2000:]}")
            yield json.loads(line), process
        finally:
            _end(process)
            process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_LIMIT_S)


@contextlib.contextmanager
def emulated(scenario: Scenario, folder: Path, *, scale: float) -> Iterator[tuple[dict[str, str], Any]]:
    """`loadwise emulate` for a scenario's engines, each answer as long as it is asked for; gives their addresses."""
    path = folder / "scenario.json"
    path.write_bytes(msgspec.json.encode(scenario))
    argv = ["emulate", "--scenario", str(path), "--scale", repr(scale), "--output-tokens", "1", "--json"]
    with _loadwise(argv, folder / "emulate.log") as (said, process):
        yield said["urls"], process


def pool_of(scenario: Scenario, urls: Mapping[str, str]) -> dict[str, Any]:
    """The scenario's pool with the addresses of its engines."""
    backends = [{**backend, "url": urls[backend["name"]]} for backend in scenario.pool["backends"]]
    return {**scenario.pool, "backends": backends}


@contextlib.contextmanager
def serving(
    scenario: Scenario, urls: Mapping[str, str], folder: Path, *, scale: float
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`loadwise serve` for a scenario's pool in front of engines that run; gives its address."""
    settings = {**GATEWAY, "port": 0, "journal": str(folder / "journal"), "time_scale": scale}
    settings["probe_interval_s"] = scenario.signals.every_s
    path = folder / "pool.json"
    path.write_text(json.dumps({**pool_of(scenario, urls), "gateway": settings}))
    with _loadwise(["serve", str(path), "--json"], folder / "serve.log") as (said, process):
        yield said["url"], process


@contextlib.contextmanager
def site(scenario: Scenario, folder: Path, *, scale: float) -> Iterator[Site]:
    """Engines and a gateway of one time: `gateway.time_scale` is the emulator's scale."""
    with (
        emulated(scenario, folder, scale=scale) as (urls, engines),
        serving(scenario, urls, folder, scale=scale) as (url, gateway),
    ):
        yield Site(url, urls, {"engines": engines, "gateway": gateway})
