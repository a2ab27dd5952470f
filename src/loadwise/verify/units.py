"""Units behind a number, as far as school problems name them. What is not known here is compared as a word."""

import re
from fractions import Fraction
from typing import NamedTuple

_POWER = r"(?:\s{0,8}\^\s{0,8}\{?(?P<power>[23])\}?)?$"
_DRESSED = re.compile(
    r"^(?P<text>.{0,900}?[0-9})!])\s{0,8}\\(?:text|textrm|mathrm|mbox)"
    r"\{\s{0,8}(?P<unit>[A-Za-zµ/.^ 0-9-]{1,40})\s{0,8}\}" + _POWER,
    re.DOTALL,
)
_BARE = re.compile(r"^(?P<text>.{0,900}?[0-9})!])\s{0,8}(?P<unit>[A-Za-z]{2,20})" + _POWER, re.DOTALL)
"""Single letters are no units here: 5m may be five times m."""

_SCALES: dict[str, dict[str, Fraction | int]] = {
    "length": {"m meter metre": 1, "km kilometer kilometre": 1000, "cm centimeter centimetre": Fraction(1, 100)},
    "mass": {"g gram": 1, "kg kilogram": 1000, "mg milligram": Fraction(1, 1000)},
    "volume": {"l liter litre": 1, "ml milliliter millilitre": Fraction(1, 1000)},
    "time": {"s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86400, "week": 604800},
    "us length": {"in inch inche": 1, "ft foot feet": 12, "yd yard": 36, "mi mile": 63360},
    "money": {"cent": Fraction(1, 100), "dollar": 1},
}
_SCALES["length"]["mm millimeter millimetre"] = Fraction(1, 1000)
_KNOWN = {
    name: (dimension, Fraction(factor))
    for dimension, scales in _SCALES.items()
    for names, factor in scales.items()
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "^2": 2, "^3": 3}


class Quantity(NamedTuple):
    """A number's text and its unit: `text` times `factor` base units of `dimension`."""

    text: str
    unit: str = ""
    dimension: tuple[str, int] = ("", 1)
    factor: Fraction = Fraction(1)

    def bare(self) -> "Quantity":
        """The number alone."""
        return Quantity(self.text)

    def scaled(self) -> str:
        """The expression in base units."""
        if self.factor == 1:
            return self.text
        return rf"({self.text})\cdot\frac{{{self.factor.numerator}}}{{{self.factor.denominator}}}"


def split_unit(expression: str) -> Quantity:
    """Take a trailing unit off an expression; without one the expression stays whole.

    >>> split_unit(r"5\\text{ cm}^2").dimension
    ('length', 2)
    >>> split_unit("2x").unit
    ''
    """
    match = _DRESSED.match(expression)
    if match is None:
        match = _BARE.match(expression)
        if match is None or _known(match["unit"].lower()) is None:
            return Quantity(expression)
    power = int(match["power"] or 1)
    kept: list[str] = []
    for part in match["unit"].lower().replace("^", " ^").replace(".", " ").split():
        if part in _POWERS:
            power = _POWERS[part]
        else:
            kept.append(part)
    unit = " ".join(kept)
    if not unit or unit in ("or", "and"):
        return Quantity(expression)
    dimension, factor = _known(unit) or (unit.rstrip("s"), Fraction(1))
    return Quantity(match["text"].strip(), unit, (dimension, power), factor**power)


def _known(unit: str) -> tuple[str, Fraction] | None:
    return _KNOWN.get(unit) or (_KNOWN.get(unit[:-1]) if unit.endswith("s") and len(unit) > 3 else None)
