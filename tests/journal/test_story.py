"""A program's story is complete and in order, and `why` shows what the decision rested on."""

from pathlib import Path

import msgspec
import pytest
from journal_fakes import FakeMachine, header, journal, life, make_machine, program_events, write

from loadwise.journal.entry import make_header
from loadwise.journal.explain import why
from loadwise.journal.explanation_text import render_why
from loadwise.journal.store import JournalWriter
from loadwise.journal.story import render_story, story
from loadwise.kernel.errors import JournalError, UnknownProgram
from loadwise.kernel.events import AttemptEnded, HostRestarted, TurnArrived, VerdictArrived
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage, Verdict, VerdictKind
from loadwise.settings import open_stack, parse_config


def test_a_story_tells_events_and_commands_in_order(tmp_path: Path) -> None:
    """Arrival, decision, dispatch after the hold, attempt, end, check, verdict, credit and archive: all of it, once."""
    journal(tmp_path / "j", life(6))
    lines = story(tmp_path / "j", "p2", make_machine)
    assert [(line.sequence, line.kind, line.is_command) for line in lines] == [
        (14, "turn_arrived", False),
        (14, "record_decision", True),
        (14, "held", False),
        (15, "timer_fired", False),
        (15, "dispatch", True),
        (16, "attempt_ended", False),
        (17, "program_ended", False),
        (17, "verify", True),
        (18, "verdict_arrived", False),
        (18, "record_credit", True),
        (18, "archive", True),
    ]
    assert [line.at_s for line in lines] == [8.0] * 3 + [9.5] * 2 + [10.0] * 3 + [11.0] * 3
    text = render_story(lines)
    assert "14      8.000000 s  turn_arrived: turn 2 of p2 for auto, about 100 tokens" in text
    assert "14      8.000000 s    -> held: turn 2 waits, no backend of large had room" in text
    assert "15      9.500000 s    -> dispatch: attempt 1 of turn 2 to large-0 (large), dispatched after 1.500 s" in text
    assert "attempt 1 of turn 2 completed, 100+20 tokens (0 cached)" in text
    assert "verdict_arrived: pass by exact" in text


def test_a_story_needs_no_machine(tmp_path: Path) -> None:
    """Without a machine what is recorded is told: events, decisions and credits."""
    journal(tmp_path / "j", life(6))
    kinds = [line.kind for line in story(tmp_path / "j", "p0", None)]
    assert kinds == [
        "turn_arrived",
        "record_decision",
        "attempt_ended",
        "program_ended",
        "verdict_arrived",
        "record_credit",
    ]


def test_a_restart_is_part_of_an_open_program(tmp_path: Path) -> None:
    """A host's death concerns whoever was open then, and nobody else."""
    machine = make_machine(header())
    with JournalWriter(tmp_path / "j", header()) as writer:
        write(writer, machine, [*life(1), *program_events("open", 1, 4.0)[:3], HostRestarted(at_s=8.0)])
    assert "host_restarted" in [line.kind for line in story(tmp_path / "j", "open", make_machine)]
    assert "host_restarted" not in [line.kind for line in story(tmp_path / "j", "p0", make_machine)]


def test_why_shows_what_the_decision_rested_on(tmp_path: Path) -> None:
    """Candidates with their numbers, signals with their ages, the wait, the verdict and what it earned."""
    journal(tmp_path / "j", life(6))
    explanation = why(tmp_path / "j", "p2", make_machine)
    (decision,) = explanation.decisions
    assert (decision.decision_id, decision.sequence, decision.at_s, decision.policy) == (3, 14, 8.0, "fake")
    assert decision.context == (1.0, 0.5, -0.25)
    assert [c.candidate for c in decision.candidates if c.is_chosen] == [decision.chosen]
    assert all(c.score is not None and c.mean is not None and c.propensity == 0.5 for c in decision.candidates)
    (signal,) = decision.candidates[0].signals
    assert (signal.name, signal.value, signal.age_s) == ("queue", 2.0, 0.25)
    assert (explanation.n_turns, explanation.wait_s, explanation.end_reason) == (1, 1.5, EndReason.FINISH)
    assert [v.verdict for v in explanation.verdicts] == [VerdictKind.PASS]
    assert explanation.reward == pytest.approx(0.4 - 0.6 * 0.001)
    assert explanation.record is not None
    assert explanation.is_exact
    text = render_why(explanation)
    assert text.startswith("program p2: 1 turn, ended after 2.000 s (finish)\ndecision 3 at 8.000 s: ")
    assert "queue = 2, 0.250 s old" in text
    assert "verdict: pass by exact" in text
    assert "waited 1.500 s" in text
    assert msgspec.json.decode(msgspec.json.encode(explanation))["program_id"] == "p2"


def test_why_without_a_machine_leaves_unknown_what_it_would_know(tmp_path: Path) -> None:
    """A wait that was not regenerated is unknown, not zero."""
    journal(tmp_path / "j", life(6))
    explanation = why(tmp_path / "j", "p2", None)
    assert (explanation.wait_s, explanation.backend_ids, explanation.record) == (None, (), None)
    assert len(explanation.decisions) == 1
    assert "waited" not in render_why(explanation)


def test_why_of_an_open_program(tmp_path: Path) -> None:
    """A program that has not ended says so."""
    journal(tmp_path / "j", program_events("p", 1, 4.0)[:2])
    assert render_why(why(tmp_path / "j", "p", make_machine)).startswith("program p: 1 turn, open\n")


def test_another_machine_is_noted(tmp_path: Path) -> None:
    """Commands that are not those recorded are told with a warning."""
    journal(tmp_path / "j", life(12))
    explanation = why(tmp_path / "j", "p11", lambda of: FakeMachine(of.seed, 5.0))
    assert not explanation.is_exact
    assert "commands may differ" in render_why(explanation)


