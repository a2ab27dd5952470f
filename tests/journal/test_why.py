"""What `why` says of a choice."""

from collections.abc import Sequence

import pytest

from loadwise.journal.explanation import CandidateExplained, DecisionExplained, Explanation
from loadwise.journal.explanation_text import render_why


def explained(candidates: Sequence[CandidateExplained], chosen: str = "b", reason: str = "policy") -> Explanation:
    """A program with one decision."""
    decision = DecisionExplained(
        decision_id=1,
        sequence=1,
        at_s=0.0,
        policy="linucb",
        learner_version="l",
        context_version="c",
        context=(),
        chosen=chosen,
        reason=reason,
        candidates=tuple(candidates),
    )
    return Explanation(program_id="p", arrived_at_s=0.0, decisions=(decision,), n_turns=1)


def said(reason: str, scores: dict[str, float | None], chosen: str) -> str:
    """What is said of one decision."""
    candidates = [
        CandidateExplained(candidate=name, is_chosen=name == chosen, score=score) for name, score in scores.items()
    ]
    return render_why(explained(candidates, chosen, reason))


def test_an_explored_choice_is_called_so() -> None:
    """Whoever sees a lower score with the star is told that it is no mistake, and who scored higher."""
    assert "explored: b has the higher score" in said("policy", {"a": 0.1, "b": 0.4, "c": 0.3}, "a")


@pytest.mark.parametrize(
    ("reason", "scores", "chosen"),
    [
        ("policy", {"a": 0.1, "b": 0.4}, "b"),
        ("policy", {"a": 0.4 - 1e-12, "b": 0.4}, "a"),  # a tie, to the policy
        ("policy", {"a": None, "b": None}, "a"),
        ("policy", {}, "a"),
        ("pinned", {"a": 0.1, "b": 0.4}, "a"),
        ("divert", {"a": 0.1, "b": 0.4}, "a"),
    ],
)
def test_nothing_else_is_called_explored(reason: str, scores: dict[str, float | None], chosen: str) -> None:
    """The best score, a tie, no score at all, or a choice that was not the policy's."""
    assert "explored" not in said(reason, scores, chosen)


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        ({"wait_s": 77.8, "wait_low_s": 40.0, "wait_high_s": 130.0}, "b: wait 77.8 s (40 to 130), 0 running"),
        ({"wait_s": 77.8}, "b: wait 77.8 s, 0 running"),
        ({}, "b: 0 running"),
    ],
)
def test_a_forecast_wait_is_told_with_its_interval(wait: dict[str, float], text: str) -> None:
    """As far as it was recorded: an older journal has no interval, and a candidate may have no forecast."""
    candidate = CandidateExplained(candidate="b", is_chosen=True, **wait)
    assert text in render_why(explained([candidate]))
