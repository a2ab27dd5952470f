"""A small machine with a learner, and events for it: what the journal's tests journal."""

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadwise.journal.entry import Header, make_header
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import (
    Archive,
    CandidateView,
    Command,
    Dispatch,
    ProgramRecord,
    RecordCredit,
    RecordDecision,
    SetTimer,
    Verify,
)
from loadwise.kernel.events import (
    AttemptEnded,
    Event,
    HostRestarted,
    ProgramEnded,
    SignalsObserved,
    TimerFired,
    TurnArrived,
    VerdictArrived,
)
from loadwise.kernel.pool import Signal
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import AttemptOutcome, ProgramState, Usage, Verdict, VerdictKind

MODELS = ("large", "small")
CONFIG: dict[str, Any] = {"bonus": 0.1, "models": list(MODELS)}


def header(config: dict[str, Any] | None = None, seed: int = 7, **fields: Any) -> Header:
    """The header under which the tests' journals are written."""
    return make_header(CONFIG if config is None else config, seed=seed, host="sim", **fields)


class FakeMachine:
    """Chooses between two models by mean reward and a draw, learns from verdicts, holds every third program."""

    def __init__(self, seed: int, bonus: float) -> None:
        self._streams = Streams(seed)
        self._bonus = bonus
        self.model_by_program: dict[str, tuple[int, str]] = {}
        self.held: dict[str, int] = {}
        self.totals = {model: [0.0, 0.0] for model in MODELS}
        self.queue_depth = (0.0, 0.0)
        self.n_decisions = 0
        self.n_restarts = 0

    def handle(self, event: Event) -> list[Command]:
        match event:
            case TurnArrived():
                return self._arrive(event)
            case ProgramEnded():
                return [Verify(program_id=event.program_id, verifier="exact")]
            case VerdictArrived():
                return self._credit(event)
            case SignalsObserved():
                self.queue_depth = (event.values.get("queue", 0.0), event.observed_at_s)
            case TimerFired():
                turn_id = self.held.pop(event.timer, None)
                return [] if turn_id is None else [self._dispatch(event.timer, turn_id, 1.5)]
            case HostRestarted():
                self.n_restarts += 1
        return []

    def check(self) -> None:
        """The fake has no laws."""

    def dump(self) -> bytes:
        fields = (self.model_by_program, self.held, self.totals, self.queue_depth, self.n_decisions, self.n_restarts)
        return msgspec.msgpack.encode(fields)

    def load(self, state: bytes) -> None:
        kind = tuple[dict[str, tuple[int, str]], dict[str, int], dict[str, list[float]], tuple[float, float], int, int]
        loaded = msgspec.msgpack.decode(state, type=kind, strict=False)
        self.model_by_program, self.held, self.totals, self.queue_depth, self.n_decisions, self.n_restarts = loaded

    def _arrive(self, event: TurnArrived) -> list[Command]:
        if event.program_id in self.model_by_program:
            return [self._dispatch(event.program_id, event.turn_id, 0.0)]
        self.n_decisions += 1
        decision_id = self.n_decisions
        rng = self._streams.at("policy", decision_id)
        means = [total / n if n else 0.5 for total, n in self.totals.values()]
        scores = [mean + self._bonus * rng.random() for mean in means]
        chosen = MODELS[scores.index(max(scores))]
        self.model_by_program[event.program_id] = (decision_id, chosen)
        value, observed_at_s = self.queue_depth
        decision = RecordDecision(
            decision_id=decision_id,
            program_id=event.program_id,
            policy="fake",
            learner_version="1",
            context_version="1",
            context=(1.0, *event.components),
            chosen=chosen,
            candidates=tuple(
                CandidateView(
                    candidate=model,
                    score=score,
                    mean=mean,
                    propensity=0.5,
                    signals={"queue": Signal(value=value, observed_at_s=observed_at_s)},
                )
                for model, mean, score in zip(MODELS, means, scores, strict=True)
            ),
        )
        if decision_id % 3 == 0:
            self.held[event.program_id] = event.turn_id
            return [decision, SetTimer(timer=event.program_id, fires_at_s=event.at_s + 1.5)]
        return [decision, self._dispatch(event.program_id, event.turn_id, 0.0)]

    def _dispatch(self, program_id: str, turn_id: int, wait_s: float) -> Dispatch:
        decision_id, model = self.model_by_program[program_id]
        return Dispatch(
            turn_id=turn_id,
            attempt=1,
            program_id=program_id,
            backend_id=f"{model}-0",
            model=model,
            decision_id=decision_id,
            wait_s=wait_s,
        )

    def _credit(self, event: VerdictArrived) -> list[Command]:
        decided = self.model_by_program.pop(event.program_id, None)
        if decided is None:
            return []
        decision_id, model = decided
        success = event.verdict.success or 0.0
        reward = 0.4 * success - 0.6 * 0.001
        self.totals[model][0] += reward
        self.totals[model][1] += 1.0
        record = ProgramRecord(program_id=event.program_id, state=ProgramState.CLOSED, model=model, reward=reward)
        credit = RecordCredit(
            decision_id=decision_id,
            program_id=event.program_id,
            model=model,
            success=success,
            cost_usd=0.001,
            reward=reward,
        )
        return [credit, Archive(program=record)]


