"""What the gateway costs: the same engine asked directly, through Loadwise and through other gateways, in one run.

    python -m bench.gateway --json [--quick] [--peer litellm,smg,vllm-router] [--runs 5]

The gateway under test has one core; the engine stub and the load have another. Each figure is measured on the engine
itself, on Loadwise and on each peer, one after the other, and all of that again for each run (A B C A B C), so that
what else happens on the machine falls on all alike. A figure is the median of its runs. An answer only counts whole:
before the load, each gateway's answers are compared with the engine's own, chunk by chunk; under load, a run with an
error, or with fewer bytes than whole answers have, is dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench import load, result, wrk
from bench.answers import Verified, verify
from bench.figures import ENGINE, Samples, summarise
from bench.load import PROGRAMS, Endpoint, LoadFailed
from bench.peers import PEERS, PeerUnavailable
from bench.peers import peer as peers
from bench.pinned import Pinned, ProcessFailed, cores, pinned_here
from bench.rate import constant_rate
from bench.under_test import CHUNKS, OURS, OURS_DIFFERS, REAL_EMBEDDER, answers, start_engine, start_loadwise

RATE_PER_S = 500.0
WHOLE_RATIO = 0.98
"""Of the bytes of a whole answer: dates and ids differ by a few, a lost chunk by more."""
WRK_MAX_S = 20
FAILURES = (LoadFailed, ProcessFailed, OSError, subprocess.TimeoutExpired)
"""What may go wrong with a gateway that is started or measured."""
FINAL = {"X-Loadwise-Final": "1"}
"""Ends a program with its first turn, so that a flood of new programs does not pile up open ones."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long each part of one run takes."""

    runs: int
    sequential_s: float
    rate_s: float
    wrk_s: int
    first_turn_s: int


