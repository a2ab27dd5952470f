"""The calculator tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.calculator import DEPTH_MAX, CalculatorError, evaluate, show

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def by_syntax_tree(text: str) -> Fraction:
    """Evaluate by Python's own grammar, as an independent reading of the same text."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, ast.Pow(), right):
                return Fraction(value(left) ** int(value(right)))
            case ast.BinOp(left, op, right):
                return _BINARY[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.UnaryOp(_, operand):
                return value(operand)
            case ast.Constant(number):
                return Fraction(str(number))
        raise AssertionError(ast.dump(node))

    return value(ast.parse(text, mode="eval").body)


numbers = st.one_of(st.integers(0, 999).map(str), st.decimals(0, 99, places=2, allow_nan=False).map(lambda d: f"{d:f}"))
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        st.tuples(inner, st.integers(0, 3)).map(lambda t: f"({t[0]}) ** {t[1]}"),
    ),
    max_leaves=8,
)


@given(expressions)
def test_agrees_with_the_grammar_of_python(text: str) -> None:
    """Precedence, associativity and signs are those of Python, with exact values."""
    try:
        expected = by_syntax_tree(text)
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == expected


@given(st.text(max_size=60) | st.text(alphabet="0123456789.+-*/^() ", max_size=60))
def test_any_text_gives_a_value_or_a_calculator_error(text: str) -> None:
    """Whatever a model writes, nothing but CalculatorError comes out."""
    try:
        assert isinstance(evaluate(text), Fraction)
    except CalculatorError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        ("2 +", "ends too early"),
        ("2 2", "after the expression"),
        ("(2", "closing parenthesis"),
        ("2)", "after the expression"),
        ("* 2", "number is missing"),
        ("1 / (2 - 2)", "division by zero"),
        ("0 ^ -1", "division by zero"),
        ("2 ^ 0.5", "not a whole number"),
        ("2 ^ 65", "not a whole number"),
        ("9^9^9", "not a whole number"),
        ("((((9^64)^64)^64)^64)", "bits"),
        ("(" * (DEPTH_MAX + 2) + "1" + ")" * (DEPTH_MAX + 2), "nested deeper"),
        ("-" * 300 + "1", "nested deeper"),
        ("1+" * 400 + "1", "the limit is 400"),
        ("__import__('os')", "unexpected"),
        ("1e9", "unexpected"),
        ("٣ + 1", "unexpected"),
    ],
)
def test_refusals_name_their_reason(text: str, why: str) -> None:
    """Every limit and every mistake has a message that the model can act on."""
    with pytest.raises(CalculatorError, match=why):
        evaluate(text)


def test_typographic_signs_are_read() -> None:
    """Models write × ÷ and a real minus."""
    assert evaluate("6 × 7 ÷ 2 − 1") == 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(12), "12"),
        (Fraction(-7, 2), "-3.5"),
        (Fraction(1, 3), "0.3333333333"),
        (Fraction(-1, 10**12), "0"),
        (Fraction(2, 3), "0.6666666667"),
    ],
)
def test_values_are_shown_plainly(value: Fraction, text: str) -> None:
    """No exponents, no trailing zeros, no minus zero."""
    assert show(value) == text