@pytest.mark.parametrize("segment_bytes", [2000, 1 << 20])
@pytest.mark.parametrize("program_id", ["nobody", "", "p99"])
def test_an_unknown_program_is_an_error(program_id: str, segment_bytes: int, tmp_path: Path) -> None:
    """The error names the journal and the program."""
    journal(tmp_path / "j", life(6), segment_bytes=segment_bytes)
    for make in (make_machine, None):
        with pytest.raises(UnknownProgram, match=f"j' knows no program '{program_id}'"):
            story(tmp_path / "j", program_id, make)
        with pytest.raises(UnknownProgram):
            why(tmp_path / "j", program_id, make)


def test_a_story_begins_at_the_nearest_snapshot(tmp_path: Path) -> None:
    """In a long journal the segments that do not name the program are not replayed, and the story is the same."""
    journal(tmp_path / "short", life(30))
    journal(tmp_path / "long", life(30), segment_bytes=3000)
    handled = []

    class Counting(FakeMachine):
        def handle(self, event):  # type: ignore[no-untyped-def]
            handled.append(event)
            return super().handle(event)

    for program_id in ("p0", "p13", "p28"):
        whole = story(tmp_path / "short", program_id, make_machine)
        handled.clear()
        assert story(tmp_path / "long", program_id, lambda of: Counting(of.seed, of.config["bonus"])) == whole
        if program_id in ("p0", "p28"):
            assert len(handled) < 90


def test_no_journal_is_an_error(tmp_path: Path) -> None:
    """A missing journal is not an unknown program."""
    with pytest.raises(JournalError, match="does not exist"):
        story(tmp_path / "nothing", "p", make_machine)


def test_why_tells_the_attempts_of_a_program_apart(tmp_path: Path) -> None:
    """Two attempts have two credits, neither of which corrects the other; a corrected one counts as corrected."""
    config = parse_config(
        {
            "models": {name: {"usd_per_million": {"input": 1.0}} for name in ("small", "large")},
            "backends": [{"name": f"b-{name}", "model": name, "engine": "emulator"} for name in ("small", "large")],
            "router": {"policy": {"name": "fixed", "candidate": "small"}, "escalation": {"optimism": 9.0}},
        }
    )
    stack = open_stack(config, 0)
    with JournalWriter(tmp_path / "j", make_header(msgspec.to_builtins(config), seed=0, host="sim")) as writer:
        for number, kind in ((1, VerdictKind.FAIL), (2, VerdictKind.FAIL)):
            usage = Usage(prompt_tokens=1000 * number)
            for event in (
                TurnArrived(at_s=float(number), turn_id=TurnId(number), program_id=ProgramId("p"), is_final=True),
                AttemptEnded(
                    at_s=float(number), turn_id=TurnId(number), attempt=1, outcome=AttemptOutcome.COMPLETED, usage=usage
                ),
                VerdictArrived(at_s=float(number), program_id=ProgramId("p"), verdict=Verdict(verdict=kind)),
            ):
                writer.append(event, stack.handle(event))
        human = Verdict(verdict=VerdictKind.PASS, verifier="human", is_correction=True)
        corrected = VerdictArrived(at_s=3.0, program_id=ProgramId("p"), verdict=human)
        writer.append(corrected, stack.handle(corrected))
    explanation = why(tmp_path / "j", "p")
    assert [(credit.model, credit.success) for credit in explanation.credits] == [("small", 0.0), ("large", 1.0)]
    assert [credit.cost_usd for credit in explanation.credits] == pytest.approx([0.001, 0.002])
    assert (explanation.success, explanation.n_corrections) == (1.0, 1)
    text = render_why(explanation)
    assert "credit of decision 1 (small): success 0, cost $0.001" in text
    assert "credit of decision 2 (large): success 1, cost $0.002" in text and "corrected 1 time" in text
    assert all(decision.is_taken for decision in explanation.decisions) and "nothing ran under it" not in text


def test_why_marks_a_further_attempt_that_nobody_took(tmp_path: Path) -> None:
    """Offered after a fail and withdrawn by a person's word: the decision is shown, and that nothing ran under it."""
    config = parse_config(
        {
            "models": {name: {"usd_per_million": {"input": 1.0}} for name in ("small", "large")},
            "backends": [{"name": f"b-{name}", "model": name, "engine": "emulator"} for name in ("small", "large")],
            "router": {"policy": {"name": "fixed", "candidate": "small"}, "escalation": {"optimism": 9.0}},
        }
    )
    stack, turn_id, program_id = open_stack(config, 0), TurnId(1), ProgramId("p")
    completed = AttemptOutcome.COMPLETED
    right = Verdict(verdict=VerdictKind.PASS, verifier="human")
    with JournalWriter(tmp_path / "j", make_header(msgspec.to_builtins(config), seed=0, host="sim")) as writer:
        for event in (
            TurnArrived(at_s=1.0, turn_id=turn_id, program_id=program_id, is_final=True),
            AttemptEnded(at_s=1.0, turn_id=turn_id, attempt=1, outcome=completed, usage=Usage(prompt_tokens=1000)),
            VerdictArrived(at_s=1.0, program_id=program_id, verdict=Verdict(verdict=VerdictKind.FAIL)),
            VerdictArrived(at_s=2.0, program_id=program_id, verdict=right),
        ):
            writer.append(event, stack.handle(event))
    explanation = why(tmp_path / "j", "p")
    assert [(one.chosen, one.reason, one.is_taken) for one in explanation.decisions][1:] == [
        ("large", "escalation", False)
    ]
    assert explanation.decisions[0].is_taken
    assert render_why(explanation).count("nothing ran under it") == 1
