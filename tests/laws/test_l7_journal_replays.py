"""Law L7: a journal replays to the same commands, whatever happened in it, however often its host died."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.journal import snapshot
from loadwise.journal.entry import Header, make_header
from loadwise.journal.parity import replay
from loadwise.journal.recover import recover, resume
from loadwise.kernel.commands import Command, Dispatch, SetTimer
from loadwise.kernel.events import (
    AttemptEnded,
    BackendChanged,
    Event,
    HostRestarted,
    ProgramEnded,
    SignalsObserved,
    TimerFired,
    TurnAbandoned,
    TurnArrived,
    VerdictArrived,
)
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.stack import Stack
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind
from loadwise.settings import config_from_builtins, open_stack, parse_config

POOL = {
    "models": {
        "large": {"usd_per_million": {"input": 1.0, "output": 5.0}},
        "small": {"usd_per_million": {"input": 0.1, "output": 0.4}},
    },
    "backends": [
        {"name": "a", "model": "large", "slots": 2},
        {"name": "b", "model": "small", "kv_tokens": 30_000},
        {"name": "c", "model": "small", "slots": 2},
    ],
}
PRESETS = ("loadwise", "thompson", "random", "oracle", "round_robin")
ACTIONS = ("arrive", "answer", "fail", "abandon", "end", "verdict", "signal", "down", "up", "wait", "die")

Act = tuple[str, int]
acts = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), max_size=60)


def header(preset: str, seed: int = 7, **router: Any) -> Header:
    config = parse_config({**POOL, "preset": preset, "router": router})
    return make_header(msgspec.to_builtins(config), seed=seed, host="sim")


class ToyHost:
    """Turns acts into events that fit what the stack asked for, journals them, and dies when told."""

    def __init__(self, path: Path, of: Header) -> None:
        self.path = path
        self.header = of
        self.at_s = 0.0
        self.timer_at_s: float | None = None
        self.running: list[Dispatch] = []
        self.turn_ids = itertools.count(1)
        self.start()

    def start(self) -> None:
        self.writer, recovered = resume(self.path, self.header, segment_bytes=4000)
        assert isinstance(recovered.machine, Stack)
        self.stack = recovered.machine
        assert recovered.messages == ()

    def hear(self, event: Event) -> None:
        commands = self.stack.handle(event)
        self.writer.append(event, commands)
        self.writer.flush()
        self.stack.check()
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        match command:
            case Dispatch():
                self.running.append(command)
            case SetTimer():
                self.timer_at_s = command.fires_at_s

    def act(self, act: str, n: int) -> None:
        self.at_s += 0.25 * (n % 5)
        if self.timer_at_s is not None and self.timer_at_s <= self.at_s:
            self.timer_at_s = None
            self.hear(TimerFired(at_s=self.at_s, timer="router"))
        for event in self.events(act, n):
            self.hear(event)

    def events(self, act: str, n: int) -> Iterator[Event]:
        at_s, program_id = self.at_s, f"p{n % 12}"
        running = self.running.pop(n % len(self.running)) if self.running and act in ("answer", "fail") else None
        if running is not None:
            outcome = AttemptOutcome.COMPLETED if act == "answer" else AttemptOutcome.REFUSED
            usage = Usage(prompt_tokens=100 + n, completion_tokens=n) if act == "answer" else Usage()
            yield AttemptEnded(
                at_s=at_s, turn_id=running.turn_id, attempt=running.attempt, outcome=outcome, usage=usage, status=200
            )
        match act:
            case "arrive":
                turn_id = next(self.turn_ids)
                yield TurnArrived(
                    at_s=at_s, turn_id=turn_id, program_id=program_id, prompt_tokens=50 + n, components=(n / 7, -0.5)
                )
            case "abandon":
                yield TurnAbandoned(at_s=at_s, turn_id=n % 20)
            case "end":
                yield ProgramEnded(at_s=at_s, program_id=program_id, artefacts={"answer": "42"})
            case "verdict":
                kind = (VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN)[n % 3]
                yield VerdictArrived(at_s=at_s, program_id=program_id, verdict=Verdict(verdict=kind, verifier="toy"))
            case "signal":
                values = {"running": float(n % 9), "kv_used_ratio": (n % 100) / 100}
                yield SignalsObserved(at_s=at_s, backend_id="abc"[n % 3], values=values, observed_at_s=at_s)
            case "down" | "up":
                yield BackendChanged(at_s=at_s, backend_id="abc"[n % 3], health=BackendHealth(act))
            case "wait":
                self.at_s += 60.0 * n
            case "die":
                self.die()
                yield HostRestarted(at_s=at_s)

    def die(self) -> None:
        """As after `kill -9`: what was flushed stands, all else is gone; then start again from the journal."""
        state = self.stack.dump()
        self.writer.close()
        self.running.clear()
        self.start()
        assert self.stack.dump() == state


def run(path: Path, of: Header, script: list[Act]) -> ToyHost:
    host = ToyHost(path, of)
    for act, n in script:
        host.act(act, n)
    host.writer.close()
    return host


@given(script=acts, preset=st.sampled_from(PRESETS))
@settings(max_examples=40, deadline=None)
def test_l7_a_journal_replays(script: list[Act], preset: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Under every preset, through failures, restarts, snapshots and late verdicts, replay repeats every command."""
    path = tmp_path_factory.mktemp("l7") / "j"
    host = run(path, header(preset), script)
    report = replay(path)
    assert report.holds, str(report.mismatch)
    assert report.worst_score_difference == 0.0
    assert report.n_entries == host.writer.last_sequence
    assert recover(path).machine.dump() == host.stack.dump()


