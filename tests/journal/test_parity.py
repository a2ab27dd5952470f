"""Replay proves that the same events lead to the same commands, or shows the first that did not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from journal_fakes import FakeMachine, header, journal, life, make_machine

from loadwise.journal.parity import SCORE_TOLERANCE, replay
from loadwise.journal.reader import read
from loadwise.journal.recover import recover
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import Command, RecordDecision
from loadwise.kernel.errors import JournalError, UnknownProgram
from loadwise.kernel.events import Event, VerdictArrived
from loadwise.settings import open_stack, parse_config


def test_a_journal_replays(tmp_path: Path) -> None:
    """The machine of the header repeats every command, to the last digit on the same machine."""
    journal(tmp_path / "j", life(20), segment_bytes=5000)
    report = replay(tmp_path / "j", make_machine)
    assert report.holds
    assert (report.n_entries, report.n_decisions, report.worst_score_difference) == (120, 20, 0.0)
    assert report.n_commands == 14 * 5 + 6 * 6
    assert msgspec.json.decode(msgspec.json.encode(report))["n_entries"] == 120


def test_a_journal_without_its_first_segments_replays(tmp_path: Path) -> None:
    """Where old segments are gone, replay begins at the snapshot that stands for them."""
    journal(tmp_path / "j", life(30), segment_bytes=2000, keep_segments=2)
    report = replay(tmp_path / "j", make_machine)
    assert report.holds
    assert 0 < report.n_entries < 100
    assert read(tmp_path / "j").header.first_sequence == 180 - report.n_entries + 1


@pytest.mark.parametrize(("seed", "bonus"), [(8, 0.1), (7, 0.2), (7, 0.1 + 1e-6)])
def test_another_seed_or_configuration_is_caught_at_the_first_decision(seed: int, bonus: float, tmp_path: Path) -> None:
    """The first decision that was made otherwise is shown, even where it chose the same model."""
    journal(tmp_path / "j", life(5))
    report = replay(tmp_path / "j", lambda of: FakeMachine(seed, bonus))
    assert report.mismatch is not None
    assert not report.holds
    assert (report.mismatch.sequence, report.mismatch.event) == (2, "TurnArrived")
    assert isinstance(report.mismatch.expected[0], RecordDecision)
    assert isinstance(report.mismatch.actual[0], RecordDecision)
    assert report.mismatch.expected != report.mismatch.actual[:1]
    assert str(report.mismatch).startswith("sequence 2 (TurnArrived at 0.000000 s): ")


class Drifting(FakeMachine):
    """Its scores are off by a share of `drift`, as another machine's linear algebra would have them."""

    drift = 0.0

    def handle(self, event: Event) -> list[Command]:
        return [self._drifted(command) for command in super().handle(event)]

    def _drifted(self, command: Command) -> Command:
        if not isinstance(command, RecordDecision):
            return command
        views = [msgspec.structs.replace(v, score=v.score * (1 + self.drift)) for v in command.candidates if v.score]
        return msgspec.structs.replace(command, candidates=tuple(views))


@pytest.mark.parametrize(("drift", "holds"), [(1e-12, True), (1e-6, False)])
def test_scores_may_differ_in_their_last_digits(drift: float, holds: bool, tmp_path: Path) -> None:
    """A difference below the tolerance holds and is reported; one above it is a mismatch."""
    journal(tmp_path / "j", life(5))

    def make(of: Any) -> Drifting:
        machine = Drifting(of.seed, of.config["bonus"])
        machine.drift = drift
        return machine

    report = replay(tmp_path / "j", make)
    assert report.holds == holds
    assert (0 < report.worst_score_difference <= SCORE_TOLERANCE) == holds
    assert report.worst_score_sequence > 0


class Unpropensed(FakeMachine):
    """Forgets to say how probable its choice was."""

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        for i, command in enumerate(commands):
            if isinstance(command, RecordDecision):
                views = tuple(msgspec.structs.replace(view, propensity=None) for view in command.candidates)
                commands[i] = msgspec.structs.replace(command, candidates=views)
        return commands


def test_an_unknown_number_is_not_a_number(tmp_path: Path) -> None:
    """A propensity that is missing in the replay is a mismatch, whatever its recorded value."""
    journal(tmp_path / "j", life(1))
    report = replay(tmp_path / "j", lambda of: Unpropensed(of.seed, of.config["bonus"]))
    assert report.mismatch is not None
    assert report.mismatch.what == "scores differ by inf"


class Refusing(FakeMachine):
    """Does not take verdicts."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, VerdictArrived):
            raise UnknownProgram(f"no program {event.program_id!r}")
        return super().handle(event)


def test_a_machine_that_raises_is_a_mismatch(tmp_path: Path) -> None:
    """An error that the recorded run did not have is shown where it came."""
    journal(tmp_path / "j", life(2))
    report = replay(tmp_path / "j", lambda of: Refusing(of.seed, of.config["bonus"]))
    assert report.mismatch is not None
    assert (report.mismatch.sequence, report.n_entries) == (6, 5)
    assert report.mismatch.what == "the machine raised UnknownProgram: no program 'p0'"


def test_a_torn_tail_is_counted_and_left(tmp_path: Path) -> None:
    """Replay reads; it does not repair."""
    journal(tmp_path / "j.journal", life(2))
    torn = (tmp_path / "j.journal").read_bytes()[:-4]
    (tmp_path / "j.journal").write_bytes(torn)
    report = replay(tmp_path / "j.journal", make_machine)
    assert report.holds
    assert report.n_entries == 11
    assert report.truncated_bytes > 0
    assert (tmp_path / "j.journal").read_bytes() == torn


def test_no_journal_is_an_error(tmp_path: Path) -> None:
    """A path without a journal is named."""
    with pytest.raises(JournalError, match="does not exist"):
        replay(tmp_path / "nothing", make_machine)


def test_a_header_makes_its_own_machine(tmp_path: Path) -> None:
    """By default the stack of the header's configuration and seed replays and recovers."""
    config = parse_config({"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]})
    of = header(msgspec.to_builtins(config))
    stack = open_stack(config, of.seed)
    with JournalWriter(tmp_path / "j", of) as writer:
        for event in life(5):
            writer.append(event, stack.handle(event))
    report = replay(tmp_path / "j")
    assert report.holds
    assert report.n_decisions == 5
    assert recover(tmp_path / "j").machine.dump() == stack.dump()
