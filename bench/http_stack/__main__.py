"""`python -m bench.http_stack [--json] [--quick]`: the same relay on four HTTP stacks, one core each.

The proxy under test has one core; engine stub and load generator share the other. Candidates stay up for the
whole bench and are asked in turns, so that a change of the machine's load hits all of them. Besides requests
per second (32 connections, not streamed, and streamed in 40 chunks that leave the engine one by one) the
processor time that one request costs the proxy is measured: it says the same and does not depend on who else
uses the machine.

Candidates live in an environment of their own, `.cache/bench-http-stack`, made here when it is missing; those
that cannot be started are skipped and counted (`skipped`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from bench import result
from bench.figures import check
from bench.http_stack import load
from bench.load import get
from bench.pinned import ROOT, Pinned, ProcessFailed, cores, environment, free_port
from bench.under_test import start_engine

CONNECTIONS = 32
READY_LIMIT_S = 20.0
CANDIDATES = ("protocols", "uvicorn", "aiohttp", "starlette")
_ENVIRONMENT = ROOT / ".cache" / "bench-http-stack"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_ROUTE = "/v1/chat/completions"

Runs = dict[str, list[float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.http_stack", description="The same relay on four HTTP stacks."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="finish within a minute, with wider error")
    options = parser.parse_args()
    rounds, seconds = (2, 1) if options.quick else (5, 3)
    load_before = os.getloadavg()[0]
    proxy_core, other_core = cores()
    python = _environment()
    runs: Runs = {}
    with contextlib.ExitStack() as stack:
        process, endpoint = start_engine(other_core)
        stack.enter_context(process)
        engine = f"http://127.0.0.1:{endpoint.port}"
        urls: dict[str, tuple[str, Pinned | None]] = {"engine": (engine, None)}
        for candidate in CANDIDATES:
            started = _start(candidate, python, engine, proxy_core)
            if started is not None:
                urls[candidate] = (started[0], stack.enter_context(started[1]))
        for number in range(rounds):
            for name, (url, process) in urls.items():
                _measure(runs, name, url, process, other_core, seconds)
            _say(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]}")
    _print(runs, load_before, len(urls) - 1, rounds, seconds, options.json)


def _measure(runs: Runs, name: str, url: str, process: Pinned | None, core: int, seconds: float) -> None:
    for kind in ("plain", "stream"):
        payload = load.body(stream=kind == "stream")
        cpu_s = process.cpu_s() if process else 0.0
        done = load.closed(url + _ROUTE, payload=payload, core=core, connections=CONNECTIONS, seconds=seconds)
        runs.setdefault(f"{name}.{kind}.rps", []).append(done.rps)
        runs.setdefault(f"{name}.{kind}.errors", []).append(done.errors)
        if process and done.requests:
            spent_s = process.cpu_s() - cpu_s
            runs.setdefault(f"{name}.{kind}.cpu_us", []).append(spent_s / done.requests * 1e6)


def _print(runs: Runs, load_before: float, started: int, rounds: int, seconds: float, as_json: bool) -> None:
    values: dict[str, float] = {}
    ci95: dict[str, tuple[float, float]] = {}
    for key, figures in runs.items():
        if key.endswith(".errors"):
            values[key] = sum(figures)
        else:
            values[key], ci95[key] = statistics.median(figures), (min(figures), max(figures))
    values["skipped"] = len(CANDIDATES) - started
    checks = [check(key, "<=", 0, values.get(key)) for key in ("protocols.plain.errors", "protocols.stream.errors")]
    for kind in ("plain", "stream"):
        others = [values[key] for name in CANDIDATES[1:] if (key := f"{name}.{kind}.cpu_us") in values]
        if others:
            key = f"protocols.{kind}.cpu_us"
            checks.append(check(key, "<=", min(others), values.get(key)))
    proxy_core, other_core = cores()
    config = {
        "connections": CONNECTIONS,
        "stream_chunks": 40,
        "rounds": rounds,
        "seconds": seconds,
        "cores_shared": proxy_core == other_core,
        "load": "wrk" if shutil.which("wrk") else "own client (wrk is not installed)",
        "interval": "range of the rounds",
        "load_average": [load_before, os.getloadavg()[0]],
    }
    result.show(result.build("http_stack", values=values, config=config, ci95=ci95, checks=checks), as_json=as_json)


def _start(name: str, python: str | None, engine: str, core: int) -> tuple[str, Pinned] | None:
    interpreter = sys.executable if name == "protocols" else python
    if interpreter is None:
        return None
    port = free_port()
    argv = [interpreter, "-m", f"bench.http_stack.proxy_{name}", engine, str(port)]
    process = Pinned(name, argv, core, environment(), ROOT)
    try:
        process.wait_ready(lambda: get(port, "/v1/models") is not None, READY_LIMIT_S)
    except ProcessFailed as problem:
        _say(f"skipped {name}: {problem}")
        process.stop()
        return None
    return f"http://127.0.0.1:{port}", process


def _environment() -> str | None:
    """Interpreter of the candidates' environment, made if it is missing; None if that fails."""
    python = _ENVIRONMENT / "bin" / "python"
    done = _ENVIRONMENT / "installed.txt"
    wanted = _REQUIREMENTS.read_text()
    if done.exists() and done.read_text() == wanted:
        return str(python)
    _say(f"making {_ENVIRONMENT}")
    try:
        venv.create(_ENVIRONMENT, with_pip=True, clear=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "-r",
            str(_REQUIREMENTS),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as problem:
        _say(f"no environment for the other candidates: {problem}")
        return None
    done.write_text(wanted)
    return str(python)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
