"""Mathematics: forms of one value, units, hedges, and expressions that would take for ever."""

import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import Compute, Finding, FindingStatus
from loadwise.verify.mathematics import unbounded
from loadwise.verify.units import split_unit
from tests.verify.carry import asked, judged, told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN


def case(answer: str, reference: str) -> Case:
    """An answer beside what would be right."""
    return Case(answer=answer, references={"reference": reference})


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", PASS),
        (r"\boxed{\dfrac{2}{4}}", r"\frac{1}{2}", PASS),
        (r"so $x = \boxed{1{,}234}$", "1234", PASS),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", PASS),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", PASS),
        (r"\boxed{[0,1)}", "[0,1)", PASS),
        (r"\boxed{\left[0, 1\right)}", "[0,1)", PASS),
        (r"\boxed{[0,1]}", "[0,1)", FAIL),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", PASS),
        (r"\boxed{(2,1)}", "(1,2)", FAIL),
        (r"\boxed{10\%}", "0.1", PASS),
        (r"\boxed{5\text{ cm}}", "5", PASS),
        (r"\boxed{5}", r"5\text{ cm}", PASS),
        (r"\boxed{50\text{ mm}}", r"5\text{ cm}", PASS),
        (r"\boxed{5\text{ m}}", r"5\text{ cm}", FAIL),
        (r"\boxed{5\text{ cm}^2}", r"5\text{ cm}", FAIL),
        (r"\boxed{5\text{ square cm}}", r"5\text{ cm}^2", PASS),
        (r"\boxed{5\text{ apples}}", r"5\text{ pears}", FAIL),
        (r"\boxed{\frac{\sqrt{3}}{2}\text{ km}}", r"500\sqrt{3}\text{ m}", PASS),
        ("Answer: 3/4", "0.75", PASS),
        ("Answer: $\\frac34$.", "0.75", PASS),
        (r"first \boxed{3}, then \boxed{4}", "4", PASS),
        (r"first \boxed{4}, then \boxed{3}", "4", FAIL),
        (r"\boxed{5 \text{ or } 6}", "6", FAIL),
        (r"\boxed{5 or 6}", "6", FAIL),
        (r"\boxed{5, 6}", "6", FAIL),
        (r"\boxed{7}", "6", FAIL),
        (r"\boxed{}", "6", FAIL),
        ("", "6", FAIL),
        (r"\boxed{\text{no idea}}", "6", FAIL),
        (r"\boxed{0.333}", r"\frac{1}{3}", FAIL),
        (r"\boxed{\frac{1}{0}}", "0", FAIL),
        (r"\boxed{\infty}", "5", FAIL),
        (r"\boxed{-\infty}", r"-\infty", PASS),
        ("5", "", ABSTAIN),
        (r"\boxed{\begin{pmatrix} 1/2 \\ -1 \end{pmatrix}}", r"\begin{pmatrix} 0.5 \\ -1 \end{pmatrix}", PASS),
        (r"\boxed{\begin{pmatrix} 1/2 \\ 1 \end{pmatrix}}", r"\begin{pmatrix} 0.5 \\ -1 \end{pmatrix}", FAIL),
        (r"\boxed{4}", r"\begin{pmatrix} 0.5 \\ -1 \end{pmatrix}", FAIL),
        (r"\boxed{1 1/2}", "1", FAIL),
        (r"\boxed{1 1/2}", "5.5", FAIL),
        (r"\boxed{1 1/2}", r"\frac{3}{2}", PASS),
        (r"\boxed{-1 1/2}", r"-\frac{3}{2}", PASS),
        (r"\boxed{4 2}", "4", FAIL),
        (r"\boxed{4 2}", "42", FAIL),
        (r"\boxed{1 000 000}", "10^6", PASS),
        ("Answer: sqrt(2)/2", r"\frac{\sqrt{2}}{2}", PASS),
        ("Answer: √(1+1)/2", r"\frac{\sqrt{2}}{2}", PASS),
        ("Answer: √2/2", r"\frac{1}{\sqrt{2}}", PASS),
        ("Answer: pi/4", r"\frac{\pi}{4}", PASS),
        ("Answer: 2π", r"2\pi", PASS),
        ("Answer: sin(pi/6)", "0.5", PASS),
        ("Answer: x**2 - 1", "(x-1)(x+1)", PASS),
        ("Answer: 1e-3", "0.001", PASS),
        ("Answer: 1.5e-3", "0.0015", PASS),
        ("Answer: ½", "0.5", PASS),
        ("Answer: 90°", r"90^\circ", PASS),
        ("Answer: (-∞, 3]", r"(-\infty, 3]", PASS),
        (r"\boxed{\$18.9}", r"\$18.90", PASS),
        (r"\boxed{18.90}", r"\$18.90", PASS),
        (r"\boxed{3}", r"\$0.50", FAIL),
        (r"\boxed{x \rightarrow 3}", "3", FAIL),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", PASS),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", PASS),
        (r"\boxed{\text{Briana}}", r"\text{Evelyn}", FAIL),
        (r"\boxed{12}", r"\text{Evelyn}", FAIL),
        (r"\boxed{5}", r"\boxed{5} is it", PASS),
    ],
)
def test_expressions(answer: str, reference: str, verdict: VerdictKind) -> None:
    """Equal values pass in any form; hedges, other units and other values fail."""
    found = judged(verifier("math"), case(answer, reference))
    assert found.verdict is verdict, found.explanation


