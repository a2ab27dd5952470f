"""Exact text, multiple choice and numbers: right, wrong, unparsable, hedged."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.reading import ascii_digits, boxed, final_answer, folded
from tests.verify.carry import told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN


def case(answer: str, reference: str, **more: str) -> Case:
    """An answer beside what would be right."""
    return Case(answer=answer, references={"reference": reference, **more})


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("Paris", "Paris", PASS),
        ("It is the capital.\n\n**Answer:** paris.", "Paris", PASS),
        ("The answer is \\boxed{Paris}.", "paris", PASS),
        ("the   city of New  York", "new york", FAIL),
        ("New  York", "new york", PASS),
        ("Café", "Cafe\u0301", PASS),
        ("x²", "x2", FAIL),
        ("Rome", "Paris", FAIL),
        ("Paris or Rome", "Paris", FAIL),
        ("Answer: Rome\nAnswer: Paris", "Paris", PASS),
        ("Answer: Paris\nAnswer: Rome", "Paris", FAIL),
        ("", "Paris", FAIL),
        (" \n\t", "Paris", FAIL),
        ("Paris", " . ", ABSTAIN),
    ],
)
def test_exact(answer: str, reference: str, verdict: VerdictKind) -> None:
    """The final answer is compared, dress and case left out; an empty reference says nothing."""
    assert told(verifier("exact"), case(answer, reference)).verdict is verdict


def test_exact_keeps_case_and_punctuation_where_it_is_told_to() -> None:
    """The options make it stricter."""
    strict = verifier("exact", case_sensitive=True, punctuation=True)
    assert told(strict, case("Paris", "Paris")).verdict is PASS
    assert told(strict, case("paris", "Paris")).verdict is FAIL
    assert told(strict, case("Paris.", "Paris")).verdict is FAIL


def test_exact_takes_any_of_several_references() -> None:
    """A JSON list of alternatives; what is none is the task's fault, not the answer's."""
    several = verifier("exact", alternatives=True)
    assert told(several, case("NYC", '["New York", "NYC"]')).verdict is PASS
    assert told(several, case("LA", '["New York", "NYC"]')).verdict is FAIL
    for broken in ("New York", "[]", "[1]", "[" * 100_000):
        assert told(several, case("NYC", broken)).verdict is ABSTAIN


def test_without_a_reference_nobody_is_blamed() -> None:
    """No reference, no verdict."""
    for kind in ("exact", "choice", "numeric", "math"):
        assert told(verifier(kind), Case(answer="42")).verdict is ABSTAIN


def test_references_win_over_artefacts() -> None:
    """What the agent wrote beside its answer does not replace what the task says."""
    forged = Case(answer="Rome", artefacts={"reference": "Rome"}, references={"reference": "Paris"})
    assert told(verifier("exact"), forged).verdict is FAIL


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("B", PASS),
        ("(b)", PASS),
        ("B.", PASS),
        ("**B**", PASS),
        ("B) a dog", PASS),
        ("The correct answer is (B) because A is false.", PASS),
        ("the answer is option B", PASS),
        ("Answer: $\\boxed{\\text{B}}$", PASS),
        ("so \\boxed{B}", PASS),
        ("I first thought A.\nFinal answer: B", PASS),
        ("A", FAIL),
        ("A or B", FAIL),
        ("A B", FAIL),
        ("B A", FAIL),
        ("A B C D " * 9, FAIL),
        ("B or C", FAIL),
        ("(B), (C)", FAIL),
        ("Answer: B/C", FAIL),
        ("Answer: A, B, C and D", FAIL),
        ("Answer: not B", FAIL),
        ("A dog that barks", FAIL),
        ("B is right", PASS),
        ("b is right", PASS),
        ("A is right, B is wrong", FAIL),
        ("I choose B", PASS),
        ("It cannot be known.", FAIL),
        ("", FAIL),
        ("Z", FAIL),
        ("В", FAIL),  # a Cyrillic letter
    ],
)
def test_choice(answer: str, verdict: VerdictKind) -> None:
    """One letter, said clearly; several or none fail."""
    assert told(verifier("choice", choices=4), case(answer, "B")).verdict is verdict


@pytest.mark.parametrize(
    "answer", ["A is correct.", "Answer: A because of that", "The answer is A, as I said", "Option A."]
)
def test_the_letter_a_is_told_from_the_article(answer: str) -> None:
    """By the word that follows."""
    assert told(verifier("choice", choices=4), case(answer, "A")).verdict is PASS
    assert told(verifier("choice", choices=4), case("A dog is an animal", "A")).verdict is FAIL


def test_a_choice_may_be_said_by_its_text() -> None:
    """Where the texts are known, text and letter mean the same, in answer and reference."""
    by_text = verifier("choice")
    choices = '["a cat", "a dog", "A"]'
    assert told(by_text, case("Answer: A dog.", "B", choices=choices)).verdict is PASS
    assert told(by_text, case("B", "a dog", choices=choices)).verdict is PASS
    assert told(by_text, case("a cat", "B", choices=choices)).verdict is FAIL
    assert told(by_text, case("D", "B", choices=choices)).verdict is FAIL
    assert told(by_text, case("B", "D", choices=choices)).verdict is ABSTAIN
    assert told(by_text, case("B", "B", choices='["one"]')).verdict is ABSTAIN
    assert told(by_text, case("B", "B", choices="{")).verdict is ABSTAIN


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("42", "42", PASS),
        ("The total is 6*7 = 42.", "42", PASS),
        ("She has 42 apples left.", "42", PASS),
        ("Answer: $1,234.50", "1234.5", PASS),
        ("#### 1,234", "first 5*2=10\n#### 1234", PASS),
        ("\\boxed{\\frac{1}{2}}", "0.5", PASS),
        ("Answer: 1/2", "0.5", PASS),
        ("Answer: 3e2", "300", PASS),
        ("Answer: 1.5 \\times 10^{3}", "1500", PASS),
        ("Answer: -5", "-5", PASS),
        ("Answer: −5", "-5", PASS),
        ("Answer: 50%", "50", PASS),
        ("Answer: ٤٢", "42", PASS),
        ("Answer: ４２", "42", PASS),
        ("Answer: 3.5 million", "3500000", PASS),
        ("Answer: $2 billion", "2e9", PASS),
        ("So 3 apples and 5 pears make 8.", "8", PASS),
        ("Answer: 42, because 6*7 is that", "42", PASS),
        ("Answer: 12:30", "12", FAIL),
        ("Answer: 1 1/2", "1", FAIL),
        ("Answer: 5, 6", "5", FAIL),
        ("Answer: 5²", "52", FAIL),
        ("Answer: 43", "42", FAIL),
        ("Answer: 41 or 42", "42", FAIL),
        ("Answer: 42 or 41", "42", FAIL),
        ("Answer: 40-45", "42", FAIL),
        ("Answer: 4 2", "42", FAIL),
        ("Answer: 42abc7", "42", FAIL),
        ("I do not know.", "42", FAIL),
        ("", "42", FAIL),
        ("nan", "42", FAIL),
        ("inf", "42", FAIL),
        ("1e999999", "42", FAIL),
        ("Answer: " + "9" * 5000, "42", FAIL),
        ("Answer: 1/0", "0", FAIL),
        ("42", "nan", ABSTAIN),
        ("42", "Infinity", ABSTAIN),
        ("42", "1e999999", ABSTAIN),
        ("42", "many", ABSTAIN),
    ],
)
def test_numeric(answer: str, reference: str, verdict: VerdictKind) -> None:
    """One number, read exactly; hedges, overflows and words fail, and a reference that is no number abstains."""
    found = told(verifier("numeric"), case(answer, reference))
    assert found.verdict is verdict, found.explanation


def test_the_tolerance_is_exact_at_its_edge() -> None:
    """|answer − reference| = tolerance still passes, a hair beyond fails: no float blurs it."""
    near = verifier("numeric", absolute=0.5)
    assert told(near, case("10.5", "10")).verdict is PASS
    assert told(near, case("10.5000000000000000000001", "10")).verdict is FAIL
    share = verifier("numeric", relative_ratio=0.25)
    assert told(share, case("125", "100")).verdict is PASS
    assert told(share, case("125.0000000000000001", "100")).verdict is FAIL
    assert told(share, case("-75", "-100")).verdict is PASS


def test_percent_as_a_ratio_and_marked_answers() -> None:
    """Options of numeric: what a percent sign means, and whether a number must be marked."""
    assert told(verifier("numeric", percent="ratio"), case("50%", "0.5")).verdict is PASS
    assert told(verifier("numeric", percent="ratio"), case("50", "0.5")).verdict is FAIL
    marked = verifier("numeric", reads="marked")
    assert told(marked, case("it is 42", "42")).verdict is FAIL
    assert told(marked, case("Answer: 42", "42")).verdict is PASS


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fractions(), st.sampled_from(["Answer: {}", "\\boxed{{{}}}", "{}", "so it is {}"]))
def test_every_fraction_passes_as_itself_and_fails_as_its_neighbour(value: Fraction, form: str) -> None:
    """Reading and comparing lose nothing."""
    if len(str(value)) > 80:
        return
    numeric = verifier("numeric")
    assert told(numeric, case(form.format(value), str(value))).verdict is PASS
    assert told(numeric, case(form.format(value + Fraction(1, 10**9)), str(value))).verdict is FAIL


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("numeric", {"absolute": -1.0}, "absolute is -1.0; it must be in [0, 1e+300]"),
        ("numeric", {"absolute": float("nan")}, "absolute is nan"),
        ("numeric", {"percent": "both"}, "percent"),
        ("choice", {"choices": 1}, "choices is 1; it must be in [2, 26]"),
        ("choice", {"choices": "4"}, "choices"),
        ("exact", {"case": True}, "no option 'case'; it has alternatives, case_sensitive"),
    ],
)
def test_wrong_options_name_key_value_and_limit(kind: str, options: dict[str, object], says: str) -> None:
    """A pool file says what is wrong with it."""
    with pytest.raises(ConfigError) as error:
        verifier(kind, **options)
    assert says in error.value.message and repr(kind) in error.value.message


def test_boxes_nest_and_may_stay_open() -> None:
    """The last closed box counts; escaped braces are text, and a box without its end is none."""
    assert boxed(r"\boxed{\boxed{1}+1}") == ["1", r"\boxed{1}+1"]
    assert boxed(r"\boxed{\{1,2\}}") == [r"\{1,2\}"]
    assert boxed(r"\fbox{3} \boxed {4} \boxed{5") == ["3", "4"]
    assert boxed("\\boxed{" * 10_000) == []
    assert boxed("\\") == []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    """Reading never raises, and finds something in every text that is not blank."""
    found = final_answer(text)
    assert found is None or found.value
    folded(text)
    assert len(ascii_digits(text)) == len(text)
