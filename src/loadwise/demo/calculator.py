"""The calculator tool: exact arithmetic on text that a model wrote, without `eval`.

Grammar, loosest first (power binds to the right and tighter than a sign, as on paper: -2^2 = -4):

    sum     = product { ("+" | "-") product }
    product = signed { ("*" | "/") signed }
    signed  = ("+" | "-") signed | power
    power   = atom [ ("^" | "**") signed ]
    atom    = number | "(" sum ")"

Every size is bounded, because the text comes from a model: length, depth, exponent and the bits of every
intermediate result. Values are fractions, so the order of operations never costs accuracy.
"""

from __future__ import annotations

import re
from fractions import Fraction

TEXT_MAX_CHARACTERS = 400
DEPTH_MAX = 40
EXPONENT_MAX = 64
VALUE_MAX_BITS = 2048

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<sign>\*\*|[-+*/^()]))")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class CalculatorError(ValueError):
    """The expression cannot be evaluated; the message is what the model is told."""


def evaluate(expression: str) -> Fraction:
    """Evaluate an arithmetic expression exactly.

    Raises:
        CalculatorError: not an expression, division by zero, or over a limit; names what and where.

    >>> evaluate("(17 + 4) * 3 - 2^3")
    Fraction(55, 1)
    """
    if len(expression) > TEXT_MAX_CHARACTERS:
        raise CalculatorError(f"expression has {len(expression)} characters, the limit is {TEXT_MAX_CHARACTERS}")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.sum(0)
    parser.expect_end()
    return value


def show(value: Fraction) -> str:
    """Write a value as an integer, or as a decimal of at most ten places."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**10)
    whole, part = divmod(abs(scaled), 10**10)
    digits = f"{part:010d}".rstrip("0")
    return f"{'-' if scaled < 0 else ''}{whole}{'.' + digits if digits else ''}"


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise CalculatorError(f"unexpected {text[at:].lstrip()[:12]!r}; use numbers and + - * / ^ ( )")
        tokens.append(match["number"] or match["sign"])
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def expect_end(self) -> None:
        if self._peek():
            raise CalculatorError(f"unexpected {self._peek()!r} after the expression")

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._peek() in ("+", "-"):
            sign, right = self._take(), self._product(depth)
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self._peek() in ("*", "/"):
            sign, right = self._take(), self._signed(depth)
            if sign == "/" and right == 0:
                raise CalculatorError("division by zero")
            value = _bounded(value * right if sign == "*" else value / right)
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > DEPTH_MAX:
            raise CalculatorError(f"nested deeper than {DEPTH_MAX} levels")
        if self._peek() in ("+", "-"):
            sign, value = self._take(), self._signed(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self._peek() not in ("^", "**"):
            return base
        self._take()
        return _power(base, self._signed(depth + 1))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise CalculatorError("a closing parenthesis is missing")
            return value
        if not token or token in "+-*/^**()":
            raise CalculatorError(f"a number is missing before {token!r}" if token else "the expression ends too early")
        return _bounded(Fraction(token))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > EXPONENT_MAX:
        raise CalculatorError(f"exponent {show(exponent)[:20]} is not a whole number within ±{EXPONENT_MAX}")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    # The result has at most |exponent| times the base's bits: refuse before computing it.
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > 2 * VALUE_MAX_BITS:
        raise CalculatorError(f"the power has more than {VALUE_MAX_BITS} bits")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > VALUE_MAX_BITS:
        raise CalculatorError(f"a value has more than {VALUE_MAX_BITS} bits")
    return value
