"""What verifiers cost those who are not judged: turns through a gateway whose verifiers sleep 60 s, beside one without.

    python -m bench.verification --json [--quick]

Two gateways, as a user starts them, on one engine stub. Both get the same turns; at one of them programs were finished
before whose verifier is `sleep 60`, so that two are being judged and the line behind them is full. Then first turns are
sent to both in turn, over one connection each, and finishes are timed. Also told: how long a sandbox takes from start
to end, and one run of small Python, each the median of some.
"""

import argparse
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import result
from bench.pinned import Pinned, ProcessFailed, cores, environment, free_port
from bench.under_test import start_engine
from loadwise.runner.monty import SmallPython
from loadwise.runner.sandbox import Bubblewrap, missing_for_bubblewrap
from loadwise.verify.check import FindingStatus, RunInSandbox, RunSmallPython

QUEUE_MAX = 50
AT_ONCE = 2
BOUNDS = (("added_p50_ms", "<=", 0.1), ("added_p99_ms", "<=", 2.0), ("queue", "<=", float(QUEUE_MAX)))
POOL = """\
models: {{small: {{}}, large: {{}}}}
backends:
  - {{name: a, model: small, url: "{engine_url}/v1", slots: 4096}}
  - {{name: b, model: large, url: "{engine_url}/v1", slots: 4096}}
task_types: {{work: {{verifier: {{{verifier}}}, unchecked: true}}}}
verification: {{concurrency: {{command: {at_once}}}, queue_max: {queue_max}}}
gateway: {{port: {port}, journal: "{journal}", embedder: hash}}
"""
VERIFIERS = {"reported": "kind: external", "sleeping": 'kind: command, run: "sleep 60"'}


class Client:
    """One kept connection to a gateway."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(self, path: str, body: object, **headers: str) -> float:
        """Milliseconds until the answer was read.

        Raises:
            ProcessFailed: it is not answered well.
        """
        raw = json.dumps(body).encode()
        began_s = time.perf_counter()
        self._connection.request("POST", path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = self._connection.getresponse()
        said = answer.read()
        took_ms = 1000.0 * (time.perf_counter() - began_s)
        if answer.status != 200:
            raise ProcessFailed(f"{path} answered {answer.status}: {said[:200]!r}")
        return took_ms

    def turn(self, program_id: str) -> float:
        """One first turn of a program."""
        body = {"model": "auto", "messages": [{"role": "user", "content": "Sort a list of numbers."}]}
        headers = {"X_Session_ID": program_id, "X_Loadwise_Task_Type": "work"}
        return self.post("/v1/chat/completions", body, **headers)

    def finish(self, program_id: str) -> float:
        """The end of a program."""
        return self.post(f"/v1/programs/{program_id}/finish", {})

    def metrics(self) -> str:
        """The page of figures."""
        self._connection.request("GET", "/metrics")
        return self._connection.getresponse().read().decode()


def start_gateway(directory: Path, engine_url: str, name: str, core: int) -> tuple[Pinned, int]:
    """A gateway with one kind of verifier, and its port."""
    port = free_port()
    directory.mkdir()
    pool = directory / "pool.yaml"
    pool.write_text(
        POOL.format(
            engine_url=engine_url,
            verifier=VERIFIERS[name],
            at_once=AT_ONCE,
            queue_max=QUEUE_MAX,
            port=port,
            journal=directory / "journal",
        )
    )
    process = Pinned(
        name, [sys.executable, "-m", "loadwise.cli.main", "serve", str(pool)], core, environment(), directory
    )

    def is_ready() -> bool:
        with contextlib.suppress(OSError, ProcessFailed, http.client.HTTPException):
            Client(port).turn("settling")
            return True
        return False

    try:
        process.wait_ready(is_ready, 30.0)
    except BaseException:
        process.stop()
        raise
    return process, port


def measure(n_turns: int, n_runs: int) -> dict[str, float]:
    """Figures of both gateways, the median of the runs."""
    here, there = cores()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engine, endpoint = start_engine(there)
        stack.callback(engine.stop)
        clients = {}
        for name in VERIFIERS:
            process, port = start_gateway(Path(folder, name), f"http://127.0.0.1:{endpoint.port}", name, here)
            stack.callback(process.stop)
            clients[name] = Client(port)
        for n in range(QUEUE_MAX + AT_ONCE + 10):
            clients["sleeping"].turn(f"fill-{n}")
            clients["sleeping"].finish(f"fill-{n}")
        for run in range(n_runs):
            measured = one_run(clients, run, n_turns)
            for key, value in measured.items():
                samples.setdefault(key, []).append(value)
        page = clients["sleeping"].metrics()
    figures = {key: statistics.median(values) for key, values in samples.items()}
    for kind in ("p50", "p99"):
        figures[f"added_{kind}_ms"] = figures[f"sleeping.{kind}_ms"] - figures[f"reported.{kind}_ms"]
    figures["queue"] = figure(page, 'loadwise_verifications_open{kind="command",state="waiting"}')
    figures["judging"] = figure(page, 'loadwise_verifications_open{kind="command",state="running"}')
    return figures


def one_run(clients: dict[str, Client], run: int, n_turns: int) -> dict[str, float]:
    """First turns and finishes at both gateways, one after the other, so that both meet the same weather."""
    turns: dict[str, list[float]] = {name: [] for name in clients}
    finishes: dict[str, list[float]] = {name: [] for name in clients}
    for n in range(n_turns):
        for name, client in clients.items():
            turns[name].append(client.turn(f"run-{run}-{n}"))
            if n % 10 == 0:
                finishes[name].append(client.finish(f"run-{run}-{n}"))
    measured = {}
    for name in clients:
        ordered = sorted(turns[name])
        measured[f"{name}.p50_ms"] = ordered[len(ordered) // 2]
        measured[f"{name}.p99_ms"] = ordered[len(ordered) * 99 // 100]
        measured[f"{name}.finish_p50_ms"] = statistics.median(finishes[name])
    return measured


def figure(page: str, name: str) -> float:
    """One figure of a page of metrics."""
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


def time_runners(n: int) -> dict[str, float]:
    """Milliseconds of one sandbox and of one small-Python run, medians; those that cannot be run here are left out."""
    found = {}
    if missing_for_bubblewrap() is None:
        sandbox, took = Bubblewrap(), []
        for _ in range(n):
            began_s = time.perf_counter()
            sandbox.run(RunInSandbox(argv=("python3", "-I", "-S", "-c", "pass")))
            took.append(1000.0 * (time.perf_counter() - began_s))
        found["sandbox_p50_ms"] = statistics.median(took)
    small = SmallPython()
    findings = [small.run(RunSmallPython(source="1 + 1")) for _ in range(n)]
    if findings[-1].status is FindingStatus.OK:
        found["small_python_p50_ms"] = statistics.median(1000.0 * finding.took_s for finding in findings)
    small.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.verification", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="within a minute")
    options = parser.parse_args(argv)
    n_turns, n_runs, n_sandboxes = (200, 1, 5) if options.quick else (1000, 5, 20)
    load_average = os.getloadavg()[0]
    values = measure(n_turns, n_runs) | time_runners(n_sandboxes)
    holds = {"<=": lambda value, bound: value <= bound}
    checks = [
        {"key": key, "op": op, "bound": bound, "holds": holds[op](values[key], bound)} for key, op, bound in BOUNDS
    ]
    config = {
        "load_average": load_average,
        "n_turns": n_turns,
        "runs": n_runs,
        "verifier": VERIFIERS["sleeping"],
        "embedder": "hash",
    }
    result.show(result.build("verification", values=values, config=config, checks=checks), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
