"""The grader: lenient about dress, strict about the value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.grade import TEXT_TAIL_CHARACTERS, answer_line, grade
from loadwise.demo.script import right_answer
from loadwise.demo.task import Kind, Task
from loadwise.demo.tasks import generate_tasks

STREAM = generate_tasks(400, 3)


def task(answer: str, kind: Kind = "number", tolerance: float = 0.0, units: tuple[str, ...] = ()) -> Task:
    return Task(
        task_id="t",
        family="units",
        difficulty=1,
        prompt="p",
        answer=answer,
        kind=kind,
        tolerance=tolerance,
        units=units,
    )


NUMBER = task("1234.5", tolerance=0.01, units=("cm", "centimetres"))
WHOLE = task("288")
DATE = task("2024-02-29", kind="date")
WORD = task("vopif", kind="text")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (NUMBER, "Answer: 1234.5"),
        (NUMBER, "Let me see.\nAnswer: 1,234.50 cm."),
        (NUMBER, "**Answer:** 1234.49 centimetres"),
        (NUMBER, "Answer: $\\boxed{1234.5}$"),
        (NUMBER, "Answer: `1234.5` CM"),
        (NUMBER, "the final answer : +1234.5"),
        (NUMBER, "Answer: 2469/2"),
        (NUMBER, "Answer: 1000 + 234.5 = 1234.5 cm"),
        (NUMBER, "Answer: 7\nNo, wait.\nAnswer: 1234.5"),
        (NUMBER, "Answer:\n\n1234.5"),
        (NUMBER, "ANSWER= ≈ 1234.5"),
        (task("-3"), "Answer: −3"),
        (DATE, "Answer: 2024-02-29."),
        (DATE, "Answer: **2024-02-29**"),
        (WORD, 'answer: "VOPIF"'),
        (WORD, "Answer: v o p i f"),
        (WORD, "Answer: 'vopif'."),
    ],
)
def test_a_right_answer_passes_in_any_dress(problem: Task, text: str) -> None:
    """Commas, units, currency, markup, case, space and an equation do not matter."""
    assert grade(problem, text).verdict == "pass", grade(problem, text)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (WHOLE, ""),
        (WHOLE, "288"),
        (WHOLE, "The answer is 288"),
        (WHOLE, "Answer:"),
        (WHOLE, "Answer: <value>"),
        (WHOLE, "Answer: 288\nAnswer: 289"),
        (WHOLE, "Answer: 287 or 288"),
        (WHOLE, "Answer: 288, 289"),
        (WHOLE, "Answer: " + " ".join(map(str, range(400)))),
        (WHOLE, "Answer: 2*88"),
        (WHOLE, "Answer: 2**88"),
        (WHOLE, "Answer: 2_88"),
        (WHOLE, "Answer: \\boxed{2}\\boxed{88}"),
        (WHOLE, "Answer: 28,8"),
        (WHOLE, "Answer: 2e2"),
        (WHOLE, "Answer: NaN"),
        (WHOLE, "Answer: inf"),
        (WHOLE, "Answer: 288/0"),
        (WHOLE, "Answer: 288 apples"),
        (WHOLE, "Answer: ２８８"),
        (WHOLE, "Answer: 28⁸"),
        (WHOLE, "Answer: 288.0000000001"),
        (WHOLE, "Answer: " + "9" * 100_000),
        (WHOLE, "Answer: 288" + "9" * 300),
        (WHOLE, "Answer: 288\n" + "x" * TEXT_TAIL_CHARACTERS),
        (NUMBER, "Answer: 1234.52"),
        (NUMBER, "Answer: 1234.5 km"),
        (NUMBER, "Answer: -1234.5"),
        (DATE, "Answer: 2023-02-29"),
        (DATE, "Answer: 29.2.2024"),
        (DATE, "Answer: 2024-02-29 or 2024-03-01"),
        (DATE, "Answer: 2024-02-2９"),
        (WORD, "Answer: vopif vopit"),
        (WORD, "Answer: vopi"),
        (task("Monday", kind="text"), "Answer: Monday Tuesday Wednesday"),
        (WORD, "Answer: \x00vopif\x00\ud800"),
    ],
)
def test_anything_else_fails_with_a_reason(problem: Task, text: str) -> None:
    """Unreadable, ambiguous, wrong and hostile texts fail, and the explanation is short."""
    result = grade(problem, text)
    assert result.verdict == "fail"
    assert 0 < len(result.explanation) < 300


@given(st.sampled_from(STREAM), st.text(max_size=200))
def test_arbitrary_text_never_raises_or_passes(problem: Task, text: str) -> None:
    """Text that does not hold the answer's characters cannot pass, and no text raises."""
    result = grade(problem, f"Answer: {text}")
    if problem.answer[:1].lower() not in text.lower() and problem.kind != "number":
        assert result.verdict == "fail"


@given(st.sampled_from(STREAM), st.text(max_size=80).filter(lambda t: "nswer" not in t.lower()))
def test_words_before_the_answer_do_not_matter(problem: Task, chatter: str) -> None:
    """The right answer passes after any talk, and a later wrong one overrules it."""
    text = f"{chatter}\nAnswer: {right_answer(problem)}"
    assert grade(problem, text).verdict == "pass"
    assert grade(problem, f"{text}\nAnswer: nonsense").verdict == "fail"


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_are_compared_exactly(wanted: int, found: int) -> None:
    """Without a tolerance only the same number passes, however it is grouped."""
    for form in (f"{found}", f"{found:,}", f"{found}.00"):
        assert (grade(task(str(wanted)), f"Answer: {form}").verdict == "pass") == (wanted == found)


def test_the_prompt_itself_is_no_answer() -> None:
    """A model that repeats its prompt fails."""
    for problem in STREAM:
        assert grade(problem, problem.prompt).verdict == "fail"


def test_the_line_is_read_without_markup() -> None:
    """What the grader compares is what a person would read."""
    assert answer_line("ANSWER: **42** cm.\n\nGlad to help!") == "42 cm"
    assert answer_line("no such line") is None
