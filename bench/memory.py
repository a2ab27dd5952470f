"""Whether memory is flat: how much a stack grows from its 50,000th to its 150,000th finished program.

    python -m bench.memory --json [--quick]

No HTTP: the smallest possible world answers each command of the stack at once, in virtual time. Each program has two
turns, ends, is verified and leaves; what stays afterwards is what the stack keeps.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import os
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from bench import result
from bench.figures import check
from bench.pinned import resident_bytes
from loadwise.kernel.commands import Command, Dispatch, SetTimer, Verify
from loadwise.kernel.events import AttemptEnded, Event, ProgramEnded, TimerFired, TurnArrived, VerdictArrived
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind

TURNS = 2
BETWEEN_PROGRAMS_S = 0.1
GROWTH_MAX_MB = 5.0
_MB = 1e6

CONFIG = {
    "models": {
        "small": {"usd_per_million": {"input": 0.10, "output": 0.15}},
        "medium": {"usd_per_million": {"input": 0.32, "output": 3.20}},
        "large": {"usd_per_million": {"input": 1.00, "output": 5.00}},
    },
    "backends": [
        {"name": "a", "model": "small", "engine": "emulator", "slots": 64},
        {"name": "b", "model": "medium", "engine": "emulator", "slots": 64},
        {"name": "c", "model": "large", "engine": "emulator", "slots": 64},
    ],
    "router": {"policy": "linucb"},
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Between which finished programs growth is measured."""

    first: int
    last: int
    readings: int = 10


FULL = Span(first=50_000, last=150_000)
QUICK = Span(first=15_000, last=45_000)


class World:
    """Answers what a stack asks for at once; its clock moves only when it is told to."""

    def __init__(self, handle: Callable[[Event], list[Command]]) -> None:
        self._handle = handle
        self._timers: list[tuple[float, str]] = []
        self._fires_at_s: dict[str, float] = {}
        self._turn_id = 0
        self.now_s = 0.0
        self.finished = 0

    def program(self) -> None:
        """Let one program arrive, take its turns, end and be judged."""
        self.now_s += BETWEEN_PROGRAMS_S
        self._fire_due()
        program_id = ProgramId(f"program-{self.finished:09d}")
        for _ in range(TURNS):
            self._turn_id += 1
            self._settle(
                TurnArrived(
                    at_s=self.now_s,
                    turn_id=TurnId(self._turn_id),
                    program_id=program_id,
                    prompt_tokens=400,
                    max_output_tokens=64,
                )
            )
        self._settle(ProgramEnded(at_s=self.now_s, program_id=program_id))
        # a world without a verifier of its own still reports, as a client would
        kind = VerdictKind.PASS if self.finished % 3 else VerdictKind.FAIL
        self._settle(VerdictArrived(at_s=self.now_s, program_id=program_id, verdict=Verdict(verdict=kind)))
        self.finished += 1

    def _fire_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now_s:
            fires_at_s, timer = heapq.heappop(self._timers)
            if self._fires_at_s.get(timer) == fires_at_s:
                del self._fires_at_s[timer]
                self._settle(TimerFired(at_s=self.now_s, timer=timer))

    def _settle(self, event: Event) -> None:
        events = deque([event])
        while events:
            for command in self._handle(events.popleft()):
                events.extend(self._answer(command))

    def _answer(self, command: Command) -> list[Event]:
        if isinstance(command, Dispatch):
            return [
                AttemptEnded(
                    at_s=self.now_s,
                    turn_id=command.turn_id,
                    attempt=command.attempt,
                    outcome=AttemptOutcome.COMPLETED,
                    usage=Usage(prompt_tokens=400, completion_tokens=40),
                    status=200,
                    first_byte_at_s=self.now_s,
                )
            ]
        if isinstance(command, Verify):
            verdict = Verdict(verdict=VerdictKind.PASS, verifier=command.verifier)
            return [VerdictArrived(at_s=self.now_s, program_id=command.program_id, verdict=verdict)]
        if isinstance(command, SetTimer):
            self._fires_at_s[command.timer] = command.fires_at_s
            heapq.heappush(self._timers, (command.fires_at_s, command.timer))
        return []

    @property
    def pending_timers(self) -> int:
        """Timers set and not fired: the world's own memory, which must not be taken for the stack's."""
        return len(self._timers)


def open_handle(seed: int) -> Callable[[Event], list[Command]]:
    """Open the stack under test and return its `handle`."""
    import loadwise

    return loadwise.open_stack(CONFIG, seed).handle


def settled_bytes() -> int:
    """Return the resident memory of this process once garbage is gone."""
    gc.collect()
    return resident_bytes()


def measure(world: World, span: Span) -> dict[int, int]:
    """Return finished programs -> resident bytes, at even steps of the span, ends included."""
    found: dict[int, int] = {}
    step = max(1, (span.last - span.first) // span.readings)
    while world.finished < span.last:
        world.program()
        if world.finished >= span.first and (world.finished - span.first) % step == 0:
            found[world.finished] = settled_bytes()
            print(f"{world.finished} programs, {found[world.finished] / _MB:.1f} MB", file=sys.stderr)
    found[world.finished] = settled_bytes()
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure; return 0 if it ran."""
    parser = argparse.ArgumentParser(prog="bench.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="15,000 to 45,000 programs instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    span = QUICK if options.quick else FULL
    world = World(open_handle(options.seed))
    found = measure(world, span)
    growth_mb = (found[span.last] - found[span.first]) / _MB
    report = result.build(
        "memory",
        seeds=[options.seed],
        config={
            "span": msgspec.to_builtins(span),
            "turns_per_program": TURNS,
            "pending_timers_of_the_world": world.pending_timers,
            "load_average": round(os.getloadavg()[0], 2),
            "differs_from_what_a_user_runs": ["no HTTP, no journal", "every engine answers at once"],
        },
        values={
            "growth_mb": growth_mb,
            **{f"resident_mb.{count}": resident / _MB for count, resident in found.items()},
        },
        checks=[check("growth_mb", "<=", GROWTH_MAX_MB, growth_mb)],
    )
    result.show(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
