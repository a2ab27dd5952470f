"""What is told of a program is its own: another's events may only have led to what was done for it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from journal_fakes import header
from journal_site import COMPLETED, Site, arrival, end

from loadwise.journal.entry import Header
from loadwise.journal.explain import why
from loadwise.journal.explanation import Explanation
from loadwise.journal.explanation_text import render_why
from loadwise.journal.store import JournalWriter
from loadwise.journal.story import StoryLine, render_story, story
from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendHealth, BackendSpec
from loadwise.kernel.work import AttemptOutcome, EndReason, ProgramState, TurnOutcome, Verdict, VerdictKind

PASS = Verdict(verdict=VerdictKind.PASS, verifier="tests")

OTHERS = (
    e.TurnArrived(at_s=9.0, turn_id=8, program_id="q"),
    e.AttemptEnded(at_s=9.0, turn_id=7, attempt=1, outcome=COMPLETED),
    e.TurnAbandoned(at_s=9.0, turn_id=7),
    e.ProgramEnded(at_s=9.0, program_id="q"),
    e.VerdictArrived(at_s=9.0, program_id="q", verdict=PASS),
    e.SelectorAnswered(at_s=9.0, decision_id=77),
)
"""One event of each kind that belongs to a program, of another one."""
NOBODYS = (
    e.SignalsObserved(at_s=9.0, backend_id="b", values={}, observed_at_s=9.0),
    e.BackendAdded(at_s=9.0, backend=BackendSpec(name="c", model="m")),
    e.BackendChanged(at_s=9.0, backend_id="b", health=BackendHealth.UP),
    e.BackendRemoved(at_s=9.0, backend_id="c"),
    e.ModelForgotten(at_s=9.0, model="m"),
    e.TimerFired(at_s=9.0, timer="router"),
)


class Letting:
    """Holds the turn of p until another event comes, whatever it is."""

    def __init__(self, _: Header) -> None:
        self._n_events = 0

    def handle(self, event: e.Event) -> list[c.Command]:
        self._n_events += 1
        if self._n_events == 1:
            return [
                c.RecordDecision(
                    decision_id=1,
                    program_id="p",
                    policy="fake",
                    learner_version="1",
                    context_version="1",
                    context=(),
                    candidates=(),
                    chosen="m",
                )
            ]
        if self._n_events > 2:
            return []
        sent = c.Dispatch(turn_id=1, attempt=1, program_id="p", backend_id="b", model="m", decision_id=1, wait_s=8.2)
        refused = c.EndTurn(turn_id=7, outcome=TurnOutcome.REJECTED, status=503, code="full", message="of another")
        return [sent, refused]

    def check(self) -> None:
        """The fake has no laws."""

    def dump(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        """It has no state."""


def told_after(path: Path, event: e.Event) -> tuple[tuple[StoryLine, ...], Explanation]:
    """What is told of p, whose turn was sent out with `event`."""
    machine = Letting(header())
    with JournalWriter(path, header()) as writer:
        for one in (e.TurnArrived(at_s=0.8, turn_id=1, program_id="p"), event):
            writer.append(one, machine.handle(one))
    return story(path, "p", Letting), why(path, "p", Letting)


def test_every_kind_of_event_is_somebodys_or_nobodys() -> None:
    """A kind that joins the union must be put on one of the lists."""
    assert {*map(type, (*OTHERS, *NOBODYS)), e.HostRestarted} == set(get_args(e.Event))


@pytest.mark.parametrize("event", OTHERS, ids=lambda event: type(event).__name__)
def test_what_happened_to_another_program_is_not_told_as_this_ones(event: e.Event, tmp_path: Path) -> None:
    """Its event led to a dispatch of ours: the dispatch is told, with what occasioned it, and the event is not."""
    lines, explanation = told_after(tmp_path / "j", event)
    assert [(line.kind, line.is_command, bool(line.occasion)) for line in lines] == [
        ("turn_arrived", False, False),
        ("record_decision", True, False),
        ("held", False, False),
        ("dispatch", True, True),
    ]
    last = render_story(lines).splitlines()[-1]
    assert last.startswith(
        "2      9.000000 s  dispatch: attempt 1 of turn 1 to b (m), dispatched after 8.200 s of waiting"
    )
    assert last.endswith(f"(when {lines[-1].occasion})")
    assert (explanation.n_turns, explanation.verdicts, explanation.end_reason) == (1, (), None)
    assert (explanation.wait_s, explanation.refusals) == (8.2, ())
    assert render_why(explanation).startswith("program p: 1 turn, open\n") and "verdict" not in render_why(explanation)


@pytest.mark.parametrize("event", NOBODYS, ids=lambda event: type(event).__name__)
def test_what_is_nobodys_is_told_as_what_led_to_it(event: e.Event, tmp_path: Path) -> None:
    """A reading, a timer, an operator's word: the entry is told with its event, which cannot be mistaken."""
    lines, _ = told_after(tmp_path / "j", event)
    assert [line.is_command for line in lines[-2:]] == [False, True]
    assert all(line.occasion == "" for line in lines)


