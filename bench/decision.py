"""What a decision costs: choose, reserve and journal, embedding known; and a later turn of a bound program.

    python -m bench.decision --json [--quick]

No HTTP and no simulator: a stack of three models and a context of forty features takes events as the live host posts
them, and each event is appended to a journal on disk; the entry of a decision is also flushed, as the host does before
it dispatches. Timed is `handle` and `append` (and `flush` where the host flushes): a first turn, a later turn's
arrival, and a later turn whole (arrival and end).
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `loadwise serve` does, before numpy is loaded

import numpy as np

from bench import result
from loadwise.journal.entry import make_header
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import Command, RecordDecision
from loadwise.kernel.events import AttemptEnded, Event, ProgramEnded, TurnArrived, VerdictArrived
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.stack import Stack
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind
from loadwise.settings import Config, open_stack, parse_config

N_FEATURES = 40
COMPONENTS = 16
LATER_TURNS = 3
BOUNDS = (("p50_ms", 0.2), ("p99_ms", 1.0), ("bound_turn_p50_us", 50.0))


def pool() -> Config:
    """Three models; bias, 3 task types, 20 domains and 16 components make forty features."""
    models = {"small": (0.1, 0.15), "medium": (0.32, 3.2), "large": (1.0, 5.0)}
    domains = [f"domain-{i}" for i in range(N_FEATURES - 1 - 3 - COMPONENTS)]
    return parse_config(
        {
            "models": {name: {"usd_per_million": {"input": i, "output": o}} for name, (i, o) in models.items()},
            "backends": [{"name": f"{name}-1", "model": name, "kv_tokens": 2_000_000} for name in models],
            "router": {"policy": "linucb", "context": {"domains": domains, "n_components": COMPONENTS}},
            "task_types": {"patch": {}, "support": {}, "shell": {}},
        }
    )


class Timed:
    """A stack with its journal; says how long each event took."""

    def __init__(self, stack: Stack, writer: JournalWriter) -> None:
        self._stack = stack
        self._writer = writer

    def take(self, event: Event) -> float:
        """Seconds for one event, handled and journaled as the live host does it."""
        began_s = time.perf_counter()
        commands: list[Command] = self._stack.handle(event)
        self._writer.append(event, commands)
        for command in commands:
            if type(command) is RecordDecision:
                self._writer.flush()
                break
        return time.perf_counter() - began_s


def measure(n_programs: int, seed: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of every timed step over `n_programs` programs, a tenth of them first for warming up."""
    config = pool()
    writer = JournalWriter(folder, make_header(msgspec.to_builtins(config), seed=seed))
    timed = Timed(open_stack(config, seed), writer)
    rng = np.random.default_rng(seed)
    taken: dict[str, list[float]] = {"decision": [], "bound_arrival": [], "bound_turn": []}
    domains, task_types = config.router.context.domains, config.router.context.task_types
    at_s, turn = 0.0, 0
    for n in range(n_programs + n_programs // 10):
        if n == n_programs // 10:
            for seconds in taken.values():
                seconds.clear()
        at_s += 0.05
        program = ProgramId(f"p{n}")
        components = tuple((rng.normal(size=COMPONENTS) / COMPONENTS**0.5).tolist())
        facts: dict[str, Any] = {
            "task_type": str(rng.choice(task_types)),
            "domain": str(rng.choice(domains)),
            "components": components,
        }
        turn += 1
        taken["decision"].append(timed.take(_arrival(at_s, turn, program, **facts)))
        timed.take(_end(at_s, turn))
        for _ in range(LATER_TURNS):
            turn += 1
            arrival_s = timed.take(_arrival(at_s, turn, program))
            taken["bound_arrival"].append(arrival_s)
            taken["bound_turn"].append(arrival_s + timed.take(_end(at_s, turn)))
        writer.flush()
        timed.take(ProgramEnded(at_s=at_s, program_id=program))
        kind = VerdictKind.PASS if rng.random() < 0.6 else VerdictKind.FAIL
        timed.take(VerdictArrived(at_s=at_s, program_id=program, verdict=Verdict(verdict=kind)))
    writer.close()
    return taken


def _arrival(at_s: float, turn: int, program: ProgramId, **facts: Any) -> TurnArrived:
    return TurnArrived(at_s=at_s, turn_id=TurnId(turn), program_id=program, prompt_tokens=1500, **facts)


def _end(at_s: float, turn: int) -> AttemptEnded:
    return AttemptEnded(
        at_s=at_s,
        turn_id=TurnId(turn),
        attempt=1,
        outcome=AttemptOutcome.COMPLETED,
        usage=Usage(prompt_tokens=1500, completion_tokens=200, cached_tokens=1200),
        status=200,
        first_byte_at_s=at_s,
    )


def figures(taken: dict[str, list[float]]) -> dict[str, float]:
    """The run's percentiles."""

    def at(step: str, share: float, unit: float) -> float:
        return float(np.quantile(taken[step], share)) * unit

    return {
        "p50_ms": at("decision", 0.5, 1e3),
        "p99_ms": at("decision", 0.99, 1e3),
        "bound_turn_p50_us": at("bound_arrival", 0.5, 1e6),
        "bound_turn_p99_us": at("bound_arrival", 0.99, 1e6),
        "bound_turn_whole_p50_us": at("bound_turn", 0.5, 1e6),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.decision", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer programs, within a minute")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(argv)
    n_programs = 1000 if options.quick else 5000
    runs = []
    for seed in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="bench-decision-") as folder:
            gc.collect()
            runs.append(figures(measure(n_programs, seed, Path(folder) / "journal")))
    values = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    spread = {key: [min(run[key] for run in runs), max(run[key] for run in runs)] for key in runs[0]}
    checks = [{"key": key, "op": "<=", "bound": bound, "holds": values[key] <= bound} for key, bound in BOUNDS]
    config = {
        "load_average": list(os.getloadavg()),
        "models": 3,
        "features": N_FEATURES,
        "programs": n_programs,
        "ci95": "range over the runs",
        "journal": "on, flushed at each decision",
    }
    made = result.build("decision", values=values, config=config, seeds=range(options.runs), ci95=spread, checks=checks)
    result.show(made, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
