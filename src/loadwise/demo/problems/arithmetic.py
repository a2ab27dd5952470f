"""Arithmetic, from one sum to a bill with several steps. Every answer is exact."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from loadwise.demo.calculator import show
from loadwise.demo.luck import Luck
from loadwise.demo.task import Problem


def _number(statement: str, value: Fraction | int, *steps: str, units: tuple[str, ...] = ()) -> Problem:
    answer = show(Fraction(value))
    return Problem(statement=statement, answer=answer, kind="number", units=units, steps=steps)


def one_sum(luck: Luck) -> Problem:
    """Level 1: a + b, small enough for the smallest real models."""
    a, b = luck.integer(2, 39), luck.integer(2, 39)
    question = luck.pick((f"What is {a} + {b}?", f"How much is {a} + {b}?", f"Add {a} and {b}."))
    return _number(question, a + b, f"{a} + {b}")


def product_and_sum(luck: Luck) -> Problem:
    """Level 2: a * b + c."""
    a, b, c = luck.integer(12, 99), luck.integer(3, 19), luck.integer(10, 199)
    return _number(f"What is {a} * {b} + {c}?", a * b + c, f"{a} * {b} + {c}")


def brackets(luck: Luck) -> Problem:
    """Level 3: (a + b) * c - d."""
    a, b = luck.integer(21, 198), luck.integer(21, 198)
    c, d = luck.integer(6, 39), luck.integer(101, 999)
    return _number(f"Compute ({a} + {b}) * {c} - {d}.", (a + b) * c - d, f"{a} + {b}", f"({a} + {b}) * {c} - {d}")


def bill(luck: Luck) -> Problem:
    """Level 4: a bill with a discount and a fee, exact in cents."""
    boxes, each, cents = luck.integer(3, 29), luck.integer(4, 24), 5 * luck.integer(25, 399)
    percent, fee = 5 * luck.integer(1, 9), luck.integer(3, 25)
    price = Fraction(cents, 100)
    goods = f"{boxes} * {each} * {float(price):.2f}"
    total = boxes * each * price * (100 - percent) / 100 + fee
    # The exact total is kept, so that either way of rounding half a cent is right.
    return Problem(
        statement=(
            f"A shop orders {boxes} boxes with {each} lamps each. A lamp costs {float(price):.2f} dollars. "
            f"The seller takes {percent} % off the price of the lamps and then adds {fee} dollars for "
            "delivery. How many dollars does the order cost? Round to two decimals."
        ),
        answer=show(total),
        kind="number",
        tolerance=0.0051,
        units=("dollars", "dollar", "usd"),
        steps=(goods, f"{goods} * (100 - {percent}) / 100 + {fee}"),
    )


def long_chain(luck: Luck) -> Problem:
    """Level 5: ((a^2 - b) * c + d) / e, which divides evenly."""
    a, b, c = luck.integer(13, 47), luck.integer(20, 160), luck.integer(7, 29)
    e = luck.integer(3, 17)
    d = luck.integer(100, 900)
    d += -((a * a - b) * c + d) % e
    top = f"({a}^2 - {b}) * {c} + {d}"
    value = Fraction((a * a - b) * c + d, e)
    return _number(f"Compute (({a}^2 - {b}) * {c} + {d}) / {e}.", value, top, f"({top}) / {e}")


PROBLEMS: tuple[Callable[[Luck], Problem], ...] = (one_sum, product_and_sum, brackets, bill, long_chain)