# --- by the real router ---


def test_a_verdict_that_frees_a_place_is_the_judged_programs_alone(tmp_path: Path) -> None:
    """q is judged while it holds the only slot; p, which waited for that, starts and has no verdict."""
    site = Site(tmp_path / "j")
    site.live(
        [
            arrival(1.0, 1, "q"),
            end(2.0, 1),
            arrival(3.0, 2, "p"),
            e.VerdictArrived(at_s=11.2, program_id="q", verdict=PASS),
        ]
    )
    assert why(site.path, "p").verdicts == () and why(site.path, "q").verdicts == (PASS,)
    assert site.text("p").splitlines()[-2:] == [
        "3      3.000000 s    -> held: turn 2 waits, no backend of small had room",
        "4     11.200000 s  dispatch: attempt 1 of turn 2 to b-small (small), dispatched after 8.200 s of waiting "
        "(when another program was judged)",
    ]
    assert "verdict_arrived: pass by tests" in site.text("q")


def test_why_says_of_a_state_what_http_says(tmp_path: Path) -> None:
    """Ended by its verdict, its last turn, silence, an operator, or not at all: state, reason and instant agree."""
    site = Site(tmp_path / "j", idle_s=50.0, budget_s=500.0)
    site.live(
        [
            *(arrival(1.0, 1, "judged"), end(2.0, 1), e.VerdictArrived(at_s=3.0, program_id="judged", verdict=PASS)),
            *(arrival(4.0, 2, "last", is_final=True), end(5.0, 2)),
            *(arrival(6.0, 3, "silent"), end(7.0, 3), e.TimerFired(at_s=99.0, timer="router")),
            *(arrival(100.0, 4, "stopped"), end(101.0, 4)),
            e.ProgramEnded(at_s=102.0, program_id="stopped", reason=EndReason.CANCELLED),
            arrival(103.0, 5, "running"),
        ]
    )
    found = {name: why(site.path, name) for name in ("judged", "last", "silent", "stopped", "running")}
    for name, said in found.items():
        record = site.record(name)
        assert (said.state, said.end_reason, said.ended_at_s) == (record.state, record.end_reason, record.ended_at_s)
        assert said.record is None  # it is in memory still
    assert [said.end_reason for said in found.values()] == ["verdict", "final", "idle", "cancelled", None]
    assert found["judged"].state is ProgramState.CLOSED
    assert render_why(found["judged"]).startswith("program judged: 1 turn, ended after 2.000 s (verdict)\n")
    assert render_why(found["running"]).startswith("program running: 1 turn, open\n")
    assert [why(site.path, name, None).end_reason for name in ("judged", "last", "running")] == [
        "verdict",
        "final",
        None,
    ]