FULL = Plan(runs=5, sequential_s=2.0, rate_s=6.0, wrk_s=5, first_turn_s=3)
QUICK = Plan(runs=3, sequential_s=0.5, rate_s=1.6, wrk_s=2, first_turn_s=1)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One thing under load."""

    endpoint: Endpoint
    process: Pinned
    first_turns: bool
    """Whether new programs are measured apart: only where a program means something, and on the engine itself."""

    @property
    def name(self) -> str:
        """The name in the report."""
        return self.endpoint.name


def say(text: str) -> None:
    """Talk goes to stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One run of the whole comparison: what was started, in the order in which it is measured."""

    def __init__(self, plan: Plan, threads: int, stack: contextlib.ExitStack) -> None:
        self.plan = plan
        self.threads = threads
        self.gateway_core, self.load_core = cores()
        self.targets: list[Target] = []
        self.verified: dict[str, Verified] = {}
        self.skipped: dict[str, str] = {}
        self.load_average: list[float] = []
        self.ready_s: dict[str, float] = {}
        self.samples = Samples()
        self._prefix = load.new_prefix()
        self._stack = stack

    def add(self, process: Pinned, endpoint: Endpoint, ready_limit_s: float, *, first_turns: bool = False) -> None:
        """Take a started process in, once it answers as the engine does."""
        self._stack.callback(process.stop)
        self.ready_s[endpoint.name] = round(process.wait_ready(partial(answers, endpoint), ready_limit_s), 2)
        self.verified[endpoint.name] = verify(endpoint, self._prefix, self.verified.get(ENGINE))
        self.targets.append(Target(endpoint=endpoint, process=process, first_turns=first_turns))
        say(f"{endpoint.name} answers whole after {self.ready_s[endpoint.name]:g} s")

    def add_peer(self, name: str, engine_url: str, engine_model: str) -> None:
        """Install, start and take in a peer; one that cannot be had is skipped with its reason."""
        peer = PEERS[name]
        try:
            started = peers.start(peer, engine_url, self.gateway_core, "sk-" + secrets.token_hex(24))
            endpoint = Endpoint(name=name, port=started.port, model=peer.model or engine_model, headers=started.headers)
            self.add(started.process, endpoint, peer.ready_limit_s)
        except (PeerUnavailable, *FAILURES) as exc:
            self.skipped[name] = str(exc)
            say(f"{name} is skipped: {exc}")

    def first_turn_embedded(self, process: Pinned, endpoint: Endpoint) -> None:
        """Measure first turns once more on a gateway of ours that embeds what they say."""
        self._stack.callback(process.stop)
        process.wait_ready(partial(answers, endpoint), 60.0)
        for run in range(self.plan.runs):
            latency_s = load.one_connection(endpoint, _new_programs(endpoint), self.plan.sequential_s)
            self.samples.put(OURS, "first_turn_embedded_p50_ms", run, latency_s * 1e3)

    def run(self) -> None:
        """Measure everything, `runs` times over."""
        measures = (self._sequential, self._rate, self._plain, self._stream, self._first_turn, self._first_turns)
        for run in range(self.plan.runs):
            self.load_average.append(round(os.getloadavg()[0], 2))
            say(f"run {run + 1} of {self.plan.runs}, load average {self.load_average[-1]}")
            for measure in measures:
                for target in tuple(self.targets):
                    self._measure(measure, target, run)
            for target in self.targets:
                self.samples.put(target.name, "resident_mb", run, target.process.resident_bytes() / 1e6)

    def _measure(self, measure: Callable[[Target, int], None], target: Target, run: int) -> None:
        try:
            measure(target, run)
            # requests of clients that have gone may still be under way in a slow gateway
            target.process.wait_ready(partial(answers, target.endpoint), load.ANSWER_LIMIT_S)
        except FAILURES as exc:
            if target.name not in PEERS:
                raise
            self.skipped[target.name] = f"in run {run + 1}: {exc}"
            self.targets.remove(target)
            say(f"{target.name} is skipped from now on: {exc}")

    def _requests(self, target: Target) -> list[bytes]:
        ids = (load.program_id(self._prefix, number) for number in range(PROGRAMS))
        return [load.request(target.endpoint, program, stream=False) for program in ids]

    def _sequential(self, target: Target, run: int) -> None:
        supply = itertools.cycle(self._requests(target))
        latency_s = load.one_connection(target.endpoint, supply, self.plan.sequential_s)
        self.samples.put(target.name, "p50_ms", run, latency_s * 1e3)

    def _first_turn(self, target: Target, run: int) -> None:
        if target.first_turns:
            latency_s = load.one_connection(target.endpoint, _new_programs(target.endpoint), self.plan.sequential_s)
            self.samples.put(target.name, "first_turn_p50_ms", run, latency_s * 1e3)

    def _rate(self, target: Target, run: int) -> None:
        met = constant_rate(target.endpoint, self._requests(target), RATE_PER_S, self.plan.rate_s)
        if not met.errors:
            self.samples.put(target.name, "p99_ms", run, met.p99_s * 1e3)
        self.samples.put(target.name, "lateness_p99_ms", run, met.lateness_p99_s * 1e3)
        self.samples.count(target.name, f"at {RATE_PER_S:g}/s, unanswered", met.unanswered)
        self.samples.count(target.name, f"at {RATE_PER_S:g}/s", met.errors)

    def _plain(self, target: Target, run: int) -> None:
        seen = self.verified[target.name]
        self._wrk(target, run, "plain", seen.plain_bytes, wrk_s(self.plan.wrk_s, seen.plain_s))

    def _stream(self, target: Target, run: int) -> None:
        seen = self.verified[target.name]
        self._wrk(target, run, "stream", seen.stream_bytes, wrk_s(self.plan.wrk_s, seen.stream_s))

    def _first_turns(self, target: Target, run: int) -> None:
        if target.first_turns:
            self._wrk(target, run, "first_turn", self.verified[target.name].plain_bytes, self.plan.first_turn_s)

    def _wrk(self, target: Target, run: int, kind: str, answer_bytes: int, duration_s: int) -> None:
        fresh = kind == "first_turn"
        used_s, began_at_s = target.process.cpu_s(), time.monotonic()
        met = wrk.run(
            target.endpoint,
            self.load_core,
            duration_s,
            stream=kind == "stream",
            prefix=load.new_prefix() if fresh else self._prefix,
            fresh=fresh,
            threads=self.threads,
            extra=FINAL if fresh else None,
        )
        busy_ratio = (target.process.cpu_s() - used_s) / (time.monotonic() - began_at_s)
        self.samples.put(target.name, f"busy_ratio.{kind}", run, busy_ratio)
        errors = met.errors + cut_short(met, answer_bytes)
        self.samples.count(target.name, kind, errors)
        if not errors:
            self.samples.put(target.name, f"rps.{kind}", run, met.per_s)
            if busy_ratio > 0.05:
                self.samples.put(target.name, f"rps_per_core.{kind}", run, met.per_s / busy_ratio)


def wrk_s(plan_s: int, round_s: float) -> int:
    """Return how long wrk runs: as planned, or eight rounds of 32 answers where one round takes long.

    Answers under way at the end do not count, which would halve the rate of a gateway that finishes two rounds.
    """
    return max(plan_s, min(WRK_MAX_S, math.ceil(8 * round_s)))


def cut_short(met: wrk.Counted, answer_bytes: int) -> int:
    """Return 1 if the answers of a run cannot all have been whole, by their bytes; else 0."""
    return int(met.bytes < WHOLE_RATIO * answer_bytes * met.requests)


def _new_programs(endpoint: Endpoint) -> Iterator[bytes]:
    prefix = load.new_prefix()
    for number in itertools.count():
        yield load.request(endpoint, load.program_id(prefix, number), stream=False, extra=FINAL)


def compare(plan: Plan, names: list[str], threads: int, *, ours: bool = True, embed: bool = True) -> dict[str, Any]:
    """Start everything, measure it and return the report's object.

    Raises:
        ProcessFailed: the stub or our own gateway did not come up.
        LoadFailed: one of those two answered wrongly, or wrk is missing.
    """
    wrk.require()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(plan, threads, stack)
        stack.enter_context(pinned_here(bench.load_core))
        process, engine = start_engine(bench.load_core)
        bench.add(process, engine, 30.0, first_turns=True)
        engine_url = f"http://127.0.0.1:{engine.port}"
        if ours:
            bench.add(*start_loadwise(directory, engine_url, bench.gateway_core), 30.0, first_turns=True)
        for name in names:
            bench.add_peer(name, engine_url, engine.model)
        bench.run()
        if ours and embed:
            embedded = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                bench.first_turn_embedded(*start_loadwise(embedded, engine_url, bench.gateway_core, REAL_EMBEDDER))
            except FAILURES as exc:
                bench.skipped[f"embedder {REAL_EMBEDDER}"] = str(exc)
    return _report(bench, ours=ours)


def _report(bench: Bench, *, ours: bool) -> dict[str, Any]:
    measured = [target.name for target in bench.targets if target.name in PEERS]
    figures = summarise(bench.samples, OURS if ours else None, measured, bench.verified, CHUNKS)
    config = {
        "cores": {"gateway": bench.gateway_core, "engine and load": bench.load_core},
        "programs": PROGRAMS,
        "body_bytes": len(load.body("auto", load.MARK, stream=False)),
        "rate_per_s": RATE_PER_S,
        "plan": msgspec.to_builtins(bench.plan),
        "wrk_threads": bench.threads,
        "load_average": bench.load_average,
        "ready_s": bench.ready_s,
        "differs_from_what_a_user_runs": {OURS: OURS_DIFFERS, **{name: PEERS[name].differs for name in measured}},
        "skipped": {"count": len(bench.skipped), "reasons": bench.skipped},
        "errors": bench.samples.errors,
        "ci95": "range over the runs; five cover the median with 94 %",
    }
    return result.build("gateway", config=config, **figures)


def _peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown peer {unknown[0]!r}; known are {', '.join(PEERS)}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; return 0 if it ran, whatever it found."""
    parser = argparse.ArgumentParser(prog="bench.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="short runs, within a minute without peers")
    parser.add_argument("--peer", type=_peer_names, default=[], help=f"any of {','.join(PEERS)}")
    parser.add_argument("--runs", type=int, help="how many times everything is measured")
    parser.add_argument("--wrk-threads", type=int, choices=(1, PROGRAMS), default=1)
    parser.add_argument("--peers-only", action="store_true", help="leave our own gateway out")
    options = parser.parse_args(argv)
    plan = QUICK if options.quick else FULL
    if options.runs is not None:
        if options.runs < 1:
            parser.error(f"--runs is {options.runs}, and must be 1 or more")
        plan = msgspec.structs.replace(plan, runs=options.runs)
    try:
        report = compare(plan, options.peer, options.wrk_threads, ours=not options.peers_only, embed=not options.quick)
    except FAILURES as exc:
        say(f"bench.gateway: {exc}")
        return 1
    result.show(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
