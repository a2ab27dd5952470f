"""What a journal costs: microseconds to append and flush an entry, entries per second read, replayed and recovered.

python -m bench.journal [--json] [--quick]

The entries are those of the real stack under preset `loadwise`: three models, forty features, three turns a program
and a verdict each.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from bench import result
from bench.figures import check
from loadwise.journal.commit import GroupCommit
from loadwise.journal.entry import Header, make_header
from loadwise.journal.parity import replay
from loadwise.journal.reader import read
from loadwise.journal.recover import recover
from loadwise.journal.regenerate import recorded_machine
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import Command
from loadwise.kernel.events import AttemptEnded, Event, ProgramEnded, TurnArrived, VerdictArrived
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind
from loadwise.settings import parse_config

SEED = 1
N_RUNS = 5
N_TURNS = 3
BOUNDS = {"append_us": 20.0, "append_decision_us": 40.0}
"""Several times what a quiet machine takes: a shared one must not fail the check by itself."""

Answered = list[tuple[Event, list[Command]]]


def header() -> Header:
    """A pool of three models, and a context of forty features."""
    prices = {"a": 1.0, "b": 0.3, "c": 0.1}
    config = parse_config(
        {
            "models": {name: {"usd_per_million": {"input": price}} for name, price in prices.items()},
            "backends": [{"name": f"{name}-0", "model": name, "slots": 64} for name in "abc"],
            "router": {"context": {"domains": [f"d{i}" for i in range(20)], "n_components": 16}},
        }
    )
    return make_header(msgspec.to_builtins(config), seed=SEED, host="sim")


def answered(n_programs: int) -> Answered:
    """Events of whole programs, and what the stack answers."""
    stack = recorded_machine(header())
    rng = np.random.default_rng(SEED)
    pairs: Answered = []

    def hear(event: Event) -> None:
        pairs.append((event, stack.handle(event)))

    for i in range(n_programs):
        at_s, program_id = i * 1.0, f"program-{i:08d}"
        for turn in range(N_TURNS):
            turn_id = N_TURNS * i + turn + 1
            components = tuple(rng.normal(size=16).tolist()) if turn == 0 else ()
            hear(
                TurnArrived(
                    at_s=at_s,
                    turn_id=turn_id,
                    program_id=program_id,
                    prompt_tokens=900,
                    components=components,
                    domain="d3",
                )
            )
            usage = Usage(prompt_tokens=900, completion_tokens=120, cached_tokens=512)
            outcome = AttemptOutcome.COMPLETED
            hear(
                AttemptEnded(at_s=at_s, turn_id=turn_id, attempt=1, outcome=outcome, usage=usage, first_byte_at_s=at_s)
            )
        hear(ProgramEnded(at_s=at_s, program_id=program_id))
        kind = VerdictKind.PASS if rng.random() < 0.6 else VerdictKind.FAIL
        hear(VerdictArrived(at_s=at_s, program_id=program_id, verdict=Verdict(verdict=kind, verifier="exact")))
    return pairs


def append_us(path: Path, pairs: Answered, *, flush_every: int) -> float:
    """Microseconds to append one entry; flushes, if any, included."""
    with JournalWriter(path, header(), segment_bytes=1 << 40) as writer:
        began = time.perf_counter()
        for n, (event, commands) in enumerate(pairs, 1):
            writer.append(event, commands)
            if n % flush_every == 0:
                writer.flush()
        return (time.perf_counter() - began) / len(pairs) * 1e6


def decision_us(path: Path, pairs: Answered, n: int) -> float:
    """Microseconds to append the entry of one decision."""
    event, commands = pairs[0]
    with JournalWriter(path, header(), segment_bytes=1 << 40) as writer:
        began = time.perf_counter()
        for _ in range(n):
            writer.append(event, commands)
        return (time.perf_counter() - began) / n * 1e6


def per_second(act: Callable[[], int]) -> float:
    """How many of what `act` counts it does in a second."""
    began = time.perf_counter()
    n = act()
    return n / (time.perf_counter() - began)


async def verdicts_per_s(path: Path, pairs: Answered, n: int) -> tuple[float, float]:
    """Acknowledged verdicts per second with 64 senders at once, and how many of them shared one sync."""
    event, commands = pairs[-1]
    with JournalWriter(path, header()) as writer:
        commit = GroupCommit(writer)

        async def sender() -> None:
            for _ in range(n // 64):
                writer.append(event, commands)
                await commit.wait()

        began = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(64)))
        took_s = time.perf_counter() - began
        commit.close()
    return n // 64 * 64 / took_s, n // 64 * 64 / commit.n_syncs


def measure(directory: Path, n_programs: int) -> dict[str, float]:
    """One run of everything."""
    pairs = answered(n_programs)
    values = {
        "append_us": append_us(directory / "a", pairs, flush_every=1 << 60),
        "append_decision_us": decision_us(directory / "d", pairs, n_programs),
        "append_flush_us": append_us(directory / "f", pairs, flush_every=1),
        "append_flush_of_8_us": append_us(directory / "j", pairs, flush_every=8),
    }
    size = sum(p.stat().st_size for p in (directory / "j").glob("*.journal"))
    values["entry_bytes"] = size / len(pairs)
    stack = recorded_machine(header())
    values["read_entries_per_s"] = per_second(lambda: sum(1 for _ in read(directory / "j")))
    values["machine_entries_per_s"] = per_second(
        lambda: sum(1 for event, _ in pairs if stack.handle(event) is not None)
    )
    values["replay_entries_per_s"] = per_second(lambda: _held(directory / "j"))
    values["recover_entries_per_s"] = per_second(lambda: recover(directory / "j").n_replayed)
    values["verdicts_per_s"], values["verdicts_per_sync"] = asyncio.run(
        verdicts_per_s(directory / "v", pairs, min(n_programs, 2048))
    )
    return values


def _held(path: Path) -> int:
    report = replay(path)
    if not report.holds:
        raise SystemExit(f"the journal does not replay: {report.mismatch}")
    return report.n_entries


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    n_programs = 500 if arguments.quick else 4000
    runs = []
    for _ in range(N_RUNS):
        with tempfile.TemporaryDirectory() as directory:
            runs.append(measure(Path(directory), n_programs))
    values = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    checks = [check(key, "<=", bound, values[key]) for key, bound in BOUNDS.items()]
    config = {"n_programs": n_programs, "n_turns": N_TURNS, "n_runs": N_RUNS, "load_average": os.getloadavg()[0]}
    built = result.build("journal", values=values, config=config, seeds=[SEED], checks=checks)
    result.show(built, as_json=arguments.json)


if __name__ == "__main__":
    main()