SCRIPT: list[Act] = [
    (act, 13 * i + 12 * k) for i in range(12) for k, act in enumerate(("arrive", "signal", "answer", "end", "verdict"))
]


def test_l7_another_seed_is_caught_at_the_first_decision(tmp_path: Path) -> None:
    """A stack of another seed draws otherwise, and replay shows the first decision that did."""
    run(tmp_path / "j", header("random"), SCRIPT)
    report = replay(tmp_path / "j", lambda of: open_stack(config_from_builtins(of.config), of.seed + 1))
    assert report.mismatch is not None
    assert report.mismatch.event == "TurnArrived"


def test_l7_another_configuration_is_caught_at_the_first_decision(tmp_path: Path) -> None:
    """A stack that explores more gives other scores at once, whatever it chooses."""
    run(tmp_path / "j", header("oracle"), SCRIPT)
    other = header("oracle", exploration=0.7)
    report = replay(tmp_path / "j", lambda of: open_stack(config_from_builtins(other.config), of.seed))
    assert report.mismatch is not None
    assert report.mismatch.sequence == 1


def test_l6_holds_at_any_pace_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a snapshot is on disk at once, or only when somebody waits for it, the same files are left."""
    write, begin, wait = snapshot.write_snapshot, snapshot.SnapshotWriter.write, snapshot.SnapshotWriter.wait
    is_awaited = threading.Event()

    def written_at_once(writer: snapshot.SnapshotWriter, *what: Any) -> None:
        begin(writer, *what)
        wait(writer)

    def written_late(*what: Any) -> None:
        assert is_awaited.wait(30)
        write(*what)

    def awaited(writer: snapshot.SnapshotWriter) -> None:
        is_awaited.set()
        wait(writer)
        is_awaited.clear()

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.SnapshotWriter, "write", written_at_once)
        run(tmp_path / "fast", header("loadwise"), SCRIPT)
    monkeypatch.setattr(snapshot, "write_snapshot", written_late)
    monkeypatch.setattr(snapshot.SnapshotWriter, "wait", awaited)
    run(tmp_path / "slow", header("loadwise"), SCRIPT)
    fast, slow = (
        {p.name: p.read_bytes() for p in (tmp_path / pace).iterdir() if p.name != "lock"} for pace in ("fast", "slow")
    )
    assert fast == slow
    assert sum(name.endswith(".snapshot") for name in fast) >= snapshot.SNAPSHOTS_KEPT


def test_l7_and_l6_hold_under_any_hash_seed(tmp_path: Path) -> None:
    """The same script under three hash seeds leaves the same bytes, and each process replays the others' journal."""
    code = (
        "import sys, pathlib, test_l7_journal_replays as t; from loadwise.journal.parity import replay; "
        "path = pathlib.Path(sys.argv[1]); host = t.run(path, t.header('loadwise'), t.SCRIPT); "
        "assert all(replay(j).holds for j in path.parent.iterdir() if j.is_dir())"
    )
    journals = []
    for hash_seed in ("0", "1", "4242"):
        environment = os.environ | {
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        path = tmp_path / hash_seed
        subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=True)
        journals.append({p.name: p.read_bytes() for p in path.iterdir() if p.name != "lock"})
    assert journals[0] == journals[1] == journals[2]
    assert len(journals[0]) > 2
