"""Law L7: the same events lead to the same commands.

Commands are compared exactly, by the digest that was recorded with each entry. The floats of decisions, propensities
and credits, whose last bits depend on the machine's linear algebra, are compared with what was recorded, to
`SCORE_TOLERANCE`.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loadwise.kernel.commands import CandidateView, Command, RecordCredit, RecordDecision, RecordPropensities
from loadwise.kernel.errors import Error
from loadwise.kernel.fact import Fact

from .entry import Entry, digest_commands
from .regenerate import MakeMachine, from_begin, recorded_machine

Record = RecordDecision | RecordPropensities | RecordCredit

SCORE_TOLERANCE = 1e-9
"""Relative to the larger of the two numbers, absolute below one."""


class Mismatch(Fact, frozen=True, kw_only=True):
    """The first entry whose replay went another way."""

    sequence: int
    at_s: float
    event: str
    what: str
    """`commands`, `scores`, or what the machine raised."""
    expected_digest: int
    actual_digest: int
    expected: tuple[Record, ...] = ()
    """What was recorded in full."""
    actual: tuple[Command, ...] = ()

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence} ({self.event} at {self.at_s:.6f} s): {self.what}; "
            f"expected {self.expected_digest:016x}, got {self.actual_digest:016x}"
        )


class ReplayReport(Fact, frozen=True, kw_only=True):
    """What replaying a journal found. It stops at the first mismatch: what follows one says nothing."""

    n_entries: int
    n_commands: int
    n_decisions: int
    worst_score_difference: float
    worst_score_sequence: int
    mismatch: Mismatch | None = None
    truncated_bytes: int = 0
    """Length of a torn tail, which is not replayed."""

    @property
    def holds(self) -> bool:
        """Whether L7 holds for this journal and machine."""
        return self.mismatch is None


def replay(path: str | Path, make_machine: MakeMachine = recorded_machine) -> ReplayReport:
    """Replay a journal and compare.

    Raises:
        JournalError: a journal that is missing or damaged.
    """
    run = from_begin(Path(path), make_machine)
    n_entries = n_commands = n_decisions = worst_sequence = 0
    worst = 0.0
    mismatch: Mismatch | None = None
    for entry in run.entries():
        try:
            commands = run.machine.handle(entry.event)
        except Error as error:
            mismatch = _mismatch(entry, (), f"the machine raised {type(error).__name__}: {error}")
            break
        n_entries += 1
        n_commands += len(commands)
        n_decisions += len(entry.decisions)
        if digest_commands(commands) != entry.digest:
            mismatch = _mismatch(entry, commands, "commands")
            break
        if entry.decisions or entry.propensities or entry.credits:
            difference = score_difference(entry, commands)
            if difference > worst:
                worst, worst_sequence = difference, entry.sequence
            if difference > SCORE_TOLERANCE:
                mismatch = _mismatch(entry, commands, f"scores differ by {difference:.3g}")
                break
    return ReplayReport(
        n_entries=n_entries,
        n_commands=n_commands,
        n_decisions=n_decisions,
        worst_score_difference=worst,
        worst_score_sequence=worst_sequence,
        mismatch=mismatch,
        truncated_bytes=run.torn.n_bytes if run.torn is not None else 0,
    )


def _mismatch(entry: Entry, commands: Sequence[Command], what: str) -> Mismatch:
    return Mismatch(
        sequence=entry.sequence,
        at_s=entry.event.at_s,
        event=type(entry.event).__name__,
        what=what,
        expected_digest=entry.digest,
        actual_digest=digest_commands(commands),
        expected=(*entry.decisions, *entry.propensities, *entry.credits),
        actual=tuple(commands),
    )


def score_difference(entry: Entry, commands: Sequence[Command]) -> float:
    """The largest difference between recorded and regenerated floats; infinite where one side has none.

    The digests are equal already, so the same decisions and credits stand in the same order.
    """
    recorded: list[Record] = [*entry.decisions, *entry.propensities, *entry.credits]
    again = [c for kind in (RecordDecision, RecordPropensities, RecordCredit) for c in commands if isinstance(c, kind)]
    expected = [number for record in recorded for number in _floats(record)]
    actual = [number for record in again for number in _floats(record)]
    if len(expected) != len(actual):
        return math.inf
    return max(map(_difference, expected, actual), default=0.0)


def _floats(record: Record) -> Iterator[float | None]:
    match record:
        case RecordDecision():
            yield from record.context
            for candidate in record.candidates:
                yield from _candidate_floats(candidate)
        case RecordPropensities():
            yield from record.propensities
        case RecordCredit():
            yield from (record.success, record.cost_usd, record.reward, record.replaced_reward)


def _candidate_floats(view: CandidateView) -> Iterator[float | None]:
    yield from (view.score, view.mean, view.width, view.propensity, view.headroom_ratio)
    yield from (view.expected_success, view.wait_s, view.wait_low_s, view.wait_high_s)
    for name in sorted(view.signals):
        signal = view.signals[name]
        yield from (signal.value, signal.observed_at_s)


def _difference(a: Any, b: Any) -> float:
    if a == b or (a is None and b is None):
        return 0.0
    if a is None or b is None or math.isinf(a) or math.isinf(b):
        return math.inf
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return float(abs(a - b) / max(1.0, abs(a), abs(b)))