@pytest.mark.parametrize(
    "expression",
    [
        "10^{10^{10}}",
        "10**10**10",
        "2^{99999}",
        "9^(9^(9^9))",
        "99999!",
        "(((5)!)!)!",
        "3!!",
        "9" * 101,
        "(" * 25 + "1" + ")" * 25,
        "[" * 100_000,
        "x+" * 600 + "x",
    ],
)
def test_what_would_take_for_ever_fails_at_once(expression: str) -> None:
    """No check is asked for, and the verdict says why."""
    assert unbounded(expression)
    found = told(verifier("math"), case("\\boxed{" + expression + "}", "5"))
    assert found.verdict is FAIL
    wanted = told(verifier("math"), case("5", expression))
    assert wanted.verdict is ABSTAIN


def test_such_an_expression_still_equals_itself() -> None:
    """Equal texts need no computing."""
    assert told(verifier("math"), case(r"\boxed{10^{10^{10}}}", "10^{10^{10}}")).verdict is PASS


def test_plain_numbers_need_no_worker() -> None:
    """Rational numbers are compared here."""
    assert told(verifier("math"), case(r"\boxed{7}", "8")).verdict is FAIL
    assert told(verifier("math"), case(r"\boxed{\frac{3}{4}}", "0.75")).verdict is PASS


def test_the_computation_is_bounded_and_its_troubles_abstain() -> None:
    """A worker that is late, broken or talks nonsense gives no zero."""
    math = verifier("math")
    hard = case(r"\boxed{\sqrt{2}}", r"\sqrt{3}")
    wanted = asked(math, hard)
    assert isinstance(wanted.check, Compute) and wanted.check.wall_s <= 10
    for finding in (
        Finding(status=FindingStatus.TIMEOUT, reason="5 s"),
        Finding(status=FindingStatus.ERROR),
        Finding(value=None),
        Finding(value={"equal": "yes", "reference_read": True, "answer_read": True}),
        Finding(value={"equal": True, "reference_read": False, "answer_read": True}),
    ):
        step = math.resume(hard, wanted.state, finding)
        assert getattr(step, "verdict", None) is ABSTAIN


def test_units_can_be_switched_off() -> None:
    """Then the numbers alone are compared."""
    assert judged(verifier("math", units=False), case(r"\boxed{5\text{ m}}", r"5\text{ cm}")).verdict is PASS
    with pytest.raises(ConfigError, match="float_digits is 16"):
        verifier("math", float_digits=16)


@pytest.mark.parametrize("expression", ["2x", "5m", r"\sin", "xyz", "3 pi", r"\text{cm}", "", "x" * 2000])
def test_what_is_no_unit_stays(expression: str) -> None:
    """Variables and functions are not taken for units."""
    assert split_unit(expression).text == expression