def make_machine(of: Header) -> FakeMachine:
    """The machine that a header describes."""
    return FakeMachine(of.seed, of.config["bonus"])


def program_events(program_id: str, turn_id: int, at_s: float, *, passes: bool = True) -> list[Event]:
    """One program of one turn, with its reading, timer and verdict."""
    verdict = Verdict(verdict=VerdictKind.PASS if passes else VerdictKind.FAIL, verifier="exact")
    usage = Usage(prompt_tokens=100, completion_tokens=20)
    return [
        SignalsObserved(at_s=at_s, backend_id="large-0", values={"queue": float(turn_id)}, observed_at_s=at_s - 0.25),
        TurnArrived(at_s=at_s, turn_id=turn_id, program_id=program_id, prompt_tokens=100, components=(0.5, -0.25)),
        TimerFired(at_s=at_s + 1.5, timer=program_id),
        AttemptEnded(at_s=at_s + 2.0, turn_id=turn_id, attempt=1, outcome=AttemptOutcome.COMPLETED, usage=usage),
        ProgramEnded(at_s=at_s + 2.0, program_id=program_id, artefacts={"answer": "a secret"}),
        VerdictArrived(at_s=at_s + 3.0, program_id=program_id, verdict=verdict),
    ]


def life(n_programs: int, *, first: int = 0) -> list[Event]:
    """Programs one after the other, some of which fail."""
    return [
        event
        for i in range(first, first + n_programs)
        for event in program_events(f"p{i}", i, 4.0 * i, passes=i % 3 != 1)
    ]


def write(writer: JournalWriter, machine: FakeMachine, events: Sequence[Event]) -> None:
    """Do what a host does, without carrying out commands."""
    for event in events:
        writer.append(event, machine.handle(event))
        writer.flush()


def journal(path: Path, events: Sequence[Event], **options: Any) -> FakeMachine:
    """Write a whole journal; returns the machine as it stands at its end."""
    machine = make_machine(header())
    with JournalWriter(path, header(), dump=machine.dump, **options) as writer:
        write(writer, machine, events)
    return machine


def write_until_killed(path: str) -> None:
    """Write programs without end, and say on stdout how far the kernel has got them."""
    machine = make_machine(header())
    chance = random.Random(os.getpid())
    with JournalWriter(path, header(), dump=machine.dump, segment_bytes=20_000) as writer:
        i = 0
        while True:
            for event in program_events(f"p{i}", i, 4.0 * i):
                writer.append(event, machine.handle(event))
                if chance.random() < 0.5:
                    writer.flush()
                    os.write(1, b"%d\n" % writer.last_sequence)
            i += 1


if __name__ == "__main__":
    write_until_killed(sys.argv[1])
