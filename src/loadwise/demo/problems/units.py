"""Unit conversion. The prompt states every factor, so knowledge of units is not what is asked.

Exact values are kept and accepted within 0.01: that covers rounding at the end and a rounded step on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from loadwise.demo.calculator import evaluate, show
from loadwise.demo.luck import Luck
from loadwise.demo.task import Problem


def _converted(statement: str, value: Fraction, units: tuple[str, ...], *steps: str) -> Problem:
    assert evaluate(steps[-1]) == value, "the calculator's route must lead to the answer"
    return Problem(
        statement=f"{statement} Round to two decimals if needed.",
        answer=show(value),
        kind="number",
        tolerance=0.0101,
        units=units,
        steps=steps,
    )


def metric(luck: Luck) -> Problem:
    """Level 1: a whole number times a hundred or a thousand."""
    n = luck.integer(2, 999)
    big, small, factor, names = luck.pick(
        (
            ("kilometres", "metres", 1000, ("metres", "metre", "meters", "meter", "m")),
            ("kilograms", "grams", 1000, ("grams", "gram", "g")),
            ("litres", "millilitres", 1000, ("millilitres", "millilitre", "milliliters", "milliliter", "ml")),
            ("metres", "centimetres", 100, ("centimetres", "centimetre", "centimeters", "centimeter", "cm")),
        )
    )
    return _converted(
        f"Convert {n} {big} to {small} (a {big[:-1]} has {factor} {small}).",
        Fraction(n * factor),
        names,
        f"{n} * {factor}",
    )


def length(luck: Luck) -> Problem:
    """Level 2: one decimal factor."""
    n = luck.integer(101, 9999)
    if luck.pick(("inch", "mile")) == "inch":
        return _converted(
            f"Convert {n} inches to centimetres (1 inch = 2.54 cm).",
            n * Fraction("2.54"),
            ("centimetres", "centimetre", "centimeters", "centimeter", "cm"),
            f"{n} * 2.54",
        )
    return _converted(
        f"Convert {n} miles to kilometres (1 mile = 1.609 km).",
        n * Fraction("1.609"),
        ("kilometres", "kilometre", "kilometers", "kilometer", "km"),
        f"{n} * 1.609",
    )


def temperature(luck: Luck) -> Problem:
    """Level 3: a factor and an offset, either way."""
    n = luck.integer(-400, 4000)
    amount = f"{'-' if n < 0 else ''}{abs(n) // 10}.{abs(n) % 10}"
    if luck.pick(("to_f", "to_c")) == "to_f":
        return _converted(
            f"Convert {amount} degrees Celsius to degrees Fahrenheit (F = C * 9 / 5 + 32).",
            Fraction(n, 10) * 9 / 5 + 32,
            ("degrees fahrenheit", "fahrenheit", "degrees", "°f", "f"),
            f"({amount}) * 9 / 5 + 32",
        )
    return _converted(
        f"Convert {amount} degrees Fahrenheit to degrees Celsius (C = (F - 32) * 5 / 9).",
        (Fraction(n, 10) - 32) * 5 / 9,
        ("degrees celsius", "celsius", "degrees", "°c", "c"),
        f"({amount}) - 32",
        f"(({amount}) - 32) * 5 / 9",
    )


def speed(luck: Luck) -> Problem:
    """Level 4: two units at once."""
    n = luck.integer(105, 2995)
    amount = f"{n // 10}.{n % 10}"
    if luck.pick(("to_ms", "to_kmh")) == "to_ms":
        return _converted(
            f"A train runs at {amount} km/h. How many m/s is that (1 km = 1000 m, 1 h = 3600 s)?",
            Fraction(n, 10) * 1000 / 3600,
            ("metres per second", "meters per second", "m/s"),
            f"{amount} * 1000",
            f"{amount} * 1000 / 3600",
        )
    return _converted(
        f"A boat makes {amount} metres a minute. How many km/h is that (1 km = 1000 m, 1 h = 60 min)?",
        Fraction(n, 10) * 60 / 1000,
        ("kilometres per hour", "kilometers per hour", "km/h"),
        f"{amount} * 60",
        f"{amount} * 60 / 1000",
    )


def fuel(luck: Luck) -> Problem:
    """Level 5: a chain of three conversions with a price at its end."""
    miles, tenths, cents = luck.integer(80, 900), luck.integer(42, 119), luck.integer(310, 520)
    per_100, price = f"{tenths // 10}.{tenths % 10}", f"{cents // 100}.{cents % 100:02d}"
    litres = f"{miles} * 1.609 * {per_100} / 100"
    return _converted(
        f"A car drives {miles} miles and uses {per_100} litres per 100 km. Fuel costs {price} dollars per US "
        "gallon. How many dollars does the fuel cost (1 mile = 1.609 km, 1 US gallon = 3.785 litres)?",
        miles * Fraction("1.609") * Fraction(tenths, 1000) / Fraction("3.785") * Fraction(cents, 100),
        ("dollars", "dollar", "usd"),
        litres,
        f"{litres} / 3.785 * {price}",
    )


PROBLEMS: tuple[Callable[[Luck], Problem], ...] = (metric, length, temperature, speed, fuel)