def test_a_program_that_runs_again_is_open_again(tmp_path: Path) -> None:
    """A further attempt after a fail: what was told of the first one's end is over."""
    site = Site(tmp_path / "j", escalation={"optimism": 9.0})
    failed = e.VerdictArrived(at_s=3.0, program_id="p", verdict=Verdict(verdict=VerdictKind.FAIL, verifier="tests"))
    site.live(
        [arrival(1.0, 1, "p"), end(2.0, 1), e.ProgramEnded(at_s=2.5, program_id="p"), failed, arrival(4.0, 2, "p")]
    )
    assert site.record("p").model == "large"
    for make_machine in ({}, {"make_machine": None}):
        said = why(site.path, "p", **make_machine)
        assert (said.end_reason, said.ended_at_s, said.n_turns) == (None, None, 2)


def test_a_program_without_an_answer_is_not_called_open(tmp_path: Path) -> None:
    """Refused, failed, or left by its client: the router has forgotten it, and `why` says how it went."""
    site = Site(tmp_path / "j")
    site.live(
        [
            arrival(1.0, 1, "refused", model="nope"),
            *(arrival(2.0, 2, "left"), e.TurnAbandoned(at_s=2.5, turn_id=2)),
        ]
    )
    refused, left = why(site.path, "refused"), why(site.path, "left")
    assert (refused.end_reason, refused.ended_at_s) == (EndReason.REJECTED, 1.0)
    assert (left.end_reason, left.ended_at_s, left.state) == (EndReason.CANCELLED, 2.5, None)
    assert "ended after 0.500 s (cancelled)" in render_why(left)


def test_who_waits_for_a_word_is_not_said_to_wait_for_room(tmp_path: Path) -> None:
    """First for the selector, then for a place; what was sent out at once was never held."""
    site = Site(tmp_path / "j", selector={"url": "http://127.0.0.1:1/"})
    site.live(
        [
            *(arrival(1.0, 1, "q"), e.SelectorAnswered(at_s=1.1, decision_id=1, model="small")),
            *(arrival(2.0, 2, "p"), e.SelectorAnswered(at_s=2.1, decision_id=2, model="small")),
            *(end(3.0, 1), e.ProgramEnded(at_s=4.0, program_id="q")),
        ]
    )
    held = [(line.sequence, line.text) for line in story(site.path, "p") if line.kind == "held"]
    assert held == [
        (3, "turn 2 waits, the selector was asked for a model"),
        (4, "turn 2 waits, no backend of small had room"),
    ]
    assert "(when another program ended)" in site.text("p").splitlines()[-1]
    assert "dispatched after 0.100 s" in site.text("q") and site.text("q").count("held:") == 1


def test_who_starts_in_turn_is_said_to_wait_for_that(tmp_path: Path) -> None:
    """Under feedback in order a program that may not start yet has no model: no backend is blamed."""
    site = Site(tmp_path / "j", feedback={"arm": "sequential"})
    site.live([arrival(1.0, 1, "q"), arrival(2.0, 2, "p"), end(3.0, 1)])
    assert "held: turn 2 waits, its program may not start yet" in site.text("p")


def test_a_turn_whose_attempt_failed_is_held_again(tmp_path: Path) -> None:
    """The other replica is full: the turn is neither sent out nor ended, so it waits."""
    site = Site(tmp_path / "j", ["b-small", "c-small"])
    refused = end(3.0, 2, AttemptOutcome.REFUSED)
    over = e.ProgramEnded(at_s=5.0, program_id="q")
    site.live([arrival(1.0, 1, "q"), arrival(2.0, 2, "p"), refused, end(4.0, 1), over])
    kinds = [line.kind for line in story(site.path, "p")]
    assert kinds == ["turn_arrived", "record_decision", "dispatch", "attempt_ended", "held", "dispatch"]
    assert "attempt 2 of turn 2" in site.text("p") and "dispatched after 2.000 s of waiting" in site.text("p")


def test_a_turn_that_is_sent_out_or_refused_at_once_is_not_held(tmp_path: Path) -> None:
    """Companion: only what waits is said to wait."""
    site = Site(tmp_path / "j")
    site.live([arrival(1.0, 1, "p"), end(2.0, 1), arrival(3.0, 2, "p", model="nope"), arrival(4.0, 3, "p")])
    assert "held" not in site.text("p") and site.text("p").count("dispatched at once") == 2
