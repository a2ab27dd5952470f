"""What `why` and `story` say of waits is what turns waited, however that ended."""

from pathlib import Path

import pytest
from journal_site import COMPLETED, Site, arrival, end

from loadwise.journal.explain import why
from loadwise.journal.explanation import Explanation
from loadwise.journal.explanation_text import render_why
from loadwise.kernel.events import (
    Event,
    HostRestarted,
    ProgramEnded,
    TimerFired,
    TurnAbandoned,
)
from loadwise.kernel.work import AttemptOutcome, EndReason, ProgramState


def told(path: Path, *events: Event, **router: object) -> tuple[Site, Explanation]:
    """Of program p after these events, on one slot of `small` with turns held for 60 s at most."""
    site = Site(path, hold_max_s=60.0, **router)
    site.live(events)
    return site, why(path, "p")


TAKEN = (arrival(1.0, 1, "q"),)
"""q runs on the only slot."""
FREED = (end(99.0, 1), ProgramEnded(at_s=100.0, program_id="q"), arrival(101.0, 9, "p"), end(103.0, 9))
"""q is over, and a turn of p runs at once."""
ANSWERED = (arrival(0.1, 5, "p"), end(0.2, 5), TimerFired(at_s=0.9, timer="router"))
"""p had an answer, and has lost its place since (`park_s`)."""


@pytest.mark.parametrize(
    ("ending", "waited_s"),
    [
        (TimerFired(at_s=63.0, timer="router"), 60.0),
        (TurnAbandoned(at_s=8.5, turn_id=2), 5.5),
        (HostRestarted(at_s=9.0), 6.0),
    ],
    ids=["evicted", "left", "restarted"],
)
@pytest.mark.parametrize("before", [(), ANSWERED], ids=["new", "answered"])
def test_a_turn_that_waited_in_vain_is_counted_when_its_program_goes_on(
    before: tuple[Event, ...], ending: Event, waited_s: float, tmp_path: Path
) -> None:
    """Held until it was evicted, left or lost; the next turn ran at once: the program waited none the less."""
    site, said = told(tmp_path / "j", *before, *TAKEN, arrival(3.0, 2, "p"), ending, *FREED, park_s=0.5)
    assert said.wait_s == pytest.approx(waited_s) and said.waiting == ()
    assert f"waited {waited_s:.3f} s" in render_why(said)
    if before:
        assert site.record("p").wait_s == said.wait_s  # as HTTP shows it


def test_a_program_that_was_forgotten_after_its_wait_has_waited(tmp_path: Path) -> None:
    """Evicted, and never seen again."""
    _, said = told(tmp_path / "j", *TAKEN, arrival(3.0, 2, "p"), TimerFired(at_s=63.0, timer="router"))
    assert (said.state, said.end_reason, said.wait_s) == (None, EndReason.REJECTED, 60.0)


def test_a_wait_in_vain_is_in_the_archive(tmp_path: Path) -> None:
    """The record that leaves memory says what `why` says."""
    site = Site(tmp_path / "j", hold_max_s=60.0, park_s=0.5, closed_s=10.0)
    cancelled = ProgramEnded(at_s=7.0, program_id="p", reason=EndReason.CANCELLED)
    site.live([*ANSWERED, *TAKEN, arrival(3.0, 2, "p"), cancelled, TimerFired(at_s=99.0, timer="router")])
    said = why(site.path, "p")
    assert said.record is not None and said.record.state is ProgramState.CANCELLED
    assert said.record.wait_s == said.wait_s == 4.0


def test_a_turn_that_waits_still_is_told_with_since_when(tmp_path: Path) -> None:
    """Its wait is not over, and not yet known: it is not said to be zero alone."""
    _, said = told(tmp_path / "j", *TAKEN, arrival(3.0, 2, "p"), TimerFired(at_s=20.0, timer="router"))
    assert [(one.turn_id, one.since_s) for one in said.waiting] == [(2, 3.0)]
    assert "waited 0.000 s\nturn 2 waits since 3.000 s, no backend of small had room" in render_why(said)
    assert why(tmp_path / "j", "p", None).waiting == ()


def test_a_second_attempt_is_told_with_the_wait_of_all(tmp_path: Path) -> None:
    """It went out at once after a wait of the first: the seconds are said to be those of both."""
    site = Site(tmp_path / "j")
    over, broken = ProgramEnded(at_s=5.0, program_id="q"), end(6.0, 2, AttemptOutcome.BROKEN)
    site.live([*TAKEN, arrival(3.0, 2, "p"), end(4.0, 1), over, broken, end(7.0, 2, COMPLETED, attempt=2)])
    lines = [line for line in site.text("p").splitlines() if "dispatch:" in line]
    assert "dispatched after 2.000 s of waiting" in lines[0] and "in all" not in lines[0]
    assert "attempt 2" in lines[1] and "dispatched after 2.000 s of waiting in all" in lines[1]
    assert why(site.path, "p").wait_s == 2.0
